package googlecas

// Remembered returns how many requests c remembers.
func Remembered(c *CA) int {
	c.ids.mu.Lock()
	defer c.ids.mu.Unlock()
	return len(c.ids.ids)
}
