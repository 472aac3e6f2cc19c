package athenz_test

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/unixsocket"
	zts "github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/athenzname"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

const (
	suffix = "svc.cluster.local"
	secret = "athenz-init-secret"
)

type (
	object = map[string]any
	array  = []any
)

// keys are the folders of the key that signs documents.
type keys struct{ private, public string }

// newKeys makes version 1 of an RSA key.
func newKeys(t testing.TB) keys {
	t.Helper()
	k := keys{t.TempDir(), t.TempDir()}
	k.add(t, "v1", rsaKey())
	return k
}

var rsaKey = sync.OnceValue(func() crypto.Signer {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		panic(err)
	}
	return key
})

func ecKey(t testing.TB, curve elliptic.Curve) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(curve, rand.Reader)
	require.NoError(t, err)
	return key
}

// add writes a version of the key.
func (k keys) add(t testing.TB, version string, key crypto.Signer) {
	t.Helper()
	k.addPublic(t, version, key)
	text, err := pki.MarshalPrivateKeyPEM(key)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(k.private, secret+"."+version), text, 0o600))
}

func (k keys) addPublic(t testing.TB, version string, key crypto.Signer) {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(k.public, secret+"."+version), pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), 0o600))
}

func (k keys) signer(t testing.TB) *athenz.Signer {
	t.Helper()
	s, err := athenz.NewSigner(athenz.SignerOptions{Dir: k.private})
	require.NoError(t, err)
	return s
}

func (k keys) verifier(t testing.TB) *athenz.Verifier {
	t.Helper()
	v, err := athenz.NewVerifier(athenz.VerifierOptions{Dir: k.public})
	require.NoError(t, err)
	return v
}

// cluster is all of it: a node with its agent, the signing service, ZTS, the provider and an API server, on this machine with
// mutual TLS.
type cluster struct {
	t        testing.TB
	ca       *spiffetest.CA
	zts      *cafake.ZTS
	api      *kubetest.Server
	keys     keys
	provider string // its URL
	volumes  *athenz.Volumes
	socket   string
	config   athenz.AgentConfig
	stop     func() // the agent
	log      *record
	signed   int // documents, by sign
}

// record is a log that the test reads.
type record struct {
	mu   sync.Mutex
	text strings.Builder
}

func (r *record) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.Write(p)
}

func (r *record) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.String()
}

const (
	account   = "frontend"
	namespace = "media-sports"
	node      = "k8s.admin.k8s-node"
)

func newCluster(t testing.TB) *cluster {
	t.Helper()
	c := &cluster{t: t, ca: spiffetest.NewCA(t, "athenz.example"), api: kubetest.Start(t), keys: newKeys(t), log: new(record)}
	logger := slog.New(slog.NewTextHandler(c.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	c.zts = cafake.NewZTS(t, c.ca, "/ns/"+namespace+"/sa/"+account)
	td := c.ca.TrustDomain()
	instance := cafake.AthenzInstance(c.zts.Fake)
	c.put("web-0", nil)

	apiServer, err := athenz.NewAPIServer(c.api.URL(), c.api.Client())
	require.NoError(t, err)
	ztsOnly, err := athenz.ClientCertificate(td, c.ca.Bundle(), cafake.ZTSName)
	require.NoError(t, err)
	provider, err := athenz.NewProvider(athenz.ProviderConfig{
		Service: instance.Provider, ZTS: ztsOnly, Verifier: c.keys.verifier(t), Pods: apiServer, Suffix: suffix,
		Mapping: athenzname.Mapping{AdminDomain: "k8s.admin"}, TrustDomain: td, Lifetime: 90 * time.Minute, Logger: logger,
	})
	require.NoError(t, err)
	c.provider = serveTLS(t, provider, c.zts.Credential(instance.Provider.String()))
	c.zts.Change(func(r *cafake.ZTSRules) { r.Callback = c.provider })

	nodes, err := athenz.ClientCertificate(td, c.ca.Bundle(), node)
	require.NoError(t, err)
	signing, err := athenz.NewSigningHandler(c.keys.signer(t), nodes, logger)
	require.NoError(t, err)
	client, err := athenz.NewSigningClient(serveTLS(t, signing, c.zts.Credential("k8s.admin.jwt-service")), c.mutualTLS(node))
	require.NoError(t, err)

	kubelet := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, "/pods", r.URL.Path)
		w.Header().Set("Content-Type", "application/json")
		answer, err := c.api.Client().Get(c.api.URL() + "/api/v1/namespaces/" + namespace + "/pods")
		if assert.NoError(t, err) {
			defer answer.Body.Close()
			_, _ = io.Copy(w, answer.Body)
		}
	}))
	t.Cleanup(kubelet.Close)
	pods, err := athenz.NewKubelet(kubelet.URL, nil)
	require.NoError(t, err)

	folder := t.TempDir()
	c.volumes, c.socket = athenz.NewVolumes(filepath.Join(folder, "volumes")), filepath.Join(folder, "agent.sock")
	c.config = athenz.AgentConfig{
		Volumes: c.volumes, Pods: pods, Signer: client, Provider: instance.Provider, Suffix: suffix, TrustDomain: td,
		Mapping: athenzname.Mapping{AdminDomain: "k8s.admin"}, Logger: logger,
		CA: func(r athenz.AgentRequest) (athenz.InstanceCA, error) {
			e := c.zts.Endpoint()
			e.Token = r.Token
			ca, err := zts.New(zts.Options{Endpoint: e, Instance: r.Instance, Certificate: r.Certificate, WithServiceToken: true})
			if err != nil {
				return nil, err
			}
			return ca, nil
		},
	}
	c.start()
	return c
}

