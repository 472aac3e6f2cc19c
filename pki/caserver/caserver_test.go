package caserver_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/caclient"
	caclientistio "github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

var (
	domain   = spiffe.MustParseTrustDomain("example.org")
	serverID = spiffe.MustParseID("spiffe://example.org/ca")
)

func newAuthority(t testing.TB) *ca.Authority {
	t.Helper()
	return must.Get(ca.New(ca.Config{TrustDomain: domain}))(t)
}

func localhost() net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	return l
}

// newServer returns a server of the CA in o, which signs its certificate.
func newServer(t testing.TB, o caserver.Options) *caserver.Server {
	t.Helper()
	o.TrustDomain = domain
	if o.Identity == nil {
		o.Identity = caservertest.Identity(t, o.CA, serverID, pki.DNSSAN("localhost"), pki.IPSAN(net.IPv4(127, 0, 0, 1)))
	}
	return must.Get(caserver.New(o))(t)
}

// run runs a server until the test ends, or stop is called, which returns what Run returned.
func run(t testing.TB, o caserver.Options, at caserver.Listeners) (stop func() error) {
	t.Helper()
	ready := make(chan struct{})
	o.Ready = func() { close(ready) }
	s := newServer(t, o)
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
	identity := caservertest.Identity(t, a, serverID)
	for want, o := range map[string]caserver.Options{
		"CA or Identity is nil":            {TrustDomain: domain, Identity: identity},
		"Identity is nil; a *ca.Authority": {CA: a, TrustDomain: domain},
		"trust domain":                     {CA: a, Identity: identity},
		"Authenticator":                    {CA: a, TrustDomain: domain, Identity: identity, Istio: &istioca.Options{}},
		"Review":                           {CA: a, TrustDomain: domain, Identity: identity, Linkerd: &linkerd.Options{Mesh: linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "example.org"}}},
	} {
		require.ErrorContains(t, must.Err(caserver.New(o)), want)
	}
}

// A client that trusts RootsFile gets a certificate by a token, and the next one by that certificate.
func TestServer(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	a := newAuthority(t)
	at := caserver.Listeners{Istio: localhost(), Admin: localhost()}
	file := filepath.Join(t.TempDir(), "root-cert.pem")
	stop := run(t, caserver.Options{
		CA: a, RootsFile: file,
		Istio:  &istioca.Options{Authenticator: tokens},
		Status: func(w io.Writer) { _, _ = io.WriteString(w, "as ever") },
	}, at)
	roots := must.Get(os.ReadFile(file))(t)
	require.Equal(t, string(a.Bundle().MarshalPEM()), string(roots))
	if info, err := os.Stat(file); assert.NoError(t, err) && runtime.GOOS != "windows" {
		assert.Equal(t, fs.FileMode(0o644), info.Mode(), "clients run as other users")
	}
	client := must.Get(caclientistio.New(caclientistio.Options{Endpoint: caclient.Endpoint{
		URL: "https://" + at.Istio.Addr().String(), TrustDomain: domain, RootsFile: file,
		Token: func(context.Context) (string, error) { return "spiffe://example.org/web", nil },
	}}))(t)
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{}))(t)
	require.Equal(t, "spiffe://example.org/web", must.Get(client.Sign(t.Context(), csr, 0))(t)[0].URIs[0].String())

	tr := &http.Transport{TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: a.Bundle().CertPool()}, ForceAttemptHTTP2: true}
	defer tr.CloseIdleConnections()
	resp := must.Get((&http.Client{Transport: tr}).Post("https://"+at.Istio.Addr().String()+"/other", "application/grpc", nil))(t)
	defer resp.Body.Close()
	require.Equal(t, http.StatusNotFound, resp.StatusCode, "there is one method")

	admin := "http://" + at.Admin.Addr().String()
	for path, want := range map[string]string{"/ready": "ok\n", "/live": "ok\n", "/root-cert.pem": string(roots)} {
		assert.Equal(t, want, get(t, http.DefaultClient, admin+path), path)
	}
	assert.True(t, strings.HasPrefix(get(t, http.DefaultClient, admin+"/status"), "as ever"))
	require.NoError(t, stop())
	for _, l := range []net.Listener{at.Istio, at.Admin} {
		require.ErrorIs(t, must.Err(l.Accept()), net.ErrClosed)
	}
}

