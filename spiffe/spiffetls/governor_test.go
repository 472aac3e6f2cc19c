package spiffetls_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io"
	"log"
	"log/slog"
	"math"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// announcer is a party that says when it learns.
type announcer struct {
	*party
	mu sync.Mutex
	ch chan struct{}
}

func announcing(p *party) *announcer { return &announcer{party: p, ch: make(chan struct{})} }

func (a *announcer) Changed() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.ch
}

func (a *announcer) learn(bundles *spiffe.BundleSet) {
	a.party.learn(bundles)
	a.mu.Lock()
	defer a.mu.Unlock()
	close(a.ch)
	a.ch = make(chan struct{})
}

// fixture is a server in memory, in a bubble, with a running Governor.
type fixture struct {
	t       *testing.T
	g       *spiffetls.Governor
	l       *memconn.Listener
	release chan struct{} // ends the requests for /wait
	log     notes
}

// notes are written by one goroutine and read by another.
type notes = logtest.Buffer

// bounds of the Governor that fixtures have, and a little.
const (
	grace   = 30 * time.Second
	jitter  = 10 * time.Second
	pause   = time.Second
	quiet   = time.Second
	silence = 5 * time.Second
	instant = time.Millisecond
)

// govern runs g until the test ends.
func govern(t *testing.T, g *spiffetls.Governor) {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(t.Context()))
	enough := errors.New("enough")
	var wg sync.WaitGroup
	wg.Go(func() { assert.NoError(t, g.Run(ctx)) })
	t.Cleanup(func() {
		cancel(enough)
		wg.Wait()
	})
}

// open makes a fixture. A test changes what self, peers and allow return.
func open(t *testing.T, g *spiffetls.Governor, self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource) *fixture {
	t.Helper()
	return openAt(t, nil, g, self, peers, allow)
}

// openAt makes a fixture with a clock of its own.
func openAt(t *testing.T, clock func() time.Time, g *spiffetls.Governor, self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource) *fixture {
	t.Helper()
	w := &fixture{t: t, release: make(chan struct{})}
	if g == nil {
		g = &spiffetls.Governor{}
	}
	w.g = g
	mux := http.NewServeMux()
	mux.Handle("/", who)
	mux.HandleFunc("/wait", func(rw http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(rw).Flush()
		select {
		case <-w.release:
			_, _ = io.WriteString(rw, "released")
		case <-r.Context().Done():
		}
	})
	mux.HandleFunc("/hijack", func(rw http.ResponseWriter, r *http.Request) {
		conn, _, err := http.NewResponseController(rw).Hijack()
		if !assert.NoError(t, err) {
			return
		}
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n")
		_, _ = io.Copy(conn, conn)
		_ = conn.Close()
	})
	s := &http.Server{Handler: mux, ErrorLog: log.New(io.Discard, "", 0)}
	require.NoError(t, configureServer(s, with(&spiffetls.Config{Governor: w.g, Now: clock, Logger: slog.New(slog.NewTextHandler(&w.log, nil))}, self, peers, allow)))
	w.l = inMemory(t, s)
	govern(t, w.g)
	return w
}

// caller is a client with the connections that it has made.
type caller struct {
	t *testing.T
	*http.Client
	mu    sync.Mutex
	conns []*noted
}

// noted is a connection that notes when it has ended.
type noted struct {
	net.Conn
	ended atomic.Pointer[time.Time]
}

func (c *noted) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err != nil {
		c.ended.CompareAndSwap(nil, new(time.Now()))
	}
	return n, err
}

func (c *noted) Close() error {
	c.ended.CompareAndSwap(nil, new(time.Now()))
	return c.Conn.Close()
}

func (w *fixture) caller(self spiffe.SVIDSource, peers spiffe.BundleSource, opts *spiffetls.Config) *caller {
	w.t.Helper()
	transport, err := newTransport(with(opts, self, peers, spiffe.AllowAnyPeer()))
	require.NoError(w.t, err)
	transport.IdleConnTimeout = 0
	c := &caller{t: w.t, Client: &http.Client{Transport: transport}}
	transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, err := w.l.Dial(ctx)
		if err != nil {
			return nil, err
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.conns = append(c.conns, &noted{Conn: conn})
		return c.conns[len(c.conns)-1], nil
	}
	w.t.Cleanup(transport.CloseIdleConnections)
	return c
}

func (c *caller) ask() string {
	c.t.Helper()
	return get(c.t, c.Client, "https://server.test/")
}

// wait begins a request that is answered when the fixture says so, and returns a func that waits for what
// became of it.
func (c *caller) wait() func() (string, error) {
	c.t.Helper()
	resp, err := c.Get("https://server.test/wait")
	require.NoError(c.t, err)
	var body []byte
	var wg sync.WaitGroup
	wg.Go(func() {
		body, err = io.ReadAll(resp.Body)
		_ = resp.Body.Close()
	})
	return func() (string, error) {
		wg.Wait()
		return string(body), err
	}
}

// last returns the connection that was made last, and when it ended.
func (c *caller) last() *noted {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.conns[len(c.conns)-1]
}

func (c *caller) isOpen() bool { return c.last().ended.Load() == nil }

func (c *caller) made() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.conns)
}

// crowd is a caller for each version of HTTP that is idle, and one that waits.
type crowd struct {
	idle, busy []*caller
	waiting    []func() (string, error)
}

