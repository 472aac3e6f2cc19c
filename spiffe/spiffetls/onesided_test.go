package spiffetls_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// anonymous are the options of a server that asks for a certificate and does not require it.
func anonymous(version uint16) *spiffetls.Config {
	return &spiffetls.Config{MinVersion: version, AllowAnonymousClients: true}
}

// asking is a server that asks.
func (p *party) asking(t testing.TB, version uint16) *tls.Config {
	t.Helper()
	c := p.server(t, spiffe.AllowAnyPeer(), anonymous(version))
	c.MaxVersion = version
	return c
}

// clientWith is a client with a session cache, of whatever sources.
func clientWith(t testing.TB, self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, version uint16) *tls.Config {
	t.Helper()
	c := must.Get(clientConfig(with(&spiffetls.Config{MinVersion: version}, self, peers, allow)))(t)
	c.ServerName, c.ClientSessionCache = "server.test", tls.NewLRUClientSessionCache(4)
	return c
}

// webLeaf mints a certificate for host names, with the CA of some web PKI.
func webLeaf(pki *spiffetest.CA, edit func(*x509.Certificate), names ...string) *tls.Certificate {
	chain, key := pki.Certificate("/web", func(c *x509.Certificate) {
		c.URIs = nil
		for _, name := range names {
			if ip := net.ParseIP(name); ip != nil {
				c.IPAddresses = append(c.IPAddresses, ip)
			} else {
				c.DNSNames = append(c.DNSNames, name)
			}
		}
		if edit != nil {
			edit(c)
		}
	})
	cert := &tls.Certificate{PrivateKey: key, Leaf: chain[0]}
	for _, c := range chain {
		cert.Certificate = append(cert.Certificate, c.Raw)
	}
	return cert
}

// site is a web server's certificate, which a test can replace.
type site struct {
	now   atomic.Pointer[tls.Certificate]
	asked atomic.Int64
}

func newSite(cert *tls.Certificate) *site {
	s := &site{}
	s.now.Store(cert)
	return s
}

func (s *site) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	s.asked.Add(1)
	return s.now.Load(), nil
}

// pool is a source of roots that a test can replace.
type pool struct{ now atomic.Pointer[x509.CertPool] }

func newPool(ca *spiffetest.CA) *pool {
	p := &pool{}
	p.now.Store(ca.Bundle().CertPool())
	return p
}

func (p *pool) get() (*x509.CertPool, error) {
	if roots := p.now.Load(); roots != nil {
		return roots, nil
	}
	return nil, errors.New("the file is gone")
}

// webRefused wants err to be a client's refusal of a web server.
func webRefused(t *testing.T, err error, want string) {
	t.Helper()
	he, ok := errors.AsType[*spiffetls.HandshakeError](err)
	require.True(t, ok, "%v", err)
	assert.False(t, he.Server)
	_, ok = errors.AsType[*tls.CertificateVerificationError](err)
	require.True(t, ok, "%v", err)
	assert.ErrorContains(t, err, "spiffetls: the server is refused: ")
	assert.ErrorContains(t, err, want)
}

// TestClientWithoutIdentity is the bootstrap with a token: the server is verified, and sees no certificate.
func TestClientWithoutIdentity(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "X5-31", "X5-38")
	eachVersion(t, func(t *testing.T, ca *spiffetest.CA, db, web *party, version uint16) {
		other := spiffetest.NewCA(t, "other.test")
		dbID := ca.SVID("/db").ID()
		client := func(peers spiffe.BundleSource, allow spiffe.Policy) *tls.Config {
			return clientWith(t, noIdentity(), peers, allow, version)
		}
		s, c := good(t, db.asking(t, version), client(ca.Bundle(), spiffe.AllowIDs(dbID)), false, "good")
		assert.Empty(t, s.state.PeerCertificates)
		assert.Equal(t, dbID, c.peer(t))

		// A caller that sets a certificate does not present it.
		careless := client(ca.Bundle(), spiffe.AllowIDs(dbID))
		careless.Certificates = []tls.Certificate{*ca.SVID("/web").TLSCertificate()}
		s, _ = good(t, db.asking(t, version), careless, false, "careless")
		assert.Empty(t, s.state.PeerCertificates)

		for name, bad := range map[string]struct {
			peers spiffe.BundleSource
			allow spiffe.Policy
			stage string
		}{
			"another ID":           {ca.Bundle(), spiffe.AllowIDs(ca.SVID("/else").ID()), "policy"},
			"another trust domain": {other.Bundle(), spiffe.AllowAnyPeer(), "bundle"},
			"another CA":           {spiffetest.NewCA(t, "example.org").Bundle(), spiffe.AllowAnyPeer(), "chain"},
		} {
			s, c := connect(t, db.asking(t, version), client(bad.peers, bad.allow))
			verifyError(t, c.err, bad.stage)
			assert.Error(t, s.err, name)
		}

		s, c = connect(t, db.serverAt(t, version), client(ca.Bundle(), spiffe.AllowIDs(dbID)))
		assert.ErrorContains(t, s.err, "didn't provide a certificate", "a server that requires one")
		assert.Error(t, c.err)

		for _, f := range spiffetest.Faults() {
			bad := bare(ca.Broken(f.Name))
			bad.MaxVersion, bad.ClientAuth = version, tls.NoClientCert
			_, c := connect(t, bad, client(ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain())))
			if slices.Contains(f.Refused, spiffe.ServerRole) {
				assert.Equal(t, f.Rule, verifyError(t, c.err, f.Stage).Rule, f.Name)
			} else {
				assert.NoError(t, c.err, f.Name)
			}
		}
	})
}

