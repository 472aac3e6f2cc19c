package caserver_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki/caserver"
)

// echo says what it knows of the connection.
var echo = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	state := "no TLS"
	if r.TLS != nil {
		state = fmt.Sprintf("%s %q %d", tls.VersionName(r.TLS.Version), r.TLS.NegotiatedProtocol, len(r.TLS.PeerCertificates))
	}
	fmt.Fprintf(w, "%s, %s", r.Proto, state)
})

func get(t testing.TB, c *http.Client, url string) string {
	t.Helper()
	req := must.Get(http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil))(t)
	resp := must.Get(c.Do(req))(t)
	defer resp.Body.Close()
	return string(must.Get(io.ReadAll(resp.Body))(t))
}

func TestServe(t *testing.T) {
	t.Parallel()
	addr := caservertest.Serve(t, caserver.ServeOptions{Handler: echo})
	assert.Equal(t, `HTTP/2.0, TLS 1.3 "" 0`, get(t, caservertest.ProxyClient(t), "http://"+addr))
	assert.Equal(t, `HTTP/2.0, TLS 1.3 "h2" 0`, get(t, caservertest.ALPNClient(t), "https://"+addr))

	h1 := &http.Transport{Protocols: new(http.Protocols), TLSClientConfig: caservertest.ClientTLS.Clone()}
	h1.Protocols.SetHTTP1(true)
	defer h1.CloseIdleConnections()
	assert.Equal(t, `HTTP/1.1, TLS 1.3 "" 0`, get(t, &http.Client{Transport: h1}, "https://"+addr))

	both := &http.Transport{TLSClientConfig: caservertest.ClientTLS.Clone(), ForceAttemptHTTP2: true}
	defer both.CloseIdleConnections()
	assert.Equal(t, `HTTP/2.0, TLS 1.3 "h2" 0`, get(t, &http.Client{Transport: both}, "https://"+addr))

	plain := caservertest.Serve(t, caserver.ServeOptions{Handler: echo, Plaintext: true})
	h2c := &http.Transport{Protocols: new(http.Protocols)}
	h2c.Protocols.SetUnencryptedHTTP2(true)
	defer h2c.CloseIdleConnections()
	assert.Equal(t, `HTTP/2.0, no TLS`, get(t, &http.Client{Transport: h2c}, "http://"+plain))
}

func TestServeClientCertificates(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-1.5-13")
	cfg := caservertest.ServerTLS.Clone()
	cfg.ClientAuth = tls.RequireAnyClientCert
	addr := caservertest.Serve(t, caserver.ServeOptions{Handler: echo, TLS: cfg})
	with := caservertest.ClientTLS.Clone()
	with.Certificates = caservertest.ServerTLS.Certificates
	tr := &http.Transport{Protocols: new(http.Protocols), TLSClientConfig: with}
	tr.Protocols.SetHTTP2(true)
	defer tr.CloseIdleConnections()
	assert.Equal(t, `HTTP/2.0, TLS 1.3 "h2" 1`, get(t, &http.Client{Transport: tr}, "https://"+addr))
	assert.Empty(t, cfg.NextProtos, "the configuration is copied")
}

// Headers are small: a token is in the message.
func TestLongHeaders(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	addr := caservertest.Serve(t, caserver.ServeOptions{Handler: echo})
	for size, ok := range map[int]bool{32 << 10: true, 128 << 10: false} {
		req := must.Get(http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addr, nil))(t)
		req.Header.Set("X", strings.Repeat("x", size))
		resp, err := caservertest.ProxyClient(t).Do(req)
		if err == nil {
			resp.Body.Close()
		}
		assert.Equal(t, ok, err == nil && resp.StatusCode == http.StatusOK, size)
	}
}

func TestServeOptions(t *testing.T) {
	t.Parallel()
	for what, o := range map[string]caserver.ServeOptions{
		"Handler is nil": {TLS: caservertest.ServerTLS},
		"TLS is nil":     {Handler: echo},
		"no certificate": {Handler: echo, TLS: &tls.Config{MinVersion: tls.VersionTLS13}},
		"both set":       {Handler: echo, TLS: caservertest.ServerTLS, Plaintext: true},
	} {
		l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
		require.ErrorContains(t, caserver.Serve(t.Context(), l, o), what)
		assert.ErrorIs(t, l.Close(), net.ErrClosed, "the listener is closed whatever happens")
	}
}

