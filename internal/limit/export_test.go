package limit

// Callers returns how many callers are remembered.
func (l *Limiter) Callers() int { return len(l.callers.index) }

// Slots returns how much room was made for them.
func (l *Limiter) Slots() int { return len(l.callers.slots) }

// Waiting returns how many wait for a slot.
func (l *Limiter) Waiting() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.waiting.Len()
}
