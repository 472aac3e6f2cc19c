package health_test

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/sourcereport"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/report"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

func newHandler(t testing.TB, parts ...health.Part) *health.Handler {
	t.Helper()
	return must.Get(health.New(parts...))(t)
}

// ask returns the answer of h.
func ask(t testing.TB, h http.Handler, path string) (code int, body string) {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
	assert.Equal(t, "no-store", w.Header().Get("Cache-Control"))
	return w.Code, w.Body.String()
}

func samples(t testing.TB, h *health.Handler) map[string]float64 {
	t.Helper()
	text := must.Get(metricstest.Of(h.WriteMetrics))(t)
	code, body := ask(t, h, "/metrics")
	require.Equal(t, http.StatusOK, code)
	must.Get(metricstest.Page(body))(t)
	return text.Samples
}

// TestOutage follows a service from before its start: it waits for its registration, is ready, stays so while its agent
// is away until the identity expires, dies in that instant, and is ready again when the agent is back.
func TestOutage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := workloadapitest.NewInMemory(t, spiffetest.NewCA(t, "example.org"), "/web")
		api.Deny()
		src := must.Get(workloadapi.New(api.Config()))(t)
		h := newHandler(t, health.Part{Name: "identity", Source: src})
		is := func(ready, live int, why string) {
			t.Helper()
			synctest.Wait()
			code, body := ask(t, h, "/ready")
			assert.Equal(t, ready, code, body)
			if ready == http.StatusOK {
				assert.Equal(t, "ok\n", body)
				assert.NoError(t, h.Ready())
			} else {
				assert.Regexp(t, `^identity: .*`+why, body)
				assert.Regexp(t, why, h.Ready().Error())
			}
			code, body = ask(t, h, "/live")
			assert.Equal(t, live, code, body)
			s := samples(t, h)
			for name, code := range map[string]int{"svidkit_ready": ready, "svidkit_alive": live} {
				assert.Equal(t, code == http.StatusOK, s[name+`{part="identity"}`] == 1, name)
			}
		}
		const up, down = http.StatusOK, http.StatusServiceUnavailable
		is(down, up, "neither called Start nor Run")

		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- src.Run(ctx) }()
		is(down, up, "no identity")
		require.ErrorIs(t, h.Ready(), workloadapi.ErrDenied, "the workload is not registered")
		require.ErrorIs(t, h.Ready(), spiffe.ErrNotReady)

		api.Mend()
		time.Sleep(time.Minute)
		is(up, up, "")
		svid := must.Get(src.SVID())(t)

		api.Hang()
		time.Sleep(30 * time.Minute)
		is(up, up, "")
		api.Drop()
		time.Sleep(time.Until(svid.NotAfter()))
		require.True(t, time.Now().Equal(svid.NotAfter()))
		is(up, up, "")
		time.Sleep(time.Nanosecond)
		is(down, down, `"spiffe://example.org/web" expired at .* and was not renewed`)
		time.Sleep(time.Minute)
		is(down, down, "expired")

		api.Mend()
		api.Rotate()
		time.Sleep(time.Minute)
		is(up, up, "")
		api.Deny()
		is(down, up, "no identity")
		cancel()
		require.NoError(t, <-done)
	})
}