// start starts the agent, and stops one that runs.
func (c *cluster) start() {
	c.t.Helper()
	if c.stop != nil {
		c.stop()
	}
	agent, err := athenz.NewAgent(c.config)
	require.NoError(c.t, err)
	server := &unixsocket.Server{Path: c.socket, Handler: agent}
	require.NoError(c.t, server.Listen())
	ctx, cancel := context.WithCancel(context.WithoutCancel(c.t.Context()))
	var wg sync.WaitGroup
	wg.Go(func() { assert.NoError(c.t, server.Run(ctx)) })
	c.stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	c.t.Cleanup(c.stop)
}

func serveTLS(t testing.TB, h http.Handler, own *pki.Credential) string {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.TLS = &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{*own.TLSCertificate()}, ClientAuth: tls.RequestClientCert}
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	s.StartTLS()
	t.Cleanup(s.Close)
	return s.URL
}

// mutualTLS returns a client with a certificate of a common name; an empty one means none.
func (c *cluster) mutualTLS(cn string) *http.Client {
	cfg := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: c.ca.Bundle().CertPool()}
	if cn != "" {
		cfg.Certificates = []tls.Certificate{*c.zts.Credential(cn).TLSCertificate()}
	}
	tr := &http.Transport{TLSClientConfig: cfg}
	c.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// put stores a pod that runs, after edit has changed it.
func (c *cluster) put(name string, edit func(pod object)) {
	pod := object{
		"metadata": object{"uid": "8c5b0a3e-" + name},
		"spec":     object{"serviceAccountName": account},
		"status":   object{"phase": "Running", "podIP": "10.1.2.3", "podIPs": array{object{"ip": "10.1.2.3"}, object{"ip": "fd00::3"}}},
	}
	if edit != nil {
		edit(pod)
	}
	c.api.Put("/api/v1/namespaces/"+namespace+"/pods/"+name, pod)
}

// pod mounts a volume for a pod and returns the client that is in it.
func (c *cluster) pod(name string) *athenz.AgentClient {
	c.t.Helper()
	mount := "/var/lib/kubelet/pods/" + name + "/volumes/athenz.kubernetes.io~athenz-volume-driver/sia-identity"
	handle, err := c.volumes.Add(mount, namespace, name)
	require.NoError(c.t, err)
	assert.Equal(c.t, athenz.VolumeHandle(mount), handle)
	client, err := athenz.NewAgentClient(c.socket, filepath.Join(filepath.Dir(c.socket), "volumes", handle, "mount", "id"))
	require.NoError(c.t, err)
	return client
}

