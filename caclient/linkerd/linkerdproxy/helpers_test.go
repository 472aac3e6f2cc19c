package linkerdproxy_test

import (
	"context"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/caclient/linkerd/linkerdproxy"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

const (
	web       = "web.emojivoto.serviceaccount.identity.linkerd.cluster.local"
	voting    = "voting.emojivoto.serviceaccount.identity.linkerd.cluster.local"
	certifier = "linkerd-identity.linkerd.serviceaccount.identity.linkerd.cluster.local"
)

var (
	td   = spiffe.MustParseTrustDomain("cluster.local")
	mesh = linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"}
)

// service is a certifier in this process.
type service struct {
	ca      *spiffetest.CA
	life    time.Duration     // of certificates
	anchors *spiffe.BundleSet // of the proxies

	mu   sync.Mutex
	csrs [][]byte
	at   []time.Time
	err  error
}

func newService(t testing.TB, life time.Duration) *service {
	ca := spiffetest.NewCA(t, "cluster.local")
	return &service{ca: ca, life: life, anchors: ca.Bundles()}
}

func (s *service) Sign(ctx context.Context, csr *pki.CSR, _ time.Duration) ([]*x509.Certificate, error) {
	s.mu.Lock()
	s.csrs, s.at = append(s.csrs, csr.DER()), append(s.at, time.Now())
	err, life, ca := s.err, s.life, s.ca
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return ca.Certify(ctx, csr, csr.SANs(), life)
}

func (s *service) FetchBundles(context.Context) (*spiffe.BundleSet, error) {
	return s.anchors, nil
}

// fail has requests fail, until fail(nil).
func (s *service) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

// sign has another CA sign.
func (s *service) sign(ca *spiffetest.CA) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ca = ca
}

// asked returns when requests came.
func (s *service) asked() []time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]time.Time(nil), s.at...)
}

// config is a good configuration for a certifier elsewhere.
func config(t testing.TB, name string, anchors []byte) linkerdproxy.Config {
	t.Helper()
	token := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(token, []byte("token-of-"+name+"\n"), 0o600))
	return linkerdproxy.Config{
		Name: name, Anchors: anchors, TokenFile: token,
		Certifier: linkerdproxy.Service{Addr: "linkerd-identity.linkerd.svc.cluster.local", Name: certifier},
	}
}

// run runs an identity until the test is over.
func run(t testing.TB, id *linkerdproxy.Identity) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- id.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
}

// certified returns an identity that has a certificate of s.
func certified(t testing.TB, s *service, name string, edit ...func(*linkerdproxy.Config)) *linkerdproxy.Identity {
	t.Helper()
	cfg := config(t, name, s.ca.Bundle().MarshalPEM())
	for _, e := range edit {
		e(&cfg)
	}
	id, err := linkerdproxy.NewWith(cfg, s)
	require.NoError(t, err)
	run(t, id)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	require.NoError(t, id.Ready(ctx))
	return id
}

// controller is the identity controller of a mesh, which can be stopped and started again at the same address.
type controller struct {
	authority *ca.Authority
	addr      string        // of its API by TLS; not a loopback address by its text
	life      time.Duration // of certificates, which is up to a second more
	plaintext bool
	open      atomic.Int64 // connections

	mu     sync.Mutex
	tokens map[string]kube.Account
	seen   []string // tokens

	stop func()
}

func newController(t testing.TB, life time.Duration, plaintext bool) *controller {
	t.Helper()
	authority, err := ca.New(ca.Config{TrustDomain: td})
	require.NoError(t, err)
	c := &controller{authority: authority, life: life, plaintext: plaintext, tokens: map[string]kube.Account{}}
	c.account("token-of-"+web, "emojivoto", "web")
	c.account("token-of-"+voting, "emojivoto", "voting")
	c.start(t)
	t.Cleanup(func() { c.stop() })
	return c
}

// account makes a token good for an account. No account makes it worthless.
func (c *controller) account(token, namespace, name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if name == "" {
		delete(c.tokens, token)
		return
	}
	c.tokens[token] = kube.Account{Namespace: namespace, ServiceAccount: name}
}

func (c *controller) review(_ context.Context, token string, audiences []string) (*kube.Account, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seen = append(c.seen, token)
	a, ok := c.tokens[token]
	if !ok || len(audiences) != 1 || audiences[0] != "identity.l5d.io" {
		return nil, fmt.Errorf("the token is not known: %w", kube.ErrInvalidToken)
	}
	return &a, nil
}

// reviewed returns how many tokens were looked at.
func (c *controller) reviewed() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.seen)
}

// start serves, at the address from before if there is one.
func (c *controller) start(t testing.TB) {
	t.Helper()
	at := "127.0.0.1:0"
	if c.addr != "" {
		_, port, _ := net.SplitHostPort(c.addr)
		at = "127.0.0.1:" + port
	}
	l, err := net.Listen("tcp", at)
	require.NoError(t, err)
	// An address without a host leads to this host, too, and does not count as loopback.
	c.addr = l.Addr().String()
	if !c.plaintext {
		c.addr = fmt.Sprintf("0.0.0.0:%d", l.Addr().(*net.TCPAddr).Port)
	}
	server, err := caserver.New(caserver.Options{
		CA: c.authority, ID: spiffe.MustParseID("spiffe://cluster.local/ns/linkerd/sa/linkerd-identity"), Names: []pki.SAN{pki.DNSSAN(certifier)},
		Linkerd: &linkerd.Options{Mesh: mesh, Review: c.review, Lifetime: c.life, ClockSkew: time.Second, // certificates end with whole seconds
			AllowPlaintext: c.plaintext},
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- server.Run(ctx, caserver.Listeners{Linkerd: counting{l, &c.open}, LinkerdPlaintext: c.plaintext})
	}()
	c.stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-done)
	})
}

// counting counts the connections of a listener that are open.
type counting struct {
	net.Listener
	open *atomic.Int64
}

func (l counting) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.open.Add(1)
	return &counted{Conn: c, closed: sync.OnceFunc(func() { l.open.Add(-1) })}, nil
}

type counted struct {
	net.Conn
	closed func()
}

func (c *counted) Close() error {
	c.closed()
	return c.Conn.Close()
}

// config is a good configuration for the controller.
func (c *controller) config(t testing.TB, name string) linkerdproxy.Config {
	t.Helper()
	cfg := config(t, name, c.authority.Bundle().MarshalPEM())
	cfg.Certifier = linkerdproxy.Service{Addr: c.addr, Name: certifier}
	if c.plaintext {
		cfg.Certifier.Name = ""
	}
	cfg.MinRefresh = 100 * time.Millisecond
	return cfg
}

// get returns the status and the body of an answer.
func get(t testing.TB, h http.Handler, path string) string {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return fmt.Sprint(w.Code, " ", strings.TrimSpace(w.Body.String()))
}

// together runs subtests that mostly wait for real time at once: parallel ones would wait for a free processor.
func together(t *testing.T, tests map[string]func(*testing.T)) {
	t.Helper()
	var wg sync.WaitGroup
	for name, f := range tests {
		wg.Go(func() { t.Run(name, f) })
	}
	wg.Wait()
}