// client of Istio's API, with a connection that it keeps.
type client struct {
	t     testing.TB
	http  *http.Client
	url   string
	conns atomic.Int64 // never two at a time
}

// newClient returns a client with a leaf that the root of a signs, by whom does not matter: the thief of the key can do so.
func newClient(t testing.TB, a *ca.Authority, at net.Listener, id string, r ca.Request) *client {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	r.ID = spiffe.MustParseID(id)
	r.CSR = must.Get(pki.NewCSR(key, pki.CSROptions{}))(t)
	chain := must.Get(a.Sign(t.Context(), r))(t)
	c := &client{t: t, url: "https://" + at.Addr().String()}
	tr := &http.Transport{ForceAttemptHTTP2: true, MaxConnsPerHost: 1, TLSClientConfig: &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: a.Bundle().CertPool(), ServerName: "localhost",
		Certificates: []tls.Certificate{{Certificate: [][]byte{chain[0].Raw}, PrivateKey: key}},
	}, DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		c.conns.Add(1)
		return new(net.Dialer).DialContext(ctx, network, addr)
	}}
	t.Cleanup(tr.CloseIdleConnections)
	c.http = &http.Client{Transport: tr}
	return c
}

// ask returns the leaf of an answer. An empty token means that the certificate has to do.
func (c *client) ask(token string, ttl time.Duration) (*x509.Certificate, error) {
	api, err := caclientistio.New(caclientistio.Options{Endpoint: caclient.Endpoint{
		URL: c.url, HTTPClient: c.http, TrustDomain: domain, Token: func(context.Context) (string, error) { return token, nil },
	}})
	require.NoError(c.t, err)
	key := must.Get(pki.NewKey("ecdsa-p256"))(c.t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{}))(c.t)
	chain, err := api.Sign(c.t.Context(), csr, ttl)
	if err != nil {
		return nil, err
	}
	return chain[0], nil
}

// A forged leaf under a root that was tainted is no way to a certificate of its successor, from that moment on: neither on
// a connection that is open, nor on a new one, nor beside a token that is refused. A token is good as ever.
func TestTaintEvictsTheThief(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	at := caserver.Listeners{Istio: localhost()}
	run(t, caserver.Options{CA: a, Istio: &istioca.Options{Authenticator: tokens}}, at)
	forged := ca.Request{TTL: time.Hour}
	thief := newClient(t, a, at.Istio, "spiffe://example.org/admin", forged)
	again := newClient(t, a, at.Istio, "spiffe://example.org/admin", forged)
	leaf, err := thief.ask("", 90*24*time.Hour)
	require.NoError(t, err, "as long as the key is not known to be stolen")
	require.WithinDuration(t, time.Now().Add(24*time.Hour), leaf.NotAfter, time.Minute, "an hour does not buy 90 days")

	require.NoError(t, a.Taint(t.Context(), a.Status().Roots[0].ID))
	for _, c := range []*client{thief, again} {
		for _, token := range []string{"", "stolen:spiffe://example.org/admin"} {
			require.ErrorIs(t, must.Err(c.ask(token, 0)), caclient.ErrUnauthenticated)
		}
		leaf, err = c.ask("spiffe://example.org/web", 0)
		require.NoError(t, err, "a clean proof")
		require.Equal(t, "spiffe://example.org/web", leaf.URIs[0].String())
	}
	require.EqualValues(t, 1, thief.conns.Load(), "all of it was on the connection of before")
}