func (w *fixture) crowd(self spiffe.SVIDSource, peers spiffe.BundleSource, opts spiffetls.Config) *crowd {
	w.t.Helper()
	c := &crowd{}
	for _, protos := range [][]string{nil, {"http/1.1"}} {
		opts.NextProtos = protos
		idle, busy := w.caller(self, peers, &opts), w.caller(self, peers, &opts)
		idle.ask()
		c.idle, c.busy = append(c.idle, idle), append(c.busy, busy)
		c.waiting = append(c.waiting, busy.wait())
	}
	return c
}

func (c *crowd) requireOpen(t *testing.T, idle, busy bool, msg string) {
	t.Helper()
	for i := range c.idle {
		require.Equal(t, idle, c.idle[i].isOpen(), "idle, HTTP/%d: %s", 2-i, msg)
		require.Equal(t, busy, c.busy[i].isOpen(), "busy, HTTP/%d: %s", 2-i, msg)
	}
}

// unharmed requires that every client still has its first connection.
func (c *crowd) unharmed(t *testing.T) {
	t.Helper()
	c.requireOpen(t, true, true, "not concerned")
	for _, x := range c.idle {
		x.ask()
		require.Equal(t, 1, x.made())
	}
}

func (c *crowd) cutOff(t *testing.T) {
	t.Helper()
	for _, wait := range c.waiting {
		_, err := wait()
		assert.Error(t, err, "what was cut has not ended well")
	}
}

func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, f)
}

// after lets time pass, and everything happen that follows.
func after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func twoDomains(t *testing.T) (home, other *spiffetest.CA, both *spiffe.BundleSet) {
	t.Helper()
	home, other = spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
	return home, other, home.Bundles().With(other.Bundle())
}

// TestServerGovernor takes away what proved half of a server's clients.
func TestServerGovernor(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		announced bool
		policy    bool
		empty     bool // the root goes, and the bundle stays
	}{
		"root, announced":     {announced: true},
		"root, not announced": {},
		"policy":              {announced: true, policy: true},
		"all roots":           {announced: true, empty: true},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				home, other, both := twoDomains(t)
				self := newParty(home.SVID("/server"), both)
				allow := new(spiffe.LivePolicy)
				require.NoError(t, allow.Set(spiffe.AllowAnyPeer()))
				peers := announcing(self)
				var source spiffe.BundleSource = peers
				if !c.announced {
					source = self
				}
				w := open(t, nil, self, source, allow)
				good, bad := w.crowd(home.SVID("/good"), both, spiffetls.Config{}), w.crowd(other.SVID("/bad"), both, spiffetls.Config{})
				require.Equal(t, governorStatus{Open: 8}, statusOf(t, w.g))
				after(time.Minute + 10*time.Second)
				good.unharmed(t)
				bad.unharmed(t)

				bound := pause
				switch {
				case c.policy:
					require.NoError(t, allow.Set(spiffe.AllowMembersOf(home.TrustDomain())))
				case c.empty:
					none := must.Get(spiffe.NewBundle(other.TrustDomain(), spiffe.BundleContents{}))(t)
					peers.learn(both.With(none))
				case c.announced:
					peers.learn(home.Bundles())
				default:
					self.learn(home.Bundles())
					bound = time.Minute
				}
				after(bound + jitter + quiet)
				bad.requireOpen(t, false, true, "idle connections went, busy ones have grace")
				require.Equal(t, governorStatus{Open: 6, Draining: 2, Ended: 2}, statusOf(t, w.g))
				after(grace)
				bad.requireOpen(t, false, false, "the bound is over")
				bad.cutOff(t)
				require.Equal(t, governorStatus{Open: 4, Ended: 4}, statusOf(t, w.g))
				good.unharmed(t)
				close(w.release)
				for _, wait := range good.waiting {
					body, err := wait()
					assert.NoError(t, err)
					assert.Equal(t, "released", body)
				}
				assert.Equal(t, 1, strings.Count(w.log.String(), "connection is drained"), w.log.String())
				assert.Contains(t, w.log.String(), "peer=spiffe://other.test/bad remote=mem side=server err=")
			})
		})
	}
}

// TestBusyConnectionsEndAfterTheirWork: a request that ends within the grace loses nothing.
func TestBusyConnectionsEndAfterTheirWork(t *testing.T) {
	bubble(t, func(t *testing.T) {
		home, other, both := twoDomains(t)
		self := newParty(home.SVID("/server"), both)
		peers := announcing(self)
		w := open(t, nil, self, peers, spiffe.AllowAnyPeer())
		bad := w.crowd(other.SVID("/bad"), both, spiffetls.Config{})
		synctest.Wait()
		peers.learn(home.Bundles())
		after(pause + jitter + instant)
		bad.requireOpen(t, false, true, "busy ones have grace")
		close(w.release)
		for _, wait := range bad.waiting {
			body := must.Get(wait())(t)
			require.Equal(t, "released", body, "to the last byte")
		}
		after(quiet + pause + instant)
		bad.requireOpen(t, false, false, "and went when they were done")
		require.Equal(t, governorStatus{Ended: 4}, statusOf(t, w.g))
	})
}

