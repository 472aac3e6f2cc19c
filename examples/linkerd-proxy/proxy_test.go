package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/meshtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// application is a toy application that tells what it has got. It serves HTTP/1, and HTTP/2 without TLS.
func application(t testing.TB) (addr string) {
	t.Helper()
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.Header.Get("Upgrade") == "echo" {
			w.Header().Set("Connection", "Upgrade")
			w.Header().Set("Upgrade", "echo")
			w.WriteHeader(http.StatusSwitchingProtocols)
			c, rw, err := http.NewResponseController(w).Hijack()
			if err == nil {
				_, _ = io.Copy(c, rw)
				_ = c.Close()
			}
			return
		}
		w.Header().Set("Trailer", "X-Sum")
		if r.Header.Get("Upgrade") != "" {
			fmt.Fprint(w, "upgrade to ", r.Header.Get("Upgrade"), " ")
		}
		fmt.Fprintf(w, "%s %s%s client=%q require=%q forwarded=%q body=%q", r.Proto, r.Host, r.RequestURI, r.Header.Values("L5d-Client-Id"), r.Header.Values("L5d-Require-Id"), r.Header.Get("X-Forwarded-For"), body)
		for name := range r.Trailer {
			fmt.Fprint(w, " trailer ", name)
		}
		w.Header().Set("X-Sum", "end")
	}))
	s.Config.DisableGeneralOptionsHandler = true
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetHTTP1(true)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// serve runs one of a proxy's servers until the test is over.
func serve(t testing.TB, run func(context.Context, net.Listener) error) (addr string) {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	runs(t, func(ctx context.Context) error { return run(ctx, l) })
	return l.Addr().String()
}

// inbound returns the address of an inbound proxy of id.
func inbound(t testing.TB, id *member, edit func(*config)) (addr string, p *proxy) {
	t.Helper()
	cfg := config{name: id.name, identity: id.Identity, application: application(t)}
	if edit != nil {
		edit(&cfg)
	}
	p = must.Get(newProxy(cfg))(t)
	return serve(t, p.serveInbound), p
}

// outbound returns the address of an outbound proxy of id, by which each authority leads to e.
func outbound(t testing.TB, id *member, e endpoint) string {
	t.Helper()
	p, err := newProxy(config{name: id.name, identity: id.Identity, route: func(_ context.Context, authority string) (endpoint, error) {
		if !strings.HasPrefix(authority, "app.test") {
			return endpoint{}, errors.New("there is no such service")
		}
		return e, nil
	}})
	require.NoError(t, err)
	return serve(t, p.serveOutbound)
}

// browser returns a client of HTTP/1 or 2 whose connections all go to addr.
func browser(t testing.TB, addr string, http2 bool, dial func(context.Context, string, string) (net.Conn, error)) *http.Client {
	t.Helper()
	if dial == nil {
		dial = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", addr)
		}
	}
	tr := &http.Transport{Protocols: new(http.Protocols), DialContext: dial}
	tr.Protocols.SetHTTP1(!http2)
	tr.Protocols.SetUnencryptedHTTP2(http2)
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 20 * time.Second}
}

// ask sends a request and returns the status and the body. The headers are names and values in turn.
func ask(t testing.TB, c *http.Client, url string, headers ...string) (status int, body string) {
	t.Helper()
	req := must.Get(http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader("hello")))(t)
	for i := 0; i < len(headers); i += 2 {
		req.Header.Add(headers[i], headers[i+1])
	}
	resp := must.Get(c.Do(req))(t)
	defer resp.Body.Close()
	b := must.Get(io.ReadAll(resp.Body))(t)
	if resp.StatusCode == http.StatusOK {
		require.Equal(t, "end", resp.Trailer.Get("X-Sum"))
	}
	return resp.StatusCode, string(b)
}

