package spiffetls_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// failure is the last one of a kind, as it is reported.
type failure struct {
	Kind   string // as in a tally
	Count  int
	Last   time.Time
	Remote string
	Err    error
}

var problem = regexp.MustCompile("^spiffetls: (?:handshake failed|request denied): from ([^ ]+) at ([0-9TZ:-]+): ")

// one returns the only failure of a log.
func one(t *testing.T, l *spiffetls.Metrics) (f failure) {
	t.Helper()
	all := l.Report().Problems
	require.Len(t, all, 1)
	m := problem.FindStringSubmatch(all[0].Error())
	require.NotNil(t, m, all[0].Error())
	f.Remote, f.Last, f.Err = m[1], must.Get(time.Parse(time.RFC3339, m[2]))(t), errors.Unwrap(all[0])
	for kind, n := range failuresOf(t, l) {
		require.Zero(t, f.Count)
		f.Kind, f.Count = kind, n
	}
	return f
}

// failuresOf returns what m has counted, without what went well.
func failuresOf(t testing.TB, m *spiffetls.Metrics) tally {
	t.Helper()
	got := tallyOf(t, m)
	maps.DeleteFunc(got, func(kind string, _ int) bool {
		return strings.HasSuffix(kind, " full") || strings.HasSuffix(kind, " resumed")
	})
	return got
}

// ruleOf returns the rule and the ID of a refusal.
func ruleOf(err error) (rule, id string) {
	if ve, ok := errors.AsType[*spiffe.VerifyError](err); ok {
		rule, id = ve.Rule, ve.ID.String()
	}
	return rule, id
}

// TestHandshakeErrors looks at both sides of each failure.
func TestHandshakeErrors(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "X5-31", "X5-38")
	ca, foreign := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
	at := newParty(ca.SVID("/at"), ca.Bundles())
	stranger := newParty(foreign.SVID("/stranger"), ca.Bundles())
	expired := newParty(ca.SVID("/old", func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = c.NotBefore.Add(-time.Hour), c.NotBefore.Add(-time.Second)
	}), ca.Bundles())
	for _, version := range versions {
		for name, c := range map[string]struct {
			other *party
			mine  bool // the identity that is missing is this side's
			kind  string
			rule  string
			id    string
		}{
			"stranger":    {other: stranger, kind: "unknown_trust_domain", rule: "X5-38", id: "spiffe://other.test/stranger"},
			"no identity": {other: expired, mine: true, kind: "no_identity"},
		} {
			for _, server := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s/%s/server=%t", tls.VersionName(version), name, server), func(t *testing.T) {
					t.Parallel()
					// The strict one is the side whose log is looked at.
					var failures, others spiffetls.Metrics
					opts := &spiffetls.Config{MinVersion: version, Metrics: &failures}
					otherOpts := &spiffetls.Config{MinVersion: version, Metrics: &others}
					strict, other := at, c.other
					if c.mine {
						strict, other = c.other, at
					}
					var mine, theirs result
					if server {
						sc := strict.server(t, spiffe.AllowAnyPeer(), opts)
						sc.MaxVersion = version
						mine, theirs = connect(t, sc, other.client(t, spiffe.AllowAnyPeer(), otherOpts))
					} else {
						sc := other.server(t, spiffe.AllowAnyPeer(), otherOpts)
						sc.MaxVersion = version
						cc := strict.client(t, spiffe.AllowAnyPeer(), opts)
						cc.ServerName = "at.test"
						theirs, mine = connect(t, sc, cc)
					}
					e, ok := errors.AsType[*spiffetls.HandshakeError](mine.err)
					require.True(t, ok, "%v", mine.err)
					assert.Equal(t, server, e.Server)
					assert.Error(t, theirs.err)

					f := one(t, &failures)
					assert.Equal(t, map[bool]string{true: "server", false: "client"}[server]+" failed "+c.kind, f.Kind)
					rule, id := ruleOf(f.Err)
					assert.Equal(t, c.rule, rule)
					assert.Equal(t, c.id, id)
					if c.id == "" {
						assert.ErrorContains(t, e, "spiffetls: no identity to present: ")
					} else {
						assert.ErrorContains(t, e, map[bool]string{true: "spiffetls: the client is refused: verify peer", false: "spiffetls: the server is refused: verify peer"}[server])
					}
					assert.Equal(t, e, f.Err)
					switch {
					case server:
						assert.Empty(t, failuresOf(t, &others), "the client of a refusal was content, or only saw an alert")
					case !c.mine:
						assert.Equal(t, "at.test", f.Remote)
					}
				})
			}
		}
	}
}

