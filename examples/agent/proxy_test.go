package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/sds/istioagent"
)

// TestCommands has commands and flags as Istio's image has them: what the injector does not write is refused, with what there is.
func TestCommands(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"istio-iptables -p 15001":         "Istio's own image",
		"istio-clean-iptables":            "Istio's own image",
		"ztunnel":                         "a program with an image of its own",
		"version":                         "-version",
		"bootstrap":                       "the commands are proxy, wait and request",
		"proxy waypoint":                  "Istio's own image",
		"proxy ztunnel":                   "a program with an image of its own",
		"proxy gateway":                   "proxy sidecar or proxy router",
		"proxy sidecar extra":             `"extra" is not understood`,
		"proxy sidecar --templateFile=/x": "there is no flag -templateFile",
		"proxy sidecar --domain":          "flag needs an argument: -domain",
		"proxy sidecar --log_output_level=default:loud": `the level "loud" is not`,
		"wait now":                 `"now" is not understood`,
		"wait --timeoutSeconds=-1": "timeoutSeconds",
		"wait --timeoutSeconds=0 --url=http://127.0.0.1:1/ready": "not ready after 0 s",
		"request POST":                      "METHOD PATH",
		"request a b c d":                   "METHOD PATH",
		"request --debug-port=x POST drain": "debug-port",
		"request --debug-port=1 POST drain": "localhost:1/drain",
	} {
		err := run(t.Context(), strings.Fields(args), []string{"PROXY_XDS_VIA_AGENT=false"}, io.Discard, io.Discard)
		require.ErrorContains(t, err, want, args)
	}
	var help output
	require.NoError(t, ignoreHelp(run(t.Context(), []string{"wait", "-h"}, nil, &help, io.Discard)))
	assert.Contains(t, help.String(), "-timeoutSeconds seconds")
	require.NoError(t, ignoreHelp(run(t.Context(), []string{"request", "-h"}, nil, &help, io.Discard)))
	assert.Contains(t, help.String(), "Usage: agent request [flags] METHOD PATH [BODY]\n")

	var o options
	p := must.Get(newProxy([]string{
		"router", "--domain", "shop.svc.cluster.local", "--proxyLogLevel=info", "--proxyComponentLogLevel=misc:error", "--log_output_level=ads:debug,default:warn",
		"--log_as_json", "--stsPort=15463", "--outlierLogPath", "/dev/stdout",
	}, &o, io.Discard))(t)
	var log output
	cfg := istioagent.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))}
	cfg.Envoy.StatusPort = 15120
	status := must.Get(p.configure(&cfg, nil))(t)
	assert.Equal(t, []any{":15120", true, "router", "shop.svc.cluster.local", slog.LevelWarn, "info", "misc:error"},
		[]any{status, cfg.Envoy.Started, cfg.Envoy.Role, cfg.Envoy.Domain, p.level, p.logLevel, p.logLevels})
	assert.Equal(t, "json", o.LogFormat)
	assert.Contains(t, log.String(), "the flag --stsPort is not used: the agent exchanges its own token")
	assert.Contains(t, log.String(), "the flag --outlierLogPath is not used: customConfigFile")
	p = must.Get(newProxy([]string{"sidecar", "--log_output_level=none"}, &o, io.Discard))(t)
	assert.Greater(t, p.level, slog.LevelError)
	p, err := newProxy([]string{"sidecar", "--log_output_level=all:debug,default:debug,xds:error"}, &o, io.Discard)
	require.NoError(t, err)
	assert.Equal(t, slog.LevelDebug, p.level)
}

func ignoreHelp(err error) error {
	if err != nil && err.Error() == "flag: help requested" {
		return nil
	}
	return err
}

