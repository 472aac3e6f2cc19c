package peers_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
)

// TestReadme compares the versions in README.md with the module files and scripts that name them.
func TestReadme(t *testing.T) {
	t.Parallel()
	read := func(name string) string {
		return string(must.Get(os.ReadFile(filepath.FromSlash(name)))(t))
	}
	readme := read("README.md")
	row := func(peer string) string {
		m := regexp.MustCompile(`(?m)^\| ` + regexp.QuoteMeta(peer) + ` \| real \| ([^ |]+) \|`).FindStringSubmatch(readme)
		require.NotNil(t, m, "README.md has no row of %s", peer)
		return m[1]
	}
	for peer, from := range map[string]struct{ file, module string }{
		"Kubernetes API server": {"programs/kube-apiserver/go.mod", "k8s.io/kubernetes"},
		"etcd":                  {"programs/etcd/go.mod", "go.etcd.io/etcd/server/v3"},
		"Istio CA server":       {"programs/istio/go.mod", "istio.io/istio"},
		"Istio pilot-agent":     {"programs/istio/go.mod", "istio.io/istio"},
		"step-ca":               {"programs/step-ca/go.mod", "github.com/smallstep/certificates"},
		"zts-svccert":           {"programs/athenz/go.mod", "github.com/AthenZ/athenz"},
		"nats-server":           {"programs/nats-server/go.mod", "github.com/nats-io/nats-server/v2"},
		"go-oidc":               {"go.mod", "github.com/coreos/go-oidc/v3"},
		"go-spiffe":             {"../compare/go.mod", "github.com/spiffe/go-spiffe/v2"},
		"grpc-go":               {"../compare/go.mod", "google.golang.org/grpc"},
		"connect":               {"../compare/go.mod", "connectrpc.com/connect"},
		"go-control-plane":      {"../compare/go.mod", "github.com/envoyproxy/go-control-plane"},
		"Linkerd proxy API":     {"../compare/go.mod", "github.com/linkerd/linkerd2-proxy-api"},
	} {
		m := regexp.MustCompile(`(?m)^(?:require )?\s*` + regexp.QuoteMeta(from.module) + ` v(\S+)`).FindStringSubmatch(read(from.file))
		if assert.NotNil(t, m, "%s does not require %s", from.file, from.module) {
			version := m[1]
			if _, commit, ok := strings.Cut(strings.TrimPrefix(version, "0.0.0-"), "-"); ok { // of a module without versions
				version = commit
			}
			assert.Equal(t, version, row(peer), peer)
		}
	}
	assert.Equal(t, peers.PySpiffe, row("py-spiffe"))
	assert.Equal(t, peers.OpenBaoVersion, row("OpenBao"))
	assert.Equal(t, peers.KeycloakVersion, row("Keycloak"))
	assert.Contains(t, read("../../.ci/run"), "\nenvoy_version="+row("Envoy")+"\n")
}
