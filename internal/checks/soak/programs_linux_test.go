package soak

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/test/athenztest"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/meshtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// target is a port or socket of a program. The fields are exported for the process of the attacker.
type target struct {
	Name, Network, Addr string
	Pause               time.Duration               // of the attacker between two connections, of each that it may hold; 0 means a second
	TLS, KeyPair        string                      // the name of the server, and a file with a certificate and its key; empty: without
	Path                string                      // of a request
	GRPC                bool                        // that is of gRPC
	program             *programtest.Program        // that it belongs to
	good                func(context.Context) error // a request of another user
}

const attackers = 600 // connections to each target, of one user

// siege holds attackers connections to each target until its input ends: idle, half a request, half a body, and half a TLS
// handshake. It opens others for those that it loses. A line that it reads is answered with how many it holds of each.
func siege(_ context.Context, dir string, in *bufio.Scanner) error {
	text := must.Do(os.ReadFile(filepath.Join(dir, "targets")))
	var targets []target
	if err := json.Unmarshal(text, &targets); err != nil {
		return err
	}
	var mu sync.Mutex
	held := map[string]int{}
	sent := []string{"", "GET / HTTP/1.1\r\n", "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\nx", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"}
	for _, to := range targets {
		for i := range attackers {
			go func() {
				for ; ; time.Sleep(cmp.Or(to.Pause, time.Second)) {
					c, err := net.DialTimeout(to.Network, to.Addr, 5*time.Second)
					if err != nil {
						continue
					}
					_, _ = io.WriteString(c, sent[i%len(sent)])
					mu.Lock()
					held[to.Name]++
					mu.Unlock()
					_, _ = io.Copy(io.Discard, c)
					_ = c.Close()
					mu.Lock()
					held[to.Name]--
					mu.Unlock()
				}
			}()
		}
	}
	for in.Scan() {
		mu.Lock()
		err := json.NewEncoder(os.Stdout).Encode(held)
		mu.Unlock()
		if err != nil {
			return err
		}
	}
	return nil
}

// limited starts a program that may have 512 descriptors and, where this user may say so, 128 MiB of memory, with what the kernel
// has for it.
func limited(t *testing.T, path string, environ []string, args ...string) *programtest.Program {
	t.Helper()
	script := fmt.Sprint("ulimit -n ", descriptors, ` && exec "$0" "$@"`)
	if group := memoryGroup(t, filepath.Base(path)); group != "" {
		script = "echo $$ > " + group + "/cgroup.procs && " + script
	}
	return programtest.Start(t, "/bin/sh", nil, append(environ, "PATH=/bin:/usr/bin"), append([]string{"-c", script, path}, args...)...)
}

// memoryGroup returns the directory of a new memory cgroup, of version 1 or 2, or "" if there cannot be one.
func memoryGroup(t *testing.T, name string) string {
	t.Helper()
	for _, at := range [][2]string{{"/sys/fs/cgroup/memory", "memory.limit_in_bytes"}, {"/sys/fs/cgroup", "memory.max"}} {
		dir, limit := filepath.Join(at[0], fmt.Sprintf("svidkit-%s-%d", name, os.Getpid())), at[1]
		if os.Mkdir(dir, 0o755) != nil {
			continue
		}
		t.Cleanup(func() { _ = os.Remove(dir) })
		if _, err := os.Stat(filepath.Join(dir, limit)); err == nil && os.WriteFile(filepath.Join(dir, limit), fmt.Append(nil, most), 0) == nil {
			return dir
		}
	}
	t.Logf("%s: no memory cgroup, so what is resident counts alone", name)
	return ""
}

// get is a request of a client that begins anew each time.
func get(url string) func(context.Context) error {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	return func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err == nil && resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s: %s", resp.Status, body)
		}
		return err
	}
}

// answered is a request by a socket that any answer is good for, as what it asks for is not there.
func answered(socket, url string) func(context.Context) error {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	return func(ctx context.Context) error {
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, http.NoBody)
		if err != nil {
			return err
		}
		resp, err := client.Do(r)
		if err == nil {
			err = resp.Body.Close()
		}
		return err
	}
}

// handshake is a TLS handshake with a server, whose certificate has been renewed in time.
func handshake(addr, name string) func(context.Context) error {
	return func(ctx context.Context) error {
		c, err := (&tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, ServerName: name, NextProtos: []string{"h2"}}}).DialContext(ctx, "tcp", addr)
		if err != nil {
			return err
		}
		defer c.Close()
		return renewed(c.(*tls.Conn).ConnectionState().PeerCertificates[0].NotAfter)
	}
}