// TestAnonymousClients: none is fine, and one that is presented must be good.
func TestAnonymousClients(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "X5-5", "X5-31", "X5-39")
	eachVersion(t, func(t *testing.T, ca *spiffetest.CA, db, web *party, version uint16) {
		ca2 := spiffetest.NewCA(t, "example.org")
		server := func(allow spiffe.Policy) *tls.Config {
			c := db.server(t, allow, anonymous(version))
			c.MaxVersion = version
			return c
		}
		any := spiffe.AllowMembersOf(ca.TrustDomain())

		// Plain crypto/tls, without a certificate and with a good one.
		s, c := connect(t, server(any), &tls.Config{InsecureSkipVerify: true})
		require.NoError(t, s.err)
		require.NoError(t, c.err)
		assert.Empty(t, s.state.PeerCertificates)
		chain, key := ca.Certificate("/plain")
		s, c = connect(t, server(any), bare(chain, key))
		require.NoError(t, c.err)
		assert.Equal(t, "spiffe://example.org/plain", s.peer(t).String())
		s, _ = good(t, server(any), web.resumingAt(t, version), false, "ours")
		assert.Equal(t, "spiffe://example.org/web", s.peer(t).String())

		for _, f := range spiffetest.Faults() {
			bad := bare(ca.Broken(f.Name))
			bad.MaxVersion = version
			s, c := connect(t, server(any), bad)
			if !slices.Contains(f.Refused, spiffe.ClientRole) {
				assert.NoError(t, s.err, f.Name)
				continue
			}
			assert.Equal(t, f.Rule, verifyError(t, s.err, f.Stage).Rule, f.Name)
			refusedBy(t, c.err)
		}
		for name, client := range map[string]*tls.Config{
			"another CA":      bare(ca2.Certificate("/web")),
			"a web server's":  func() *tls.Config { l := webLeaf(ca2, nil, "a.test"); return bare([]*x509.Certificate{l.Leaf}, key) }(),
			"another's key":   bare(chain, ca.SVID("/thief").Signer()),
			"tampered":        bare([]*x509.Certificate{tampered(chain[0])}, key),
			"too many":        bare(append(slices.Clone(chain), slices.Repeat([]*x509.Certificate{ca.Root()}, 20)...), key),
			"the CA's itself": bare([]*x509.Certificate{ca.Root()}, key),
		} {
			s, c := connect(t, server(any), client)
			assert.Error(t, s.err, name)
			assert.Error(t, c.err, name)
		}
		s, c = connect(t, server(spiffe.AllowIDs(ca.SVID("/else").ID())), bare(chain, key))
		verifyError(t, s.err, "policy")
		refusedBy(t, c.err)
	})
}

// tampered is c with another signature.
func tampered(c *x509.Certificate) *x509.Certificate {
	der := slices.Clone(c.Raw)
	der[len(der)-1] ^= 1
	return &x509.Certificate{Raw: der}
}

// TestAnonymousResumption: a ticket changes nothing about who the client was.
func TestAnonymousResumption(t *testing.T) {
	t.Parallel()
	eachVersion(t, func(t *testing.T, ca *spiffetest.CA, db, web *party, version uint16) {
		server := db.asking(t, version)
		nobody := clientWith(t, noIdentity(), ca.Bundle(), spiffe.AllowAnyPeer(), version)
		known := web.resumingAt(t, version)
		for i := range 3 {
			s, _ := good(t, server, nobody, i > 0, "without a certificate")
			assert.Empty(t, s.state.PeerCertificates)
			s, _ = good(t, server, known, i > 0, "with one")
			assert.Equal(t, "spiffe://example.org/web", s.peer(t).String())
		}
		db.renew(ca.SVID("/db"))
		good(t, server, nobody, false, "the server has renewed")
		good(t, server, nobody, true, "with a new ticket")

		// A client whose root went is refused, and not taken for one without a certificate.
		db.learn(spiffetest.NewCA(t, "example.org").Bundles())
		good(t, server, nobody, true, "has no root")
		for range 2 {
			s, c := connect(t, server, known)
			verifyError(t, s.err, "chain")
			refusedBy(t, c.err)
		}
		db.learn(ca.Bundles())

		// Servers that share ticket keys: the strict one does not take the ticket of the other.
		strict := db.serverAt(t, version)
		key := [][32]byte{{1}}
		server.SetSessionTicketKeys(key)
		strict.SetSessionTicketKeys(key)
		good(t, server, nobody, false, "new keys")
		good(t, server, nobody, true, "and a ticket")
		s, c := connect(t, strict, nobody)
		assert.ErrorContains(t, s.err, "didn't provide a certificate")
		assert.Error(t, c.err)
		known = web.resumingAt(t, version)
		good(t, strict, known, false, "a client with an identity")
		s, _ = good(t, server, known, true, "may take its ticket along")
		assert.Equal(t, "spiffe://example.org/web", s.peer(t).String())

		// A server that does not ask, and is not this package's, has made a session without any proof.
		plain := &tls.Config{Certificates: []tls.Certificate{*ca.SVID("/db").TLSCertificate()}, MaxVersion: version}
		plain.SetSessionTicketKeys(key)
		known = web.resumingAt(t, version)
		good(t, plain, known, false, "nothing was asked for")
		good(t, plain, known, true, "and a ticket")
		s, _ = good(t, server, known, false, "declined, so that the certificate is asked for")
		assert.Equal(t, "spiffe://example.org/web", s.peer(t).String())
	})
}