// TestSystem takes a pod through its life.
func TestSystem(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-1-1", "ATH-1-2", "ATH-1-3", "ATH-1-4", "ATH-1-5", "ATH-2-1", "ATH-2-8", "ATH-7.1-1", "ATH-7.1-3", "ATH-7.1-4",
		"ATH-7.1-6", "ATH-7.1-11", "ATH-7.2-1", "ATH-7.2-2", "ATH-7.2-3", "ATH-7.2-4", "ATH-7.2-5", "ATH-7.2-6", "ATH-9-3", "ATH-9-6", "ATH-9-8",
		"ATH-9-9", "ATH-9-10", "ATH-11.1-4", "ATH-11.1-8", "ATH-11.3-2", "ATH-12-2", "ATH-18-5")
	c := newCluster(t)
	pod := c.pod("web-0")

	first, err := pod.Init(t.Context())
	require.NoError(t, err)
	leaf := first.Credential.Leaf()
	assert.Equal(t, "media.sports.frontend", leaf.Subject.CommonName)
	assert.Equal(t, []string{"frontend.media-sports.svc.cluster.local", "web-0.instanceid.athenz.svc.cluster.local"}, leaf.DNSNames)
	require.Len(t, leaf.IPAddresses, 1)
	assert.Equal(t, "10.1.2.3", leaf.IPAddresses[0].String())
	require.Len(t, leaf.URIs, 1)
	assert.Equal(t, "spiffe://media.sports/sa/frontend", leaf.URIs[0].String())
	assert.WithinDuration(t, time.Now().Add(90*time.Minute), leaf.NotAfter, time.Minute, "certExpiryTime of the provider")
	key, ok := leaf.PublicKey.(*rsa.PublicKey)
	require.True(t, ok)
	assert.Equal(t, 2048, key.N.BitLen())
	require.Len(t, first.Roots, 1)
	assert.True(t, first.Roots[0].Equal(c.ca.Root()))
	ntoken, err := athenz.VerifyServiceToken(t.Context(), first.ServiceToken(), func(_ context.Context, owner athenzname.Service, id string) (crypto.PublicKey, error) {
		assert.Equal(t, "sys.auth.zts", owner.String())
		assert.Equal(t, "0", id)
		return c.zts.PublicKey(), nil
	})
	require.NoError(t, err)
	assert.Equal(t, "media.sports.frontend", ntoken.Service.String())

	_, err = pod.Init(t.Context())
	require.ErrorContains(t, err, "answers 403", "a second init")

	second, err := pod.Refresh(t.Context(), first.Credential)
	require.NoError(t, err)
	assert.NotEqual(t, leaf.PublicKey, second.Credential.Leaf().PublicKey)

	// The answer was lost: the certificate before is good once more, and again.
	again, err := pod.Refresh(t.Context(), first.Credential)
	require.NoError(t, err)
	again, err = pod.Refresh(t.Context(), again.Credential)
	require.NoError(t, err)

	// One that was superseded twice would revoke the instance for good: the agent does not show it to ZTS.
	before := c.zts.Requests()
	for _, old := range []*pki.Credential{first.Credential, second.Credential} {
		_, err = pod.Refresh(t.Context(), old)
		require.ErrorContains(t, err, "superseded")
	}
	assert.Equal(t, before, c.zts.Requests())
	assert.False(t, c.zts.Revoked(cafake.AthenzInstance(c.zts.Fake)))

	// The signing key is rotated: the public key first.
	next := ecKey(t, elliptic.P256())
	c.keys.addPublic(t, "v2", next)
	c.put("web-1", nil)
	_, err = c.pod("web-1").Init(t.Context())
	require.NoError(t, err)
	c.keys.add(t, "v2", next)
	require.NoError(t, os.Remove(filepath.Join(c.keys.public, secret+".v1")))
	c.put("web-2", nil)
	_, err = c.pod("web-2").Init(t.Context())
	require.NoError(t, err)

	// The agent is restarted, and knows all that it has to.
	c.start()
	_, err = pod.Refresh(t.Context(), first.Credential)
	require.ErrorContains(t, err, "superseded")
	last, err := pod.Refresh(t.Context(), again.Credential)
	require.NoError(t, err)

	// The pod ends, and is gone.
	c.put("web-0", func(o object) { o["status"].(object)["phase"] = "Succeeded" })
	_, err = pod.Refresh(t.Context(), last.Credential)
	require.ErrorContains(t, err, "answers 500")
	assert.Contains(t, c.log.String(), "its phase is Succeeded")
	c.api.Remove("/api/v1/namespaces/" + namespace + "/pods/web-0")
	_, err = pod.Refresh(t.Context(), last.Credential)
	require.ErrorContains(t, err, "answers 500")
	_, err = c.pod("web-0").Init(t.Context())
	require.ErrorContains(t, err, "the kubelet does not know the pod")

	// Nothing that is secret is in a log or in a file.
	secrets := []string{"eyJ", "PRIVATE KEY", "MII", ";s="}
	for _, s := range secrets {
		assert.NotContains(t, c.log.String(), s)
	}
	require.NoError(t, filepath.WalkDir(filepath.Dir(c.socket), func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		for _, s := range secrets {
			assert.NotContains(t, string(data), s, path)
		}
		return err
	}))
}

