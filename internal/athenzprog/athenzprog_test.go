package athenzprog_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"flag"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/athenzprog"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

const providerName = "k8s.admin.athenz-callback"

// place is a folder with what the programs read.
type place struct {
	t   *testing.T
	dir string
	ca  *spiffetest.CA
	zts *cafake.ZTS
}

func newPlace(t *testing.T) *place {
	t.Helper()
	dir, err := os.MkdirTemp("", "athenz") // a path that a Unix socket may have
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	p := &place{t: t, dir: dir, ca: spiffetest.NewCA(t, "athenz.io")}
	p.zts = cafake.NewZTS(t, p.ca, "/ns/media-sports/sa/frontend")
	p.write("roots.pem", p.ca.Bundle().MarshalPEM())
	p.certify("provider", providerName)
	p.certify("node", "k8s.admin.k8s-node")
	for _, dir := range []string{"private", "public"} {
		require.NoError(t, os.Mkdir(p.path(dir), 0o700))
	}
	p.newKey("athenz-init-secret.v1")
	return p
}

func (p *place) path(name string) string { return filepath.Join(p.dir, name) }

func (p *place) write(name string, data []byte) {
	require.NoError(p.t, os.WriteFile(p.path(name), data, 0o600))
}

func (p *place) certify(name, cn string) {
	certs, key, err := p.zts.Credential(cn).MarshalPEM()
	require.NoError(p.t, err)
	p.write(name+".pem", certs)
	p.write(name+".key", key)
}

func (p *place) newKey(name string) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(p.t, err)
	text, err := pki.MarshalPrivateKeyPEM(key)
	require.NoError(p.t, err)
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	require.NoError(p.t, err)
	p.write("private/"+name, text)
	p.write("public/"+name, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
}

// environ returns a good environment with changes: names with their values, of which "" takes one away.
func (p *place) environ(program athenzprog.Program, changes ...string) (list []string) {
	env := map[string]string{"HEALTH_ADDR": "127.0.0.1:0"}
	switch program.Name {
	case "athenz-agent":
		maps.Copy(env, map[string]string{
			"PROVIDER_SERVICE": providerName, "ZTS_ENDPOINT": p.zts.Endpoint().URL, "SIGNING_ENDPOINT": "https://127.0.0.1:1", "CERT_FILE": p.path("node.pem"), "KEY_FILE": p.path("node.key"),
			"SERVER_CA_CERT": p.path("roots.pem"), "SERVICE_CA_CERT": p.path("roots.pem"), "KUBELET_ENDPOINT": "http://127.0.0.1:1", "VOLUMES_DIR": p.path("made/volumes"), "AGENT_SOCKET": p.path("made/agent.sock"),
		})
	case "athenz-provider":
		maps.Copy(env, map[string]string{
			"PROVIDER_SERVICE": providerName, "PROVIDER_ADDR": "127.0.0.1:0", "SIGNING_ADDR": "127.0.0.1:0", "CERT_FILE": p.path("provider.pem"), "KEY_FILE": p.path("provider.key"),
			"SERVER_CA_CERT": p.path("roots.pem"), "SERVICE_CA_CERT": p.path("roots.pem"), "ZTS_NAME": cafake.ZTSName, "NODE_NAMES": "k8s.admin.k8s-node", "KUBERNETES_API": "http://127.0.0.1:1",
			"PRIVATE_KEY_DIR": p.path("private"), "PUBLIC_KEY_DIR": p.path("public"),
		})
	case "athenz-sia":
		maps.Copy(env, map[string]string{
			"MODE": "refresh", "ENDPOINT": "unix://" + p.path("made/agent.sock"), "ID_FILE": p.path("id"), "KEY_FILE": p.path("made/service.key"), "CERT_FILE": p.path("made/service.cert"),
			"CA_CERT_FILE": p.path("made/cacert.pem"), "TOKEN_FILE": p.path("made/ntoken"),
		})
	}
	for _, change := range changes {
		name, value, _ := strings.Cut(change, "=")
		env[name] = value
	}
	for name, value := range env {
		list = append(list, name+"="+value)
	}
	return list
}