// TestForgedAnonymousTicket exchanges what this package notes in a session, beside what crypto/tls keeps.
func TestForgedAnonymousTicket(t *testing.T) {
	t.Parallel()
	eachVersion(t, func(t *testing.T, ca *spiffetest.CA, db, web *party, version uint16) {
		const ours = "svidkit/spiffetls/1:"
		server := db.asking(t, version)
		var edit func([]byte) []byte
		wrap := server.WrapSession
		server.WrapSession = func(cs tls.ConnectionState, ss *tls.SessionState) ([]byte, error) {
			if _, err := wrap(cs, ss); err != nil { // for what it appends
				return nil, err
			}
			ss.Extra = [][]byte{edit(ss.Extra[len(ss.Extra)-1])}
			return server.EncryptTicket(cs, ss)
		}
		nobody := func() *tls.Config {
			return clientWith(t, noIdentity(), ca.Bundle(), spiffe.AllowAnyPeer(), version)
		}
		known := web.resumingAt(t, version)

		// The chain of a proven client in the session of another: it stays without proof.
		svid, _ := web.SVID()
		edit = func(e []byte) []byte { return append(e, svid.Leaf().Raw...) }
		client := nobody()
		good(t, server, client, false, "first")
		s, _ := good(t, server, client, true, "again")
		assert.Empty(t, s.state.PeerCertificates)

		// No chain in the session of a proven client: it is verified all the same.
		edit = func(e []byte) []byte { return e[:len(ours)+32] }
		good(t, server, known, false, "first")
		s, _ = good(t, server, known, true, "again")
		assert.Equal(t, "spiffe://example.org/web", s.peer(t).String())
		db.learn(spiffetest.NewCA(t, "example.org").Bundles())
		s, c := connect(t, server, known)
		verifyError(t, s.err, "chain")
		assert.Error(t, c.err)
		db.learn(ca.Bundles())

		for name, f := range map[string]func([]byte) []byte{
			"junk":         func(e []byte) []byte { return append(e, "junk"...) },
			"cut":          func(e []byte) []byte { return e[:len(e)-1] },
			"other server": func(e []byte) []byte { e[len(ours)] ^= 1; return e },
			"not ours":     func([]byte) []byte { return []byte("other") },
			"nothing":      func([]byte) []byte { return nil },
		} {
			edit = f
			client := nobody()
			good(t, server, client, false, name)
			good(t, server, client, false, name)
		}
	})
}

// TestAnonymousRequests has net/http on both sides.
func TestAnonymousRequests(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	for _, version := range versions {
		for _, protos := range [][]string{nil, {"http/1.1"}} {
			other := (version == tls.VersionTLS12) == (protos == nil)
			for _, governed := range []bool{other, !other}[:min(2, rounds.Of(1))] {
				t.Run(fmt.Sprint(tls.VersionName(version), protos, governed), func(t *testing.T) {
					t.Parallel()
					var failures spiffetls.Metrics
					opts := anonymous(version)
					opts.Metrics = &failures
					if governed {
						opts.Governor = &spiffetls.Governor{}
						govern(t, opts.Governor)
					}
					anyPeer := must.Get(spiffetls.RequirePeer(spiffe.AllowAnyPeer(), who))(t)
					mux := http.NewServeMux()
					mux.Handle("/", who)
					mux.Handle("/proven", anyPeer)
					s := &http.Server{Handler: mux}
					require.NoError(t, configureServer(s, with(opts, ca.SVID("/db"), ca.Bundle(), spiffe.AllowAnyPeer())))
					s.TLSConfig.MaxVersion = version
					base := serve(t, s, nil)
					client := func(self spiffe.SVIDSource) *http.Client {
						transport, err := newTransport(with(&spiffetls.Config{MinVersion: version, NextProtos: protos}, self, ca.Bundle(), spiffe.AllowIDs(ca.SVID("/db").ID())))
						require.NoError(t, err)
						t.Cleanup(transport.CloseIdleConnections)
						transport.TLSClientConfig.ClientSessionCache = tls.NewLRUClientSessionCache(1)
						return &http.Client{Transport: transport}
					}
					major := map[bool]int{true: 2, false: 1}[protos == nil]
					for range 2 { // resumed, too
						nobody, known := client(noIdentity()), client(ca.SVID("/web"))
						assert.Equal(t, fmt.Sprintf("%d nobody", major), get(t, nobody, base))
						assert.Equal(t, "forbidden\n", get(t, nobody, base+"/proven"))
						nobody.CloseIdleConnections()
						assert.Equal(t, "forbidden\n", get(t, nobody, base+"/proven"))
						for range 2 {
							assert.Equal(t, fmt.Sprintf("%d spiffe://example.org/web", major), get(t, known, base+"/proven"))
							known.CloseIdleConnections()
						}
					}
					f := one(t, &failures)
					assert.Equal(t, "request no_certificate", f.Kind)
					assert.EqualValues(t, 4, f.Count)
					assert.EqualError(t, f.Err, "the client presented no certificate")

					stranger, err := client(spiffetest.NewCA(t, "example.org").SVID("/web")).Get(base)
					assert.Error(t, err)
					if err == nil {
						_ = stranger.Body.Close()
					}
					want := tally{"request no_certificate": 4, "server failed unknown_authority": 1}
					assert.Equal(t, want, failuresOf(t, &failures), "a bad certificate is not an anonymous client")
				})
			}
		}
	}
}

// TestAnonymousClientGivesUp: a handshake that ends after the server was content is noted.
func TestAnonymousClientGivesUp(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	var failures spiffetls.Metrics
	opts := anonymous(tls.VersionTLS12)
	opts.Metrics = &failures
	s := configured(t, ca, spiffe.AllowAnyPeer(), opts)
	s.TLSConfig.MaxVersion = tls.VersionTLS12
	base := serve(t, s, nil)
	raw := must.Get(net.Dial("tcp", strings.TrimPrefix(base, "https://")))(t)
	// The last message of the client's first flight is its Finished. It is never sent.
	conn := tls.Client(&lastCut{Conn: raw}, &tls.Config{InsecureSkipVerify: true})
	require.Error(t, conn.Handshake())
	_ = raw.Close()
	counted(t, &failures, tally{"server failed not_proven": 1})
}

// lastCut cuts the end of a client's second flight in TLS 1.2: the record of Finished.
type lastCut struct {
	net.Conn
	writes int
}

func (c *lastCut) Write(p []byte) (int, error) {
	if c.writes++; c.writes == 1 {
		return c.Conn.Write(p)
	}
	if n, err := c.Conn.Write(p[:len(p)-10]); err != nil {
		return n, err
	}
	_ = c.Conn.(*net.TCPConn).CloseWrite()
	return len(p), nil
}