// TestHooks runs wait until a server is ready, and request with each kind of answer.
func TestHooks(t *testing.T) {
	t.Parallel()
	var asked atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.Method + " " + r.URL.Path {
		case "GET /healthz/ready":
			if asked.Add(1) < 3 {
				http.Error(w, "not yet", http.StatusServiceUnavailable)
			}
		case "POST /drain":
			body, _ := io.ReadAll(r.Body)
			fmt.Fprintf(w, "drains %s", body)
		case "GET /fails":
			http.Error(w, "out of order", http.StatusInternalServerError)
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(server.Close)
	port := server.URL[strings.LastIndex(server.URL, ":")+1:]
	require.NoError(t, run(t.Context(), []string{"wait", "--url", server.URL + "/healthz/ready", "--periodMillis=1"}, nil, io.Discard, io.Discard))
	assert.EqualValues(t, 3, asked.Load())
	asked.Store(-1 << 20)
	begun := time.Now()
	err := run(t.Context(), []string{"wait", "--url=" + server.URL + "/healthz/ready", "--periodMillis=20", "--timeoutSeconds=1"}, nil, io.Discard, io.Discard)
	require.ErrorContains(t, err, "not ready after 1 s")
	assert.InDelta(t, 5, time.Since(begun).Seconds(), 4, "a second, and what a busy machine takes")

	for args, want := range map[string]string{"POST drain": "drains ", "POST /drain now": "drains now", "GET nothing": ""} {
		var out output
		require.NoError(t, run(t.Context(), append([]string{"request", "--debug-port=" + port}, strings.Fields(args)...), nil, &out, io.Discard), args)
		assert.Equal(t, want, out.String())
	}
	require.ErrorContains(t, run(t.Context(), []string{"request", "--debug-port", port, "GET", "fails"}, nil, io.Discard, io.Discard), "500 Internal Server Error: out of order")
}

// app returns what serves the status port for an application, as the environment describes it.
func app(t *testing.T, cfg istioagent.Config, role string, environ ...string) (*proxy, error) {
	t.Helper()
	p := must.Get(newProxy([]string{role}, new(options), io.Discard))(t)
	cfg.Logger = slog.New(slog.DiscardHandler)
	_, err := p.configure(&cfg, environ)
	return p, err
}

// TestAppProbes asks for each kind of probe, at an application that is ready and at one that is not.
func TestAppProbes(t *testing.T) {
	t.Parallel()
	var ready atomic.Bool
	var host, from, headers atomic.Value
	answer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host.Store(r.Host)
		headers.Store(r.Header.Clone())
		from.Store(r.RemoteAddr + " " + r.Header.Get("X-Probe") + " " + r.URL.RawQuery)
		switch {
		case !ready.Load():
			http.Error(w, "not yet", http.StatusServiceUnavailable)
		case r.URL.Path == "/moved":
			http.Redirect(w, r, "/elsewhere", http.StatusFound)
		default:
			_, _ = io.WriteString(w, "well")
		}
	})
	plain, secure := httptest.NewServer(answer), httptest.NewTLSServer(answer)
	t.Cleanup(plain.Close)
	t.Cleanup(secure.Close)
	health := httptest.NewUnstartedServer(&grpchttp.Handler{MaxMessage: 1 << 10, Methods: map[string]grpchttp.Method{"/grpc.health.v1.Health/Check": func(_ context.Context, c *grpchttp.Call) error {
		b, err := c.ReceiveOnly()
		if err != nil {
			return err
		}
		service, n := "", 0
		if len(b) > 0 {
			_, _, tag := protowire.ConsumeTag(b)
			if service, n = protowire.ConsumeString(b[tag:]); tag < 0 || n < 0 || b[0] != 0x0a || tag+n != len(b) {
				return fmt.Errorf("%x is no request", b)
			}
		}
		status := uint64(2) // NOT_SERVING
		if ready.Load() && service != "down" {
			status = 1
		}
		if service == "unknown" {
			return fmt.Errorf("no such service")
		}
		return c.SendOnly(protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), status))
	}}})
	health.Config.Protocols = new(http.Protocols)
	health.Config.Protocols.SetUnencryptedHTTP2(true)
	health.Start()
	t.Cleanup(health.Close)
	port := func(s *httptest.Server) string { return s.URL[strings.LastIndex(s.URL, ":")+1:] }
	closed := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	require.NoError(t, closed.Close())

	probers := fmt.Sprintf(`{
		"/app-health/app/readyz": {"httpGet": {"path": "/ready?deep=1", "port": %[1]s, "scheme": "HTTP"}, "timeoutSeconds": 5},
		"/app-health/app/livez": {"httpGet": {"path": "moved", "port": %[2]s, "scheme": "HTTPS"}, "timeoutSeconds": 5},
		"/app-lifecycle/app/prestopz": {"httpGet": {"port": %[1]s}, "timeoutSeconds": 5},
		"/app-health/grpc/readyz": {"grpc": {"port": %[3]s, "service": null}, "timeoutSeconds": 5},
		"/app-health/grpc/livez": {"grpc": {"port": %[3]s, "service": "web"}, "timeoutSeconds": 5},
		"/app-health/grpc/down": {"grpc": {"port": %[3]s, "service": "down"}, "timeoutSeconds": 5},
		"/app-health/grpc/unknown": {"grpc": {"port": %[3]s, "service": "unknown"}, "timeoutSeconds": 5},
		"/app-health/tcp/readyz": {"tcpSocket": {"port": %[1]s}, "timeoutSeconds": 5},
		"/app-health/tcp/closed": {"tcpSocket": {"port": %[4]d}, "timeoutSeconds": 5}
	}`, port(plain), port(secure), port(health), closed.Addr().(*net.TCPAddr).Port)
	const v4, v6 = "INSTANCE_IP=127.0.0.1", "INSTANCE_IP=2001:db8::7"
	var cfg istioagent.Config
	cfg.Envoy.StatusPort = 15020
	p := must.Get(app(t, cfg, "sidecar", v4, "ISTIO_KUBE_APP_PROBERS="+probers))(t)
	if runtime.GOOS != "linux" { // where 127.0.0.6 is no address of the host
		p.app.dialer.LocalAddr = nil
	}
	ask := func(path, host string) (int, string) {
		r := httptest.NewRequest(http.MethodGet, path, nil)
		r.Host = host
		r.Header.Set("X-Probe", "deep")
		w := httptest.NewRecorder()
		p.app.ServeHTTP(w, r)
		return w.Code, w.Body.String()
	}
	always := map[string]int{"/app-health/tcp/readyz": 200, "/app-health/tcp/closed": 500, "/app-health/grpc/down": 500, "/app-health/grpc/unknown": 500, "/app-health/other/readyz": 400}
	for _, isReady := range []bool{false, true} {
		ready.Store(isReady)
		for path, want := range map[string]int{"/app-health/app/readyz": 503, "/app-health/app/livez": 503, "/app-lifecycle/app/prestopz": 503, "/app-health/grpc/readyz": 500, "/app-health/grpc/livez": 500} {
			if isReady {
				want = 200
			}
			code, body := ask(path, "10.244.0.7:15020")
			assert.Equal(t, want, code, "%s %s", path, body)
		}
		for path, want := range always {
			code, body := ask(path, "10.244.0.7:15020")
			assert.Equal(t, want, code, "%s %s", path, body)
		}
	}
	_, body := ask("/app-health/app/readyz", "10.244.0.7:15020")
	assert.Equal(t, "well", body)
	assert.Equal(t, "127.0.0.1:"+port(plain), host.Load(), "the host of the status port is not that of the application")
	assert.Regexp(t, `^127\.0\.0\.[16]:\d+ deep deep=1$`, from.Load())
	if runtime.GOOS == "linux" {
		assert.Contains(t, from.Load(), "127.0.0.6:", "the source that the rules of the pod's network leave alone")
	}
	ask("/app-health/app/readyz", "web.example.org")
	assert.Equal(t, "web.example.org", host.Load(), "one that the probe has is kept")

	// Who a client is cannot be said here, but the probe's own headers go with it.
	p.app.probers["/app-health/app/readyz"].HTTPGet.HTTPHeaders = []struct{ Name, Value string }{{"authorization", "Basic probe"}, {"X-Probe", "own"}, {"X-Probe", "two"}}
	r := httptest.NewRequest(http.MethodGet, "/app-health/app/readyz", nil)
	for _, name := range []string{"Authorization", "Proxy-Authorization", "X-Forwarded-Client-Cert", "l5d-client-id", "X-Envoy-Peer-Metadata", "X-Probe", "X-Other"} {
		r.Header.Set(name, "client")
	}
	w := httptest.NewRecorder()
	p.app.ServeHTTP(w, r)
	require.Equal(t, http.StatusOK, w.Code)
	got := headers.Load().(http.Header)
	got.Del("Connection") // of net/http
	assert.Equal(t, http.Header{"Authorization": {"Basic probe"}, "X-Probe": {"own", "two"}, "X-Other": {"client"}, "Accept-Encoding": {"gzip"}, "User-Agent": {"Go-http-client/1.1"}}, got)
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodConnect, http.MethodOptions} {
		w := httptest.NewRecorder()
		p.app.ServeHTTP(w, httptest.NewRequest(method, "/app-health/app/readyz", nil))
		assert.Equal(t, http.StatusMethodNotAllowed, w.Code, method)
	}

	// On loopback, and what is no JSON.
	p, err := app(t, cfg, "sidecar", v4, "ISTIO_KUBE_APP_PROBERS="+probers, "REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION=true")
	require.NoError(t, err)
	assert.Equal(t, "localhost", p.app.host)
	assert.Nil(t, p.app.dialer.LocalAddr)
	p = must.Get(app(t, cfg, "sidecar", v6, "ISTIO_KUBE_APP_PROBERS="))(t)
	assert.Equal(t, "::6", p.app.dialer.LocalAddr.(*net.TCPAddr).IP.String())
	_, err = app(t, cfg, "sidecar", v6, "ISTIO_KUBE_APP_PROBERS={")
	require.ErrorContains(t, err, "ISTIO_KUBE_APP_PROBERS: set it to JSON")
}