// start runs a program until the test ends.
func (p *place) start(program athenzprog.Program, log io.Writer, changes ...string) map[string]net.Addr {
	p.t.Helper()
	up, ended := make(chan map[string]net.Addr, 1), make(chan error, 1)
	ctx, cancel := context.WithCancel(context.WithoutCancel(p.t.Context()))
	go func() {
		ended <- program.Run(ctx, athenzprog.Options{
			Environ: p.environ(program, changes...), Kubernetes: new(http.Client), Logger: slog.New(slog.NewTextHandler(log, nil)),
			Started: func(at map[string]net.Addr) { up <- at },
		})
	}()
	select {
	case at := <-up:
		p.t.Cleanup(func() { cancel(); assert.NoError(p.t, <-ended, "a clean stop") })
		return at
	case err := <-ended:
		cancel()
		require.FailNow(p.t, "the program has ended", "%v", err)
	}
	return nil
}

// mutual returns a client with a certificate of a common name; an empty one means none.
func (p *place) mutual(cn string) *http.Client {
	cfg := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: p.ca.Bundle().CertPool()}
	if cn != "" {
		cfg.Certificates = []tls.Certificate{*p.zts.Credential(cn).TLSCertificate()}
	}
	return &http.Client{Transport: &http.Transport{TLSClientConfig: cfg, DisableKeepAlives: true}}
}

