package athenz_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
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

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// client is a client of ZTS with the certificate that it has.
type client struct {
	t    testing.TB
	ca   *spiffetest.CA
	zts  *cafake.ZTS
	opts athenz.Options
	*athenz.CA
	current *pki.Credential
}

func newClient(t testing.TB, edit func(*athenz.Options)) *client {
	t.Helper()
	c := &client{t: t, ca: spiffetest.NewCA(t, "athenz.example")}
	c.zts = cafake.NewZTS(t, c.ca, "/ns/media-sports/sa/frontend")
	c.opts = athenz.Options{
		Endpoint: c.zts.Endpoint(), Instance: cafake.AthenzInstance(c.zts.Fake), WithServiceToken: true,
		Certificate: func() *tls.Certificate {
			if c.current == nil {
				return nil
			}
			return c.current.TLSCertificate()
		},
	}
	if edit != nil {
		edit(&c.opts)
	}
	c.restart()
	return c
}

// restart makes a client that knows nothing of what was before.
func (c *client) restart() {
	c.t.Helper()
	c.CA = must.Get(athenz.New(c.opts))(c.t)
}

// get asks for a certificate and does not use it.
func (c *client) get() (*pki.Credential, error) {
	c.t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(c.t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{CommonName: c.opts.Instance.Service.String(), SANs: c.zts.Expectation().Names()}))(c.t)
	chain, err := c.Sign(c.t.Context(), csr, 0)
	if err != nil {
		return nil, err
	}
	require.NoError(c.t, cafake.Check(chain, csr, c.zts.Expectation(), c.ca.Bundle()))
	return must.Get(pki.NewCredential(chain, key))(c.t), nil
}

// use asks for a certificate and uses it from then on.
func (c *client) use() {
	c.t.Helper()
	got := must.Get(c.get())(c.t)
	c.current = got
}

func (c *client) revoked() bool { return c.zts.Revoked(c.opts.Instance) }

func TestRefresh(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-10.1-1", "ATH-10.1-2", "ATH-10.2-8", "ATH-10.3-4", "ATH-10.3-7", "ATH-10.5-1", "ATH-10.5-5", "ATH-10.5-6", "ATH-18-11")
	tokens := 0
	c := newClient(t, nil)
	token := c.opts.Token
	c.opts.Token = func(ctx context.Context) (string, error) { tokens++; return token(ctx) }
	c.restart()
	c.use()
	assert.Equal(t, 1, tokens)
	assert.True(t, strings.HasPrefix(c.ServiceToken(), "v=S1;d=media.sports;n=frontend;k=0;z=zts;"))
	for _, format := range []string{"%v", "%+v", "%#v", "%s"} {
		for _, v := range []any{c.CA, struct{ v any }{c.CA}, []any{c.CA}} {
			assert.NotContains(t, fmt.Sprintf(format, v), ";s=")
		}
	}
	for range 3 {
		c.use()
	}
	assert.Equal(t, 1, tokens, "the certificate is the proof")

	// An answer that is not used: the certificate before is presented again, which ZTS takes once more.
	require.NoError(t, must.Err(c.get()))
	c.use()
	c.use()
	assert.False(t, c.revoked())

	// An older one is never presented: the instance is registered anew.
	old := c.current
	c.use()
	c.use()
	c.current = old
	before := c.zts.Requests()
	c.use()
	assert.Equal(t, []int{2, 1}, []int{tokens, c.zts.Requests() - before})
	assert.False(t, c.revoked())
	c.use()
	assert.Equal(t, 2, tokens)

	// A program that has started with an old one cannot know: ZTS revokes, and the token helps.
	c.current = old
	c.restart()
	c.use()
	assert.Equal(t, 3, tokens)

	// Without one the refusal is the answer.
	c.opts.Token = nil
	c.current = old
	c.restart()
	require.ErrorIs(t, must.Err(c.get()), caclient.ErrDenied)
	assert.True(t, c.revoked())
	require.ErrorContains(t, must.Err(c.get()), "revoked")

	// Neither: nothing is sent.
	c.current = nil
	before = c.zts.Requests()
	require.ErrorIs(t, must.Err(c.get()), caclient.ErrUnauthenticated)
	assert.Equal(t, before, c.zts.Requests())
}

