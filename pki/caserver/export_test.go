package caserver

import "github.com/svidkit/svidkit/spiffe"

// ServeWithin is Serve with a limit on connections.
var ServeWithin = serve

// Bundle returns the bundle that the server serves.
func (s *Server) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return bundles{s.opts.CA}.Bundle(td)
}