// TestClientGovernor takes away what proved a server, in the bundle of some of its clients.
func TestClientGovernor(t *testing.T) {
	bubble(t, func(t *testing.T) {
		home, other, both := twoDomains(t)
		w := open(t, nil, home.SVID("/server"), both, spiffe.AllowAnyPeer())
		g := &spiffetls.Governor{}
		govern(t, g)
		mine := announcing(newParty(other.SVID("/mine"), both))
		losing := w.crowd(mine, mine, spiffetls.Config{Governor: g})
		keeping := w.crowd(other.SVID("/other"), both, spiffetls.Config{Governor: g})
		require.Equal(t, governorStatus{Open: 8}, statusOf(t, g))
		after(time.Minute)
		losing.unharmed(t)
		mine.learn(other.Bundles())
		after(pause + jitter + silence)
		for _, c := range losing.idle {
			require.False(t, c.isOpen())
		}
		after(grace)
		losing.requireOpen(t, false, false, "the bound is over")
		losing.cutOff(t)
		keeping.unharmed(t)
		require.Equal(t, governorStatus{Open: 4, Ended: 4}, statusOf(t, g))
		_, err := losing.idle[0].Get("https://server.test/")
		assert.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)

		// What a client closes by itself, leaves.
		for _, c := range keeping.idle {
			c.CloseIdleConnections()
		}
		synctest.Wait()
		assert.Equal(t, 2, statusOf(t, g).Open)
		close(w.release)
		for _, wait := range keeping.waiting {
			body, err := wait()
			assert.NoError(t, err)
			assert.Equal(t, "released", body)
		}
	})
}

// TestClosedByClient: connections that clients close leave the server's Governor.
func TestClosedByClient(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		w := open(t, nil, ca.SVID("/server"), ca.Bundles(), spiffe.AllowAnyPeer())
		for _, opts := range []*spiffetls.Config{nil, http1} {
			c := w.caller(ca.SVID("/client"), ca.Bundles(), opts)
			c.ask()
			require.Equal(t, 1, statusOf(t, w.g).Open)
			c.CloseIdleConnections()
			synctest.Wait()
			require.Zero(t, statusOf(t, w.g))
		}
	})
}

// TestQuiet: HTTP/2 is not cut in the moment in which the end of an answer may be under way.
func TestQuiet(t *testing.T) {
	bubble(t, func(t *testing.T) {
		home, other, both := twoDomains(t)
		self := newParty(home.SVID("/server"), both)
		peers := announcing(self)
		w := open(t, &spiffetls.Governor{Jitter: -1}, self, peers, spiffe.AllowAnyPeer())
		h2, h1 := w.caller(other.SVID("/bad"), both, nil), w.caller(other.SVID("/bad"), both, http1)
		h2.ask()
		h1.ask()
		after(3*pause - 10*instant)
		peers.learn(home.Bundles())
		h2.ask()
		after(20 * instant)
		require.False(t, h1.isOpen())
		require.True(t, h2.isOpen())
		after(quiet + pause)
		require.False(t, h2.isOpen())
	})
}

// TestSlowFirstByte: a request that waits for the first byte of its response is not idle.
func TestSlowFirstByte(t *testing.T) {
	bubble(t, func(t *testing.T) {
		home, _, both := twoDomains(t)
		l := memconn.Listen()
		s := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(grace - 10*time.Second)
			who(rw, r)
		}), ErrorLog: log.New(io.Discard, "", 0)}
		require.NoError(t, configureServer(s, spiffetls.Config{Self: home.SVID("/server"), Peers: both, Allow: spiffe.AllowAnyPeer()}))
		var wg sync.WaitGroup
		wg.Go(func() { assert.ErrorIs(t, s.ServeTLS(l, "", ""), http.ErrServerClosed) })
		defer wg.Wait()
		defer s.Close()
		w := &fixture{t: t, l: l}
		g := &spiffetls.Governor{Jitter: -1}
		govern(t, g)
		mine := announcing(newParty(home.SVID("/mine"), both))
		c := w.caller(mine, mine, &spiffetls.Config{Governor: g, NextProtos: http1.NextProtos})
		wg.Go(func() { assert.Equal(t, "1 spiffe://example.org/mine", c.ask()) })
		after(2 * time.Second)
		mine.learn(spiffetest.NewCA(t, "example.org").Bundles())
		after(grace - 12*time.Second - instant)
		require.True(t, c.isOpen())
		require.Equal(t, 1, statusOf(t, g).Draining)
		after(silence + 2*instant)
		require.False(t, c.isOpen())
	})
}

// TestClosedInTheHandshake: a connection that was closed before the Governor knew it does not stay.
func TestClosedInTheHandshake(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	p := newParty(ca.SVID("/db"), ca.Bundles())
	g := &spiffetls.Governor{}
	below := memconn.Listen()
	ctx, cancel := context.WithCancel(t.Context())
	closing := policyFunc(func() spiffe.Policy {
		cancel() // crypto/tls closes the connection
		return spiffe.AllowAnyPeer()
	})
	endpoint := must.Get(spiffetls.New(with(&spiffetls.Config{Governor: g}, p, p, closing)))(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		accepted := must.Get(below.Accept())(t)
		_, err := endpoint.Server(ctx, accepted)
		assert.Error(t, err)
	})
	raw := must.Get(below.Dial(t.Context()))(t)
	client := tls.Client(raw, p.client(t, spiffe.AllowAnyPeer(), nil))
	_ = client.HandshakeContext(t.Context())
	wg.Wait()
	_ = client.Close()
	assert.Zero(t, statusOf(t, g).Open)
}

