package internal_test

import (
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/sourcereport"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func TestSourceReport(t *testing.T) {
	t.Parallel()
	ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
	web := ca.SVID("/web")
	both, err := spiffe.NewBundleSet(ca.Bundle(), other.Bundle())
	require.NoError(t, err)
	fault := errors.New("withdrawn")
	failing := ca.Source("/web")
	failing.Fail(fault)
	domains := func(r report.Report) (all []string) {
		for _, b := range r.Bundles {
			assert.Equal(t, "CA", b.Origin)
			all = append(all, b.TrustDomain)
		}
		return all
	}

	r := sourcereport.Of(web, both, "CA")
	require.NoError(t, r.NotReady)
	require.Len(t, r.Identities, 1)
	assert.Equal(t, "spiffe://example.org/web", r.Identities[0].Name)
	assert.True(t, r.Identities[0].Own)
	assert.Equal(t, web.NotAfter(), r.Identities[0].NotAfter)
	assert.Equal(t, web.Leaf().NotBefore, r.Identities[0].NotBefore)
	assert.False(t, r.Identities[0].ChainEnd.After(web.NotAfter()))
	assert.Equal(t, []string{"example.org", "other.test"}, domains(r))
	assert.Equal(t, []string{"example.org"}, domains(sourcereport.Of(web, ca.Bundle(), "CA")))
	assert.Equal(t, []string{"example.org", "other.test"}, domains(sourcereport.Of(nil, spiffe.NewSnapshot(web, both), "CA")))
	assert.Empty(t, sourcereport.Of(web, nil, "CA").Bundles)

	// A source that cannot list its bundles is asked for those that are needed.
	r = sourcereport.Of(web, unlisted{both}, "CA", spiffe.MustParseTrustDomain("third.test"), other.TrustDomain())
	assert.Equal(t, []string{"example.org", "third.test", "other.test"}, domains(r))
	require.NoError(t, r.Bundles[0].Err)
	require.ErrorIs(t, r.Bundles[1].Err, spiffe.ErrUnknownTrustDomain)
	require.NoError(t, r.Bundles[2].Err)

	for _, src := range []spiffe.SVIDSource{failing, nothing{}} {
		r = sourcereport.Of(src, nil, "CA", ca.TrustDomain())
		require.Error(t, r.NotReady)
		require.Len(t, r.Identities, 1)
		assert.Equal(t, r.NotReady, r.Identities[0].Err)
		assert.Zero(t, r.Identities[0].NotAfter)
	}
	require.ErrorIs(t, sourcereport.Of(failing, failing, "CA").NotReady, fault)
	require.ErrorIs(t, sourcereport.Of(nil, failing, "CA", ca.TrustDomain()).Bundles[0].Err, fault)
	assert.ErrorContains(t, sourcereport.Of(nil, nothing{}, "CA", ca.TrustDomain()).Bundles[0].Err, "returned no bundle")
}

// An identity lasts as long as the chain that peers with the same bundle verify.
func TestSourceReportChain(t *testing.T) {
	t.Parallel()
	ca, foreign := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org")
	end := time.Now().Add(20 * time.Minute).Truncate(time.Second)
	web := ca.Intermediate(func(c *x509.Certificate) { c.NotAfter = end }).SVID("/web")
	r := sourcereport.Of(web, ca.Bundle(), "")
	require.NoError(t, r.NotReady)
	assert.True(t, r.Identities[0].NotAfter.Equal(end), r.Identities[0].NotAfter)
	r = sourcereport.Of(web, foreign.Bundle(), "")
	require.ErrorContains(t, r.NotReady, "accepts the SVID of")
	assert.Equal(t, web.NotAfter(), r.Identities[0].NotAfter)

	// What is wrong with a bundle is for others to say.
	empty, err := spiffe.NewBundle(ca.TrustDomain(), spiffe.BundleContents{})
	require.NoError(t, err)
	require.NoError(t, sourcereport.Of(web, empty, "").NotReady)
	require.NoError(t, sourcereport.Of(web, nothing{}, "").NotReady)
}

