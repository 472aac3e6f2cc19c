package federation_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

var (
	home    = spiffe.MustParseTrustDomain("example.org")
	partner = spiffe.MustParseTrustDomain("partner.test")
)

// internet is a network in memory, with hosts by name.
type internet struct {
	mu    sync.Mutex
	hosts map[string]*memconn.Listener
	dials []string
}

func newInternet() *internet { return &internet{hosts: map[string]*memconn.Listener{}} }

func (n *internet) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	n.dials = append(n.dials, addr)
	l := n.hosts[host]
	n.mu.Unlock()
	if l == nil {
		return nil, fmt.Errorf("no such host: %s", host)
	}
	return l.Dial(ctx)
}

// dialled returns the addresses that were dialled since the last call.
func (n *internet) dialled() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	dials := n.dials
	n.dials = nil
	return dials
}

func (n *internet) options(logger *slog.Logger) federation.Config {
	return federation.Config{DialContext: n.dial, Logger: logger}
}

// site is a host that serves what it is told to, with the certificate that it is told to.
type site struct {
	mu       sync.Mutex
	handler  http.HandlerFunc
	cert     *tls.Certificate
	requests []*http.Request
}

func (s *site) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.requests = append(s.requests, r)
	h := s.handler
	s.mu.Unlock()
	h(w, r)
}

// serve changes what the site answers.
func (s *site) serve(h http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.handler = h
}

// present changes the certificate.
func (s *site) present(cert *tls.Certificate) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cert = cert
}

// asked returns the requests since the last call.
func (s *site) asked() []*http.Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	requests := s.requests
	s.requests = nil
	return requests
}

func (s *site) config(t testing.TB) *tls.Config {
	t.Helper()
	c := must.Get(federation.ServerConfig(new(spiffe.SVID)))(t)
	c.CurvePreferences = []tls.CurveID{tls.X25519, tls.CurveP256} // which cost the least
	c.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.cert, nil
	}
	return c
}

// on lets the site listen, until the test is over.
func (s *site) on(t testing.TB, l net.Listener) {
	t.Helper()
	server := &http.Server{Handler: s, TLSConfig: s.config(t), ErrorLog: log.New(io.Discard, "", 0)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.ServeTLS(l, "", "")
	}()
	t.Cleanup(func() {
		_ = server.Close()
		_ = l.Close()
		<-done
	})
}

// host adds a site to the internet.
func (n *internet) host(t testing.TB, name string, cert *tls.Certificate, h http.HandlerFunc) *site {
	t.Helper()
	s := &site{cert: cert, handler: h}
	l := memconn.Listen()
	n.mu.Lock()
	n.hosts[name] = l
	n.mu.Unlock()
	s.on(t, l)
	return s
}

// listen serves on a real socket and returns its URL.
func listen(t testing.TB, cert *tls.Certificate, h http.HandlerFunc) (*site, string) {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	s := &site{cert: cert, handler: h}
	s.on(t, l)
	return s, "https://" + l.Addr().String() + "/bundle"
}

// webCert is a certificate for websites.
func webCert(ca *spiffetest.CA, names ...string) *tls.Certificate {
	chain, key := ca.Certificate("/web", func(c *x509.Certificate) {
		c.URIs, c.DNSNames, c.NotAfter = nil, nil, c.NotBefore.AddDate(1, 0, 0)
		for _, name := range names {
			if ip := net.ParseIP(name); ip != nil {
				c.IPAddresses = append(c.IPAddresses, ip)
			} else {
				c.DNSNames = append(c.DNSNames, name)
			}
		}
	})
	return &tls.Certificate{Certificate: [][]byte{chain[0].Raw}, PrivateKey: key, Leaf: chain[0]}
}

// svidCert is an SVID for a server that lives for a year.
func svidCert(ca *spiffetest.CA, path string) *tls.Certificate {
	return ca.SVID(path, func(c *x509.Certificate) { c.NotAfter = c.NotBefore.AddDate(1, 0, 0) }).TLSCertificate()
}

// webRoots trusts the certificates of webCert.
func webRoots(ca *spiffetest.CA) federation.Web {
	return federation.Web{Roots: ca.Bundle().CertPool()}
}

// bundleOf is the bundle of ca with a sequence number and a hint; nil and 0 mean none.
func bundleOf(t testing.TB, ca *spiffetest.CA, sequence *uint64, hint time.Duration) *spiffe.Bundle {
	t.Helper()
	c := ca.Bundle().Contents()
	c.Sequence, c.RefreshHint = sequence, hint
	b := must.Get(spiffe.NewBundle(ca.TrustDomain(), c))(t)
	return b
}

func documentOf(t testing.TB, b *spiffe.Bundle) []byte {
	t.Helper()
	doc := must.Get(b.Marshal())(t)
	return doc
}

// answer serves a fixed body.
func answer(status int, body []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = w.Write(body)
	}
}