// The SVID is good for as long as peers with the same bundle can verify its chain, whatever else is in that.
func TestChain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		root := spiffetest.NewCA(t, "example.org")
		good, short := root.Intermediate(), root.Intermediate(func(c *x509.Certificate) { c.NotAfter = time.Now().Add(20 * time.Minute) })
		svid := must.Get(spiffe.NewSVID(short.Certificate("/web")))(t)
		chain, key := good.Certificate("/web")
		extra, _ := short.Certificate("/web")
		svidWithMore := must.Get(spiffe.NewSVID(append(chain, extra[1:]...), key))(t)
		needed := newHandler(t, health.Part{Name: "it", Source: health.FromSources(svid, root.Bundles())})
		more := newHandler(t, health.Part{Name: "it", Source: health.FromSources(svidWithMore, root.Bundles())})
		foreign := newHandler(t, health.Part{Name: "it", Source: health.FromSources(svid, spiffetest.NewCA(t, "example.org").Bundles())})
		time.Sleep(20 * time.Minute)
		require.NoError(t, needed.Ready())
		require.NoError(t, more.Ready())
		require.ErrorContains(t, foreign.Ready(), "signed by unknown authority")
		time.Sleep(time.Second)
		require.True(t, time.Now().Before(svid.NotAfter()))
		require.ErrorContains(t, needed.Ready(), `no peer that has this trust bundle of "example.org" accepts the SVID of "spiffe://example.org/web"`)
		require.NoError(t, more.Ready())
		code, _ := ask(t, needed, "/live")
		require.Equal(t, http.StatusOK, code, "a restart mends nothing")
	})
}

// TestBundles: a service that can verify no peer is not ready.
func TestBundles(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
		empty := must.Get(spiffe.NewBundle(ca.TrustDomain(), spiffe.BundleContents{}))(t)
		keys := ca.Bundle().Contents()
		keys.X509Authorities = nil
		keys.JWTAuthorities = map[string]crypto.PublicKey{"k": ca.SVID("/web").Leaf().PublicKey}
		tokens := must.Get(spiffe.NewBundle(ca.TrustDomain(), keys))(t)
		both := must.Get(spiffe.NewBundleSet(ca.Bundle(), other.Bundle()))(t)
		web := ca.SVID("/web", func(c *x509.Certificate) { c.NotAfter = time.Now().Add(100 * 365 * 24 * time.Hour) })
		for name, c := range map[string]struct {
			part health.Part
			why  string
		}{
			"good":              {health.Part{Source: health.FromSources(web, ca.Bundle())}, ""},
			"empty":             {health.Part{Source: health.FromSources(web, empty)}, `the trust bundle of "example.org" is empty`},
			"for tokens":        {health.Part{Source: health.FromSources(web, tokens)}, ""},
			"of another domain": {health.Part{Source: health.FromSources(web, other.Bundle())}, `"example.org": no trust bundle`},
			"without identity":  {health.Part{Source: health.FromSources(nil, empty)}, ""},
			"both":              {health.Part{Source: health.FromSources(nil, both), TrustDomains: []spiffe.TrustDomain{ca.TrustDomain(), other.TrustDomain()}}, ""},
			"one missing": {health.Part{Source: health.FromSources(nil, ca.Bundle()),
				TrustDomains: []spiffe.TrustDomain{ca.TrustDomain(), other.TrustDomain()}}, `"other.test": no trust bundle`},
			"none needed":   {health.Part{Source: health.FromSources(web, empty), TrustDomains: []spiffe.TrustDomain{}}, ""},
			"nil":           {health.Part{Source: health.FromSources(web, nothing{})}, "returned no bundle"},
			"nil identity":  {health.Part{Source: health.FromSources(nothing{}, nil)}, "returned no SVID"},
			"own condition": {health.Part{Source: health.FromSources(web, nil), Check: func() error { return errors.New("the disk is full") }}, "the disk is full"},
			"check":         {health.Part{Check: func() error { return nil }}, ""},
		} {
			c.part.Name = "it"
			h := newHandler(t, c.part, health.Part{Name: "well", Check: func() error { return nil }})
			if c.why == "" {
				assert.NoError(t, h.Ready(), name)
			} else if assert.ErrorContains(t, h.Ready(), c.why, name) {
				assert.NotContains(t, h.Ready().Error(), "well")
			}
			assert.NoError(t, h.Alive(), name)
			samples(t, h)
		}
		h := newHandler(t, health.Part{Name: "it", Source: health.FromSources(web, ca.Bundle())})
		end := time.Time{}
		for c := range ca.Bundle().X509Authorities() {
			end = c.NotAfter
		}
		require.True(t, end.Before(web.NotAfter()))
		time.Sleep(time.Until(end))
		require.NoError(t, h.Ready())
		time.Sleep(time.Nanosecond)
		require.ErrorContains(t, h.Ready(), `last X.509 authority in the trust bundle of "example.org" expired`)
		require.NoError(t, h.Alive())
	})
}