// TestSilentClients has clients that connect and say nothing, or nothing that is TLS.
func TestSilentClients(t *testing.T) {
	t.Parallel()
	addr := caservertest.Serve(t, caserver.ServeOptions{Handler: echo})
	for i := range 50 {
		c := must.Get(net.Dial("tcp", addr))(t)
		defer c.Close()
		if i%2 == 0 {
			must.Get(c.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")))(t)
		}
	}
	assert.Equal(t, `HTTP/2.0, TLS 1.3 "" 0`, get(t, caservertest.ProxyClient(t), "http://"+addr))
}

// TestFailedHandshake has clients that do not speak TLS, do not trust the server, or go away: a line for each kind of
// failure, however many there are.
func TestFailedHandshake(t *testing.T) {
	t.Parallel()
	out := new(programtest.Log)
	l := localhost()
	stop := caservertest.ServeOn(t, l, caserver.ServeOptions{Handler: echo, TLS: caservertest.ServerTLS, Logger: slog.New(slog.NewTextHandler(out, nil))})
	for range 50 {
		c := must.Get(net.Dial("tcp", l.Addr().String()))(t)
		must.Get(io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"))(t)
		assert.NotContains(t, string(must.Get(io.ReadAll(c))(t)), "HTTP/1.1 200")
		require.NoError(t, c.Close())

		_, err := tls.Dial("tcp", l.Addr().String(), &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: x509.NewCertPool(), ServerName: "127.0.0.1"})
		require.Error(t, err)
		_, err = tls.Dial("tcp", l.Addr().String(), &tls.Config{MaxVersion: tls.VersionTLS12, RootCAs: x509.NewCertPool(), ServerName: "127.0.0.1"})
		require.Error(t, err)
		require.NoError(t, must.Get(net.Dial("tcp", l.Addr().String()))(t).Close())
	}
	require.Eventually(t, func() bool { return strings.Count(out.String(), "TLS handshake failed") == 4 }, time.Minute, time.Millisecond, out.String())
	stop()
	assert.Len(t, strings.Split(strings.TrimSpace(out.String()), "\n"), 4)
	for _, reason := range []string{"the client does not speak TLS", "the client ended it: tls: bad certificate", "no agreement", "the client closed the connection"} {
		assert.Equal(t, 1, strings.Count(out.String(), fmt.Sprintf("level=INFO msg=%q reason=%q peer=127.0.0.1:", "caserver: TLS handshake failed", reason)), "%s in %s", reason, out)
	}
}

// TestHandshakeEnds measures the time that a handshake has.
func TestHandshakeEnds(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		l := memconn.Listen()
		stop := caservertest.ServeOn(t, l, caserver.ServeOptions{Handler: echo, TLS: caservertest.ServerTLS})
		c := must.Get(l.DialContext(t.Context(), "", ""))(t)
		defer c.Close()
		began := time.Now()
		require.Error(t, must.Err(c.Read(make([]byte, 1))))
		assert.Equal(t, 10*time.Second, time.Since(began))
		stop()
	})
}

// TestSilenceEnds has clients that do their handshake and then say nothing, or begin and do not go on.
func TestSilenceEnds(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		first string
		most  time.Duration
	}{
		"nothing":             {"", 10 * time.Second},
		"half a preface":      {"PRI * HTTP/2", 10 * time.Second},
		"most of a preface":   {"PRI * HTTP/2.0\r\n\r\nSM", 10 * time.Second},
		"a preface alone":     {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 10 * time.Second},
		"an idle connection":  {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", 5*time.Minute + 10*time.Second},
		"a body never sent":   {"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n", 10*time.Second + time.Second},
		"half of an HTTP/1.1": {"GET / HTTP/1.1\r\n", 10 * time.Second},
	} {
		bubble.Run(t, name, func(t *testing.T) {
			l := memconn.Listen()
			stop := caservertest.ServeOn(t, l, caserver.ServeOptions{Handler: echo, TLS: caservertest.ServerTLS})
			raw := must.Get(l.DialContext(t.Context(), "", ""))(t)
			c := tls.Client(raw, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13}) // the clock of the bubble is not that of the certificate
			defer c.Close()
			began := time.Now()
			must.Get(io.WriteString(c, test.first))(t)
			assert.NoError(t, must.Err(io.Copy(io.Discard, c)))
			assert.LessOrEqual(t, time.Since(began), test.most)
			stop()
		})
	}
}

