package spiffetls_test

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

func TestPeerFromState(t *testing.T) {
	t.Parallel()
	eachVersion(t, func(t *testing.T, ca *spiffetest.CA, db, web *party, version uint16) {
		opts := &spiffetls.Options{MinVersion: version}
		server, err := spiffetls.ServerConfig(db, db, spiffe.AllowMembersOf(ca.TrustDomain()), opts)
		require.NoError(t, err)
		client, err := spiffetls.ClientConfig(web, web, spiffe.AllowMembersOf(ca.TrustDomain()), opts)
		require.NoError(t, err)
		server.MaxVersion = version
		client.ClientSessionCache, client.ServerName = tls.NewLRUClientSessionCache(1), "db"
		wrapped := server.Clone()
		wrapped.VerifyConnection = func(cs tls.ConnectionState) error { return server.VerifyConnection(cs) }
		for i := range 2 {
			s, c := connect(t, server, client)
			require.NoError(t, c.err)
			assert.Equal(t, i > 0, c.state.DidResume)
			for _, config := range []*tls.Config{server, server.Clone(), wrapped} {
				peer, err := spiffetls.PeerFromState(config, s.state)
				require.NoError(t, err)
				assert.Equal(t, "spiffe://example.org/web", peer.ID().String())
			}
			peer, err := spiffetls.PeerFromState(client, c.state)
			require.NoError(t, err)
			assert.Equal(t, "spiffe://example.org/db", peer.ID().String())
		}
	})
}

// TestNoPeerFromState has one thing wrong in each row.
func TestNoPeerFromState(t *testing.T) {
	t.Parallel()
	ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
	var failures spiffetls.FailureLog
	self := ca.Source("/db")
	var allow spiffe.LivePolicy
	require.NoError(t, allow.Set(spiffe.AllowMembersOf(ca.TrustDomain())))
	server, err := spiffetls.ServerConfig(self, self, &allow, &spiffetls.Options{Failures: &failures, AllowAnonymousClients: true})
	require.NoError(t, err)
	client, err := spiffetls.ClientConfig(ca.SVID("/web"), ca.Bundle(), &allow, &spiffetls.Options{Failures: &failures})
	require.NoError(t, err)
	web, err := spiffetls.Transport(ca.SVID("/web"), spiffetls.WebRoots(newPool(ca).get), nil, nil)
	require.NoError(t, err)

	good, c := connect(t, server, client)
	require.NoError(t, c.err)
	foreign, _ := connect(t, bare(ca.Certificate("/db")), bare(other.Certificate("/web")))
	require.NoError(t, foreign.err)
	expired, _ := connect(t, bare(ca.Certificate("/db")), bare(ca.Broken("Expired")))
	require.NoError(t, expired.err)
	anonymous, _ := connect(t, server, &tls.Config{InsecureSkipVerify: true})
	require.NoError(t, anonymous.err)

	edit := func(f func(cs *tls.ConnectionState)) tls.ConnectionState {
		cs := good.state
		f(&cs)
		return cs
	}
	leaf := good.state.PeerCertificates[0]
	for name, c := range map[string]struct {
		config *tls.Config
		state  tls.ConnectionState
		want   string
	}{
		"no configuration":        {nil, good.state, "not from package spiffetls"},
		"another configuration":   {&tls.Config{}, good.state, "not from package spiffetls"},
		"a check of the caller's": {&tls.Config{VerifyConnection: func(tls.ConnectionState) error { return nil }}, good.state, "not from package spiffetls"},
		"no state":                {server, tls.ConnectionState{}, "not complete"},
		"not complete":            {server, edit(func(cs *tls.ConnectionState) { cs.HandshakeComplete = false }), "not complete"},
		"foreign":                 {server, foreign.state, `no bundle`},
		"expired":                 {server, expired.state, "expired"},
		"anonymous":               {server, anonymous.state, "proved no SPIFFE ID"},
		"no certificate":          {client, edit(func(cs *tls.ConnectionState) { cs.PeerCertificates = nil }), "no certificate"},
		"a nil certificate":       {server, edit(func(cs *tls.ConnectionState) { cs.PeerCertificates = []*x509.Certificate{nil} }), "nil"},
		"an empty certificate":    {server, edit(func(cs *tls.ConnectionState) { cs.PeerCertificates = []*x509.Certificate{{}} }), "verify peer"},
		"a name that is claimed": {server, edit(func(cs *tls.ConnectionState) {
			cs.PeerCertificates = []*x509.Certificate{{URIs: leaf.URIs, KeyUsage: x509.KeyUsageDigitalSignature}}
		}), "verify peer"},
		"verified by another": {server, edit(func(cs *tls.ConnectionState) {
			cs.PeerCertificates, cs.VerifiedChains = foreign.state.PeerCertificates, [][]*x509.Certificate{{leaf}}
		}), "no bundle"},
		"a web server": {web.TLSClientConfig, edit(func(cs *tls.ConnectionState) { cs.ServerName = "db" }), "host name"},
	} {
		peer, err := spiffetls.PeerFromState(c.config, c.state)
		assert.Nil(t, peer, name)
		if c.want == `no bundle` || c.want == "host name" {
			assert.Error(t, err, name)
			continue
		}
		assert.ErrorContains(t, err, c.want, name)
	}
	peer, err := spiffetls.PeerFromState(server, good.state)
	require.NoError(t, err)
	assert.Equal(t, "spiffe://example.org/web", peer.ID().String())

	require.NoError(t, allow.Set(spiffe.AllowIDs(dbID)))
	_, err = spiffetls.PeerFromState(server, good.state)
	verifyError(t, err, "policy")
	self.Fail(errors.New("down"))
	_, err = spiffetls.PeerFromState(server, good.state)
	verifyError(t, err, "bundle")
	_, total := failures.Failures()
	assert.Zero(t, total, "these were no handshakes")
}