// TestClockIsSuspected compares what both clocks say.
func TestClockIsSuspected(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "XV-24", "XV-25")
	ca := spiffetest.NewCA(t, "example.org")
	now := time.Now().Truncate(time.Second)
	valid := func(from, until time.Duration) func(*x509.Certificate) {
		return func(c *x509.Certificate) { c.NotBefore, c.NotAfter = now.Add(from), now.Add(until) }
	}
	usual := valid(-time.Hour, time.Hour)
	for name, c := range map[string]struct {
		peer  func(*x509.Certificate)
		own   func(*x509.Certificate)
		off   time.Duration
		clock string
	}{
		"expired a moment ago": {valid(-time.Hour, -3*time.Second), usual, 3 * time.Second, "the certificate expired 3s ago: if the other side renews in time, compare the clocks"},
		"expired long ago":     {valid(-time.Hour, -6*time.Minute), usual, 6 * time.Minute, ""},
		"from the future":      {valid(5*time.Second, time.Hour), usual, -5 * time.Second, "the certificate becomes valid only in 5s: compare the clocks"},
		"from the far future":  {valid(2*time.Hour, 3*time.Hour), usual, -2 * time.Hour, "the certificate becomes valid only in 2h0m0s: compare the clocks"},
		"something else, and expired": {func(c *x509.Certificate) {
			valid(-time.Hour, -time.Second)(c)
			c.KeyUsage = x509.KeyUsageKeyEncipherment
		}, usual, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var failures spiffetls.Metrics
			self := newParty(ca.SVID("/self", c.own), ca.Bundles())
			config := self.client(t, spiffe.AllowAnyPeer(), &spiffetls.Config{Now: func() time.Time { return now }, Metrics: &failures})
			chain, _ := ca.Certificate("/peer", c.peer)
			err := config.VerifyConnection(tls.ConnectionState{PeerCertificates: chain})
			e, ok := errors.AsType[*spiffetls.HandshakeError](err)
			require.True(t, ok, "%v", err)
			assert.Equal(t, e, one(t, &failures).Err)
			if c.clock != "" {
				assert.True(t, strings.HasSuffix(e.Error(), "; "+c.clock), e.Error())
			} else {
				assert.NotContains(t, e.Error(), "clock")
			}
			if c.off != 0 {
				invalid, ok := errors.AsType[x509.CertificateInvalidError](err)
				require.True(t, ok)
				assert.Equal(t, x509.Expired, invalid.Reason)
			}
		})
	}
}

