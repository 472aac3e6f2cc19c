package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/meshtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// plainApp is an application of HTTP/1 that has each connection, and the head of each request on it, as it came.
func plainApp(t testing.TB, answer func(c net.Conn, r *bufio.Reader, head string) (more bool)) (addr string) {
	t.Helper()
	return accepts(t, func(c net.Conn) {
		r := bufio.NewReader(c)
		for more := true; more; {
			var head strings.Builder
			for line := ""; line != "\r\n"; head.WriteString(line) {
				var err error
				if line, err = r.ReadString('\n'); err != nil {
					return
				}
			}
			more = answer(c, r, head.String())
		}
	})
}

// accepts is an application with a protocol of its own: serve has each connection until it returns.
func accepts(t testing.TB, serve func(net.Conn)) (addr string) {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			go func() {
				defer c.Close()
				serve(c)
			}()
		}
	}()
	return l.Addr().String()
}

// say sends bytes on a new connection and returns what comes until the end of it.
func say(t testing.TB, addr, raw string) string {
	t.Helper()
	c := must.Get(net.Dial("tcp", addr))(t)
	defer c.Close()
	require.NoError(t, c.SetDeadline(time.Now().Add(10*time.Second)))
	must.Get(io.WriteString(c, raw))(t)
	answer, _ := io.ReadAll(c) // or up to a reset
	return string(answer)
}

// CONNECT reaches no application by HTTP/1: one that takes the rest of its connection for a tunnel would have the requests of
// others there, with the identities of their clients.
func TestConnect(t *testing.T) {
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	var heads atomic.Int64
	tunnels := plainApp(t, func(c net.Conn, r *bufio.Reader, head string) bool {
		heads.Add(1)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		if strings.HasPrefix(head, "CONNECT ") {
			rest := make([]byte, 1000)
			n, _ := r.Read(rest)
			t.Errorf("in the tunnel: %q", rest[:n])
			return false
		}
		return true
	})
	at, _ := inbound(t, certified(t, s, web), func(c *config) { c.application, c.clientID = tunnels, true })
	entry := outbound(t, certified(t, s, voting), endpoint{addr: tunnels})
	for _, addr := range []string{at, entry} {
		for range 3 {
			answer := say(t, addr, "CONNECT app.test:443 HTTP/1.1\r\nHost: app.test:443\r\n\r\nGET /in/the/tunnel HTTP/1.1\r\nHost: app.test\r\n\r\n")
			assert.True(t, strings.HasPrefix(answer, "HTTP/1.1 501 "), answer)
			assert.Equal(t, 1, strings.Count(answer, "HTTP/1.1 "), answer)
			answer = say(t, addr, "GET /secret HTTP/1.1\r\nHost: app.test\r\nConnection: close\r\n\r\n")
			assert.True(t, strings.HasPrefix(answer, "HTTP/1.1 200 "), answer)
		}
	}
	assert.EqualValues(t, 6, heads.Load())

	// And not as HTTP/2 that pretends to have been HTTP/1 once.
	b := browser(t, at, true, nil)
	for range 3 {
		req := must.Get(http.NewRequest(http.MethodConnect, "http://app.test:443", nil))(t)
		req.Header.Set("l5d-orig-proto", "HTTP/1.1")
		resp := must.Get(b.Do(req))(t)
		_ = resp.Body.Close()
		assert.Equal(t, http.StatusBadGateway, resp.StatusCode)
		answer := say(t, at, "GET /secret HTTP/1.1\r\nHost: app.test\r\nConnection: close\r\n\r\n")
		assert.True(t, strings.HasPrefix(answer, "HTTP/1.1 200 "), answer)
	}
}

