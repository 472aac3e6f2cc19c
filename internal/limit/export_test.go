package limit

// Callers returns how many callers are remembered.
func (l *Limiter) Callers() int { return len(l.callers.index) }

// Waiting returns how many wait for a slot.
func (l *Limiter) Waiting() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.waiting.Len()
}
