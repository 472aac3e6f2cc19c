package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/watchtest"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/istioagent"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// asProgram makes this test binary be the program.
const asProgram = "SVIDKIT_EXAMPLE_AGENT"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	rounds.Parallel(8)
	m.Run()
}

// TestExitCodes runs the program as a process: a usage error, in a flag or a variable, ends it with 2, and everything else
// that is wrong with 1.
func TestExitCodes(t *testing.T) {
	t.Parallel()
	self := must.Get(os.Executable())(t)
	dir := t.TempDir()
	for _, c := range []struct {
		args, environ, out, errOut string
		code                       int
	}{
		{"-version", "", "agent ", "", 0},
		{"-h", "", "Usage: agent [flags]", "", 0},
		{"-nonsense", "", "", "agent: there is no flag -nonsense; -h lists the flags\n", 2},
		{"-for x", "", "", "agent: invalid value \"x\" for flag -for: it is not a number with a unit, such as 90m or 24h, which is a day; -h lists the flags\n", 2},
		{"serve", "", "", "hyphen", 2},
		{"", "SECRET_TTL=1d", "", "SECRET_TTL", 2},
		{"-admin nowhere", "", "", "agent: -admin: address nowhere: missing port", 2},
		{"-admin 192.0.2.1:0 -root " + dir, "PROXY_XDS_VIA_AGENT=false POD_NAMESPACE=a SERVICE_ACCOUNT=b CA_ROOT_CA=SYSTEM CA_ADDR=127.0.0.1:1", "", "agent: -admin: listen", 1},
	} {
		cmd := exec.CommandContext(t.Context(), self, strings.Fields(c.args)...)
		cmd.Env = append(strings.Fields(c.environ), asProgram+"=1", "GOCOVERDIR="+dir)
		var out, errOut bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errOut
		_ = cmd.Run()
		assert.Equal(t, c.code, cmd.ProcessState.ExitCode(), "%s: %s", c.args, errOut.String())
		assert.True(t, strings.HasPrefix(out.String(), c.out), out.String())
		assert.Contains(t, errOut.String(), c.errOut)
		if c.args == "-h" {
			programtest.Help(t, out.String(), errOut.String())
			assert.NotContains(t, out.String(), "\nFlags:\n", "each is in a group")
		}
		if c.code == 2 {
			assert.Equal(t, 1, strings.Count(errOut.String(), "\n"), errOut.String())
		}
	}
}

var update = flag.Bool("update", false, "write the table in README.md again")

// TestReadme compares the table with the variables.
func TestReadme(t *testing.T) {
	t.Parallel()
	var table strings.Builder
	require.NoError(t, istioagent.WriteHelp(&table, true))
	programtest.Section(t, *update, "README.md", "<!-- environment -->\n", "<!-- end of environment -->", "\n"+table.String()+"\n")
}

// output is what the program has written.
type output = logtest.Buffer

var pageLine = regexp.MustCompile(`status page: (http://[^/]+)/`)

// address waits until the program has printed the address of its page.
func address(t *testing.T, out *output) string {
	t.Helper()
	var at string
	require.Eventually(t, func() bool {
		m := pageLine.FindStringSubmatch(out.String())
		if m != nil {
			at = m[1]
		}
		return m != nil
	}, time.Minute, 5*time.Millisecond)
	return at
}

// TestDemo runs the demonstration, with certificates that live for seconds.
func TestDemo(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out output
	done := make(chan error, 1)
	go func() { done <- demo(ctx, options{admin: "127.0.0.1:0"}, 5*time.Second, &out) }()
	at := address(t, &out)
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "web asks db") }, time.Minute, 5*time.Millisecond)
	code, page := programtest.Page(t, at+"/")
	assert.Equal(t, http.StatusOK, code)
	assert.Contains(t, page, "spiffe://demo.test/ns/demo/sa/web")
	assert.Contains(t, page, "no files in", "why the CA was chosen")
	for _, path := range []string{"/healthz/ready", "/healthz/live"} {
		code, text := programtest.Page(t, at+path)
		assert.Equal(t, http.StatusOK, code, text)
	}
	_, metrics := programtest.Page(t, at+"/metrics")
	assert.Contains(t, metrics, "istio_agent_cert_expiry_seconds")
	must.Get(metricstest.Page(metrics))(t)
	bootstrap := regexp.MustCompile(`envoy -c (\S+)`).FindStringSubmatch(out.String())
	require.NotNil(t, bootstrap)
	assert.True(t, json.Valid(must.Get(os.ReadFile(bootstrap[1]))(t)))

	require.Eventually(t, func() bool {
		return strings.Count(out.String(), "web: has") > 1 && strings.Count(out.String(), "db: has") > 1
	}, time.Minute, 20*time.Millisecond, "both are renewed")
	cancel()
	require.NoError(t, <-done, out.String())
	result := regexp.MustCompile(`(\d+) certificates rotated, (\d+) pushes by SDS, (\d+) requests with a handshake each, 0 failed`).FindStringSubmatch(out.String())
	require.NotNil(t, result, out.String())
	for i, what := range []string{"certificates", "pushes", "requests"} {
		assert.NotEqual(t, "0", result[i+1], what)
	}
	require.ErrorIs(t, must.Err(os.Stat(filepath.Dir(bootstrap[1]))), os.ErrNotExist, "nothing is left")
	require.NoError(t, run(t.Context(), strings.Fields("-demo -admin 127.0.0.1:0 -for 1s"), nil, &out, io.Discard))
	assert.Contains(t, out.String(), "ends: in 1s, or with Ctrl-C; -for sets another time\n")
}