// lazy is a listener whose connections take a second to close.
type lazy struct {
	net.Listener
	closed atomic.Bool
}

func (l *lazy) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &lazyConn{c, l}, nil
}

type lazyConn struct {
	net.Conn
	l *lazy
}

func (c *lazyConn) Close() error {
	time.Sleep(time.Second)
	c.l.closed.Store(true)
	return c.Conn.Close()
}

// TestServeJoins ends in the middle of a handshake, and waits for it.
func TestServeJoins(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		out := new(programtest.Log)
		inner := memconn.Listen()
		l := &lazy{Listener: inner}
		stop := caservertest.ServeOn(t, l, caserver.ServeOptions{Handler: echo, TLS: caservertest.ServerTLS, Logger: slog.New(slog.NewTextHandler(out, nil))})
		c := must.Get(inner.Dial(t.Context()))(t)
		defer c.Close()
		synctest.Wait()
		stop()
		assert.True(t, l.closed.Load())
		assert.Empty(t, out.String(), "a handshake that the end of the server cuts is no failure")
	})
}

func TestServeEnds(t *testing.T) {
	t.Parallel()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	inside, release := make(chan struct{}), make(chan struct{})
	slow := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		close(inside)
		<-release
		fmt.Fprint(w, r.Context().Err())
	})
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- caserver.Serve(ctx, l, caserver.ServeOptions{Handler: slow, TLS: caservertest.ServerTLS})
	}()
	silent := must.Get(net.Dial("tcp", l.Addr().String()))(t)
	defer silent.Close()
	answer := make(chan string, 1)
	client := caservertest.ProxyClient(t)
	go func() { answer <- get(t, client, "http://"+l.Addr().String()) }()
	<-inside
	cancel(cause)
	for { // until no client is let in any more
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			break
		}
		c.Close()
	}
	close(release)
	assert.Equal(t, "<nil>", <-answer, "a request that is under way ends well")
	require.NoError(t, <-done)
	require.NoError(t, silent.SetReadDeadline(time.Now().Add(10*time.Second)))
	_, err := silent.Read(make([]byte, 1))
	assert.NotErrorIs(t, err, context.DeadlineExceeded)
	assert.Error(t, err, "a connection in the middle of its handshake is cut")
}

// moody is a listener that fails as a test wants.
type moody struct {
	net.Listener
	errs chan error
}

func (m *moody) Accept() (net.Conn, error) {
	select {
	case err := <-m.errs:
		return nil, err
	default:
		return m.Listener.Accept()
	}
}

func TestAcceptFails(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	open := func() *moody {
		return &moody{must.Get(net.Listen("tcp", "127.0.0.1:0"))(t), make(chan error, 8)}
	}
	// Out of file descriptors: it passes.
	l := open()
	for range 3 {
		l.errs <- &net.OpError{Op: "accept", Err: syscall.EMFILE}
	}
	stop := caservertest.ServeOn(t, l, caserver.ServeOptions{Handler: echo, TLS: caservertest.ServerTLS})
	assert.Equal(t, `HTTP/2.0, TLS 1.3 "" 0`, get(t, caservertest.ProxyClient(t), "http://"+l.Addr().String()))
	stop()

	// Anything else is the end.
	l = open()
	broken := errors.New("broken")
	l.errs <- broken
	require.ErrorIs(t, caserver.Serve(t.Context(), l, caserver.ServeOptions{Handler: echo, TLS: caservertest.ServerTLS}), broken)
}

// TestConcurrentRequests has more requests inside at a time than one connection may have.
func TestConcurrentRequests(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	const requests, limit = 300, 250
	var inside sync.WaitGroup
	inside.Add(requests)
	var mu sync.Mutex
	streams := map[string]int{} // by connection
	addr := caservertest.Serve(t, caserver.ServeOptions{Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/wait" {
			return
		}
		mu.Lock()
		streams[r.RemoteAddr]++
		mu.Unlock()
		inside.Done()
		inside.Wait()
	})})
	c := caservertest.ProxyClient(t)
	get(t, c, "http://"+addr) // so that the client knows the limit
	var wg sync.WaitGroup
	for range requests {
		wg.Go(func() { get(t, c, "http://"+addr+"/wait") })
	}
	wg.Wait()
	most := 0
	for _, n := range streams {
		most = max(most, n)
	}
	assert.Equal(t, limit, most)
}
