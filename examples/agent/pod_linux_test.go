package main

import (
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// A pod as the injector writes it, with volumes of mode 0777 that root owns, starts without a
// warning: what the operator cannot change is none.
func TestHealthyStart(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	programs, root, state := programtest.Build(t, "agent", "ca"), t.TempDir(), t.TempDir()
	for _, volume := range []string{"var/run/secrets/workload-spiffe-uds", "var/run/secrets/workload-spiffe-credentials", "etc/istio/proxy", "certs", "var/lib/istio/data"} {
		path := filepath.Join(root, volume)
		require.NoError(t, os.MkdirAll(path, 0o755))
		if err := syscall.Mount("tmpfs", path, "tmpfs", 0, "size=1m,mode=0777"); err != nil {
			t.Skipf("no volume can be mounted: %v", err)
		}
		t.Cleanup(func() { _ = syscall.Unmount(path, syscall.MNT_DETACH) })
	}
	addrs := make([]string, 3)
	for i := range addrs {
		l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
		require.NoError(t, l.Close())
		addrs[i] = l.Addr().String()
	}
	caAddr, admin, debug := addrs[0], addrs[1], addrs[2]
	programtest.Start(t, filepath.Join(programs, "ca"), nil, nil, "-trust-domain", "example.org", "-state-dir", filepath.Join(state, "ca"), "-create",
		"-istio-addr", caAddr, "-linkerd-addr", "", "-bundle-addr", "", "-admin-addr", "")
	for from, to := range map[string]string{"root-cert.pem": "var/run/secrets/istio/root-cert.pem", "token-secret": "var/run/secrets/tokens/istio-token"} {
		var text []byte
		require.Eventually(t, func() (ok bool) {
			var err error
			text, err = os.ReadFile(filepath.Join(state, "ca", from))
			return err == nil
		}, time.Minute, 10*time.Millisecond)
		if from == "token-secret" {
			text = append(text, ":shop/web"...)
		}
		require.NoError(t, os.MkdirAll(filepath.Join(root, filepath.Dir(to)), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(root, to), text, 0o600))
	}

	var log output
	programtest.Start(t, filepath.Join(programs, "agent"), &log, []string{
		"PILOT_CERT_PROVIDER=istiod", "CA_ADDR=" + caAddr, "POD_NAME=web-1", "POD_NAMESPACE=shop", "INSTANCE_IP=10.0.0.1", "SERVICE_ACCOUNT=web", "HOST_IP=10.1.0.1",
		"ISTIO_CPU_LIMIT=2", "GOMEMLIMIT=1073741824", "GOMAXPROCS=2", `PROXY_CONFIG={}`, "ISTIO_META_POD_PORTS=[]", "ISTIO_META_APP_CONTAINERS=app", "ISTIO_META_CLUSTER_ID=Kubernetes",
		"ISTIO_META_NODE_NAME=node-1", "ISTIO_META_INTERCEPTION_MODE=REDIRECT", "ISTIO_META_WORKLOAD_NAME=web", "ISTIO_META_OWNER=kubernetes://apis/apps/v1/namespaces/shop/deployments/web",
		"ISTIO_META_MESH_ID=cluster.local", "TRUST_DOMAIN=example.org", "KUBERNETES_SERVICE_HOST=127.0.0.1", "KUBERNETES_SERVICE_PORT=1", "PROXY_XDS_DEBUG_VIA_AGENT_PORT=" + debug[strings.LastIndex(debug, ":")+1:],
		"OUTPUT_CERTS=certs", "SECRET_TTL=1h", "MINIMUM_DRAIN_DURATION=0s",
	}, "-root", root, "-admin", admin)
	require.Eventually(t, func() bool {
		resp, err := http.Get("http://" + admin + "/healthz/ready")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		_, err = os.Stat(filepath.Join(root, "certs/cert-chain.pem"))
		return resp.StatusCode == http.StatusOK && err == nil
	}, time.Minute, 50*time.Millisecond)
	time.Sleep(time.Second)
	for line := range strings.Lines(log.String()) {
		assert.NotContains(t, line, "level=WARN")
		assert.NotContains(t, line, "level=ERROR")
	}
}
