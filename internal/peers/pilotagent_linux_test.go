package peers_test

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// agent is Istio's agent in a folder of its own, as in a pod.
type agent struct {
	*peers.Process
	dir string
	ca  net.Listener // where it calls the CA
}

// startAgent starts Istio's agent with a token. Its Envoy is a program that does nothing.
func startAgent(t *testing.T, dir, token string, roots []byte) *agent {
	t.Helper()
	peers.Program(t, "pilot-agent")
	podFolder(t, dir, token, roots)
	return startPilotAgent(t, dir, podEnvironment(t, dir, "SECRET_TTL=4s"))
}

// podFolder puts into a folder what the files of a pod are to Istio's agent.
func podFolder(t *testing.T, dir, token string, roots []byte) {
	t.Helper()
	for name, data := range map[string]string{
		"var/run/secrets/tokens/istio-token":   token,
		"var/run/secrets/istio/root-cert.pem":  string(roots),
		"var/run/secrets/workload-spiffe-uds/": "",
		"etc/istio/proxy/":                     "",
		"certs/":                               "",
		"envoy":                                "#!/bin/sh\nexec sleep 60\n",
	} {
		write(t, filepath.Join(dir, name)+strings.Repeat("/", strings.Count(name[len(name)-1:], "/")), data)
	}
}

// podEnvironment is the environment of Istio's agent in a folder that podFolder has filled, with more variables.
func podEnvironment(t *testing.T, dir string, more ...string) []string {
	t.Helper()
	module := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "istio.io/istio")
	module.Dir = filepath.Join("programs", "istio")
	module.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=mod")
	source := must.Get(module.Output())(t)
	metadata := map[string]string{} // which the injector makes variables of, too
	for _, e := range more {
		if name, value, _ := strings.Cut(e, "="); strings.HasPrefix(name, "ISTIO_META_") {
			metadata[name] = value
		}
	}
	config, err := json.Marshal(map[string]any{
		"proxyMetadata": metadata,
		"binaryPath":    filepath.Join(dir, "envoy"), "configPath": filepath.Join(dir, "etc/istio/proxy"), "discoveryAddress": "127.0.0.1:15012", "terminationDrainDuration": "1s",
		"proxyBootstrapTemplatePath": filepath.Join(strings.TrimSpace(string(source)), "tools/packaging/common/envoy_bootstrap.json"),
	})
	require.NoError(t, err)
	return append([]string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "CA_ADDR=127.0.0.1:15012", "TRUST_DOMAIN=" + domain.String(), "POD_NAMESPACE=prod", "SERVICE_ACCOUNT=web",
		"POD_NAME=web-1", "INSTANCE_IP=127.0.0.1", "OUTPUT_CERTS=" + filepath.Join(dir, "certs"), "SECRET_GRACE_PERIOD_RATIO=0.5",
		"ISTIO_META_CLUSTER_ID=Kubernetes", "JWT_POLICY=third-party-jwt", "PILOT_CERT_PROVIDER=istiod", "TOKEN_AUDIENCES=istio-ca", "PROXY_CONFIG=" + string(config),
	}, more...)
}

// startPilotAgent starts Istio's agent with an environment.
func startPilotAgent(t *testing.T, dir string, environment []string) *agent {
	t.Helper()
	cmd := exec.Command(peers.Program(t, "pilot-agent"), "proxy", "sidecar", "--domain", "prod.svc.cluster.local", "--proxyLogLevel=warning")
	cmd.Dir, cmd.Env = dir, environment
	a := &agent{dir: dir}
	a.Process, a.ca = peers.StartIsolated(t, filepath.Join(dir, "log"), cmd, 15012)
	return a
}