// nothing is a source that breaks its promise.
type nothing struct{}

func (nothing) SVID() (*spiffe.SVID, error)                       { return nil, nil }
func (nothing) Bundle(spiffe.TrustDomain) (*spiffe.Bundle, error) { return nil, nil }

// TestMetrics: the numbers of an identity and of its bundles, from sources of all shapes.
func TestMetrics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		root := spiffetest.NewCA(t, "example.org")
		ca := root.Intermediate(func(c *x509.Certificate) { c.NotAfter = time.Now().Add(20 * time.Minute) })
		other := spiffetest.NewCA(t, "other.test")
		root.Federate(other.Bundle())
		web := ca.SVID("/web")
		c := root.Bundle().Contents()
		second := spiffetest.NewCA(t, "example.org").Root()
		c.X509Authorities = append(c.X509Authorities, second)
		n := uint64(7)
		c.Sequence, c.RefreshHint = &n, 5*time.Minute
		own := must.Get(spiffe.NewBundle(root.TrustDomain(), c))(t)
		set := must.Get(spiffe.NewBundleSet(own, other.Bundle()))(t)
		for name, bundles := range map[string]spiffe.BundleSource{
			"set": set, "snapshot": spiffe.NewSnapshot(web, set), "source": snapshots{set, web}, "manager": managed{set}, "unknown": unknown{set}, "bundle": own,
		} {
			s := samples(t, newHandler(t, health.Part{Name: "it", Source: health.FromSources(web, bundles)}))
			const identity = `{identity="spiffe://example.org/web",part="it"}`
			assert.EqualValues(t, web.Leaf().NotBefore.Unix(), s["svidkit_identity_start_timestamp_seconds"+identity])
			assert.EqualValues(t, time.Now().Add(20*time.Minute).Unix(), s["svidkit_identity_end_timestamp_seconds"+identity], "it is of no use later")
			assert.EqualValues(t, time.Now().Add(20*time.Minute).Unix(), s["svidkit_identity_chain_end_timestamp_seconds"+identity])
			assert.Equal(t, 2., s[`svidkit_bundle_authorities{part="it",trust_domain="example.org",type="x509"}`])
			assert.Contains(t, s, `svidkit_bundle_authorities{part="it",trust_domain="example.org",type="jwt"}`)
			assert.Equal(t, 7., s[`svidkit_bundle_sequence{part="it",trust_domain="example.org"}`])
			first, last := s[`svidkit_bundle_first_authority_end_timestamp_seconds{part="it",trust_domain="example.org"}`], s[`svidkit_bundle_last_authority_end_timestamp_seconds{part="it",trust_domain="example.org"}`]
			assert.EqualValues(t, min(second.NotAfter.Unix(), root.Root().NotAfter.Unix()), first)
			assert.EqualValues(t, max(second.NotAfter.Unix(), root.Root().NotAfter.Unix()), last)
			_, knows := s[`svidkit_bundle_authorities{part="it",trust_domain="other.test",type="x509"}`]
			assert.Equal(t, name != "unknown" && name != "bundle", knows, name)
		}
	})
}

type snapshots struct {
	*spiffe.BundleSet
	svid *spiffe.SVID
}

func (s snapshots) Snapshot() (*spiffe.Snapshot, error) {
	return spiffe.NewSnapshot(s.svid, s.BundleSet), nil
}

type managed struct{ set *spiffe.BundleSet }