// An application may answer before it has read all of a request, by HTTP/1 and HTTP/2: the answer arrives whole, and the rest of
// the request reaches it.
func TestEarlyAnswer(t *testing.T) {
	t.Parallel()
	app := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		switch r.URL.Path {
		case "/large":
			w.WriteHeader(http.StatusRequestEntityTooLarge)
			fmt.Fprint(w, "no")
			return
		case "/enough":
			fmt.Fprint(w, "yes")
			return
		}
		assert.NoError(t, rc.EnableFullDuplex())
		b := make([]byte, 5)
		for {
			n, err := io.ReadFull(r.Body, b)
			fmt.Fprintf(w, "<%s>", b[:n])
			assert.NoError(t, rc.Flush())
			if err != nil {
				_ = r.Body.Close() // or the server may read it beside itself (golang/go#68560)
				return
			}
		}
	}))
	app.Config.Protocols = new(http.Protocols)
	app.Config.Protocols.SetHTTP1(true)
	app.Config.Protocols.SetUnencryptedHTTP2(true)
	app.Start()
	t.Cleanup(app.Close)
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	at, _ := inbound(t, certified(t, s, web), func(c *config) { c.application = app.Listener.Addr().String() })
	entry := outbound(t, certified(t, s, voting), endpoint{addr: at, identity: web})
	for _, http2 := range []bool{false, true} {
		c := browser(t, entry, http2, nil)
		for _, length := range []int64{-1, 14} { // unknown, or not
			for range 3 {
				rest, w := io.Pipe()
				late := time.AfterFunc(20*time.Second, func() { _ = w.CloseWithError(errors.New("no answer has begun")) })
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://app.test/", io.MultiReader(strings.NewReader("12345"), rest))
				require.NoError(t, err)
				req.ContentLength = length
				resp := must.Get(c.Do(req))(t)
				b := make([]byte, 7)
				must.Get(io.ReadFull(resp.Body, b))(t)
				late.Stop()
				require.Equal(t, "<12345>", string(b))
				for _, more := range []string{"67890", "abcd"} {
					must.Get(io.WriteString(w, more))(t)
				}
				require.NoError(t, w.Close())
				b = must.Get(io.ReadAll(resp.Body))(t)
				require.Equal(t, "<67890><abcd>", string(b))
				require.NoError(t, resp.Body.Close())
			}
		}
		for path, want := range map[string]string{"/large": "413 no", "/enough": "200 yes"} {
			if !http2 { // the server of the application reads the body itself before it answers
				break
			}
			rest, _ := io.Pipe() // which does not end before the answer
			req := must.Get(http.NewRequestWithContext(t.Context(), http.MethodPost, "http://app.test"+path, struct {
				io.Reader
				io.Closer
			}{io.MultiReader(strings.NewReader("12345"), rest), rest}))(t)
			resp := must.Get(c.Do(req))(t, path)
			b := must.Get(io.ReadAll(resp.Body))(t, path)
			require.Equal(t, want, fmt.Sprint(resp.StatusCode, " ", string(b)))
			require.NoError(t, resp.Body.Close())
		}
		for range 3 { // on connections that are in order
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://app.test/large", strings.NewReader(strings.Repeat("x", 100_000)))
			require.NoError(t, err)
			resp := must.Get(c.Do(req))(t)
			b := must.Get(io.ReadAll(resp.Body))(t)
			require.Equal(t, "413 no", fmt.Sprint(resp.StatusCode, " ", string(b)))
			require.NoError(t, resp.Body.Close())
		}
	}
}

// Requests go from application to application by HTTP/1 and HTTP/2 as they are, with the proven client beside them.
func TestPair(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-11-2", "LNK-11-13")
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	server := certified(t, s, web)
	at, p := inbound(t, server, func(c *config) { c.clientID, c.requireIdentity = true, true })
	client := certified(t, s, voting)
	entry := outbound(t, client, endpoint{addr: at, identity: web})
	for proto, http2 := range map[string]bool{"HTTP/1.1": false, "HTTP/2.0": true} {
		c := browser(t, entry, http2, nil)
		for range 3 {
			status, body := ask(t, c, "http://app.test:80/a%2Fb?x=1;y=2", "L5d-Client-Id", "root", "l5d-client-id", "admin", "L5d-Require-Id", web, "X-Forwarded-For", "10.1.2.3")
			require.Equal(t, http.StatusOK, status, body)
			assert.Equal(t, fmt.Sprintf(`%s app.test:80/a%%2Fb?x=1;y=2 client=[%q] require=[] forwarded="10.1.2.3" body="hello"`, proto, voting), body)
		}
		status, body := ask(t, c, "http://app.test/", "L5d-Require-Id", voting)
		assert.Equal(t, http.StatusBadGateway, status)
		assert.Contains(t, body, "l5d-require-id")
		status, body = ask(t, c, "http://elsewhere.test/")
		assert.Equal(t, http.StatusBadGateway, status)
		assert.Contains(t, body, "no such service")
	}
	var metrics strings.Builder
	require.NoError(t, p.Report().Metrics(&metrics))
	assert.Contains(t, metrics.String(), `svidkit_linkerdproxy_inbound_connections_total{kind="tls"} 2`)
	assert.Contains(t, get(t, server.Handler(p), "/metrics"), "svidkit_linkerdproxy_failed_requests_total")

	// A server with another identity gets nothing, although connections to it are open for the right one.
	p, err := newProxy(config{name: client.name, identity: client.Identity, route: func(_ context.Context, authority string) (endpoint, error) {
		return endpoint{addr: at, identity: strings.TrimSuffix(authority, ":80")}, nil
	}})
	require.NoError(t, err)
	c := browser(t, serve(t, p.serveOutbound), true, nil)
	status, body := ask(t, c, "http://"+web+"/")
	require.Equal(t, http.StatusOK, status, body)
	status, _ = ask(t, c, "http://"+certifier+"/")
	assert.Equal(t, http.StatusBadGateway, status)
}