// TestRegisteredAnew has ZTS forget the instance, and then the answer not be used: the certificate from before is that of
// another record, which it would revoke.
func TestRegisteredAnew(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-10.1-3", "ATH-18-11")
	c := newClient(t, nil)
	c.use()
	tr := c.zts.Endpoint().HTTPClient.Transport.(*http.Transport).Clone()
	tr.TLSClientConfig.Certificates = []tls.Certificate{*c.zts.Credential("k8s.admin.athenz-callback").TLSCertificate()}
	defer tr.CloseIdleConnections()
	r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodDelete, c.zts.Endpoint().URL+"/zts/v1/instance/k8s.admin.athenz-callback/media.sports/frontend/frontend-0", nil))(t)
	answer := must.Get(tr.RoundTrip(r))(t)
	answer.Body.Close()
	require.Equal(t, http.StatusNoContent, answer.StatusCode)
	for _, want := range []int{2, 1, 1} { // the first is refused, and registered anew
		before := c.zts.Requests()
		must.Get(c.get())(t)
		assert.Equal(t, want, c.zts.Requests()-before)
		assert.False(t, c.revoked())
	}
	c.use()
	c.use()
	assert.False(t, c.revoked())
}

func TestRefreshConcurrently(t *testing.T) {
	t.Parallel()
	c := newClient(t, nil)
	c.use()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() { assert.NoError(t, must.Err(c.get())) })
	}
	wg.Wait()
	c.use()
	c.use()
	assert.False(t, c.revoked())
}

// heldConn gives what it has read when it is let.
type heldConn struct {
	net.Conn
	hold func()
}

func (h heldConn) Read(p []byte) (int, error) {
	n, err := h.Conn.Read(p)
	h.hold()
	return n, err
}

// TestAnswersCross has the answer to one request come after that to a later one: ZTS would revoke the instance for the
// certificate in it.
func TestAnswersCross(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "ATH-18-11")
	c := newClient(t, nil)
	c.use()
	before, second := c.zts.Requests(), make(chan struct{})
	var dials atomic.Int32
	base := c.zts.Endpoint().HTTPClient.Transport.(*http.Transport).Clone()
	base.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, address)
		if err != nil || dials.Add(1) > 1 {
			return conn, err
		}
		return heldConn{conn, func() {
			if c.zts.Requests() == before {
				return // the handshake
			}
			select {
			case <-second:
			case <-time.After(300 * time.Millisecond): // it waits for this one
			}
		}}, nil
	}
	c.opts.HTTPClient, c.opts.Token = &http.Client{Transport: base}, nil
	c.restart()
	var first *pki.Credential
	var wg sync.WaitGroup
	wg.Go(func() {
		got, err := c.get()
		assert.NoError(t, err)
		first = got
	})
	require.Eventually(t, func() bool { return c.zts.Requests() > before }, time.Minute, time.Millisecond)
	must.Get(c.get())(t)
	close(second)
	wg.Wait()
	c.current = first
	_, _ = c.get()
	assert.False(t, c.revoked())
}

// TestSessionNotResumed has a client that resumes TLS sessions, in which ZTS would see the certificate of the first.
func TestSessionNotResumed(t *testing.T) {
	t.Parallel()
	c := newClient(t, nil)
	base := c.zts.Endpoint().HTTPClient.Transport.(*http.Transport).Clone()
	base.TLSClientConfig.ClientSessionCache = tls.NewLRUClientSessionCache(8)
	var resumed atomic.Bool
	base.TLSClientConfig.VerifyConnection = func(s tls.ConnectionState) error {
		if s.DidResume {
			resumed.Store(true)
		}
		return nil
	}
	c.opts.HTTPClient = &http.Client{Transport: base}
	c.use()
	c.opts.Token = nil
	c.restart()
	for range 4 {
		c.use()
	}
	assert.False(t, resumed.Load())
	assert.False(t, c.revoked())
}

