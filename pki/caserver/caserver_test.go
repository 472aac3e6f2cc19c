package caserver_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	caclientistio "github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe"
)

var (
	domain   = spiffe.MustParseTrustDomain("example.org")
	serverID = spiffe.MustParseID("spiffe://example.org/ca")
)

func newAuthority(t testing.TB) *ca.Authority {
	t.Helper()
	a, err := ca.New(ca.Config{TrustDomain: domain})
	require.NoError(t, err)
	return a
}

func localhost() net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	return l
}

// run runs a server until the test ends, or stop is called, which returns what Run returned.
func run(t testing.TB, o caserver.Options, at caserver.Listeners) (stop func() error) {
	t.Helper()
	ready := make(chan struct{})
	o.Ready = func() { close(ready) }
	s, err := caserver.New(o)
	require.NoError(t, err)
	ctx, cancel := context.WithCancelCause(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx, at) }()
	select {
	case <-ready:
	case err := <-ended:
		require.NoError(t, err)
	case <-time.After(30 * time.Second):
		require.Fail(t, "the server does not start")
	}
	stop = func() error {
		cancel(errStopped)
		err := <-ended
		ended <- err
		return err
	}
	t.Cleanup(func() { _ = stop() })
	return stop
}

var errStopped = errors.New("stopped by the test")

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	for want, o := range map[string]caserver.Options{
		"CA is nil":     {ID: serverID},
		"ID":            {CA: a},
		"neither a DNS": {CA: a, ID: serverID, Names: []pki.SAN{pki.IDSAN(serverID)}},
		"Authenticator": {CA: a, ID: serverID, Istio: &istioca.Options{}},
		"Review":        {CA: a, ID: serverID, Linkerd: &linkerd.Options{Mesh: linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "example.org"}}},
	} {
		_, err := caserver.New(o)
		require.ErrorContains(t, err, want)
	}
}

// A client that trusts RootsFile gets a certificate by a token, and the next one by that certificate.
func TestServer(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	at := caserver.Listeners{Istio: localhost(), Admin: localhost()}
	file := filepath.Join(t.TempDir(), "root-cert.pem")
	stop := run(t, caserver.Options{
		CA: a, ID: serverID, Names: []pki.SAN{pki.DNSSAN("localhost"), {Type: pki.IP, Value: string(net.IPv4(127, 0, 0, 1).To4())}}, RootsFile: file,
		Istio:  &istioca.Options{Authenticator: caserver.InsecureTokens{TrustDomain: domain}},
		Status: func(w io.Writer) { _, _ = io.WriteString(w, "as ever") },
	}, at)
	roots, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(a.Bundle().MarshalPEM()), string(roots))
	client, err := caclientistio.New(caclientistio.Options{
		URL: "https://" + at.Istio.Addr().String(), TrustDomain: domain, RootsFile: file,
		Token: func(context.Context) (string, error) { return "spiffe://example.org/web", nil },
	})
	require.NoError(t, err)
	key, err := pki.NewKey(pki.ECDSAP256)
	require.NoError(t, err)
	csr, err := pki.NewCSR(key, pki.CSROptions{})
	require.NoError(t, err)
	chain, err := client.Sign(t.Context(), csr, 0)
	require.NoError(t, err)
	require.Equal(t, "spiffe://example.org/web", chain[0].URIs[0].String())

	tr := &http.Transport{TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: a.Bundle().CertPool()}, ForceAttemptHTTP2: true}
	defer tr.CloseIdleConnections()
	resp, err := (&http.Client{Transport: tr}).Post("https://"+at.Istio.Addr().String()+"/other", "application/grpc", nil)
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, http.StatusNotFound, resp.StatusCode, "there is one method")

	admin := "http://" + at.Admin.Addr().String()
	for path, want := range map[string]string{"/ready": "ok\n", "/live": "ok\n", "/status": "as ever", "/root-cert.pem": string(roots)} {
		assert.Equal(t, want, get(t, http.DefaultClient, admin+path), path)
	}
	require.ErrorIs(t, stop(), errStopped)
	for _, l := range []net.Listener{at.Istio, at.Admin} {
		_, err := l.Accept()
		require.ErrorIs(t, err, net.ErrClosed)
	}
}