// renewed returns an error for an identity of a program that should have been renewed long ago.
func renewed(end time.Time) error {
	if left := time.Until(end); left < programLife/5 {
		return fmt.Errorf("the identity has %v left of %v", left, programLife)
	}
	return nil
}

// identityEnd asks the agent behind a socket for its identity, by a connection of its own, and returns when that ends.
func identityEnd(ctx context.Context, socket string) (time.Time, error) {
	over, end := context.WithCancel(context.Background())
	defer end()
	client := sds.UnixClient(socket)
	transport := client.Transport.(*http.Transport)
	dial := transport.DialContext
	transport.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err == nil { // the stream ends a little later than Watch
			context.AfterFunc(over, func() { _ = c.Close() })
		}
		return c, err
	}
	for secret, err := range sds.NewClient(client, "http://localhost").Watch(ctx, "default") {
		if err != nil {
			return time.Time{}, err
		}
		return secret.NotAfter(), nil
	}
	return time.Time{}, ctx.Err()
}

// free returns addresses of this machine on which nothing listens.
func free(t *testing.T, n int) (addrs []string) {
	t.Helper()
	for range n {
		l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
		defer l.Close()
		addrs = append(addrs, l.Addr().String())
	}
	return addrs
}

const programLife = 10 * time.Second // of the identities of the programs

