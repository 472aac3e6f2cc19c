// Package athenztest is what the agent of a node works with, for tests: a signing service, ZTS, the provider
// that it asks, a kubelet and an API server, on this machine with mutual TLS.
package athenztest

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/testkey"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// Names in the cluster.
const (
	Suffix    = "svc.cluster.local"
	Secret    = "athenz-init-secret" // the name of the key
	Account   = "frontend"
	Namespace = "media-sports"
	Node      = "k8s.admin.k8s-node"
)

type (
	// Object and Array are JSON.
	Object = map[string]any
	Array  = []any
)

// Keys are the directories of the key that signs documents.
type Keys struct{ Private, Public string }

// NewKeys makes version 1 of an RSA key.
func NewKeys(t testing.TB) Keys {
	t.Helper()
	k := Keys{t.TempDir(), t.TempDir()}
	k.Add(t, "v1", RSAKey())
	return k
}

// RSAKey returns an RSA key, which is always the same.
func RSAKey() crypto.Signer { return testkey.RSA() }

// Add writes a version of the key.
func (k Keys) Add(t testing.TB, version string, key crypto.Signer) {
	t.Helper()
	k.AddPublic(t, version, key)
	text, err := pki.MarshalPrivateKeyPEM(key)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(k.Private, Secret+"."+version), text, 0o600))
}

// AddPublic writes the public key of a version.
func (k Keys) AddPublic(t testing.TB, version string, key crypto.Signer) {
	t.Helper()
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	must(t, err)
	must(t, os.WriteFile(filepath.Join(k.Public, Secret+"."+version),
		pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), 0o600))
}

// Signer returns a signer with the private keys.
func (k Keys) Signer(t testing.TB) athenz.Signer {
	t.Helper()
	s, err := athenz.NewSigner(k.Private, "", 0)
	must(t, err)
	return s
}

// Verifier returns a verifier with the public keys.
func (k Keys) Verifier(t testing.TB) *athenz.Verifier {
	t.Helper()
	v, err := athenz.NewVerifier(k.Public, "")
	must(t, err)
	return v
}

// Log is a log that a test reads.
type Log struct {
	mu   sync.Mutex
	text strings.Builder
}

// Write implements [io.Writer].
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// String returns what was written.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Cluster is all of it.
type Cluster struct {
	CA       *spiffetest.CA
	ZTS      *cafake.ZTS
	API      *kubetest.Server
	Keys     Keys
	Provider string           // its URL
	Signer   athenz.Signer    // a client of the signing service
	Pods     athenz.PodSource // the kubelet
	Log      *Log

	t      testing.TB
	mu     sync.Mutex
	signed int // documents, by Sign
}

// New starts a cluster with the pod web-0.
func New(t testing.TB) *Cluster {
	t.Helper()
	c := &Cluster{t: t, CA: spiffetest.NewCA(t, "athenz.example"), API: kubetest.Start(t), Keys: NewKeys(t),
		Log: new(Log)}
	logger := c.Logger()
	c.ZTS = cafake.NewZTS(t, c.CA, "/ns/"+Namespace+"/sa/"+Account)
	c.Put("web-0", nil)

	cfg := c.ProviderConfig()
	cfg.TrustDomain = c.CA.TrustDomain()
	c.Provider = c.ServeProvider(cfg)
	c.ZTS.Change(func(r *cafake.ZTSRules) { r.Callback = c.Provider })

	nodes, err := athenz.ClientCertificate(c.CA.TrustDomain(), c.CA.Bundle(), Node)
	must(t, err)
	signing, err := athenz.NewSigningHandler(c.Keys.Signer(t), nodes, logger)
	must(t, err)
	c.Signer, err = athenz.NewSigningClient(c.ServeTLS(signing, "k8s.admin.jwt-service"), c.MutualTLS(Node))
	must(t, err)

	kubelet := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/pods" {
			t.Errorf("the kubelet is asked for %s", r.URL.Path)
		}
		w.Header().Set("Content-Type", "application/json")
		answer, err := c.API.Client().Get(c.API.URL() + "/api/v1/namespaces/" + Namespace + "/pods")
		if err != nil {
			t.Error(err)
			return
		}
		defer answer.Body.Close()
		_, _ = io.Copy(w, answer.Body)
	}))
	t.Cleanup(kubelet.Close)
	c.Pods, err = athenz.NewKubelet(kubelet.URL, nil)
	must(t, err)
	return c
}