// policyFunc is a PolicySource that is a func.
type policyFunc func() spiffe.Policy

func (f policyFunc) Policy() spiffe.Policy { return f() }

// TestShorterPath: a connection ends with the path by which it is trusted now.
func TestShorterPath(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
		// The root once more, for another time: the same name and the same key.
		root := func(serial int64, life time.Duration) *x509.Certificate {
			template := &x509.Certificate{
				SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "root"}, NotBefore: time.Now(), NotAfter: time.Now().Add(life),
				IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
			}
			der := must.Get(x509.CreateCertificate(rand.Reader, template, template, key.Public(), key))(t)
			cert := must.Get(x509.ParseCertificate(der))(t)
			return cert
		}
		bundles := func(root *x509.Certificate) *spiffe.BundleSet {
			b, err := spiffe.NewBundle(spiffe.MustParseTrustDomain("other.test"), spiffe.BundleContents{X509Authorities: []*x509.Certificate{root}})
			require.NoError(t, err)
			return ca.Bundles().With(b)
		}
		long := root(1, 24*time.Hour)
		id := spiffe.MustParseID("spiffe://other.test/client")
		der := must.Get(x509.CreateCertificate(rand.Reader, &x509.Certificate{
			SerialNumber: big.NewInt(3), URIs: []*url.URL{id.URL()}, NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
		}, long, key.Public(), key))(t)
		leaf := must.Get(x509.ParseCertificate(der))(t)
		client := must.Get(spiffe.NewSVID([]*x509.Certificate{leaf}, key))(t)

		self := newParty(ca.SVID("/server"), bundles(long))
		peers := announcing(self)
		w := open(t, &spiffetls.Governor{Interval: 24 * time.Hour}, self, peers, spiffe.AllowAnyPeer())
		crowd := w.crowd(client, ca.Bundles(), spiffetls.Config{})
		after(time.Minute)
		peers.learn(bundles(root(2, 20*time.Minute)))
		after(10 * time.Minute)
		crowd.unharmed(t)
		after(10*time.Minute + instant)
		crowd.requireOpen(t, false, false, "over")
	})
}

// TestSlowAnswer: a client's connection on which something moves is not idle.
func TestSlowAnswer(t *testing.T) {
	bubble(t, func(t *testing.T) {
		home, _, both := twoDomains(t)
		l := memconn.Listen()
		s := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			for range 5 {
				_, _ = io.WriteString(rw, "slow ")
				_ = http.NewResponseController(rw).Flush()
				select {
				case <-time.After(4 * time.Second):
				case <-r.Context().Done():
				}
			}
			_, _ = io.WriteString(rw, "end")
		}), ErrorLog: log.New(io.Discard, "", 0)}
		require.NoError(t, configureServer(s, spiffetls.Config{Self: home.SVID("/server"), Peers: both, Allow: spiffe.AllowAnyPeer()}))
		var wg sync.WaitGroup
		wg.Go(func() { assert.ErrorIs(t, s.ServeTLS(l, "", ""), http.ErrServerClosed) })
		defer wg.Wait()
		defer s.Close()
		w := &fixture{t: t, l: l}
		g := &spiffetls.Governor{Jitter: -1}
		govern(t, g)
		mine := announcing(newParty(home.SVID("/mine"), both))
		for _, opts := range []*spiffetls.Config{{Governor: g, NextProtos: http1.NextProtos}, {Governor: g}} {
			mine.learn(both)
			c := w.caller(mine, mine, opts)
			wg.Go(func() { assert.Equal(t, "slow slow slow slow slow end", c.ask()) })
			after(2 * time.Second)
			mine.learn(spiffetest.NewCA(t, "example.org").Bundles())
			after(10 * time.Second)
			require.True(t, c.isOpen())
			require.Equal(t, 1, statusOf(t, g).Draining)
			after(8 * time.Second)
			require.True(t, c.isOpen())
			after(silence)
			require.False(t, c.isOpen(), "soon after the answer")
		}
	})
}

// TestConnectionClosesWhenProofExpires, and a client that renews in time loses no request.
func TestConnectionClosesWhenProofExpires(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		start := time.Now()
		self := newParty(ca.SVID("/server"), ca.Bundles())
		w := open(t, nil, self, self, spiffe.AllowAnyPeer())
		g := &spiffetls.Governor{}
		govern(t, g)
		client := newParty(ca.SVID("/client"), ca.Bundles())
		var working []*caller
		for _, opts := range []*spiffetls.Config{
			nil, {NextProtos: http1.NextProtos}, {Governor: g}, {Governor: g, NextProtos: http1.NextProtos},
		} {
			working = append(working, w.caller(client, ca.Bundles(), opts))
		}
		lazy := w.crowd(ca.SVID("/lazy"), ca.Bundles(), spiffetls.Config{})

		step := 28 * time.Second / time.Duration(rounds.Of(1))
		for range 2 {
			for range 30 * time.Minute / step {
				for _, c := range working {
					c.ask()
				}
				time.Sleep(step + 10*time.Millisecond)
			}
			client.renew(ca.SVID("/client"))
			self.renew(ca.SVID("/server"))
		}
		for time.Since(start) < time.Hour+10*time.Minute {
			for _, c := range working {
				c.ask()
			}
			time.Sleep(step)
		}
		for _, c := range working {
			assert.Equal(t, 2, c.made(), "one connection for each proof")
		}
		lazy.cutOff(t)
		end := start.Add(time.Hour)
		for _, c := range append(lazy.idle, lazy.busy...) {
			ended := c.last().ended.Load()
			require.NotNil(t, ended)
			assert.False(t, ended.After(end), "%s", ended.Sub(end))
			assert.True(t, ended.After(end.Add(-grace-jitter)), "%s", ended.Sub(end))
		}
		for _, c := range lazy.busy {
			assert.WithinDuration(t, end, *c.last().ended.Load(), jitter, "the busy have their grace")
		}
	})
}

