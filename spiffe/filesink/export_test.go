package filesink

// Status returns the state of s.
func (s *Sink) Status() status { return s.state() }
