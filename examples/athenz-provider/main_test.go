package main

import (
	"bytes"
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"flag"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/internal/test/athenztest"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/pki"
)

var update = flag.Bool("update", false, "write the table in README.md")

// environ returns a good environment with changes: names with their values, of which "" takes one away.
func environ(p *athenztest.Place, changes ...string) []string {
	return athenztest.Environ(map[string]string{
		"HEALTH_ADDR": "127.0.0.1:0", "PROVIDER_SERVICE": athenztest.Provider().String(), "PROVIDER_ADDR": "127.0.0.1:0", "SIGNING_ADDR": "127.0.0.1:0",
		"CERT_FILE": p.Path("provider.pem"), "KEY_FILE": p.Path("provider.key"), "SERVER_CA_CERT": p.Path("roots.pem"), "SERVICE_CA_CERT": p.Path("roots.pem"),
		"ZTS_NAME": cafake.ZTSName, "NODE_NAMES": athenztest.Node, "KUBERNETES_API": "http://127.0.0.1:1",
		"PRIVATE_KEY_DIR": p.Path("private"), "PUBLIC_KEY_DIR": p.Path("public"),
	}, changes...)
}

func TestCommand(t *testing.T) {
	t.Parallel()
	programtest.Command(t, daemon.Run, "athenz-provider", variables, *update)
}

// Each bad value is told by its variable, before anything is made.
func TestRefuses(t *testing.T) {
	t.Parallel()
	p := athenztest.NewPlace(t)
	busy := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer busy.Close()
	p.Certify("other", "k8s.admin.other")
	require.NoError(t, os.Mkdir(p.Path("empty"), 0o700))
	require.NoError(t, os.Mkdir(p.Path("mixed"), 0o700))
	data := must.Get(os.ReadFile(p.Path("public/athenz-init-secret.v1")))(t)
	p.NewKey("other-secret.v1")
	p.Write("mixed/other-secret.v1", data)
	for _, c := range []struct{ changes, want []string }{
		{[]string{"PROVIDER_SERVICE=", "CERT_FILE=", "KEY_FILE=", "SERVICE_CA_CERT="}, []string{"PROVIDER_SERVICE", "CERT_FILE", "KEY_FILE", "SERVICE_CA_CERT"}},
		{[]string{"ZTS_NAME=", "SERVER_CA_CERT=", "NODE_NAMES="}, []string{"ZTS_NAME", "SERVER_CA_CERT", "NODE_NAMES"}},
		{[]string{"PROVIDER_ADDR=off", "SIGNING_ADDR=off"}, []string{"PROVIDER_ADDR", "set one of them"}},
		{[]string{"CERT_FILE=" + p.Path("other.pem"), "KEY_FILE=" + p.Path("other.key")}, []string{"CERT_FILE", "k8s.admin.other", athenztest.Provider().String()}},
		{[]string{"NODE_NAMES=Node"}, []string{"NODE_NAMES", "lower case"}},
		{[]string{"ZTS_NAME=role:x"}, []string{"ZTS_NAME"}},
		{[]string{"TOKEN_EXPIRY=16m"}, []string{"TOKEN_EXPIRY", "15m"}},
		{[]string{"TOKEN_EXPIRY=0s"}, []string{"TOKEN_EXPIRY", "1s"}},
		{[]string{"SECRET_NAME=a/b"}, []string{"SECRET_NAME"}},
		{[]string{"PRIVATE_KEY_DIR=" + p.Path("empty")}, []string{"PRIVATE_KEY_DIR", "put a key there"}},
		{[]string{"PUBLIC_KEY_DIR=" + p.Path("empty")}, []string{"PUBLIC_KEY_DIR", "public key"}},
		{[]string{"SECRET_NAME=other-secret", "PUBLIC_KEY_DIR=" + p.Path("mixed")}, []string{"PUBLIC_KEY_DIR"}},
		{[]string{"KUBERNETES_API=http://10.0.0.1"}, []string{"KUBERNETES_API"}},
		{[]string{"USED_DOCUMENTS=used-documents"}, []string{"USED_DOCUMENTS", "a namespace and a name"}},
		{[]string{"USED_DOCUMENTS=athenz/a/b"}, []string{"USED_DOCUMENTS"}},
		{[]string{"USED_DOCUMENTS=/used"}, []string{"USED_DOCUMENTS"}},
		{[]string{"SIGNING_ADDR=" + busy.Addr().String()}, []string{"SIGNING_ADDR", "in use"}},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // for a program that does not refuse it
		err := daemon.Run(ctx, nil, environ(p, c.changes...), io.Discard, io.Discard)
		cancel()
		require.Error(t, err, c.changes)
		for _, want := range c.want {
			require.ErrorContains(t, err, want, c.changes)
		}
		assert.NotContains(t, err.Error(), "TOP-SECRET", c.changes)
		assert.NoDirExists(t, p.Path("made"), c.changes)
	}
}

