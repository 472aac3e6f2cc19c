package spiffetls_test

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// echoes accepts from l until it is closed, and writes to each client its own ID.
func echoes(t testing.TB, l net.Listener) {
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				assert.ErrorIs(t, err, net.ErrClosed)
				return
			}
			wg.Go(func() {
				defer conn.Close()
				id := "nobody"
				if peer, err := spiffetls.PeerFromConn(conn); err == nil {
					id = peer.ID().String()
				}
				_, _ = io.WriteString(conn, id+"\n")
				_, _ = io.Copy(io.Discard, conn)
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		wg.Wait()
	})
}

// line reads what echoes has written.
func line(t testing.TB, conn net.Conn) string {
	t.Helper()
	var got []byte
	for b := make([]byte, 1); ; {
		if _, err := io.ReadFull(conn, b); !assert.NoError(t, err) || b[0] == '\n' {
			return string(got)
		}
		got = append(got, b[0])
	}
}

func listenerOf(t testing.TB, ca *spiffetest.CA, inner net.Listener, opts *spiffetls.Config) net.Listener {
	t.Helper()
	l := must.Get(newListener(inner, with(opts, ca.SVID("/db"), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()))))(t)
	return l
}

func dialerOf(t testing.TB, ca *spiffetest.CA, allow spiffe.PolicySource, opts *spiffetls.Config) *spiffetls.Endpoint {
	t.Helper()
	d := must.Get(spiffetls.New(with(opts, ca.SVID("/web"), ca.Bundle(), allow)))(t)
	return d
}

// Pain: a server that is not net/http's has no verified connection and no peer.
func TestListenerAndDialer(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	for _, network := range []string{"tcp", "unix"} {
		addr := "127.0.0.1:0"
		if network == "unix" {
			addr = t.TempDir() + "/s"
		}
		inner := must.Get(net.Listen(network, addr))(t)
		l := listenerOf(t, ca, inner, nil)
		echoes(t, l)
		assert.Equal(t, inner.Addr(), l.Addr())
		d := dialerOf(t, ca, spiffe.AllowIDs(dbID), nil)
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				conn, err := d.DialContext(t.Context(), network, l.Addr().String())
				if !assert.NoError(t, err) {
					return
				}
				defer conn.Close()
				peer, err := spiffetls.PeerFromConn(conn)
				assert.NoError(t, err)
				assert.Equal(t, dbID, peer.ID())
				assert.Equal(t, "spiffe://example.org/web", line(t, conn))
			})
		}
		wg.Wait()
	}
}

func TestRawConstructors(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	svid, any := ca.SVID("/db"), spiffe.AllowAnyPeer()
	for want, opts := range map[string]*spiffetls.Config{
		"is negative": {HandshakeTimeout: -1}, "0 means the default": {MaxHandshakes: -1},
	} {
		_, err := spiffetls.New(with(opts, svid, ca.Bundle(), any))
		assert.ErrorContains(t, err, want)
	}
}

// TestSilentClients: clients that send nothing, and clients that send slowly, delay no other, and are cut.
func TestSilentClients(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		inner := memconn.Listen()
		echoes(t, listenerOf(t, ca, inner, nil))
		start := time.Now()
		silent := must.Get(inner.Dial(t.Context()))(t)
		slow := must.Get(inner.Dial(t.Context()))(t)
		ended := make(chan time.Duration, 2)
		go func() {
			_, _ = silent.Read(make([]byte, 1))
			ended <- time.Since(start)
		}()
		go func() {
			hello := []byte{22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3}
			for err := error(nil); err == nil; time.Sleep(time.Second) {
				_, err = slow.Write(hello[:1])
				hello = append(hello[1:], 0)
			}
			ended <- time.Since(start)
		}()
		below := must.Get(inner.Dial(t.Context()))(t)
		conn := must.Get(dialerOf(t, ca, spiffe.AllowIDs(dbID), nil).Client(t.Context(), below, "db"))(t)
		assert.Equal(t, "spiffe://example.org/web", line(t, conn))
		assert.Zero(t, time.Since(start))
		_ = conn.Close()
		for range 2 {
			assert.InDelta(t, 11, (<-ended).Seconds(), 1.1) // a writer notices later
		}
	})
}