// TestShortProof: a peer with little life left can work until the end.
func TestShortProof(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		w := open(t, nil, ca.SVID("/server"), ca.Bundles(), spiffe.AllowAnyPeer())
		start := time.Now()
		short := w.crowd(ca.SVID("/short", func(c *x509.Certificate) { c.NotAfter = c.NotBefore.Add(20 * time.Second) }), ca.Bundles(), spiffetls.Config{})
		after(19 * time.Second)
		short.unharmed(t)
		after(time.Second + instant)
		short.requireOpen(t, false, false, "over")
		for _, c := range append(short.idle, short.busy...) {
			assert.Equal(t, 20*time.Second, c.last().ended.Load().Sub(start))
		}
	})
}

// TestDisprovedDoesNotOutliveTheProof: a peer that is no longer trusted gets no more time than its proof had.
func TestDisprovedDoesNotOutliveTheProof(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		allow := new(spiffe.LivePolicy)
		require.NoError(t, allow.Set(spiffe.AllowAnyPeer()))
		w := open(t, &spiffetls.Governor{Jitter: 24 * time.Hour}, ca.SVID("/server"), ca.Bundles(), allow)
		start := time.Now()
		var crowds []*crowd
		for range 4 {
			crowds = append(crowds, w.crowd(ca.SVID("/short", func(c *x509.Certificate) { c.NotAfter = c.NotBefore.Add(20 * time.Second) }), ca.Bundles(), spiffetls.Config{}))
		}
		after(18 * time.Second)
		require.NoError(t, allow.Set(spiffe.AllowIDs(ca.SVID("/else").ID())))
		after(2*time.Second + instant)
		for _, c := range crowds {
			c.requireOpen(t, false, false, "over")
			for _, c := range append(c.idle, c.busy...) {
				assert.LessOrEqual(t, c.last().ended.Load().Sub(start), 20*time.Second)
			}
		}
		assert.Zero(t, statusOf(t, w.g).Open)
	})
}

// TestClockLeaps: a connection whose proof has expired since the last round is cut at the next, without grace.
func TestClockLeaps(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		var leap atomic.Int64
		self := ca.SVID("/server", func(c *x509.Certificate) { c.NotAfter = c.NotBefore.Add(24 * time.Hour) })
		w := openAt(t, func() time.Time { return time.Now().Add(time.Duration(leap.Load())) },
			&spiffetls.Governor{Jitter: 24 * time.Hour}, self, ca.Bundles(), spiffe.AllowAnyPeer())
		crowd := w.crowd(ca.SVID("/client"), ca.Bundles(), spiffetls.Config{})
		after(10 * time.Second)
		leap.Store(int64(2 * time.Hour))
		after(time.Minute)
		crowd.requireOpen(t, false, false, "over")
		assert.Zero(t, statusOf(t, w.g).Open)
	})
}

// TestEndlessGrace ends with the proof, as any other.
func TestEndlessGrace(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		w := open(t, &spiffetls.Governor{Grace: math.MaxInt64, Jitter: math.MaxInt64, Interval: math.MaxInt64}, ca.SVID("/server"), ca.Bundles(), spiffe.AllowAnyPeer())
		crowd := w.crowd(ca.SVID("/client"), ca.Bundles(), spiffetls.Config{})
		after(time.Hour - instant)
		crowd.unharmed(t)
		after(2 * instant)
		crowd.requireOpen(t, false, false, "over")
	})
}

// TestServerDrainsBeforeItsOwnExpiry: a server drains before the certificate that it has presented expires.
func TestServerDrainsBeforeItsOwnExpiry(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		self := newParty(ca.SVID("/server", func(c *x509.Certificate) { c.NotAfter = c.NotBefore.Add(20 * time.Minute) }), ca.Bundles())
		w := open(t, nil, self, self, spiffe.AllowAnyPeer())
		start := time.Now()
		crowd := w.crowd(ca.SVID("/client"), ca.Bundles(), spiffetls.Config{})
		after(10 * time.Minute)
		self.renew(ca.SVID("/server"))
		crowd.unharmed(t)
		after(10*time.Minute - grace - jitter - instant)
		crowd.unharmed(t)
		after(grace + jitter + 2*instant)
		crowd.requireOpen(t, false, false, "over")
		for _, c := range crowd.busy {
			assert.WithinRange(t, *c.last().ended.Load(), start.Add(20*time.Minute-jitter), start.Add(20*time.Minute))
		}
		crowd.cutOff(t)
	})
}