func (m managed) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return m.set.Bundle(td) }
func (m managed) Bundles() *spiffe.BundleSet                           { return m.set }

type unknown struct{ spiffe.BundleSource }

// TestParts: two parts of one kind are in one text, told apart by their names, and one that fails fails it all.
func TestParts(t *testing.T) {
	t.Parallel()
	var in, out spiffetls.Metrics
	g := &spiffetls.Governor{}
	fed := must.Get(federation.New(federation.Config{}))(t)
	h := newHandler(t, health.Part{Name: "in", Source: &in}, health.Part{Name: `o"u\t`, Source: &out}, health.Part{Name: "governor", Source: g},
		health.Part{Name: "federation", Source: fed})
	s := samples(t, h)
	assert.Contains(t, s, `svidkit_tls_handshakes_total{outcome="full",part="in",side="server"}`)
	assert.Contains(t, s, `svidkit_tls_handshakes_total{outcome="full",part="o\"u\\t",side="server"}`)
	assert.Contains(t, s, `svidkit_governor_connections{part="governor",state="open"}`)

	h = newHandler(t, health.Part{Name: "in", Source: &in}, health.Part{Name: "bad", Source: failing{}})
	code, body := ask(t, h, "/metrics")
	assert.Equal(t, http.StatusInternalServerError, code)
	assert.Equal(t, "health: metrics of \"bad\": no numbers  today\n", body)
	require.ErrorContains(t, h.WriteMetrics(io.Discard), `metrics of "bad"`)
}

type failing struct{}

func (failing) Report() report.Report {
	return report.Report{Metrics: func(io.Writer) error { return errors.New("no\nnumbers\x1b today") }}
}

type reporter func() report.Report

func (r reporter) Report() report.Report { return r() }

// TestReporter: whatever a part of a program's own tells, the answers are right, and the metrics are valid.
func TestReporter(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		now, fault := time.Now(), errors.New("no connection")
		ca := spiffetest.NewCA(t, "example.org")
		bundle := sourcereport.Of(nil, ca.Bundle(), "").Bundles[0]
		td := ca.TrustDomain()
		id := func(name string, end time.Time, err error) report.Identity {
			return report.Identity{Name: name, Own: true, NotAfter: end, Err: err}
		}
		const web = "spiffe://example.org/web"
		for name, c := range map[string]struct {
			r           report.Report
			domains     []spiffe.TrustDomain
			ready, live string // the errors
		}{
			"empty":            {report.Report{}, nil, "", ""},
			"problems":         {report.Report{Problems: []error{fault}, Upstreams: []report.Upstream{{Err: fault}}}, nil, "", ""},
			"not ready":        {report.Report{NotReady: fault}, nil, "no connection", ""},
			"none yet":         {report.Report{Identities: []report.Identity{id(web, time.Time{}, nil)}}, nil, "there is no identity yet", ""},
			"none, with cause": {report.Report{Identities: []report.Identity{id(web, time.Time{}, fault)}}, nil, "no connection", ""},
			"old, with cause":  {report.Report{Identities: []report.Identity{id(web, now.Add(time.Hour), fault)}}, nil, "", ""},
			"expired":          {report.Report{Identities: []report.Identity{id(web, now.Add(-time.Hour), fault)}}, nil, "expired at", "expired at"},
			"of others":        {report.Report{Identities: []report.Identity{{Name: web, NotAfter: now.Add(-time.Hour), Err: fault}}}, nil, "", ""},
			"second expired":   {report.Report{Identities: []report.Identity{id("db", now.Add(time.Hour), nil), id(web, now.Add(-time.Hour), nil)}}, nil, "expired at", "expired at"},
			"twice": {report.Report{
				Identities: []report.Identity{id(web, now.Add(time.Hour), nil), id(web, now.Add(2*time.Hour), nil)}, Bundles: []report.Bundle{bundle, bundle},
			}, nil, "", ""},
			"no bundle of its own": {report.Report{
				Identities: []report.Identity{id(web, now.Add(time.Hour), nil)}, Bundles: []report.Bundle{{TrustDomain: "other.test"}},
			}, nil, "no trust bundle", ""},
			"no bundles":        {report.Report{Identities: []report.Identity{id(web, now.Add(time.Hour), nil)}}, nil, "", ""},
			"no needed bundle":  {report.Report{}, []spiffe.TrustDomain{td}, "no trust bundle", ""},
			"bundle that fails": {report.Report{Bundles: []report.Bundle{{TrustDomain: "example.org", Err: fault}}}, []spiffe.TrustDomain{td}, "no connection", ""},
			"needed bundle":     {report.Report{Bundles: []report.Bundle{bundle}}, []spiffe.TrustDomain{td}, "", ""},
		} {
			h := newHandler(t, health.Part{Name: "it", Source: reporter(func() report.Report { return c.r }), TrustDomains: c.domains})
			for _, answer := range []struct {
				got  error
				want string
			}{{h.Ready(), c.ready}, {h.Alive(), c.live}} {
				if answer.want == "" {
					assert.NoError(t, answer.got, name)
				} else {
					assert.ErrorContains(t, answer.got, answer.want, name)
				}
			}
			samples(t, h)
		}
	})
}