// A request whose body was not read before its answer, or has no end, leaves nothing behind that is taken for a request; and
// after one that has an end the connection goes on.
func TestUnreadBodies(t *testing.T) {
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	var paths sync.Map
	hasty := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		paths.Store(r.URL.Path, true)
		rc := http.NewResponseController(w)
		assert.NoError(t, rc.EnableFullDuplex())
		fmt.Fprint(w, "done")
		assert.NoError(t, rc.Flush())
		if r.Body.Close() != nil { // or the server may read it beside itself (golang/go#68560)
			panic(http.ErrAbortHandler)
		}
	}))
	t.Cleanup(hasty.Close)
	id := certified(t, s, web)
	for name, addr := range map[string]string{"hasty": hasty.Listener.Addr().String(), "down": "127.0.0.1:1"} {
		at, _ := inbound(t, id, func(c *config) { c.application = addr })
		for body, answers := range map[string]int{
			"Content-Length: 5\r\n\r\nhello":                                2,
			"Content-Length: 100000\r\n\r\n" + strings.Repeat("x", 100_000): 2,
			"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n":     2,
			"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n":        1,
			"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloo\r\n":             1,
			"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n":      1,
		} {
			c := must.Get(net.Dial("tcp", at))(t)
			require.NoError(t, c.SetDeadline(time.Now().Add(20*time.Second)))
			next := fmt.Sprintf("/%s/%x", name, sha256.Sum256([]byte(body)))
			_, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: app.test\r\n"+body+"GET "+next+" HTTP/1.1\r\nHost: app.test\r\nConnection: close\r\n\r\n")
			require.NoError(t, err)
			got, err := io.ReadAll(c)
			require.NoError(t, c.Close())
			assert.LessOrEqual(t, strings.Count(string(got), "HTTP/1.1 "), answers, "%s %.60q: %s", name, body, got)
			_, reached := paths.Load(next)
			assert.Equal(t, name == "hasty" && answers == 2, reached, "%s %.60q: %s", name, body, got)
			if answers == 2 {
				require.NoError(t, err, body)
				assert.Equal(t, 2, strings.Count(string(got), "HTTP/1.1 "), "%s %.60q: %s", name, body, got)
			}
		}
	}
}

// No spelling of the header names of the proxy arrives that an application could have as the same variable; and the
// target of a request arrives as it was written.
func TestSpellings(t *testing.T) {
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	echo := plainApp(t, func(c net.Conn, _ *bufio.Reader, head string) bool {
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(head), head)
		return true
	})
	at, _ := inbound(t, certified(t, s, web), func(c *config) { c.application, c.clientID = echo, true })
	for _, name := range []string{"l5d.client.id", "L5D~client!id", "l5d`client^ID", "l5d*require|id", "L5d#client$id", "l5d%client&id", "l5d'client+id", "l5d-client-id", "l5d_client_id",
		"l5d-remote-ip", "L5D_Server-ID", "l5d-dst-override", "l5d-anything", "l5d_hops", "l5d-orig-proto"} {
		answer := say(t, at, "GET / HTTP/1.1\r\nHost: app.test\r\n"+name+": admin\r\nX-Other.Name: kept\r\nConnection: close\r\n\r\n")
		assert.Contains(t, answer, ": kept", name)
		assert.NotContains(t, answer, "admin", name)
	}
	for _, target := range []string{
		"/a|b{c}\"^`\\<>?x=|{}", "/%7Cx", "/a%2fb/../%2E", "//other.test/x", "/", "/?", "/??", "/a;b=c", "/[x]", "/\xc3\xa9", "/a#b", "/a:b@c//d",
	} {
		want := target
		if target == "/a#b" { // which no client sends
			want = "/a%23b"
		}
		answer := say(t, at, "GET "+target+" HTTP/1.1\r\nHost: app.test\r\nConnection: close\r\n\r\n")
		assert.Contains(t, answer, "\r\n\r\nGET "+want+" HTTP/1.1\r\n", target)
	}
	answer := say(t, at, "GET http://other.test/x|y?z HTTP/1.1\r\nHost: app.test\r\nConnection: close\r\n\r\n")
	assert.Contains(t, answer, "GET /x%7Cy?z HTTP/1.1\r\nHost: other.test\r\n")
}

// exhausted is a listener for which there are no descriptors for a while.
type exhausted struct {
	net.Listener
	times atomic.Int64
}

func (l *exhausted) Accept() (net.Conn, error) {
	if l.times.Add(-1) >= 0 {
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: syscall.EMFILE}
	}
	return l.Listener.Accept()
}

// A process that is out of descriptors, which clients can bring about, serves on once it has some.
func TestDescriptors(t *testing.T) {
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	id := certified(t, s, web)
	p := must.Get(newProxy(config{name: id.name, identity: id.Identity, application: application(t)}))(t)
	at := serve(t, func(ctx context.Context, l net.Listener) error {
		l = &exhausted{Listener: l}
		l.(*exhausted).times.Store(4)
		return p.serveInbound(ctx, l)
	})
	status, _ := ask(t, browser(t, at, false, nil), "http://app.test/")
	assert.Equal(t, http.StatusOK, status)

	// And it stops meanwhile.
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	out := &exhausted{Listener: l}
	out.times.Store(1 << 40)
	stop := runs(t, func(ctx context.Context) error { return p.serveInbound(ctx, out) })
	eventually(t, func() bool { return int64(1<<40)-out.times.Load() > 1 }, "another attempt")
	begun := time.Now()
	stop()
	assert.Less(t, time.Since(begun), 4*time.Second)
}

