package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/jwt"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// webSite returns a certificate for a website and its key, in PEM.
func webSite(t *testing.T, ca *spiffetest.CA, name string) (cert, key []byte) {
	t.Helper()
	chain, signer := ca.Certificate("/web", func(c *x509.Certificate) { c.DNSNames = []string{name} })
	key = must.Get(pki.MarshalPrivateKeyPEM(signer))(t)
	for _, c := range chain {
		cert = append(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})...)
	}
	return cert, key
}

// A CA with -oidc-issuer signs tokens that a verifier of OpenID Connect takes, which knows nothing but the URL of the issuer: the
// documents come from -oidc-addr with the certificate in files, which are followed.
func TestOIDC(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	site := spiffetest.NewCA(t, "websites.test")
	replace := func(name string) {
		cert, key := webSite(t, site, name)
		require.NoError(t, os.WriteFile(keyFile, key, 0o600))
		require.NoError(t, os.WriteFile(certFile, cert, 0o600))
	}
	replace("oidc.example.org")
	state := filepath.Join(dir, "state")
	const issuer = "https://oidc.example.org/prod"
	flags := []string{"-oidc-issuer", issuer, "-jwt-algorithm", "RS256"}
	s, _ := start(t, newConfig(t, state, append(flags, "-oidc-addr", "127.0.0.1:0", "-oidc-cert", certFile, "-oidc-key", keyFile)...))

	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(site.Bundle().MarshalPEM())
	client := &http.Client{Transport: &http.Transport{ // for which the name leads to the server, as DNS would have it
		TLSClientConfig: &tls.Config{RootCAs: roots}, DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, map[string]string{"oidc.example.org:443": s.at.OIDC.Addr().String()}[addr])
		},
	}}
	verifier, err := jwt.New(jwt.Options{Issuer: issuer, Audiences: []string{"bank"}, HTTPClient: client, Caller: func(c *jwt.Claims) (*authn.Caller, error) {
		id, err := spiffe.ParseID(c.Subject)
		return &authn.Caller{ID: id}, err
	}})
	require.NoError(t, err)
	present := func(audience string) (*authn.Caller, error) {
		token, err := shell(t, "", append([]string{"-jwt", audience, "-id", "spiffe://cluster.local/ns/demo/sa/web"}, arguments(state, flags...)...)...)
		require.NoError(t, err)
		r := httptest.NewRequest("GET", "https://bank.test/", nil)
		r.Header.Set("Authorization", "Bearer "+strings.TrimSpace(token))
		return verifier.Authenticate(r)
	}
	assert.Equal(t, "spiffe://cluster.local/ns/demo/sa/web", must.Get(present("bank"))(t).ID.String())
	_, err = present("other")
	require.ErrorIs(t, err, authn.ErrRefused)

	for path, want := range map[string]int{
		"/prod/.well-known/openid-configuration": 200, "/prod/keys": 200, "/": 404, "/metrics": 404, "/root-cert.pem": 404, "/prod/status": 404,
	} {
		resp := must.Get(client.Get("https://oidc.example.org" + path))(t)
		must.Get(io.Copy(io.Discard, resp.Body))(t)
		require.NoError(t, resp.Body.Close())
		assert.Equal(t, want, resp.StatusCode, path)
	}

	// The certificate is replaced, and presented without a restart.
	replace("new.example.org")
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		conn, err := tls.Dial("tcp", s.at.OIDC.Addr().String(), &tls.Config{RootCAs: roots, ServerName: "new.example.org"})
		require.NoError(c, err)
		_ = conn.Close()
	}, time.Minute, 50*time.Millisecond)
}

// Without files the CA's own certificate is presented, which a proxy in front can verify; without an issuer there is no "iss".
func TestOIDCBehindProxy(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s, _ := start(t, newConfig(t, dir, "-oidc-issuer", "https://oidc.example.org", "-oidc-addr", "127.0.0.1:0"))
	verifier := must.Get(spiffe.NewVerifier(s.ca.Bundle(), spiffe.AllowIDs(s.c.ServerID), nil))(t)
	conn, err := tls.Dial("tcp", s.at.OIDC.Addr().String(), &tls.Config{InsecureSkipVerify: true, VerifyConnection: func(state tls.ConnectionState) error { // as the ID is checked
		_, err := verifier.VerifyChain(state.PeerCertificates, spiffe.ServerRole)
		return err
	}})
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	token, err := shell(t, "", append([]string{"-jwt", "bank", "-id", "spiffe://cluster.local/web"}, arguments(dir)...)...)
	require.NoError(t, err)
	assert.NotContains(t, claimsOf(t, token), "iss")
	token, err = shell(t, "", append([]string{"-jwt", "bank", "-id", "spiffe://cluster.local/web", "-oidc-issuer", "https://oidc.example.org"}, arguments(dir)...)...)
	require.NoError(t, err)
	assert.Contains(t, claimsOf(t, token), `"iss":"https://oidc.example.org"`)
}

// claimsOf returns the claims of a token.
func claimsOf(t *testing.T, token string) string {
	t.Helper()
	return string(must.Get(base64.RawURLEncoding.DecodeString(strings.Split(token, ".")[1]))(t))
}