// TestCertificateOfTheMoment has certificates that cannot be presented.
func TestCertificateOfTheMoment(t *testing.T) {
	t.Parallel()
	c := newClient(t, nil)
	expired := func(x *x509.Certificate) {
		x.NotBefore, x.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour)
	}
	ahead := func(x *x509.Certificate) {
		x.NotBefore, x.NotAfter = time.Now().Add(time.Hour), time.Now().Add(2*time.Hour)
	}
	for _, edit := range []func(*x509.Certificate){expired, ahead} {
		chain, key := c.ca.Certificate("/x", edit)
		c.current = must.Get(pki.NewCredential(chain, key))(t)
		require.NoError(t, must.Err(c.get()), "the token is used")
	}
	for _, cert := range []*tls.Certificate{{}, {Certificate: [][]byte{{1}}}} {
		c.opts.Certificate = func() *tls.Certificate { return cert }
		c.restart()
		must.Get(c.get())(t)
	}
	// Its leaf need not be parsed.
	got, err := c.get()
	require.NoError(t, err)
	c.opts.Certificate = func() *tls.Certificate { cert := *got.TLSCertificate(); cert.Leaf = nil; return &cert }
	c.opts.Token = nil
	c.restart()
	must.Get(c.get())(t)
	// One of roots that ZTS does not know: it ends the handshake, and the token helps.
	chain, key := spiffetest.NewCA(t, "athenz.example").Certificate("/x")
	c.current = must.Get(pki.NewCredential(chain, key))(t)
	c.opts.Certificate = func() *tls.Certificate { return c.current.TLSCertificate() }
	c.restart()
	require.Error(t, must.Err(c.get()))
	c.opts.Token = c.zts.Endpoint().Token
	c.restart()
	// Whether the alert of ZTS or the end of the connection is seen first is chance. Callers repeat what was unavailable.
	for range 100 {
		if _, err = c.get(); !errors.Is(err, caclient.ErrUnavailable) {
			break
		}
	}
	require.NoError(t, err)
}

// TestClockBehind has a clock that is behind that of ZTS, which does not date back: the certificate is good when it is returned.
func TestClockBehind(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	c := newClient(t, nil)
	c.ca.EditTemplates(func(x *x509.Certificate) { x.NotBefore = time.Now().Add(2 * time.Second) })
	c.use() // requires that it is valid
	c.ca.EditTemplates(func(x *x509.Certificate) {
		x.NotBefore, x.NotAfter = time.Now().Add(time.Hour), time.Now().Add(2*time.Hour)
	})
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{CommonName: c.opts.Instance.Service.String(), SANs: c.zts.Expectation().Names()}))(t)
	begun := time.Now()
	require.NoError(t, must.Err(c.Sign(t.Context(), csr, 0)), "the caller says what is wrong with it")
	assert.Less(t, time.Since(begun), time.Minute, "there is no end to wait for")

	// The certificate is that of the instance whether or not the caller waits for it.
	c.ca.EditTemplates(func(x *x509.Certificate) { x.NotBefore = time.Now().Add(4 * time.Second) })
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	require.ErrorIs(t, must.Err(c.Sign(ctx, csr, 0)), context.DeadlineExceeded)
	c.ca.EditTemplates(nil)
	c.use()
	assert.False(t, c.revoked())
}

