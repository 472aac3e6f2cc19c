package main

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/spiffe"
)

// outsider serves a CA behind Istio's certificate API, which believes every token.
func outsider(t *testing.T) (*ca.Authority, *httptest.Server) {
	t.Helper()
	authority := must.Get(ca.New(ca.Config{TrustDomain: trustDomain}))(t)
	handler, err := istioca.New(istioca.Options{Signer: authority, Authenticator: authn.Func(func(r *http.Request) (*authn.Caller, error) {
		token, err := authn.Bearer(r)
		if err != nil {
			return nil, err
		}
		id, err := spiffe.ParseID(token)
		return &authn.Caller{ID: id, Method: "test"}, err
	})})
	require.NoError(t, err)
	server := httptest.NewUnstartedServer(handler)
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	return authority, server
}

// The show with a CA outside.
func TestShowWithCAOutside(t *testing.T) {
	t.Parallel()
	rounds.Slow(t)
	authority, server := outsider(t)
	roots := filepath.Join(t.TempDir(), "root-cert.pem")
	pem := pki.MarshalCertificatesPEM(server.Certificate(), authority.Status().Roots[0].Certificate)
	require.NoError(t, os.WriteFile(roots, pem, 0o600))
	var out bytes.Buffer
	require.NoError(t, show(t.Context(), options{duration: 4 * time.Second, lifetime: 4 * time.Second, ca: server.URL, caRoots: roots}, &out))
	assert.Contains(t, out.String(), "renewed")
	assert.Contains(t, out.String(), "failed handshakes: 0")

	err := show(t.Context(), options{duration: time.Second, lifetime: 4 * time.Second, ca: server.URL, caRoots: filepath.Join(t.TempDir(), "none.pem")}, &out)
	require.ErrorIs(t, err, os.ErrNotExist)
}

// The CA proves itself by the roots of the moment, which its operator replaces while we run.
func TestRootsOfTheMoment(t *testing.T) {
	t.Parallel()
	authority, server := outsider(t)
	file := filepath.Join(t.TempDir(), "root-cert.pem")
	old := pki.MarshalCertificatesPEM(authority.Status().Roots[0].Certificate) // not the one that the server's certificate is from
	require.NoError(t, os.WriteFile(file, old, 0o600))
	from := must.Get(outside(options{ca: server.URL, caRoots: file}))(t)
	id := spiffe.MustParseID("spiffe://example.org/ns/demo/sa/web")
	client := must.Get(from(id))(t)
	key := must.Get(pki.NewKey(pki.ECDSAP256))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(id)}}))(t)
	_, err := client.Sign(t.Context(), csr, 0)
	require.ErrorContains(t, err, "unknown authority")
	require.NoError(t, os.WriteFile(file, append(old, pki.MarshalCertificatesPEM(server.Certificate())...), 0o600))
	must.Get(client.Sign(t.Context(), csr, 0))(t)
}
