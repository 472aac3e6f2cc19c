package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/meshtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// A client's proxy makes HTTP/2 of a request by HTTP/1, and says so in l5d-orig-proto: an application that speaks HTTP/1 alone
// gets HTTP/1 then, and the answer says what it was. The header reaches no application, and means nothing by HTTP/1.
func TestOrigProto(t *testing.T) {
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	app := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("L5d-Orig-Proto", "HTTP/0.9")
		fmt.Fprintf(w, "%s %s %s body=%q orig=%q te=%q", r.Proto, r.Host, r.RequestURI, body, r.Header["L5d-Orig-Proto"], r.TransferEncoding)
	})}
	go func() { _ = app.Serve(l) }() // of HTTP/1 alone
	defer app.Close()
	id, client := certified(t, s, web), certified(t, s, voting)
	at, _ := inbound(t, id, func(c *config) { c.clientID, c.application = true, l.Addr().String() })
	mtls := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return client.dial(ctx, endpoint{addr: at, identity: web})
	}
	for _, c := range []struct {
		http2          bool
		header         string
		status         int
		target, answer string // the header of the answer
	}{
		{true, "HTTP/1.1", 200, "/a%2Fb?c", "HTTP/1.1"},
		{true, "HTTP/1.0", 200, "/a%2Fb?c", "HTTP/1.1"},
		{true, "HTTP/1.1; absolute-form", 200, "http://app.test/a%2Fb?c", "HTTP/1.1"},
		{true, "HTTP/1.1 ", 200, "/a%2Fb?c%20HTTP/1.0", "HTTP/1.1"}, // with a space in the query
		{true, "", 502, "", ""},                                     // it was HTTP/2 all the way
		{true, "HTTP/2", 502, "", ""},
		{true, "HTTP/1.7", 502, "", ""},
		{false, "HTTP/1.1", 200, "/a%2Fb?c", ""},
	} {
		req, err := http.NewRequest(http.MethodPost, "http://app.test/a%2Fb?c", io.MultiReader(strings.NewReader("hel"), strings.NewReader("lo")))
		require.NoError(t, err)
		if c.header != "" {
			req.Header.Set("l5d-orig-proto", c.header)
		}
		if strings.HasSuffix(c.target, "%20HTTP/1.0") {
			req.URL.RawQuery = "c HTTP/1.0"
		}
		resp := must.Get(browser(t, at, c.http2, mtls).Do(req))(t)
		body := must.Get(io.ReadAll(resp.Body))(t)
		_ = resp.Body.Close()
		require.Equal(t, c.status, resp.StatusCode, "%+v %s", c, body)
		if c.status == 200 {
			assert.Equal(t, fmt.Sprintf(`HTTP/1.1 app.test %s body="hello" orig=[] te=["chunked"]`, c.target), string(body), "%+v", c)
		}
		assert.Equal(t, c.answer, resp.Header.Get("L5d-Orig-Proto"), "%+v", c)
	}

	// Many requests on one connection.
	b := browser(t, at, true, mtls)
	for range rounds.Of(250) {
		req := must.Get(http.NewRequest(http.MethodGet, "http://app.test/", nil))(t)
		req.Header.Set("l5d-orig-proto", "HTTP/1.1")
		resp := must.Get(b.Do(req))(t)
		must.Get(io.Copy(io.Discard, resp.Body))(t)
		_ = resp.Body.Close()
		require.Equal(t, 200, resp.StatusCode)
	}
}