// Renewal by certificates alone has an end where the operator wants one, or does not exist. A certificate of an authority
// keeps the time of the proof, however often it was renewed.
func TestRenewByCertificate(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-5.1-5")
	a := newAuthority(t)
	ago := func(d time.Duration) ca.Request { return ca.Request{TTL: time.Hour, Proven: time.Now().Add(-d)} }
	for limit, want := range map[time.Duration]map[time.Duration]bool{
		0:              {0: true, 48 * time.Hour: true, 10000 * time.Hour: true},
		48 * time.Hour: {0: true, 47 * time.Hour: true, 49 * time.Hour: false},
		-1:             {0: false},
	} {
		at := caserver.Listeners{Istio: localhost()}
		run(t, caserver.Options{
			CA: a, RenewByCertificate: limit,
			Istio: &istioca.Options{Authenticator: tokens, CertificateTTL: 90 * time.Minute},
		}, at)
		for age, ok := range want {
			c := newClient(t, a, at.Istio, "spiffe://example.org/web", ago(age))
			leaf, err := c.ask("", 0)
			if !ok {
				require.ErrorIs(t, err, caclient.ErrUnauthenticated, "%v after %v", limit, age)
				leaf, err = c.ask("spiffe://example.org/web", 2*time.Hour)
				require.NoError(t, err, "its token is good")
				require.WithinDuration(t, time.Now(), a.Proven(leaf), time.Minute, "a new chain")
				require.WithinDuration(t, time.Now().Add(2*time.Hour), leaf.NotAfter, time.Minute)
				continue
			}
			require.NoError(t, err, "%v after %v", limit, age)
			require.WithinDuration(t, time.Now().Add(-age), a.Proven(leaf), time.Minute, "the chain goes on")
			require.WithinDuration(t, time.Now().Add(90*time.Minute), leaf.NotAfter, time.Minute)
			leaf = must.Get(c.ask("spiffe://example.org/other", 0))(t)
			id := must.Get(spiffe.IDFromCertificate(leaf))(t)
			require.Equal(t, "spiffe://example.org/web", id.String(), "the certificate counts before a token")
		}
	}
	_, err := istioca.ClientCertificates(a, domain, -1)
	require.Error(t, err)
	unknown := must.Get(istioca.ClientCertificates(forgetful{a}, domain, time.Hour))(t)
	at := caserver.Listeners{Istio: localhost()}
	run(t, caserver.Options{CA: a, RenewByCertificate: -1, Istio: &istioca.Options{Authenticator: unknown}}, at)
	_, err = newClient(t, a, at.Istio, "spiffe://example.org/web", ago(0)).ask("", 0)
	require.ErrorIs(t, err, caclient.ErrUnauthenticated, "of a signer that cannot tell")
}

// forgetful is a signer that does not choose its serial numbers.
type forgetful struct{ *ca.Authority }

func (forgetful) Proven(*x509.Certificate) time.Time { return time.Time{} }

// broken is an audit log on a disk that is full.
type broken struct{ full atomic.Bool }

func (b *broken) Record(context.Context, *ca.Issuance) error { return b.Err() }

func (b *broken) Err() error {
	if b.full.Load() {
		return errFailed
	}
	return nil
}

// A server that cannot sign its own certificate when it starts says why, and serves its APIs when it can.
func TestStartsWithoutSigning(t *testing.T) {
	t.Parallel()
	disk := &broken{}
	disk.full.Store(true)
	a := must.Get(ca.New(ca.Config{TrustDomain: domain, Auditor: disk}))(t)
	at := caserver.Listeners{Bundle: localhost(), Admin: localhost()}
	own := must.Get(local.NewServer(a, serverID))(t)
	identity := must.Get(secretcache.New(secretcache.Config{ID: serverID, CA: own}))(t)
	ready := make(chan struct{})
	s := newServer(t, caserver.Options{CA: a, Identity: identity, Ready: func() { close(ready) }})
	var running sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	defer func() { cancel(); running.Wait() }()
	running.Go(func() { _ = identity.Run(ctx) })
	running.Go(func() { _ = s.Run(ctx, at) })
	client := http.Client{Timeout: 10 * time.Second}
	resp := must.Get(client.Get("http://" + at.Admin.Addr().String() + "/ready"))(t)
	defer resp.Body.Close()
	assert.Equal(t, http.StatusServiceUnavailable, resp.StatusCode)
	assert.Contains(t, string(must.Get(io.ReadAll(resp.Body))(t)), "the disk is full")
	disk.full.Store(false)
	select {
	case <-ready:
	case <-time.After(time.Minute):
		require.Fail(t, "it does not serve")
	}
}

