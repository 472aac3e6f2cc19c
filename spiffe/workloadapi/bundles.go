package workloadapi

import "github.com/svidkit/svidkit/spiffe"

// Bundles returns all trust bundles, as they were published together: none before the first, and after the server has
// withdrawn them. The same set is returned until something changes.
func (s *Source) Bundles() *spiffe.BundleSet {
	if set := s.now().bundles; set != nil {
		return set
	}
	return noBundles
}

var noBundles = new(spiffe.BundleSet)
