package conns

// Usable returns how many of n descriptors are for accepted connections.
func Usable(n int) int { return usableOf(n) }

// CloseAll gives all connections back.
func (l *Listener) CloseAll() {
	for c := range l.held {
		l.Closed(c)
	}
}
