package main

import (
	"fmt"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/sds/istioagent"
)

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
