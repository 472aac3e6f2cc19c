package memconn_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
)

func TestReadAndWrite(t *testing.T) {
	t.Parallel()
	a, b := memconn.Pipe()
	for _, dir := range [][2]net.Conn{{a, b}, {b, a}} {
		n := must.Get(dir[0].Write([]byte("hello")))(t, "a write does not wait for a reader")
		assert.Equal(t, 5, n)
		buf := make([]byte, 3)
		n = must.Get(dir[1].Read(buf))(t)
		assert.Equal(t, "hel", string(buf[:n]))
		n = must.Get(dir[1].Read(buf))(t)
		assert.Equal(t, "lo", string(buf[:n]))
	}
	assert.Equal(t, "mem", a.LocalAddr().Network())
	assert.Equal(t, "mem", a.RemoteAddr().String())
}

func TestEmptyReadAndWrite(t *testing.T) {
	t.Parallel()
	a, _ := memconn.Pipe()
	n, err := a.Read(nil)
	assert.Zero(t, n)
	assert.NoError(t, err)
	n, err = a.Write(nil)
	assert.Zero(t, n)
	assert.NoError(t, err)
}

// TestLargeTransfer moves more than the buffer holds, so that the writer has to wait.
func TestLargeTransfer(t *testing.T) {
	t.Parallel()
	a, b := memconn.Pipe()
	sent := make([]byte, 1<<20)
	must.Get(rand.Read(sent))(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		n, err := a.Write(sent)
		assert.NoError(t, err)
		assert.Equal(t, len(sent), n)
		assert.NoError(t, a.Close())
	})
	assert.True(t, bytes.Equal(sent, must.Get(io.ReadAll(b))(t)))
	wg.Wait()
}

func TestConcurrentWritesDoNotMix(t *testing.T) {
	t.Parallel()
	const size, writers = 100_000, 4 // each larger than the buffer
	a, b := memconn.Pipe()
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			assert.NoError(t, must.Err(a.Write(bytes.Repeat([]byte{byte(i)}, size))))
		})
	}
	got := make([]byte, size*writers)
	must.Get(io.ReadFull(b, got))(t)
	wg.Wait()
	for chunk := range writers {
		part := got[chunk*size : (chunk+1)*size]
		assert.True(t, bytes.Equal(part, bytes.Repeat(part[:1], size)), "chunk %d is of one writer", chunk)
	}
}

func TestClose(t *testing.T) {
	t.Parallel()
	a, b := memconn.Pipe()
	must.Get(a.Write([]byte("last words")))(t)
	must.Get(b.Write([]byte("unread")))(t)
	require.NoError(t, a.Close())
	require.NoError(t, a.Close(), "again")

	assert.ErrorIs(t, must.Err(a.Read(make([]byte, 1))), net.ErrClosed)
	assert.ErrorIs(t, must.Err(a.Write([]byte("x"))), net.ErrClosed)
	_, err := b.Write([]byte("x"))
	assert.ErrorIs(t, err, syscall.EPIPE)
	_, isOp := errors.AsType[*net.OpError](err)
	assert.True(t, isOp)

	got, err := io.ReadAll(b)
	assert.NoError(t, err)
	assert.Equal(t, "last words", string(got))
	assert.Equal(t, io.EOF, must.Err(b.Read(make([]byte, 1))), "plain, as callers compare it")
	assert.NoError(t, a.SetDeadline(time.Now()), "of a closed connection: no effect")
}

func TestCloseWrite(t *testing.T) {
	t.Parallel()
	a, b := memconn.Pipe()
	must.Get(a.Write([]byte("question")))(t)
	require.NoError(t, a.CloseWrite())
	got := must.Get(io.ReadAll(b))(t)
	assert.Equal(t, "question", string(got))
	must.Get(b.Write([]byte("answer")))(t)
	require.NoError(t, b.Close())
	got = must.Get(io.ReadAll(a))(t)
	assert.Equal(t, "answer", string(got))
	assert.ErrorIs(t, must.Err(a.Write([]byte("x"))), net.ErrClosed)
}