// programs runs the programs of examples, with 512 descriptors each, in a new directory, which it returns with what they listen at.
// What is noted of each identity that the agent has given is the end.
func programs(t *testing.T, certificates map[time.Time]bool) (dir string, targets []target) {
	t.Helper()
	const life = programLife
	programs := programtest.Build(t, "ca", "agent", "workload-agent", "linkerd-proxy", "service", "athenz-agent", "athenz-provider", "athenz-sia")
	dir = must.Get(os.MkdirTemp("", "svidkit-siege"))(t) // and not t.TempDir, which the attacker may not enter
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o755))
	ports := free(t, 9)

	state := filepath.Join(dir, "state")
	ca := limited(t, filepath.Join(programs, "ca"), nil, "-trust-domain", "example.org", "-state-dir", state, "-create", "-default-ttl", life.String(),
		"-istio-addr", ports[0], "-linkerd-addr", ports[1], "-bundle-addr", ports[2], "-admin-addr", ports[3], "-caller-rate", "0")
	require.Eventually(t, func() bool { return get("http://"+ports[3]+"/ready")(t.Context()) == nil }, time.Minute, 50*time.Millisecond)

	// The agent, its identity from that CA. Its control plane is not there.
	root := filepath.Join(dir, "agent")
	token := filepath.Join(root, "var/run/secrets/tokens/istio-token")
	require.NoError(t, os.MkdirAll(filepath.Dir(token), 0o755))
	secret := must.Get(os.ReadFile(filepath.Join(state, "token-secret")))(t)
	require.NoError(t, os.WriteFile(token, fmt.Appendf(nil, "%s:demo/web", secret), 0o600))
	_, debug, err := net.SplitHostPort(ports[4])
	require.NoError(t, err)
	agent := limited(t, filepath.Join(programs, "agent"), []string{
		"TRUST_DOMAIN=example.org", "POD_NAMESPACE=demo", "SERVICE_ACCOUNT=web", "CA_ADDR=" + ports[0], "CA_ROOT_CA=" + filepath.Join(state, "root-cert.pem"),
		"SECRET_TTL=" + life.String(), "ECC_SIGNATURE_ALGORITHM=ECDSA", "MINIMUM_DRAIN_DURATION=0s", "PROXY_XDS_DEBUG_VIA_AGENT_PORT=" + debug,
		`PROXY_CONFIG={"discoveryAddress":"` + free(t, 1)[0] + `"}`, "XDS_ROOT_CA=" + filepath.Join(state, "root-cert.pem"),
	}, "-root", root, "-admin", ports[5])
	socket := filepath.Join(root, "var/run/secrets/workload-spiffe-uds/socket")
	for _, folder := range []string{root, filepath.Join(root, "var"), filepath.Join(root, "var/run"), filepath.Join(root, "var/run/secrets")} {
		require.NoError(t, os.Chmod(folder, 0o755))
	}
	require.Eventually(t, func() bool { return get("http://"+ports[5]+"/metrics")(t.Context()) == nil }, time.Minute, 50*time.Millisecond)
	// Any user may connect, as with SocketMode 0666.
	require.Eventually(t, func() bool { return os.Chmod(filepath.Dir(socket), 0o755) == nil && os.Chmod(socket, 0o666) == nil }, time.Minute, 50*time.Millisecond)

	xds := filepath.Join(root, "etc/istio/proxy/XDS")
	for at := xds; at != root; at = filepath.Dir(at) { // of the socket, and of the directories to it
		require.Eventually(t, func() bool { return os.Chmod(at, 0o777) == nil }, time.Minute, 50*time.Millisecond)
	}

	// The proxy of a mesh, and its application.
	mesh := meshtest.New(t, meshtest.Options{Life: 3 * life}) // a proxy waits 10 s at least
	app := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") })}
	go func() { _ = server.Serve(app) }()
	t.Cleanup(func() { _ = server.Close() })
	proxy := limited(t, filepath.Join(programs, "linkerd-proxy"), []string{
		"LINKERD2_PROXY_LOCAL_IDENTITY_NAME=" + meshtest.Web, "LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS_BLOB=" + base64.StdEncoding.EncodeToString(mesh.Authority.Bundle().MarshalPEM()),
		"LINKERD2_PROXY_IDENTITY_TOKEN_FILE=" + mesh.Config(t, meshtest.Web).TokenFile, "LINKERD2_PROXY_IDENTITY_STORE_DIR=" + t.TempDir(),
		"LINKERD2_PROXY_IDENTITY_ADDR=" + mesh.Addr, "LINKERD2_PROXY_IDENTITY_IDENTITY=" + meshtest.Certifier,
	}, "-app", app.Addr().String(), "-inbound", "127.0.0.1:0", "-outbound", "127.0.0.1:0", "-admin", "127.0.0.1:0", "-route", "app.test="+app.Addr().String())
	admin, inbound, outbound := proxy.Addr("admin"), proxy.Addr("inbound"), proxy.Addr("outbound")
	require.Eventually(t, func() bool { return get("http://"+admin+"/ready")(t.Context()) == nil }, time.Minute, 50*time.Millisecond)

	// An agent for the workloads of a machine, which has an identity for root alone.
	workloads := filepath.Join(dir, "workloads")
	require.NoError(t, os.Mkdir(workloads, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(workloads, "file"), []byte(`{"workloads": [{"match": {"uid": 0}, "identities": [{"id": "spiffe://example.org/ns/demo/sa/web"}]}]}`), 0o600))
	api := filepath.Join(workloads, "api.sock")
	machine := limited(t, filepath.Join(programs, "workload-agent"), nil, "-trust-domain", "example.org", "-ca", "istio:https://"+ports[0], "-ca-roots", filepath.Join(state, "root-cert.pem"),
		"-token-file", token, "-file", filepath.Join(workloads, "file"), "-socket", api, "-admin", ports[7])
	require.Eventually(t, func() bool { return get("http://"+ports[7]+"/ready")(t.Context()) == nil }, time.Minute, 50*time.Millisecond)

	// A service that has its identity from there.
	pair := filepath.Join(dir, "pair.pem")
	require.NoError(t, os.WriteFile(pair, keyPair(t, ports[0], filepath.Join(state, "root-cert.pem"), token), 0o644))
	service := limited(t, filepath.Join(programs, "service"), nil, "-socket", "unix://"+api, "-requests", "0", "-interval", "10s", "-addr", ports[8], "-health-addr", ports[6])
	require.Eventually(t, func() bool { return get("http://"+ports[6]+"/ready")(t.Context()) == nil }, time.Minute, 50*time.Millisecond)

	// The programs of Athenz.
	place := athenztest.NewPlace(t)
	common := []string{"PROVIDER_SERVICE=" + athenztest.Provider().String(), "ADMIN_DOMAIN=k8s.admin", "SERVER_CA_CERT=" + place.Path("roots.pem"), "SERVICE_CA_CERT=" + place.Path("roots.pem"), "HEALTH_ADDR=127.0.0.1:0"}
	provider := limited(t, filepath.Join(programs, "athenz-provider"), append(slices.Clone(common),
		"PROVIDER_ADDR=127.0.0.1:0", "SIGNING_ADDR=127.0.0.1:0", "CERT_FILE="+place.Path("provider.pem"), "KEY_FILE="+place.Path("provider.key"), "ZTS_NAME="+cafake.ZTSName,
		"NODE_NAMES="+athenztest.Node, "PRIVATE_KEY_DIR="+place.Path("private"), "PUBLIC_KEY_DIR="+place.Path("public"), "KUBERNETES_API=http://"+free(t, 1)[0]))
	callback, signing, providerHealth := provider.Addr("PROVIDER_ADDR"), provider.Addr("SIGNING_ADDR"), provider.Addr("HEALTH_ADDR")
	handles := filepath.Join(dir, "athenz", "agent.sock")
	node := limited(t, filepath.Join(programs, "athenz-agent"), append(slices.Clone(common),
		"ZTS_ENDPOINT="+place.ZTS.Endpoint().URL, "SIGNING_ENDPOINT=https://"+signing, "CERT_FILE="+place.Path("node.pem"), "KEY_FILE="+place.Path("node.key"),
		"KUBELET_ENDPOINT=http://"+free(t, 1)[0], "VOLUMES_DIR="+t.TempDir(), "AGENT_SOCKET="+handles))
	nodeHealth, pod := node.Addr("HEALTH_ADDR"), t.TempDir()
	sia := limited(t, filepath.Join(programs, "athenz-sia"), []string{
		"HEALTH_ADDR=127.0.0.1:0", "MODE=refresh", "ENDPOINT=unix://" + handles, "ID_FILE=" + filepath.Join(pod, "id"), "KEY_FILE=" + filepath.Join(pod, "service.key"),
		"CERT_FILE=" + filepath.Join(pod, "service.cert"), "CA_CERT_FILE=" + filepath.Join(pod, "cacert.pem"), "TOKEN_FILE=" + filepath.Join(pod, "ntoken"),
	})
	siaHealth := sia.Addr("HEALTH_ADDR")

	throughProxy := func(ctx context.Context) error {
		tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", outbound)
		}}
		defer tr.CloseIdleConnections()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://app.test/", nil)
		if err != nil {
			return err
		}
		resp, err := tr.RoundTrip(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("status %s", resp.Status)
		}
		return nil
	}
	targets = []target{
		{Name: "ca: Istio's API", program: ca, TLS: "localhost", Path: "/istio.v1.auth.IstioCertificateService/CreateCertificate", GRPC: true, Network: "tcp", Addr: ports[0], good: handshake(ports[0], "localhost")},
		{Name: "ca: Linkerd's API", program: ca, TLS: "localhost", Path: "/io.linkerd.proxy.identity.Identity/Certify", GRPC: true, Network: "tcp", Addr: ports[1], good: handshake(ports[1], "localhost")},
		{Name: "ca: bundle endpoint", program: ca, TLS: "localhost", Path: "/", Network: "tcp", Addr: ports[2], good: handshake(ports[2], "localhost")},
		{Name: "ca: admin", program: ca, Path: "/metrics", Network: "tcp", Addr: ports[3], good: get("http://" + ports[3] + "/ready")},
		{Name: "agent: debug requests", program: agent, Path: "/debug/syncz", Network: "tcp", Addr: ports[4], good: func(ctx context.Context) error {
			err := get("http://" + ports[4] + "/debug/syncz")(ctx)
			if err != nil && strings.Contains(err.Error(), "50") { // there is no control plane
				err = nil
			}
			return err
		}},
		{Name: "agent: admin", program: agent, Path: "/metrics", Network: "tcp", Addr: ports[5], good: get("http://" + ports[5] + "/healthz/live")},
		{Name: "agent: SDS", program: agent, Path: "/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets", GRPC: true, Network: "unix", Addr: socket, good: func(ctx context.Context) error {
			end, err := identityEnd(ctx, socket)
			if err != nil {
				return err
			}
			certificates[end] = true
			return renewed(end)
		}},
		{Name: "agent: XDS", program: agent, Path: "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources", GRPC: true, Network: "unix", Addr: xds, good: answered(xds, "http://agent/none")},
		{Name: "linkerd-proxy: inbound", program: proxy, TLS: meshtest.Web, Path: "/", Network: "tcp", Addr: inbound, good: handshake(inbound, meshtest.Web)},
		{Name: "linkerd-proxy: outbound", program: proxy, Path: "/", Network: "tcp", Addr: outbound, good: throughProxy},
		{Name: "linkerd-proxy: admin", program: proxy, Path: "/metrics", Network: "tcp", Addr: admin, good: get("http://" + admin + "/ready")},
		{Name: "athenz-provider: callback", program: provider, TLS: "localhost", Path: "/", Network: "tcp", Addr: callback, good: handshake(callback, "localhost")},
		{Name: "athenz-provider: signing", program: provider, TLS: "localhost", Path: "/", Network: "tcp", Addr: signing, good: handshake(signing, "localhost")},
		{Name: "athenz-provider: health", program: provider, Path: "/metrics", Network: "tcp", Addr: providerHealth, good: get("http://" + providerHealth + "/live")},
		{Name: "athenz-agent: pods", program: node, Path: "/v1/init/none", Network: "unix", Addr: handles, good: answered(handles, "http://agent/v1/init/none")},
		{Name: "athenz-agent: health", program: node, Path: "/metrics", Network: "tcp", Addr: nodeHealth, good: get("http://" + nodeHealth + "/ready")},
		{Name: "athenz-sia: health", program: sia, Path: "/metrics", Network: "tcp", Addr: siaHealth, good: get("http://" + siaHealth + "/live")},
		{Name: "service: health", program: service, Path: "/metrics", Network: "tcp", Addr: ports[6], good: get("http://" + ports[6] + "/ready")},
		{Name: "service", program: service, TLS: "localhost", KeyPair: pair, Path: "/", Network: "tcp", Addr: ports[8], good: handshake(ports[8], "localhost")},
		{Name: "workload-agent: Workload API", program: machine, Path: "/SpiffeWorkloadAPI/FetchX509SVID", GRPC: true, Network: "unix", Addr: api, good: func(ctx context.Context) error {
			svid, err := workloadSVID(ctx, api)
			if err != nil {
				return err
			}
			return renewed(svid.Leaf().NotAfter)
		}},
		{Name: "workload-agent: SDS", program: machine, Path: "/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets", GRPC: true, Network: "unix", Addr: api, good: func(ctx context.Context) error {
			end, err := identityEnd(ctx, api)
			if err != nil {
				return err
			}
			return renewed(end)
		}},
		{Name: "workload-agent: admin", program: machine, Path: "/metrics", Network: "tcp", Addr: ports[7], good: get("http://" + ports[7] + "/ready")},
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "targets"), must.Get(json.Marshal(targets))(t), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "test"), must.Get(os.ReadFile("/proc/self/exe"))(t), 0o755))
	return dir, targets
}