// TestOptionalIdentity: without an identity the handshake goes on without.
func TestOptionalIdentity(t *testing.T) {
	t.Parallel()
	for _, version := range versions {
		t.Run(tls.VersionName(version), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ca := spiffetest.NewCA(t, "example.org")
				lasting := func(c *x509.Certificate) { c.NotAfter = c.NotBefore.Add(48 * time.Hour) }
				db, web := newParty(ca.SVID("/db", lasting), ca.Bundles()), newParty(ca.SVID("/web"), ca.Bundles())
				var missing atomic.Bool
				self := source(func() (*spiffe.SVID, error) {
					if missing.Load() {
						return nil, errors.New("not ready")
					}
					return web.SVID()
				})
				log := &journal{}
				var failures spiffetls.Metrics
				c, err := clientConfig(spiffetls.Config{Self: self, OptionalIdentity: true, Peers: web, Allow: spiffe.AllowAnyPeer(), MinVersion: version, Logger: log.logger(), Metrics: &failures})
				require.NoError(t, err)
				c.ServerName, c.ClientSessionCache = "server.test", tls.NewLRUClientSessionCache(4)
				asks, strict := db.asking(t, version), db.serverAt(t, version)
				presents := func(want bool) {
					t.Helper()
					s, _ := good(t, asks, c, false, "never resumed: the identity is of this moment")
					if want {
						assert.Equal(t, "spiffe://example.org/web", s.peer(t).String())
						good(t, strict, c, false, "as if it were not optional")
						return
					}
					assert.Empty(t, s.state.PeerCertificates)
					s, cl := connect(t, strict, c)
					assert.ErrorContains(t, s.err, "didn't provide a certificate")
					assert.Error(t, cl.err)
				}
				presents(true)
				time.Sleep(time.Hour) // to the last second
				presents(true)
				assert.Empty(t, log.take(t))
				time.Sleep(time.Second)
				presents(false)
				lines := log.take(t)
				require.Len(t, lines, 1)
				assert.Equal(t, "spiffetls: no identity presented", lines[0]["msg"])
				assert.Contains(t, lines[0]["err"], `the SVID of "spiffe://example.org/web" expired`)
				web.renew(ca.SVID("/web"))
				presents(true)
				missing.Store(true)
				presents(false)
				missing.Store(false)
				presents(true)

				// The server is verified whether or not this side presents something.
				web.learn(spiffetest.NewCA(t, "example.org").Bundles())
				for _, m := range []bool{false, true} {
					missing.Store(m)
					_, cl := connect(t, asks, c)
					verifyError(t, cl.err, "chain")
				}
				kinds := slices.Collect(maps.Keys(failuresOf(t, &failures)))
				assert.Equal(t, []string{"client failed unknown_authority"}, kinds, "a withheld identity is no failure")
				time.Sleep(time.Hour) // the log's timer ends
			})
		})
	}
}

// TestWebCertificate is a web server that verifies its clients by their IDs.
func TestWebCertificate(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	eachVersion(t, func(t *testing.T, ca *spiffetest.CA, _, web *party, version uint16) {
		pki := spiffetest.NewCA(t, "web.test")
		here := newSite(webLeaf(pki, nil, "server.test"))
		server := func(opts *spiffetls.Config) *tls.Config {
			opts.MinVersion = version
			c := must.Get(serverConfig(with(opts, webCertificate(here.get), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()))))(t)
			c.MaxVersion = version
			return c
		}
		roots := newPool(pki)
		client := func() *tls.Config { return clientWith(t, web, webRoots(roots.get), nil, version) }
		chain, key := ca.Certificate("/plain")
		plain := func() *tls.Config { // crypto/tls verifies by name
			c := bare(chain, key)
			c.InsecureSkipVerify, c.RootCAs, c.ServerName = false, pki.Bundle().CertPool(), "server.test"
			c.ClientSessionCache = tls.NewLRUClientSessionCache(4)
			return c
		}
		var failures spiffetls.Metrics
		for i, opts := range []*spiffetls.Config{{}, {Metrics: &failures}} {
			sc := server(opts)
			for name, cc := range map[string]*tls.Config{"spiffe://example.org/web": client(), "spiffe://example.org/plain": plain()} {
				for range 3 {
					before := here.asked.Load()
					s, c := good(t, sc, cc, false, name)
					assert.Equal(t, name, s.peer(t).String())
					assert.Equal(t, []string{"server.test"}, c.state.PeerCertificates[0].DNSNames)
					assert.EqualValues(t, 1, here.asked.Load()-before, "asked once a handshake")
				}
				here.now.Store(webLeaf(pki, nil, "server.test"))
				good(t, sc, cc, false, "renewed")
				here.now.Store(func() *tls.Certificate { c := *webLeaf(pki, nil, "server.test"); c.Leaf = nil; return &c }())
				good(t, sc, cc, false, "without a parsed leaf")
			}
			// Clients are verified as ever.
			s, c := connect(t, sc, &tls.Config{InsecureSkipVerify: true})
			assert.ErrorContains(t, s.err, "didn't provide a certificate")
			assert.Error(t, c.err)
			for n, f := range spiffetest.Faults() {
				if n%2 != i && rounds.Of(1) == 1 {
					continue
				}
				bad := bare(ca.Broken(f.Name))
				bad.MaxVersion = version
				if s, _ := connect(t, sc, bad); slices.Contains(f.Refused, spiffe.ClientRole) {
					assert.Equal(t, f.Rule, verifyError(t, s.err, f.Stage).Rule, f.Name)
				} else {
					assert.NoError(t, s.err, f.Name)
				}
			}
			s, _ = connect(t, sc, bare(pki.Certificate("/web")))
			verifyError(t, s.err, "bundle")
		}
		// A workload that expects an ID does not take a web server for it.
		_, c := connect(t, server(&spiffetls.Config{}), web.client(t, spiffe.AllowAnyPeer(), &spiffetls.Config{MinVersion: version}))
		assert.Equal(t, "X5-3", verifyError(t, c.err, "leaf").Rule)

		// With clients that have no certificate, too.
		sc := server(anonymous(version))
		nobody := plain()
		nobody.GetClientCertificate, nobody.Certificates = nil, nil
		for range 2 {
			s, _ := good(t, sc, nobody, false, "a browser")
			assert.Empty(t, s.state.PeerCertificates)
			s, _ = good(t, sc, client(), false, "a workload")
			assert.Equal(t, "spiffe://example.org/web", s.peer(t).String())
		}
	})
}

