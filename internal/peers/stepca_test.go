package peers_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/stepca"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// TestStepCA has the wire of a real step-ca: a one-time token for a certificate, renewal by that certificate, and
// roots.
func TestStepCA(t *testing.T) {
	t.Parallel()
	s := peers.NewStepCA(t, domain)
	call := func(client *http.Client, path string, body any) (status int, chain []*x509.Certificate) {
		t.Helper()
		method, data := http.MethodGet, []byte(nil)
		if body != nil {
			var err error
			method = http.MethodPost
			data, err = json.Marshal(body)
			require.NoError(t, err)
		}
		r := must.Get(http.NewRequestWithContext(t.Context(), method, s.URL+path, bytes.NewReader(data)))(t)
		response := must.Get(client.Do(r))(t)
		defer response.Body.Close() // all of it is read
		data = must.Get(io.ReadAll(response.Body))(t)
		var answer struct {
			Chain []string `json:"certChain"`
			Roots []string `json:"crts"`
		}
		require.NoError(t, json.Unmarshal(data, &answer), "%s", data)
		for _, text := range append(answer.Chain, answer.Roots...) {
			chain = append(chain, must.Get(pki.ParseCertificatesPEM([]byte(text)))(t)...)
		}
		return response.StatusCode, chain
	}

	status, roots := call(s.Client(nil), "/roots", nil)
	require.Equal(t, http.StatusCreated, status)
	require.Equal(t, s.Roots(), roots)

	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(webID)}}))(t)
	request := map[string]any{"csr": string(csr.PEM()), "ott": s.Token(t, "web", webID.String()), "notAfter": "10m"}
	status, chain := call(s.Client(nil), "/1.0/sign", request)
	require.Equal(t, http.StatusCreated, status)
	require.Equal(t, webID.String(), chain[0].URIs[0].String())
	verifies(t, bundleOf(t, s.Roots()...), chain)
	status, _ = call(s.Client(nil), "/1.0/sign", request)
	assert.Equal(t, http.StatusUnauthorized, status, "a token is good once")

	own := &tls.Certificate{PrivateKey: key}
	for _, c := range chain {
		own.Certificate = append(own.Certificate, c.Raw)
	}
	status, renewed := call(s.Client(own), "/1.0/renew", map[string]any{})
	require.Equal(t, http.StatusCreated, status)
	verifies(t, bundleOf(t, s.Roots()...), renewed)
	require.NotEqual(t, chain[0].SerialNumber, renewed[0].SerialNumber)

	s.Prepare(t)
	_, roots = call(s.Client(nil), "/roots", nil)
	require.Len(t, roots, 2)
	require.Equal(t, s.Roots(), roots)
	s.Activate(t)
	status, renewed = call(s.Client(own), "/1.0/renew", map[string]any{})
	require.Equal(t, http.StatusCreated, status, "a certificate under the old root proves its holder")
	verifies(t, bundleOf(t, s.Roots()[0]), renewed)
}

