package spiffetest_test

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

func TestPeerIsVerified(t *testing.T) {
	t.Parallel()
	ca, failed := fallible(t, "example.org")
	proof := func(path string, edit ...func(*x509.Certificate)) *spiffe.Peer {
		return must.Get(spiffetls.PeerFromRequest(ca.RequestFrom(path, httptest.NewRequest("GET", "/", nil), edit...)))(t)
	}
	peer := proof("/web")
	assert.Equal(t, "spiffe://example.org/web", peer.ID().String())
	assert.True(t, peer.Chain()[1].Equal(ca.Root()))
	assert.WithinDuration(t, time.Now().Add(time.Hour), peer.NotAfter(), time.Minute)

	past := func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = c.NotBefore.Add(-time.Hour), c.NotBefore.Add(-time.Minute)
	}
	failed(func() { proof("/web", past) })
	failed(func() { proof("/web", func(c *x509.Certificate) { c.IsCA = true }) })
	failed(func() { proof("/web", func(c *x509.Certificate) { c.URIs[0].Host = "other.test" }) })
	failed(func() { proof("web") })
	server := func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }
	failed(func() { proof("/web", server) }) // it is no client
}

func TestRequestFrom(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	var seen *http.Request
	handler := must.Get(spiffetls.RequirePeer(spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/ops")),
		http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { seen = r })))(t)
	answer := func(r *http.Request) int {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return w.Code
	}
	assert.Equal(t, http.StatusOK, answer(ca.RequestFrom("/ops", httptest.NewRequest("POST", "/x", nil))))
	assert.Equal(t, "POST", seen.Method)
	peer, ok := spiffetls.PeerFromContext(seen.Context())
	require.True(t, ok)
	again := must.Get(spiffetls.PeerFromRequest(seen))(t)
	assert.Same(t, peer, again)
	assert.Equal(t, "spiffe://example.org/ops", peer.ID().String())
	assert.Equal(t, peer.Chain()[0], seen.TLS.PeerCertificates[0])

	assert.Equal(t, http.StatusForbidden, answer(ca.RequestFrom("/web", httptest.NewRequest("GET", "/", nil))))
	assert.Equal(t, http.StatusForbidden, answer(httptest.NewRequest("GET", "/", nil)))
	assert.Equal(t, http.StatusForbidden, answer(httptest.NewRequest("GET", "https://db/", nil)))

	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		r := ca.RequestFrom("/ops", httptest.NewRequest("GET", "/", nil))
		assert.Equal(t, http.StatusOK, answer(r))
		time.Sleep(time.Hour + time.Second)
		assert.Equal(t, http.StatusForbidden, answer(r), "the proof has expired")
	})
}

// TestNoForgery: a program that is not built by go test gets no request with a peer, even with a testing.TB of its own.
func TestNoForgery(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	out, err := exec.CommandContext(t.Context(), "go", "run", "./testdata/forge").CombinedOutput()
	require.NoError(t, err, "%s", out)
	assert.Equal(t, "spiffetest: request from \"/web\": this is not a test\npeer: false tls: false\n", string(out))
}

// refusal is what a server with the bundles of source finds wrong with a client of config, which gets as far as the server.
func refusal(t testing.TB, source *spiffetest.Source, config *tls.Config) *spiffe.VerifyError {
	t.Helper()
	var failures spiffetls.Metrics
	endpoint, err := spiffetls.New(spiffetls.Config{Self: source, Peers: source, Allow: spiffe.AllowAnyPeer(), Metrics: &failures})
	require.NoError(t, err)
	server := must.Get(endpoint.ServerConfig())(t)
	l := must.Get(tls.Listen("tcp", "127.0.0.1:0", server))(t)
	defer l.Close()
	done := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			err = c.(*tls.Conn).HandshakeContext(t.Context())
			_ = c.Close()
		}
		done <- err
	}()
	conn, err := tls.Dial("tcp", l.Addr().String(), config)
	require.NoError(t, err, "the client refuses nothing")
	defer conn.Close()
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(10*time.Second)))
	_, err = conn.Read(make([]byte, 1))
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	if <-done == nil {
		return nil
	}
	assert.ErrorContains(t, err, "bad certificate")
	kept := failures.Report().Problems
	require.Len(t, kept, 1)
	refusal, _ := errors.AsType[*spiffe.VerifyError](kept[0])
	return refusal
}