// TestSpread: the ends are spread over the jitter, and a peer that is trusted again before its end stays.
func TestSpread(t *testing.T) {
	bubble(t, func(t *testing.T) {
		home, other, both := twoDomains(t)
		self := newParty(home.SVID("/server"), both)
		peers := announcing(self)
		w := open(t, &spiffetls.Governor{Jitter: time.Minute, Interval: time.Hour}, self, peers, spiffe.AllowAnyPeer())
		bad := other.SVID("/bad")
		for range 24 {
			w.caller(bad, both, http1).ask()
		}
		after(pause)
		peers.learn(home.Bundles())
		after(30 * time.Second)
		left := statusOf(t, w.g).Open
		assert.Greater(t, left, 2, "not all in one moment")
		assert.Less(t, left, 22)
		peers.learn(both)
		after(time.Hour / 2)
		assert.Equal(t, left, statusOf(t, w.g).Open, "trusted again")
	})
}

// TestSilentSource: a source that cannot answer ends nothing.
func TestSilentSource(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		var down atomic.Bool
		source := bundleFunc(func(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
			if down.Load() {
				return nil, errors.New("the agent is down")
			}
			return ca.Bundle().Bundle(td)
		})
		w := open(t, nil, ca.SVID("/server"), source, spiffe.AllowAnyPeer())
		crowd := w.crowd(ca.SVID("/client"), ca.Bundles(), spiffetls.Config{})
		down.Store(true)
		after(10*time.Minute + instant)
		crowd.unharmed(t)
		assert.Contains(t, w.log.String(), `msg="spiffetls: a connection cannot be judged and stays open" reason=no_bundle`)
		after(time.Hour)
		crowd.requireOpen(t, false, false, "but the proof has ended")
	})
}

// bundleFunc is a BundleSource that is a func.
type bundleFunc func(spiffe.TrustDomain) (*spiffe.Bundle, error)

func (f bundleFunc) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return f(td) }

// TestChangeDuringHandshake: a root that goes after the peer was verified, and before the Governor knows
// the connection, is noticed all the same.
func TestChangeDuringHandshake(t *testing.T) {
	bubble(t, func(t *testing.T) {
		home, other, both := twoDomains(t)
		self := announcing(newParty(home.SVID("/server"), both))
		var fall sync.Once
		source := &falling{announcer: self, then: func() { fall.Do(func() { self.learn(home.Bundles()) }) }}
		w := open(t, &spiffetls.Governor{Interval: 24 * time.Hour, Grace: -1, Jitter: -1}, self, source, spiffe.AllowAnyPeer())
		c := w.caller(other.SVID("/bad"), both, http1)
		if resp, err := c.Get("https://server.test/"); err == nil { // it may be quicker than the Governor
			_, _ = io.Copy(io.Discard, resp.Body)
			require.NoError(t, resp.Body.Close())
		}
		after(pause + instant)
		require.False(t, c.isOpen())
		assert.Zero(t, statusOf(t, w.g).Open)
	})
}

// TestChangeWhileOthersCome: a source that changes while Run asks the sources of a new connection for their
// next change is noticed.
func TestChangeWhileOthersCome(t *testing.T) {
	bubble(t, func(t *testing.T) {
		home, other, both := twoDomains(t)
		self := newParty(home.SVID("/server"), both)
		peers := announcing(self)
		w := open(t, &spiffetls.Governor{Interval: 24 * time.Hour, Jitter: -1}, self, peers, spiffe.AllowAnyPeer())
		bad := w.caller(other.SVID("/bad"), both, nil)
		bad.ask()
		after(time.Minute)
		require.True(t, bad.isOpen())

		late := &turning{announcer: announcing(newParty(home.SVID("/joining"), both))}
		late.next.Store(new(func() { peers.learn(home.Bundles()) }))
		joining := w.caller(late, late, &spiffetls.Config{Governor: w.g})
		joining.ask()
		after(pause + quiet + instant)
		require.Nil(t, late.next.Load(), "the source has changed")
		require.False(t, bad.isOpen())
		require.True(t, joining.isOpen())
	})
}

// turning is a source that changes when it is asked for its next change.
type turning struct {
	*announcer
	next atomic.Pointer[func()]
}

func (s *turning) Changed() <-chan struct{} {
	if next := s.next.Swap(nil); next != nil {
		(*next)()
	}
	return s.announcer.Changed()
}

// falling is a source that changes when it was asked.
type falling struct {
	*announcer
	then func()
}

func (f *falling) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	defer f.then()
	return f.announcer.Bundle(td)
}

// TestRestlessSource: a source that always says that it has changed costs one round a second.
func TestRestlessSource(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		source := &restless{BundleSet: ca.Bundles()}
		w := open(t, nil, ca.SVID("/server"), source, spiffe.AllowAnyPeer())
		c := w.caller(ca.SVID("/client"), ca.Bundles(), nil)
		c.ask()
		synctest.Wait()
		before := source.asked.Load()
		after(10 * time.Second)
		assert.LessOrEqual(t, source.asked.Load()-before, int64(12))
		assert.True(t, c.isOpen())
	})
}

// TestRestlessSourceEndsConnections: to be judged again and again does not put off the end.
func TestRestlessSourceEndsConnections(t *testing.T) {
	bubble(t, func(t *testing.T) {
		home, other, both := twoDomains(t)
		self := newParty(home.SVID("/server"), both)
		var never restless
		w := open(t, nil, self, struct {
			*party
			changer
		}{self, &never}, spiffe.AllowAnyPeer())
		for range 5 {
			w.caller(other.SVID("/bad"), both, http1).ask()
		}
		self.learn(home.Bundles())
		after(pause + jitter + instant)
		assert.Zero(t, statusOf(t, w.g).Open)
	})
}