// TestFailures sends clients of all kinds to a server and looks at what it keeps of them.
func TestFailures(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	var failures, clients spiffetls.Metrics
	s := configured(t, ca, spiffe.AllowIDs(ca.SVID("/web").ID()), &spiffetls.Config{Metrics: &failures})
	url := serve(t, s, nil)
	assert.Equal(t, "2 spiffe://example.org/web", get(t, clientOf(t, ca, "/web", &spiffetls.Config{Metrics: &clients}), url))
	assert.Empty(t, failuresOf(t, &failures))
	assert.Empty(t, failures.Report().Problems)

	for range 3 {
		_, err := clientOf(t, ca, "/other", http1).Get(url)
		require.Error(t, err)
	}
	f := one(t, &failures)
	assert.EqualValues(t, 3, f.Count, "one host, many ports")
	assert.Equal(t, "server failed denied", f.Kind)
	_, id := ruleOf(f.Err)
	assert.Equal(t, "spiffe://example.org/other", id)
	assert.Regexp(t, `^127\.0\.0\.1:\d+$`, f.Remote)
	assert.WithinDuration(t, time.Now(), f.Last, time.Minute)

	// A client that refuses the server, and one that has no certificate.
	impostor := spiffetest.NewCA(t, "example.org")
	transport, err := newTransport(spiffetls.Config{Self: impostor.SVID("/web"), Peers: impostor.Bundle(), Allow: spiffe.AllowAnyPeer(), Metrics: &clients})
	require.NoError(t, err)
	_, err = (&http.Client{Transport: transport}).Get(url)
	verifyError(t, err, "chain")
	f = one(t, &clients)
	assert.Equal(t, "client failed unknown_authority", f.Kind)
	assert.Equal(t, strings.TrimPrefix(url, "https://"), f.Remote, "where it was")
	rule, _ := ruleOf(f.Err)
	assert.Equal(t, "X5-31", rule)
	counted(t, &failures, tally{"server full": 1, "server failed denied": 3, "server failed not_verified": 1})
	kept := failures.Report().Problems
	require.Len(t, kept, 2)
	assert.ErrorContains(t, kept[0], "the handshake ended before the client was verified")
	conn, err := tls.Dial("tcp", strings.TrimPrefix(url, "https://"), &tls.Config{InsecureSkipVerify: true})
	if err == nil {
		_, err = conn.Read(make([]byte, 1))
		_ = conn.Close()
	}
	require.Error(t, err)
	counted(t, &failures, tally{"server full": 1, "server failed denied": 3, "server failed not_verified": 2})
	assert.Len(t, failures.Report().Problems, 2)

	// A client that has a stolen certificate without its key.
	thief := bare(ca.SVID("/web").Chain(), ca.SVID("/thief").Signer())
	conn, err = tls.Dial("tcp", strings.TrimPrefix(url, "https://"), thief)
	if err == nil {
		_, err = conn.Read(make([]byte, 1))
		_ = conn.Close()
	}
	require.Error(t, err)
	counted(t, &failures, tally{
		"server full": 1, "server failed denied": 3, "server failed not_verified": 2, "server failed not_proven": 1,
	})
	kept = failures.Report().Problems
	require.Len(t, kept, 3)
	assert.ErrorContains(t, kept[0], "does not hold its key")
	assert.ErrorContains(t, kept[0], "spiffe://example.org/web")
}

// TestDialMetrics: what a transport meets before a peer is verified.
func TestDialFailures(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	old := must.Get(tls.Listen("tcp", "127.0.0.1:0", func() *tls.Config {
		c := bare(ca.SVID("/old").Chain(), ca.SVID("/old").Signer())
		c.MaxVersion = tls.VersionTLS12
		return c
	}()))(t)
	defer old.Close()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		if c, err := old.Accept(); err == nil {
			_ = c.(*tls.Conn).Handshake()
			_ = c.Close()
		}
	})
	var failures spiffetls.Metrics
	transport, err := newTransport(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer(), Metrics: &failures})
	require.NoError(t, err)
	client := &http.Client{Transport: transport}
	_, err = client.Get("https://" + old.Addr().String())
	require.Error(t, err)
	f := one(t, &failures)
	assert.Equal(t, "client failed refused", f.Kind)
	assert.Equal(t, old.Addr().String(), f.Remote)
	assert.ErrorContains(t, f.Err, "protocol version")

	transport.DialContext = nil // the caller's to change; net/http has a dialler of its own then
	closed := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	require.NoError(t, closed.Close())
	_, err = client.Get("https://" + closed.Addr().String())
	require.Error(t, err)
	assert.EqualValues(t, 1, one(t, &failures).Count, "no handshake has failed")
}

// TestHandshakeTimeout: the transport's own timeout holds, and is a failure.
func TestHandshakeTimeout(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		var failures spiffetls.Metrics
		transport, err := newTransport(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer(), Metrics: &failures})
		require.NoError(t, err)
		transport.DialContext = func(context.Context, string, string) (net.Conn, error) {
			c, _ := memconn.Pipe()
			return c, nil
		}
		start := time.Now()
		_, err = (&http.Client{Transport: transport}).Get("https://silent.test/")
		require.Error(t, err)
		assert.Equal(t, 10*time.Second, time.Since(start))
		f := one(t, &failures)
		assert.Equal(t, "silent.test:443", f.Remote)
		assert.Equal(t, "client failed timeout", f.Kind)

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		req := must.Get(http.NewRequestWithContext(ctx, http.MethodGet, "https://silent.test/", nil))(t)
		_, err = (&http.Client{Transport: transport}).Do(req)
		require.Error(t, err)
		after(time.Minute) // net/http dials on for other requests
		assert.EqualValues(t, 2, one(t, &failures).Count)
	})
}

