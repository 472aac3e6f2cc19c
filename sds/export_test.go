package sds

// MaxPath is for tests.
const MaxPath = maxPath