func TestWire(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-10.1-1", "ATH-10.1-2", "ATH-10.2-1", "ATH-10.2-2", "ATH-10.2-3", "ATH-10.2-4", "ATH-10.2-5", "ATH-10.2-8", "ATH-10.2-9", "ATH-10.2-13", "ATH-10.3-2",
		"ATH-10.3-3", "ATH-10.3-5", "ATH-18-10")
	c := newClient(t, nil)
	var path string
	var body map[string]any
	answer := func(map[string]any) {}
	fake := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		data, _ := io.ReadAll(r.Body)
		body, path = nil, r.Method+" "+r.URL.Path
		assert.NoError(t, json.Unmarshal(data, &body))
		assert.Equal(t, "application/json", r.Header.Get("Content-Type"))
		assert.Empty(t, r.Header.Get("Authorization"))
		csr, err := pki.ParseCSRPEM([]byte(body["csr"].(string)))
		if !assert.NoError(t, err) {
			return
		}
		chain, err := c.ca.Certify(r.Context(), csr, csr.SANs(), time.Hour)
		if !assert.NoError(t, err) {
			return
		}
		out := map[string]any{"name": "media.sports.frontend", "instanceId": "frontend-0", "x509Certificate": string(pki.MarshalCertificatesPEM(chain...))}
		answer(out)
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(out)
	}))
	t.Cleanup(fake.Close)
	fake.TLS.ClientAuth = tls.RequestClientCert
	c.opts.URL, c.opts.HTTPClient = fake.URL, fake.Client()
	c.opts.Token = func(context.Context) (string, error) { return "attested", nil }
	in := must.Get(c.opts.Instance.Service.IDIn(spiffe.MustParseTrustDomain("athenz.io"), "media-sports"))(t)
	c.restart()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{CommonName: "media.sports.frontend", SANs: c.zts.Expectation().Names()}))(t)
	for lifetime, minutes := range map[time.Duration]any{0: nil, time.Second: 1.0, time.Minute: 1.0, 90*time.Minute + time.Second: 90.0, 30 * 24 * time.Hour: 43200.0} {
		must.Get(c.Sign(t.Context(), csr, lifetime))(t)
		assert.Equal(t, "POST /zts/v1/instance", path)
		assert.Equal(t, minutes, body["expiryTime"])
		assert.Equal(t, []any{"k8s.admin.athenz-callback", "media.sports", "frontend", "attested", true, nil},
			[]any{body["provider"], body["domain"], body["service"], body["attestationData"], body["token"], body["namespace"]})
	}
	c.opts.Instance.SPIFFE, c.opts.WithServiceToken = in, false
	c.restart()
	c.current = must.Get(c.get())(t)
	assert.Equal(t, []any{nil, "media-sports"}, []any{body["token"], body["namespace"]})
	must.Get(c.get())(t)
	assert.Equal(t, "POST /zts/v1/instance/k8s.admin.athenz-callback/media.sports/frontend/frontend-0", path)
	assert.NotContains(t, body, "attestationData")
	assert.NotContains(t, body, "provider")

	// Answers with the certificates above the leaf, in either place.
	c.current = nil
	c.ca.Intermediate()
	other := spiffetest.NewCA(t, "athenz.example")
	for name, edit := range map[string]func(map[string]any){
		"no CA bundle": func(map[string]any) {},
		"roots": func(o map[string]any) {
			o["x509CertificateSigner"] = string(pki.MarshalCertificatesPEM(c.ca.Root(), other.Root()))
		},
	} {
		answer = edit
		require.NoError(t, must.Err(c.get()), name)
	}
	set := must.Get(c.FetchBundles(t.Context()))(t)
	b := must.Get(set.Bundle(c.ca.TrustDomain()))(t)
	has := func(want *x509.Certificate) (found bool) {
		for root := range b.X509Authorities() {
			found = found || root.Equal(want)
		}
		return found
	}
	assert.True(t, has(c.ca.Root()))
	assert.True(t, has(other.Root()), "a root that came with a certificate")
	answer = func(map[string]any) {} // none: those that are known stay
	must.Get(c.get())(t)
	set = must.Get(c.FetchBundles(t.Context()))(t)
	b = must.Get(set.Bundle(c.ca.TrustDomain()))(t)
	assert.True(t, has(other.Root()))

	for name, edit := range map[string]func(map[string]any){
		"no certificate":   func(o map[string]any) { o["x509Certificate"] = "" },
		"a number":         func(o map[string]any) { o["x509Certificate"] = 7 },
		"noise":            func(o map[string]any) { o["x509Certificate"] = "noise" },
		"another service":  func(o map[string]any) { o["name"] = "media.sports.backend" },
		"another instance": func(o map[string]any) { o["instanceId"] = "frontend-1" },
		"CA noise":         func(o map[string]any) { o["x509CertificateSigner"] = "noise" },
		"a key": func(o map[string]any) {
			o["x509CertificateSigner"] = "-----BEGIN PRIVATE KEY-----\n-----END PRIVATE KEY-----\n"
		},
		"a long token":     func(o map[string]any) { o["serviceToken"] = strings.Repeat("x", 17<<10) },
		"a token of lines": func(o map[string]any) { o["serviceToken"] = "a\nb" },
		"another key": func(o map[string]any) {
			o["x509Certificate"] = string(pki.MarshalCertificatesPEM(other.SVID("/x").Chain()...))
		},
	} {
		answer = edit
		require.ErrorIs(t, must.Err(c.get()), caclient.ErrBadAnswer, name)
	}
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	c := newClient(t, nil)
	for name, edit := range map[string]func(*athenz.Options){
		"no URL":         func(o *athenz.Options) { o.URL = "" },
		"a path":         func(o *athenz.Options) { o.URL += "/zts/v1" },
		"no TLS":         func(o *athenz.Options) { o.URL = "http://127.0.0.1" },
		"no domain":      func(o *athenz.Options) { o.TrustDomain = spiffe.TrustDomain{} },
		"no roots":       func(o *athenz.Options) { o.Roots = nil },
		"two roots":      func(o *athenz.Options) { o.RootsFile = "x" },
		"two of servers": func(o *athenz.Options) { o.ServerRootsFile = "x" },
		"two tokens":     func(o *athenz.Options) { o.TokenFile = "x" },
		"no instance":    func(o *athenz.Options) { o.Instance = athenzname.Instance{} },
		"another's ID":   func(o *athenz.Options) { o.Instance.SPIFFE = spiffe.MustParseID("spiffe://a/sa/b") },
	} {
		o := c.opts
		edit(&o)
		require.ErrorContains(t, must.Err(athenz.New(o)), "athenz: invalid Options: ", name)
	}
}