// serving serves a bundle as this package does.
func serving(t testing.TB, b *spiffe.Bundle) http.HandlerFunc {
	t.Helper()
	h := must.Get(federation.NewHandler(b, b.TrustDomain()))(t)
	return h.ServeHTTP
}

func redirect(status int, to string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Location", to)
		w.WriteHeader(status)
	}
}

func newManager(t testing.TB, cfg federation.Config) *federation.Manager {
	t.Helper()
	m := must.Get(federation.New(cfg))(t)
	federation.Unhurried(m)
	return m
}

var errOver = errors.New("the test is over")

// running runs m until the function that it returns is called, or the test is over.
func running(t testing.TB, m *federation.Manager) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancelCause(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel(errOver)
		require.NoError(t, <-ended)
	})
	t.Cleanup(stop)
	return stop
}

func inForce(t testing.TB, m *federation.Manager, td spiffe.TrustDomain) *spiffe.Bundle {
	t.Helper()
	b := must.Get(m.Bundle(td))(t)
	require.NotNil(t, b)
	return b
}

func statusOf(t testing.TB, m *federation.Manager, td spiffe.TrustDomain) federation.Status {
	t.Helper()
	for _, s := range m.Status() {
		if s.TrustDomain == td {
			return s
		}
	}
	t.Fatalf("no status of %s", td)
	return federation.Status{}
}

// assertPending checks that there is no bundle yet, and that nothing has failed.
func assertPending(t testing.TB, s federation.Status) {
	t.Helper()
	assert.Nil(t, s.Bundle)
	assert.NoError(t, s.Err)
	assert.False(t, s.Fresh)
}

// assertFailed checks that there is no bundle yet, and that the last attempt failed.
func assertFailed(t testing.TB, s federation.Status) {
	t.Helper()
	assert.Nil(t, s.Bundle)
	assert.Error(t, s.Err)
	assert.False(t, s.Fresh)
}

// assertStale checks that a bundle is in force that was not confirmed lately.
func assertStale(t testing.TB, s federation.Status, why ...any) {
	t.Helper()
	assert.NotNil(t, s.Bundle, why...)
	assert.False(t, s.Fresh, why...)
}

// trusts reports whether a verifier that asks m accepts what ca issues.
func trusts(t testing.TB, m spiffe.BundleSource, ca *spiffetest.CA) bool {
	t.Helper()
	v := must.Get(spiffe.NewVerifier(m, spiffe.AllowMembersOf(ca.TrustDomain()), nil))(t)
	_, err := v.VerifyChain(ca.SVID("/workload").Chain(), spiffe.ClientRole)
	return err == nil
}

// kind is why a fetch failed, as far as a program can tell.
type kind string

const (
	connection     kind = "connection"
	timedOut       kind = "timed out"
	canceled       kind = "canceled"
	authentication kind = "authentication"
	redirected     kind = "redirect"
	badStatus      kind = "status"
	tooLarge       kind = "too large"
	badDocument    kind = "document"
	outOfSequence  kind = "sequence"
)

func kindOf(e *federation.FetchError) kind {
	_, unparsed := errors.AsType[*spiffe.ParseError](e)
	switch {
	case errors.Is(e, federation.ErrNotAuthenticated):
		return authentication
	case errors.Is(e, federation.ErrRedirect):
		return redirected
	case errors.Is(e, federation.ErrSequence):
		return outOfSequence
	case unparsed:
		return badDocument
	case errors.Is(e, spiffe.ErrTooLarge):
		return tooLarge
	case errors.Is(e, context.DeadlineExceeded):
		return timedOut
	case errors.Is(e, context.Canceled), errors.Is(e, errOver):
		return canceled
	case strings.Contains(e.Error(), ", not 200"):
		return badStatus
	}
	return connection
}

func requireCode(t testing.TB, err error, want kind) *federation.FetchError {
	t.Helper()
	e, ok := errors.AsType[*federation.FetchError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, want, kindOf(e), "%v", err)
	return e
}

// diary is a logger that keeps what it is told.
type diary struct {
	mu    sync.Mutex
	lines []map[string]string
}

func (d *diary) logger() *slog.Logger { return slog.New(d) }

func (d *diary) Enabled(context.Context, slog.Level) bool { return true }
func (d *diary) WithAttrs([]slog.Attr) slog.Handler       { return d }
func (d *diary) WithGroup(string) slog.Handler            { return d }
func (d *diary) Handle(_ context.Context, r slog.Record) error {
	line := map[string]string{"msg": r.Message, "level": r.Level.String(), "time": r.Time.UTC().Format(time.RFC3339)}
	r.Attrs(func(a slog.Attr) bool {
		line[a.Key] = a.Value.String()
		return true
	})
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lines = append(d.lines, line)
	return nil
}

// read returns what was written since the last call.
func (d *diary) read() []map[string]string {
	d.mu.Lock()
	defer d.mu.Unlock()
	lines := d.lines
	d.lines = nil
	return lines
}
