package conns

// Usable returns how many of n descriptors are for accepted connections.
func Usable(n int) int { return usableOf(n) }