// TestWebCertificateByName has a certificate for each name, and tickets that do not cross from one to the other.
func TestWebCertificateByName(t *testing.T) {
	t.Parallel()
	eachVersion(t, func(t *testing.T, ca *spiffetest.CA, _, web *party, version uint16) {
		pki := spiffetest.NewCA(t, "web.test")
		certs := map[string]*tls.Certificate{"a.test": webLeaf(pki, nil, "a.test"), "b.test": webLeaf(pki, nil, "b.test", "a.test")}
		get := func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
			if c := certs[hello.ServerName]; c != nil {
				return c, nil
			}
			return nil, fmt.Errorf("no certificate for %q", hello.ServerName)
		}
		server, err := serverConfig(spiffetls.Config{WebCertificate: get, Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer(), MinVersion: version})
		require.NoError(t, err)
		server.MaxVersion = version
		cache := &oneSession{}
		client := func(name string) *tls.Config {
			c := clientWith(t, web, webRoots(newPool(pki).get), nil, version)
			c.ServerName, c.ClientSessionCache = name, cache
			return c
		}
		good(t, server, client("b.test"), false, "first")
		_, c := good(t, server, client("a.test"), false, "another name")
		assert.Equal(t, []string{"a.test"}, c.state.PeerCertificates[0].DNSNames)
		s, c := connect(t, server, client("c.test"))
		assert.ErrorContains(t, s.err, `no identity to present: web certificate: no certificate for "c.test"`)
		assert.EqualError(t, c.err, "remote error: tls: internal error")

		// A server that resumes whatever it is shown does not fool the client.
		lax := &tls.Config{GetCertificate: get, ClientAuth: tls.RequireAnyClientCert, MaxVersion: version}
		cache.session = nil
		good(t, lax, client("a.test"), false, "first")
		_, c = connect(t, lax, client("b.test"))
		require.True(t, c.state.DidResume)
		webRefused(t, c.err, "certificate is valid for a.test, not b.test")
	})
}

// oneSession is a cache with one session for every name.
type oneSession struct{ session *tls.ClientSessionState }

func (c *oneSession) Get(string) (*tls.ClientSessionState, bool)    { return c.session, c.session != nil }
func (c *oneSession) Put(_ string, session *tls.ClientSessionState) { c.session = session }

// TestWebCertificateMissing: a server without a good certificate of its own fails on its side, also by ticket.
func TestWebCertificateMissing(t *testing.T) {
	t.Parallel()
	eachVersion(t, func(t *testing.T, ca *spiffetest.CA, _, web *party, version uint16) {
		pki := spiffetest.NewCA(t, "web.test")
		gone := errors.New("gone")
		for name, c := range map[string]struct {
			cert *tls.Certificate
			err  error
			want string
		}{
			"error":   {nil, gone, "web certificate: gone"},
			"nil":     {nil, nil, "the function of WebCertificate returned none"},
			"empty":   {&tls.Certificate{}, nil, "the function of WebCertificate returned none"},
			"junk":    {&tls.Certificate{Certificate: [][]byte{[]byte("junk")}}, nil, "web certificate: x509: malformed"},
			"expired": {webLeaf(pki, expired, "server.test"), nil, `the web certificate for ["server.test"] expired at `},
			"expired, not parsed": {func() *tls.Certificate {
				c := webLeaf(pki, expired, "server.test")
				c.Leaf = nil
				return c
			}(), nil, `the web certificate for ["server.test"] expired at `},
		} {
			for _, opts := range []*spiffetls.Config{{}, {Metrics: new(spiffetls.Metrics)}} {
				opts.MinVersion = version
				fine := webLeaf(pki, nil, "server.test")
				var bad atomic.Bool
				server := must.Get(serverConfig(with(opts, webCertificate(func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
					if bad.Load() {
						return c.cert, c.err
					}
					return fine, nil
				}), ca.Bundle(), spiffe.AllowAnyPeer())))(t)
				server.MaxVersion = version
				client := clientWith(t, web, webRoots(newPool(pki).get), nil, version)
				good(t, server, client, false, name)
				bad.Store(true)
				s, cl := connect(t, server, client)
				assert.ErrorContains(t, s.err, "spiffetls: no identity to present: "+c.want)
				assert.EqualError(t, cl.err, "remote error: tls: internal error", name)
				if c.err != nil {
					assert.ErrorIs(t, s.err, gone)
				}
				if opts.Metrics != nil {
					assert.Equal(t, "server failed no_identity", one(t, opts.Metrics).Kind, name)
				}
				bad.Store(false)
				s, cl = connect(t, server, client) // the client may have lost its session
				assert.NoError(t, errors.Join(s.err, cl.err), name)
			}
		}
	})
}

func expired(c *x509.Certificate) {
	c.NotBefore, c.NotAfter = c.NotBefore.Add(-time.Hour), c.NotBefore.Add(-time.Minute)
}