type podFunc func(ctx context.Context, namespace, name string) (*athenz.Pod, error)

func (f podFunc) Pod(ctx context.Context, namespace, name string) (*athenz.Pod, error) {
	return f(ctx, namespace, name)
}

// confirm posts a confirmation, and returns the status and the body of the answer.
func (c *cluster) confirm(client *http.Client, path string, body any) (int, string) {
	c.t.Helper()
	data, ok := body.(string)
	if !ok {
		text, err := json.Marshal(body)
		require.NoError(c.t, err)
		data = string(text)
	}
	answer, err := client.Post(c.provider+path, "application/json", strings.NewReader(data))
	require.NoError(c.t, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	require.NoError(c.t, err)
	return answer.StatusCode, string(text)
}

func subject() athenz.PodSubject {
	return athenz.PodSubject{
		Namespace: namespace, Pod: "web-0", Service: athenzname.Service{Domain: "media.sports", Name: "frontend"}, IP: netip.MustParseAddr("10.1.2.3"),
	}
}

// sign signs for what a pod says of itself, after edit has changed it.
func (c *cluster) sign(edit func(*athenz.PodSubject)) string {
	c.t.Helper()
	s := subject()
	if edit != nil {
		edit(&s)
	}
	c.signed++ // two documents of one second are the same
	signer, err := athenz.NewSigner(athenz.SignerOptions{Dir: c.keys.private, Lifetime: 5*time.Minute + time.Duration(c.signed)*time.Second})
	require.NoError(c.t, err)
	text, err := signer.SignDocument(c.t.Context(), s)
	require.NoError(c.t, err)
	return text
}

func confirmation(document string) object {
	return object{
		"provider": "k8s.admin.athenz-callback", "domain": "media.sports", "service": "frontend", "attestationData": document,
		"attributes": object{
			"instanceId": "web-0", "clientIP": "10.0.0.1", "sanIP": "10.1.2.3",
			"sanDNS": "frontend.media-sports.svc.cluster.local,web-0.instanceid.athenz.svc.cluster.local",
			"sanURI": "spiffe://media.sports/sa/frontend",
		},
	}
}

func TestProvider(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-11.1-1", "ATH-11.1-2", "ATH-11.1-5", "ATH-11.1-6", "ATH-11.1-8", "ATH-11.1-9", "ATH-11.1-10", "ATH-11.2-1", "ATH-11.2-2", "ATH-11.2-3", "ATH-11.2-4",
		"ATH-11.2-5", "ATH-11.3-2", "ATH-12-1", "ATH-12-2", "ATH-12-3", "ATH-12-4", "ATH-12-5", "ATH-12-6", "ATH-12-8", "ATH-12-9", "ATH-12-10", "ATH-12-12",
		"ATH-18-9")
	c := newCluster(t)
	client := c.mutualTLS(cafake.ZTSName)

	for _, path := range []string{"/instance", "/identity"} {
		doc := c.sign(nil)
		code, text := c.confirm(client, path, confirmation(doc))
		require.Equal(t, http.StatusOK, code, text)
		var answer struct {
			Provider, Domain, Service, AttestationData string
			Attributes                                 map[string]string
		}
		require.NoError(t, json.Unmarshal([]byte(text), &answer))
		assert.Equal(t, "frontend", answer.Service)
		assert.Equal(t, doc, answer.AttestationData)
		assert.Equal(t, "web-0", answer.Attributes["instanceId"])
		assert.Equal(t, "90", answer.Attributes["certExpiryTime"])
		code, text = c.confirm(client, path, confirmation(doc))
		assert.Equal(t, http.StatusForbidden, code)
		assert.Contains(t, text, "used before")
	}

	// Other callers.
	for cn, want := range map[string]int{"": 401, "media.sports.frontend": 401, "sys.auth.zts:role.x": 401, "ZTS.example.cloud": 403} {
		code, text := c.confirm(c.mutualTLS(cn), "/instance", confirmation("x.y.z"))
		assert.Equal(t, want, code, "%q: %s", cn, text)
	}
	stranger := spiffetest.NewCA(t, "athenz.example")
	chain, key := stranger.Certificate("/zts", func(x *x509.Certificate) {
		x.URIs = nil
		x.Subject.CommonName = cafake.ZTSName
		x.DNSNames = []string{"zts"}
	})
	forged, err := pki.NewCredential(chain, key)
	require.NoError(t, err)
	tr := &http.Transport{TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: c.ca.Bundle().CertPool(), Certificates: []tls.Certificate{*forged.TLSCertificate()}}}
	defer tr.CloseIdleConnections()
	code, _ := c.confirm(&http.Client{Transport: tr}, "/instance", confirmation("x.y.z"))
	assert.Equal(t, http.StatusUnauthorized, code, "the name of ZTS under other roots")

	attribute := func(name, value string) func(object) {
		return func(o object) { o["attributes"].(object)[name] = value }
	}
	member := func(name string, value any) func(object) { return func(o object) { o[name] = value } }
	good := c.sign(nil)
	for _, v := range []struct {
		name string
		edit func(object)
		doc  func(*athenz.PodSubject)
		pod  func(object)
		code int
		says string
	}{
		{"another provider", member("provider", "k8s.admin.other"), nil, nil, 403, "another provider"},
		{"no provider", member("provider", ""), nil, nil, 400, "missing or empty"},
		{"no domain", member("domain", ""), nil, nil, 400, "missing or empty"},
		{"no service", member("service", ""), nil, nil, 400, "missing or empty"},
		{"no document", member("attestationData", ""), nil, nil, 400, "attestation data"},
		{"a number", member("service", 7), nil, nil, 400, "JSON"},
		{"attributes are a list", member("attributes", array{}), nil, nil, 400, "JSON"},
		{"a service that is none", member("service", "a/b"), nil, nil, 400, "names consist of"},
		{"a domain that is no namespace", member("domain", "media_sports"), nil, nil, 403, "no namespace"},
		{"another service", member("service", "backend"), nil, nil, 403, "another service"},
		{"another domain", member("domain", "media.news"), nil, nil, 403, "another service"},
		{"a document that is none", member("attestationData", "abc"), nil, nil, 403, "invalid identity document"},
		{"a document of another namespace", nil, func(s *athenz.PodSubject) { s.Namespace = "media-news" }, nil, 403, "namespace"},
		{"a document of another pod", nil, func(s *athenz.PodSubject) { s.Pod = "web-1" }, nil, 403, "no such pod"},
		{"a document of another address", nil, func(s *athenz.PodSubject) { s.IP = netip.MustParseAddr("10.1.2.4") }, nil, 403, "address"},
		{"a document of the second address", nil, func(s *athenz.PodSubject) { s.IP = netip.MustParseAddr("fd00::3") }, nil, 403, "address"},
		{"a pod of another account", nil, nil, func(o object) { o["spec"].(object)["serviceAccountName"] = "backend" }, 403, "service account"},
		{"a pod that has failed", nil, nil, func(o object) { o["status"].(object)["phase"] = "Failed" }, 403, "Failed"},
		{"a pod that has succeeded", nil, nil, func(o object) { o["status"].(object)["phase"] = "Succeeded" }, 403, "Succeeded"},
		{"a pod that is being deleted", nil, nil, func(o object) { o["metadata"].(object)["deletionTimestamp"] = "2026-01-01T00:00:00Z" }, 403, "deleted"},
		{"a pod without an address", nil, nil, func(o object) { o["status"] = object{"phase": "Pending"} }, 403, "no address"},
		{"another instance", attribute("instanceId", "web-1"), nil, nil, 403, "instance ID"},
		{"another's address", attribute("sanIP", "10.1.2.3,10.1.2.9"), nil, nil, 403, "10.1.2.9"},
		{"an address that is none", attribute("sanIP", "x"), nil, nil, 403, "address"},
		{"another's DNS name", attribute("sanDNS", "backend.media-sports.svc.cluster.local"), nil, nil, 403, "backend"},
		{"another instance's DNS name", attribute("sanDNS", "web-1.instanceid.athenz.svc.cluster.local"), nil, nil, 403, "web-1"},
		{"a DNS name below", attribute("sanDNS", "a.frontend.media-sports.svc.cluster.local"), nil, nil, 403, "DNS name"},
		{"a wildcard above", attribute("sanDNS", "*.media-sports.svc.cluster.local"), nil, nil, 403, "DNS name"},
		{"an empty DNS name", attribute("sanDNS", "frontend.media-sports.svc.cluster.local,"), nil, nil, 403, "DNS name"},
		{"doubled hyphens", attribute("sanDNS", "frontend.media--sports.svc.cluster.local"), nil, nil, 403, "DNS name"},
		{"another's SPIFFE ID", attribute("sanURI", "spiffe://media.sports/sa/backend"), nil, nil, 403, "URI"},
		{"a SPIFFE ID of another domain", attribute("sanURI", "spiffe://media.news/sa/frontend"), nil, nil, 403, "URI"},
		{"a SPIFFE ID of another namespace", attribute("sanURI", "spiffe://athenz.example/ns/other/sa/media.sports.frontend"), nil, nil, 403, "URI"},
		{"a SPIFFE ID of another trust domain", attribute("sanURI", "spiffe://other.example/ns/media-sports/sa/media.sports.frontend"), nil, nil, 403, "URI"},
		{"the SPIFFE ID of the seed's era", attribute("sanURI", "spiffe://cluster.local/ns/media-sports/sa/frontend"), nil, nil, 403, "URI"},
		{"a URI that is none", attribute("sanURI", "https://example.org/"), nil, nil, 403, "URI"},
		{"another instance's URI", attribute("sanURI", "athenz://instanceid/k8s.admin.athenz-callback/web-1"), nil, nil, 403, "URI"},
		{"another provider's URI", attribute("sanURI", "athenz://instanceid/k8s.admin.other/web-0"), nil, nil, 403, "URI"},
	} {
		t.Run(v.name, func(t *testing.T) {
			c.put("web-0", v.pod)
			doc := good
			if v.doc != nil {
				doc = c.sign(v.doc)
			}
			body := confirmation(doc)
			if v.edit != nil {
				v.edit(body)
			}
			code, text := c.confirm(client, "/instance", body)
			assert.Equal(t, v.code, code, text)
			assert.Contains(t, text, v.says)
		})
	}
	c.put("web-0", nil)
	for _, body := range []string{"", "{", "[]", "null", `"x"`, `{"provider":"a","provider":"b"}`, strings.Repeat("[", 1<<16), strings.Repeat(" ", 1<<17)} {
		code, _ := c.confirm(client, "/instance", body)
		assert.Equal(t, http.StatusBadRequest, code, "%.20q", body)
	}

	// What was refused is not used up, and all other forms of the names are good.
	body := confirmation(good)
	attributes := body["attributes"].(object)
	attributes["instanceId"] = "8c5b0a3e-web-0"
	attributes["sanIP"] = "10.1.2.3,fd00:0::3"
	attributes["sanDNS"] = "*.frontend.media-sports.svc.cluster.local,8c5b0a3e-web-0.instanceid.athenz.svc.cluster.local"
	attributes["sanURI"] = "spiffe://athenz.example/ns/media-sports/sa/media.sports.frontend,athenz://instanceid/k8s.admin.athenz-callback/8c5b0a3e-web-0"
	body["domain"] = "Media.Sports"
	code, text := c.confirm(client, "/instance", body)
	assert.Equal(t, http.StatusOK, code, text)

	// A refresh has no document.
	body = confirmation("")
	code, text = c.confirm(client, "/refresh", body)
	assert.Equal(t, http.StatusOK, code, text)
	body["attributes"].(object)["instanceId"] = ""
	code, _ = c.confirm(client, "/refresh", body)
	assert.Equal(t, http.StatusBadRequest, code)
	body = confirmation(good) // if there is one, it has to be new
	code, _ = c.confirm(client, "/refresh", body)
	assert.Equal(t, http.StatusForbidden, code)
	c.api.Remove("/api/v1/namespaces/" + namespace + "/pods/web-0")
	code, text = c.confirm(client, "/refresh", confirmation(""))
	assert.Equal(t, http.StatusForbidden, code, text)

	c.api.FailNext(1, kubetest.Fault{Code: 503}, nil)
	code, text = c.confirm(client, "/refresh", confirmation(""))
	assert.Equal(t, http.StatusServiceUnavailable, code, text)

	answer, err := c.mutualTLS("").Get(c.provider + "/healthz")
	require.NoError(t, err)
	defer answer.Body.Close()
	assert.Equal(t, http.StatusOK, answer.StatusCode)
}