func TestRequirePeer(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	ops, web := ca.SVID("/ops"), ca.SVID("/web")
	live := new(spiffe.LivePolicy)
	require.NoError(t, live.Set(spiffe.AllowIDs(ops.ID())))
	mux := http.NewServeMux()
	for path, allow := range map[string]spiffe.PolicySource{"/any": spiffe.AllowAnyPeer(), "/ops": spiffe.AllowIDs(ops.ID()), "/live": live} {
		h := must.Get(spiffetls.RequirePeer(allow, who))(t)
		mux.Handle(path, h)
	}
	var failures spiffetls.Metrics
	s := &http.Server{Handler: mux}
	require.NoError(t, configureServer(s, spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowMembersOf(ca.TrustDomain()), Metrics: &failures}))
	url := serve(t, s, nil)
	for _, opts := range []*spiffetls.Config{nil, http1} {
		webClient, opsClient := clientOf(t, ca, "/web", opts), clientOf(t, ca, "/ops", opts)
		allowed := func(c *http.Client, path string, want bool) {
			t.Helper()
			resp := must.Get(c.Get(url + path))(t)
			body := must.Get(io.ReadAll(resp.Body))(t)
			require.NoError(t, resp.Body.Close())
			if want {
				assert.Equal(t, http.StatusOK, resp.StatusCode)
				assert.Contains(t, string(body), "spiffe://example.org/")
				return
			}
			assert.Equal(t, http.StatusForbidden, resp.StatusCode)
			assert.Equal(t, "forbidden\n", string(body))
			assert.Equal(t, "no-store", resp.Header.Get("Cache-Control"))
			for name, values := range resp.Header {
				assert.NotContains(t, strings.Join(values, " "), "spiffe", name)
			}
		}
		allowed(webClient, "/any", true)
		allowed(opsClient, "/any", true)
		allowed(webClient, "/ops", false)
		allowed(opsClient, "/ops", true)
		allowed(webClient, "/live", false)
		require.NoError(t, live.Set(spiffe.AllowIDs(web.ID())))
		allowed(webClient, "/live", true)
		allowed(opsClient, "/live", false)
		require.NoError(t, live.Set(spiffe.AllowIDs(ops.ID())))
	}
	f := one(t, &failures)
	assert.Equal(t, 6, f.Count)
	assert.Equal(t, "request denied", f.Kind)
	assert.ErrorContains(t, f.Err, "not allowed by policy, which allows ")

	// A request that came by another way has no peer.
	any := must.Get(spiffetls.RequirePeer(spiffe.AllowAnyPeer(), who))(t)
	w := httptest.NewRecorder()
	r := httptest.NewRequest("GET", "/", nil)
	r.TLS = &tls.ConnectionState{PeerCertificates: web.Chain(), HandshakeComplete: true}
	any.ServeHTTP(w, r)
	assert.Equal(t, http.StatusForbidden, w.Code)

	plain := configured(t, ca, spiffe.AllowAnyPeer(), nil)
	plain.Handler = any
	resp := must.Get(http.Get("http" + strings.TrimPrefix(serve(t, plain, plain.Serve), "https")))(t)
	require.NoError(t, resp.Body.Close())
	assert.Equal(t, http.StatusForbidden, resp.StatusCode, "without TLS")
}

func TestRequirePeerMistakes(t *testing.T) {
	t.Parallel()
	for want, f := range map[string]func() (http.Handler, error){
		"no handler":         func() (http.Handler, error) { return spiffetls.RequirePeer(spiffe.AllowAnyPeer(), nil) },
		"no policy":          func() (http.Handler, error) { return spiffetls.RequirePeer(nil, who) },
		"the policy is zero": func() (http.Handler, error) { return spiffetls.RequirePeer(spiffe.Policy{}, who) },
		"at least one ID":    func() (http.Handler, error) { return spiffetls.RequirePeer(spiffe.AllowIDs(), who) },
	} {
		h, err := f()
		assert.Nil(t, h)
		assert.ErrorContains(t, err, "spiffetls: require peer: ")
		assert.ErrorContains(t, err, want)
	}
}
