package main

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/watchtest"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesink"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// The demo ends by itself, and the identity is renewed on the way: halfway through its four seconds.
func TestDemo(t *testing.T) {
	t.Parallel()
	rounds.Slow(t)
	var out bytes.Buffer
	require.NoError(t, start(t.Context(), options{requests: -1, interval: 400 * time.Millisecond, wait: 30 * time.Second}, &out))
	assert.Equal(t, 8, strings.Count(out.String(), "hello spiffe://example.org/ns/demo/sa/service"))
	assert.Regexp(t, regexp.MustCompile(`8 requests, [2-8] certificates, no failure`), out.String())
	assert.Regexp(t, regexp.MustCompile(`identity: \S+, until \d{4}-\d\d-\d\dT\d\d:`), out.String(), "a day, as certificates may have days")
}

// until calls then when the text was written. One goroutine writes.
type until struct {
	bytes.Buffer
	text string
	then func()
}

func (u *until) Write(b []byte) (int, error) {
	n, err := u.Buffer.Write(b)
	if strings.Contains(u.String(), u.text) {
		u.then()
	}
	return n, err
}

// With a socket it runs until it is told to stop, here beside the agent of the demo.
func TestSocket(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	require.NoError(t, withAgent(t.Context(), func(ctx context.Context, socket string) error {
		ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		out := &until{text: "request 3: hello", then: cancel}
		require.NoError(t, start(ctx, options{socket: socket, requests: -1, interval: 100 * time.Millisecond, wait: 30 * time.Second}, out))
		assert.Contains(t, out.String(), "request 3: hello")
		assert.Contains(t, out.String(), "no failure")
		assert.NotContains(t, out.String(), "an agent of our own")
		return nil
	}))
}

// With a directory of files it runs without an agent, and asks another server if it is told to.
func TestFolder(t *testing.T) { // not parallel, as it sets a variable
	ca := spiffetest.NewCA(t, "example.org")
	dir := filepath.Join(t.TempDir(), "identity")
	sink := must.Get(filesink.New(filesink.Config{Source: ca.Source("/web"), Dir: dir, Delivery: true}))(t)
	must.Get(sink.Write())(t)
	t.Setenv("SPIFFE_CREDENTIAL_FOLDER", dir)
	other := httptest.NewUnstartedServer(http.HandlerFunc(hello))
	db := ca.Source("/db")
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: db, Peers: db, Allow: spiffe.AllowMembersOf(ca.TrustDomain())}))(t)
	require.NoError(t, endpoint.ConfigureServer(other.Config))
	other.TLS = other.Config.TLSConfig
	other.StartTLS()
	defer other.Close()
	var out bytes.Buffer
	require.NoError(t, start(t.Context(), options{folder: true, url: other.URL, requests: 2, interval: 10 * time.Millisecond, wait: 30 * time.Second}, &out))
	require.Contains(t, out.String(), "request 2: hello spiffe://example.org/web")
	require.Contains(t, out.String(), "2 requests, 1 certificates, no failure")
	require.NotContains(t, out.String(), "demo")
}

// With an address for it, the service says how it is while it works.
func TestHealth(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out := &until{text: "request 2: hello"}
	asked := map[string]string{}
	out.then = func() {
		if ctx.Err() != nil {
			return
		}
		cancel()
		base := regexp.MustCompile(`http://127\.0\.0\.1:\d+/`).FindString(out.String())
		for _, path := range []string{"ready", "live", "metrics"} {
			resp, err := http.Get(base + path)
			if !assert.NoError(t, err) {
				return
			}
			body, err := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			assert.NoError(t, err)
			assert.Equal(t, http.StatusOK, resp.StatusCode, "%s: %s", path, body)
			asked[path] = string(body)
		}
	}
	require.NoError(t, start(ctx, options{healthAddr: "127.0.0.1:0", requests: 0, interval: 100 * time.Millisecond, wait: 30 * time.Second}, out))
	assert.Equal(t, "ok\n", asked["ready"])
	assert.Equal(t, "ok\n", asked["live"])
	must.Get(metricstest.Page(asked["metrics"]))(t)
	assert.Contains(t, asked["metrics"], `svidkit_ready{part="identity"} 1`)
	assert.Regexp(t, regexp.MustCompile(`handshakes_total\{part="tls",.*side="server".*\} [1-9]`), asked["metrics"])

	taken := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer taken.Close()
	err := start(t.Context(), options{healthAddr: taken.Addr().String(), interval: time.Second, wait: 30 * time.Second}, io.Discard)
	require.ErrorContains(t, err, "-health-addr")
}