// TestServerRoots has the client make its own connections.
func TestServerRoots(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name string, ca *spiffetest.CA) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, pki.MarshalCertificatesPEM(ca.Root()), 0o600))
		return path
	}
	c := newClient(t, func(o *athenz.Options) { o.HTTPClient = nil })
	c.opts.URL = strings.Replace(c.opts.URL, "127.0.0.1", "localhost", 1)
	own, other := write("own", c.ca), write("other", spiffetest.NewCA(t, "athenz.example"))
	for _, v := range []struct {
		server, roots string
		good          bool
	}{{own, "", true}, {"", own, true}, {own, other, true}, {"", "", false}, {other, own, false}, {"", other, false}, {filepath.Join(dir, "gone"), own, false}} {
		o := c.opts
		o.ServerRootsFile = v.server
		if v.roots != "" {
			o.Roots, o.RootsFile = nil, v.roots
		}
		var err error
		c.CA = must.Get(athenz.New(o))(t)
		c.current = nil
		for range 2 { // the second by certificate
			if c.current, err = c.get(); !v.good {
				require.ErrorIs(t, err, caclient.ErrUnavailable)
				break
			}
			require.NoError(t, err)
		}
	}
}

// TestManager has package secretcache keep a credential through rotations and an outage, in virtual time.
func TestManager(t *testing.T) {
	conformance.Covers(t, "ATH-18-11")
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "athenz.example")
		zts := cafake.NewZTS(cafake.InMemory(t), ca, "/ns/media-sports/sa/frontend")
		instance := cafake.AthenzInstance(zts.Fake)
		registered := 0
		var m *secretcache.Manager
		e := zts.Endpoint()
		token := e.Token
		e.Token = func(ctx context.Context) (string, error) { registered++; return token(ctx) }
		client := must.Get(athenz.New(athenz.Options{Endpoint: e, Instance: instance, Certificate: func() *tls.Certificate {
			if c, err := m.Credential(); err == nil {
				return c.TLSCertificate()
			}
			return nil
		}}))(t)
		m = must.Get(secretcache.New(secretcache.Config{Expect: zts.Expectation(), CommonName: instance.Service.String(), CA: client}))(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- m.Run(ctx) }()
		time.Sleep(time.Second)
		last := must.Get(m.Credential())(t)
		assert.Equal(t, "media.sports.frontend", last.Leaf().Subject.CommonName)
		for i := range 6 {
			if i == 3 {
				zts.Refuse(&caclient.Error{Kind: caclient.ErrUnavailable, Err: errors.New("down")})
				time.Sleep(27 * time.Minute) // 45 % of the life
				zts.Refuse(nil)
			}
			time.Sleep(31 * time.Minute)
			now := must.Get(m.Credential())(t)
			assert.NotSame(t, last, now)
			assert.True(t, time.Now().Before(now.NotAfter()))
			last = now
			if i%2 == 0 {
				ca.Rotate()
			}
		}
		assert.Equal(t, 1, registered)
		assert.False(t, zts.Revoked(instance))
		cancel()
		require.NoError(t, <-done)
	})
}