// workloadSVID asks the agent behind a socket for an identity.
func workloadSVID(ctx context.Context, socket string) (*spiffe.SVID, error) {
	api, err := workloadapi.NewClient("unix://"+socket, nil)
	if err != nil {
		return nil, err
	}
	defer api.CloseIdleConnections()
	for update, err := range api.WatchX509SVIDs(ctx) {
		if err != nil {
			return nil, err
		}
		return update.Identities[0].SVID, nil
	}
	return nil, ctx.Err()
}

// keyPair returns an identity that lasts as long as the test, of Istio's API at an address, as PEM.
func keyPair(t *testing.T, addr, roots, token string) []byte {
	t.Helper()
	endpoint := caclient.Endpoint{URL: "https://" + addr, TrustDomain: spiffe.MustParseTrustDomain("example.org"), RootsFile: roots, TokenFile: token}
	issuer := must.Get(istioca.New(istioca.Options{Endpoint: endpoint}))(t)
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	chain := must.Get(issuer.Sign(t.Context(), must.Get(pki.NewCSR(key, pki.CSROptions{}))(t), time.Hour))(t)
	return append(pki.MarshalCertificatesPEM(chain...), must.Get(pki.MarshalPrivateKeyPEM(key))(t)...)
}

// TestPrograms: with 512 descriptors each, and each of their ports and sockets held by 600 connections of one local user, the
// programs of examples serve all requests of another user, and no renewal is late.
func TestPrograms(t *testing.T) {
	rounds.Slow(t)
	if os.Geteuid() != 0 {
		t.Skip("there is no other user")
	}
	certificates := map[time.Time]bool{} // by their end
	dir, targets := programs(t, certificates)
	attack := start(t, filepath.Join(dir, "test"), dir, "siege", badUser)

	asked, failed := map[string]int{}, map[string][]string{}
	for end := time.Now().Add(3 * programLife); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		for _, to := range targets {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			err := to.good(ctx)
			cancel()
			if asked[to.Name]++; err != nil {
				failed[to.Name] = append(failed[to.Name], err.Error())
			}
		}
	}
	var held map[string]int
	attack.ask(t, "held", &held)
	for _, to := range targets {
		t.Logf("%-25s held by the attacker %3d; requests of another user %3d, failed %d", to.Name, held[to.Name], asked[to.Name], len(failed[to.Name]))
		if n := len(failed[to.Name]); n > 0 {
			assert.Zero(t, n, "%s: %s", to.Name, failed[to.Name][0])
		}
		assert.Greater(t, asked[to.Name], 3, to.Name)
		assert.Positive(t, held[to.Name], to.Name)
	}
	assert.GreaterOrEqual(t, len(certificates), 4, "certificates of the agent in three lives")
}
