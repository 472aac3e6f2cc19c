package health_test

import (
	"crypto/x509"
	"errors"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/sourcereport"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/report"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// A part needs each of its identities, and the bundle of each one's trust domain; each fault is told once, and over when it is.
func TestPartOfSeveral(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
		bundle := func(ca *spiffetest.CA) report.Bundle { return sourcereport.Of(nil, ca.Bundle(), "").Bundles[0] }
		const web, db = "spiffe://example.org/web", "spiffe://other.test/db"
		now := time.Now()
		var r report.Report
		own := func(name string, end time.Time) report.Identity {
			return report.Identity{Name: name, Own: true, NotAfter: end}
		}
		both := []report.Identity{own(web, now.Add(time.Hour)), own(db, now.Add(2*time.Hour))}
		bundles := []report.Bundle{bundle(home), bundle(other)}
		good := report.Report{Identities: both, Bundles: bundles}
		var condition error
		h := newHandler(t, health.Part{Name: "it", Source: reporter(func() report.Report { return r }), Check: func() error { return condition }})
		why := errors.New("no connection")
		for name, c := range map[string]struct {
			r           report.Report
			condition   error
			ready, live string
		}{
			"no bundle of the second":   {report.Report{Identities: both, Bundles: bundles[:1]}, nil, `"other.test": no trust bundle`, ""},
			"no bundle of the first":    {report.Report{Identities: both, Bundles: bundles[1:]}, nil, `"example.org": no trust bundle`, ""},
			"second not there":          {report.Report{Identities: []report.Identity{both[0], {Name: db, Own: true}}, Bundles: bundles}, nil, "there is no identity yet", ""},
			"second failed":             {report.Report{Identities: []report.Identity{both[0], {Name: db, Own: true, Err: why}}, Bundles: bundles}, nil, "no connection", ""},
			"first expired":             {report.Report{Identities: []report.Identity{own(web, now.Add(-1)), both[1]}, Bundles: bundles}, nil, web, web},
			"second expired":            {report.Report{Identities: []report.Identity{both[0], own(db, now.Add(-1))}, Bundles: bundles}, nil, db, db},
			"ends now":                  {report.Report{Identities: []report.Identity{own(web, now), both[1]}, Bundles: bundles}, nil, "", ""},
			"its own condition":         {good, why, "no connection", ""},
			"its condition comes last":  {report.Report{NotReady: errors.New("not ready"), Identities: both, Bundles: bundles}, why, "not ready", ""},
			"one of others has expired": {report.Report{Identities: append([]report.Identity{{Name: "spiffe://example.org/of-another", NotAfter: now.Add(-1)}}, both...), Bundles: bundles}, nil, "", ""},
			"one twice": {report.Report{ // the first counts
				Identities: append([]report.Identity{both[0], both[1]}, own(web, now.Add(-1))), Bundles: append([]report.Bundle{bundles[0], bundles[1]}, report.Bundle{TrustDomain: "other.test", Err: why}),
			}, nil, "", ""},
		} {
			for _, answer := range []struct {
				path, want string
				f          func() error
			}{{"/ready", c.ready, h.Ready}, {"/live", c.live, h.Alive}} {
				r, condition = good, nil
				require.NoError(t, answer.f(), "before %s", name)
				r, condition = c.r, c.condition
				code, body := ask(t, h, answer.path)
				if answer.want == "" {
					assert.NoError(t, answer.f(), name)
					assert.Equal(t, http.StatusOK, code, name)
				} else {
					assert.ErrorContains(t, answer.f(), answer.want, name)
					assert.Equal(t, http.StatusServiceUnavailable, code, name)
					assert.Contains(t, body, answer.want)
				}
				r, condition = good, nil
				code, _ = ask(t, h, answer.path)
				assert.Equal(t, http.StatusOK, code, "after %s", name)
			}
		}
	})
}

// The metrics of a bundle are those of the one that there is, with the ends of its authorities and the start of the last.
func TestMetricsOfBundles(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		now := time.Now().Truncate(time.Second)
		authority := func(from, to time.Duration) *x509.Certificate {
			return &x509.Certificate{NotBefore: now.Add(from), NotAfter: now.Add(to)}
		}
		first, middle, last := authority(-time.Hour, time.Hour), authority(-30*time.Minute, 2*time.Hour), authority(-time.Minute, 3*time.Hour)
		for _, all := range [][]*x509.Certificate{{first, middle, last}, {last, middle, first}, {middle, last, first}, {last}} {
			n := uint64(0)
			s := samples(t, newHandler(t, health.Part{Name: "it", Source: reporter(func() report.Report {
				return report.Report{Bundles: []report.Bundle{
					{TrustDomain: "example.org", Origin: "away", Err: errors.New("no connection"), X509: []*x509.Certificate{authority(0, 1)}},
					{TrustDomain: "example.org", X509: all, JWT: []string{"a"}, Sequence: &n, RefreshHint: time.Second},
					{TrustDomain: "example.org", X509: []*x509.Certificate{authority(0, time.Hour)}},
					{TrustDomain: "other.test", WIT: []string{"b", "c"}},
				}}
			})}))
			const own, other = `{part="it",trust_domain="example.org"}`, `{part="it",trust_domain="other.test"}`
			want := first
			if len(all) == 1 {
				want = last
			}
			assert.EqualValues(t, want.NotAfter.Unix(), s["svidkit_bundle_first_authority_end_timestamp_seconds"+own])
			assert.EqualValues(t, last.NotAfter.Unix(), s["svidkit_bundle_last_authority_end_timestamp_seconds"+own])
			assert.EqualValues(t, last.NotBefore.Unix(), s["svidkit_bundle_last_authority_start_timestamp_seconds"+own])
			assert.EqualValues(t, len(all), s[`svidkit_bundle_authorities{part="it",trust_domain="example.org",type="x509"}`])
			assert.EqualValues(t, 1, s[`svidkit_bundle_authorities{part="it",trust_domain="example.org",type="jwt"}`])
			assert.EqualValues(t, 2, s[`svidkit_bundle_authorities{part="it",trust_domain="other.test",type="wit"}`])
			assert.Contains(t, s, "svidkit_bundle_sequence"+own, "0 is a number, too")
			for _, name := range []string{"sequence", "first_authority_end_timestamp_seconds"} {
				assert.NotContains(t, s, "svidkit_bundle_"+name+other)
			}
		}
	})
}

// A part with the trust domains that it needs does without the one of its identity, and an empty list needs none.
func TestNeededTrustDomains(t *testing.T) {
	t.Parallel()
	home, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
	all := []spiffe.TrustDomain{other.TrustDomain(), home.TrustDomain()}
	parts := func(bundles spiffe.BundleSource, domains []spiffe.TrustDomain) *health.Handler {
		return newHandler(t, health.Part{Name: "it", Source: health.FromSources(home.SVID("/web"), bundles), TrustDomains: domains})
	}
	assert.NoError(t, parts(home.Bundles(), nil).Ready())
	assert.Error(t, parts(other.Bundles(), nil).Ready())
	assert.NoError(t, parts(other.Bundles(), []spiffe.TrustDomain{}).Ready())
	assert.ErrorContains(t, parts(home.Bundles(), all[:1]).Ready(), "other.test")
	assert.ErrorContains(t, parts(home.Bundles(), all).Ready(), "other.test")
	set := home.Bundles().With(other.Bundle())
	h := parts(set, all)
	assert.NoError(t, h.Ready())
	all[0] = spiffe.MustParseTrustDomain("third.test")
	assert.NoError(t, h.Ready(), "the list is copied")
}