// TestAppMetrics adds the metrics of the Envoy and of the application to those of the agent, and leaves out what cannot be had.
func TestAppMetrics(t *testing.T) {
	t.Parallel()
	var broken atomic.Bool
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case broken.Load() && r.URL.Path != "/stats/prometheus":
			http.Error(w, "broken_metric 1", http.StatusInternalServerError)
		case r.URL.Path == "/stats/prometheus":
			_, _ = io.WriteString(w, "envoy_live 1") // without an end of the line
		default:
			fmt.Fprintf(w, "app_path{path=%q} 1\n", r.URL.Path)
		}
	}))
	t.Cleanup(server.Close)
	cfg := istioagent.Config{}
	cfg.Envoy.StatusPort, cfg.Envoy.AdminPort = 15020, server.Listener.Addr().(*net.TCPAddr).Port
	agent := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "agent_up 1") })
	port := fmt.Sprint(cfg.Envoy.AdminPort)
	for _, c := range []struct{ role, annotations, want string }{
		{"sidecar", `{"scrape":"true","path":"/m","port":"` + port + `"}`, "agent_up 1\nenvoy_live 1\napp_path{path=\"/m\"} 1\n"},
		{"sidecar", `{"scrape":"","path":"","port":"` + port + `"}`, "agent_up 1\nenvoy_live 1\napp_path{path=\"/metrics\"} 1\n"},
		{"sidecar", `{"scrape":"true","path":"/a","port":"` + port + `","targets":[{"port":"` + port + `","path":"/a"},{"port":"` + port + `","path":"b"}]}`,
			"agent_up 1\nenvoy_live 1\napp_path{path=\"/a\"} 1\n\napp_path{path=\"/b\"} 1\n"},
		{"sidecar", `{"scrape":"false","path":"/m","port":"` + port + `"}`, "agent_up 1\nenvoy_live 1"},
		{"router", `{"scrape":"true","path":"/m","port":"` + port + `"}`, "agent_up 1\nenvoy_live 1"},
		{"sidecar", ``, "agent_up 1\nenvoy_live 1"},
	} {
		for _, isBroken := range []bool{false, true} {
			broken.Store(isBroken)
			p := must.Get(app(t, cfg, c.role, "ISTIO_PROMETHEUS_ANNOTATIONS="+c.annotations))(t)
			w := httptest.NewRecorder()
			p.serveMetrics(agent).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/stats/prometheus", nil))
			want := c.want
			if isBroken {
				want = "agent_up 1\nenvoy_live 1"
			}
			assert.Equal(t, want, w.Body.String(), c.annotations)
		}
	}
	p := must.Get(app(t, cfg, "sidecar", `ISTIO_PROMETHEUS_ANNOTATIONS={"scrape":"true"}`))(t)
	assert.Contains(t, p.pages, "http://localhost:80/metrics")

	// A page that is cut off cuts the answer off, and where it leads elsewhere nothing is asked.
	asked := atomic.Int32{}
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	t.Cleanup(elsewhere.Close)
	bad := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/moved" {
			http.Redirect(w, r, elsewhere.URL, http.StatusFound)
			return
		}
		_, _ = io.WriteString(w, "app_half 1\n")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}))
	t.Cleanup(bad.Close)
	p.pages = []string{bad.URL + "/moved"}
	w := httptest.NewRecorder()
	p.serveMetrics(agent).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	assert.Equal(t, "agent_up 1", w.Body.String())
	assert.Zero(t, asked.Load())
	p.pages = []string{bad.URL + "/half"}
	assert.PanicsWithValue(t, http.ErrAbortHandler, func() {
		p.serveMetrics(agent).ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/metrics", nil))
	})
	for _, port := range []string{"15020", "015020"} {
		_, err := app(t, cfg, "sidecar", `ISTIO_PROMETHEUS_ANNOTATIONS={"scrape":"true","port":"`+port+`"}`)
		require.ErrorContains(t, err, "is that of the agent")
	}
}