// TestWebRoots: each server has one thing wrong.
func TestWebRoots(t *testing.T) {
	t.Parallel()
	eachVersion(t, func(t *testing.T, ca *spiffetest.CA, db, web *party, version uint16) {
		pki, ca2 := spiffetest.NewCA(t, "web.test"), spiffetest.NewCA(t, "web.test")
		fine := webLeaf(pki, nil, "server.test")
		many := *fine
		many.Certificate = append(slices.Clone(fine.Certificate), slices.Repeat([][]byte{pki.Root().Raw}, 16)...)
		altered := *fine
		altered.Certificate = [][]byte{tampered(fine.Leaf).Raw}
		thief := *fine
		thief.PrivateKey = ca2.SVID("/thief").Signer()
		below := pki.Intermediate()
		missing := *webLeaf(below, nil, "server.test")
		missing.Certificate = missing.Certificate[:1]
		broken := func() (*x509.CertPool, error) { return nil, errors.New("the file is gone") }
		roots := newPool(pki).get
		for name, c := range map[string]struct {
			cert  *tls.Certificate
			roots func() (*x509.CertPool, error)
			name  string
			want  string // empty if it is good
		}{
			"good":                 {cert: fine},
			"an intermediate":      {cert: webLeaf(below, nil, "server.test")},
			"a wildcard":           {cert: webLeaf(pki, nil, "*.test")},
			"one of many names":    {cert: webLeaf(pki, nil, "a.test", "server.test", "127.0.0.1")},
			"another name":         {cert: webLeaf(pki, nil, "other.test"), want: "certificate is valid for other.test, not server.test"},
			"a longer name":        {cert: webLeaf(pki, nil, "a.server.test"), want: "not server.test"},
			"a wider wildcard":     {cert: webLeaf(pki, nil, "*.test"), name: "a.server.test", want: "not a.server.test"},
			"the common name only": {cert: webLeaf(pki, func(c *x509.Certificate) { c.Subject.CommonName = "server.test" }), want: "legacy Common Name"},
			"an SVID":              {cert: ca.SVID("/db").TLSCertificate(), roots: newPool(ca).get, want: "not valid for any names"},
			"another CA":           {cert: webLeaf(ca2, nil, "server.test"), want: "signed by unknown authority"},
			"the workloads' CA":    {cert: webLeaf(ca, nil, "server.test"), want: "signed by unknown authority"},
			"no intermediate":      {cert: &missing, want: "signed by unknown authority"},
			"expired":              {cert: webLeaf(pki, expired, "server.test"), want: "expired"},
			"not valid yet": {cert: webLeaf(pki, func(c *x509.Certificate) {
				c.NotBefore, c.NotAfter = c.NotBefore.Add(time.Hour), c.NotBefore.Add(2*time.Hour)
			}, "server.test"), want: "is before"},
			"for clients only": {cert: webLeaf(pki, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} }, "server.test"), want: "incompatible key usage"},
			"tampered":         {cert: &altered, want: "unknown authority"},
			"too many":         {cert: &many, want: "17 certificates, the limit is 16"},
			"an IP address":    {cert: webLeaf(pki, nil, "127.0.0.1"), name: "127.0.0.1", want: "the server's host name is not known"},
			"no roots":         {cert: fine, roots: broken, want: "there are no roots to verify a web server with: the file is gone"},
			"nil roots":        {cert: fine, roots: func() (*x509.CertPool, error) { return nil, nil }, want: "there are no roots to verify a web server with: the function of WebRoots returned none"},
			"empty roots":      {cert: fine, roots: func() (*x509.CertPool, error) { return x509.NewCertPool(), nil }, want: "unknown authority"},
			"the host's roots": {cert: fine, roots: x509.SystemCertPool, want: "unknown authority"},
		} {
			var failures spiffetls.Metrics
			if c.roots == nil {
				c.roots = roots
			}
			client := must.Get(clientConfig(spiffetls.Config{Self: web, WebRoots: c.roots, MinVersion: version, Metrics: &failures}))(t)
			client.ServerName = "server.test"
			if c.name != "" {
				client.ServerName = c.name
			}
			server := &tls.Config{Certificates: []tls.Certificate{*c.cert}, ClientAuth: tls.RequireAnyClientCert, MaxVersion: version}
			s, cl := connect(t, server, client)
			if c.want == "" {
				require.NoError(t, cl.err, name)
				assert.Equal(t, "spiffe://example.org/web", s.peer(t).String(), "presented to a web server")
				continue
			}
			t.Run(name, func(t *testing.T) {
				webRefused(t, cl.err, c.want)
				refusedBy(t, s.err)
				f := one(t, &failures)
				assert.Regexp(t, "^client failed ", f.Kind)
				_, id := ruleOf(f.Err)
				assert.Empty(t, id)
			})
		}
		s, c := connect(t, &tls.Config{Certificates: []tls.Certificate{thief}, MaxVersion: version}, clientWith(t, web, webRoots(roots), nil, version))
		assert.ErrorContains(t, c.err, "invalid signature", "another's key")
		assert.Error(t, s.err)
		s, c = connect(t, db.serverAt(t, version), clientWith(t, web, webRoots(roots), nil, version))
		webRefused(t, c.err, "not valid for any names")
		assert.Error(t, s.err)

		// The host name is normalized as crypto/tls does.
		dotted := clientWith(t, web, webRoots(roots), nil, version)
		dotted.ServerName = "server.test."
		good(t, &tls.Config{Certificates: []tls.Certificate{*fine}, MaxVersion: version}, dotted, false, "dotted")
	})
}

// TestWebRootsAreReadAgain: roots that were replaced count at the next handshake, resumed or not.
func TestWebRootsAreReadAgain(t *testing.T) {
	t.Parallel()
	eachVersion(t, func(t *testing.T, ca *spiffetest.CA, _, web *party, version uint16) {
		pki, ca2 := spiffetest.NewCA(t, "web.test"), spiffetest.NewCA(t, "web.test")
		roots := newPool(pki)
		client := clientWith(t, web, webRoots(roots.get), nil, version)
		server := &tls.Config{Certificates: []tls.Certificate{*webLeaf(pki, nil, "server.test")}, MaxVersion: version}
		good(t, server, client, false, "first")
		good(t, server, client, true, "resumed")
		roots.now.Store(ca2.Bundle().CertPool())
		for i := range 2 {
			_, c := connect(t, server, client)
			assert.Equal(t, i == 0, c.state.DidResume, "the session is dropped when it is refused")
			webRefused(t, c.err, "unknown authority")
		}
		server.Certificates[0] = *webLeaf(ca2, nil, "server.test")
		good(t, server, client, false, "the new root")
		roots.now.Store(nil)
		_, c := connect(t, server, client)
		webRefused(t, c.err, "the file is gone")
		roots.now.Store(ca2.Bundle().CertPool())
		good(t, server, client, false, "the file is back")
		good(t, server, client, true, "with a ticket")
	})
}

// TestWebSessionExpires: a session does not outlive the certificate, which crypto/tls would not look at.
func TestWebSessionExpires(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca, pki := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "web.test")
		web := newParty(ca.SVID("/web", func(c *x509.Certificate) { c.NotAfter = c.NotBefore.Add(9 * time.Hour) }), ca.Bundles())
		client := clientWith(t, web, webRoots(newPool(pki).get), nil, tls.VersionTLS13)
		server := &tls.Config{Certificates: []tls.Certificate{*webLeaf(pki, nil, "server.test")}}
		good(t, server, client, false, "first")
		time.Sleep(time.Hour)
		good(t, server, client, true, "to the last second")
		time.Sleep(time.Second)
		_, c := connect(t, server, client)
		webRefused(t, c.err, "the certificate expired 1s ago: if the other side renews in time, compare the clocks")
	})
}

