package athenz

// Check is check.
func (s PodSubject) Check() error { return s.check() }

// KeyOwner is keyOwner.
func (t *ServiceToken) KeyOwner() string { return t.keyOwner().String() }

// ParsePodSubject is parsePodSubject.
func ParsePodSubject(text string) (PodSubject, error) { return parsePodSubject(text) }
