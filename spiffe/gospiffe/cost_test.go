package gospiffe_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/spiffe/gospiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// reads are what readers do, over a source that has not changed; the most allocations that each may make,
// and what it would cost without the adapter's memory, for those that have one.
func reads(t testing.TB) []struct {
	name        string
	allocations float64
	read, anew  func() error
} {
	ca := spiffetest.NewCA(t, "example.org")
	svid, full := ca.Intermediate().SVID("/web"), fullBundle(t, ca)
	theirSVID, theirs := toSVID(t, svid), toBundle(t, full)
	toSVIDs, fromSVIDs := gospiffe.ToSVIDSource(svid), gospiffe.FromSVIDSource(theirSVID)
	to, from := gospiffe.ToBundleSource(full), gospiffe.FromBundleSource(theirs)
	fromX509, fromJWT := gospiffe.FromX509BundleSource(theirs.X509Bundle()), gospiffe.FromJWTBundleSource(theirs.JWTBundle())
	return []struct {
		name        string
		allocations float64
		read, anew  func() error
	}{
		{"FromSVIDSource", 0, func() error { _, err := fromSVIDs.SVID(); return err },
			func() error { _, err := gospiffe.FromSVIDSource(theirSVID).SVID(); return err }},
		{"ToSVIDSource", 0, func() error { _, err := toSVIDs.GetX509SVID(); return err },
			func() error { _, err := gospiffe.ToSVIDSource(svid).GetX509SVID(); return err }},
		// The list of certificates, which go-spiffe copies for each reader.
		{"FromX509BundleSource", 1, func() error { _, err := fromX509.Bundle(td); return err },
			func() error {
				_, err := gospiffe.FromX509BundleSource(theirs.X509Bundle()).Bundle(td)
				return err
			}},
		// The map of keys, likewise.
		{"FromJWTBundleSource", 2, func() error { _, err := fromJWT.Bundle(td); return err },
			func() error {
				_, err := gospiffe.FromJWTBundleSource(theirs.JWTBundle()).Bundle(td)
				return err
			}},
		// The bundle, with one list and two maps.
		{"FromBundleSource", 8, func() error { _, err := from.Bundle(td); return err },
			func() error { _, err := gospiffe.FromBundleSource(theirs).Bundle(td); return err }},
		// The bundle and its list, which are the reader's own.
		{"ToBundleSource, X.509", 2, func() error { _, err := to.GetX509BundleForTrustDomain(theirTD); return err }, nil},
		{"ToBundleSource, JWT", 3, func() error { _, err := to.GetJWTBundleForTrustDomain(theirTD); return err }, nil},
		{"ToBundleSource, both", 10, func() error { _, err := to.GetBundleForTrustDomain(theirTD); return err }, nil},
	}
}

// fixed is a source of one token.
type fixed string

func (f fixed) Fetch(context.Context, ...string) (string, error) { return string(f), nil }

// TestUnchanged counts what reading through an adapter allocates while nothing has changed.
func TestUnchanged(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	for _, r := range reads(t) {
		require.NoError(t, r.read(), r.name)
		n := testing.AllocsPerRun(200, func() { _ = r.read() })
		assert.LessOrEqual(t, n, r.allocations, r.name)
		if r.anew != nil {
			assert.Less(t, n, testing.AllocsPerRun(20, func() { _ = r.anew() }), "%s: as many as without its memory", r.name)
		}
	}
}