// TestWrappedCheck: a check that the caller has added to VerifyConnection is made in handshakes and by PeerFromState, with a
// log and without.
func TestWrappedCheck(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	for _, opts := range []*spiffetls.Options{nil, {Failures: new(spiffetls.FailureLog)}} {
		server, err := spiffetls.ServerConfig(ca.SVID("/db"), ca.Bundle(), spiffe.AllowAnyPeer(), opts)
		require.NoError(t, err)
		good, _ := connect(t, server, spiffetest.TLSConfig(ca.Certificate("/web")))
		require.NoError(t, good.err)
		inner, full := server.VerifyConnection, errors.New("full")
		server.VerifyConnection = func(cs tls.ConnectionState) error { return errors.Join(inner(cs), full) }
		s, _ := connect(t, server, spiffetest.TLSConfig(ca.Certificate("/web")))
		assert.ErrorIs(t, s.err, full)
		_, err = spiffetls.PeerFromState(server, good.state)
		assert.ErrorIs(t, err, full)
	}
}

func TestPeerFromStateExpires(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		server, err := spiffetls.ServerConfig(ca.SVID("/db"), ca.Bundle(), spiffe.AllowAnyPeer(), nil)
		require.NoError(t, err)
		s, _ := connect(t, server, spiffetest.TLSConfig(ca.Certificate("/web")))
		_, err = spiffetls.PeerFromState(server, s.state)
		require.NoError(t, err)
		time.Sleep(time.Hour + time.Second)
		_, err = spiffetls.PeerFromState(server, s.state)
		verifyError(t, err, "chain")
	})
}

// whose answers with the client by PeerFromRequest.
var whose = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	peer, err := spiffetls.PeerFromRequest(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusForbidden)
		return
	}
	fmt.Fprintf(w, "%d %s", r.ProtoMajor, peer)
})

// Pain: PeerFromContext knows nothing on a server that sets its TLSConfig itself.
func TestPeerFromRequest(t *testing.T) {
	t.Parallel()
	bothVersionsOfHTTP(t, func(t *testing.T, opts *spiffetls.Options) {
		major := "2"
		if opts != nil {
			major = "1"
		}
		ca := spiffetest.NewCA(t, "example.org")
		admin, err := spiffetls.RequirePeer(spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/ops")), whose)
		require.NoError(t, err)
		mux := http.NewServeMux()
		mux.Handle("/admin", admin)
		mux.Handle("/", whose)
		var failures spiffetls.FailureLog
		config, err := spiffetls.ServerConfig(ca.SVID("/db"), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()),
			&spiffetls.Options{AllowAnonymousClients: true, Failures: &failures})
		require.NoError(t, err)
		servers := map[string]*http.Server{"TLSConfig": {Handler: mux, TLSConfig: config}, "a clone": {Handler: mux, TLSConfig: config.Clone()}}
		prepared := &http.Server{Handler: mux}
		require.NoError(t, spiffetls.ConfigureServer(prepared, ca.SVID("/db"), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()), anonymous(tls.VersionTLS13)))
		servers["ConfigureServer"] = prepared
		for _, name := range []string{"a clone", "TLSConfig", "ConfigureServer"} { // the clone before net/http has changed the original
			url := serve(t, servers[name], nil)
			web, ops := clientOf(t, ca, "/web", opts), clientOf(t, ca, "/ops", opts)
			assert.Equal(t, major+" spiffe://example.org/web", get(t, web, url), name)
			assert.Equal(t, major+" spiffe://example.org/ops", get(t, ops, url+"/admin"), name)
			assert.Equal(t, "forbidden\n", get(t, web, url+"/admin"), name)
			stranger, err := spiffetls.Transport(spiffetls.NoIdentity(), ca.Bundle(), spiffe.AllowIDs(dbID), opts)
			require.NoError(t, err)
			t.Cleanup(stranger.CloseIdleConnections)
			c := &http.Client{Transport: stranger}
			assert.Equal(t, "spiffetls: no proven client: the client presented no certificate\n", get(t, c, url), name)
			assert.Equal(t, "forbidden\n", get(t, c, url+"/admin"), name)
		}
		kept, _ := failures.Failures()
		for _, f := range kept {
			assert.Equal(t, "request", f.Stage, "RequirePeer tells the log of a configuration, too")
		}
		assert.NotEmpty(t, kept)
	})
}