// TestCloseWakes closes either end while a read or a write waits.
func TestCloseWakes(t *testing.T) {
	t.Parallel()
	full := make([]byte, 1<<20)
	for name, c := range map[string]struct {
		wait func(a *memconn.Conn) error
		far  bool // close the other end
		want error
	}{
		"read, near":  {func(a *memconn.Conn) error { _, err := a.Read(make([]byte, 1)); return err }, false, net.ErrClosed},
		"read, far":   {func(a *memconn.Conn) error { _, err := a.Read(make([]byte, 1)); return err }, true, io.EOF},
		"write, near": {func(a *memconn.Conn) error { _, err := a.Write(full); return err }, false, net.ErrClosed},
		"write, far":  {func(a *memconn.Conn) error { _, err := a.Write(full); return err }, true, syscall.EPIPE},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				a, b := memconn.Pipe()
				done := make(chan error, 1)
				go func() { done <- c.wait(a) }()
				synctest.Wait()
				require.Empty(t, done, "it waits")
				if c.far {
					require.NoError(t, b.Close())
				} else {
					require.NoError(t, a.Close())
				}
				assert.ErrorIs(t, <-done, c.want)
			})
		})
	}
}

func TestDeadlines(t *testing.T) {
	t.Parallel()
	read := func(a *memconn.Conn) error { _, err := a.Read(make([]byte, 1)); return err }
	write := func(a *memconn.Conn) error { _, err := a.Write(make([]byte, 1<<20)); return err }
	for name, c := range map[string]struct {
		set  func(a *memconn.Conn, t time.Time) error
		wait func(a *memconn.Conn) error
	}{
		"read":        {(*memconn.Conn).SetReadDeadline, read},
		"write":       {(*memconn.Conn).SetWriteDeadline, write},
		"both, read":  {(*memconn.Conn).SetDeadline, read},
		"both, write": {(*memconn.Conn).SetDeadline, write},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				a, b := memconn.Pipe()
				start := time.Now()
				timeout := func(err error, after time.Duration, msg string) {
					t.Helper()
					assert.ErrorIs(t, err, os.ErrDeadlineExceeded, msg)
					e, ok := errors.AsType[net.Error](err)
					assert.True(t, ok && e.Timeout(), msg)
					assert.Equal(t, after, time.Since(start), msg)
				}
				require.NoError(t, c.set(a, start.Add(time.Second)))
				timeout(c.wait(a), time.Second, "in the future")
				timeout(c.wait(a), time.Second, "it stays passed")

				// A deadline that is moved while a call waits counts for that call.
				require.NoError(t, c.set(a, start.Add(time.Hour)))
				done := make(chan error, 1)
				go func() { done <- c.wait(a) }()
				synctest.Wait()
				require.NoError(t, c.set(a, time.Unix(1, 0)))
				timeout(<-done, time.Second, "moved to the past")

				require.NoError(t, c.set(a, time.Time{}))
				go func() { done <- c.wait(a) }()
				time.Sleep(24 * time.Hour)
				require.Empty(t, done, "none any more")
				require.NoError(t, b.Close())
				assert.NotErrorIs(t, <-done, os.ErrDeadlineExceeded)
			})
		})
	}
}

func TestPassedDeadlineWins(t *testing.T) {
	t.Parallel()
	a, b := memconn.Pipe()
	must.Get(b.Write([]byte("x")))(t)
	require.NoError(t, a.SetReadDeadline(time.Unix(1, 0)))
	require.ErrorIs(t, must.Err(a.Read(make([]byte, 1))), os.ErrDeadlineExceeded, "even if there is something to read, as on a socket")
	require.NoError(t, a.SetReadDeadline(time.Time{}))
	assert.Equal(t, 1, must.Get(a.Read(make([]byte, 1)))(t), "and nothing is lost")
}

func TestListener(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := memconn.Listen()
		assert.Equal(t, "mem", l.Addr().String())
		gone := errors.New("gone")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, gone)
		defer cancel()
		assert.ErrorIs(t, must.Err(l.Dial(ctx)), gone, "the listener is closed")

		var wg sync.WaitGroup
		wg.Go(func() {
			c, err := l.Accept()
			if assert.NoError(t, err) {
				assert.NoError(t, must.Err(io.WriteString(c, "hello")))
				assert.NoError(t, c.Close())
			}
			assert.ErrorIs(t, must.Err(l.Accept()), net.ErrClosed)
		})
		got := must.Get(io.ReadAll(must.Get(l.DialContext(t.Context(), "tcp", "example.org:443"))(t)))(t)
		assert.Equal(t, "hello", string(got))
		synctest.Wait()
		require.NoError(t, l.Close())
		require.NoError(t, l.Close(), "again")
		wg.Wait()
		assert.ErrorIs(t, must.Err(l.Dial(t.Context())), syscall.ECONNREFUSED)
	})
}

