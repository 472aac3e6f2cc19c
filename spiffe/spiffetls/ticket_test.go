package spiffetls_test

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// good wants a connection that both sides accept and that was resumed or not.
func good(t *testing.T, server, client *tls.Config, resumed bool, msg string) (s, c result) {
	t.Helper()
	s, c = connect(t, server, client)
	require.NoError(t, s.err, msg)
	require.NoError(t, c.err, msg)
	require.Equal(t, resumed, s.state.DidResume, msg)
	require.Equal(t, resumed, c.state.DidResume, msg)
	return s, c
}

// eachVersion runs f for TLS 1.2 and 1.3, with the parties /db and /web of one CA and options that
// make the version possible.
func eachVersion(t *testing.T, f func(t *testing.T, ca *spiffetest.CA, db, web *party, version uint16)) {
	for _, version := range versions {
		t.Run(tls.VersionName(version), func(t *testing.T) {
			t.Parallel()
			ca := spiffetest.NewCA(t, "example.org")
			f(t, ca, newParty(ca.SVID("/db"), ca.Bundles()), newParty(ca.SVID("/web"), ca.Bundles()), version)
		})
	}
}

func (p *party) serverAt(t *testing.T, version uint16) *tls.Config {
	t.Helper()
	c := p.server(t, spiffe.AllowAnyPeer(), &spiffetls.Config{MinVersion: version})
	c.MaxVersion = version
	return c
}

func (p *party) resumingAt(t *testing.T, version uint16) *tls.Config {
	t.Helper()
	return p.resuming(t, spiffe.AllowAnyPeer(), &spiffetls.Config{MinVersion: version})
}

func TestResumption(t *testing.T) {
	t.Parallel()
	eachVersion(t, func(t *testing.T, _ *spiffetest.CA, db, web *party, version uint16) {
		server, client := db.serverAt(t, version), web.resumingAt(t, version)
		good(t, server, client, false, "first")
		for range 3 {
			s, c := good(t, server, client, true, "again")
			assert.Equal(t, "spiffe://example.org/web", s.peer(t).String(), "the client is still known")
			assert.Equal(t, "spiffe://example.org/db", c.peer(t).String())
		}
		good(t, server.Clone(), client, true, "a clone shares the keys")
		good(t, db.serverAt(t, version), client, false, "another configuration does not")
	})
}

// TestResumptionAfterRootsWereReplaced is the attack that tickets make possible: what was accepted
// once must not stay accepted.
func TestResumptionAfterRootsWereReplaced(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "X5-31", "XV-58")
	eachVersion(t, func(t *testing.T, ca *spiffetest.CA, db, web *party, version uint16) {
		server, client := db.serverAt(t, version), web.resumingAt(t, version)
		good(t, server, client, false, "first")
		good(t, server, client, true, "the ticket is good")
		db.learn(spiffetest.NewCA(t, "example.org").Bundles())
		s, c := connect(t, server, client)
		assert.Equal(t, "X5-31", verifyError(t, s.err, "chain").Rule)
		assert.False(t, s.state.DidResume, "the ticket was declined, and the certificate refused")
		refusedBy(t, c.err)

		db.learn(ca.Bundles())
		connect(t, server, client)
		good(t, server, client, true, "trusted again, nothing was broken by the refusal")
	})
}

// TestVerifyConnectionSeesResumption takes our own ticket check away, to show that VerifyConnection
// refuses by itself.
func TestVerifyConnectionSeesResumption(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "GO-8")
	eachVersion(t, func(t *testing.T, _ *spiffetest.CA, db, web *party, version uint16) {
		server, client := db.serverAt(t, version), web.resumingAt(t, version)
		server.WrapSession, server.UnwrapSession = nil, nil
		verify, resumed := server.VerifyConnection, 0
		server.VerifyConnection = func(cs tls.ConnectionState) error {
			if cs.DidResume {
				resumed++
			}
			return verify(cs)
		}
		good(t, server, client, false, "first")
		good(t, server, client, true, "the ticket is good")
		require.Equal(t, 1, resumed)
		db.learn(spiffetest.NewCA(t, "example.org").Bundles())
		s, c := connect(t, server, client)
		verifyError(t, s.err, "chain")
		assert.Equal(t, 2, resumed, "a resumed session was refused")
		assert.Error(t, c.err)
	})
}