// A connection that was made without a certificate serves no requests once there is one, and connections that are open outlast
// the certificate.
func TestKeptConnections(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: 2 * time.Second})
	mine := meshtest.New(t, meshtest.Options{Life: 2 * time.Second, Authority: s.Authority})
	mine.Account(meshtest.Token(voting), "")
	client := uncertified(t, mine, voting)
	at, _ := inbound(t, certified(t, s, web), func(c *config) { c.clientID = true })
	e := endpoint{addr: at, identity: web}
	kept, anew := browser(t, outbound(t, client, e), false, nil), browser(t, fresh(t, client, e), false, nil)
	_, body := ask(t, kept, "http://app.test/")
	require.Contains(t, body, "client=[]")
	mine.Account(meshtest.Token(voting), "voting")
	require.NoError(t, client.Ready(t.Context()))
	_, body = ask(t, kept, "http://app.test/")
	require.Contains(t, body, `client=["`+voting+`"]`)
	mine.Account(meshtest.Token(voting), "")
	eventually(t, func() bool { return get(t, client.Handler(), "/live") == "503 expired" }, "expiry")
	status, body := ask(t, kept, "http://app.test/")
	assert.Equal(t, http.StatusOK, status)
	assert.Contains(t, body, `client=["`+voting+`"]`)
	status, body = ask(t, anew, "http://app.test/")
	assert.Equal(t, http.StatusBadGateway, status)
	assert.Contains(t, body, "expired")
}

// The application is told of clients only on request, and never by clients.
func TestClientID(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-11-13", "LNK-10-4", "LNK-11-2")
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	id, client := certified(t, s, web), certified(t, s, voting)
	silent, _ := inbound(t, id, nil)
	telling, _ := inbound(t, id, func(c *config) { c.clientID = true })
	mtls := func(addr string) func(context.Context, string, string) (net.Conn, error) {
		return func(ctx context.Context, _, _ string) (net.Conn, error) {
			return client.dial(ctx, endpoint{addr: addr, identity: web})
		}
	}
	for _, c := range []struct {
		name, addr string
		dial       func(context.Context, string, string) (net.Conn, error)
		want       string
	}{
		{"off, with TLS", silent, mtls(silent), "client=[]"},
		{"off, without", silent, nil, "client=[]"},
		{"on, removed by the client", telling, mtls(telling), `client=["` + voting + `"]`},
		{"on, with TLS", telling, mtls(telling), `client=["` + voting + `"]`},
		{"on, without", telling, nil, "client=[]"},
		{"on, anonymous", telling, func(ctx context.Context, _, _ string) (net.Conn, error) {
			c, err := (&tls.Dialer{Config: &tls.Config{ServerName: web, InsecureSkipVerify: true}}).DialContext(ctx, "tcp", telling)
			return struct{ net.Conn }{c}, err
		}, "client=[]"},
	} {
		for _, http2 := range []bool{false, true} {
			status, body := ask(t, browser(t, c.addr, http2, c.dial), "http://app.test/", "l5d-client-id", "admin", "L5D-CLIENT-ID", "admin2", "l5d-require-id", "x", "Connection", map[bool]string{true: "l5d-client-id", false: "keep-alive"}[!http2 && strings.Contains(c.name, "removed")])
			require.Equal(t, http.StatusOK, status, c.name)
			assert.Contains(t, body, c.want, c.name)
			assert.Contains(t, body, "require=[]", c.name)
		}
	}

	// In none of the forms that a client may try.
	for _, raw := range []string{
		"GET / HTTP/1.1\r\nHost: app.test\r\nl5d-client-id: admin\r\nL5d-Client-Id: admin\r\nConnection: close\r\n\r\n",
		"\r\nGET / HTTP/1.1\r\nHost: app.test\r\nl5d-client-id: admin\r\nConnection: close\r\n\r\n",
		"GET / HTTP/1.0\r\nHost: app.test\r\nl5d-client-id: admin\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: app.test\r\nl5d-client-id : admin\r\nConnection: close\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: app.test\r\nX: y\r\n l5d-client-id: admin\r\nConnection: close\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: app.test\r\nTransfer-Encoding: chunked\r\nTrailer: l5d-client-id\r\nConnection: close\r\n\r\n0\r\nl5d-client-id: admin\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: app.test\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\nl5d-client-id: admin\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: app.test\r\nConnection: l5d-client-id, close\r\nl5d-client-id: admin\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: app.test\r\nConnection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: app.test\r\nConnection: Upgrade, close\r\nUpgrade: websocket, H2C\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: app.test\r\nConnection: Upgrade, close\r\nUpgrade: TLS/1.2\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: app.test\r\nConnection: Upgrade, close\r\nUpgrade: HTTP/2.0\r\n\r\n",
		"get / HTTP/1.1\r\nHost: app.test\r\nl5d-client-id: admin\r\nConnection: close\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: app.test\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /2 HTTP/1.1\r\nHost: app.test\r\nl5d-client-id: admin\r\nConnection: close\r\n\r\n",
	} {
		answer := say(t, telling, raw)
		require.NotEmpty(t, answer, raw)
		require.NotContains(t, strings.ToLower(answer), "admin", raw)
		require.NotContains(t, strings.ToLower(answer), "trailer l5d", raw)
		require.NotContains(t, answer, "upgrade to", raw)
	}
}