// TestReplayedInAnotherForm has a document be replayed in forms that say the same, of which the second signature of ECDSA is a
// good one.
func TestReplayedInAnotherForm(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-12-12")
	c := newCluster(t)
	client := c.mutualTLS(cafake.ZTSName)
	key := ecKey(t, elliptic.P256())
	c.keys.add(t, "v2", key)
	document := c.sign(nil)
	code, text := c.confirm(client, "/instance", confirmation(document))
	require.Equal(t, http.StatusOK, code, text)

	parts := strings.Split(document, ".")
	signature, err := base64.RawURLEncoding.DecodeString(parts[2])
	require.NoError(t, err)
	other := new(big.Int).Sub(key.Params().N, new(big.Int).SetBytes(signature[32:]))
	malleated := parts[0] + "." + parts[1] + "." + base64.RawURLEncoding.EncodeToString(append(signature[:32:32], other.FillBytes(make([]byte, 32))...))
	_, err = c.keys.verifier(t).Verify(malleated)
	require.NoError(t, err, "it is a good signature, too")
	code, text = c.confirm(client, "/instance", confirmation(malleated))
	assert.Equal(t, http.StatusForbidden, code)
	assert.Contains(t, text, "used before")

	last := strings.IndexByte("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", parts[2][len(parts[2])-1])
	trailing := parts[2][:len(parts[2])-1] + string("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"[last|1])
	for name, form := range map[string]string{
		"as it was": document, "padding": document + "==", "padding of the payload": parts[0] + "." + parts[1] + "=." + parts[2], "bits at the end": parts[0] + "." + parts[1] + "." + trailing,
		"a space": document + " ", "a line break": parts[0] + ".\n" + parts[1] + "." + parts[2], "a fourth part": document + ".", "Bearer": "Bearer " + document,
		"base64 with + and /": strings.NewReplacer("-", "+", "_", "/").Replace(document + "="),
	} {
		code, _ := c.confirm(client, "/instance", confirmation(form))
		assert.Equal(t, http.StatusForbidden, code, name)
		code, _ = c.confirm(client, "/refresh", confirmation(form))
		assert.Equal(t, http.StatusForbidden, code, name)
	}
}