func TestMaxHandshakes(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	var failures spiffetls.Metrics
	inner := memconn.Listen()
	l := listenerOf(t, ca, inner, &spiffetls.Config{MaxHandshakes: 4, HandshakeTimeout: time.Minute, Metrics: &failures})
	echoes(t, l)
	closed := make(chan struct{}, 10)
	for range 6 {
		c := must.Get(inner.Dial(t.Context()))(t)
		t.Cleanup(func() { _ = c.Close() })
		go func() {
			_, _ = c.Read(make([]byte, 1))
			closed <- struct{}{}
		}()
	}
	<-closed
	<-closed
	select {
	case <-closed:
		assert.Fail(t, "one within the bound was closed")
	case <-time.After(20 * time.Millisecond):
	}
	f := one(t, &failures)
	assert.Equal(t, 2, f.Count)
	assert.ErrorContains(t, f.Err, "closed before its handshake")
}

// TestHandshakesCountUntilTheyEnd: more clients than MaxHandshakes are served and refused one after the other,
// and open connections do not count.
func TestHandshakesCountUntilTheyEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		inner := memconn.Listen()
		echoes(t, listenerOf(t, ca, inner, &spiffetls.Config{MaxHandshakes: 2}))
		for i := range 6 {
			synctest.Wait() // a client hears of the end before the server is done with it
			below := must.Get(inner.Dial(t.Context()))(t)
			if i%2 == 0 {
				_, err := tls.Client(below, spiffetest.TLSConfig(ca.Broken("Expired"))).Read(make([]byte, 1))
				require.ErrorContains(t, err, "bad certificate")
				continue
			}
			conn := must.Get(dialerOf(t, ca, spiffe.AllowIDs(dbID), nil).Client(t.Context(), below, "db"))(t)
			defer conn.Close()
			assert.Equal(t, "spiffe://example.org/web", line(t, conn))
		}
	})
}

// TestOneAddressCannotTakeAllHandshakes: a third is left for the others, here for one from another address.
func TestOneAddressCannotTakeAllHandshakes(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	inner := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	echoes(t, listenerOf(t, ca, inner, &spiffetls.Config{MaxHandshakes: 30, HandshakeTimeout: time.Minute}))
	for range 60 {
		c := must.Get(net.Dial("tcp", inner.Addr().String()))(t)
		t.Cleanup(func() { _ = c.Close() })
	}
	below, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}).Dial("tcp", inner.Addr().String())
	if err != nil {
		t.Skip("there is one loopback address: ", err)
	}
	conn := must.Get(dialerOf(t, ca, spiffe.AllowIDs(dbID), nil).Client(t.Context(), below, "db"))(t)
	defer conn.Close()
	assert.Equal(t, "spiffe://example.org/web", line(t, conn))
}

// TestRefusedClientIsNoErrorOfAccept has the next client served.
func TestRefusedClientIsNoErrorOfAccept(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	var failures spiffetls.Metrics
	inner := memconn.Listen()
	l := listenerOf(t, ca, inner, &spiffetls.Config{Metrics: &failures})
	echoes(t, l)
	for _, f := range []string{"Expired", "ForeignCA", "ServerOnly"} {
		below := must.Get(inner.Dial(t.Context()))(t)
		conn := tls.Client(below, spiffetest.TLSConfig(ca.Broken(f)))
		_, err := conn.Read(make([]byte, 1))
		assert.ErrorContains(t, err, "bad certificate", f)
	}
	below := must.Get(inner.Dial(t.Context()))(t)
	conn := must.Get(dialerOf(t, ca, spiffe.AllowIDs(dbID), nil).Client(t.Context(), below, "db"))(t)
	defer conn.Close()
	assert.Equal(t, "spiffe://example.org/web", line(t, conn))
	want := tally{"server failed expired": 1, "server failed unknown_authority": 1, "server failed wrong_role": 1}
	assert.Equal(t, want, failuresOf(t, &failures))
}