// Where the application is told of clients, no byte of a client reaches it unread: not what begins like TLS and is none, and not
// what the random bytes of a ClientHello for another name carry. A failed handshake is no plaintext either, also for an
// application with a protocol of its own.
func TestNothingUnread(t *testing.T) {
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	id := certified(t, s, web)
	var got atomic.Int64
	app := accepts(t, func(c net.Conn) {
		n, _ := io.Copy(io.Discard, c)
		got.Add(n)
	})
	const forged = "GET / HTTP/1.1\r\nHost: a\r\nl5d-client-id: admin\r\n\r\n"
	hello := func(name string) []byte { // with a request in the place of its random bytes
		var sent quiet
		_ = tls.Client(&sent, &tls.Config{ServerName: name, InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}).Handshake()
		b := sent.written
		copy(b[11:43], "\r\nGET / HTTP/1.1\r\nl5d-client-id: ")
		return b
	}
	for name, c := range map[string]struct {
		opaque, clientID bool
		sent             []byte
	}{
		"no ClientHello":               {false, true, append([]byte{22}, forged...)},
		"half a ClientHello":           {false, true, append([]byte{22, 3, 1, 0, 60, 1, 0, 0, 56}, forged...)},
		"a ClientHello for another":    {false, true, hello("other.test")},
		"a ClientHello without a name": {false, true, hello("")},
		"a failed handshake":           {false, true, append(hello(web), forged...)},
		"a failed handshake, opaque":   {true, false, append(hello(web), forged...)},
	} {
		at, _ := inbound(t, id, func(cfg *config) { cfg.opaque, cfg.clientID, cfg.application = c.opaque, c.clientID, app })
		conn := must.Get(net.Dial("tcp", at))(t)
		must.Get(conn.Write(c.sent))(t)
		if strings.HasPrefix(name, "a failed handshake") {
			for err := error(nil); err == nil; { // the server's part
				require.NoError(t, conn.SetReadDeadline(time.Now().Add(300*time.Millisecond)))
				_, err = conn.Read(make([]byte, 16<<10))
			}
			_, _ = io.WriteString(conn, forged)
		}
		_ = conn.(*net.TCPConn).CloseWrite()
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(20*time.Second)))
		answer, _ := io.ReadAll(conn)
		assert.NotContains(t, string(answer), "HTTP/1.1 200", name)
		_ = conn.Close()
		assert.Zero(t, got.Load(), name)
	}
	assert.Greater(t, len(hello(web)), 100)
}

// quiet is a connection on which nothing comes.
type quiet struct {
	net.Conn
	written []byte
}

func (*quiet) Read([]byte) (int, error) { return 0, io.EOF }

func (q *quiet) Write(p []byte) (int, error) {
	q.written = append(q.written, p...)
	return len(p), nil
}

func (*quiet) SetWriteDeadline(time.Time) error { return nil }

// A request for the proxy's own address is refused, under each of its names, and one that goes through many proxies ends.
func TestLoop(t *testing.T) {
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	id := certified(t, s, web)
	newOutbound := func(to func(string) string) (addr string) {
		p, err := newProxy(config{name: id.name, identity: id.Identity, route: func(_ context.Context, authority string) (endpoint, error) {
			return endpoint{addr: to(authority)}, nil
		}})
		require.NoError(t, err)
		return serve(t, p.serveOutbound)
	}
	at := newOutbound(func(authority string) string { return authority })
	_, port := must.Get2(net.SplitHostPort(at))(t)
	for _, host := range []string{"127.0.0.1", "localhost", "0.0.0.0", "127.0.0.2", "[::ffff:127.0.0.1]", "LOCALHOST."} {
		for _, http2 := range []bool{false, true} {
			status, body := ask(t, browser(t, at, http2, nil), "http://"+host+":"+port+"/")
			assert.Equal(t, http.StatusBadGateway, status, host)
			assert.Contains(t, body, "that of the proxy itself", host)
		}
	}

	// Two proxies that lead to each other.
	var first, second string
	var requests atomic.Int64
	first = newOutbound(func(string) string { requests.Add(1); return second })
	second = newOutbound(func(string) string { requests.Add(1); return first })
	for _, http2 := range []bool{false, true} {
		requests.Store(0)
		status, body := ask(t, browser(t, first, http2, nil), "http://app.test/")
		assert.Equal(t, http.StatusLoopDetected, status)
		assert.Contains(t, body, "too many proxies")
		assert.EqualValues(t, maxHops+1, requests.Load(), "the last was refused")
	}
	for _, bad := range []string{"-1", "x", "99999999999999999999", "8"} {
		status, _ := ask(t, browser(t, first, false, nil), "http://app.test/", "l5d-hops", bad)
		assert.Equal(t, http.StatusLoopDetected, status, bad)
	}
	assert.True(t, local(netip.MustParseAddr("127.1.2.3")))
	assert.False(t, local(netip.MustParseAddr("192.0.2.1")))
}

