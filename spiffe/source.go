package spiffe

// SVIDSource gives the current X.509-SVID. Everything that needs an identity takes a source, so
// that a fixed value ([*SVID] is a source of itself), a file and a live renewal all fit. SVID must
// not block and must be safe for concurrent use.
type SVIDSource interface {
	SVID() (*SVID, error)
}

// BundleSource gives the current trust bundle of a trust domain, and an error that wraps
// [ErrUnknownTrustDomain] for a domain that it does not know. A [*Bundle], a [*BundleSet] and a
// [*Snapshot] are sources. Bundle must not block and must be safe for concurrent use.
type BundleSource interface {
	Bundle(td TrustDomain) (*Bundle, error)
}

// Snapshot is an identity and the trust bundles that go with it, published together: a reader of a
// Snapshot never sees a key with another certificate's chain, or a chain without its roots. It
// never changes. It is an [SVIDSource] and a [BundleSource].
type Snapshot struct {
	svid    *SVID
	bundles *BundleSet
}

// NewSnapshot returns a Snapshot of both parts, which are shared, not copied, as they never change.
// It panics if one is nil: a snapshot is whole.
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