// TestRefuses shows that each bad value is told by its variable, before anything is made.
func TestRefuses(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer busy.Close()
	p.write("bad", []byte("TOP-SECRET"))
	p.certify("other", "k8s.admin.other")
	p.newKey("athenz-init-secret.v1")
	require.NoError(t, os.Mkdir(p.path("empty"), 0o700))
	require.NoError(t, os.Mkdir(p.path("mixed"), 0o700))
	data, err := os.ReadFile(p.path("public/athenz-init-secret.v1"))
	require.NoError(t, err)
	p.newKey("other-secret.v1")
	p.write("mixed/other-secret.v1", data)
	agent, provider, sia := athenzprog.Agent(), athenzprog.Provider(), athenzprog.SIA()
	for _, c := range []struct {
		program athenzprog.Program
		changes []string
		want    []string
	}{
		{agent, []string{"PROVIDER_SERVICE=", "ZTS_ENDPOINT=", "KEY_FILE="}, []string{"PROVIDER_SERVICE", "ZTS_ENDPOINT", "KEY_FILE", "not set"}},
		{agent, []string{"SERVER_CA_CERT=", "SERVICE_CA_CERT=", "SIGNING_ENDPOINT=", "CERT_FILE="}, []string{"SERVER_CA_CERT", "SERVICE_CA_CERT", "SIGNING_ENDPOINT", "CERT_FILE"}},
		{agent, []string{"PROVIDER_SERVICE=nodots"}, []string{"PROVIDER_SERVICE", "k8s.admin.athenz-callback"}},
		{agent, []string{"ZTS_ENDPOINT=http://zts:4443"}, []string{"ZTS_ENDPOINT", "https"}},
		{agent, []string{"ZTS_ENDPOINT=https://zts:4443/zts/v1"}, []string{"ZTS_ENDPOINT", "without a path"}},
		{agent, []string{"SIGNING_ENDPOINT=signing:4444"}, []string{"SIGNING_ENDPOINT", "https"}},
		{agent, []string{"KUBELET_ENDPOINT=http://10.0.0.1:10255"}, []string{"KUBELET_ENDPOINT", "http is for addresses of this machine"}},
		{agent, []string{"KUBELET_ENDPOINT=http://kubelet:10255"}, []string{"KUBELET_ENDPOINT"}},
		{agent, []string{"CERT_FILE=" + p.path("none")}, []string{"CERT_FILE", "KEY_FILE", "no such file"}},
		{agent, []string{"KEY_FILE=" + p.path("provider.key")}, []string{"CERT_FILE", "key"}},
		{agent, []string{"KEY_FILE=" + p.path("bad")}, []string{"CERT_FILE"}},
		{agent, []string{"SERVER_CA_CERT=" + p.path("bad"), "SERVICE_CA_CERT=" + p.path("none")}, []string{"SERVER_CA_CERT", "SERVICE_CA_CERT"}},
		{agent, []string{"ADMIN_DOMAIN=UP"}, []string{"ADMIN_DOMAIN", "k8s.admin"}},
		{agent, []string{"SYSTEM_NAMESPACES=a,B"}, []string{"SYSTEM_NAMESPACES"}},
		{agent, []string{"DNS_SUFFIX=.x"}, []string{"DNS_SUFFIX"}},
		{agent, []string{"SPIFFE_TRUST_DOMAIN=Up"}, []string{"SPIFFE_TRUST_DOMAIN"}},
		{agent, []string{"AGENT_SOCKET=agent.sock"}, []string{"AGENT_SOCKET", "slash"}},
		{agent, []string{"HEALTH_ADDR=127.0.0.1"}, []string{"HEALTH_ADDR", "HOST:PORT"}},
		{agent, []string{"HEALTH_ADDR=127.0.0.1:70000"}, []string{"HEALTH_ADDR"}},
		{agent, []string{"HEALTH_ADDR=" + busy.Addr().String()}, []string{"HEALTH_ADDR", "in use"}},
		{agent, []string{"LOG_LEVEL=loud"}, []string{"LOG_LEVEL", "debug, info, warn, error"}},
		{provider, []string{"PROVIDER_SERVICE=", "CERT_FILE=", "KEY_FILE=", "SERVICE_CA_CERT="}, []string{"PROVIDER_SERVICE", "CERT_FILE", "KEY_FILE", "SERVICE_CA_CERT"}},
		{provider, []string{"ZTS_NAME=", "SERVER_CA_CERT=", "NODE_NAMES="}, []string{"ZTS_NAME", "SERVER_CA_CERT", "NODE_NAMES"}},
		{provider, []string{"PROVIDER_ADDR=off", "SIGNING_ADDR=off"}, []string{"PROVIDER_ADDR", "set one of them"}},
		{provider, []string{"CERT_FILE=" + p.path("other.pem"), "KEY_FILE=" + p.path("other.key")}, []string{"CERT_FILE", "k8s.admin.other", providerName}},
		{provider, []string{"NODE_NAMES=Node"}, []string{"NODE_NAMES", "lower case"}},
		{provider, []string{"ZTS_NAME=role:x"}, []string{"ZTS_NAME"}},
		{provider, []string{"TOKEN_EXPIRY=16m"}, []string{"TOKEN_EXPIRY", "15m"}},
		{provider, []string{"TOKEN_EXPIRY=0s"}, []string{"TOKEN_EXPIRY", "1s"}},
		{provider, []string{"SECRET_NAME=a/b"}, []string{"SECRET_NAME"}},
		{provider, []string{"PRIVATE_KEY_DIR=" + p.path("empty")}, []string{"PRIVATE_KEY_DIR", "put a key there"}},
		{provider, []string{"PUBLIC_KEY_DIR=" + p.path("empty")}, []string{"PUBLIC_KEY_DIR", "public key"}},
		{provider, []string{"SECRET_NAME=other-secret", "PUBLIC_KEY_DIR=" + p.path("mixed")}, []string{"PUBLIC_KEY_DIR"}},
		{provider, []string{"KUBERNETES_API=http://10.0.0.1"}, []string{"KUBERNETES_API"}},
		{provider, []string{"USED_DOCUMENTS=used-documents"}, []string{"USED_DOCUMENTS", "namespace and the name"}},
		{provider, []string{"USED_DOCUMENTS=athenz/a/b"}, []string{"USED_DOCUMENTS"}},
		{provider, []string{"USED_DOCUMENTS=/used"}, []string{"USED_DOCUMENTS"}},
		{provider, []string{"SIGNING_ADDR=" + busy.Addr().String()}, []string{"SIGNING_ADDR", "in use"}},
		{sia, []string{"MODE=loop"}, []string{"MODE", "init, refresh"}},
		{sia, []string{"ENDPOINT=/agent.sock"}, []string{"ENDPOINT", "unix:///"}},
		{sia, []string{"ENDPOINT=tcp://127.0.0.1:1"}, []string{"ENDPOINT"}},
		{sia, []string{"KEY_FILE=/elsewhere/service.key"}, []string{"KEY_FILE", "one folder"}},
		{sia, []string{"REFRESH_INTERVAL=59s"}, []string{"REFRESH_INTERVAL", "a minute"}},
		{sia, []string{"REFRESH_INTERVAL=hourly"}, []string{"REFRESH_INTERVAL"}},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // for a program that does not refuse it
		err := c.program.Run(ctx, athenzprog.Options{Environ: p.environ(c.program, c.changes...), Kubernetes: new(http.Client)})
		cancel()
		require.Error(t, err, c.changes)
		for _, want := range c.want {
			require.ErrorContains(t, err, want, c.changes)
		}
		assert.NotContains(t, err.Error(), "TOP-SECRET", c.changes)
		assert.NoDirExists(t, p.path("made"), c.changes)
	}
}