// TestZTSRules has the fake refuse what ZTS refuses.
func TestZTSRules(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-10.4-1", "ATH-10.4-3", "ATH-10.4-4", "ATH-10.4-5", "ATH-10.4-7", "ATH-10.4-9", "ATH-10.4-10",
		"ATH-10.4-12", "ATH-10.4-14", "ATH-10.4-15", "ATH-10.5-1", "ATH-10.5-3",
		"ATH-13-7")
	c := newClient(t, nil)
	own := athenzname.Instance{ID: "frontend-0", Suffix: "svc.cluster.local"}.InstanceName()
	post := func(client *http.Client, path string, edit func(map[string]any), opts pki.CSROptions) (int, string) {
		t.Helper()
		key := must.Get(pki.NewKey("ecdsa-p256"))(t)
		csr := must.Get(pki.NewCSR(key, opts))(t)
		token := must.Get(c.zts.Endpoint().Token(t.Context()))(t)
		body := map[string]any{"provider": "k8s.admin.athenz-callback", "domain": "Media.Sports", "service": "frontend", "attestationData": token, "csr": string(csr.PEM())}
		if edit != nil {
			edit(body)
		}
		data := must.Get(json.Marshal(body))(t)
		answer := must.Get(client.Post(c.zts.Endpoint().URL+"/zts/v1/instance"+path, "application/json", strings.NewReader(string(data))))(t)
		defer answer.Body.Close()
		text := must.Get(io.ReadAll(answer.Body))(t)
		if answer.StatusCode == http.StatusCreated {
			assert.Equal(t, "/zts/v1/instance/k8s.admin.athenz-callback/media.sports/frontend/frontend-0", answer.Header.Get("Location"))
		}
		return answer.StatusCode, string(text)
	}
	anonymous := c.zts.Endpoint().HTTPClient
	good := pki.CSROptions{CommonName: "media.sports.frontend", SANs: []pki.SAN{pki.DNSSAN(own)}}
	uri := func(s ...string) pki.CSROptions {
		o := pki.CSROptions{CommonName: "media.sports.frontend", SANs: []pki.SAN{pki.DNSSAN(own)}}
		for _, u := range s {
			o.SANs = append(o.SANs, pki.SAN{Type: pki.URI, Value: u})
		}
		return o
	}
	dns := func(s ...string) pki.CSROptions {
		o := good
		o.SANs = nil
		for _, name := range s {
			o.SANs = append(o.SANs, pki.DNSSAN(name))
		}
		return o
	}
	set := func(name string, value any) func(map[string]any) { return func(b map[string]any) { b[name] = value } }
	for name, v := range map[string]struct {
		edit func(map[string]any)
		csr  pki.CSROptions
		code int
	}{
		"good":                  {nil, good, 201},
		"basic ID":              {nil, uri("spiffe://media.sports/sa/frontend"), 201},
		"ID with a namespace":   {nil, uri("spiffe://athenz.io/ns/default/sa/media.sports.frontend"), 201},
		"ID with its namespace": {set("namespace", "ns1"), uri("spiffe://athenz.io/ns/ns1/sa/media.sports.frontend"), 201},
		"instance by URI": {nil, pki.CSROptions{CommonName: "media.sports.frontend", SANs: []pki.SAN{{Type: pki.URI,
			Value: "athenz://instanceid/k8s.admin.athenz-callback/frontend-0"}, pki.DNSSAN(own)}}, 201},
		"a wildcard":              {nil, dns(own, "*.frontend.media-sports.svc.cluster.local"), 201},
		"unknown domain":          {set("domain", "media.news"), good, 404},
		"unknown service":         {set("service", "backend"), good, 400},
		"unknown provider":        {set("provider", "k8s.admin.other"), good, 403},
		"no provider":             {set("provider", ""), good, 400},
		"no CSR":                  {set("csr", ""), good, 400},
		"no attestation":          {set("attestationData", ""), good, 400},
		"bad attestation":         {set("attestationData", "x"), good, 401},
		"no instance ID":          {nil, dns("frontend.media-sports.svc.cluster.local"), 400},
		"another CN":              {nil, pki.CSROptions{CommonName: "media.sports.backend", SANs: good.SANs}, 400},
		"no CN":                   {nil, pki.CSROptions{SANs: good.SANs}, 400},
		"another suffix":          {nil, dns(own, "frontend.media-sports.example.org"), 400},
		"a wide wildcard":         {nil, dns(own, "*.svc.cluster.local"), 400},
		"another service's ID":    {nil, uri("spiffe://media.sports/sa/backend"), 400},
		"another trust domain":    {nil, uri("spiffe://example.org/ns/default/sa/media.sports.frontend"), 400},
		"another namespace":       {nil, uri("spiffe://athenz.io/ns/ns1/sa/media.sports.frontend"), 400},
		"the form of the seed":    {nil, uri("spiffe://cluster.local/ns/media-sports/sa/frontend"), 400},
		"two IDs":                 {nil, uri("spiffe://media.sports/sa/frontend", "spiffe://athenz.io/ns/default/sa/media.sports.frontend"), 400},
		"another URI":             {nil, uri("https://example.org/"), 400},
		"a URI of other provider": {nil, uri("athenz://instanceid/k8s.admin.other/frontend-0"), 400},
	} {
		code, text := post(anonymous, "", v.edit, v.csr)
		assert.Equal(t, v.code, code, "%s: %s", name, text)
		if code >= 400 {
			var e struct {
				Code    int
				Message string
			}
			require.NoError(t, json.Unmarshal([]byte(text), &e))
			assert.Equal(t, code, e.Code)
			assert.NotEmpty(t, e.Message)
		}
	}
	c.zts.Change(func(r *cafake.ZTSRules) { r.ReadOnly = true })
	code, _ := post(anonymous, "", nil, good)
	assert.Equal(t, 400, code)
	c.zts.Change(func(r *cafake.ZTSRules) { r.ReadOnly = false })

	const path = "/k8s.admin.athenz-callback/media.sports/frontend/frontend-0"
	with := func(credential *pki.Credential) *http.Client {
		tr := anonymous.Transport.(*http.Transport).Clone()
		tr.TLSClientConfig.Certificates = []tls.Certificate{*credential.TLSCertificate()}
		t.Cleanup(tr.CloseIdleConnections)
		return &http.Client{Transport: tr}
	}
	c.use()
	mine := with(c.current)
	for name, v := range map[string]struct {
		client *http.Client
		path   string
		csr    pki.CSROptions
		code   int
	}{
		"no certificate":        {anonymous, path, good, 401},
		"another's certificate": {with(c.zts.Credential("media.sports.backend")), path, good, 400},
		"not of the instance":   {with(c.zts.Credential("media.sports.frontend")), path, good, 400},
		"another instance":      {mine, strings.Replace(path, "-0", "-1", 1), good, 400},
		"another in the CSR":    {mine, path, dns("frontend-1.instanceid.athenz.svc.cluster.local"), 400},
		"another domain":        {mine, strings.Replace(path, "media.sports", "media.news", 1), good, 404},
		"good":                  {mine, path, good, 200},
	} {
		code, text := post(v.client, v.path, nil, v.csr)
		assert.Equal(t, v.code, code, "%s: %s", name, text)
	}

	remove := func(client *http.Client) int {
		r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodDelete, c.zts.Endpoint().URL+"/zts/v1/instance"+path, nil))(t)
		answer := must.Get(client.Do(r))(t)
		answer.Body.Close()
		return answer.StatusCode
	}
	assert.Equal(t, 401, remove(anonymous))
	assert.Equal(t, 403, remove(mine))
	assert.Equal(t, 204, remove(with(c.zts.Credential("k8s.admin.athenz-callback"))))
	code, _ = post(mine, path, nil, good)
	assert.Equal(t, 403, code, "there is no record")
}

