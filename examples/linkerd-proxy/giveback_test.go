package main

import (
	"encoding/base64"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/meshtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

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
		"LINKERD2_PROXY_IDENTITY_ADDR=" + mesh.Addr, "LINKERD2_PROXY_IDENTITY_IDENTITY=" + certifier,
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