// Readiness and metrics tell when nothing would be signed, and when it would again.
func TestReady(t *testing.T) {
	t.Parallel()
	disk := &broken{}
	a := must.Get(ca.New(ca.Config{TrustDomain: domain, Auditor: disk, Limits: ca.Limits{CallerRate: 1e-6, CallerBurst: 1}}))(t)
	at := caserver.Listeners{Istio: localhost(), Admin: localhost()}
	run(t, caserver.Options{
		CA: a, Istio: &istioca.Options{Authenticator: tokens}, RenewByCertificate: -1,
		Status: func(w io.Writer) { _, _ = io.WriteString(w, "roots\n") },
	}, at)
	admin := func(path string) (int, string) {
		resp := must.Get(http.Get("http://" + at.Admin.Addr().String() + path))(t)
		defer resp.Body.Close()
		return resp.StatusCode, string(must.Get(io.ReadAll(resp.Body))(t))
	}
	c := newClient(t, a, at.Istio, "spiffe://example.org/client", ca.Request{})
	web := "spiffe://example.org/web"
	must.Get(c.ask(web, 0))(t)
	require.Error(t, must.Err(c.ask(web, 0)), "a limit")
	for _, full := range []bool{false, true, false} {
		disk.full.Store(full)
		code, text := admin("/ready")
		_, status := admin("/status")
		_, metrics := admin("/metrics")
		if !full {
			require.Equal(t, http.StatusOK, code, text)
			require.Equal(t, "ok\n", text)
			require.NotContains(t, status, "audit:")
			require.Contains(t, status, "\nsigns until ")
			require.Contains(t, metrics, "\nsvidkit_ca_signing 1\n")
			require.Contains(t, metrics, "\nsvidkit_ca_audit_up 1\n")
			continue
		}
		require.Equal(t, http.StatusServiceUnavailable, code)
		require.Contains(t, text, "the disk is full")
		require.Contains(t, status, "audit:")
		require.NotContains(t, status, "signs until", "it does not sign")
		require.Contains(t, metrics, "\nsvidkit_ca_signing 0\n")
		require.Contains(t, metrics, "\nsvidkit_ca_audit_up 0\n")
		require.Error(t, must.Err(c.ask("spiffe://example.org/other", 0)))
	}
	_, metrics := admin("/metrics")
	must.Get(metricstest.Page(metrics))(t)
	root := a.Status().Roots[0].Certificate
	for _, line := range []string{
		`svidkit_ca_signatures_total{result="signed"} 1`, `svidkit_ca_signatures_total{result="limit"} 1`, `svidkit_ca_signatures_total{result="audit"} 1`,
		"svidkit_ca_store_up 1", "svidkit_ca_root_up 1", fmt.Sprintf("svidkit_ca_signing_end_timestamp_seconds %d", root.NotAfter.Unix()),
		fmt.Sprintf("svidkit_ca_root_start_timestamp_seconds %d", root.NotBefore.Unix()), fmt.Sprintf("svidkit_ca_root_end_timestamp_seconds %d", root.NotAfter.Unix()),
	} {
		assert.Contains(t, metrics, line+"\n")
	}
	require.NoError(t, a.Taint(t.Context(), a.Status().Roots[0].ID))
	_, metrics = admin("/metrics")
	assert.Contains(t, metrics, "svidkit_ca_root_up 0\n")
	code, _ := admin("/ready")
	assert.Equal(t, http.StatusOK, code, "it signs")
}

// A page in a browser whose name leads to loopback reads nothing.
func TestAdminHost(t *testing.T) {
	t.Parallel()
	at, a := caserver.Listeners{Admin: localhost()}, newAuthority(t)
	run(t, caserver.Options{CA: a, Identity: caservertest.Identity(t, a, serverID, pki.DNSSAN("ca.example.org"))}, at)
	_, port := must.Get2(net.SplitHostPort(at.Admin.Addr().String()))(t)
	for host, code := range map[string]int{
		"127.0.0.1:" + port: 200, "localhost:" + port: 200, "LOCALHOST": 200, "[::1]:" + port: 200, "[::1]": 200, "10.1.2.3:15014": 200, // through a proxy in the pod
		"ca.example.org:15014": 200, "CA.example.org": 200,
		"rebind.example.com:" + port: 421, "localhost.example.com": 421, "127.0.0.1.example.com": 421, "example.org": 421, "a:b:c": 421, "xlocalhost": 421,
	} {
		for _, path := range []string{"/metrics", "/status", "/root-cert.pem", "/ready"} {
			req := must.Get(http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+at.Admin.Addr().String()+path, nil))(t)
			req.Host = host
			resp := must.Get(http.DefaultClient.Do(req))(t)
			require.NoError(t, resp.Body.Close())
			if path == "/status" && code == 200 {
				code = 404 // there is none
			} else if code == 404 {
				code = 200
			}
			assert.Equal(t, code, resp.StatusCode, "%s of %s", path, host)
		}
	}
}