// An address without a server, and a malformed one, are errors.
func TestNoAgent(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	socket := "unix://" + filepath.ToSlash(t.TempDir()) + "/none"
	err := start(t.Context(), options{socket: socket, interval: time.Second, wait: 100 * time.Millisecond}, &out)
	require.ErrorIs(t, err, spiffe.ErrNotReady)
	require.ErrorContains(t, err, socket)
	err = start(t.Context(), options{socket: "unix://run/api.sock", interval: time.Second, wait: time.Second}, &out)
	require.ErrorContains(t, err, "write unix:///run/api.sock")
	assert.Empty(t, out.String())
}

// No time between requests is no tick, and no time to wait is no identity.
func TestBadTimes(t *testing.T) {
	t.Parallel()
	for _, o := range []options{{wait: time.Second}, {interval: -1, wait: time.Second}, {interval: time.Second}} {
		o.requests, o.addr = 2, "127.0.0.1:0"
		require.ErrorContains(t, o.check(), "-interval")
	}
}

// asProgram makes this test binary be the program.
const asProgram = "SVIDKIT_EXAMPLE_SERVICE"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	rounds.Parallel(8)
	m.Run()
}

// A usage error ends the program with 2, and everything else that is wrong with 1.
func TestExitCodes(t *testing.T) {
	t.Parallel()
	self := must.Get(os.Executable())(t)
	for _, c := range []struct {
		args, out, errOut string
		code              int
	}{
		{"-h", "", "-health-addr", 0},
		{"-nonsense", "", "flag provided but not defined: -nonsense", 2},
		{"serve", "", `"serve" is not understood`, 2},
		{"-interval 0s", "", "-interval", 2},
		{"-addr nowhere", "", "-addr: address nowhere: missing port", 2},
		{"-drain -1s", "", "-drain -1s is negative", 2},
		{"-health-addr nowhere", "", "-health-addr: address nowhere: missing port", 2},
		{"-socket unix://run/api.sock", "", "write unix:///run/api.sock", 2},
		{"-socket unix:///nowhere/api.sock -wait 100ms", "", "service: ", 1},
	} {
		cmd := exec.CommandContext(t.Context(), self, strings.Fields(c.args)...)
		cmd.Env = []string{asProgram + "=1", "GOCOVERDIR=" + t.TempDir()}
		var out, errOut bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errOut
		_ = cmd.Run()
		assert.Equal(t, c.code, cmd.ProcessState.ExitCode(), "%s: %s", c.args, errOut.String())
		assert.Contains(t, out.String(), c.out)
		assert.Contains(t, errOut.String(), c.errOut)
	}
}

// TestDashboard: each metric, label and value in it is one that the parts write.
func TestDashboard(t *testing.T) {
	t.Parallel()
	watchtest.Dashboard(t, "dashboard.json", watchtest.Labels(watchtest.Written(t)))
}

// A peer has no more than its share of the requests, and gets back what has ended.
func TestFair(t *testing.T) {
	t.Parallel()
	inside, release := make(chan struct{}), make(chan struct{})
	f := &fair{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		inside <- struct{}{}
		<-release
		_, _ = io.WriteString(w, "hello")
	})}
	ask := func() int {
		w := httptest.NewRecorder()
		f.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
		return w.Code
	}
	codes := make(chan int)
	for range maxRequestsEach {
		go func() { codes <- ask() }()
		<-inside
	}
	assert.Equal(t, http.StatusServiceUnavailable, ask())
	close(release)
	for range maxRequestsEach {
		assert.Equal(t, http.StatusOK, <-codes)
	}
	go func() { <-inside }()
	assert.Equal(t, http.StatusOK, ask())
	assert.Empty(t, f.of)
}
