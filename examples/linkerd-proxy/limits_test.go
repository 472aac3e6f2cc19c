package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/meshtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// A tunnel ends when nothing has come for an hour in either direction, and not before.
func TestIdleTunnel(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		client, c := net.Pipe()
		app, a := net.Pipe()
		ended := make(chan struct{})
		go func() {
			relay(t.Context(), c, a)
			close(ended)
		}()
		begin := time.Now()
		for range 5 {
			time.Sleep(50 * time.Minute)
			must.Get(app.Write([]byte("x")))(t)
			must.Get(client.Read(make([]byte, 1)))(t)
		}
		<-ended
		assert.Equal(t, 5*50*time.Minute+time.Hour, time.Since(begin))
		require.Error(t, must.Err(client.Read(make([]byte, 1))))
	})
	synctest.Test(t, func(t *testing.T) { // without a byte from the first on
		_, c := net.Pipe()
		_, a := net.Pipe()
		begin := time.Now()
		relay(t.Context(), c, a)
		assert.Equal(t, time.Hour, time.Since(begin))
	})
}

// So does an upgraded connection, such as a WebSocket, which net/http forwards.
func TestIdleUpgrade(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		app, a := memconn.Pipe()
		ctx := context.WithValue(t.Context(), targetKey{}, target{})
		resp := &http.Response{StatusCode: http.StatusSwitchingProtocols, Header: http.Header{}, Body: a, Request: new(http.Request).WithContext(ctx)}
		require.NoError(t, answered(resp))
		c := resp.Body.(io.ReadWriteCloser)
		begin := time.Now()
		for range 3 { // traffic of either direction
			time.Sleep(50 * time.Minute)
			must.Get(c.Write([]byte("x")))(t)
			time.Sleep(50 * time.Minute)
			must.Get(app.Write([]byte("x")))(t)
			must.Get(c.Read(make([]byte, 1)))(t)
		}
		require.Error(t, must.Err(c.Read(make([]byte, 1))))
		assert.Equal(t, 6*50*time.Minute+time.Hour, time.Since(begin))
	})
}

// A client that does not take its answer does not keep its connection.
func TestStalledAnswer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		failed := make(chan time.Duration, 1)
		dial := served(t, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/slow" {
				_, _ = io.WriteString(w, "begun")
				_ = http.NewResponseController(w).Flush()
				time.Sleep(time.Hour)
				return
			}
			begin := time.Now()
			for {
				if _, err := w.Write(make([]byte, 32<<10)); err != nil {
					failed <- time.Since(begin)
					return
				}
			}
		})
		c := dial()
		r := bufio.NewReader(c)
		for range 2 {
			must.Get(io.WriteString(c, "GET /slow HTTP/1.1\r\nHost: app.test\r\n\r\n"))(t)
			resp := must.Get(http.ReadResponse(r, nil))(t)
			require.Equal(t, "begun", string(must.Get(io.ReadAll(resp.Body))(t)))
		}
		must.Get(io.WriteString(c, "GET / HTTP/1.1\r\nHost: app.test\r\n\r\n"))(t)
		select {
		case took := <-failed:
			assert.Equal(t, idleTimeout, took)
		case <-time.After(24 * time.Hour):
			t.Error("the answer is still being sent")
			_ = c.Close()
		}
	})
}

