//go:build go1.27

package federation_test

import (
	"crypto"
	"crypto/x509"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
)

// TestQuantumHandler: consumers that do not say that they read keys of ML-DSA get the other entries.
func TestQuantumHandler(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	classical, mldsa := quantum.Root(t, "ecdsa-p256").Certificate(), quantum.Root(t, quantum.Algorithm).Certificate()
	ec, ml := must.Get(pki.NewKey("ecdsa-p256"))(t).Public(), must.Get(pki.NewKey(quantum.Algorithm))(t).Public()
	type keys = map[string]crypto.PublicKey
	n := uint64(7)
	for name, c := range map[string]struct{ has, others spiffe.BundleContents }{
		"both": {
			spiffe.BundleContents{X509Authorities: []*x509.Certificate{mldsa, classical}, JWTAuthorities: keys{"a": ec, "b": ml}, Sequence: &n},
			spiffe.BundleContents{X509Authorities: []*x509.Certificate{classical}, JWTAuthorities: keys{"a": ec}, Sequence: &n},
		},
		"a root": {
			spiffe.BundleContents{X509Authorities: []*x509.Certificate{classical, mldsa}, JWTAuthorities: keys{"a": ec}},
			spiffe.BundleContents{X509Authorities: []*x509.Certificate{classical}, JWTAuthorities: keys{"a": ec}},
		},
		"a token key": {
			spiffe.BundleContents{X509Authorities: []*x509.Certificate{classical}, JWTAuthorities: keys{"b": ml}},
			spiffe.BundleContents{X509Authorities: []*x509.Certificate{classical}},
		},
		"none": {
			spiffe.BundleContents{X509Authorities: []*x509.Certificate{classical}, JWTAuthorities: keys{"a": ec}},
			spiffe.BundleContents{X509Authorities: []*x509.Certificate{classical}, JWTAuthorities: keys{"a": ec}},
		},
		"ML-DSA alone": { // without a root the bundle would revoke everything
			spiffe.BundleContents{X509Authorities: []*x509.Certificate{mldsa}, JWTAuthorities: keys{"a": ec}},
			spiffe.BundleContents{X509Authorities: []*x509.Certificate{mldsa}, JWTAuthorities: keys{"a": ec}},
		},
		"empty": {},
	} {
		has, others := must.Get(spiffe.NewBundle(quantum.TrustDomain, c.has))(t), must.Get(spiffe.NewBundle(quantum.TrustDomain, c.others))(t)
		h := must.Get(federation.NewHandler(has, quantum.TrustDomain))(t)
		for header, want := range map[string]*spiffe.Bundle{"": others, "false": others, "true": has} {
			r := httptest.NewRequest(http.MethodGet, "/", nil)
			r.Header.Set("Svidkit-Ml-Dsa", header)
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			require.Equal(t, http.StatusOK, w.Code, name)
			assert.Equal(t, string(must.Get(want.Marshal())(t)), w.Body.String(), "%s %q", name, header)
			assert.Equal(t, "Svidkit-Ml-Dsa", w.Header().Get("Vary"))
		}
	}
}