// Applications that have headers as variables, as CGI does, take an underscore for the hyphen.
func TestUnderscores(t *testing.T) {
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	app := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "got ", r.Header) })}
	go func() { _ = app.Serve(l) }()
	defer app.Close()
	at, _ := inbound(t, certified(t, s, web), func(c *config) { c.clientID, c.application = true, l.Addr().String() })
	for _, name := range []string{"l5d_client_id", "L5D-client_ID", "l5d_require-id"} {
		req := must.Get(http.NewRequest(http.MethodGet, "http://app.test/", nil))(t)
		req.Header[name] = []string{"admin"}
		resp := must.Get(browser(t, at, false, nil).Do(req))(t)
		body := must.Get(io.ReadAll(resp.Body))(t)
		_ = resp.Body.Close()
		assert.Contains(t, string(body), "got ", name)
		assert.NotContains(t, string(body), "admin", name)
	}
}

// A request without a Host gets that of the application, and OPTIONS * is forwarded like the rest.
func TestHost(t *testing.T) {
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	var target string
	at, _ := inbound(t, certified(t, s, web), func(c *config) { target = c.application })
	for raw, want := range map[string]string{
		"GET / HTTP/1.0\r\n\r\n":                                            target + "/ ",
		"GET / HTTP/1.1\r\nHost:\r\nConnection: close\r\n\r\n":              target + "/ ",
		"OPTIONS * HTTP/1.1\r\nHost: app.test\r\nConnection: close\r\n\r\n": "app.test* ",
	} {
		assert.Contains(t, say(t, at, raw), "HTTP/1.1 "+want, raw)
	}
}

// TLS for another name and what is not TLS pass through; with RequireTLS, and RequireIdentity, they do not.
func TestPassThrough(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-10-4", "LNK-11-2", "LNK-12.2-14")
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	id := certified(t, s, web)
	own := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, "the application's own TLS for ", r.TLS.ServerName, r.Header["L5d-Client-Id"])
	}))
	defer own.Close()
	target := own.Listener.Addr().String()
	through := func(addr string) error {
		c := browser(t, addr, false, nil)
		c.Transport.(*http.Transport).TLSClientConfig = &tls.Config{InsecureSkipVerify: true, ServerName: "example.com"}
		resp, err := c.Get("https://example.com/")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		body := must.Get(io.ReadAll(resp.Body))(t)
		require.Equal(t, "the application's own TLS for example.com[]", string(body))
		return nil
	}
	open, _ := inbound(t, id, func(c *config) { c.application = target })
	require.NoError(t, through(open))
	var log bytes.Buffer
	for i, edit := range []func(*config){
		func(c *config) { c.requireTLS = true },
		func(c *config) { c.requireIdentity = true },
		func(c *config) { c.clientID = true },
	} {
		closed, _ := inbound(t, id, func(c *config) {
			edit(c)
			c.application, c.logger = target, slog.New(slog.NewTextHandler(&log, nil))
		})
		require.Error(t, through(closed))
		if i == 2 {
			continue // requests without TLS may come, as they are read
		}
		require.Error(t, must.Err(browser(t, closed, false, nil).Get("http://app.test/")))
		require.Error(t, must.Err(browser(t, closed, true, nil).Get("http://app.test/")))
	}
	anonymous := func(addr string) error {
		c, err := tls.Dial("tcp", addr, &tls.Config{ServerName: web, InsecureSkipVerify: true})
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = io.WriteString(c, "GET / HTTP/1.1\r\nHost: app.test\r\nConnection: close\r\n\r\n")
		if err != nil {
			return err
		}
		return must.Err(http.ReadResponse(bufio.NewReader(c), nil))
	}
	mutual, _ := inbound(t, id, func(c *config) { c.requireTLS = true })
	require.NoError(t, anonymous(mutual))
	strict, _ := inbound(t, id, func(c *config) { c.requireIdentity = true })
	require.Error(t, anonymous(strict))
}

