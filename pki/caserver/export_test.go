package caserver

import "github.com/svidkit/svidkit/spiffe"

// Bundle returns the bundle that the server serves.
func (s *Server) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return bundles{s.opts.CA}.Bundle(td)
}
