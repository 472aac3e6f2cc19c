package stepca_test

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/stepca"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// recorded is a step-ca in the place of a network: it notes what is asked, and signs everything.
type recorded struct {
	ca    *spiffetest.CA
	paths []string
	body  struct{ CSR, OTT, NotAfter string }
}

func (r *recorded) RoundTrip(q *http.Request) (*http.Response, error) {
	r.paths = append(r.paths, q.URL.Path)
	r.body.CSR, r.body.OTT, r.body.NotAfter = "", "", ""
	if err := json.NewDecoder(q.Body).Decode(&r.body); err != nil {
		return nil, err
	}
	csr, err := pki.ParseCSRPEM([]byte(r.body.CSR))
	if err != nil {
		return nil, err
	}
	chain, err := r.ca.Sign(q.Context(), csr, 0)
	if err != nil {
		return nil, err
	}
	answer, err := json.Marshal(map[string]string{"crt": string(pki.MarshalCertificatesPEM(chain[0])), "ca": string(pki.MarshalCertificatesPEM(r.ca.Root()))})
	return &http.Response{StatusCode: http.StatusCreated, Header: http.Header{}, Body: io.NopCloser(bytes.NewReader(answer)), Request: q}, err
}

// A certificate is renewed by itself only if it is for exactly what is asked for: the CA would sign its names again, with those that are too many.
func TestRenewableForTheSameNames(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	id := pki.IDSAN(spiffe.MustParseID("spiffe://example.org/web"))
	const renewed, signed = "/1.0/rekey", "/1.0/sign"
	for name, c := range map[string]struct {
		has  func(*x509.Certificate)
		asks []pki.SAN
		want string
	}{
		"the same":       {func(*x509.Certificate) {}, []pki.SAN{id}, renewed},
		"the same two":   {func(c *x509.Certificate) { c.DNSNames = []string{"web"} }, []pki.SAN{id, pki.DNSSAN("web")}, renewed},
		"in other order": {func(c *x509.Certificate) { c.DNSNames = []string{"a", "b"} }, []pki.SAN{pki.DNSSAN("b"), id, pki.DNSSAN("a")}, renewed},
		"one too many":   {func(c *x509.Certificate) { c.DNSNames = []string{"web"} }, []pki.SAN{id}, signed},
		"one too few":    {func(*x509.Certificate) {}, []pki.SAN{id, pki.DNSSAN("web")}, signed},
		"another":        {func(c *x509.Certificate) { c.DNSNames = []string{"a"} }, []pki.SAN{id, pki.DNSSAN("b")}, signed},
		"ended":          {func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Second) }, []pki.SAN{id}, signed},
	} {
		chain, key := ca.Certificate("/web", c.has)
		r := &recorded{ca: ca}
		client := newClient(t, stepca.Options{
			Endpoint: caclient.Endpoint{
				URL: "https://ca.test", TrustDomain: ca.TrustDomain(), HTTPClient: &http.Client{Transport: r}, Roots: ca.Bundle(),
				Token: cafake.Give("token"),
			},
			Certificate: func() *tls.Certificate { return &tls.Certificate{Certificate: [][]byte{chain[0].Raw}, PrivateKey: key} },
		})
		newKey := must.Get(pki.NewKey(pki.ECDSAP256))(t)
		csr := must.Get(pki.NewCSR(newKey, pki.CSROptions{SANs: c.asks}))(t)
		require.NoError(t, must.ErrorOf(client.Sign(t.Context(), csr, 0)), name)
		assert.Equal(t, []string{c.want}, r.paths, name)
		assert.Equal(t, c.want == signed, r.body.OTT == "token", name)
	}
}

// A lifetime goes to the CA in whole seconds, and the shortest is one; without a wish there is none.
func TestLifetimeInSeconds(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	r := &recorded{ca: ca}
	client := newClient(t, stepca.Options{Endpoint: caclient.Endpoint{
		URL: "https://ca.test", TrustDomain: ca.TrustDomain(), HTTPClient: &http.Client{Transport: r}, Roots: ca.Bundle(),
		Token: cafake.Give("token"),
	}})
	key := must.Get(pki.NewKey(pki.ECDSAP256))(t)
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.org/web"))}})
	require.NoError(t, err)
	for wish, want := range map[time.Duration]string{
		0: "", 1: "1s", 999 * time.Millisecond: "1s", time.Second: "1s", 1999 * time.Millisecond: "1s", time.Hour + time.Millisecond: "1h0m0s",
	} {
		must.Get(client.Sign(t.Context(), csr, wish))(t)
		assert.Equal(t, want, r.body.NotAfter, "%v", wish)
	}
}