// TestStepCAClient has our client ask a real step-ca, of which it knows the fingerprint of the root: for certificates with a
// token, for those after them with the certificate, and for the roots, while they change.
func TestStepCAClient(t *testing.T) {
	t.Parallel()
	s := peers.NewStepCA(t, domain)
	sum := sha256.Sum256(s.Roots()[0].Raw)
	tokens := 0
	var current *tls.Certificate
	newCA := func(edit ...func(*stepca.Options)) caclient.CA {
		o := stepca.Options{
			Endpoint: caclient.Endpoint{URL: s.URL, TrustDomain: domain, Token: func(context.Context) (string, error) {
				tokens++
				return s.Token(t, webID.String(), webID.String()), nil
			}},
			Fingerprint: hex.EncodeToString(sum[:]),
			Certificate: func() *tls.Certificate { return current },
		}
		for _, e := range edit {
			e(&o)
		}
		inner := must.Get(stepca.New(o))(t)
		return must.Get(caclient.New(inner, nil))(t)
	}
	ca := newCA()
	sign := func(ca caclient.CA, lifetime time.Duration) (*pki.Credential, error) {
		key := must.Get(pki.NewKey("ecdsa-p256"))(t)
		csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(webID)}}))(t)
		chain, err := ca.Sign(t.Context(), csr, lifetime)
		if err != nil {
			return nil, err
		}
		return pki.NewCredential(chain, key)
	}
	first := must.Get(sign(ca, 10*time.Minute))(t)
	assert.WithinDuration(t, time.Now().Add(10*time.Minute), first.NotAfter(), 30*time.Second)
	assert.Equal(t, 1, tokens)
	current = first.TLSCertificate()
	second := must.Get(sign(ca, 0))(t)
	assert.Equal(t, 1, tokens, "the certificate proves who asks")
	assert.False(t, pki.PublicKeysEqual(first.Leaf().PublicKey, second.Leaf().PublicKey))
	assert.Equal(t, first.Leaf().URIs, second.Leaf().URIs)

	// What is refused.
	current = nil
	used := s.Token(t, webID.String(), webID.String())
	static := newCA(func(o *stepca.Options) { o.Token = func(context.Context) (string, error) { return used, nil } })
	must.Get(sign(static, 0))(t)
	_, err := sign(static, 0)
	assert.ErrorIs(t, err, caclient.ErrUnauthenticated, "a token is good once")
	assert.NotContains(t, err.Error(), used)
	_, err = sign(newCA(func(o *stepca.Options) {
		o.Token = func(context.Context) (string, error) { return s.Token(t, "api", "spiffe://example.org/api"), nil }
	}), 0)
	kind, ok := errors.AsType[*caclient.Error](err)
	require.True(t, ok, "%v", err)
	assert.Equal(t, caclient.ErrDenied, kind.Kind, "%v", err)
	_, err = sign(ca, 100*24*time.Hour)
	assert.ErrorIs(t, err, caclient.ErrDenied, "%v", err)
	_, err = sign(newCA(func(o *stepca.Options) { o.Fingerprint = hex.EncodeToString(make([]byte, 32)) }), 0)
	require.Error(t, err)
	t.Logf("another fingerprint: %v", err)

	// The root changes under a Manager.
	var m *secretcache.Manager
	tokens = 0
	inner := must.Get(stepca.New(stepca.Options{
		Endpoint: caclient.Endpoint{URL: s.URL, TrustDomain: domain, Token: func(context.Context) (string, error) {
			tokens++
			return s.Token(t, webID.String(), webID.String()), nil
		}},
		Fingerprint: hex.EncodeToString(sum[:]),
		Certificate: func() *tls.Certificate {
			svid, err := m.SVID()
			if err != nil {
				return nil
			}
			return svid.TLSCertificate()
		},
	}))(t)
	m, err = secretcache.New(secretcache.Config{ID: webID, CA: inner, Lifetime: time.Minute, GraceRatio: 0.95, Jitter: 0.02})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- m.Run(ctx) }()
	svid := func() *spiffe.SVID {
		svid, err := m.SVID()
		if err != nil {
			return nil
		}
		return svid
	}
	require.Eventually(t, func() bool { return svid() != nil }, time.Minute, 50*time.Millisecond)
	s.Prepare(t)
	set := must.Get(inner.FetchBundles(ctx))(t)
	b := must.Get(set.Bundle(domain))(t)
	n := 0
	for range b.X509Authorities() {
		n++
	}
	assert.Equal(t, 2, n)
	s.Activate(t)
	newest := bundleOf(t, s.Roots()[0])
	require.Eventually(t, func() bool { // renewed every two or three seconds; a certificate outlives a slow restart
		_, err := pki.ExpectID(webID).Verify(svid().Chain(), newest, spiffe.BothRoles, time.Now())
		return err == nil
	}, time.Minute, 100*time.Millisecond, "renewed under the new root")
	assert.Equal(t, 1, tokens)
	cancel()
	<-ended
}