// An application with a protocol of its own gets each byte, also if its server speaks first, and the end of each direction.
func TestOpaque(t *testing.T) {
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	id, client := certified(t, s, web), certified(t, s, voting)
	app := accepts(t, func(c net.Conn) {
		all, _ := io.ReadAll(c) // up to the end of the client's direction
		_, _ = c.Write(bytes.ToUpper(all))
	})
	at, _ := inbound(t, id, func(c *config) { c.application, c.opaque = app, true })
	for _, e := range []endpoint{{addr: at, identity: web}, {addr: at}} {
		c := must.Get(client.dial(t.Context(), e))(t)
		require.NoError(t, c.SetDeadline(time.Now().Add(10*time.Second)))
		must.Get(io.WriteString(c, "hello"))(t)
		require.NoError(t, c.(interface{ CloseWrite() error }).CloseWrite())
		assert.Equal(t, "HELLO", string(must.Get(io.ReadAll(c))(t)))
		require.NoError(t, c.Close())
	}
}

// upgraded returns a connection that the application at addr has upgraded, and a reader of it.
func upgraded(t testing.TB, addr string) (net.Conn, *bufio.Reader) {
	t.Helper()
	c := must.Get(net.Dial("tcp", addr))(t)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(10*time.Second)))
	must.Get(io.WriteString(c, "GET / HTTP/1.1\r\nHost: app.test\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n"))(t)
	r := bufio.NewReader(c)
	require.Equal(t, http.StatusSwitchingProtocols, must.Get(http.ReadResponse(r, nil))(t).StatusCode)
	return c, r
}

// Upgraded connections, such as WebSockets, are carried.
func TestUpgrade(t *testing.T) {
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	at, _ := inbound(t, certified(t, s, web), nil)
	entry := outbound(t, certified(t, s, voting), endpoint{addr: at, identity: web})
	c, r := upgraded(t, entry)
	must.Get(io.WriteString(c, "ping\n"))(t)
	assert.Equal(t, "ping\n", must.Get(r.ReadString('\n'))(t))
}

// Before it is certified a proxy carries what is not TLS, and closes TLS for its name without a byte for the application.
func TestNotCertified(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-10-4")
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	s.Account(meshtest.Token(web), "")
	id := uncertified(t, s, web)
	var reached atomic.Int64
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	app := &http.Server{
		Handler:   http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}),
		ConnState: func(net.Conn, http.ConnState) { reached.Add(1) },
	}
	go func() { _ = app.Serve(l) }()
	defer app.Close()
	at, _ := inbound(t, id, func(c *config) { c.application = l.Addr().String() })
	_, err := tls.Dial("tcp", at, &tls.Config{ServerName: web, InsecureSkipVerify: true})
	require.Error(t, err)
	require.NotContains(t, err.Error(), "remote error", "not even TLS has answered")
	assert.Zero(t, reached.Load())
	resp := must.Get(browser(t, at, false, nil).Get("http://app.test/"))(t)
	require.NoError(t, resp.Body.Close())
	assert.Equal(t, http.StatusOK, resp.StatusCode)
}

// traffic sends requests by HTTP/1 and HTTP/2 to each of the entries, until it is stopped, which waits for some to be
// answered and returns the failures.
func traffic(t testing.TB, entries ...string) (stop func() (failures []string)) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var good atomic.Int64
	var mu sync.Mutex
	var failures []string
	var wg sync.WaitGroup
	for i := range 2 * len(entries) {
		c := browser(t, entries[i/2], i%2 == 1, nil)
		wg.Go(func() {
			for ctx.Err() == nil {
				resp, err := c.Get("http://app.test/")
				if err == nil {
					var body []byte
					body, err = io.ReadAll(resp.Body)
					_ = resp.Body.Close()
					if err == nil && resp.StatusCode != http.StatusOK {
						err = fmt.Errorf("%s: %s", resp.Status, body)
					}
				}
				if err != nil {
					mu.Lock()
					failures = append(failures, err.Error())
					mu.Unlock()
				} else {
					good.Add(1)
				}
				time.Sleep(5 * time.Millisecond)
			}
		})
	}
	return func() []string {
		eventually(t, func() bool { return good.Load() > 10 }, "eleven answers")
		cancel()
		wg.Wait()
		return failures
	}
}

// renewals counts new certificates of an identity.
func renewals(id *member) int {
	var b strings.Builder
	_ = id.Report().Metrics(&b)
	n := 0
	for line := range strings.Lines(b.String()) {
		_, _ = fmt.Sscanf(line, `control_identity_cert_refreshes_total{result="ok"} %d`, &n)
	}
	return n
}