// TestQuitDemo ends the demonstration by a request to the agent that the page is of.
func TestQuitDemo(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	var out output
	done := make(chan error, 1)
	go func() { done <- demo(t.Context(), options{admin: "127.0.0.1:0"}, 5*time.Second, &out) }()
	at := address(t, &out)
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "web asks db") }, time.Minute, 5*time.Millisecond)
	resp := must.Get(http.Post(at+"/quitquitquit", "", nil))(t)
	require.NoError(t, resp.Body.Close())
	assert.Equal(t, http.StatusOK, resp.StatusCode)
	select {
	case err := <-done:
		require.NoError(t, err, out.String())
	case <-time.After(20 * time.Second):
		require.Fail(t, "the demonstration goes on without its agent")
	}
}

// beside returns a directory with the workload socket of another program, which serves until the end of the test.
func beside(t *testing.T) (root, socket string) {
	t.Helper()
	root, err := os.MkdirTemp("", "agent") // t.TempDir is too long for a Unix socket
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	socket = filepath.Join(root, "var/run/secrets/workload-spiffe-uds/socket")
	require.NoError(t, os.MkdirAll(filepath.Dir(socket), 0o700))
	other := &unixsocket.Server{Path: socket, Handler: http.NotFoundHandler()}
	require.NoError(t, other.Listen())
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- other.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		assert.NoError(t, <-ended)
	})
	return root, socket
}

// TestQuit ends the program by a request, whose answer arrives although there is no time for draining.
func TestQuit(t *testing.T) {
	t.Parallel()
	root, _ := beside(t)
	var out, log output
	done := make(chan error, 1)
	go func() {
		done <- run(t.Context(), []string{"-root", root, "-admin", "127.0.0.1:0"}, []string{"PROXY_XDS_VIA_AGENT=false", "MINIMUM_DRAIN_DURATION=0s"}, &out, &log)
	}()
	at := address(t, &out)
	require.Eventually(t, func() bool {
		code, _ := programtest.Page(t, at+"/healthz/ready")
		return code == http.StatusOK
	}, time.Minute, 5*time.Millisecond)
	post := func(path, name, value string) int {
		r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodPost, at+path, nil))(t)
		switch name {
		case "":
		case "Host":
			r.Host = value
		default:
			r.Header.Set(name, value)
		}
		resp := must.Get(http.DefaultClient.Do(r))(t)
		defer resp.Body.Close()
		assert.NotEmpty(t, must.Get(io.ReadAll(resp.Body))(t))
		return resp.StatusCode
	}
	for _, path := range []string{"/drain", "/quitquitquit"} {
		code, _ := programtest.Page(t, at+path)
		assert.Equal(t, http.StatusMethodNotAllowed, code)
		assert.Equal(t, http.StatusMisdirectedRequest, post(path, "Host", "rebound.example"))
		assert.Equal(t, http.StatusForbidden, post(path, "Origin", "http://evil.test"))
		assert.Equal(t, http.StatusForbidden, post(path, "Sec-Fetch-Site", "cross-site"))
	}
	code, text := programtest.Page(t, at+"/healthz/ready")
	require.Equal(t, http.StatusOK, code, text)
	assert.Equal(t, http.StatusOK, post("/drain", "", ""))
	code, _ = programtest.Page(t, at+"/healthz/ready")
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.Equal(t, http.StatusOK, post("/quitquitquit", "", ""))
	require.NoError(t, <-done)
	assert.Contains(t, log.String(), "/quitquitquit")
}

