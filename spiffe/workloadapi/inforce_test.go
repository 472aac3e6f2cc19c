package workloadapi_test

import (
	"context"
	"crypto/x509"
	"regexp"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// A valid identity stays in force while the server sends one that is not, and its successor is taken over when it is valid. The
// log and the report say why, and bundles are taken over all the same.
func TestValidStays(t *testing.T) {
	t.Parallel()
	const life = time.Hour
	expiredChain := func(d domain) *spiffe.SVID { // the intermediate has expired
		return d.Intermediate(func(c *x509.Certificate) {
			c.NotAfter = time.Now().Add(-time.Minute)
			c.NotBefore = c.NotAfter.Add(-life)
		}).SVID("/web")
	}
	tests := []struct {
		name  string
		next  func(d domain) *spiffe.SVID
		want  string
		after time.Duration // when the next one is taken over; 0 for never
	}{
		{"expired", func(d domain) *spiffe.SVID { return d.SVID("/web", shift(-life-10*time.Minute)) }, "has expired at 1999-12-31T23:50:00Z", 0},
		{"in a minute", func(d domain) *spiffe.SVID { return d.SVID("/web", shift(time.Minute)) }, "is valid from 2000-01-01T00:01:00Z on; compare the clocks", time.Minute},
		{"in two hours", func(d domain) *spiffe.SVID { return d.SVID("/web", shift(2*time.Hour)) }, "is valid from 2000-01-01T02:00:00Z on; compare the clocks", 2 * time.Hour},
		{"an expired intermediate", expiredChain, "expired", 0},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				home, other := workloadtest.NewDomain(t, "example.org"), workloadtest.NewDomain(t, "other.test")
				web, next := home.SVID("/web"), test.next(home)
				var log syncBuffer
				streams := make(feed)
				s := source(t, workloadapi.Config{Logger: workloadtest.Logger(&log)}, streams.serve)
				leaf := func() []byte {
					t.Helper()
					return must.Get(s.SVID())(t).Leaf().Raw
				}
				streams.send(response(t, home, web))
				require.Equal(t, web.Leaf().Raw, leaf())
				require.Empty(t, s.Report().Problems)

				for range 2 { // sent again, it is told of once
					streams.send(response(t, home, next, other))
					require.Equal(t, web.Leaf().Raw, leaf())
					problems := s.Report().Problems
					require.Len(t, problems, 1)
					require.ErrorContains(t, problems[0], `"spiffe://example.org/web" is not in force: `)
					require.ErrorContains(t, problems[0], test.want)
				}
				require.Regexp(t, `level=WARN msg="workloadapi: part of a response skipped".*`+regexp.QuoteMeta(test.want), log.String())
				must.Get(s.Bundle(other.TrustDomain()))(t, "the bundles are in force")
				require.NoError(t, s.Ready(t.Context()))

				if test.after > 0 {
					time.Sleep(test.after - time.Second)
					require.Equal(t, web.Leaf().Raw, leaf())
					time.Sleep(time.Second)
					synctest.Wait()
					assert.Equal(t, next.Leaf().Raw, leaf())
					assert.Empty(t, s.Report().Problems)
				} else {
					time.Sleep(3 * time.Hour)
					assert.Equal(t, web.Leaf().Raw, leaf())
				}
				renewed := home.SVID("/web")
				streams.send(response(t, home, renewed))
				assert.Equal(t, renewed.Leaf().Raw, leaf())
				assert.Empty(t, s.Report().Problems)
			})
		})
	}
}

// An identity that is not valid is none: neither the first one nor one of another name.
func TestInvalidAlone(t *testing.T) {
	t.Parallel()
	for _, by := range []time.Duration{-2 * time.Hour, 2 * time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			home := workloadtest.NewDomain(t, "example.org")
			bad := home.SVID("/web", shift(by))
			streams := make(feed)
			c := inMemory(t, fake(t, func(c *call) {
				c.send(response(t, home, bad))
				streams.serve(c)
			}))
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			_, err := workloadapi.Start(ctx, workloadapi.Config{Client: c})
			require.ErrorIs(t, err, spiffe.ErrNotReady)
			require.ErrorContains(t, err, `the server has no identity: workloadapi: "spiffe://example.org/web" is not in force: the certificate `)

			s := must.Get(workloadapi.New(workloadapi.Config{Client: c}))(t)
			workloadtest.Run(t, s)
			synctest.Wait()
			require.ErrorIs(t, must.Err(s.X509()), spiffe.ErrNotReady)
			must.Get(s.Bundle(home.TrustDomain()))(t)

			// Nor does one of another name take the place of one that is valid; but one beside it is withdrawn.
			web, db := home.SVID("/web"), home.SVID("/db")
			m := response(t, home, web)
			m.Svids = append(m.Svids, message(t, home, db, "db"))
			streams.send(m)
			streams.send(response(t, home, home.SVID("/other", shift(by))))
			u := must.Get(s.X509())(t)
			require.Len(t, u.Identities, 2)
			m = response(t, home, home.SVID("/web", shift(by)))
			m.Svids = append(m.Svids, message(t, home, home.SVID("/new"), "new"))
			streams.send(m)
			u = must.Get(s.X509())(t)
			require.Len(t, u.Identities, 2)
			assert.Equal(t, web.Leaf().Raw, u.Identities[0].SVID.Leaf().Raw)
			assert.Equal(t, "/new", u.Identities[1].SVID.ID().Path())

			// What was withdrawn does not come back when its time comes.
			streams.do(func(c *call) { c.end(workloadtest.PermissionDenied, "gone") })
			require.ErrorIs(t, must.Err(s.SVID()), spiffe.ErrNotReady)
		})
	}
}

// What an identity may forbid is held against the one that is in force, and not against one that the server sent since and that was
// not taken over.
func TestRolesOfWhatIsInForce(t *testing.T) {
	t.Parallel()
	serverOnly := func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }
	both := func(*x509.Certificate) {}
	for name, test := range map[string]struct {
		first func(*x509.Certificate)
		by    time.Duration
		taken bool
	}{
		"both sides, and one that has expired":  {both, -2 * time.Hour, false},
		"both sides, and one that is early":     {both, 2 * time.Hour, false},
		"a server, and both sides, expired":     {serverOnly, -2 * time.Hour, true},
		"a server, and both sides, in a while":  {serverOnly, 2 * time.Hour, true},
		"a server, and both sides, in a minute": {serverOnly, time.Minute, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				home := workloadtest.NewDomain(t, "example.org")
				streams := make(feed)
				s := source(t, workloadapi.Config{}, streams.serve)
				first, between := home.SVID("/web", test.first), home.SVID("/web", shift(test.by))
				for _, svid := range []*spiffe.SVID{first, between, between} {
					streams.send(response(t, home, svid))
					require.Equal(t, first.Leaf().Raw, must.Get(s.SVID())(t).Leaf().Raw)
				}
				want := first
				if test.by == time.Minute { // which is in force then
					time.Sleep(2 * time.Minute)
					synctest.Wait()
					want = between
				}
				limited := home.SVID("/web", serverOnly)
				if test.taken {
					want = limited
				}
				streams.send(response(t, home, limited))
				assert.Equal(t, want.Leaf().Raw, must.Get(s.SVID())(t).Leaf().Raw)
			})
		})
	}
}