func TestSourceReportBundle(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	c := ca.Bundle().Contents()
	key := ca.SVID("/web").Leaf().PublicKey
	n := uint64(7)
	c.JWTAuthorities, c.WITAuthorities = map[string]crypto.PublicKey{"b": key, "a": key}, map[string]crypto.PublicKey{"w": key}
	c.Sequence, c.RefreshHint = &n, time.Minute
	b, err := spiffe.NewBundle(ca.TrustDomain(), c)
	require.NoError(t, err)
	got := sourcereport.Bundle(b, "file")
	assert.Equal(t, report.Bundle{
		TrustDomain: "example.org", Origin: "file", X509: c.X509Authorities, JWT: []string{"a", "b"}, WIT: []string{"w"}, Sequence: &n, RefreshHint: time.Minute,
	}, got)
	b, err = spiffe.NewBundle(ca.TrustDomain(), spiffe.BundleContents{})
	require.NoError(t, err)
	got = sourcereport.Bundle(b, "")
	assert.Nil(t, got.Sequence)
	assert.Zero(t, got.RefreshHint)
}

type unlisted struct{ spiffe.BundleSource }

// nothing is a source that breaks its promise.
type nothing struct{}

func (nothing) SVID() (*spiffe.SVID, error)                       { return nil, nil }
func (nothing) Bundle(spiffe.TrustDomain) (*spiffe.Bundle, error) { return nil, nil }

func TestSourceReportWithdrawn(t *testing.T) {
	t.Parallel()
	assert.True(t, sourcereport.Withdrawn(fmt.Errorf("the agent: %w", taken(true))))
	assert.False(t, sourcereport.Withdrawn(taken(false)))
	assert.False(t, sourcereport.Withdrawn(errors.New("withdrawn")))
	assert.False(t, sourcereport.Withdrawn(nil))
}

func TestSourceReportJoined(t *testing.T) {
	t.Parallel()
	one, two, three := errors.New("one"), errors.New("two"), errors.New("three")
	require.NoError(t, sourcereport.Joined(nil, 2))
	assert.Equal(t, one, sourcereport.Joined([]error{one}, 2))
	both := sourcereport.Joined([]error{one, two}, 2)
	require.EqualError(t, both, "one; two")
	require.ErrorIs(t, both, one)
	require.ErrorIs(t, both, two)
	require.EqualError(t, sourcereport.Joined([]error{one, two, three, two}, 2), "one; two; and 2 more")
}

// taken is an error that says whether its server has taken back what it had given.
type taken bool

func (taken) Error() string     { return "it is gone" }
func (t taken) Withdrawn() bool { return bool(t) }

// An identity for one side replaces none that served the other side, too, while that is valid.
func TestSourceReportUsages(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	with := func(usages ...x509.ExtKeyUsage) *spiffe.SVID {
		return ca.SVID("/web", func(c *x509.Certificate) { c.ExtKeyUsage = usages })
	}
	both := with(x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth)
	server, client, neither := with(x509.ExtKeyUsageServerAuth), with(x509.ExtKeyUsageClientAuth), with(x509.ExtKeyUsageCodeSigning)
	expired := ca.SVID("/web", func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour)
	})
	for name, c := range map[string]struct {
		svid, old *spiffe.SVID
		note, err string
	}{
		"both sides":                 {both, server, "", ""},
		"neither":                    {neither, nil, "", "permit neither a server nor a client"},
		"a server, the first":        {server, nil, "permit a server only", ""},
		"a client, the first":        {client, nil, "permit a client only", ""},
		"a server after both":        {server, both, "", "permit less than those of the certificate in force"},
		"a client after a server":    {client, server, "", "permit less than those of the certificate in force"},
		"a server after a server":    {server, server, "permit a server only", ""},
		"a client after what is old": {client, expired, "permit a client only", ""},
	} {
		note, err := sourcereport.Usages(c.svid, c.old)
		for got, want := range map[error]string{note: c.note, err: c.err} {
			if want == "" {
				assert.NoError(t, got, name)
			} else {
				assert.ErrorContains(t, got, want, name)
			}
		}
	}
}

func TestSourceReportRefused(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	svid := ca.SVID("/web")
	require.NoError(t, sourcereport.Refused(svid, ca.Bundle(), time.Now()))
	require.ErrorContains(t, sourcereport.Refused(svid, ca.Bundle(), svid.NotAfter().Add(time.Minute)), "expired")
	require.Error(t, sourcereport.Refused(svid, spiffetest.NewCA(t, "example.org").Bundle(), time.Now()))
}
