package athenz

// URI is uri.
func (s PodSubject) URI() string { return s.uri() }

// Check is check.
func (s PodSubject) Check() error { return s.check() }

// KeyOwner is keyOwner.
func (t *ServiceToken) KeyOwner() string { return t.keyOwner().String() }

// ParsePodSubject is parsePodSubject.
func ParsePodSubject(text string) (PodSubject, error) { return parsePodSubject(text) }