// TestProvider runs the provider with its signing service.
func TestProvider(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-11.1-5", "ATH-11.1-6", "ATH-15-6")
	p := athenztest.NewPlace(t)
	at := programtest.Serve(t, daemon.Run, environ(p, "SPIFFE_TRUST_DOMAIN=athenz.io", "SYSTEM_NAMESPACES=a, b"), io.Discard, 3)
	assert.Equal(t, []string{"HEALTH_ADDR", "PROVIDER_ADDR", "SIGNING_ADDR"}, slices.Sorted(maps.Keys(at)))
	code, text := programtest.Get(t, at, "/ready")
	assert.Equal(t, http.StatusOK, code, text)

	post := func(client *http.Client, variable, path string) int {
		answer := must.Get(client.Post("https://"+at[variable]+path, "application/json", strings.NewReader("{}")))(t)
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
		assert.Equal(t, c.code, post(p.MutualTLS(c.cn), c.variable, c.path), c)
	}
	_, text = programtest.Get(t, at, "/metrics")
	metricstest.Require(t, text)
	assert.Contains(t, text, `svidkit_athenz_provider_requests_total{part="provider",code="401"} 2`)
	assert.Contains(t, text, `svidkit_athenz_signing_requests_total{part="signing",code="401"} 2`)

	// Another certificate is served when it is there, and the loss of a key is told.
	p.Certify("provider", athenztest.Provider().String())
	block, _ := pem.Decode(must.Get(os.ReadFile(p.Path("provider.pem")))(t))
	require.NotNil(t, block)
	served := func() []byte {
		conn, err := tls.Dial("tcp", at["PROVIDER_ADDR"], &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: p.CA.Bundle().CertPool()})
		require.NoError(t, err)
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0].Raw
	}
	assert.Equal(t, block.Bytes, served())
	p.Write("provider.key", []byte("half of a key")) // while the files are replaced
	assert.Equal(t, block.Bytes, served())
	code, text = programtest.Get(t, at, "/ready")
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.Contains(t, text, "CERT_FILE")
	p.Certify("provider", athenztest.Provider().String())
	assert.NotEqual(t, block.Bytes, served())
	require.NoError(t, os.Remove(p.Path("public/athenz-init-secret.v1")))
	code, text = programtest.Get(t, at, "/ready")
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.Contains(t, text, "PUBLIC_KEY_DIR")
}

// TestAlone runs each half of the provider without the other.
func TestAlone(t *testing.T) {
	t.Parallel()
	p := athenztest.NewPlace(t)
	at := programtest.Serve(t, daemon.Run, environ(p, "PROVIDER_ADDR=off", "ZTS_NAME=", "SERVER_CA_CERT=", "KUBERNETES_API=", "PUBLIC_KEY_DIR="+p.Path("none"), "CERT_FILE="+p.Path("node.pem"), "KEY_FILE="+p.Path("node.key")), io.Discard, 2)
	assert.Equal(t, []string{"HEALTH_ADDR", "SIGNING_ADDR"}, slices.Sorted(maps.Keys(at)))
	at = programtest.Serve(t, daemon.Run, environ(p, "SIGNING_ADDR=off", "NODE_NAMES=", "HEALTH_ADDR=off", "PRIVATE_KEY_DIR="+p.Path("none")), io.Discard, 1)
	assert.Equal(t, []string{"PROVIDER_ADDR"}, slices.Sorted(maps.Keys(at)))
}

// With USED_DOCUMENTS the replicas share what was used: see package authn/athenz for all that can go wrong.
func TestUsedDocuments(t *testing.T) {
	t.Parallel()
	p, api := athenztest.NewPlace(t), kubetest.Start(t)
	api.Put("/api/v1/namespaces/athenz/configmaps/used-documents", map[string]any{})
	api.Put("/api/v1/namespaces/media-sports/pods/web-0", map[string]any{
		"metadata": map[string]any{"uid": "1"}, "spec": map[string]any{"serviceAccountName": "frontend"}, "status": map[string]any{"phase": "Running", "podIP": "10.1.2.3"},
	})
	signer := must.Get(athenz.NewSigner(p.Path("private"), "", 0))(t)
	document := must.Get(signer(t.Context(), athenztest.Subject()))(t)
	body := must.Get(json.Marshal(map[string]any{
		"provider": athenztest.Provider().String(), "domain": "media.sports", "service": "frontend", "attestationData": document, "attributes": map[string]string{"instanceId": "web-0"},
	}))(t)
	var codes []int
	for range 2 {
		at := programtest.Serve(t, daemon.Run, environ(p, "KUBERNETES_API="+api.URL(), "USED_DOCUMENTS=athenz/used-documents", "SIGNING_ADDR=off", "HEALTH_ADDR=off"), io.Discard, 1)
		answer, err := p.MutualTLS(cafake.ZTSName).Post("https://"+at["PROVIDER_ADDR"]+"/instance", "application/json", bytes.NewReader(body))
		require.NoError(t, err)
		require.NoError(t, answer.Body.Close())
		codes = append(codes, answer.StatusCode)
	}
	assert.Equal(t, []int{200, 403}, codes)
}