// TestZTSCallback has the fake ask providers that are none.
func TestZTSCallback(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-10.4-15", "ATH-11.1-1", "ATH-11.1-4", "ATH-11.1-5", "ATH-11.1-8", "ATH-11.1-9", "ATH-11.3-2", "ATH-11.3-3", "ATH-10.5-4", "ATH-10.3-8")
	c := newClient(t, nil)
	serve := func(cn string, h http.HandlerFunc) string {
		s := httptest.NewUnstartedServer(h)
		s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
		s.TLS = &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{*c.zts.Credential(cn).TLSCertificate()}, ClientAuth: tls.RequireAnyClientCert}
		s.StartTLS()
		t.Cleanup(s.Close)
		return s.URL
	}
	const provider = "k8s.admin.athenz-callback"
	say := func(code int, text string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			assert.Equal(t, cafake.ZTSName, r.TLS.PeerCertificates[0].Subject.CommonName)
			assert.Contains(t, []string{"/instance", "/refresh"}, r.URL.Path)
			w.WriteHeader(code)
			_, _ = io.WriteString(w, text)
		}
	}
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	gone := "https://" + l.Addr().String()
	require.NoError(t, l.Close())
	for name, v := range map[string]struct {
		url  string
		kind error
	}{
		"another name": {serve("media.sports.frontend", say(200, "{}")), caclient.ErrUnavailable},
		"gone":         {gone, caclient.ErrUnavailable},
		"201":          {serve(provider, say(201, "{}")), caclient.ErrDenied},
		"403":          {serve(provider, say(403, "the pod has ended")), caclient.ErrDenied},
		"no JSON":      {serve(provider, say(200, "ok")), caclient.ErrDenied},
	} {
		c.zts.Change(func(r *cafake.ZTSRules) { r.Callback = v.url })
		require.ErrorIs(t, must.Err(c.get()), v.kind, name)
	}
	c.zts.Change(func(r *cafake.ZTSRules) {
		r.Callback = serve(provider, say(200, `{"attributes":{"certExpiryTime":"5","x":"y"}}`))
	})
	c.use()
	assert.WithinDuration(t, time.Now().Add(5*time.Minute), c.current.NotAfter(), 10*time.Second)
	c.use()
	c.zts.Change(func(r *cafake.ZTSRules) { r.WithoutRoots = true })
	c.use()
	// Without records there is nothing to revoke.
	old := c.current
	c.zts.Change(func(r *cafake.ZTSRules) {
		r.Callback = serve(provider, say(200, `{"attributes":{"certRefresh":"false"}}`))
	})
	for range 3 {
		c.current = old
		c.restart()
		c.use()
	}
	assert.False(t, c.revoked())
}