// TestProviderSharesUses has two replicas of a provider with one memory.
func TestProviderSharesUses(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	ztsOnly, err := athenz.ClientCertificate(c.ca.TrustDomain(), c.ca.Bundle(), cafake.ZTSName)
	require.NoError(t, err)
	apiServer, err := athenz.NewAPIServer(c.api.URL(), c.api.Client())
	require.NoError(t, err)
	var mu sync.Mutex
	used := map[[32]byte]bool{}
	var failure error
	cfg := athenz.ProviderConfig{
		Service: athenzname.Service{Domain: "k8s.admin", Name: "athenz-callback"}, ZTS: ztsOnly, Verifier: c.keys.verifier(t), Pods: apiServer, Suffix: suffix,
		FirstUse: func(_ context.Context, document [32]byte, expires time.Time) (bool, error) {
			mu.Lock()
			defer mu.Unlock()
			first := !used[document]
			used[document] = true
			assert.WithinDuration(t, time.Now().Add(5*time.Minute), expires, time.Minute)
			return first, failure
		},
	}
	doc := c.sign(nil)
	var codes []int
	for range 2 {
		p, err := athenz.NewProvider(cfg)
		require.NoError(t, err)
		c.provider = serveTLS(t, p, c.zts.Credential("k8s.admin.athenz-callback"))
		code, _ := c.confirm(c.mutualTLS(cafake.ZTSName), "/instance", confirmation(doc))
		codes = append(codes, code)
	}
	assert.Equal(t, []int{200, 403}, codes)
	failure = errors.New("the database is away")
	code, text := c.confirm(c.mutualTLS(cafake.ZTSName), "/instance", confirmation(c.sign(nil)))
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.NotContains(t, text, "database")
}