// A client that stops in the middle of a body does not keep its connection, also while the body is forwarded, and by HTTP/2 not
// that to the application, if its proxy has made HTTP/2 of the request. Another stream of HTTP/2 may be silent.
func TestStalledBody(t *testing.T) {
	t.Parallel()
	for orig, want := range map[string]time.Duration{"": 24 * time.Hour, "HTTP/1.1": 50 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			ended := make(chan struct{})
			dial := served(t, func(_ http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				close(ended)
			})
			c := browser(t, "", true, func(context.Context, string, string) (net.Conn, error) { return dial(), nil })
			c.Timeout = 0
			body, w := io.Pipe()
			ctx, cancel := context.WithCancel(t.Context())
			req := must.Get(http.NewRequestWithContext(ctx, http.MethodPost, "http://app.test/", body))(t)
			if orig != "" {
				req.Header.Set("l5d-orig-proto", orig)
			}
			begin := time.Now()
			go func() {
				if resp, err := c.Do(req); err == nil {
					_ = resp.Body.Close()
				}
			}()
			_, _ = io.WriteString(w, "123")
			time.Sleep(20 * time.Second) // a slow one is not cut
			_, _ = io.WriteString(w, "4")
			select {
			case <-ended:
			case <-time.After(24*time.Hour - 20*time.Second):
			}
			assert.Equal(t, want, time.Since(begin), orig)
			_ = w.Close()
			cancel()
			c.CloseIdleConnections()
		})
	}
	for _, line := range []string{"POST / HTTP/1.1", "PRI * HTTP/2.0"} { // net/http takes the second for a request of HTTP/2, with a body
		synctest.Test(t, func(t *testing.T) {
			c := served(t, func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) })()
			begin := time.Now()
			must.Get(io.WriteString(c, line+"\r\nHost: app.test\r\nContent-Length: 10\r\n\r\n123"))(t)
			time.Sleep(20 * time.Second)
			must.Get(io.WriteString(c, "4"))(t)
			defer time.AfterFunc(time.Hour, func() { _ = c.Close() }).Stop() // or it would never end
			_, _ = io.Copy(io.Discard, c)
			assert.InDelta(t, 50, time.Since(begin).Seconds(), 11, line)
		})
	}
}

// served runs a server of a proxy with a handler, in the memory of a bubble. It returns a function that connects.
func served(t *testing.T, h http.HandlerFunc) (dial func() net.Conn) {
	t.Helper()
	id, err := linkerdproxy.New(meshtest.New(t, meshtest.Options{Life: time.Hour, Stopped: true}).Config(t, web))
	require.NoError(t, err)
	p, err := newProxy(config{name: web, identity: id, route: func(context.Context, string) (endpoint, error) { return endpoint{}, nil }})
	require.NoError(t, err)
	l := memconn.Listen()
	runs(t, func(ctx context.Context) error {
		ready := &queue{Listener: l, conns: make(chan net.Conn)}
		return p.serve(ctx, l, ready, func(*connections) http.Handler { return h }, func(_ context.Context, c net.Conn) { ready.put(c) })
	})
	return func() net.Conn {
		c := must.Get(l.DialContext(t.Context(), "tcp", ""))(t)
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
}

// What is opened for a client is the client's: one connection by HTTP/2 that leads to hundreds by HTTP/1, and tunnels, leave
// descriptors for the program itself, whose renewals go on. Of 512 a quarter is kept, and a client has two thirds of the others.
func TestOpenedForClient(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	program := filepath.Join(programtest.Build(t, "linkerd-proxy"), "linkerd-proxy")
	together(t, map[string]func(*testing.T){
		"requests": func(t *testing.T) {
			openedFor(t, program, 2*384/3, nil, func(ctx context.Context, at string) {
				b := browser(t, at, true, nil)
				for range 900 {
					go func() {
						req, _ := http.NewRequestWithContext(ctx, http.MethodGet, "http://app.test/", nil)
						req.Header.Set("l5d-orig-proto", "HTTP/1.1")
						if resp, err := b.Do(req); err == nil {
							_ = resp.Body.Close()
						}
					}()
				}
			})
		},
		"tunnels": func(t *testing.T) {
			openedFor(t, program, 384/3+1, []string{"-opaque"}, func(ctx context.Context, at string) {
				for range 600 {
					if c, err := net.Dial("tcp", at); err == nil {
						_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: app.test\r\n\r\n")
						context.AfterFunc(ctx, func() { _ = c.Close() })
					}
				}
			})
		},
	})
}

// openedFor attacks a proxy with 512 descriptors, and requires that at most so many connections to its application are open then.
func openedFor(t *testing.T, program string, most int64, args []string, attack func(ctx context.Context, at string)) {
	t.Helper()
	const life = 4 * time.Second
	mesh := meshtest.New(t, meshtest.Options{Life: life})
	var open atomic.Int64
	app := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	app.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		switch state {
		case http.StateNew:
			open.Add(1)
		case http.StateClosed:
			open.Add(-1)
		}
	}
	app.Start()
	defer app.Close()
	at := small(t, program, mesh, app.Listener.Addr().String(), args...)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	attack(ctx, at)
	eventually(t, func() bool { return open.Load() > most/2 }, "a share for the client")
	time.Sleep(life)
	before := len(mesh.Seen())
	time.Sleep(2 * life)
	assert.GreaterOrEqual(t, len(mesh.Seen())-before, 2, "renewals in two lives")
	assert.LessOrEqual(t, open.Load(), most)
}

