package spiffetest

import (
	"crypto"
	"crypto/x509"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
)

// trust is shared by a root CA and its intermediates: the roots, and the bundles made of them.
type trust struct {
	td spiffe.TrustDomain

	mu       sync.Mutex
	roots    []*authority // oldest first
	active   *authority   // one of roots
	made     int          // roots made so far, to name the next
	sequence uint64
	bundle   *spiffe.Bundle       // of td
	jwt      func() crypto.Signer // nil before the first JWT-SVID

	bundles atomic.Pointer[spiffe.BundleSet] // of td and its federated trust domains; writers hold mu
	changed renew.Signal                     // of bundles
}

// Bundle returns the current trust bundle. Its sequence number grows with every change.
func (ca *CA) Bundle() *spiffe.Bundle {
	ca.trust.mu.Lock()
	defer ca.trust.mu.Unlock()
	return ca.trust.bundle
}

// Bundles returns the current bundle of the CA and the bundles given to [CA.Federate].
func (ca *CA) Bundles() *spiffe.BundleSet { return ca.trust.bundles.Load() }

// Root returns the certificate of the active root. It is shared: do not modify it.
func (ca *CA) Root() *x509.Certificate { return ca.trust.activeRoot().cert }

// Rotate signs with a new root from now on: the newest that [CA.Prepare] has added or, if there is none, one that it
// adds to the bundle itself, so that verifiers with an older bundle refuse certificates signed from now on. Older
// roots stay in the bundle until [CA.DropOldRoots], so that identities signed by them stay valid.
func (ca *CA) Rotate() {
	ca.t.Helper()
	if !ca.trust.activateNewest() {
		ca.addRoot(true)
	}
}

// Prepare adds a new root to the bundle, but signs with the current one until [CA.Rotate].
func (ca *CA) Prepare() {
	ca.t.Helper()
	ca.addRoot(false)
}

// activateNewest makes the newest root the active one, and reports false if it already is.
func (tr *trust) activateNewest() bool {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	newest := tr.roots[len(tr.roots)-1]
	if newest == tr.active {
		return false
	}
	tr.active = newest
	return true
}

// DropOldRoots removes the roots before the active one from the bundle. Verifiers with the new bundle refuse the
// certificates of those roots.
func (ca *CA) DropOldRoots() {
	ca.t.Helper()
	tr := ca.trust
	tr.mu.Lock()
	defer tr.mu.Unlock()
	first := slices.Index(tr.roots, tr.active)
	if first == 0 {
		return
	}
	ca.publish(tr.roots[first:])
}

// Federate adds the bundle of another trust domain to the bundles of the CA, or replaces it.
func (ca *CA) Federate(other *spiffe.Bundle) {
	ca.t.Helper()
	tr := ca.trust
	tr.mu.Lock()
	defer tr.mu.Unlock()
	if other.TrustDomain() == tr.td {
		ca.t.Fatalf("spiffetest: federate: %s is the CA's own trust domain", tr.td)
	}
	tr.announce(other)
}

func (ca *CA) addRoot(activate bool) {
	ca.t.Helper()
	tr := ca.trust
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.made++
	root, err := newRoot(tr.td, fmt.Sprintf("root %d", tr.made))
	if err != nil {
		ca.t.Fatalf("spiffetest: %v", err)
	}
	if activate {
		tr.active = root
	}
	ca.publish(append(slices.Clone(tr.roots), root))
}

// publish makes roots the contents of the bundle. The caller holds the lock.
func (ca *CA) publish(roots []*authority) {
	ca.t.Helper()
	tr := ca.trust
	certs := make([]*x509.Certificate, len(roots))
	for i, r := range roots {
		certs[i] = r.cert
	}
	tr.sequence++
	bundle, err := spiffe.NewBundle(tr.td,
		spiffe.BundleContents{X509Authorities: certs, JWTAuthorities: tr.jwtKeys(), Sequence: new(tr.sequence)})
	if err != nil {
		ca.t.Fatalf("spiffetest: bundle: %v", err)
	}
	tr.roots, tr.bundle = roots, bundle
	tr.announce(bundle)
}

// announce makes b part of the bundles and wakes the watchers. The caller holds the lock.
func (tr *trust) announce(b *spiffe.Bundle) {
	tr.bundles.Store(tr.bundles.Load().With(b))
	tr.changed.Notify()
}

func (tr *trust) activeRoot() *authority {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	return tr.active
}