// Logger logs to Log.
func (c *Cluster) Logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(c.Log, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// Callback returns the name of the provider's service.
func (c *Cluster) Callback() athenzname.Service {
	return cafake.AthenzInstance(c.ZTS.Fake).Provider
}

// Mapping returns which domain a namespace is.
func (c *Cluster) Mapping() athenzname.Mapping { return athenzname.Mapping{AdminDomain: "k8s.admin"} }

// ProviderConfig returns a good configuration of a provider.
func (c *Cluster) ProviderConfig() athenz.ProviderConfig {
	c.t.Helper()
	pods, err := athenz.NewAPIServer(c.API.URL(), c.API.Client())
	must(c.t, err)
	ztsOnly, err := athenz.ClientCertificate(c.CA.TrustDomain(), c.CA.Bundle(), cafake.ZTSName)
	must(c.t, err)
	return athenz.ProviderConfig{
		Service: c.Callback(), ZTS: ztsOnly, Verifier: c.Keys.Verifier(c.t), Pods: pods, Suffix: Suffix,
		Mapping: c.Mapping(), Logger: c.Logger(),
	}
}

// ServeProvider serves a provider and returns its URL.
func (c *Cluster) ServeProvider(cfg athenz.ProviderConfig) (url string) {
	c.t.Helper()
	p, err := athenz.NewProvider(cfg)
	must(c.t, err)
	return c.ServeTLS(p, c.Callback().String())
}

// ServeTLS serves a handler with a certificate of a common name.
func (c *Cluster) ServeTLS(h http.Handler, cn string) (url string) {
	s := httptest.NewUnstartedServer(h)
	s.TLS = &tls.Config{MinVersion: tls.VersionTLS13,
		Certificates: []tls.Certificate{*c.ZTS.Credential(cn).TLSCertificate()}, ClientAuth: tls.RequestClientCert}
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	s.StartTLS()
	c.t.Cleanup(s.Close)
	return s.URL
}

// MutualTLS returns a client with a certificate of a common name; an empty one means none.
func (c *Cluster) MutualTLS(cn string) *http.Client {
	cfg := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: c.CA.Bundle().CertPool()}
	if cn != "" {
		cfg.Certificates = []tls.Certificate{*c.ZTS.Credential(cn).TLSCertificate()}
	}
	tr := &http.Transport{TLSClientConfig: cfg}
	c.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// Put stores a pod that runs, after edit has changed it.
func (c *Cluster) Put(name string, edit func(pod Object)) {
	pod := Object{
		"metadata": Object{"uid": "8c5b0a3e-" + name},
		"spec":     Object{"serviceAccountName": Account},
		"status": Object{"phase": "Running", "podIP": "10.1.2.3",
			"podIPs": Array{Object{"ip": "10.1.2.3"}, Object{"ip": "fd00::3"}}},
	}
	if edit != nil {
		edit(pod)
	}
	c.API.Put("/api/v1/namespaces/"+Namespace+"/pods/"+name, pod)
}

// Remove removes a pod.
func (c *Cluster) Remove(name string) {
	c.API.Remove("/api/v1/namespaces/" + Namespace + "/pods/" + name)
}

// Subject returns that of the pod web-0.
func Subject() athenz.PodSubject {
	return athenz.PodSubject{
		Namespace: Namespace, Pod: "web-0", IP: netip.MustParseAddr("10.1.2.3"),
		Service: athenzname.Service{Domain: "media.sports", Name: "frontend"},
	}
}

// Sign signs for what a pod says of itself, after edit has changed it. Each document is another one.
func (c *Cluster) Sign(edit func(*athenz.PodSubject)) string {
	c.t.Helper()
	s := Subject()
	if edit != nil {
		edit(&s)
	}
	c.mu.Lock()
	c.signed++ // two documents of one second are the same
	n := c.signed
	c.mu.Unlock()
	signer, err := athenz.NewSigner(c.Keys.Private, "", 5*time.Minute+time.Duration(n)*time.Second)
	must(c.t, err)
	text, err := signer(c.t.Context(), s)
	must(c.t, err)
	return text
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