// TestProvider runs the provider with its signing service.
func TestProvider(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-11.1-5", "ATH-11.1-6", "ATH-15-8")
	p := newPlace(t)
	at := p.start(athenzprog.Provider(), io.Discard, "SPIFFE_TRUST_DOMAIN=athenz.io", "SYSTEM_NAMESPACES=a, b")
	assert.Equal(t, []string{"HEALTH_ADDR", "PROVIDER_ADDR", "SIGNING_ADDR"}, slices.Sorted(maps.Keys(at)))
	code, text := get(t, at, "/ready")
	assert.Equal(t, http.StatusOK, code, text)

	post := func(client *http.Client, variable, path string) int {
		answer, err := client.Post("https://"+at[variable].String()+path, "application/json", strings.NewReader("{}"))
		require.NoError(t, err)
		require.NoError(t, answer.Body.Close())
		return answer.StatusCode
	}
	for _, c := range []struct {
		cn, variable, path string
		code               int
	}{
		{"", "PROVIDER_ADDR", "/instance", 401},
		{"k8s.admin.k8s-node", "PROVIDER_ADDR", "/instance", 401},
		{cafake.ZTSName, "PROVIDER_ADDR", "/instance", 400},
		{cafake.ZTSName, "PROVIDER_ADDR", "/v1/jwt", 404},
		{"", "SIGNING_ADDR", "/v1/jwt", 401},
		{cafake.ZTSName, "SIGNING_ADDR", "/v1/jwt", 401},
		{"k8s.admin.k8s-node", "SIGNING_ADDR", "/instance", 404},
	} {
		assert.Equal(t, c.code, post(p.mutual(c.cn), c.variable, c.path), c)
	}
	_, text = get(t, at, "/metrics")
	assert.Contains(t, text, `svidkit_athenz_provider_requests_total{part="provider",code="401"} 2`)
	assert.Contains(t, text, `svidkit_athenz_signing_requests_total{part="signing",code="401"} 2`)

	// Another certificate is served when it is there, and the loss of a key is told.
	p.certify("provider", providerName)
	want, err := os.ReadFile(p.path("provider.pem"))
	require.NoError(t, err)
	block, _ := pem.Decode(want)
	require.NotNil(t, block)
	served := func() []byte {
		conn, err := tls.Dial("tcp", at["PROVIDER_ADDR"].String(), &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: p.ca.Bundle().CertPool()})
		require.NoError(t, err)
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0].Raw
	}
	assert.Equal(t, block.Bytes, served())
	p.write("provider.key", []byte("half of a key")) // while the files are replaced
	assert.Equal(t, block.Bytes, served())
	code, text = get(t, at, "/ready")
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.Contains(t, text, "CERT_FILE")
	p.certify("provider", providerName)
	assert.NotEqual(t, block.Bytes, served())
	require.NoError(t, os.Remove(p.path("public/athenz-init-secret.v1")))
	code, text = get(t, at, "/ready")
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.Contains(t, text, "PUBLIC_KEY_DIR")
}

// TestAlone runs each half of the provider without the other.
func TestAlone(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	at := p.start(athenzprog.Provider(), io.Discard, "PROVIDER_ADDR=off", "ZTS_NAME=", "SERVER_CA_CERT=", "KUBERNETES_API=", "PUBLIC_KEY_DIR="+p.path("none"), "CERT_FILE="+p.path("node.pem"), "KEY_FILE="+p.path("node.key"))
	assert.Equal(t, []string{"HEALTH_ADDR", "SIGNING_ADDR"}, slices.Sorted(maps.Keys(at)))
	at = p.start(athenzprog.Provider(), io.Discard, "SIGNING_ADDR=off", "NODE_NAMES=", "HEALTH_ADDR=off", "PRIVATE_KEY_DIR="+p.path("none"))
	assert.Equal(t, []string{"PROVIDER_ADDR"}, slices.Sorted(maps.Keys(at)))
}