// TestSlowScrape: a page of the application is neither kept nor made again for a peer that does not take it, which holds up no other.
func TestSlowScrape(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	var asked atomic.Int32
	var large atomic.Bool
	large.Store(true)
	application := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		for part := make([]byte, 1<<20); large.Load(); {
			if _, err := w.Write(part); err != nil {
				return
			}
		}
		_, _ = io.WriteString(w, "app_up 1\n")
	}))
	t.Cleanup(application.Close)
	p := must.Get(app(t, istioagent.Config{Envoy: istioagent.Envoy{StatusPort: 15020}}, "sidecar"))(t)
	p.pages = []string{application.URL}
	metrics := p.serveMetrics(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "agent_up 1") }))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.RemoteAddr = r.Header.Get("Peer") + ":1"
		metrics.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	get := func(peer string) *http.Response {
		r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL, nil))(t)
		r.Header.Set("Peer", peer)
		resp := must.Get(server.Client().Do(r))(t)
		t.Cleanup(func() { _ = resp.Body.Close() })
		return resp
	}
	slow := get("a")
	first := make([]byte, 12)
	must.Get(io.ReadFull(slow.Body, first))(t)
	assert.Equal(t, "agent_up 1\n\x00", string(first), "it comes while the application still writes")
	for range 20 {
		assert.Equal(t, http.StatusServiceUnavailable, get("a").StatusCode)
	}
	assert.EqualValues(t, 1, asked.Load())
	large.Store(false)
	resp := get("b")
	assert.Equal(t, "agent_up 1\napp_up 1\n", string(must.Get(io.ReadAll(resp.Body))(t)))
}

