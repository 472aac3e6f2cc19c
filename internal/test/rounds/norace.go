//go:build !race

package rounds

// Race says that the race detector is on, with which everything is slower and takes more memory.
const Race = false
