package linkerdproxy_test

import (
	"context"
	"crypto/x509"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/test/meshtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

const (
	web       = meshtest.Web
	voting    = meshtest.Voting
	certifier = meshtest.Certifier
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
	require.NoError(t, os.WriteFile(token, []byte(meshtest.Token(name)+"\n"), 0o600))
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
	id := must.Get(linkerdproxy.NewWith(cfg, s))(t)
	run(t, id)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	require.NoError(t, id.Ready(ctx))
	return id
}

// get returns the status and the body of an answer.
func get(t testing.TB, h http.Handler, path string) string {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return fmt.Sprint(w.Code, " ", strings.TrimSpace(w.Body.String()))
}

// eventually waits until f is true.
func eventually(t testing.TB, f func() bool, what string) {
	t.Helper()
	for end := time.Now().Add(15 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it did not come: " + what)
		}
	}
}