// TestEnvoyReady: the Envoy has to be live, and to have the control plane's configuration.
func TestEnvoyReady(t *testing.T) {
	t.Parallel()
	var live atomic.Bool
	var stats atomic.Value
	stats.Store("")
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/stats":
			_, _ = io.WriteString(w, stats.Load().(string))
		case !live.Load():
			http.Error(w, "INITIALIZING", http.StatusServiceUnavailable)
		}
	}))
	t.Cleanup(server.Close)
	cfg := istioagent.Config{Envoy: istioagent.Envoy{XDS: true}}
	cfg.Envoy.AdminPort = server.Listener.Addr().(*net.TCPAddr).Port
	p := must.Get(app(t, cfg, "sidecar"))(t)
	handler := p.serveReady(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	ask := func() (int, string) {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/healthz/ready", nil))
		return w.Code, w.Body.String()
	}
	code, text := ask()
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.Contains(t, text, "INITIALIZING")
	live.Store(true)
	for _, has := range []string{"", "cluster_manager.cds.update_success: 1\n", "cluster_manager.cds.update_success: 1\nlistener_manager.lds.update_success: 0\n"} {
		stats.Store(has)
		code, text = ask()
		assert.Equal(t, http.StatusServiceUnavailable, code)
		assert.Contains(t, text, "no configuration of the control plane")
	}
	stats.Store("cluster_manager.cds.update_success: 1\nlistener_manager.lds.update_success: 1\n")
	code, _ = ask()
	assert.Equal(t, http.StatusOK, code)
	live.Store(false)
	code, _ = ask()
	assert.Equal(t, http.StatusServiceUnavailable, code)
}