// TestRenewedClientIsNotKeptOut has a client whose ticket is from before the old root went.
func TestRenewedClientIsNotKeptOut(t *testing.T) {
	t.Parallel()
	eachVersion(t, func(t *testing.T, ca *spiffetest.CA, db, web *party, version uint16) {
		server, client := db.serverAt(t, version), web.resumingAt(t, version)
		good(t, server, client, false, "first")
		ca.Rotate()
		web.learn(ca.Bundles())
		db.learn(ca.Bundles())
		good(t, server, client, true, "a new root beside the old one ends nothing")
		web.renew(ca.SVID("/web"))
		good(t, server, client, true, "the old certificate is still good")

		ca.DropOldRoots()
		db.learn(ca.Bundles()) // and not the client, which still has to accept the server's certificate
		good(t, server, client, false, "declined, and then accepted for the new certificate")
		good(t, server, client, true, "with a new ticket")
	})
}

// TestServerRenewal shows that a renewal of the server's SVID reaches clients that resume.
func TestServerRenewal(t *testing.T) {
	t.Parallel()
	eachVersion(t, func(t *testing.T, ca *spiffetest.CA, db, web *party, version uint16) {
		server, client := db.serverAt(t, version), web.resumingAt(t, version)
		good(t, server, client, false, "first")
		good(t, server, client, true, "resumed")
		renewed := ca.SVID("/db")
		db.renew(renewed)
		_, c := good(t, server, client, false, "declined")
		assert.True(t, renewed.Leaf().Equal(c.state.PeerCertificates[0]))
		good(t, server, client, true, "with a new ticket")
	})
}

// TestCarefulRotationWithResumption is TestRotation for one client that resumes: not one handshake
// fails.
func TestCarefulRotationWithResumption(t *testing.T) {
	t.Parallel()
	eachVersion(t, func(t *testing.T, ca *spiffetest.CA, db, web *party, version uint16) {
		server, client := db.serverAt(t, version), web.resumingAt(t, version)
		resumed := 0
		step := func(f func()) {
			f()
			for range 2 {
				s, c := connect(t, server, client)
				require.NoError(t, s.err)
				require.NoError(t, c.err)
				if c.state.DidResume {
					resumed++
				}
			}
		}
		times := rounds.Of(2)
		for range times {
			step(ca.Prepare)
			step(func() { db.learn(ca.Bundles()) })
			step(func() { web.learn(ca.Bundles()) })
			step(ca.Rotate)
			step(func() { web.renew(ca.SVID("/web")) })
			step(func() { db.renew(ca.SVID("/db")) })
			step(ca.DropOldRoots)
			step(func() { web.learn(ca.Bundles()) })
			step(func() { db.learn(ca.Bundles()) })
		}
		assert.Equal(t, times*9*2-(1+times), resumed, "all but the first and those after the server's renewals, which show the client's too")
	})
}

// TestClientRefusesResumption has the client distrust the server between two connections.
func TestClientRefusesResumption(t *testing.T) {
	t.Parallel()
	eachVersion(t, func(t *testing.T, ca *spiffetest.CA, db, web *party, version uint16) {
		server, client := db.serverAt(t, version), web.resumingAt(t, version)
		good(t, server, client, false, "first")
		good(t, server, client, true, "resumed")
		web.learn(spiffetest.NewCA(t, "example.org").Bundles())
		for range 2 {
			s, c := connect(t, server, client)
			verifyError(t, c.err, "chain")
			assert.Error(t, s.err)
		}
		web.learn(ca.Bundles())
		good(t, server, client, false, "the session is gone")
	})
}

// TestResumptionEnds shows that no expiry is outlived by a session, wherever in the chain it is, and
// that a full handshake with what is good now follows without a failure.
func TestResumptionEnds(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]struct{ leaf, intermediate time.Duration }{
		"leaf":         {30 * time.Minute, time.Hour},
		"intermediate": {time.Hour, 30 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ca := spiffetest.NewCA(t, "example.org")
				lasting := func(d time.Duration) func(*x509.Certificate) {
					return func(c *x509.Certificate) { c.NotAfter = c.NotBefore.Add(d) }
				}
				db := newParty(ca.SVID("/db"), ca.Bundles())
				web := newParty(ca.Intermediate(lasting(end.intermediate)).SVID("/web", lasting(end.leaf)), ca.Bundles())
				server, client := db.serverAt(t, tls.VersionTLS13), web.resumingAt(t, tls.VersionTLS13)
				good(t, server, client, false, "first")
				time.Sleep(29 * time.Minute)
				good(t, server, client, true, "resumed")
				time.Sleep(2 * time.Minute)
				web.renew(ca.SVID("/web"))
				s, _ := good(t, server, client, false, "declined")
				assert.Len(t, s.state.PeerCertificates, 1, "the new one")
				good(t, server, client, true, "with a new ticket")
			})
		})
	}
}