// Linkerd's proxies speak TLS 1.3 only, and Istio's agents that obey FIPS 140-2 TLS 1.2 only. Without TLS there is
// Linkerd's API for those that say so twice.
func TestVersionsOfTLS(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-1.5-13")
	a := newAuthority(t)
	at := caserver.Listeners{Istio: localhost(), Linkerd: localhost()}
	o := caserver.Options{
		CA: a, Istio: &istioca.Options{Authenticator: tokens},
		Linkerd: &linkerd.Options{Mesh: linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "example.org"}, Review: func(context.Context, string, []string) (*spiffe.Pod, error) { return nil, kube.ErrInvalidToken }},
	}
	run(t, o, at)
	for _, tc := range []struct {
		l    net.Listener
		most uint16
		ok   bool
	}{
		{at.Istio, tls.VersionTLS13, true}, {at.Istio, tls.VersionTLS12, true}, {at.Istio, tls.VersionTLS11, false},
		{at.Linkerd, tls.VersionTLS13, true}, {at.Linkerd, tls.VersionTLS12, false},
	} {
		c, err := tls.Dial("tcp", tc.l.Addr().String(), &tls.Config{MinVersion: tls.VersionTLS10, MaxVersion: tc.most, RootCAs: a.Bundle().CertPool(), ServerName: "localhost"})
		if !tc.ok {
			require.Error(t, err, tc)
			continue
		}
		require.NoError(t, err, tc)
		require.Equal(t, tc.most, c.ConnectionState().Version)
		require.NoError(t, c.Close())
	}
	s := newServer(t, o)
	require.ErrorContains(t, s.Run(t.Context(), caserver.Listeners{Linkerd: localhost(), LinkerdPlaintext: true}), "AllowPlaintext")
}

// failing is a CA whose Run fails.
type failing struct {
	*ca.Authority
	err error
}

var errFailed = errors.New("the disk is full")

func (f failing) Run(context.Context) error { return f.err }

// The first part that fails ends the server, and is named.
func TestRunFails(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	s := newServer(t, caserver.Options{CA: failing{a, nil}})
	require.ErrorContains(t, s.Run(t.Context(), caserver.Listeners{}), "certificate authority: it has ended by itself")
	s = newServer(t, caserver.Options{CA: failing{a, errFailed}})
	at := caserver.Listeners{Bundle: localhost()}
	err := s.Run(t.Context(), at)
	require.ErrorIs(t, err, errFailed)
	require.ErrorContains(t, err, "certificate authority")
	require.ErrorIs(t, must.Err(at.Bundle.Accept()), net.ErrClosed)

	s = newServer(t, caserver.Options{CA: a, RootsFile: filepath.Join(t.TempDir(), "none", "root-cert.pem")})
	require.ErrorIs(t, s.Run(t.Context(), caserver.Listeners{}), os.ErrNotExist)

	closed := localhost()
	closed.Close()
	s = newServer(t, caserver.Options{CA: a})
	require.ErrorContains(t, s.Run(t.Context(), caserver.Listeners{Admin: closed}), "metrics and health")
}

// What answers pods signs by the CA whose signatures are counted, has its metrics on the page, and ends the server if it fails.
func TestPods(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	errFailed := errors.New("away")
	o := caserver.Options{CA: a, TrustDomain: domain, Identity: caservertest.Identity(t, a, serverID)}
	o.Pods = func(ca.Signer) (caserver.Part, error) { return nil, errFailed }
	require.ErrorIs(t, must.Err(caserver.New(o)), errFailed)

	part := &part{t: t, fail: make(chan error, 1)}
	o.Pods = func(signer ca.Signer) (caserver.Part, error) {
		part.signer = signer
		return part, nil
	}
	at := caserver.Listeners{Admin: localhost()}
	stop := run(t, o, at)
	page := func() string {
		resp := must.Get(http.Get("http://" + at.Admin.Addr().String() + "/metrics"))(t)
		defer resp.Body.Close()
		return string(must.Get(io.ReadAll(resp.Body))(t))
	}
	require.Eventually(t, func() bool { return strings.Contains(page(), "svidkit_ca_signatures_total{result=\"signed\"} 1\n") }, time.Minute, 5*time.Millisecond)
	require.Contains(t, page(), "pods_total 7\n")
	part.fail <- errFailed
	time.Sleep(100 * time.Millisecond)
	require.ErrorIs(t, stop(), errFailed)
	require.ErrorContains(t, stop(), "requests of pods")
}