func TestNewProvider(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-2-12", "ATH-18-7")
	c := newCluster(t)
	ztsOnly, err := athenz.ClientCertificate(c.ca.TrustDomain(), c.ca.Bundle(), cafake.ZTSName)
	require.NoError(t, err)
	apiServer, err := athenz.NewAPIServer(c.api.URL(), c.api.Client())
	require.NoError(t, err)
	good := athenz.ProviderConfig{
		Service: athenzname.Service{Domain: "k8s.admin", Name: "athenz-callback"}, ZTS: ztsOnly, Verifier: c.keys.verifier(t), Pods: apiServer, Suffix: suffix,
		DoubledHyphens: true,
	}
	for name, edit := range map[string]func(*athenz.ProviderConfig){
		"service":  func(cfg *athenz.ProviderConfig) { cfg.Service.Name = "" },
		"ZTS":      func(cfg *athenz.ProviderConfig) { cfg.ZTS = nil },
		"verifier": func(cfg *athenz.ProviderConfig) { cfg.Verifier = nil },
		"pods":     func(cfg *athenz.ProviderConfig) { cfg.Pods = nil },
		"suffix":   func(cfg *athenz.ProviderConfig) { cfg.Suffix = "" },
		"lifetime": func(cfg *athenz.ProviderConfig) { cfg.Lifetime = 90 * time.Second },
		"negative": func(cfg *athenz.ProviderConfig) { cfg.Lifetime = -time.Minute },
		"mapping":  func(cfg *athenz.ProviderConfig) { cfg.Mapping.AdminDomain = "A" },
	} {
		cfg := good
		edit(&cfg)
		_, err := athenz.NewProvider(cfg)
		require.ErrorContains(t, err, "athenz: new provider: ", name)
	}
	// A domain with a hyphen, and its DNS names in both forms.
	p, err := athenz.NewProvider(good)
	require.NoError(t, err)
	c.provider = serveTLS(t, p, c.zts.Credential("k8s.admin.athenz-callback"))
	c.api.Put("/api/v1/namespaces/foo-bar--baz/pods/web-0", object{
		"metadata": object{"uid": "u"}, "spec": object{"serviceAccountName": account}, "status": object{"phase": "Running", "podIP": "10.1.2.3"},
	})
	for name, want := range map[string]int{
		"frontend.foo-bar-baz.svc.cluster.local": 200, "frontend.foo-bar--baz.svc.cluster.local": 200, "*.frontend.foo-bar--baz.svc.cluster.local": 200,
		"frontend.foo-bar---baz.svc.cluster.local": 403,
	} {
		body := confirmation("")
		body["domain"] = "foo.bar-baz"
		body["attributes"] = object{"instanceId": "web-0", "sanDNS": name}
		code, text := c.confirm(c.mutualTLS(cafake.ZTSName), "/refresh", body)
		assert.Equal(t, want, code, "%s: %s", name, text)
	}
}