// fresh is outbound with a new handshake for each request: no connection is kept for a route that is never the same.
func fresh(t testing.TB, id *member, e endpoint) string {
	t.Helper()
	var n atomic.Int64
	_, port := must.Get2(net.SplitHostPort(e.addr))(t)
	p := must.Get(newProxy(config{name: id.name, identity: id.Identity, route: func(context.Context, string) (endpoint, error) {
		e := e
		e.addr = "127.0.0.1:" + strings.Repeat("0", int(n.Add(1))) + port // the same one, by another text
		return e, nil
	}}))(t)
	return serve(t, p.serveOutbound)
}

// Two proxies carry HTTP/1 and HTTP/2 between their applications, over kept connections and new ones, while their
// certificates are renewed, and while the identity service is away for 45 % of the life of a certificate, over the time of the
// renewal. No request fails.
func TestRotationAndOutage(t *testing.T) {
	t.Parallel()
	rounds.Slow(t)
	conformance.Covers(t, "LNK-8-6", "LNK-10-8")
	start := func(t *testing.T, c *meshtest.Controller, longest time.Duration) (server, client *member, stop func() []string) {
		limit := func(cfg *linkerdproxy.Config) { cfg.MaxRefresh = longest }
		server, client = certified(t, c, web, limit), certified(t, c, voting, limit)
		at, _ := inbound(t, server, func(c *config) { c.requireIdentity = true })
		return server, client, traffic(t, outbound(t, client, endpoint{addr: at, identity: web}), fresh(t, client, endpoint{addr: at, identity: web}))
	}
	rotation := func(t *testing.T) {
		server, client, stop := start(t, meshtest.New(t, meshtest.Options{Life: 10 * time.Second}), 500*time.Millisecond)
		eventually(t, func() bool { return renewals(server) >= 3 && renewals(client) >= 3 }, "two renewals")
		require.Empty(t, stop())
	}
	outage := func(t *testing.T) {
		c := meshtest.New(t, meshtest.Options{Life: 6 * time.Second})
		server, client, stop := start(t, c, time.Hour)
		end := server.Report().Identities[0].NotAfter
		life := time.Until(end)
		time.Sleep(time.Until(end.Add(-life / 100 * 65)))
		c.Stop()
		time.Sleep(time.Until(end.Add(-life / 100 * 20)))
		require.Equal(t, 1, renewals(server))
		require.Error(t, server.Report().Identities[0].Err, "it has tried")
		c.Start(t)
		eventually(t, func() bool { return renewals(server) > 1 && renewals(client) > 1 }, "a renewal after the outage")
		require.Empty(t, stop())
	}
	together(t, map[string]func(*testing.T){"rotation": rotation, "outage": outage})
}

// Everything that keeps a proxy from renewing ends in the same way, and so does the recovery: the service is down, the token
// is gone, the account is deleted. Until the certificate expires nothing fails; then readiness and liveness do, and new
// connections in both directions; and with the cause gone all is well again, in the same process and with the same key.
func TestRecovery(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	conformance.Covers(t, "LNK-10-9", "LNK-10-10", "LNK-10-11", "LNK-10-12")
	tests := map[string]func(*testing.T){}
	for name, fault := range map[string]struct {
		begin, end func(t *testing.T, c *meshtest.Controller, cfg *linkerdproxy.Config)
	}{
		"service down": {
			func(_ *testing.T, c *meshtest.Controller, _ *linkerdproxy.Config) { c.Stop() },
			func(t *testing.T, c *meshtest.Controller, _ *linkerdproxy.Config) { c.Start(t) },
		},
		"token gone": {
			func(t *testing.T, _ *meshtest.Controller, cfg *linkerdproxy.Config) {
				require.NoError(t, os.Remove(cfg.TokenFile))
			},
			func(t *testing.T, _ *meshtest.Controller, cfg *linkerdproxy.Config) {
				require.NoError(t, os.WriteFile(cfg.TokenFile, []byte(meshtest.Token(web)), 0o600))
			},
		},
		"account deleted": {
			func(_ *testing.T, c *meshtest.Controller, _ *linkerdproxy.Config) { c.Account(meshtest.Token(web), "") },
			func(t *testing.T, c *meshtest.Controller, cfg *linkerdproxy.Config) { // made anew, with another token
				c.Account("a-new-token", "web")
				require.NoError(t, os.WriteFile(cfg.TokenFile, []byte("a-new-token"), 0o600))
			},
		},
	} {
		tests[name] = func(t *testing.T) {
			c := meshtest.New(t, meshtest.Options{Life: 3 * time.Second})
			var cfg linkerdproxy.Config
			id := certified(t, c, web, func(c *linkerdproxy.Config) { cfg = *c })
			peers := meshtest.New(t, meshtest.Options{Life: time.Hour, Authority: c.Authority}) // whose proxies stay certified
			other := certified(t, peers, voting)
			at, _ := inbound(t, id, nil)
			in := browser(t, "", false, func(ctx context.Context, _, _ string) (net.Conn, error) {
				return other.dial(ctx, endpoint{addr: at, identity: web})
			})
			in.Transport.(*http.Transport).DisableKeepAlives = true
			there, _ := inbound(t, other, nil)
			out := browser(t, fresh(t, id, endpoint{addr: there, identity: voting}), false, nil)
			works := func(c *http.Client) bool {
				resp, err := c.Get("http://app.test/")
				if err != nil {
					return false
				}
				_ = resp.Body.Close()
				return resp.StatusCode == http.StatusOK
			}
			require.True(t, works(in))
			require.True(t, works(out))
			first := must.Get(id.Credential())(t)

			fault.begin(t, c, &cfg)
			eventually(t, func() bool { return get(t, id.Handler(), "/live") == "503 expired" }, "expiry")
			assert.Equal(t, "503 not ready", get(t, id.Handler(), "/ready"))
			assert.False(t, works(in))
			assert.False(t, works(out))
			require.Error(t, id.Report().Identities[0].Err)

			fault.end(t, c, &cfg)
			eventually(t, func() bool { return get(t, id.Handler(), "/ready") == "200 ready" }, "recovery")
			assert.Equal(t, "200 live", get(t, id.Handler(), "/live"))
			assert.True(t, works(in))
			assert.True(t, works(out))
			assert.Equal(t, first.Leaf().PublicKey, must.Get(id.Credential())(t).Leaf().PublicKey)
		}
	}
	together(t, tests)
}