// What is not set has the values of the original.
func TestDefaults(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-3.2-9", "ATH-5-9", "ATH-15-8")
	s := must.Get(program.Daemon{Variables: variables}.Read(nil))(t)
	for name, want := range map[string]string{
		"SECRET_NAME": "athenz-init-secret", "PRIVATE_KEY_DIR": "/var/keys/private", "PUBLIC_KEY_DIR": "/var/keys/public",
		"TOKEN_EXPIRY": "5m", "PROVIDER_ADDR": ":4443", "ZTS_NAME": "", // an example is no default
	} {
		assert.Equal(t, want, s.Text(name), name)
	}
}

// With a service key alone the program has ZTS issue its certificate, serves with that and renews it. It begins while ZTS refuses it,
// and says so; what it served before is served on during an outage. The key is registered at Athenz, and is in no file but its own.
func TestServiceKey(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-10.1-5", "ATH-15-1", "ATH-15-2", "ATH-15-6", "ATH-15-7", "ATH-11.1-5")
	p := athenztest.NewPlace(t)
	key := athenztest.RSAKey()
	text := must.Get(pki.MarshalPrivateKeyPEM(key))(t)
	require.NoError(t, os.Mkdir(p.Path("service"), 0o700))
	p.Write("service/service.key", text)
	p.Write("service/service.version", []byte("v1\n"))
	p.ZTS.Change(func(r *cafake.ZTSRules) {
		r.Keys, r.TTL, r.ReadOnly = map[string]crypto.PublicKey{athenztest.Provider().String() + " v1": key.Public()}, 4*time.Second, true
	})
	env := environ(p, "CERT_FILE=", "KEY_FILE=", "SERVICE_KEY_DIR="+p.Path("service"), "ZTS_ENDPOINT="+p.ZTS.Endpoint().URL)
	at := programtest.Serve(t, daemon.Run, env, io.Discard, 3)
	code, said := programtest.Get(t, at, "/ready")
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.Contains(t, said, "SERVICE_KEY_DIR")
	becomesReady := func() {
		p.ZTS.Change(func(r *cafake.ZTSRules) { r.ReadOnly = false })
		require.EventuallyWithT(t, func(c *assert.CollectT) {
			code, said := programtest.Get(t, at, "/ready")
			assert.Equal(c, http.StatusOK, code, said)
		}, time.Minute, 250*time.Millisecond)
	}
	becomesReady()

	serves := func(variable string) *x509.Certificate {
		conn := must.Get(tls.Dial("tcp", at[variable], &tls.Config{
			MinVersion: tls.VersionTLS13, RootCAs: p.CA.Bundle().CertPool(), ServerName: "athenz-callback.k8s-admin.svc.cluster.local",
		}))(t)
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0]
	}
	first := serves("PROVIDER_ADDR")
	assert.Equal(t, "k8s.admin.athenz-callback", first.Subject.CommonName)
	assert.Equal(t, key.Public(), first.PublicKey)
	assert.Equal(t, "k8s.admin.athenz-callback", serves("SIGNING_ADDR").Subject.CommonName)
	zts := p.MutualTLS(cafake.ZTSName)
	zts.Transport.(*http.Transport).TLSClientConfig.ServerName = "athenz-callback.k8s-admin.svc.cluster.local"
	answer, err := zts.Post("https://"+at["PROVIDER_ADDR"]+"/instance", "application/json", strings.NewReader("{}"))
	require.NoError(t, err)
	require.NoError(t, answer.Body.Close())
	assert.Equal(t, http.StatusBadRequest, answer.StatusCode, "ZTS is let in")
	require.Eventually(t, func() bool { return !serves("PROVIDER_ADDR").Equal(first) }, time.Minute, 250*time.Millisecond, "it is renewed")
	p.ZTS.Change(func(r *cafake.ZTSRules) { r.ReadOnly = true })
	second := serves("PROVIDER_ADDR")
	require.Eventually(t, func() bool {
		code, said = programtest.Get(t, at, "/ready")
		return code != http.StatusOK
	}, time.Minute, 250*time.Millisecond)
	assert.Contains(t, said, "expired")
	assert.False(t, time.Now().Before(second.NotAfter))
	becomesReady()
}

