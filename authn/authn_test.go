package authn_test

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

func clientCertificate(t *testing.T, bundles spiffe.BundleSource, allow spiffe.Policy) authn.Authenticator {
	t.Helper()
	v, err := spiffe.NewVerifier(bundles, allow, nil)
	require.NoError(t, err)
	return authn.ClientCertificate(v)
}

func request(chain ...*x509.Certificate) *http.Request {
	r := httptest.NewRequest(http.MethodGet, "https://ca.example.org/", nil)
	r.TLS = &tls.ConnectionState{PeerCertificates: chain}
	return r
}

func TestClientCertificate(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	web := ca.SVID("/web")
	caller, err := clientCertificate(t, ca.Bundle(), spiffe.AllowIDs(web.ID())).Authenticate(request(web.Chain()...))
	require.NoError(t, err)
	assert.Equal(t, web.ID(), caller.ID)
	assert.Equal(t, "client-certificate", caller.Method)
	assert.Equal(t, web.NotAfter(), caller.NotAfter)
	assert.Contains(t, caller.LogValue().String(), "spiffe://example.org/web")
	assert.Equal(t, slog.KindGroup, caller.LogValue().Kind())
}

func TestClientCertificateAbsent(t *testing.T) {
	t.Parallel()
	a := clientCertificate(t, spiffetest.NewCA(t, "example.org").Bundle(), spiffe.AllowAnyPeer())
	plain := httptest.NewRequest(http.MethodGet, "/", nil)
	plain.Header.Set("X-Forwarded-Client-Cert", "URI=spiffe://example.org/web") // is not looked at
	for name, r := range map[string]*http.Request{"no TLS": plain, "no certificate": request()} {
		_, err := a.Authenticate(r)
		require.ErrorIs(t, err, authn.ErrNoCredential, name)
		assert.NotErrorIs(t, err, authn.ErrRefused, name)
	}
}

func TestClientCertificateRefused(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	allow := spiffe.AllowMembersOf(ca.TrustDomain())
	a := clientCertificate(t, ca.Bundle(), allow)
	for _, f := range spiffetest.Faults() {
		if !f.Refused(spiffe.ClientRole) {
			continue
		}
		t.Run(f.String(), func(t *testing.T) {
			chain, _ := ca.Broken(f)
			_, err := a.Authenticate(request(chain...))
			require.ErrorIs(t, err, authn.ErrRefused)
			assert.NotErrorIs(t, err, authn.ErrNoCredential)
			e, ok := errors.AsType[*spiffe.VerifyError](err)
			require.True(t, ok)
			assert.Equal(t, f.Stage(), e.Stage)
		})
	}
	t.Run("policy", func(t *testing.T) {
		_, err := clientCertificate(t, ca.Bundle(), spiffe.AllowIDs(ca.SVID("/db").ID())).Authenticate(request(ca.SVID("/web").Chain()...))
		require.ErrorIs(t, err, authn.ErrRefused)
		require.ErrorIs(t, err, spiffe.ErrDenied)
	})
}

// A request on a connection that is older than the newest bundle is judged by the newest.
func TestClientCertificateFollowsTheBundle(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	web := ca.SVID("/web")
	a := clientCertificate(t, bundleFunc(func(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return ca.Bundle().Bundle(td) }), spiffe.AllowAnyPeer())
	_, err := a.Authenticate(request(web.Chain()...))
	require.NoError(t, err)
	ca.Rotate()
	ca.DropOldRoots()
	_, err = a.Authenticate(request(web.Chain()...))
	require.ErrorIs(t, err, authn.ErrRefused)
}

type bundleFunc func(spiffe.TrustDomain) (*spiffe.Bundle, error)

func (f bundleFunc) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return f(td) }

func TestFirstOf(t *testing.T) {
	t.Parallel()
	none := authn.Func(func(*http.Request) (*authn.Caller, error) { return nil, fmt.Errorf("none: %w", authn.ErrNoCredential) })
	bad := authn.Func(func(*http.Request) (*authn.Caller, error) { return nil, fmt.Errorf("bad: %w", authn.ErrRefused) })
	good := authn.Func(func(*http.Request) (*authn.Caller, error) { return &authn.Caller{Method: "good"}, nil })
	never := authn.Func(func(*http.Request) (*authn.Caller, error) {
		t.Error("asked though an earlier one answered")
		return nil, nil
	})

	c, err := authn.FirstOf(none, bad, good, never).Authenticate(request())
	require.NoError(t, err)
	assert.Equal(t, "good", c.Method)

	_, err = authn.FirstOf(none, bad).Authenticate(request())
	require.ErrorIs(t, err, authn.ErrNoCredential)
	require.ErrorIs(t, err, authn.ErrRefused)

	_, err = authn.FirstOf().Authenticate(request())
	require.ErrorIs(t, err, authn.ErrNoCredential)
}

// A real server and client: the handler learns who is calling.
func TestOverTLS(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	server, web := ca.SVID("/server"), ca.SVID("/web")
	who := clientCertificate(t, ca.Bundle(), spiffe.AllowIDs(web.ID()))
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, err := who.Authenticate(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		}
		_, _ = fmt.Fprint(w, c.ID)
	})}
	require.NoError(t, spiffetls.ConfigureServer(srv, server, ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()), nil))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.ServeTLS(l, "", "") })
	t.Cleanup(func() { _ = srv.Close(); wg.Wait() })
	for _, c := range []struct {
		svid   *spiffe.SVID
		status int
		body   string
	}{
		{web, http.StatusOK, "spiffe://example.org/web"},
		{ca.SVID("/other"), http.StatusForbidden, "not allowed by policy"},
	} {
		transport, err := spiffetls.Transport(c.svid, ca.Bundle(), spiffe.AllowIDs(server.ID()), nil)
		require.NoError(t, err)
		resp, err := (&http.Client{Transport: transport}).Get("https://" + l.Addr().String())
		require.NoError(t, err)
		var body strings.Builder
		require.NoError(t, resp.Write(&body))
		_ = resp.Body.Close()
		assert.Equal(t, c.status, resp.StatusCode)
		assert.Contains(t, body.String(), c.body)
		transport.CloseIdleConnections()
	}
}
