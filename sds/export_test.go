package sds

// MaxPath is the longest path of a socket in bytes, on Linux.
const MaxPath = 107