func TestServeHTTP(t *testing.T) {
	t.Parallel()
	why := errors.New("first\nsecond\x1b[31m" + strings.Repeat("é", 2000))
	h := newHandler(t, health.Part{Name: "a", Check: func() error { return why }}, health.Part{Name: "b", Check: func() error { return errors.Join(why, why) }})
	for path, want := range map[string]int{
		"/ready": 503, "/readyz": 503, "/healthz/ready": 503, "/x/readyz": 503, "/live": 200, "/livez": 200, "/metrics": 200, "/": 404, "/health": 404, "/ready/x": 404,
	} {
		code, body := ask(t, h, path)
		assert.Equal(t, want, code, path)
		if code == 503 {
			lines := strings.Split(strings.TrimSuffix(body, "\n"), "\n")
			require.Len(t, lines, 2, "one for each part")
			assert.True(t, strings.HasPrefix(lines[0], "a: first second [31m"), lines[0])
			assert.Less(t, len(lines[0]), 1100)
			assert.Less(t, len(lines[1]), 1100)
		}
	}
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodOptions} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, "/ready", nil))
		assert.Equal(t, http.StatusMethodNotAllowed, w.Code)
		assert.Equal(t, "GET, HEAD", w.Header().Get("Allow"))
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodHead, "/metrics", nil))
	assert.Equal(t, "text/plain; version=0.0.4; charset=utf-8", w.Header().Get("Content-Type"))
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	check := func() error { return nil }
	for want, parts := range map[string][]health.Part{
		"no parts":                            nil,
		"part 1 needs a Name":                 {{Check: check}},
		"part 2 needs a Name":                 {{Name: "a", Check: check}, {Name: "b\n", Check: check}},
		`two parts have the name "a"`:         {{Name: "a", Check: check}, {Name: "a", Check: check}},
		`part "a" has nothing`:                {{Name: "a"}},
		"TrustDomains and no Source":          {{Name: "a", Check: check, TrustDomains: []spiffe.TrustDomain{spiffe.MustParseTrustDomain("example.org")}}},
		"a trust domain is missing: zero val": {{Name: "a", Source: health.FromSources(nil, nothing{}), TrustDomains: []spiffe.TrustDomain{{}}}},
	} {
		h, err := health.New(parts...)
		assert.ErrorContains(t, err, want)
		assert.Nil(t, h)
	}
	parts := []health.Part{{Name: "a", Check: check}}
	h := newHandler(t, parts...)
	parts[0].Check = func() error { return errors.New("changed") }
	assert.NoError(t, h.Ready(), "the parts are copied")
}