// TestCloneServesHTTP2: net/http adds its protocols to the configuration that it is given, which the original does not
// learn.
func TestCloneServesHTTP2(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	for name, opts := range map[string]*spiffetls.Options{"no options": nil, "a log of failures": {Failures: new(spiffetls.FailureLog)}} {
		config, err := spiffetls.ServerConfig(ca.SVID("/db"), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()), opts)
		require.NoError(t, err)
		url := serve(t, &http.Server{Handler: whose, TLSConfig: config.Clone()}, nil)
		assert.Equal(t, "2 spiffe://example.org/web", get(t, clientOf(t, ca, "/web", nil), url), name)
		assert.Equal(t, "1 spiffe://example.org/web", get(t, clientOf(t, ca, "/web", http1), url), name)
		assert.Nil(t, config.NextProtos, name)
	}
}

func TestNoPeerFromRequest(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	config, err := spiffetls.ServerConfig(ca.SVID("/db"), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()), nil)
	require.NoError(t, err)
	_, err = spiffetls.PeerFromRequest(httptest.NewRequest("GET", "/", nil))
	assert.ErrorContains(t, err, "without TLS")
	_, err = spiffetls.PeerFromRequest(httptest.NewRequest("GET", "https://db/", nil))
	assert.ErrorContains(t, err, "ConfigureServer")

	hidden := &http.Server{Handler: whose} // net/http does not know the configuration
	url := serve(t, hidden, func(l net.Listener) error { return hidden.Serve(tls.NewListener(l, config)) })
	assert.Contains(t, get(t, clientOf(t, ca, "/web", http1), url), "ConfigureServer")

	// It verifies a certificate, but not with this package.
	plain := &http.Server{Handler: whose, TLSConfig: bare(ca.Certificate("/db"))}
	assert.Contains(t, get(t, clientOf(t, ca, "/web", nil), serve(t, plain, nil)), "not from package spiffetls")
}

// TestHTTPTest: StartTLS sets Certificates, which crypto/tls prefers for a client that dials an IP address, and
// NextProtos.
func TestHTTPTest(t *testing.T) {
	t.Parallel()
	for _, version := range versions {
		for name, http2 := range map[string]bool{"HTTP/2": true, "HTTP/1.1": false} {
			t.Run(tls.VersionName(version)+" "+name, func(t *testing.T) {
				t.Parallel()
				ca := spiffetest.NewCA(t, "example.org")
				opts := &spiffetls.Options{MinVersion: version}
				client, want := opts, "2 spiffe://example.org/web"
				if !http2 {
					client, want = &spiffetls.Options{MinVersion: version, NextProtos: http1.NextProtos}, "1 spiffe://example.org/web"
				}
				config, err := spiffetls.ServerConfig(ca.SVID("/db"), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()), opts)
				require.NoError(t, err)
				config.MaxVersion = version
				logged, err := spiffetls.ServerConfig(ca.SVID("/db"), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()),
					&spiffetls.Options{MinVersion: version, Failures: new(spiffetls.FailureLog)})
				require.NoError(t, err)
				servers := map[string]*httptest.Server{}
				for name, c := range map[string]*tls.Config{"ServerConfig": config, "with a log": logged} {
					servers[name] = httptest.NewUnstartedServer(whose)
					servers[name].EnableHTTP2 = http2
					spiffetest.StartTLS(servers[name], c)
				}
				byConfigure := httptest.NewUnstartedServer(who)
				byConfigure.EnableHTTP2 = http2
				require.NoError(t, spiffetls.ConfigureServer(byConfigure.Config, ca.SVID("/db"), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()), opts))
				byConfigure.TLS = byConfigure.Config.TLSConfig
				byConfigure.StartTLS()
				servers["ConfigureServer"] = byConfigure
				for name, s := range servers {
					t.Cleanup(s.Close)
					_, port, err := net.SplitHostPort(s.Listener.Addr().String())
					require.NoError(t, err)
					for _, host := range []string{"127.0.0.1", "localhost"} {
						got := get(t, clientOf(t, ca, "/web", client), "https://"+net.JoinHostPort(host, port))
						assert.Equal(t, want, got, "%s %s", name, host)
					}
				}
			})
		}
	}
}

// BenchmarkPeerFromState is a second look at a connection.
func BenchmarkPeerFromState(b *testing.B) {
	ca := spiffetest.NewCA(b, "example.org")
	for name, remember := range map[string]int{"remembered": 0, "verified": -1} {
		b.Run(name, func(b *testing.B) {
			server, err := spiffetls.ServerConfig(ca.SVID("/db"), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()), &spiffetls.Options{Remember: remember})
			require.NoError(b, err)
			s, _ := connect(b, server, spiffetest.TLSConfig(ca.Certificate("/web")))
			require.NoError(b, s.err)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := spiffetls.PeerFromState(server, s.state); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