// TestServerWithoutIdentityDoesNotResume: a session is no way around the expiry of the server.
func TestServerWithoutIdentityDoesNotResume(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		db := newParty(ca.SVID("/db"), ca.Bundles())
		web := newParty(ca.SVID("/web", func(c *x509.Certificate) { c.NotAfter = c.NotBefore.Add(2 * time.Hour) }), ca.Bundles())
		server, client := db.serverAt(t, tls.VersionTLS13), web.resumingAt(t, tls.VersionTLS13)
		// A clock on the client that is slow keeps it from dropping the session by itself.
		start := time.Now()
		client.Time = func() time.Time { return start }
		good(t, server, client, false, "first")
		good(t, server, client, true, "resumed")
		time.Sleep(time.Hour + time.Second)
		s, _ := connect(t, server, client)
		assert.ErrorContains(t, s.err, "no identity to present")
	})
}

// TestLongChainIsNotResumed: the ticket of a client with a very long chain does not grow beyond what
// fits; the client is served all the same.
func TestLongChainIsNotResumed(t *testing.T) {
	t.Parallel()
	eachVersion(t, func(t *testing.T, ca *spiffetest.CA, db, web *party, version uint16) {
		web.renew(ca.SVID("/web", func(c *x509.Certificate) {
			for range 1000 {
				c.DNSNames = append(c.DNSNames, "a-name-of-some-length.example.org")
			}
		}))
		server, client := db.serverAt(t, version), web.resumingAt(t, version)
		good(t, server, client, false, "first")
		good(t, server, client, false, "again")
	})
}

// TestForgedExtra puts entries of other layers and broken ones of ours into the session: they are
// skipped or declined, and never more than that.
func TestForgedExtra(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	db, web := newParty(ca.SVID("/db"), ca.Bundles()), newParty(ca.SVID("/web"), ca.Bundles())
	const ours = "svidkit/spiffetls/1:"
	for name, c := range map[string]struct {
		edit    func(extra [][]byte) [][]byte
		resumed bool
	}{
		"others around ours": {func(e [][]byte) [][]byte { return [][]byte{[]byte("other"), e[0], nil} }, true},
		"none":               {func([][]byte) [][]byte { return nil }, false},
		"only others":        {func([][]byte) [][]byte { return [][]byte{[]byte("other")} }, false},
		"no contents":        {func([][]byte) [][]byte { return [][]byte{[]byte(ours)} }, false},
		"no certificate":     {func(e [][]byte) [][]byte { return [][]byte{e[0][:len(ours)+32]} }, false},
		"cut":                {func(e [][]byte) [][]byte { return [][]byte{e[0][:len(e[0])-1]} }, false},
		"junk":               {func(e [][]byte) [][]byte { return [][]byte{append(e[0], "junk"...)} }, false},
		"other server":       {func(e [][]byte) [][]byte { e[0][len(ours)] ^= 1; return e }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server, client := db.serverAt(t, tls.VersionTLS13), web.resumingAt(t, tls.VersionTLS13)
			wrap := server.WrapSession
			server.WrapSession = func(cs tls.ConnectionState, ss *tls.SessionState) ([]byte, error) {
				if _, err := wrap(cs, ss); err != nil { // for what it appends
					return nil, err
				}
				ss.Extra = c.edit(ss.Extra)
				return server.EncryptTicket(cs, ss)
			}
			good(t, server, client, false, "first")
			good(t, server, client, c.resumed, "again")
		})
	}
}

