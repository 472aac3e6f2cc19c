package peers_test

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/spiffe/go-spiffe/v2/bundle/jwtbundle"
	"github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	peerapi "github.com/spiffe/go-spiffe/v2/workloadapi"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// quantumDocument is the bundle document of quantumPartner, with a root and a key for tokens of P-256, and of ML-DSA-65.
func quantumDocument(t testing.TB) []byte {
	return must.Get(os.ReadFile("testdata/quantum-bundle.json"))(t)
}

var quantumPartner = spiffe.MustParseTrustDomain("other.test")

// withoutKeys returns a bundle document without the entries of a kind, and with another sequence number.
func withoutKeys(t testing.TB, document []byte, sequence int, drop func(use, kty string) bool) []byte {
	var doc struct {
		Sequence int              `json:"spiffe_sequence"`
		Hint     int              `json:"spiffe_refresh_hint"`
		Keys     []map[string]any `json:"keys"`
	}
	require.NoError(t, json.Unmarshal(document, &doc))
	doc.Sequence = sequence
	doc.Keys = slices.DeleteFunc(doc.Keys, func(k map[string]any) bool { return drop(k["use"].(string), k["kty"].(string)) })
	return must.Get(json.Marshal(doc))(t)
}

func isAKP(_, kty string) bool { return kty == "AKP" }

// TestQuantumGoSpiffe has go-spiffe, in a program built with either release of Go, read bundles with a root or a key of
// ML-DSA. Built with Go 1.26 it refuses a whole document, or JWK Set, with a key that it cannot parse. Certificates in
// DER, as in the Workload API, and in PEM it takes.
func TestQuantumGoSpiffe(t *testing.T) {
	t.Parallel()
	_, err := pki.NewKey("ml-dsa-65")
	knows := err == nil // built with Go 1.27
	partner := spiffeid.RequireTrustDomainFromString(quantumPartner.String())
	document, both := quantumDocument(t), []string{"ecdsa-p256", "ml-dsa-65"}
	for name, c := range map[string]struct {
		drop   func(use, kty string) bool
		old    bool // Go 1.26 takes it
		roots  int
		tokens []string
	}{
		"whole":            {func(string, string) bool { return false }, false, 2, both},
		"root of ML-DSA":   {func(use, kty string) bool { return isAKP(use, kty) && use == "jwt-svid" }, false, 2, both[:1]},
		"tokens of ML-DSA": {func(use, kty string) bool { return isAKP(use, kty) && use == "x509-svid" }, false, 1, both},
		"without ML-DSA":   {isAKP, true, 1, both[:1]},
	} {
		doc := withoutKeys(t, document, 1, c.drop)
		got, err := spiffebundle.Parse(partner, doc)
		if !knows && !c.old {
			assert.ErrorContains(t, err, "unsupported key type", name)
		} else if assert.NoError(t, err, name) {
			assert.Len(t, got.X509Authorities(), c.roots, name)
			assert.Equal(t, c.tokens, slices.Sorted(maps.Keys(got.JWTAuthorities())), name)
		}
		if len(c.tokens) == 1 {
			continue
		}
		jwks, err := jwtbundle.Parse(partner, withoutKeys(t, doc, 1, func(use, _ string) bool { return use != "jwt-svid" }))
		if !knows {
			assert.ErrorContains(t, err, "unsupported key type", name)
		} else if assert.NoError(t, err, name) {
			assert.Equal(t, c.tokens, slices.Sorted(maps.Keys(jwks.JWTAuthorities())), name)
		}
	}

	// Over the Workload API, with roots of ML-DSA in the bundles of both trust domains.
	other := must.Get(spiffe.ParseBundle(quantumPartner, document))(t)
	ca := spiffetest.NewCA(t, webID.TrustDomain().String())
	c := ca.Bundle().Contents()
	c.X509Authorities = append(c.X509Authorities, other.Contents().X509Authorities...) // of a root, only the key counts
	own := must.Get(spiffe.NewBundle(webID.TrustDomain(), c))(t)
	var src settable
	src.set(ca.SVID("/web"), must.Get(spiffe.NewBundleSet(own, other))(t))
	h := must.Get(workloadserver.NewHandler(&src, nil))(t)
	socket := filepath.Join(shortDir(t), "api.sock")
	serveAPI(t, socket, h)
	ctx, cancel := context.WithTimeout(t.Context(), passing) // it repeats what it cannot read
	defer cancel()
	peer := must.Get(peerapi.NewX509Source(ctx, peerapi.WithClientOptions(peerapi.WithAddr("unix://"+socket))))(t)
	t.Cleanup(func() { _ = peer.Close() })
	for _, b := range []*spiffe.Bundle{own, other} {
		td := spiffeid.RequireTrustDomainFromString(b.TrustDomain().String())
		got := must.Get(peer.GetX509BundleForTrustDomain(td))(t).X509Authorities()
		assert.True(t, slices.EqualFunc(got, bundleCerts(b), (*x509.Certificate).Equal), td)
	}
	tokens := must.Get(peerapi.NewJWTSource(ctx, peerapi.WithClientOptions(peerapi.WithAddr("unix://"+socket))))(t)
	t.Cleanup(func() { _ = tokens.Close() })
	assert.Equal(t, both[:1], slices.Sorted(maps.Keys(must.Get(tokens.GetJWTBundleForTrustDomain(partner))(t).JWTAuthorities())))
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: ca.SVID("/db"), Peers: own, Allow: spiffe.AllowMembersOf(own.TrustDomain())}))(t)
	member := tlsconfig.AuthorizeMemberOf(spiffeid.RequireTrustDomainFromString(own.TrustDomain().String()))
	require.NoError(t, handshake(must.Get(endpoint.ClientConfig())(t), tlsconfig.MTLSServerConfig(peer, peer, member)))
	require.NoError(t, handshake(tlsconfig.MTLSClientConfig(peer, peer, member), must.Get(endpoint.ServerConfig())(t)))
}

// settable is a source of an identity that a test replaces.
type settable struct {
	mu      sync.Mutex
	now     *spiffe.Snapshot
	changed chan struct{}
}

func (s *settable) set(svid *spiffe.SVID, set *spiffe.BundleSet) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changed != nil {
		close(s.changed)
	}
	s.now, s.changed = spiffe.NewSnapshot(svid, set), make(chan struct{})
}

func (s *settable) Snapshot() (*spiffe.Snapshot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now, nil
}

func (s *settable) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}