// configs returns a server's and a client's TLS configuration that can resume sessions.
func configs(t *testing.T) (server, client *tls.Config) {
	t.Helper()
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		DNSNames:     []string{"server.test"},
		NotBefore:    time.Now(),
		NotAfter:     time.Now().Add(time.Hour),
	}
	der := must.Get(x509.CreateCertificate(rand.Reader, template, template, key.Public(), key))(t)
	cert := must.Get(x509.ParseCertificate(der))(t)
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}},
		&tls.Config{RootCAs: roots, ServerName: "server.test", ClientSessionCache: tls.NewLRUClientSessionCache(1)}
}

// TestTLSResumption is why this package exists: in a resumed TLS 1.3 handshake both sides write
// first.
func TestTLSResumption(t *testing.T) {
	t.Parallel()
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		t.Run(tls.VersionName(version), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				serverConfig, clientConfig := configs(t)
				serverConfig.MaxVersion = version
				for i := range 3 {
					a, b := memconn.Pipe()
					server, client := tls.Server(a, serverConfig), tls.Client(b, clientConfig)
					var wg sync.WaitGroup
					wg.Go(func() {
						assert.NoError(t, server.HandshakeContext(t.Context()))
						assert.NoError(t, must.Err(io.Copy(server, server)))
						assert.NoError(t, server.Close())
					})
					require.NoError(t, client.HandshakeContext(t.Context()))
					assert.Equal(t, version, client.ConnectionState().Version)
					assert.Equal(t, i > 0, client.ConnectionState().DidResume)
					must.Get(io.WriteString(client, "echo"))(t)
					require.NoError(t, client.CloseWrite())
					got := must.Get(io.ReadAll(client))(t) // the session ticket comes with it
					assert.Equal(t, "echo", string(got))
					require.NoError(t, client.Close())
					wg.Wait()
				}
			})
		})
	}
}

// TestHTTP serves HTTP/1.1 and HTTP/2 in a bubble: a handler that takes an hour takes no time, and
// a graceful shutdown leaves nothing behind.
func TestHTTP(t *testing.T) {
	t.Parallel()
	for major := 1; major <= 2; major++ {
		t.Run(fmt.Sprintf("HTTP/%d", major), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				serverConfig, clientConfig := configs(t)
				server := &http.Server{
					TLSConfig: serverConfig,
					Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
						time.Sleep(30 * time.Minute)
						assert.Equal(t, major, r.ProtoMajor)
						body, err := io.ReadAll(r.Body)
						assert.NoError(t, err)
						assert.NoError(t, must.Err(w.Write(body)))
					}),
				}
				l := memconn.Listen()
				var wg sync.WaitGroup
				wg.Go(func() { assert.Equal(t, http.ErrServerClosed, server.ServeTLS(l, "", "")) })
				transport := &http.Transport{DialContext: l.DialContext, TLSClientConfig: clientConfig, ForceAttemptHTTP2: major == 2}
				client := &http.Client{Transport: transport}
				start := time.Now()
				for range 2 {
					for range 3 {
						wg.Go(func() {
							sent := bytes.Repeat([]byte("x"), 200_000)
							req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://server.test/", bytes.NewReader(sent))
							if !assert.NoError(t, err) {
								return
							}
							resp, err := client.Do(req)
							if !assert.NoError(t, err) {
								return
							}
							got, err := io.ReadAll(resp.Body)
							assert.NoError(t, err)
							assert.NoError(t, resp.Body.Close())
							assert.True(t, bytes.Equal(sent, got))
						})
					}
					time.Sleep(31 * time.Minute)
				}
				assert.Equal(t, 62*time.Minute, time.Since(start))
				transport.CloseIdleConnections()
				require.NoError(t, server.Shutdown(t.Context()))
				wg.Wait()
			})
		})
	}
}