type changer interface{ Changed() <-chan struct{} }

type restless struct {
	*spiffe.BundleSet
	asked atomic.Int64
}

func (r *restless) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	r.asked.Add(1)
	return r.BundleSet.Bundle(td)
}

func (r *restless) Changed() <-chan struct{} {
	ch := make(chan struct{})
	close(ch)
	return ch
}

// TestHijackedConnection: a handler that takes its connection does not take it away from the Governor.
func TestHijackedConnection(t *testing.T) {
	bubble(t, func(t *testing.T) {
		home, other, both := twoDomains(t)
		self := newParty(home.SVID("/server"), both)
		peers := announcing(self)
		w := open(t, &spiffetls.Governor{Jitter: -1}, self, peers, spiffe.AllowAnyPeer())
		c := w.caller(other.SVID("/bad"), both, http1)
		req := must.Get(http.NewRequestWithContext(t.Context(), http.MethodGet, "https://server.test/hijack", nil))(t)
		req.Header.Set("Connection", "Upgrade")
		req.Header.Set("Upgrade", "test")
		resp := must.Get(c.Do(req))(t)
		require.Equal(t, http.StatusSwitchingProtocols, resp.StatusCode)
		rw := resp.Body.(io.ReadWriter)
		must.Get(io.WriteString(rw, "hello"))(t)
		buf := make([]byte, 5)
		must.Get(io.ReadFull(rw, buf))(t)

		peers.learn(home.Bundles())
		start := time.Now()
		_, err := io.ReadFull(rw, buf)
		require.Error(t, err)
		assert.WithinRange(t, time.Now(), start.Add(grace), start.Add(pause+grace))
		assert.Zero(t, statusOf(t, w.g).Open)
	})
}

// TestForgottenConnection: a hijacked connection that has ended is not kept, although net/http does not report its end.
func TestForgottenConnection(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		w := open(t, nil, ca.SVID("/server"), ca.Bundles(), spiffe.AllowAnyPeer())
		func() {
			c := w.caller(ca.SVID("/client"), ca.Bundles(), http1)
			req := must.Get(http.NewRequestWithContext(t.Context(), http.MethodGet, "https://server.test/hijack", nil))(t)
			req.Header.Set("Connection", "Upgrade")
			req.Header.Set("Upgrade", "test")
			resp := must.Get(c.Do(req))(t)
			require.NoError(t, resp.Body.Close())
		}()
		synctest.Wait()
		for range 10 {
			runtime.GC()
			after(time.Minute)
		}
		assert.Zero(t, statusOf(t, w.g).Open)
		assert.Zero(t, statusOf(t, w.g).Ended)
	})
}

// TestListener governs a server that is not net/http's.
func TestListener(t *testing.T) {
	bubble(t, func(t *testing.T) {
		home, other, both := twoDomains(t)
		peers := announcing(newParty(home.SVID("/db"), both))
		g := &spiffetls.Governor{Jitter: -1}
		govern(t, g)
		below := memconn.Listen()
		l := must.Get(newListener(below, spiffetls.Config{Self: peers, Peers: peers, Allow: spiffe.AllowAnyPeer(), Governor: g}))(t)
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				wg.Go(func() {
					_, _ = io.Copy(conn, conn)
					_ = conn.Close()
				})
			}
		})
		t.Cleanup(func() {
			_ = l.Close()
			wg.Wait()
		})
		dial := func(ca *spiffetest.CA) *tls.Conn {
			c := must.Get(clientConfig(spiffetls.Config{Self: ca.SVID("/client"), Peers: both, Allow: spiffe.AllowAnyPeer()}))(t)
			raw := must.Get(below.Dial(t.Context()))(t)
			conn := tls.Client(raw, c)
			require.NoError(t, conn.HandshakeContext(t.Context()))
			t.Cleanup(func() { _ = conn.Close() })
			return conn
		}
		echo := func(conn *tls.Conn) error {
			if _, err := io.WriteString(conn, "x"); err != nil {
				return err
			}
			_, err := io.ReadFull(conn, make([]byte, 1))
			return err
		}
		good, bad, closing := dial(home), dial(other), dial(other)
		for _, c := range []*tls.Conn{good, bad, closing} {
			require.NoError(t, echo(c))
		}
		require.Equal(t, 3, statusOf(t, g).Open)
		require.NoError(t, closing.Close())
		synctest.Wait()
		require.Equal(t, 2, statusOf(t, g).Open, "a closed connection is no longer counted")

		peers.learn(home.Bundles())
		after(pause + instant)
		require.NoError(t, echo(bad), "its use is not known yet")
		require.Equal(t, 1, statusOf(t, g).Draining)
		after(grace)
		require.Error(t, echo(bad))
		require.NoError(t, echo(good))
		require.Equal(t, governorStatus{Open: 1, Ended: 1}, statusOf(t, g))

		// A thief is verified, and yet gets no connection.
		thief := bare(home.SVID("/stolen").Chain(), home.SVID("/thief").Signer())
		raw := must.Get(below.Dial(t.Context()))(t)
		conn := tls.Client(raw, thief)
		_ = conn.HandshakeContext(t.Context())
		_, err := conn.Read(make([]byte, 1))
		assert.Error(t, err)
		_ = conn.Close()
		synctest.Wait()
		assert.Equal(t, 1, statusOf(t, g).Open)
	})
}