// TestWebTransport reaches web servers by name and by address, with net/http on both sides.
func TestWebTransport(t *testing.T) {
	t.Parallel()
	ca, pki := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "web.test")
	for name, opts := range map[string]*spiffetls.Config{
		"plain": nil, "HTTP/1.1": http1, "TLS 1.2": {MinVersion: tls.VersionTLS12}, "failures": {Metrics: new(spiffetls.Metrics)},
		"governed": {Governor: &spiffetls.Governor{}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			here := newSite(webLeaf(pki, nil, "server.test", "127.0.0.1"))
			s := &http.Server{Handler: who}
			serverOpts := spiffetls.Config{MinVersion: tls.VersionTLS12}
			if opts != nil && opts.Governor != nil {
				govern(t, opts.Governor)
				serverOpts.Governor = opts.Governor
			}
			require.NoError(t, configureServer(s, with(&serverOpts, webCertificate(here.get), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()))))
			if opts != nil && opts.MinVersion == tls.VersionTLS12 {
				s.TLSConfig.MaxVersion = tls.VersionTLS12
			}
			base := serve(t, s, nil)
			transport := must.Get(newTransport(with(opts, ca.SVID("/web"), webRoots(newPool(pki).get), nil)))(t)
			t.Cleanup(transport.CloseIdleConnections)
			transport.TLSClientConfig.ClientSessionCache = tls.NewLRUClientSessionCache(4)
			var dialled atomic.Int64
			transport.DialContext = func(ctx context.Context, network, _ string) (net.Conn, error) {
				dialled.Add(1)
				return new(net.Dialer).DialContext(ctx, network, strings.TrimPrefix(base, "https://"))
			}
			client := &http.Client{Transport: transport}
			for _, host := range []string{"server.test", "127.0.0.1", "server.test:8443"} {
				for range 2 {
					assert.Contains(t, get(t, client, "https://"+host), " spiffe://example.org/web")
					transport.CloseIdleConnections()
				}
			}
			assert.EqualValues(t, 6, dialled.Load())
			for _, host := range []string{"other.test", "127.0.0.2", "[::1]"} {
				_, err := client.Get("https://" + host)
				ue, ok := errors.AsType[*url.Error](err)
				require.True(t, ok)
				webRefused(t, ue.Err, "x509: certificate is valid for")
			}
			transport.TLSClientConfig.ServerName = "other.test"
			_, err := client.Get("https://server.test")
			webRefused(t, err, "not other.test")
			transport.TLSClientConfig.ServerName = "server.test"
			assert.Contains(t, get(t, client, "https://elsewhere.test"), "spiffe://example.org/web", "the name to verify is the caller's choice")
		})
	}
}

// TestWebTransportKeepsTheCallersCheck: a VerifyConnection around ours is asked, and cannot be forgotten by a dial of ours.
func TestWebTransportKeepsTheCallersCheck(t *testing.T) {
	t.Parallel()
	ca, pki := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "web.test")
	s := &http.Server{Handler: who}
	require.NoError(t, configureServer(s, spiffetls.Config{WebCertificate: newSite(webLeaf(pki, nil, "127.0.0.1")).get, Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer()}))
	base := serve(t, s, nil)
	transport := must.Get(newTransport(spiffetls.Config{Self: ca.SVID("/web"), WebRoots: newPool(pki).get}))(t)
	t.Cleanup(transport.CloseIdleConnections)
	pinned := errors.New("not the pinned key")
	verify := transport.TLSClientConfig.VerifyConnection
	transport.TLSClientConfig.VerifyConnection = func(cs tls.ConnectionState) error { return errors.Join(verify(cs), pinned) }
	_, err := (&http.Client{Transport: transport}).Get(base)
	assert.ErrorIs(t, err, pinned)
	_, ok := errors.AsType[*tls.CertificateVerificationError](err)
	assert.False(t, ok, "the name was told to it: %v", err)
}

// oneSidedServer is a server in memory, with a Governor, in a bubble.
func oneSidedServer(t *testing.T, self spiffe.SVIDSource, peers spiffe.BundleSource, opts spiffetls.Config) (*memconn.Listener, *spiffetls.Governor) {
	t.Helper()
	opts.Governor = &spiffetls.Governor{}
	s := &http.Server{Handler: who, ErrorLog: log.New(io.Discard, "", 0)}
	require.NoError(t, configureServer(s, with(&opts, self, peers, spiffe.AllowAnyPeer())))
	l := inMemory(t, s)
	govern(t, opts.Governor)
	return l, opts.Governor
}