// TestEnvoyEnds: an Envoy that cannot be started or ends is the end of the agent, which says why, and one that does nothing is
// told to end when the agent has drained.
func TestEnvoyEnds(t *testing.T) {
	rounds.NotShort(t)
	if runtime.GOOS == "windows" {
		t.Skip("the stand-ins are shell scripts")
	}
	t.Parallel()
	root, _ := beside(t)
	script := func(name, text string) string {
		path := filepath.Join(root, name)
		require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o700))
		return path
	}
	start := func(ctx context.Context, log io.Writer, binary string, environ ...string) error {
		environ = append(environ, `PROXY_CONFIG={"binaryPath":"`+binary+`","statusPort":0}`, "PROXY_XDS_VIA_AGENT=false", "MINIMUM_DRAIN_DURATION=200ms", "IN_POD=yes")
		return run(ctx, []string{"-root", root, "-admin", "", "proxy", "sidecar", "--proxyLogLevel=error"}, environ, io.Discard, log)
	}
	err := start(t.Context(), io.Discard, filepath.Join(root, "nothing"))
	require.ErrorContains(t, err, "set binaryPath in PROXY_CONFIG")
	require.ErrorContains(t, start(t.Context(), io.Discard, script("fails", "exit 3")), "Envoy: exit status 3")
	require.ErrorContains(t, start(t.Context(), io.Discard, script("ends", "exit 0")), "Envoy: it has ended by itself")

	var log output
	ctx, end := context.WithCancel(t.Context())
	done := make(chan error, 1)
	arguments, ended := filepath.Join(root, "arguments"), filepath.Join(root, "ended")
	go func() {
		done <- start(ctx, &log, script("waits", "trap 'echo > "+ended+"; exit 0' TERM\necho \"$IN_POD $*\" > "+arguments+"\nwhile :; do sleep 0.05; done"))
	}()
	require.Eventually(t, func() bool {
		text, err := os.ReadFile(arguments)
		return err == nil && bytes.HasSuffix(text, []byte("\n"))
	}, time.Minute, 5*time.Millisecond)
	text := must.Get(os.ReadFile(arguments))(t)
	assert.Contains(t, string(text), "yes -c "+filepath.Join(root, "etc/istio/proxy/envoy-rev.json")+" ")
	assert.Contains(t, string(text), "--drain-time-s 45 ")
	assert.Contains(t, string(text), "--local-address-ip-version v4 ")
	assert.Contains(t, string(text), "--log-level error")
	bootstrap := must.Get(os.ReadFile(filepath.Join(root, "etc/istio/proxy/envoy-rev.json")))(t)
	assert.Contains(t, string(bootstrap), `"prometheus_stats_15090"`)
	assert.NoFileExists(t, ended)
	begun := time.Now()
	end()
	require.NoError(t, <-done)
	assert.GreaterOrEqual(t, time.Since(begun), 200*time.Millisecond, "it drains")
	assert.FileExists(t, ended)
	assert.Contains(t, log.String(), "Envoy drains")

	// Without an Envoy the same command keeps the identity.
	ctx, end = context.WithTimeout(t.Context(), time.Second)
	defer end()
	require.NoError(t, start(ctx, io.Discard, filepath.Join(root, "nothing"), "DISABLE_ENVOY=true"))
}