// The trust anchors are replaced as operators do it: all proxies get the old and the new, by a restart of one after the other;
// then the certifier signs with the new; then all proxies get the new alone. No request fails.
func TestAnchorsReplaced(t *testing.T) {
	t.Parallel()
	old := meshtest.New(t, meshtest.Options{Life: time.Hour})
	next := meshtest.New(t, meshtest.Options{Life: time.Hour})
	before, after := old.Authority.Bundle().MarshalPEM(), next.Authority.Bundle().MarshalPEM()
	both := append(before[:len(before):len(before)], after...)
	type side struct {
		name string
		addr string
		id   *member
	}
	server, client := &side{name: web}, &side{name: voting}
	restart := func(s *side, by *meshtest.Controller, anchors []byte) {
		id := certified(t, by, s.name, func(c *linkerdproxy.Config) { c.Anchors = anchors })
		s.addr, _ = inbound(t, id, nil)
		s.id = id
	}
	check := func(step string) {
		t.Helper()
		for _, pair := range [][2]*side{{client, server}, {server, client}} {
			c := browser(t, outbound(t, pair[0].id, endpoint{addr: pair[1].addr, identity: pair[1].name}), true, nil)
			status, body := ask(t, c, "http://app.test/")
			require.Equal(t, http.StatusOK, status, "%s: %s", step, body)
		}
	}
	for _, step := range []struct {
		name    string
		by      *meshtest.Controller
		anchors []byte
	}{{"before", old, before}, {"both anchors", old, both}, {"new issuer", next, both}, {"new anchors", next, after}} {
		restart(server, step.by, step.anchors)
		if client.id != nil {
			check(step.name + ", one side")
		}
		restart(client, step.by, step.anchors)
		check(step.name)
	}
}

// While the application is away, its proxy says so to clients, without its address, and to the log with all there is to know.
func TestApplicationDown(t *testing.T) {
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	id := certified(t, s, web)
	const gone = "127.0.0.1:1" // a port that was free may be taken by another test
	var log bytes.Buffer
	at, p := inbound(t, id, func(c *config) {
		c.application, c.logger = gone, slog.New(slog.NewTextHandler(&log, nil))
	})
	status, body := ask(t, browser(t, at, false, nil), "http://app.test/")
	assert.Equal(t, http.StatusBadGateway, status)
	assert.Contains(t, body, "the application does not answer")
	assert.NotContains(t, body, gone)
	assert.Contains(t, log.String(), gone)

	opaque, _ := inbound(t, id, func(c *config) { c.application, c.opaque = gone, true })
	c := must.Get(net.Dial("tcp", opaque))(t)
	defer c.Close()
	require.NoError(t, c.SetDeadline(time.Now().Add(10*time.Second)))
	must.Get(io.WriteString(c, "hello"))(t)
	_, err := c.Read(make([]byte, 1))
	require.Error(t, err)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	var metrics strings.Builder
	require.NoError(t, p.Report().Metrics(&metrics))
	assert.Contains(t, metrics.String(), `svidkit_linkerdproxy_failed_requests_total{direction="inbound"} 1`)
}