// webClient is a client in memory whose connections stay open.
func webClient(t *testing.T, l *memconn.Listener, self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *spiffetls.Config) *http.Client {
	t.Helper()
	transport := must.Get(newTransport(with(opts, self, peers, allow)))(t)
	transport.IdleConnTimeout = 0
	transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { return l.Dial(ctx) }
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// TestGovernorAndAnonymousClients: there is no proof that could end, but the server's own certificate does.
func TestGovernorAndAnonymousClients(t *testing.T) {
	t.Parallel()
	for name, selfOf := range map[string]func(*spiffetest.CA) spiffe.SVIDSource{
		"SVID": func(ca *spiffetest.CA) spiffe.SVIDSource { return ca.SVID("/db") },
		"web": func(ca *spiffetest.CA) spiffe.SVIDSource {
			return webCertificate(newSite(webLeaf(ca, nil, "db")).get)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ca := spiffetest.NewCA(t, "example.org")
				lasting := func(c *x509.Certificate) { c.NotAfter = c.NotBefore.Add(9 * time.Hour) }
				peers := announcing(newParty(ca.SVID("/x", lasting), ca.Bundles()))
				l, g := oneSidedServer(t, selfOf(ca), peers, spiffetls.Config{AllowAnonymousClients: true})
				nobody := &http.Client{Transport: &http.Transport{
					DialContext:     func(ctx context.Context, _, _ string) (net.Conn, error) { return l.Dial(ctx) },
					TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
				}}
				t.Cleanup(nobody.CloseIdleConnections)
				known := &http.Client{Transport: &http.Transport{
					DialContext:     func(ctx context.Context, _, _ string) (net.Conn, error) { return l.Dial(ctx) },
					TLSClientConfig: bare(ca.Certificate("/known", lasting)),
				}}
				t.Cleanup(known.CloseIdleConnections)
				assert.Equal(t, "1 nobody", get(t, nobody, "https://db"))
				assert.Equal(t, "1 spiffe://example.org/known", get(t, known, "https://db"))
				synctest.Wait()
				assert.Equal(t, governorStatus{Open: 2}, statusOf(t, g))

				peers.learn(spiffetest.NewCA(t, "example.org").Bundles())
				time.Sleep(pause + jitter + grace)
				assert.Equal(t, governorStatus{Open: 1, Ended: 1}, statusOf(t, g), "the proof of one is gone")
				assert.Equal(t, "1 nobody", get(t, nobody, "https://db"))
				assert.Equal(t, 1, statusOf(t, g).Open, "on the same connection")

				time.Sleep(58 * time.Minute)
				assert.Equal(t, 1, statusOf(t, g).Open)
				time.Sleep(2 * time.Minute)
				assert.Equal(t, governorStatus{Ended: 2}, statusOf(t, g), "the server's certificate has expired")
			})
		})
	}
}

// TestGovernorAndWebServers: the connection of a client ends with the server's certificate or its root.
func TestGovernorAndWebServers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca, pki := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "web.test")
		lasting := func(c *x509.Certificate) { c.NotAfter = c.NotBefore.Add(9 * time.Hour) }
		s := &http.Server{
			Handler:   http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.TLS.PeerCertificates[0].URIs[0]) }),
			TLSConfig: &tls.Config{Certificates: []tls.Certificate{*webLeaf(pki, nil, "server.test")}, ClientAuth: tls.RequireAnyClientCert},
			ErrorLog:  log.New(io.Discard, "", 0),
		}
		l := inMemory(t, s)
		var out notes
		g := &spiffetls.Governor{}
		govern(t, g)
		roots := newPool(pki)
		client := webClient(t, l, ca.SVID("/web", lasting), webRoots(roots.get), nil, &spiffetls.Config{Governor: g, Logger: slog.New(slog.NewTextHandler(&out, nil))})
		assert.Equal(t, "spiffe://example.org/web", get(t, client, "https://server.test"))
		roots.now.Store(nil)
		time.Sleep(5 * time.Minute)
		assert.Equal(t, governorStatus{Open: 1}, statusOf(t, g), "roots that cannot be read end nothing")
		assert.Contains(t, out.String(), "a connection cannot be judged")
		roots.now.Store(spiffetest.NewCA(t, "web.test").Bundle().CertPool())
		time.Sleep(time.Minute + jitter + grace)
		assert.Equal(t, governorStatus{Ended: 1}, statusOf(t, g), "the root is gone")
		assert.Contains(t, out.String(), "peer=server.test")

		roots.now.Store(pki.Bundle().CertPool())
		assert.Equal(t, "spiffe://example.org/web", get(t, client, "https://server.test"))
		time.Sleep(time.Hour)
		assert.Equal(t, governorStatus{Ended: 2}, statusOf(t, g), "the certificate has expired")
	})
}

// TestWebReasons: what a log says is one of a few texts.
func TestWebReasons(t *testing.T) {
	t.Parallel()
	ca, pki := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "web.test")
	for want, c := range map[string]struct {
		cert  *tls.Certificate
		roots func() (*x509.CertPool, error)
	}{
		"wrong_host":        {webLeaf(pki, nil, "hostile.test"), newPool(pki).get},
		"unknown_authority": {webLeaf(ca, nil, "server.test"), newPool(pki).get},
		"expired":           {webLeaf(pki, expired, "server.test"), newPool(pki).get},
		"no_roots":          {webLeaf(pki, nil, "server.test"), (&pool{}).get},
		"invalid": {webLeaf(pki, func(c *x509.Certificate) {
			c.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{1, 2, 3}, Critical: true, Value: []byte{5, 0}}}
		}, "server.test"), newPool(pki).get},
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			j := &journal{}
			client := must.Get(clientConfig(spiffetls.Config{Self: ca.SVID("/web"), WebRoots: c.roots, Logger: j.logger()}))(t)
			client.ServerName = "server.test"
			_, _ = connect(t, &tls.Config{Certificates: []tls.Certificate{*c.cert}}, client)
			lines := j.take(t)
			require.Len(t, lines, 1)
			assert.Equal(t, want, lines[0]["reason"])
			assert.Equal(t, "spiffetls: handshake failed", lines[0]["msg"])
			assert.Equal(t, "server.test", lines[0]["remote"])
		})
	}
}

// TestOneSidedAllocs is not parallel, as others would count.
func TestOneSidedAllocs(t *testing.T) {
	ca := spiffetest.NewCA(t, "example.org")
	p := newParty(ca.SVID("/web"), ca.Bundles())
	server := p.asking(t, tls.VersionTLS13)
	client := must.Get(clientConfig(spiffetls.Config{Self: p, OptionalIdentity: true, Peers: p, Allow: spiffe.AllowAnyPeer()}))(t)
	assert.Zero(t, testing.AllocsPerRun(100, func() { _ = server.VerifyConnection(tls.ConnectionState{}) }))
	assert.Zero(t, testing.AllocsPerRun(100, func() { _, _ = client.GetClientCertificate(nil) }))
	cs := tls.ConnectionState{PeerCertificates: ca.SVID("/db").Chain()}
	require.NoError(t, server.VerifyConnection(cs))
	assert.Zero(t, testing.AllocsPerRun(100, func() { _ = server.VerifyConnection(cs) }))
}