// What was opened for a client is given back when it is closed: one that comes again and again, as often as would use up its share three times, is
// served each time, by requests and by tunnels.
func TestGivenBack(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	program := filepath.Join(programtest.Build(t, "linkerd-proxy"), "linkerd-proxy")
	mesh := meshtest.New(t, meshtest.Options{Life: time.Minute})
	well := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Connection", "close")
		_, _ = io.WriteString(w, "well")
	})
	app := httptest.NewServer(well)
	t.Cleanup(app.Close)
	together(t, map[string]func(*testing.T){
		"requests": func(t *testing.T) { comesAgain(t, small(t, program, mesh, app.Listener.Addr().String()), 1000, "200") },
		"tunnels": func(t *testing.T) {
			comesAgain(t, small(t, program, mesh, app.Listener.Addr().String(), "-opaque"), 1000, "200")
		},
		"dials that fail": func(t *testing.T) {
			late := httptest.NewUnstartedServer(well)
			at := late.Listener.Addr().String()
			require.NoError(t, late.Listener.Close())
			proxy := small(t, program, mesh, at)
			comesAgain(t, proxy, 1000, "502")
			var err error
			late.Listener, err = net.Listen("tcp", at)
			require.NoError(t, err)
			late.Start()
			t.Cleanup(late.Close)
			comesAgain(t, proxy, 1, "200")
		},
	})
}

// small returns the address of a proxy with 512 descriptors.
func small(t *testing.T, program string, mesh *meshtest.Controller, app string, args ...string) (at string) {
	t.Helper()
	return programtest.Start(t, "/bin/sh", nil, []string{
		"LINKERD2_PROXY_LOCAL_IDENTITY_NAME=" + web, "LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS_BLOB=" + base64.StdEncoding.EncodeToString(mesh.Authority.Bundle().MarshalPEM()),
		"LINKERD2_PROXY_IDENTITY_TOKEN_FILE=" + mesh.Config(t, web).TokenFile, "LINKERD2_PROXY_IDENTITY_STORE_DIR=" + t.TempDir(),
		"LINKERD2_PROXY_IDENTITY_ADDR=" + mesh.Addr, "LINKERD2_PROXY_IDENTITY_IDENTITY=" + certifier, "LINKERD2_PROXY_IDENTITY_MIN_REFRESH=1s",
	}, append([]string{"-c", `ulimit -n 512 && exec "$0" "$@"`, program, "-app", app, "-inbound", "127.0.0.1:0", "-outbound", "", "-admin", "127.0.0.1:0"}, args...)...).Addr("inbound")
}

// comesAgain asks a proxy so often, one after another.
func comesAgain(t *testing.T, at string, times int, status string) {
	t.Helper()
	for i := range times {
		c := must.Get(net.Dial("tcp", at))(t)
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		must.Get(io.WriteString(c, "GET / HTTP/1.1\r\nHost: app.test\r\nConnection: close\r\n\r\n"))(t)
		answer := must.Get(io.ReadAll(c))(t, "%d", i)
		require.Regexp(t, `^HTTP/1.1 `+status+` (?s:.*)(well|the application does not answer)`, string(answer), "%d", i)
		require.NoError(t, c.Close())
	}
}

// An application that answers HTTP/2 with HTTP/1 is not asked by HTTP/2 again for a second, and by HTTP/1 all the time.
func TestApplicationOfHTTP1(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	var opened atomic.Int64
	app := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	app.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			opened.Add(1)
		}
	}
	app.Start()
	t.Cleanup(app.Close)
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	at, _ := inbound(t, certified(t, s, web), func(c *config) { c.application = app.Listener.Addr().String() })
	ask := func(http2 bool) int {
		resp := must.Get(browser(t, at, http2, nil).Get("http://app.test/"))(t)
		require.NoError(t, resp.Body.Close())
		return resp.StatusCode
	}
	assert.Equal(t, http.StatusBadGateway, ask(true))
	first := opened.Load()
	assert.Positive(t, first)
	for begun := time.Now(); time.Since(begun) < time.Duration(rounds.Of(125))*time.Millisecond; {
		assert.Equal(t, http.StatusBadGateway, ask(true))
	}
	assert.LessOrEqual(t, opened.Load(), first+1, "a machine that stands still for a second has another one")
	assert.Equal(t, http.StatusOK, ask(false))
	time.Sleep(1100 * time.Millisecond)
	before := opened.Load()
	assert.Equal(t, http.StatusBadGateway, ask(true))
	assert.Greater(t, opened.Load(), before, "it is asked again")
}

