package caserver_test

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
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

// listener accepts connections that count as their addresses alone: they tell neither a descriptor, which may be beyond
// the limit of within, nor a local address, by which the user is found.
type listener struct {
	net.Listener
	accepts func()
}

type addressed struct{ net.Conn }

func (addressed) LocalAddr() net.Addr { return new(net.UnixAddr) }

func (l listener) Accept() (net.Conn, error) {
	l.accepts()
	c, err := l.Listener.Accept()
	return addressed{c}, err
}

// within serves echo within a limit on connections: that of a process with twice as many descriptors, which this
// process is until the server accepts. It returns the address. No other server may have connections, so t is not
// parallel.
func within(t testing.TB, most int, log io.Writer) string {
	t.Helper()
	inner, begun := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t), make(chan struct{})
	var all syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &all))
	few := syscall.Rlimit{Cur: uint64(2 * most), Max: all.Max}
	require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &few))
	defer func() { assert.NoError(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &all)) }()
	caservertest.ServeOn(t, listener{inner, sync.OnceFunc(func() { close(begun) })}, caserver.ServeOptions{
		Handler: echo, TLS: caservertest.ServerTLS, Logger: slog.New(slog.NewTextHandler(log, nil)),
	})
	<-begun
	return inner.Addr().String()
}

// One address has its share of the connections, and clients at others do not notice.
func TestMaxConns(t *testing.T) {
	log := new(logtest.Buffer)
	addr := within(t, 16, log)
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
	require.True(t, closed(from(t, "127.0.0.3", addr), 5*time.Second), "it has six, and two are free")
	assert.Equal(t, 1, strings.Count(log.String(), "few connections are left"), log)
	for i := range 2 {
		require.True(t, served(from(t, fmt.Sprintf("127.0.1.%d", i+1), addr)), i)
	}
	require.True(t, closed(from(t, "127.0.0.4", addr), 5*time.Second), "beyond the total")
	assert.Equal(t, 1, strings.Count(log.String(), "all callers together hold too much"), log)
	assert.Equal(t, 1, strings.Count(log.String(), "this caller holds too much"), log)
	assert.Contains(t, log.String(), "peer=127.0.0.2:")
	require.NoError(t, held[0].Close())
	assert.Eventually(t, func() bool { return served(from(t, "127.0.0.4", addr)) }, time.Minute, time.Millisecond, "what is closed makes room")
}

// Connections that do not complete their handshake are bounded, in total and of an address.
func TestMaxHandshakes(t *testing.T) {
	rounds.NotShort(t)
	log := new(logtest.Buffer)
	addr := within(t, 40, log)
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

// A second address that is refused for the same reason is seen in the log: for its handshakes, and for its connections.
func TestRefusedAddressesAreNamed(t *testing.T) {
	log := new(logtest.Buffer)
	addr := within(t, 3, log)
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