// A client that never sends the body of a request that was answered does not keep its connection.
func TestUnsentBody(t *testing.T) {
	t.Parallel()
	id := must.Get(linkerdproxy.New(meshtest.New(t, meshtest.Options{Life: time.Hour, Stopped: true}).Config(t, web)))(t)
	synctest.Test(t, func(t *testing.T) {
		p := must.Get(newProxy(config{name: web, identity: id, route: func(context.Context, string) (endpoint, error) {
			return endpoint{}, errors.New("there is no such service")
		}}))(t)
		l := memconn.Listen()
		runs(t, func(ctx context.Context) error { return p.serveOutbound(ctx, l) })
		c := must.Get(l.DialContext(t.Context(), "tcp", ""))(t)
		defer c.Close()
		must.Get(io.WriteString(c, "POST / HTTP/1.1\r\nHost: app.test\r\nContent-Length: 10\r\n\r\n"))(t)
		begun := time.Now()
		assert.Contains(t, string(must.Get(io.ReadAll(c))(t)), "502 Bad Gateway")
		assert.Less(t, time.Since(begun), 15*time.Second)
	})
}

// The end of a server is that of its connections to others, also of those whose requests it has cut after 5 seconds.
func TestStopConnections(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	id := certified(t, s, web)
	var open atomic.Int64
	started := make(chan struct{}, 100)
	var addrs []string
	for range 50 {
		app := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_ = http.NewResponseController(w).Flush()
			started <- struct{}{}
			<-r.Context().Done()
		}))
		app.Config.ConnState = func(_ net.Conn, state http.ConnState) {
			switch state {
			case http.StateNew:
				open.Add(1)
			case http.StateClosed:
				open.Add(-1)
			}
		}
		app.Config.Protocols = new(http.Protocols)
		app.Config.Protocols.SetUnencryptedHTTP2(true)
		app.Start()
		defer app.Close()
		addrs = append(addrs, app.Listener.Addr().String())
	}
	p, err := newProxy(config{name: id.name, identity: id.Identity, route: func(_ context.Context, authority string) (endpoint, error) {
		_, port, _ := net.SplitHostPort(authority)
		i, err := strconv.Atoi(port)
		return endpoint{addr: addrs[i-1]}, err
	}})
	require.NoError(t, err)
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	stop := runs(t, func(ctx context.Context) error { return p.serveOutbound(ctx, l) })
	for i := range addrs {
		go func() {
			if resp, err := browser(t, l.Addr().String(), true, nil).Get("http://app.test:" + strconv.Itoa(i+1) + "/"); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
			}
		}()
	}
	for range addrs {
		<-started
	}
	require.EqualValues(t, len(addrs), open.Load())
	stop()
	assert.Eventually(t, func() bool { return open.Load() == 0 }, time.Minute, 10*time.Millisecond)
}

// The end of one direction of an upgraded connection is passed on, and the other goes on.
func TestUpgradeHalfClosed(t *testing.T) {
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	app := plainApp(t, func(c net.Conn, r *bufio.Reader, _ string) bool {
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		all, _ := io.ReadAll(r)
		_, _ = fmt.Fprintf(c, "all of it: %s", all)
		return false
	})
	at, _ := inbound(t, certified(t, s, web), func(c *config) { c.application = app })
	entry := outbound(t, certified(t, s, voting), endpoint{addr: at, identity: web})
	for name, addr := range map[string]string{"to the application": at, "by both proxies": entry} {
		c, r := upgraded(t, addr)
		must.Get(io.WriteString(c, "hello"))(t)
		require.NoError(t, c.(*net.TCPConn).CloseWrite())
		assert.Equal(t, "all of it: hello", string(must.Get(io.ReadAll(r))(t, name)), name)
	}
}

// A second client that is refused for the same reason is seen in the log.
func TestRefusedClientsAreNamed(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("needs several addresses of the loopback network")
	}
	log := new(quietLog)
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	at, _ := inbound(t, certified(t, s, web), func(c *config) {
		c.requireTLS, c.logger = true, slog.New(slog.NewTextHandler(log, nil))
	})
	for range 5 {
		for _, ip := range []string{"127.0.0.2", "127.0.0.3"} {
			c := must.Get((&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}).Dial("tcp", at))(t)
			must.Get(io.WriteString(c, "GET / HTTP/1.1\r\nHost: app.test\r\n\r\n"))(t)
			_, _ = io.ReadAll(c)
			require.NoError(t, c.Close())
			assert.Contains(t, log.String(), `reason="it is without TLS" peer=`+ip+":")
		}
	}
	assert.Equal(t, 2, strings.Count(log.String(), "\n"), log)
}