// A request counts until it is answered, one with a body twice, and an address has two thirds of what there is.
func TestUnderWay(t *testing.T) {
	t.Parallel()
	u := new(underWay)
	serve := func(from, body string, during func()) int {
		r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body))
		r.RemoteAddr = from + ":1"
		w := httptest.NewRecorder()
		u.within(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { during() })).ServeHTTP(w, r)
		return w.Code
	}
	nothing := func() {}
	serve("192.0.2.1", "", func() {
		assert.Equal(t, 1, u.all)
		serve("192.0.2.1", "x", func() { assert.Equal(t, 3, u.all) })
		assert.Equal(t, 1, u.all)
	})
	assert.Zero(t, u.all)

	most := maxRequests * 2 / 3
	assert.True(t, u.take("192.0.2.1", most-1))
	assert.Equal(t, http.StatusServiceUnavailable, serve("192.0.2.1", "x", nothing))
	assert.Equal(t, http.StatusOK, serve("192.0.2.1", "", nothing))
	assert.Equal(t, http.StatusOK, serve("192.0.2.2", "x", nothing))
	assert.True(t, u.take("192.0.2.2", maxRequests-most))
	assert.Equal(t, http.StatusOK, serve("192.0.2.2", "", nothing))
	assert.Equal(t, http.StatusServiceUnavailable, serve("192.0.2.2", "x", nothing), "in total")
	u.take("192.0.2.1", 1-most)
	u.take("192.0.2.2", most-maxRequests)
	assert.Zero(t, u.all)
	assert.Empty(t, u.of)
}

// TestRestOfBody: what an application leaves of a body, as it has answered before, is taken for no further request: the connection
// ends. A client's proxy sends the requests of others on it, too.
func TestRestOfBody(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	var hidden atomic.Int64
	app := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/hidden" {
			hidden.Add(1)
		}
		w.Header().Set("Connection", "close")
		w.WriteHeader(http.StatusRequestEntityTooLarge)
	}))
	t.Cleanup(app.Close)
	s := meshtest.New(t, meshtest.Options{Life: time.Hour})
	at, _ := inbound(t, certified(t, s, web), func(c *config) { c.application = app.Listener.Addr().String() })
	begin, rest := strings.Repeat("x", 8<<10), strings.Repeat("GET /hidden HTTP/1.1\r\nHost: app.test\r\n\r\n", 20_000)
	for header, sent := range map[string][2]string{
		fmt.Sprint("Content-Length: ", len(begin)+len(rest)): {begin, rest},
		"Transfer-Encoding: chunked":                         {fmt.Sprintf("%x\r\n%s\r\n", len(begin), begin), fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", len(rest), rest)},
	} {
		c := must.Get(net.Dial("tcp", at))(t)
		require.NoError(t, c.SetDeadline(time.Now().Add(20*time.Second)))
		must.Get(io.WriteString(c, "POST / HTTP/1.1\r\nHost: app.test\r\n"+header+"\r\n\r\n"+sent[0]))(t)
		go func() { _, _ = io.WriteString(c, sent[1]) }() // net/http may wait for more of it before it answers
		r := bufio.NewReader(c)
		answer := must.Get(http.ReadResponse(r, nil))(t)
		require.NoError(t, answer.Body.Close())
		assert.Equal(t, http.StatusRequestEntityTooLarge, answer.StatusCode, header)
		require.NoError(t, c.SetReadDeadline(time.Now().Add(time.Second))) // it stays open if all of the body was read in time
		require.Error(t, must.Err(r.ReadByte()), header)
		_ = c.Close()
	}
	assert.Zero(t, hidden.Load())
}
