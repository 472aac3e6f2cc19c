package spiffetls_test

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

func TestPeerFromState(t *testing.T) {
	t.Parallel()
	eachVersion(t, func(t *testing.T, ca *spiffetest.CA, db, web *party, version uint16) {
		opts := &spiffetls.Config{MinVersion: version}
		serving := must.Get(spiffetls.New(with(opts, db, db, spiffe.AllowMembersOf(ca.TrustDomain()))))(t)
		asking := must.Get(spiffetls.New(with(opts, web, web, spiffe.AllowMembersOf(ca.TrustDomain()))))(t)
		server := must.Get(serving.ServerConfig())(t)
		client := must.Get(asking.ClientConfig())(t)
		server.MaxVersion = version
		client.ClientSessionCache, client.ServerName = tls.NewLRUClientSessionCache(1), "db"
		for i := range 2 {
			s, c := connect(t, server, client)
			require.NoError(t, c.err)
			assert.Equal(t, i > 0, c.state.DidResume)
			peer := must.Get(serving.PeerFromState(spiffe.ClientRole, s.state))(t)
			assert.Equal(t, "spiffe://example.org/web", peer.ID().String())
			peer = must.Get(asking.PeerFromState(spiffe.ServerRole, c.state))(t)
			assert.Equal(t, "spiffe://example.org/db", peer.ID().String())
		}
	})
}

// TestNoPeerFromState has one thing wrong in each row.
func TestNoPeerFromState(t *testing.T) {
	t.Parallel()
	ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
	var failures spiffetls.Metrics
	self := ca.Source("/db")
	var allow spiffe.LivePolicy
	require.NoError(t, allow.Set(spiffe.AllowMembersOf(ca.TrustDomain())))
	db, err := spiffetls.New(spiffetls.Config{Self: self, Peers: self, Allow: &allow, Metrics: &failures, AllowAnonymousClients: true})
	require.NoError(t, err)
	server := must.Get(db.ServerConfig())(t)
	web := must.Get(spiffetls.New(spiffetls.Config{Self: ca.SVID("/web"), WebRoots: newPool(ca).get}))(t)
	onlyServer := must.Get(spiffetls.New(spiffetls.Config{
		WebCertificate: newSite(webLeaf(ca, nil, "a.test")).get, Peers: ca.Bundle(), Allow: &allow,
	}))(t)
	hosts := must.Get(spiffetls.New(spiffetls.Config{
		Self: self, Peers: self, Hosts: map[string]spiffe.PolicySource{"db": spiffe.AllowAnyPeer()},
	}))(t)

	good, _ := connect(t, server, bare(ca.Certificate("/web")))
	require.NoError(t, good.err)
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
	const client, server_ = spiffe.ClientRole, spiffe.ServerRole
	for name, c := range map[string]struct {
		endpoint *spiffetls.Endpoint
		role     spiffe.Role
		state    tls.ConnectionState
		want     string
	}{
		"no role":              {db, spiffe.AnyRole, good.state, "role"},
		"both roles":           {db, spiffe.BothRoles, good.state, "role"},
		"no state":             {db, client, tls.ConnectionState{}, "not complete"},
		"not complete":         {db, client, edit(func(cs *tls.ConnectionState) { cs.HandshakeComplete = false }), "not complete"},
		"foreign":              {db, client, foreign.state, ""},
		"expired":              {db, client, expired.state, "expired"},
		"anonymous":            {db, client, anonymous.state, "proved no SPIFFE ID"},
		"no certificate":       {db, server_, edit(func(cs *tls.ConnectionState) { cs.PeerCertificates = nil }), "no certificate"},
		"a nil certificate":    {db, client, edit(func(cs *tls.ConnectionState) { cs.PeerCertificates = []*x509.Certificate{nil} }), "nil"},
		"an empty certificate": {db, client, edit(func(cs *tls.ConnectionState) { cs.PeerCertificates = []*x509.Certificate{{}} }), "verify peer"},
		"a name that is claimed": {db, client, edit(func(cs *tls.ConnectionState) {
			cs.PeerCertificates = []*x509.Certificate{{URIs: leaf.URIs, KeyUsage: x509.KeyUsageDigitalSignature}}
		}), "verify peer"},
		"verified by another": {db, client, edit(func(cs *tls.ConnectionState) {
			cs.PeerCertificates, cs.VerifiedChains = foreign.state.PeerCertificates, [][]*x509.Certificate{{leaf}}
		}), ""},
		"a web server":    {web, server_, edit(func(cs *tls.ConnectionState) { cs.ServerName = "db" }), ""},
		"no server":       {web, client, good.state, "WebRoots is for clients"},
		"no client":       {onlyServer, server_, good.state, "WebCertificate is for servers"},
		"policy of hosts": {hosts, server_, good.state, "the address that was dialled is not known"},
	} {
		peer, err := c.endpoint.PeerFromState(c.role, c.state)
		assert.Nil(t, peer, name)
		assert.ErrorContains(t, err, c.want, name)
	}
	peer := must.Get(db.PeerFromState(client, good.state))(t)
	assert.Equal(t, "spiffe://example.org/web", peer.ID().String())

	require.NoError(t, allow.Set(spiffe.AllowIDs(dbID)))
	_, err = db.PeerFromState(client, good.state)
	verifyError(t, err, "policy")
	self.Fail(errors.New("down"))
	_, err = db.PeerFromState(client, good.state)
	verifyError(t, err, "bundle")
	assert.Empty(t, failuresOf(t, &failures), "these were no handshakes")
}

