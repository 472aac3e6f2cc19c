//go:build go1.27

package authn_test

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// element is what a proxy writes about a client, as Envoy does: Cert and Chain are PEM with the escapes of a URL.
func element(certs ...*x509.Certificate) string {
	return strings.ReplaceAll(url.QueryEscape(string(pki.MarshalCertificatesPEM(certs...))), "+", "%20")
}

// TestQuantumForwarded: a header has room for the certificate of a client of ML-DSA-65, and not for its chain as well, which
// is useless: the error says so.
func TestQuantumForwarded(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	a := forwardedCertificate(t)
	svid, _ := quantum.Chain(t, 3)
	chain := svid.Chain()
	uri := "URI=" + svid.ID().String()
	cert, one, three := `;Cert="`+element(chain[0])+`"`, `;Chain="`+element(chain[0])+`"`, `;Chain="`+element(chain...)+`"`
	t.Log(len(uri+cert), len(uri+cert+one), len(uri+cert+three), "bytes")
	for header, bad := range map[string]string{
		uri:                                    "",
		uri + cert:                             "",
		uri + one:                              "",
		uri + cert + one:                       "the limit is 16384",
		uri + three:                            "the limit is 16384",
		padded(uri+cert+";Subject=", 16<<10):   "",
		padded(uri+cert+";Subject=", 16<<10+1): "has 16385 bytes, the limit is 16384",
	} {
		caller, err := a.Authenticate(forwarded(loopback, header))
		if bad != "" {
			require.ErrorIs(t, err, authn.ErrRefused)
			require.ErrorContains(t, err, bad)
			continue
		}
		require.NoError(t, err)
		assert.Equal(t, svid.ID(), caller.ID)
	}
}

func padded(text string, n int) string { return text + strings.Repeat("x", n-len(text)) }

// TestQuantumHeaders: a token or certificate of ML-DSA-65 in a header is no request with a large header to a server of
// net/http that has 16 KiB of headers, as examples/service.
func TestQuantumHeaders(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	var got int
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		got = len(r.Header.Get("X"))
	}))
	s.Config.MaxHeaderBytes = 16 << 10
	s.EnableHTTP2 = true
	s.StartTLS()
	defer s.Close()
	svid, _ := quantum.Chain(t, 1)
	for _, size := range []int{4588, len(element(svid.Leaf())), 16<<10 - 512, 24 << 10} { // of a token, a certificate
		r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL, nil))(t)
		r.Header.Set("X", strings.Repeat("x", size))
		resp, err := s.Client().Do(r)
		if size > 16<<10 {
			if err == nil { // HTTP/2 may end the stream instead
				assert.Equal(t, http.StatusRequestHeaderFieldsTooLarge, resp.StatusCode)
				_ = resp.Body.Close()
			}
			continue
		}
		require.NoError(t, err)
		_ = resp.Body.Close()
		assert.Equal(t, size, got)
	}
}

// TestQuantumNamed: a caller that is known by another name than a SPIFFE ID has no key of ML-DSA.
func TestQuantumNamed(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	classical, ml := quantum.Root(t, "ecdsa-p256"), quantum.Root(t, "ml-dsa-65")
	a := must.Get(authn.NamedCertificate(quantum.TrustDomain, quantum.Bundle(t, classical.Certificate(), ml.Certificate()),
		func(*x509.Certificate) (string, error) { return "web", nil }))(t)
	for _, c := range []struct {
		issuer *pki.Issuer
		key    string
		ok     bool
	}{{classical, "ecdsa-p256", true}, {classical, "ml-dsa-44", false}, {ml, "ecdsa-p256", false}, {ml, "ml-dsa-65", false}} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.TLS = &tls.ConnectionState{PeerCertificates: quantum.SVID(t, c.issuer, c.key, "web").Chain()}
		_, err := a.Authenticate(r)
		if c.ok {
			assert.NoError(t, err)
		} else {
			assert.ErrorIs(t, err, spiffe.ErrAlgorithm)
			assert.ErrorIs(t, err, authn.ErrRefused)
		}
	}
}