// TestPilotAgent runs Istio's agent against our CA, which asks a real API server about its token, and beside our SDS
// socket.
func TestPilotAgent(t *testing.T) {
	t.Parallel()
	peers.Program(t, "pilot-agent")
	c := peers.NewCluster(t)
	c.Account(t, "istio-system", "ca")
	grant(t, c, "istio-system", "ca", "ClusterRole", documented(t, "authn/kube"))
	c.Account(t, "prod", "web")
	c.Pod(t, "prod", "web", "web-1", "node-a")
	token := c.Token(t, "prod", "web", "web-1", "istio-ca")

	authority := must.Get(ca.New(ca.Config{TrustDomain: domain}))(t)
	var roots []byte
	for root := range authority.Bundle().X509Authorities() {
		roots = append(roots, pki.MarshalCertificatesPEM(root)...)
	}
	reviewer, err := kube.NewReviewer(&kube.ReviewerOptions{APIServer: c.URL, HTTPClient: c.ClientOf(t, "istio-system", "ca")})
	require.NoError(t, err)
	tokens, err := kube.TokenReview(kube.TokenReviewOptions{Reviewer: reviewer, TrustDomain: domain, Cluster: "Kubernetes"})
	require.NoError(t, err)

	// serve serves our CA where the agent calls it, and counts the calls.
	serve := func(t *testing.T, l net.Listener) *atomic.Int64 {
		var calls atomic.Int64
		server, err := caserver.New(caserver.Options{
			CA: authority, TrustDomain: domain,
			Identity: caservertest.Identity(t, authority, spiffe.MustParseID("spiffe://example.org/ns/istio-system/sa/ca"), pki.IPSAN(net.IPv4(127, 0, 0, 1))),
			Istio: &istioca.Options{Authenticator: authn.Func(func(r *http.Request) (*authn.Caller, error) {
				calls.Add(1)
				return tokens.Authenticate(r)
			})},
		})
		require.NoError(t, err)
		background(t, func(ctx context.Context) { _ = server.Run(ctx, caserver.Listeners{Istio: l}) })
		return &calls
	}

	t.Run("our CA", func(t *testing.T) {
		t.Parallel()
		a := startAgent(t, shortDir(t), token, roots)
		calls := serve(t, a.ca)
		socket := filepath.Join(a.dir, "var/run/secrets/workload-spiffe-uds/socket")
		a.Ready(t, func() error { _, err := os.Stat(socket); return err })
		seen := map[string]bool{}
		for svid := range subscribe(t, socket) {
			require.Equal(t, webID, svid.ID())
			verifies(t, authority.Bundle(), svid.Chain())
			if seen[svid.Leaf().SerialNumber.String()] = true; len(seen) == 3 {
				break
			}
		}
		require.GreaterOrEqual(t, calls.Load(), int64(3))
		a.Ready(t, func() error { // the agent writes its files one after the other
			svid, err := a.output()
			if err == nil {
				verifies(t, authority.Bundle(), svid.Chain())
			}
			return err
		})
		got := must.Get(os.ReadFile(filepath.Join(a.dir, "certs/root-cert.pem")))(t)
		require.True(t, mustBundle(t, got).Equal(mustBundle(t, roots)))
	})
	t.Run("our SDS socket", func(t *testing.T) {
		t.Parallel()
		dir := shortDir(t)
		socket := filepath.Join(dir, "var/run/secrets/workload-spiffe-uds/socket")
		require.NoError(t, os.MkdirAll(filepath.Dir(socket), 0o755))
		issuer := must.Get(local.New(authority, webID))(t)
		m := must.Get(secretcache.New(secretcache.Config{ID: webID, CA: issuer}))(t)
		h := must.Get(sds.NewHandler(m, nil))(t)
		background(t, func(ctx context.Context) { _ = m.Run(ctx) })
		server := &unixsocket.Server{Path: socket, Handler: h}
		background(t, func(ctx context.Context) { _ = server.Run(ctx) })
		require.Eventually(t, func() bool {
			conn, err := net.Dial("unix", socket)
			if err != nil {
				return false
			}
			return conn.Close() == nil
		}, passing, often)

		a := startAgent(t, dir, token, roots)
		calls := serve(t, a.ca)
		a.Ready(t, func() error {
			log, err := os.ReadFile(filepath.Join(dir, "log"))
			if err != nil {
				return err
			}
			for _, want := range []string{"Existing workload SDS socket found", "Envoy command"} {
				if !strings.Contains(string(log), want) {
					return fmt.Errorf("its log does not say %q", want)
				}
			}
			return nil
		})
		bootstrap := must.Get(os.ReadFile(filepath.Join(dir, "etc/istio/proxy/envoy-rev.json")))(t)
		require.Contains(t, string(bootstrap), "workload-spiffe-uds/socket", "Envoy is to ask our socket")
		for svid := range subscribe(t, socket) {
			require.Equal(t, webID, svid.ID())
			verifies(t, authority.Bundle(), svid.Chain())
			break
		}
		require.Zero(t, calls.Load(), "the agent itself asks no CA")
	})
}

// subscribe asks an SDS socket for the secret default as an Envoy does, and yields each one that it gets.
func subscribe(t *testing.T, socket string) iter.Seq[*spiffe.SVID] {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), passing)
	t.Cleanup(cancel)
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{Protocols: &protocols, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
	t.Cleanup(transport.CloseIdleConnections)
	client := grpchttp.NewClient(&http.Client{Transport: transport}, "http://localhost", 1<<20)
	return func(yield func(*spiffe.SVID) bool) {
		stream := client.Open(ctx, "/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets", nil)
		defer stream.Close()
		request := &envoysds.DiscoveryRequest{
			Node: &envoysds.Node{Id: "sidecar~127.0.0.1~web-1.prod~prod.svc.cluster.local"}, ResourceNames: []string{"default"},
			TypeUrl: "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret",
		}
		for {
			msg := must.Get(proto.Marshal(request))(t)
			require.NoError(t, stream.Send(msg))
			var response envoysds.DiscoveryResponse
			msg = must.Get(stream.Receive())(t)
			require.NoError(t, proto.Unmarshal(msg, &response))
			for _, r := range response.Resources {
				var secret envoysds.Secret
				require.NoError(t, proto.Unmarshal(r.Value, &secret))
				pair := secret.GetTlsCertificate()
				svid, err := spiffe.ParseSVIDPEM(pair.GetCertificateChain().GetInlineBytes(), pair.GetPrivateKey().GetInlineBytes())
				require.NoError(t, err)
				if !yield(svid) {
					return
				}
			}
			request.VersionInfo, request.ResponseNonce = response.VersionInfo, response.Nonce
		}
	}
}

// output returns what the agent has written.
func (a *agent) output() (*spiffe.SVID, error) {
	chain, err := os.ReadFile(filepath.Join(a.dir, "certs/cert-chain.pem"))
	if err != nil {
		return nil, err
	}
	key, err := os.ReadFile(filepath.Join(a.dir, "certs/key.pem"))
	if err != nil {
		return nil, err
	}
	return spiffe.ParseSVIDPEM(chain, key)
}

func mustBundle(t *testing.T, pem []byte) *spiffe.Bundle {
	t.Helper()
	return must.Get(spiffe.ParseBundlePEM(domain, pem))(t)
}