// TestLongPrincipal has one that is too long for a common name: ZTS would not refresh what has none.
func TestLongPrincipal(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	long := strings.Repeat("a", 60)
	c.zts.Change(func(r *cafake.ZTSRules) { r.Services = append(r.Services, "media.sports."+long) })
	c.put("web-0", func(o object) { o["spec"].(object)["serviceAccountName"] = long })
	_, err := c.pod("web-0").Init(t.Context())
	require.ErrorContains(t, err, "the pod cannot have an identity")
	assert.Contains(t, c.log.String(), "a common name 64 at most")
	c.put("web-0", func(o object) { o["spec"].(object)["serviceAccountName"] = long[:51] })
	c.zts.Change(func(r *cafake.ZTSRules) { r.Services = append(r.Services, "media.sports."+long[:51]) })
	i, err := c.pod("web-0").Init(t.Context())
	require.NoError(t, err)
	assert.Len(t, i.Credential.Leaf().Subject.CommonName, 64)
	_, err = c.pod("gone-0").Init(t.Context())
	var told interface {
		Retryable() (time.Duration, bool)
	}
	require.ErrorAs(t, err, &told)
	_, retry := told.Retryable()
	assert.True(t, retry, "the kubelet may not know it yet")
}

func newTestCA(t testing.TB) *spiffetest.CA {
	t.Helper()
	return spiffetest.NewCA(t, "athenz.example")
}