// leaver is a connection that is told when it is drained.
type leaver struct {
	net.Conn
	told chan struct{}
}

func (l leaver) Drain() { l.told <- struct{}{} }

// A connection that can end itself is told once, is never idle, and is cut after Grace if it has not ended.
func TestDrainMethod(t *testing.T) {
	for _, governed := range []string{"server", "client"} {
		t.Run(governed, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				ca := spiffetest.NewCA(t, "example.org")
				var allow spiffe.LivePolicy
				require.NoError(t, allow.Set(spiffe.AllowAnyPeer()))
				g := &spiffetls.Governor{Jitter: -1}
				govern(t, g)
				opts := map[string]*spiffetls.Config{governed: {Governor: g}}
				below, told := memconn.Listen(), make(chan struct{}, 10)
				server := must.Get(spiffetls.New(with(opts["server"], ca.SVID("/db"), ca.Bundle(), &allow)))(t)
				dialer := must.Get(spiffetls.New(with(opts["client"], ca.SVID("/web"), ca.Bundle(), &allow)))(t)
				var wg sync.WaitGroup
				defer wg.Wait()
				wg.Go(func() {
					raw := must.Get(below.Accept())(t)
					conn, err := server.Server(t.Context(), leaver{raw, told})
					if assert.NoError(t, err) {
						_, _ = io.WriteString(conn, "x")
						_, _ = io.Copy(io.Discard, conn)
						_ = conn.Close()
					}
				})
				raw := must.Get(below.Dial(t.Context()))(t)
				conn := must.Get(dialer.Client(t.Context(), leaver{raw, told}, "db.example"))(t)
				defer conn.Close()
				must.Get(io.ReadFull(conn, make([]byte, 1)))(t)
				after(time.Minute)
				require.Empty(t, told)

				require.NoError(t, allow.Set(spiffe.AllowIDs(ca.SVID("/other").ID())))
				after(pause + instant)
				require.Len(t, told, 1)
				after(grace - pause - 3*instant)
				require.Equal(t, governorStatus{Open: 1, Draining: 1}, statusOf(t, g), "it is not idle by its silence")
				after(pause + 4*instant)
				require.Equal(t, governorStatus{Ended: 1}, statusOf(t, g))
				require.Len(t, told, 1)
			})
		})
	}
}

// TestUngovernedIsRefused: a Governor that cannot end a connection is a mistake, which shows at once.
func TestUngovernedIsRefused(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	p := newParty(ca.SVID("/db"), ca.Bundles())
	g := &spiffetls.Governor{}
	opts := &spiffetls.Config{Governor: g}
	_, err := clientConfig(with(opts, p, p, spiffe.AllowAnyPeer()))
	assert.ErrorContains(t, err, "spiffetls: client: ")
	assert.ErrorContains(t, err, "use Transport")
	_, err = serverConfig(with(opts, p, p, spiffe.AllowAnyPeer()))
	assert.ErrorContains(t, err, "spiffetls: server: ")
	assert.ErrorContains(t, err, "use ConfigureServer")

	server := &http.Server{}
	require.NoError(t, configureServer(server, with(opts, p, p, spiffe.AllowAnyPeer())))
	s, c := connect(t, server.TLSConfig, p.client(t, spiffe.AllowAnyPeer(), nil))
	assert.ErrorContains(t, s.err, "not accepted by the configured server")
	assert.Error(t, c.err)
	assert.Zero(t, statusOf(t, g).Open)
}

func TestGovernorOptions(t *testing.T) {
	t.Parallel()
	g := &spiffetls.Governor{}
	synctest.Test(t, func(t *testing.T) {
		g := &spiffetls.Governor{}
		govern(t, g)
		synctest.Wait()
		assert.EqualError(t, g.Run(t.Context()), "spiffetls: governor: Run is running already")
	})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	assert.NoError(t, g.Run(ctx))
	assert.NoError(t, g.Run(ctx), "again")
}

// TestGovernedHandlers: the caller's own hooks are kept, and a handler may be missing.
func TestGovernedHandlers(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	p := newParty(ca.SVID("/db"), ca.Bundles())
	var states atomic.Int64
	s := &http.Server{ConnState: func(net.Conn, http.ConnState) { states.Add(1) }}
	require.NoError(t, configureServer(s, spiffetls.Config{Self: p, Peers: p, Allow: spiffe.AllowAnyPeer(), Governor: &spiffetls.Governor{}}))
	url := serve(t, s, nil)
	resp := must.Get(clientOf(t, ca, "/web", nil).Get(url + "/nothing-is-here"))(t)
	require.NoError(t, resp.Body.Close())
	assert.Equal(t, http.StatusNotFound, resp.StatusCode, "http.DefaultServeMux")
	assert.Positive(t, states.Load())

	plain := &http.Server{Handler: who}
	require.NoError(t, configureServer(plain, spiffetls.Config{Self: p, Peers: p, Allow: spiffe.AllowAnyPeer(), Governor: &spiffetls.Governor{}}))
	url = serve(t, plain, plain.Serve)
	assert.Equal(t, "1 nobody", get(t, http.DefaultClient, "http"+strings.TrimPrefix(url, "https")), "without TLS")
}