// TestResumptionAfterPolicyChanged: a ticket is no way around a policy that is stricter now.
func TestResumptionAfterPolicyChanged(t *testing.T) {
	t.Parallel()
	eachVersion(t, func(t *testing.T, ca *spiffetest.CA, db, web *party, version uint16) {
		opts := &spiffetls.Config{MinVersion: version}
		everyone, nobody := spiffe.AllowMembersOf(ca.TrustDomain()), spiffe.AllowIDs(ca.SVID("/else").ID())
		var allowClient, allowServer spiffe.LivePolicy
		require.NoError(t, allowClient.Set(everyone))
		require.NoError(t, allowServer.Set(everyone))
		server := must.Get(serverConfig(with(opts, db, db, &allowClient)))(t)
		server.MaxVersion = version
		client := must.Get(clientConfig(with(opts, web, web, &allowServer)))(t)
		client.ServerName, client.ClientSessionCache = "server.test", tls.NewLRUClientSessionCache(4)
		good(t, server, client, false, "first")
		good(t, server, client, true, "the ticket is good")

		require.NoError(t, allowClient.Set(nobody))
		for range 2 {
			s, c := connect(t, server, client)
			assert.ErrorIs(t, verifyError(t, s.err, "policy"), spiffe.ErrDenied)
			assert.False(t, s.state.DidResume, "the ticket was declined")
			refusedBy(t, c.err)
		}
		require.NoError(t, allowClient.Set(everyone))
		s, c := connect(t, server, client) // resumed or not: the client may have dropped its session
		require.NoError(t, s.err)
		require.NoError(t, c.err)
		good(t, server, client, true, "allowed again")

		require.NoError(t, allowServer.Set(nobody))
		for i := range 2 {
			s, c := connect(t, server, client)
			assert.ErrorIs(t, verifyError(t, c.err, "policy"), spiffe.ErrDenied)
			assert.Equal(t, i == 0, c.state.DidResume, "the session is dropped when it is refused")
			assert.Error(t, s.err)
		}
		require.NoError(t, allowServer.Set(everyone))
		good(t, server, client, false, "allowed again, from the start")
		good(t, server, client, true, "with a new ticket")
	})
}

// TestTransportResumes has net/http on both sides and a cache in the transport, with and without a
// dialler of ours, and removes the root of the one and then of the other.
func TestTransportResumes(t *testing.T) {
	t.Parallel()
	for name, opts := range map[string]*spiffetls.Config{
		"plain": nil, "own dialler": {Metrics: new(spiffetls.Metrics)}, "HTTP/1.1": {Metrics: new(spiffetls.Metrics), NextProtos: http1.NextProtos},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ca := spiffetest.NewCA(t, "example.org")
			other := spiffetest.NewCA(t, "example.org").Bundles()
			db, web := newParty(ca.SVID("/db"), ca.Bundles()), newParty(ca.SVID("/web"), ca.Bundles())
			s := &http.Server{Handler: who}
			require.NoError(t, configureServer(s, with(opts, db, db, spiffe.AllowAnyPeer())))
			url := serve(t, s, nil)
			transport := must.Get(newTransport(with(opts, web, web, spiffe.AllowAnyPeer())))(t)
			t.Cleanup(transport.CloseIdleConnections)
			transport.TLSClientConfig.ClientSessionCache = tls.NewLRUClientSessionCache(1)
			ask := func() (resumed bool, err error) {
				transport.CloseIdleConnections()
				resp, err := (&http.Client{Transport: transport}).Get(url)
				if err != nil {
					return false, err
				}
				body := must.Get(io.ReadAll(resp.Body))(t)
				require.NoError(t, resp.Body.Close())
				assert.Contains(t, string(body), " spiffe://example.org/web")
				return resp.TLS.DidResume, nil
			}
			expect := func(resumed bool) {
				t.Helper()
				got := must.Get(ask())(t)
				require.Equal(t, resumed, got)
			}
			expect(false)
			expect(true)
			db.learn(other)
			_, err := ask()
			require.Error(t, err)
			db.learn(ca.Bundles())
			_, _ = ask() // one way or the other, as the client may have lost its session
			expect(true)
			web.learn(other)
			_, err = ask()
			verifyError(t, err, "chain")
			web.learn(ca.Bundles())
			expect(false)
			expect(true)
		})
	}
}

// TestSharedCache shows why each identity needs a cache of its own.
func TestSharedCache(t *testing.T) {
	t.Parallel()
	eachVersion(t, func(t *testing.T, ca *spiffetest.CA, db, web *party, version uint16) {
		server, first, second := db.serverAt(t, version), web.resumingAt(t, version), newParty(ca.SVID("/other"), ca.Bundles()).resumingAt(t, version)
		good(t, server, first, false, "first")
		s, _ := good(t, server, second, false, "a cache of its own")
		assert.Equal(t, "spiffe://example.org/other", s.peer(t).String())
		second.ClientSessionCache = first.ClientSessionCache
		s, _ = good(t, server, second, true, "the other's session")
		assert.Equal(t, "spiffe://example.org/web", s.peer(t).String(), "and so the other's identity")
	})
}