func FuzzAnswer(f *testing.F) {
	c := newClient(f, nil)
	var mu sync.Mutex
	body := ""
	fake := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		_, _ = io.WriteString(w, body)
	}))
	f.Cleanup(fake.Close)
	c.opts.URL, c.opts.HTTPClient = fake.URL, fake.Client()
	c.restart()
	key := must.Get(pki.NewKey("ecdsa-p256"))(f)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{CommonName: "media.sports.frontend", SANs: c.zts.Expectation().Names()}))(f)
	other := string(pki.MarshalCertificatesPEM(c.ca.Root()))
	for _, v := range []any{map[string]any{"x509Certificate": other}, map[string]any{"x509Certificate": other, "x509CertificateSigner": other}, "x", nil, []int{1}} {
		data := must.Get(json.Marshal(v))(f)
		f.Add(string(data))
	}
	f.Fuzz(func(t *testing.T, text string) {
		mu.Lock()
		body = text
		mu.Unlock()
		chain, err := c.Sign(t.Context(), csr, 0)
		require.ErrorIs(t, err, caclient.ErrBadAnswer)
		require.Nil(t, chain)
	})
}

// The issuing CA is the one whose key has signed the leaf and that is valid: several CAs have one name while one follows the other.
func TestIssuerBySignature(t *testing.T) {
	t.Parallel()
	read := func(name string) []byte {
		return must.Get(os.ReadFile(filepath.Join("testdata", "answer", name)))(t)
	}
	leaf := read("leaf.pem")
	key := must.Get(pki.ParsePrivateKeyPEM(read("key.pem")))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{}))(t)
	for _, name := range []string{"signer-old-key-first.pem", "signer-expired-copy-first.pem"} {
		above := must.Get(pki.ParseCertificatesPEM(read(name)))(t)
		for range above { // in any order
			above = append(above[1:], above[0])
			c := newClient(t, nil)
			fake := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(http.StatusCreated)
				_ = json.NewEncoder(w).Encode(map[string]string{"x509Certificate": string(leaf), "x509CertificateSigner": string(pki.MarshalCertificatesPEM(above...))})
			}))
			t.Cleanup(fake.Close)
			c.opts.URL, c.opts.HTTPClient = fake.URL, fake.Client()
			c.opts.Token = func(context.Context) (string, error) { return "attested", nil }
			c.restart()
			chain := must.Get(c.Sign(t.Context(), csr, time.Hour))(t, name)
			require.Len(t, chain, 2, name)
			require.NoError(t, chain[0].CheckSignatureFrom(chain[1]), name)
			require.True(t, time.Now().Before(chain[1].NotAfter), name)
		}
	}
}

func TestConformance(t *testing.T) {
	cafake.Fewer(t) // package local takes all
	t.Parallel()
	cafake.Run(t, func(t testing.TB, ca *spiffetest.CA, path string) *cafake.Fake {
		return cafake.NewZTS(t, ca, path).Fake
	}, func(f *cafake.Fake) (caclient.CA, error) {
		return athenz.New(athenz.Options{Endpoint: f.Endpoint(), Instance: cafake.AthenzInstance(f)})
	})
}
