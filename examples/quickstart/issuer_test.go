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
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/spiffe"
)

// The show with a CA outside, behind Istio's certificate API.
func TestShowWithCAOutside(t *testing.T) {
	t.Parallel()
	authority, err := ca.New(ca.Config{TrustDomain: trustDomain})
	require.NoError(t, err)
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
	defer server.Close()

	roots := filepath.Join(t.TempDir(), "root-cert.pem")
	pem := pki.MarshalCertificatesPEM(server.Certificate(), authority.Roots()[0].Certificate)
	require.NoError(t, os.WriteFile(roots, pem, 0o600))
	var out bytes.Buffer
	require.NoError(t, show(t.Context(), options{duration: 5 * time.Second, lifetime: 2 * time.Second, ca: server.URL, caRoots: roots}, &out))
	assert.Contains(t, out.String(), "renewed")
	assert.Contains(t, out.String(), "failed handshakes: 0")

	err = show(t.Context(), options{duration: time.Second, lifetime: 2 * time.Second, ca: server.URL, caRoots: filepath.Join(t.TempDir(), "none.pem")}, &out)
	require.ErrorIs(t, err, os.ErrNotExist)
}