// TestRecipes are those of the package comment: the server is the one that refuses, for the right reason.
func TestRecipes(t *testing.T) {
	t.Parallel()
	ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
	source := ca.Source("/db")
	assert.Zero(t, refusal(t, source, spiffetest.TLSConfig(ca.Certificate("/web"))), "a good one is accepted")

	f := refusal(t, source, spiffetest.TLSConfig(other.Certificate("/web")))
	assert.Equal(t, []string{"bundle", "X5-38", "other.test"}, []string{f.Stage, f.Rule, f.ID.TrustDomain().String()})
	f = refusal(t, source, spiffetest.TLSConfig(ca.Broken("Expired")))
	assert.Equal(t, []string{"chain", "X5-30"}, []string{f.Stage, f.Rule})
	assert.ErrorContains(t, f, "expired")

	chain, key := ca.Certificate("/web")
	ca.Rotate()
	ca.DropOldRoots()
	assert.Zero(t, refusal(t, source, spiffetest.TLSConfig(chain, key)), "the server was not told yet")
	source.Renew()
	f = refusal(t, source, spiffetest.TLSConfig(chain, key))
	assert.Equal(t, []string{"chain", "X5-31", "spiffe://example.org/web"}, []string{f.Stage, f.Rule, f.ID.String()})
}

// TestRecipeCAOutage is the last recipe, which an example cannot run.
func TestRecipeCAOutage(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	testOutage(t)
}

func TestOpenEndedOutage(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	down := errors.New("down")
	ca.FailNext(-1, down)
	for range 1000 {
		_, err := ca.FetchBundles(t.Context())
		require.ErrorIs(t, err, down)
	}
	_, err := ca.Sign(t.Context(), csr(t, "spiffe://example.org/web"), 0)
	require.ErrorIs(t, err, down)
	ca.FailNext(0, nil)
	must.Get(ca.FetchBundles(t.Context()))(t)
}

func TestSource(t *testing.T) {
	t.Parallel()
	ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
	ca.Federate(other.Bundle())
	spiffetest.TestSVIDSource(t, func(testing.TB) spiffe.SVIDSource { return ca.Source("/web") })
	spiffetest.TestBundleSource(t, func(testing.TB) (spiffe.BundleSource, []spiffe.TrustDomain) {
		return ca.Source("/web"), []spiffe.TrustDomain{ca.TrustDomain(), other.TrustDomain()}
	})

	source, down := ca.Source("/web"), errors.New("the agent is down")
	first, err := source.SVID()
	require.NoError(t, err)
	changed := source.Changed()
	source.Fail(down)
	<-changed
	for range 3 {
		_, err = source.SVID()
		require.ErrorIs(t, err, down)
		_, err = source.Bundle(ca.TrustDomain())
		require.ErrorIs(t, err, down)
		_, err = source.Snapshot()
		require.ErrorIs(t, err, down)
		source.Renew()
	}
	changed = source.Changed()
	source.Fail(nil)
	<-changed
	second := must.Get(source.SVID())(t)
	assert.NotEqual(t, first.Leaf().SerialNumber, second.Leaf().SerialNumber)
	assert.Equal(t, first.ID(), second.ID())

	before := must.Get(source.Bundle(ca.TrustDomain()))(t)
	ca.Rotate()
	same := must.Get(source.Bundle(ca.TrustDomain()))(t)
	assert.Same(t, before, same)
	changed = source.Changed()
	source.Renew(func(c *x509.Certificate) { c.DNSNames = []string{"web.test"} })
	<-changed
	third := must.Get(source.SVID())(t)
	assert.Equal(t, []string{"web.test"}, third.Leaf().DNSNames)
	assert.NoError(t, third.Leaf().CheckSignatureFrom(ca.Root()))
	_, err = verify(t, before, third.Chain(), spiffe.AnyRole)
	assert.Error(t, err)
}

// TestTLSConfigAsServer: a client of ours meets what a server should not present.
func TestTLSConfigAsServer(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	for name, c := range map[string]struct {
		config *tls.Config
		rule   string
	}{
		"good":    {spiffetest.TLSConfig(ca.Certificate("/db")), ""},
		"expired": {spiffetest.TLSConfig(ca.Broken("Expired")), "X5-30"},
		"foreign": {spiffetest.TLSConfig(spiffetest.NewCA(t, "other.test").Certificate("/db")), "X5-38"},
		"client":  {spiffetest.TLSConfig(ca.Broken("ClientOnly")), "X5-39"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inner := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
			l := tls.NewListener(inner, c.config)
			defer l.Close()
			clients := make(chan int, 1)
			go func() {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				defer conn.Close()
				_ = conn.(*tls.Conn).HandshakeContext(t.Context())
				clients <- len(conn.(*tls.Conn).ConnectionState().PeerCertificates)
				_, _ = io.Copy(io.Discard, conn)
			}()
			dialer, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer()})
			require.NoError(t, err)
			conn, err := dialer.DialContext(t.Context(), "tcp", inner.Addr().String())
			if c.rule == "" {
				require.NoError(t, err)
				defer conn.Close()
				assert.Equal(t, 1, <-clients, "it asks for the client's certificate")
				return
			}
			e := must.As[*spiffe.VerifyError](err)(t)
			assert.Equal(t, c.rule, e.Rule)
		})
	}
}