// What is wrong with the service key is told by its variable, and no text of the key is.
func TestServiceKeyRefuses(t *testing.T) {
	t.Parallel()
	p := athenztest.NewPlace(t)
	require.NoError(t, os.Mkdir(p.Path("service"), 0o700))
	p.Write("service/service.version", []byte("v1"))
	for _, c := range []struct {
		key, version string
		changes      []string
		want         string
	}{
		{"", "v1", nil, "SERVICE_KEY_DIR"},
		{"TOP-SECRET", "v1", nil, "service.key"},
		{"key", "v 1", nil, "KeyID"},
		{"key", "v1", []string{"ZTS_ENDPOINT="}, "ZTS_ENDPOINT"},
		{"key", "v1", []string{"ZTS_ENDPOINT=http://zts:4443"}, "ZTS_ENDPOINT"},
		{"key", "v1", []string{"CERT_FILE=" + p.Path("provider.pem")}, "CERT_FILE or KEY_FILE is set, too"},
		{"key", "v1", []string{"PROVIDER_ADDR=off", "SERVER_CA_CERT="}, "SERVER_CA_CERT"},
	} {
		text := []byte(c.key)
		if c.key == "key" {
			var err error
			text, err = os.ReadFile(p.Path("provider.key"))
			require.NoError(t, err)
		}
		p.Write("service/service.key", text)
		p.Write("service/service.version", []byte(c.version))
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // for a program that does not refuse it
		err := daemon.Run(ctx, nil, environ(p, append([]string{"CERT_FILE=", "KEY_FILE=", "SERVICE_KEY_DIR=" + p.Path("service"), "ZTS_ENDPOINT=" + p.ZTS.Endpoint().URL}, c.changes...)...), io.Discard, io.Discard)
		cancel()
		require.ErrorContains(t, err, c.want, c)
		assert.NotContains(t, err.Error(), "TOP-SECRET")
	}
}

// The provider has all the rights that it uses and uses all that it has, as its manifest gives them: it compares documents with pods of each
// namespace, and notes which were used.
func TestRightsOfTheManifest(t *testing.T) {
	t.Parallel()
	text := must.Get(os.ReadFile("install.yaml"))(t)
	var manifest bytes.Buffer
	require.NoError(t, (&program.Manifest{Text: strings.ReplaceAll(string(text), "=? ", "=value ")}).Print(&manifest))
	require.Contains(t, manifest.String(), "{name: USED_DOCUMENTS, value: k8s-admin/used-documents}")
	rights := must.Get(kubetest.Rights(manifest.String()))(t)
	p := athenztest.NewPlace(t)
	api, server := kubetest.StartGuard(t, rights["k8s-admin/athenz-callback"])
	api.Put("/api/v1/namespaces/k8s-admin/configmaps/used-documents", map[string]any{})
	at := programtest.Serve(t, daemon.Run, environ(p, "KUBERNETES_API="+server, "USED_DOCUMENTS=k8s-admin/used-documents", "SIGNING_ADDR=off", "HEALTH_ADDR=off"), io.Discard, 1)
	signer := must.Get(athenz.NewSigner(p.Path("private"), "", 0))(t)
	for namespace, domain := range map[string]string{"media-sports": "media.sports", "media-news": "media.news"} {
		for _, name := range []string{"web-0", "web-1"} {
			subject := athenztest.Subject()
			subject.Namespace, subject.Pod, subject.Service.Domain = namespace, name, domain
			api.Put("/api/v1/namespaces/"+namespace+"/pods/"+name, map[string]any{
				"metadata": map[string]any{"uid": "1"}, "spec": map[string]any{"serviceAccountName": "frontend"}, "status": map[string]any{"phase": "Running", "podIP": "10.1.2.3"},
			})
			document := must.Get(signer(t.Context(), subject))(t)
			body := must.Get(json.Marshal(map[string]any{
				"provider": athenztest.Provider().String(), "domain": domain, "service": "frontend", "attestationData": document, "attributes": map[string]string{"instanceId": name},
			}))(t)
			answer, err := p.MutualTLS(cafake.ZTSName).Post("https://"+at["PROVIDER_ADDR"]+"/instance", "application/json", bytes.NewReader(body))
			require.NoError(t, err)
			said := must.Get(io.ReadAll(answer.Body))(t)
			require.NoError(t, answer.Body.Close())
			assert.Equal(t, http.StatusOK, answer.StatusCode, "%s", said)
		}
	}
	api.Done(t, nil)
}
