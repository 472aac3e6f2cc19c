package caserver_test

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki/caserver"
)

// buffer is a log that several goroutines write.
type buffer = logtest.Buffer

// from connects from an address of the loopback network.
func from(t testing.TB, ip, addr string) net.Conn {
	t.Helper()
	c := must.Get((&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}).Dial("tcp", addr))(t)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// closed reports whether the server closes a connection within a time. A silent one lasts 10 seconds within the limits.
func closed(c net.Conn, within time.Duration) bool {
	_ = c.SetReadDeadline(time.Now().Add(within))
	_, err := io.Copy(io.Discard, c)
	e, ok := err.(net.Error)
	return !ok || !e.Timeout()
}

// served reports whether a connection has an answer to a request, and keeps it.
func served(c net.Conn) bool {
	tc := tls.Client(c, caservertest.ClientTLS)
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.WriteString(tc, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		return false
	}
	line, err := bufio.NewReader(tc).ReadString('\n')
	return err == nil && strings.Contains(line, "200")
}

// One address has its share of the connections, and clients at others do not notice.
func TestMaxConns(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("needs several addresses of the loopback network")
	}
	for name, o := range map[string]caserver.ServeOptions{
		"default": {MaxConns: 16}, // half
		"set":     {MaxConns: 20, MaxConnsPerAddress: 8},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			log := &buffer{}
			o.Handler, o.Logger = echo, slog.New(slog.NewTextHandler(log, nil))
			addr := caservertest.Serve(t, o)
			var held []net.Conn
			for i := range 8 {
				held = append(held, from(t, "127.0.0.2", addr))
				require.True(t, served(held[i]), i)
			}
			for range 20 {
				require.True(t, closed(from(t, "127.0.0.2", addr), 5*time.Second), "beyond its share")
			}
			for i := range 6 {
				require.True(t, served(from(t, "127.0.0.3", addr)), i)
			}
			if name == "default" {
				require.True(t, closed(from(t, "127.0.0.3", addr), 5*time.Second), "it has six, and two are free")
				assert.Equal(t, 1, strings.Count(log.String(), "few connections are left"), log)
				for i := range 2 {
					require.True(t, served(from(t, fmt.Sprintf("127.0.1.%d", i+1), addr)), i)
				}
				require.True(t, closed(from(t, "127.0.0.4", addr), 5*time.Second), "beyond the total")
				assert.Equal(t, 1, strings.Count(log.String(), "MaxConns is reached"), log)
			}
			assert.Equal(t, 1, strings.Count(log.String(), "MaxConnsPerAddress is reached"), log)
			assert.Contains(t, log.String(), "peer=127.0.0.2:")
			require.NoError(t, held[0].Close())
			assert.Eventually(t, func() bool { return served(from(t, "127.0.0.4", addr)) }, time.Minute, time.Millisecond, "what is closed makes room")
		})
	}
	for _, o := range []caserver.ServeOptions{{MaxConns: -1}, {MaxConnsPerAddress: -1}} {
		o.Handler, o.Plaintext = echo, true
		l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
		assert.ErrorContains(t, caserver.Serve(t.Context(), l, o), "negative")
	}
}

// Connections that do not complete their handshake are bounded, in total and of an address.
func TestMaxHandshakes(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("needs several addresses of the loopback network")
	}
	log := &buffer{}
	addr := caservertest.Serve(t, caserver.ServeOptions{Handler: echo, MaxConns: 40, Logger: slog.New(slog.NewTextHandler(log, nil))})
	silent := func(ip string, n, want int) (kept int) {
		var gone atomic.Int64
		for range n {
			c := from(t, ip, addr)
			go func() {
				if closed(c, time.Minute) {
					gone.Add(1)
				}
			}()
		}
		require.Eventually(t, func() bool { return int(gone.Load()) >= n-want }, time.Minute, time.Millisecond)
		time.Sleep(200 * time.Millisecond) // in which no more are closed
		return n - int(gone.Load())
	}
	assert.Equal(t, 10, silent("127.0.0.2", 25, 10), "a quarter")
	for range 5 {
		require.True(t, served(from(t, "127.0.0.3", addr)), "complete ones do not count")
	}
	assert.Equal(t, 10, silent("127.0.0.4", 15, 10))
	assert.Equal(t, 0, silent("127.0.0.5", 3, 0), "half in total")
	for _, from := range []string{"127.0.0.2", "127.0.0.4"} {
		assert.Equal(t, 1, strings.Count(log.String(), `reason="the address has too many handshakes that are not complete" peer=`+from), log)
	}
	assert.Equal(t, 1, strings.Count(log.String(), "there are too many handshakes"), log)
}

// The proxy of a node has the connections of all its pods from one address.
func TestManyOfOneAddress(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	addr := caservertest.Serve(t, caserver.ServeOptions{Handler: echo})
	var all sync.WaitGroup
	for i := range 400 {
		c := from(t, "127.0.0.1", addr)
		all.Go(func() { assert.True(t, served(c), fmt.Sprint(i)) })
	}
	all.Wait()
}

// A second address that is refused for the same reason is seen in the log: for its handshakes, and for its connections.
func TestRefusedAddressesAreNamed(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("needs several addresses of the loopback network")
	}
	log := &buffer{}
	addr := caservertest.Serve(t, caserver.ServeOptions{Handler: echo, MaxConnsPerAddress: 1, Logger: slog.New(slog.NewTextHandler(log, nil))})
	for range 3 {
		for _, ip := range []string{"127.0.0.2", "127.0.0.3"} {
			c := from(t, ip, addr)
			require.True(t, closed(from(t, ip, addr), 5*time.Second), "beyond its share")
			must.Get(io.WriteString(c, "GET / HTTP/1.1\r\n\r\n"))(t)
			require.True(t, closed(c, 5*time.Second))
			require.Eventually(t, func() bool { return strings.Count(log.String(), "peer="+ip+":") == 2 }, time.Minute, time.Millisecond, log)
		}
	}
	assert.Equal(t, 4, strings.Count(log.String(), "\n"), log)
}