// TestRun is the program beside the server of another one.
func TestRun(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	root, socket := beside(t)
	environ := []string{"PROXY_XDS_VIA_AGENT=false", "MINIMUM_DRAIN_DURATION=200ms", "ISTIO_PROMETHEUS_ANNOTATIONS={}", "OUTPUT_CERT=x", "PROXY_CONFG={}"}

	var bootstrap output
	require.NoError(t, run(t.Context(), []string{"-root", root, "-bootstrap"}, environ, &bootstrap, io.Discard))
	assert.True(t, json.Valid([]byte(bootstrap.String())))
	assert.Contains(t, bootstrap.String(), socket)

	inner, end := context.WithCancel(t.Context())
	defer end()
	var out, log output
	done := make(chan error, 1)
	go func() {
		done <- run(inner, []string{"-root", root, "-admin", "127.0.0.1:0", "-log-format", "json"}, environ, &out, &log)
	}()
	at := address(t, &out)
	require.Eventually(t, func() bool {
		code, _ := programtest.Page(t, at+"/healthz/ready")
		return code == http.StatusOK
	}, time.Minute, 5*time.Millisecond)
	_, page := programtest.Page(t, at+"/")
	assert.Contains(t, page, "a server answers")
	for _, path := range []string{"/", "/metrics", "/healthz/ready"} {
		r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodGet, at+path, nil))(t)
		r.Host = "rebound.example"
		resp := must.Get(http.DefaultClient.Do(r))(t)
		require.NoError(t, resp.Body.Close())
		assert.Equal(t, http.StatusMisdirectedRequest, resp.StatusCode, path)
	}
	end()
	require.Eventually(t, func() bool {
		code, text := programtest.Page(t, at+"/healthz/ready")
		return code == http.StatusServiceUnavailable && strings.Contains(text, "draining or ending")
	}, time.Minute, time.Millisecond, "it drains")
	require.NoError(t, <-done)
	for line := range strings.Lines(log.String()) {
		assert.True(t, json.Valid([]byte(line)), line)
	}
	for _, text := range []string{"OUTPUT_CERTS has no effect", "perhaps PROXY_CONFIG", "a server answers"} {
		assert.Contains(t, log.String(), text)
	}
	require.Error(t, must.Err(net.DialTimeout("tcp", strings.TrimPrefix(at, "http://"), time.Second)), "the port is closed")
}

// TestAllowFiles has a pair of files elsewhere, which Envoy gets with the flag and not without.
func TestAllowFiles(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	root := must.Get(os.MkdirTemp("", "agent"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	ca := spiffetest.NewCA(t, "example.org")
	certs, key := must.Get2(ca.SVID("/ns/shop/sa/web").MarshalPEM())(t)
	for _, dir := range []string{"etc/certs", "elsewhere"} {
		require.NoError(t, os.MkdirAll(filepath.Join(root, dir), 0o700))
		for name, data := range map[string][]byte{"cert-chain.pem": certs, "key.pem": key, "root-cert.pem": ca.Bundle().MarshalPEM()} {
			require.NoError(t, os.WriteFile(filepath.Join(root, dir, name), data, 0o600))
		}
	}
	name := "file-cert:" + filepath.Join(root, "elsewhere/cert-chain.pem") + "~" + filepath.Join(root, "elsewhere/key.pem")
	for _, flags := range [][]string{nil, {"-allow-files", "nowhere", "-allow-files", "elsewhere"}} {
		ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
		done := make(chan error, 1)
		var log output
		go func() {
			done <- run(ctx, append([]string{"-root", root, "-admin", ""}, flags...), []string{"PROXY_XDS_VIA_AGENT=false", "MINIMUM_DRAIN_DURATION=0s"}, io.Discard, &log)
		}()
		socket := filepath.Join(root, "var/run/secrets/workload-spiffe-uds/socket")
		require.Eventually(t, func() bool {
			_, err := os.Stat(socket)
			return err == nil
		}, time.Minute, time.Millisecond)
		client := sds.UnixClient(socket)
		var got string
		for s, err := range sds.NewClient(client, "http://localhost").Watch(ctx, "default", name) {
			if err == nil && s.Name() == name {
				got = name
			}
			if err == nil && (got == name || flags == nil && strings.Contains(log.String(), "elsewhere")) {
				break
			}
		}
		assert.Equal(t, flags != nil, got == name, log.String())
		stop()
		for ended := false; !ended; {
			client.CloseIdleConnections() // so that the server does not wait for them
			select {
			case err := <-done:
				require.NoError(t, err)
				ended = true
			case <-time.After(5 * time.Millisecond):
			}
		}
	}
}

func TestBadFlags(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args    string
		environ string
		want    string
	}{
		{"-log-format xml", "", "text or json"},
		{"-for -1s", "", "-for"},
		{"serve", "", "hyphen"},
		{"-allow-files=", "", "allow-files"},
		{"-allow-files / -for 1s", "PROXY_XDS_VIA_AGENT=false POD_NAMESPACE=a SERVICE_ACCOUNT=b CA_ROOT_CA=SYSTEM CA_ADDR=127.0.0.1:1", "root of the file system"},
		{"", "SECRET_TTL=1d", "SECRET_TTL"},
		{"", "PROXY_XDS_VIA_AGENT=false", "POD_NAMESPACE"},
		{"-admin nowhere -for 1s", "PROXY_XDS_VIA_AGENT=false POD_NAMESPACE=a SERVICE_ACCOUNT=b CA_ROOT_CA=SYSTEM CA_ADDR=127.0.0.1:1", "-admin"},
	} {
		args := append([]string{"-root", t.TempDir()}, strings.Fields(c.args)...)
		err := run(t.Context(), args, strings.Fields(c.environ), io.Discard, io.Discard)
		require.ErrorContains(t, err, c.want, "%s %s", c.args, c.environ)
	}
	var help output
	require.ErrorIs(t, run(t.Context(), []string{"-h"}, nil, &help, io.Discard), flag.ErrHelp)
	assert.Contains(t, help.String(), "-bootstrap")
	assert.Contains(t, help.String(), "CA_ADDR")
}

// TestDashboard: each metric, label and value in it is one that the parts write.
func TestDashboard(t *testing.T) {
	t.Parallel()
	watchtest.Dashboard(t, "dashboard.json", watchtest.Labels(watchtest.Written(t)))
}

// A sidecar turns away those that come in, and what the application sends out goes on; a gateway has nothing but those that come in, by all its
// listeners. Neither ends the Envoy at once.
func TestDrainByRole(t *testing.T) {
	t.Parallel()
	for role, want := range map[string]url.Values{
		"sidecar": {"inboundonly": {""}, "graceful": {""}, "skip_exit": {""}},
		"router":  {"graceful": {""}, "skip_exit": {""}},
	} {
		asked := make(chan *http.Request, 2)
		server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { asked <- r }))
		t.Cleanup(server.Close)
		var cfg istioagent.Config
		cfg.Envoy.AdminPort = server.Listener.Addr().(*net.TCPAddr).Port
		p := must.Get(app(t, cfg, role))(t)
		p.drain(t.Context())
		require.Len(t, asked, 1, role)
		r := <-asked
		assert.Equal(t, http.MethodPost, r.Method, role)
		assert.Equal(t, "/drain_listeners", r.URL.Path, role)
		assert.Equal(t, want, r.URL.Query(), role)
	}
}