// TestLogAsJSON: with --log_as_json each line that the process prints is an object in JSON, also what it says where it listens, what an
// Envoy prints, and why it ends; durations have a unit.
func TestLogAsJSON(t *testing.T) {
	rounds.NotShort(t)
	if runtime.GOOS == "windows" {
		t.Skip("the stand-in is a shell script")
	}
	t.Parallel()
	self := must.Get(os.Executable())(t)
	root, _ := beside(t)
	binary := filepath.Join(root, "prints")
	require.NoError(t, os.WriteFile(binary, []byte(`#!/bin/sh
echo "[info] $*"
echo '{"time":"now","msg":"of Envoy"}'
echo 'an "error' >&2
printf 'no end of the line' >&2
exit 3
`), 0o700))
	cmd := exec.CommandContext(t.Context(), self, "-root", root, "-admin", "127.0.0.1:0", "proxy", "sidecar", "--log_as_json")
	cmd.Env = []string{asProgram + "=1", "GOCOVERDIR=" + root, "PATH=" + os.Getenv("PATH"), "PROXY_XDS_VIA_AGENT=false", "MINIMUM_DRAIN_DURATION=200ms", `PROXY_CONFIG={"binaryPath":"` + binary + `"}`}
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	require.Error(t, cmd.Run())
	assert.Equal(t, 1, cmd.ProcessState.ExitCode())
	assert.Empty(t, out.String())
	var said []string
	for line := range strings.Lines(errOut.String()) {
		var record map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &record), "%s", line)
		said = append(said, fmt.Sprint(record["msg"]))
	}
	for _, want := range []string{"status page: http://", "secrets for Envoy: unix:", `an "error`, "of Envoy", "--log-format {", "the Envoy: exit status 3", "no end of the line"} {
		assert.Contains(t, strings.Join(said, "\n"), want)
	}
}

// TestEnvoyStays kills an Envoy that is told to end and does not.
func TestEnvoyStays(t *testing.T) {
	rounds.Slow(t)
	if runtime.GOOS == "windows" {
		t.Skip("the stand-in is a shell script")
	}
	t.Parallel()
	root, _ := beside(t)
	binary, started := filepath.Join(root, "stays"), filepath.Join(root, "started")
	require.NoError(t, os.WriteFile(binary, []byte("#!/bin/sh\ntrap '' TERM\necho > "+started+"\nwhile :; do sleep 0.05; done"), 0o700))
	ctx, end := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		environ := []string{`PROXY_CONFIG={"binaryPath":"` + binary + `","statusPort":0}`, "PROXY_XDS_VIA_AGENT=false", "MINIMUM_DRAIN_DURATION=0s"}
		done <- run(ctx, []string{"-root", root, "-admin", "", "proxy", "sidecar"}, environ, io.Discard, io.Discard)
	}()
	require.Eventually(t, func() bool {
		_, err := os.Stat(started)
		return err == nil
	}, time.Minute, 5*time.Millisecond)
	begun := time.Now()
	end()
	select {
	case err := <-done:
		require.NoError(t, err)
		assert.Greater(t, time.Since(begun), 4*time.Second)
	case <-time.After(20 * time.Second):
		require.Fail(t, "it waits for ever")
	}
}