// flaky is a listener whose Accept fails as often as a test says.
type flaky struct {
	*memconn.Listener
	errs chan error
}

func (f *flaky) Accept() (net.Conn, error) {
	select {
	case err := <-f.errs:
		return nil, err
	default:
		return f.Listener.Accept()
	}
}

// TestEndOfListener: errors of the inner listener are seen, Close ends Accept and what is unfinished, and no
// goroutine stays, as the bubble would say.
func TestEndOfListener(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		unused := listenerOf(t, ca, memconn.Listen(), nil)
		require.NoError(t, unused.Close(), "nothing was started")
		_, err := unused.Accept()
		assert.ErrorIs(t, err, net.ErrClosed)

		inner := &flaky{memconn.Listen(), make(chan error, 2)}
		many := errors.New("too many open files")
		inner.errs <- many
		inner.errs <- many
		l := listenerOf(t, ca, inner, nil)
		for range 2 {
			_, err := l.Accept()
			require.ErrorIs(t, err, many)
		}
		silent := must.Get(inner.Dial(t.Context()))(t)
		done, err := inner.Dial(t.Context()) // and never accepted
		require.NoError(t, err)
		conn := must.Get(dialerOf(t, ca, spiffe.AllowIDs(dbID), nil).Client(t.Context(), done, "db"))(t)
		synctest.Wait()
		require.NoError(t, l.Close())
		for _, c := range []net.Conn{silent, conn} {
			_, err = c.Read(make([]byte, 1))
			assert.Error(t, err)
		}
		_, err = l.Accept()
		assert.ErrorIs(t, err, net.ErrClosed)
		_ = l.Close()
		_ = conn.Close()

		inner = &flaky{memconn.Listen(), make(chan error, 2)}
		l = listenerOf(t, ca, inner, nil)
		accepted := make(chan error)
		go func() {
			_, err := l.Accept()
			accepted <- err
		}()
		synctest.Wait()
		_ = inner.Listener.Close() // not by Close of l
		assert.ErrorIs(t, <-accepted, net.ErrClosed)
		_, err = l.Accept()
		assert.ErrorIs(t, err, net.ErrClosed)
	})
}

// TestGovernorEndsRawConnections ends those of a listener, and those of a Dialer, without Governor.Listener.
func TestGovernorEndsRawConnections(t *testing.T) {
	t.Parallel()
	for name, atServer := range map[string]bool{"listener": true, "dialer": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ca := spiffetest.NewCA(t, "example.org")
				var allow spiffe.LivePolicy
				require.NoError(t, allow.Set(spiffe.AllowMembersOf(ca.TrustDomain())))
				g := &spiffetls.Governor{Grace: -1, Jitter: -1}
				governed := &spiffetls.Config{Governor: g}
				server, client := (*spiffetls.Config)(nil), governed
				if atServer {
					server, client = governed, nil
				}
				inner := memconn.Listen()
				l := must.Get(newListener(inner, with(server, ca.SVID("/db"), ca.Bundle(), &allow)))(t)
				echoes(t, l)
				ctx, cancel := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				defer wg.Wait()
				defer cancel()
				wg.Go(func() { _ = g.Run(ctx) })
				below := must.Get(inner.Dial(t.Context()))(t)
				conn := must.Get(dialerOf(t, ca, &allow, client).Client(t.Context(), below, "db"))(t)
				line(t, conn)
				assert.Equal(t, 1, statusOf(t, g).Open)
				require.NoError(t, allow.Set(spiffe.AllowIDs(billingID)))
				_, err := conn.Read(make([]byte, 1))
				assert.Error(t, err)
				assert.Equal(t, governorStatus{Ended: 1}, statusOf(t, g))
				_ = conn.Close()
			})
		})
	}
}