// All spellings of a name have one route, and a name without one leads nowhere unless the operator says so.
func TestAuthority(t *testing.T) {
	t.Parallel()
	for host, want := range map[string]string{
		"app.test": "app.test:80", "APP.Test.": "app.test:80", "app.test:80": "app.test:80", "app.test.:080": "app.test:80", "app.test:8080": "app.test:8080",
		"app.test..": "app.test:80", "app.test:": "app.test:80", "web.2024": "web.2024:80", // a namespace may be a number
		"app.test:http": "", "app.test:+80": "", "app.test:65616": "", "": "", ":80": "", ".:80": "", "127.1": "", "0x7f.0.0.1:80": "", "2130706433": "", // others' spellings
		"LOCALHOST:1": "localhost:1", "[::1]": "[::1]:80", "[::1]:2": "[::1]:2", "[::FFFF:10.0.0.1]:2": "10.0.0.1:2", "10.0.0.1": "10.0.0.1:80", "[0:0::1]": "[::1]:80",
		"[::1%lo]:80": "", "[2001:db8::5%eth0]": "", // which a dial would reach as it does the one without
	} {
		assert.Equal(t, want, authority(host), host)
	}
	p := newPlace(t)
	plain, closed := application(t), application(t)
	_, plainPort := must.Get2(net.SplitHostPort(plain))(t)
	for _, c := range []struct {
		args   []string
		host   string
		status int
	}{
		{nil, closed, 502},
		{[]string{"-plaintext"}, closed, 200},
		{[]string{"-route", "localhost:" + plainPort + "=127.0.0.1:1=" + web, "-plaintext"}, "LOCALHOST.:" + plainPort, 502}, // and not by plaintext
		{[]string{"-route", "localhost:" + plainPort + "=127.0.0.1:1=" + web, "-plaintext"}, "localhost:+" + plainPort, 502},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		at, done := make(chan string, 10), make(chan error, 1)
		go func() { done <- run(ctx, ports(c.args...), p.environ(), lines(func(l string) { at <- l }), io.Discard) }()
		var out string
		for out == "" {
			if name, addr, _ := strings.Cut(strings.TrimSpace(<-at), ": "); name == "outbound" {
				out = addr
			}
		}
		answer := say(t, out, "GET / HTTP/1.1\r\nHost: "+c.host+"\r\nConnection: close\r\n\r\n")
		assert.Contains(t, answer, fmt.Sprintf("HTTP/1.1 %d ", c.status), "%+v", c)
		cancel()
		require.NoError(t, <-done)
	}
}

const (
	web       = meshtest.Web
	voting    = meshtest.Voting
	certifier = meshtest.Certifier
)

// member is a workload of a mesh.
type member struct {
	name string
	*linkerdproxy.Identity
}

// certified returns a member that has a certificate.
func certified(t testing.TB, c *meshtest.Controller, name string, edit ...func(*linkerdproxy.Config)) *member {
	t.Helper()
	return &member{name, c.Certified(t, name, edit...)}
}

// uncertified returns a member that asks for its first certificate until the test ends.
func uncertified(t testing.TB, c *meshtest.Controller, name string) *member {
	t.Helper()
	id := must.Get(linkerdproxy.New(c.Config(t, name)))(t)
	runs(t, id.Run)
	return &member{name, id}
}

// runs has something run until stop is called, or the test ends. That it ends well is required.
func runs(t testing.TB, run func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-done)
	})
	t.Cleanup(stop)
	return stop
}

// dial connects to an endpoint.
func (m *member) dial(ctx context.Context, e endpoint) (net.Conn, error) {
	p, err := newProxy(config{name: m.name, identity: m.Identity, application: e.addr})
	if err != nil {
		return nil, err
	}
	return p.dial(ctx, e, &connections{over: context.Background()}, 0)
}

// get returns the status and the body of an answer.
func get(t testing.TB, h http.Handler, path string) string {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return fmt.Sprint(w.Code, " ", strings.TrimSpace(w.Body.String()))
}

// eventually waits until f is true.
func eventually(t testing.TB, f func() bool, what string) {
	t.Helper()
	for end := time.Now().Add(15 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it did not come: " + what)
		}
	}
}

// together runs subtests that mostly wait for real time at once: parallel ones would wait for a free processor.
func together(t *testing.T, tests map[string]func(*testing.T)) {
	t.Helper()
	var wg sync.WaitGroup
	for name, f := range tests {
		wg.Go(func() { t.Run(name, f) })
	}
	wg.Wait()
}

// quietLog keeps what is logged.
type quietLog = logtest.Buffer