// TestWrappedCheck: a check that the caller has added to VerifyConnection is made in handshakes, with metrics and without.
func TestWrappedCheck(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	for _, opts := range []*spiffetls.Config{nil, {Metrics: new(spiffetls.Metrics)}} {
		server := must.Get(serverConfig(with(opts, ca.SVID("/db"), ca.Bundle(), spiffe.AllowAnyPeer())))(t)
		good, _ := connect(t, server, spiffetest.TLSConfig(ca.Certificate("/web")))
		require.NoError(t, good.err)
		inner, full := server.VerifyConnection, errors.New("full")
		server.VerifyConnection = func(cs tls.ConnectionState) error { return errors.Join(inner(cs), full) }
		s, _ := connect(t, server, spiffetest.TLSConfig(ca.Certificate("/web")))
		assert.ErrorIs(t, s.err, full)
	}
}

func TestPeerFromStateExpires(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		db := must.Get(spiffetls.New(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer()}))(t)
		server := must.Get(db.ServerConfig())(t)
		s, _ := connect(t, server, spiffetest.TLSConfig(ca.Certificate("/web")))
		must.Get(db.PeerFromState(spiffe.ClientRole, s.state))(t)
		time.Sleep(time.Hour + time.Second)
		_, err := db.PeerFromState(spiffe.ClientRole, s.state)
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

func TestPeerFromRequest(t *testing.T) {
	t.Parallel()
	bothVersionsOfHTTP(t, func(t *testing.T, opts *spiffetls.Config) {
		major := "2"
		if opts != nil {
			major = "1"
		}
		ca := spiffetest.NewCA(t, "example.org")
		admin := must.Get(spiffetls.RequirePeer(spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/ops")), whose))(t)
		mux := http.NewServeMux()
		mux.Handle("/admin", admin)
		mux.Handle("/", whose)
		var failures spiffetls.Metrics
		server := &http.Server{Handler: mux}
		require.NoError(t, configureServer(server, spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowMembersOf(ca.TrustDomain()), AllowAnonymousClients: true, Metrics: &failures}))
		url := serve(t, server, nil)
		web, ops := clientOf(t, ca, "/web", opts), clientOf(t, ca, "/ops", opts)
		assert.Equal(t, major+" spiffe://example.org/web", get(t, web, url))
		assert.Equal(t, major+" spiffe://example.org/ops", get(t, ops, url+"/admin"))
		assert.Equal(t, "forbidden\n", get(t, web, url+"/admin"))
		stranger := must.Get(newTransport(with(opts, noIdentity(), ca.Bundle(), spiffe.AllowIDs(dbID))))(t)
		t.Cleanup(stranger.CloseIdleConnections)
		c := &http.Client{Transport: stranger}
		assert.Equal(t, "spiffetls: no proven client: the client presented no certificate\n", get(t, c, url))
		assert.Equal(t, "forbidden\n", get(t, c, url+"/admin"))
		kinds := slices.Sorted(maps.Keys(failuresOf(t, &failures)))
		assert.Equal(t, []string{"request denied", "request no_certificate"}, kinds)
	})
}

func TestNoPeerFromRequest(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	_, err := spiffetls.PeerFromRequest(httptest.NewRequest("GET", "/", nil))
	assert.ErrorContains(t, err, "without TLS")
	_, err = spiffetls.PeerFromRequest(httptest.NewRequest("GET", "https://db/", nil))
	assert.ErrorContains(t, err, "ConfigureServer")

	// They verify a certificate, but nothing says so to a handler.
	config, err := serverConfig(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowMembersOf(ca.TrustDomain())})
	require.NoError(t, err)
	for name, config := range map[string]*tls.Config{"of this package": config, "bare": bare(ca.Certificate("/db"))} {
		url := serve(t, &http.Server{Handler: whose, TLSConfig: config}, nil)
		assert.Contains(t, get(t, clientOf(t, ca, "/web", nil), url), "ConfigureServer", name)
	}
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
				opts := &spiffetls.Config{MinVersion: version}
				client, want := opts, "2 spiffe://example.org/web"
				if !http2 {
					client, want = &spiffetls.Config{MinVersion: version, NextProtos: http1.NextProtos}, "1 spiffe://example.org/web"
				}
				db := must.Get(spiffetls.New(with(opts, ca.SVID("/db"), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()))))(t)
				config := must.Get(db.ServerConfig())(t)
				config.MaxVersion = version
				logged, err := serverConfig(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowMembersOf(ca.TrustDomain()), MinVersion: version, Metrics: new(spiffetls.Metrics)})
				require.NoError(t, err)
				servers := map[string]*httptest.Server{}
				for name, c := range map[string]*tls.Config{"ServerConfig": config, "with metrics": logged} {
					servers[name] = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
						peer, err := db.PeerFromState(spiffe.ClientRole, *r.TLS)
						fmt.Fprint(w, r.ProtoMajor, " ", cmp.Or[any](err, peer))
					}))
					servers[name].EnableHTTP2 = http2
					spiffetest.StartTLS(servers[name], c)
				}
				byConfigure := httptest.NewUnstartedServer(who)
				byConfigure.EnableHTTP2 = http2
				require.NoError(t, configureServer(byConfigure.Config, with(opts, ca.SVID("/db"), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()))))
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