// TestSidecar runs a sidecar without an agent, and TestAgent an agent without pods.
func TestSidecar(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	at := p.start(athenzprog.SIA(), io.Discard)
	code, text := get(t, at, "/ready")
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.Contains(t, text, "identity")
	code, _ = get(t, at, "/live")
	assert.Equal(t, http.StatusOK, code)
	_, text = get(t, at, "/metrics")
	assert.Contains(t, text, `svidkit_athenz_sidecar_ready{part="identity"} 0`)

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err := athenzprog.SIA().Run(ctx, athenzprog.Options{Environ: p.environ(athenzprog.SIA(), "MODE=init")})
	require.Error(t, err, "an init container that has no identity does not say that all is well")
}

func TestAgent(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	at := p.start(athenzprog.Agent(), io.Discard, "SPIFFE_TRUST_DOMAIN=athenz.io")
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", p.path("made/agent.sock"))
	}, DisableKeepAlives: true}}
	answer, err := client.Post("http://agent/v1/init/none", "application/json", nil)
	require.NoError(t, err)
	require.NoError(t, answer.Body.Close())
	assert.Equal(t, http.StatusBadRequest, answer.StatusCode)
	_, text := get(t, at, "/metrics")
	assert.Contains(t, text, `svidkit_athenz_agent_requests_total{part="agent",code="400"} 1`)
	code, _ := get(t, at, "/ready")
	assert.Equal(t, http.StatusOK, code)
	require.NoError(t, os.Remove(p.path("node.pem")))
	code, text = get(t, at, "/ready")
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.Contains(t, text, "CERT_FILE")

	err = athenzprog.Agent().Run(t.Context(), athenzprog.Options{Environ: p.environ(athenzprog.Agent(), "CERT_FILE="+p.path("provider.pem"), "KEY_FILE="+p.path("provider.key")), Kubernetes: new(http.Client)})
	require.ErrorContains(t, err, "AGENT_SOCKET")
}

func get(t *testing.T, at map[string]net.Addr, path string) (int, string) {
	t.Helper()
	answer, err := http.Get("http://" + at["HEALTH_ADDR"].String() + path)
	require.NoError(t, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	return answer.StatusCode, string(text)
}

func TestCommand(t *testing.T) {
	t.Parallel()
	for _, program := range []athenzprog.Program{athenzprog.Agent(), athenzprog.Provider(), athenzprog.SIA()} {
		var help bytes.Buffer
		run := func(environ []string, out io.Writer, args ...string) error {
			return program.Command(t.Context(), args, environ, out, &help, func(_ context.Context, out io.Writer) error {
				_, err := io.WriteString(out, "shown")
				return err
			})
		}
		require.ErrorIs(t, run(nil, io.Discard, "-help"), flag.ErrHelp)
		for _, row := range program.Table.Variables {
			assert.Contains(t, help.String(), "  "+row.Name+"  (")
		}
		require.ErrorContains(t, run(nil, io.Discard, "surplus"), "surplus")
		require.Error(t, run(nil, io.Discard, "-surplus"))
		require.ErrorContains(t, run([]string{"LOG_LEVEL=loud"}, io.Discard), "LOG_LEVEL")
		var out bytes.Buffer
		require.NoError(t, run(nil, &out, "-demo"))
		assert.Equal(t, "shown", out.String())
	}

	p := newPlace(t)
	ctx, cancel := context.WithCancel(t.Context())
	var out writer = func(text string) {
		if strings.HasPrefix(text, "HEALTH_ADDR: 127.0.0.1:") {
			cancel() // as a signal does
		}
	}
	require.NoError(t, athenzprog.SIA().Command(ctx, nil, p.environ(athenzprog.SIA()), out, io.Discard, nil))
	require.Error(t, ctx.Err())

	// Whatever the reason is: a program that is told to stop and does has not failed.
	stopped, cancelled := context.WithCancelCause(t.Context())
	require.NoError(t, athenzprog.SIA().Run(stopped, athenzprog.Options{Environ: p.environ(athenzprog.SIA()), Started: func(map[string]net.Addr) { cancelled(errors.New("enough")) }}))
}

type writer func(string)

func (w writer) Write(p []byte) (int, error) {
	w(string(p))
	return len(p), nil
}
