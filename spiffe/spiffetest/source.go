package spiffetest

import (
	"crypto/x509"
	"sync/atomic"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
)

// Source is an identity with its bundles, like the source of an agent: a [spiffe.SVIDSource] and a
// [spiffe.BundleSource]. [CA.Source] makes one. Only the test changes it. Its methods are safe for concurrent use;
// Renew must be called from the test's own goroutine.
type Source struct {
	redacted
	ca      *CA
	path    string
	now     atomic.Pointer[spiffe.Snapshot]
	err     atomic.Pointer[error]
	changed renew.Signal
}

// Source returns a source with the identity that [CA.SVID] mints, and the bundles of the CA as they are now.
func (ca *CA) Source(path string, edit ...func(*x509.Certificate)) *Source {
	ca.t.Helper()
	name := "spiffetest.Source(" + ca.trust.td.ID().String() + path + ")"
	s := &Source{redacted: redact.New(name), ca: ca, path: path}
	s.Renew(edit...)
	return s
}

// Renew mints a new identity, with a new key and from the active root, and adopts the current bundles of the CA. Until
// then the source has the older ones, like a workload that does not know of a rotation yet. Renew does not end an
// outage.
func (s *Source) Renew(edit ...func(*x509.Certificate)) {
	s.ca.t.Helper()
	s.now.Store(spiffe.NewSnapshot(s.ca.SVID(s.path, edit...), s.ca.Bundles()))
	s.changed.Notify()
}

// Fail begins an outage: SVID, Bundle and Snapshot return err until Fail is called again, with another error or with
// nil, which ends the outage.
func (s *Source) Fail(err error) {
	if err == nil {
		s.err.Store(nil)
	} else {
		s.err.Store(&err)
	}
	s.changed.Notify()
}

// Snapshot returns the identity with its bundles.
func (s *Source) Snapshot() (*spiffe.Snapshot, error) {
	if err := s.err.Load(); err != nil {
		return nil, *err
	}
	return s.now.Load(), nil
}

// SVID implements [spiffe.SVIDSource].
func (s *Source) SVID() (*spiffe.SVID, error) {
	snap, err := s.Snapshot()
	if err != nil {
		return nil, err
	}
	return snap.SVID()
}

// Bundle implements [spiffe.BundleSource].
func (s *Source) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	snap, err := s.Snapshot()
	if err != nil {
		return nil, err
	}
	return snap.Bundle(td)
}

// Changed returns a channel that is closed at the next Renew or Fail.
func (s *Source) Changed() <-chan struct{} { return s.changed.Changed() }