// The end of a server waits for no client that sends nothing, or half a handshake, and for no tunnel.
func TestStop(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	id := certified(t, s, web)
	app := accepts(t, func(net.Conn) { <-t.Context().Done() }) // and says nothing
	for _, opaque := range []bool{false, true} {
		p := must.Get(newProxy(config{name: id.name, identity: id.Identity, application: app, opaque: opaque}))(t)
		l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
		stop := runs(t, func(ctx context.Context) error { return p.serveInbound(ctx, l) })
		hello, clean := tlsHello(t)
		for _, first := range [][]byte{nil, hello[:20], hello, clean} {
			c := must.Get(net.Dial("tcp", l.Addr().String()))(t)
			defer c.Close()
			must.Get(c.Write(first))(t)
		}
		time.Sleep(100 * time.Millisecond)
		begun := time.Now()
		stop()
		assert.Less(t, time.Since(begun), 4*time.Second)
		require.Error(t, must.Err(net.Dial("tcp", l.Addr().String())))
	}
}

// The end of a server is that of upgraded connections, with theirs to the application.
func TestStopUpgraded(t *testing.T) {
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	id := certified(t, s, web)
	appDone := make(chan struct{})
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	go func() {
		defer close(appDone)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		if _, err := http.ReadRequest(bufio.NewReader(c)); err != nil {
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		_, _ = io.Copy(io.Discard, c)
	}()
	p := must.Get(newProxy(config{name: id.name, identity: id.Identity, application: l.Addr().String()}))(t)
	in := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	stop := runs(t, func(ctx context.Context) error { return p.serveInbound(ctx, in) })
	c, r := upgraded(t, in.Addr().String())
	stop()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(2*time.Second)))
	_, err := r.ReadByte()
	require.Error(t, err)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "the upgraded connection outlives the server")
	select {
	case <-appDone:
	case <-time.After(2 * time.Second):
		t.Fatal("the connection to the application outlives the server")
	}
}

// tlsHello returns what a client of the proxy begins with, and the same for another name.
func tlsHello(t testing.TB) (own, other []byte) {
	t.Helper()
	var hellos [2][]byte
	for i, name := range []string{web, "example.com"} {
		a, b := memconn.Pipe()
		go func() { _ = tls.Client(a, &tls.Config{ServerName: name, InsecureSkipVerify: true}).Handshake() }()
		buf := make([]byte, 8192)
		n := must.Get(b.Read(buf))(t)
		_ = b.Close()
		hellos[i] = buf[:n]
	}
	return hellos[0], hellos[1]
}

// newProxy refuses what cannot forward.
func TestNewProxyRefuses(t *testing.T) {
	t.Parallel()
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	id := uncertified(t, s, web)
	for want, cfg := range map[string]config{
		"-client-id":   {application: "127.0.0.1:1", clientID: true},
		"require TLS":  {application: "127.0.0.1:1", requireTLS: true},
		"neither":      {name: web, identity: id.Identity},
		"port":         {name: web, identity: id.Identity, application: "127.0.0.1"},
		"with -opaque": {name: web, identity: id.Identity, application: "127.0.0.1:1", opaque: true, clientID: true},
	} {
		require.ErrorContains(t, must.Err(newProxy(cfg)), want)
	}
	p := must.Get(newProxy(config{name: id.name, identity: id.Identity, application: "127.0.0.1:1"}))(t)
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	require.ErrorContains(t, p.serveOutbound(t.Context(), l), "route")
	require.ErrorIs(t, must.Err(l.Accept()), net.ErrClosed)
}

// FuzzServerName: whatever a client begins with, all of it is kept for the application, and nothing is answered.
func FuzzServerName(f *testing.F) {
	hello, _ := tlsHello(f)
	f.Add(hello)
	f.Add(hello[:len(hello)/2])
	f.Add([]byte{22, 3, 1, 0, 0})
	f.Add([]byte{22, 3, 1, 255, 255})
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 60<<10 {
			return
		}
		a, b := memconn.Pipe()
		must.Get(a.Write(data))(t)
		require.NoError(t, a.CloseWrite())
		name, all, ok := serverName(b)
		require.True(t, bytes.HasPrefix(data, all))
		if bytes.Equal(data, hello) {
			require.True(t, ok)
			require.Equal(t, web, name)
			require.Equal(t, data, all)
		}
		require.NoError(t, b.Close())
		answer, _ := io.ReadAll(a)
		require.Empty(t, answer)
	})
}
