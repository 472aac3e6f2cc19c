package spiffe

// SVIDSource returns the current X.509-SVID. Code that needs an identity takes a source, so that it
// works with a fixed value ([*SVID] is a source of itself) and with an identity that is renewed. SVID
// must not block and must be safe for concurrent use.
type SVIDSource interface {
	SVID() (*SVID, error)
}

// BundleSource returns the current trust bundle of a trust domain, or an error that wraps
// [ErrUnknownTrustDomain]. A [*Bundle], a [*BundleSet] and a [*Snapshot] are sources. Bundle must not
// block and must be safe for concurrent use.
type BundleSource interface {
	Bundle(td TrustDomain) (*Bundle, error)
}

// Snapshot is an identity with its trust bundles, published together, so that a reader never sees a key with
// the chain of another certificate, or a chain without its roots. It never changes. It is an [SVIDSource] and a
// [BundleSource].
type Snapshot struct {
	svid    *SVID
	bundles *BundleSet
}

// NewSnapshot returns a Snapshot that shares both parts. It panics if one is nil.
func NewSnapshot(svid *SVID, bundles *BundleSet) *Snapshot {
	if svid == nil || bundles == nil {
		panic("spiffe: NewSnapshot needs an SVID and bundles")
	}
	return &Snapshot{svid: svid, bundles: bundles}
}

// SVID returns the identity. The error is always nil.
func (s *Snapshot) SVID() (*SVID, error) { return s.svid, nil }

// Bundle returns the trust bundle of td; see [BundleSource].
func (s *Snapshot) Bundle(td TrustDomain) (*Bundle, error) { return s.bundles.Bundle(td) }

// Bundles returns all bundles of the snapshot.
func (s *Snapshot) Bundles() *BundleSet { return s.bundles }