// part signs once, and then runs until it is to fail.
type part struct {
	t      testing.TB
	signer ca.Signer
	fail   chan error
}

func (p *part) Run(ctx context.Context) error {
	key, err := pki.NewKey("ecdsa-p256")
	assert.NoError(p.t, err)
	csr, err := pki.NewCSR(key, pki.CSROptions{})
	assert.NoError(p.t, err)
	_, err = p.signer.Sign(ctx, ca.Request{CSR: csr, ID: spiffe.MustParseID("spiffe://example.org/pod")})
	assert.NoError(p.t, err)
	select {
	case <-ctx.Done():
		return nil
	case err := <-p.fail:
		return err
	}
}

func (p *part) Report() report.Report {
	return report.Report{Metrics: func(w io.Writer) error { _, err := io.WriteString(w, "pods_total 7\n"); return err }}
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
	run(t, caserver.Options{CA: l, Identity: caservertest.Identity(t, l, serverID, names...)}, caserver.Listeners{})
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

// The Server serves the bundle of its CA.
func TestBundle(t *testing.T) {
	t.Parallel()
	a, at := newAuthority(t), caserver.Listeners{Bundle: localhost()}
	run(t, caserver.Options{CA: a}, at)
	tr := &http.Transport{TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: a.Bundle().CertPool()}}
	defer tr.CloseIdleConnections()
	served := get(t, &http.Client{Transport: tr}, "https://"+at.Bundle.Addr().String())
	assert.True(t, a.Bundle().Equal(must.Get(spiffe.ParseBundle(domain, []byte(served)))(t)))
}

func TestMain(m *testing.M) {
	rounds.Parallel(8)
	m.Run()
}

// hasty is a CA whose root is replaced while the server asks to be told of changes, once it is armed.
type hasty struct {
	*ca.Authority
	t     testing.TB
	armed atomic.Bool
}

func (h *hasty) Changed() <-chan struct{} {
	if h.armed.CompareAndSwap(true, false) {
		_, err := h.Revoke(context.WithoutCancel(h.t.Context()), active(h.t, h.Authority), true)
		if err != nil {
			h.t.Error(err)
		}
	}
	return h.Authority.Changed()
}

func active(t testing.TB, a *ca.Authority) string {
	t.Helper()
	for _, k := range a.Status().Roots {
		if k.Phase == "active" {
			return k.ID
		}
	}
	require.Fail(t, "there is no active root")
	return ""
}

// The server has a certificate under the roots of now as soon as they are others, also if they become others while it reads them.
func TestIdentityFollowsRoots(t *testing.T) {
	t.Parallel()
	h := &hasty{Authority: newAuthority(t), t: t}
	at := caserver.Listeners{Bundle: localhost()}
	run(t, caserver.Options{CA: h}, at)
	follows := func() {
		t.Helper()
		require.Eventually(t, func() bool {
			c, err := tls.Dial("tcp", at.Bundle.Addr().String(), &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: h.Bundle().CertPool(), ServerName: "localhost"})
			if err != nil {
				return false
			}
			return c.Close() == nil
		}, time.Minute, 10*time.Millisecond)
	}
	follows()
	must.Get(h.Revoke(t.Context(), active(t, h.Authority), true))(t)
	follows()
	h.armed.Store(true)
	must.Get(h.Rotate(t.Context()))(t) // the server looks for news
	require.Eventually(t, func() bool { return !h.armed.Load() }, time.Minute, time.Millisecond)
	follows()
}

// tokens authenticates a caller by a token that is its ID.
var tokens = authn.Func(func(r *http.Request) (*authn.Caller, error) {
	token, err := authn.Bearer(r)
	if err != nil {
		return nil, err
	}
	id, err := spiffe.ParseID(token)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", authn.ErrRefused, err)
	}
	return &authn.Caller{ID: id, Method: "test"}, nil
})