// A probe that says no time has that of the kubelet, a second, and none has more than a minute; each redirect is a good answer, whatever its kind.
func TestProbeDefaults(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		code, err := strconv.Atoi(strings.TrimPrefix(r.URL.Path, "/"))
		if assert.NoError(t, err) {
			w.Header().Set("Location", "/elsewhere")
			w.WriteHeader(code)
		}
	}))
	t.Cleanup(server.Close)
	port := server.Listener.Addr().(*net.TCPAddr).Port
	want := map[string]int{"200": 200, "204": 204, "301": 200, "302": 200, "303": 200, "307": 200, "308": 200, "400": 400, "404": 404, "500": 500, "503": 503}
	var probers []string
	for code := range want {
		probers = append(probers, fmt.Sprintf(`"/app-health/a%[1]s/readyz": {"httpGet": {"path": "/%[1]s", "port": %[2]d}}`, code, port))
	}
	times := map[int64]time.Duration{-1: time.Second, 0: time.Second, 1: time.Second, 60: time.Minute, 61: time.Minute, 3600: time.Minute, math.MaxInt64: time.Minute}
	for seconds := range times {
		probers = append(probers, fmt.Sprintf(`"/app-health/tcp%d/readyz": {"tcpSocket": {"port": %d}, "timeoutSeconds": %[1]d}`, seconds, port))
	}
	p, err := app(t, istioagent.Config{}, "sidecar", "INSTANCE_IP=127.0.0.1", "ISTIO_KUBE_APP_PROBERS={"+strings.Join(probers, ",")+"}")
	require.NoError(t, err)
	if runtime.GOOS != "linux" { // where 127.0.0.6 is no address of the host
		p.app.dialer.LocalAddr = nil
	}
	ask := func(name string) int {
		w := httptest.NewRecorder()
		p.app.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/app-health/"+name+"/readyz", nil))
		return w.Code
	}
	for code, is := range want {
		assert.Equal(t, is, ask("a"+code), code)
	}
	for seconds, want := range times {
		name := fmt.Sprint("tcp", seconds)
		assert.Equal(t, http.StatusOK, ask(name), name)
		assert.Equal(t, want, p.app.probers["/app-health/"+name+"/readyz"].timeout(), name)
	}
}
