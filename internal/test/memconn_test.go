package test_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/big"
	"net"
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

// TestLargeTransfer moves more than the buffer holds, so that the writer has to wait.
func TestMemconnLargeTransfer(t *testing.T) {
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

func TestMemconnConcurrentWritesDoNotMix(t *testing.T) {
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

func TestMemconnClose(t *testing.T) {
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

// TestCloseWakes closes either end while a read or a write waits.
func TestMemconnCloseWakes(t *testing.T) {
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

func TestMemconnDeadlines(t *testing.T) {
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
func TestMemconnTLSResumption(t *testing.T) {
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