// failing is a CA whose Run fails.
type failing struct{ *ca.Authority }

var errFailed = errors.New("the disk is full")

func (failing) Run(context.Context) error { return errFailed }

// The first part that fails ends the server, and is named.
func TestRunFails(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	s, err := caserver.New(caserver.Options{CA: failing{a}, ID: serverID})
	require.NoError(t, err)
	at := caserver.Listeners{Bundle: localhost()}
	err = s.Run(t.Context(), at)
	require.ErrorIs(t, err, errFailed)
	require.ErrorContains(t, err, "certificate authority")
	_, err = at.Bundle.Accept()
	require.ErrorIs(t, err, net.ErrClosed)

	s, err = caserver.New(caserver.Options{CA: a, ID: serverID, RootsFile: filepath.Join(t.TempDir(), "none", "root-cert.pem")})
	require.NoError(t, err)
	require.ErrorIs(t, s.Run(t.Context(), caserver.Listeners{}), os.ErrNotExist)

	closed := localhost()
	closed.Close()
	s, err = caserver.New(caserver.Options{CA: a, ID: serverID})
	require.NoError(t, err)
	require.ErrorContains(t, s.Run(t.Context(), caserver.Listeners{Admin: closed}), "metrics and health")
}

// learning is a CA that does not know its roots before it has signed, as a registration authority.
type learning struct {
	a *ca.Authority

	mu     sync.Mutex
	signed []ca.Request
	bundle *spiffe.Bundle
}

func (l *learning) Sign(ctx context.Context, r ca.Request) ([]*x509.Certificate, error) {
	l.mu.Lock()
	l.signed, l.bundle = append(l.signed, r), l.a.Bundle()
	l.mu.Unlock()
	return l.a.Sign(ctx, r)
}

func (l *learning) CallerBundle() *spiffe.Bundle { return l.Bundle() }

func (l *learning) Proven(*x509.Certificate) time.Time { return time.Time{} }

func (l *learning) Bundle() *spiffe.Bundle {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.bundle
}

// For such a CA the server has a certificate signed and dropped, and then asks for each of its names.
func TestLearnedRoots(t *testing.T) {
	t.Parallel()
	l := &learning{a: newAuthority(t)}
	names := []pki.SAN{pki.DNSSAN("ca.example.org"), {Type: pki.IP, Value: "\x7f\x00\x00\x01"}}
	run(t, caserver.Options{CA: l, ID: serverID, Names: names}, caserver.Listeners{})
	l.mu.Lock()
	defer l.mu.Unlock()
	require.Len(t, l.signed, 2)
	for _, r := range l.signed {
		assert.Equal(t, serverID, r.ID)
		assert.Equal(t, "self", r.Method)
	}
	assert.Equal(t, []pki.SAN{pki.IDSAN(serverID)}, l.signed[0].CSR.SANs())
	assert.Equal(t, append([]pki.SAN{pki.IDSAN(serverID)}, names...), l.signed[1].CSR.SANs())
	assert.Equal(t, []string{"ca.example.org"}, l.signed[1].DNSNames)
	assert.True(t, net.IPv4(127, 0, 0, 1).Equal(l.signed[1].IPs[0]))
}

// The Server is the source of the one bundle of its CA.
func TestBundle(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	s, err := caserver.New(caserver.Options{CA: a, ID: serverID})
	require.NoError(t, err)
	b, err := s.Bundle(domain)
	require.NoError(t, err)
	require.Same(t, a.Bundle(), b)
	_, err = s.Bundle(spiffe.MustParseTrustDomain("elsewhere.test"))
	require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
	s, err = caserver.New(caserver.Options{CA: &learning{a: a}, ID: serverID})
	require.NoError(t, err)
	_, err = s.Bundle(domain)
	require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
}
