package compare

import (
	"crypto"
	"sync"
	"testing"

	"github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// authority is a trust domain with both kinds of authorities, which can be rotated.
type authority struct {
	ca  *spiffetest.CA
	jwt *jwtsvid.Issuer
	key crypto.PublicKey
}

const keyID = "jwt-1"

func newAuthority(t testing.TB, name string) *authority {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	ca := spiffetest.NewCA(t, name)
	issuer := must.Get(jwtsvid.NewIssuer(ca.TrustDomain(), keyID, key, nil))(t)
	return &authority{ca, issuer, key.Public()}
}

func (a *authority) bundle(t testing.TB) *spiffe.Bundle {
	t.Helper()
	c := a.ca.Bundle().Contents()
	c.JWTAuthorities = map[string]crypto.PublicKey{keyID: a.key}
	return must.Get(spiffe.NewBundle(a.ca.TrustDomain(), c))(t)
}

// snapshot is a new identity with the bundles of its own trust domain and of others.
func (a *authority) snapshot(t testing.TB, path string, others ...*authority) *spiffe.Snapshot {
	t.Helper()
	set := must.Get(spiffe.NewBundleSet(a.bundle(t)))(t)
	for _, o := range others {
		set = set.With(o.bundle(t))
	}
	return spiffe.NewSnapshot(a.ca.SVID(path), set)
}

// live is a provider whose snapshot can be replaced, for either server.
type live struct {
	mu      sync.Mutex
	snap    *spiffe.Snapshot
	err     error
	changed chan struct{}
}

func newLive(s *spiffe.Snapshot) *live { return &live{snap: s, changed: make(chan struct{})} }

func (l *live) Snapshot() (*spiffe.Snapshot, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.snap, l.err
}

func (l *live) Changed() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.changed
}

func (l *live) set(s *spiffe.Snapshot, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.snap, l.err = s, err
	close(l.changed)
	l.changed = make(chan struct{})
}

// The same values as the peer has them, by way of its own parsers.

func peerDomain(td spiffe.TrustDomain) spiffeid.TrustDomain {
	return spiffeid.RequireTrustDomainFromString(td.String())
}

func peerID(id spiffe.ID) spiffeid.ID { return spiffeid.RequireFromString(id.String()) }

func peerSVID(t testing.TB, s *spiffe.SVID) *x509svid.SVID {
	t.Helper()
	certs, key := must.Get2(s.MarshalDER())(t)
	return must.Get(x509svid.ParseRaw(certs, key))(t)
}

func peerBundle(t testing.TB, b *spiffe.Bundle) *spiffebundle.Bundle {
	t.Helper()
	doc := must.Get(b.Marshal())(t)
	return must.Get(spiffebundle.Parse(peerDomain(b.TrustDomain()), doc))(t)
}

func peerBundles(t testing.TB, s *spiffe.BundleSet) *x509bundle.Set {
	t.Helper()
	set := x509bundle.NewSet()
	for b := range s.All() {
		set.Add(peerBundle(t, b).X509Bundle())
	}
	return set
}
