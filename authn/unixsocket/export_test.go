package unixsocket

// MaxPath is the longest path of a socket in bytes.
const MaxPath = maxPath

// CloseListener makes serving fail.
func (s *Server) CloseListener() error { return s.l.Close() }