func TestDialerWithHosts(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	inner := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	echoes(t, listenerOf(t, ca, inner, nil))
	addr := inner.Addr().String()
	conn := must.Get(dialerOf(t, ca, hostPolicies{"127.0.0.1": spiffe.AllowIDs(dbID)}, nil).DialContext(t.Context(), "tcp", addr))(t)
	_ = conn.Close()
	_, err := dialerOf(t, ca, hostPolicies{"127.0.0.1": spiffe.AllowIDs(dbID), addr: spiffe.AllowIDs(billingID)}, nil).DialContext(t.Context(), "tcp", addr)
	verifyError(t, err, "policy")

	counted := &counting{Conn: func() net.Conn { a, _ := memconn.Pipe(); return a }()}
	_, err = dialerOf(t, ca, hostPolicies{"db:1": spiffe.AllowIDs(dbID)}, nil).Client(t.Context(), counted, "db:2")
	assert.ErrorIs(t, err, spiffe.ErrDenied)
	assert.Zero(t, counted.written)
	assert.True(t, counted.closed, "the Dialer owns it")
	_, err = dialerOf(t, ca, hostPolicies{"db:1": spiffe.AllowIDs(dbID)}, nil).DialContext(t.Context(), "tcp", "db.invalid:1")
	assert.ErrorIs(t, err, spiffe.ErrDenied, "it is not looked up")
}

type counting struct {
	net.Conn
	written int
	closed  bool
}

func (c *counting) Write(p []byte) (int, error) {
	c.written += len(p)
	return c.Conn.Write(p)
}

func (c *counting) Close() error {
	c.closed = true
	return c.Conn.Close()
}

// TestHandshakeEnds: with its context, and after HandshakeTimeout.
func TestHandshakeEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		d := dialerOf(t, ca, spiffe.AllowIDs(dbID), &spiffetls.Config{HandshakeTimeout: 3 * time.Second})
		silent := func() net.Conn { a, _ := memconn.Pipe(); return a }
		start := time.Now()
		_, err := d.Client(t.Context(), silent(), "db")
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Equal(t, 3*time.Second, time.Since(start))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = d.Client(ctx, silent(), "db")
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Equal(t, 4*time.Second, time.Since(start))
	})
}

func TestNoPeerFromConn(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	a, b := memconn.Pipe()
	_, err := spiffetls.PeerFromConn(a)
	assert.ErrorContains(t, err, "not a *tls.Conn")
	_, err = spiffetls.PeerFromConn(nil)
	assert.Error(t, err)
	_, err = spiffetls.PeerFromConn(tls.Client(b, spiffetest.TLSConfig(ca.Certificate("/web"))))
	assert.ErrorContains(t, err, "not made by an Endpoint")

	inner := memconn.Listen()
	l := listenerOf(t, ca, inner, &spiffetls.Config{AllowAnonymousClients: true})
	defer l.Close()
	go func() {
		below, err := inner.Dial(context.Background())
		if err == nil {
			_, _ = tls.Client(below, &tls.Config{InsecureSkipVerify: true}).Read(make([]byte, 1))
		}
	}()
	conn := must.Get(l.Accept())(t)
	defer conn.Close()
	_, err = spiffetls.PeerFromConn(conn)
	assert.ErrorContains(t, err, "proved no SPIFFE ID")

	// A client that has shown a certificate and does not hold its key is not proven yet.
	inner = memconn.Listen()
	chain, _ := ca.Certificate("/web")
	_, other := ca.Certificate("/web")
	go func() {
		below, err := inner.Dial(context.Background())
		if err == nil {
			_, _ = tls.Client(below, bare(chain, other)).Read(make([]byte, 1))
		}
	}()
	raw := must.Get(inner.Accept())(t)
	server := must.Get(spiffetls.New(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer()}))(t)
	_, err = server.Server(t.Context(), raw)
	require.Error(t, err)
}
