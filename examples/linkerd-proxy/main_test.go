package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"flag"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/test/meshtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

var update = flag.Bool("update", false, "write the table in README.md")

func TestMain(m *testing.M) {
	rounds.Parallel(16)
	m.Run()
}

// README.md has the table of the environment.
func TestTable(t *testing.T) {
	t.Parallel()
	var table bytes.Buffer
	require.NoError(t, linkerdproxy.WriteEnviron(&table, true))
	programtest.Section(t, *update, "README.md", "<!-- environment -->\n", "<!-- /environment -->\n", "\n"+table.String()+"\n")
}

// What is wrong with the flags or the environment is told before anything listens or is written.
func TestRefuses(t *testing.T) {
	t.Parallel()
	busy := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer busy.Close()
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"-route", "x"}, "HOST:PORT=ADDRESS"},
		{[]string{"-route", "=127.0.0.1:1"}, "HOST:PORT=ADDRESS"},
		{[]string{"-route", "app.test=127.0.0.1:1="}, "HOST:PORT=ADDRESS=IDENTITY"}, // which was to be by TLS
		{[]string{"-route", "app.test:http=127.0.0.1:1"}, "HOST:PORT=ADDRESS"},
		{[]string{"-route", "app.test=127.0.0.1:1=" + web, "-route", "APP.test.:80=127.0.0.1:2"}, "another route for app.test:80"},
		{[]string{"-unknown"}, "unknown"},
		{[]string{"surplus"}, "surplus"},
		{[]string{"-admin", busy.Addr().String()}, "LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS_BLOB"},
	} {
		err := run(t.Context(), c.args, []string{"LINKERD2_PROXY_LOCAL_IDENTITY_NAME=" + web}, io.Discard, io.Discard)
		require.ErrorAs(t, err, new(program.UsageError))
		require.ErrorContains(t, err, c.want)
	}
	var out, help bytes.Buffer
	require.ErrorIs(t, run(t.Context(), []string{"-help"}, nil, &help, io.Discard), flag.ErrHelp)
	programtest.Help(t, help.String(), "")
	assert.NotContains(t, help.String(), "\nFlags:\n", "each is in a group")
	assert.Contains(t, help.String(), "LINKERD2_PROXY_IDENTITY_STORE_DIR")
	require.ErrorIs(t, run(t.Context(), []string{"-version"}, nil, &out, io.Discard), flag.ErrHelp)
	assert.Regexp(t, `^linkerd-proxy \S.*, go\S+\n$`, out.String())
}

// place is what the program of a workload has to be given.
type place struct {
	*meshtest.Controller
	token, store string
}

func newPlace(t *testing.T) *place {
	t.Helper()
	p := &place{Controller: meshtest.New(t, meshtest.Options{Life: time.Hour}), store: t.TempDir()}
	p.token = p.Config(t, web).TokenFile
	return p
}

// environ is the environment of a workload.
func (p *place) environ() []string {
	return []string{
		"LINKERD2_PROXY_LOCAL_IDENTITY_NAME=" + web,
		"LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS_BLOB=" + base64.StdEncoding.EncodeToString(p.Authority.Bundle().MarshalPEM()),
		"LINKERD2_PROXY_IDENTITY_TOKEN_FILE=" + p.token,
		"LINKERD2_PROXY_IDENTITY_STORE_DIR=" + p.store,
		"LINKERD2_PROXY_IDENTITY_ADDR=" + p.Addr,
		"LINKERD2_PROXY_IDENTITY_IDENTITY=" + certifier,
		"LINKERD2_PROXY_INBOUND_PORTS_REQUIRE_TLS=1",
	}
}

// ports has the flags for any ports.
func ports(more ...string) []string {
	return append([]string{"-app", "127.0.0.1:1", "-inbound", "127.0.0.1:0", "-outbound", "127.0.0.1:0", "-admin", "127.0.0.1:0"}, more...)
}

// A port that is taken, and a store that is missing, end the program with their reason.
func TestEnds(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	err := run(t.Context(), ports("-admin", p.listener(t)), p.environ(), io.Discard, io.Discard)
	require.ErrorContains(t, err, "-admin: listen")
	require.ErrorContains(t, err, "in use")
	require.NotErrorAs(t, err, new(program.UsageError))
	err = run(t.Context(), ports("-opaque", "-client-id"), p.environ(), io.Discard, io.Discard)
	require.ErrorContains(t, err, "-client-id is for HTTP")
	p.store = filepath.Join(t.TempDir(), "missing")
	err = run(t.Context(), ports(), p.environ(), io.Discard, io.Discard)
	require.ErrorContains(t, err, "mount a folder in memory")
	require.NoFileExists(t, p.store)
}

func (p *place) listener(t *testing.T) string {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { _ = l.Close() })
	return l.Addr().String()
}

// lines passes on each line that is written.
type lines func(string)

func (f lines) Write(p []byte) (int, error) {
	f(string(p))
	return len(p), nil
}

// The program says where it listens, and requires TLS for the ports of the environment. A signal ends it well.
func TestRunPorts(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	ctx, cancel := context.WithCancel(t.Context())
	at, done := make(chan string, 10), make(chan error, 1)
	go func() {
		done <- run(ctx, ports("-v"), p.environ(), lines(func(line string) { at <- line }), io.Discard)
	}()
	addrs := map[string]string{}
	for range 3 {
		name, addr, ok := strings.Cut(strings.TrimSpace(<-at), ": ")
		require.True(t, ok)
		addrs[name] = addr
	}
	c := must.Get(net.Dial("tcp", addrs["inbound"]))(t)
	defer c.Close()
	must.Get(io.WriteString(c, "GET / HTTP/1.1\r\nHost: app.test\r\n\r\n"))(t)
	require.NoError(t, c.SetReadDeadline(time.Now().Add(10*time.Second)))
	_, err := c.Read(make([]byte, 1))
	require.Error(t, err, "it is without TLS")
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	status, body := ask(t, browser(t, addrs["outbound"], false, nil), "http://127.0.0.1:1/")
	assert.Equal(t, 502, status)
	assert.Contains(t, body, "linkerd-proxy: outbound request not forwarded")
	eventually(t, func() bool {
		resp, err := browser(t, addrs["admin"], false, nil).Get("http://admin/ready")
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		return resp.StatusCode == 200
	}, "readiness")
	cancel()
	require.NoError(t, <-done)
}
