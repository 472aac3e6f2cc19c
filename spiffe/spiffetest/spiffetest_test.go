package spiffetest_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

var roles = []spiffe.Role{spiffe.AnyRole, spiffe.ServerRole, spiffe.ClientRole, spiffe.BothRoles}

// verify checks a chain as a peer would that trusts bundles and allows all of example.org.
func verify(t *testing.T, bundles spiffe.BundleSource, chain []*x509.Certificate, role spiffe.Role) (*spiffe.Peer, error) {
	t.Helper()
	td := spiffe.MustParseTrustDomain("example.org")
	v := must.Get(spiffe.NewVerifier(bundles, spiffe.AllowMembersOf(td), nil))(t)
	return v.VerifyChain(chain, role)
}

func TestGoodIdentities(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	intermediate := ca.Intermediate()
	for name, svid := range map[string]*spiffe.SVID{
		"plain":            ca.SVID("/web"),
		"kubernetes":       ca.SVID("/ns/prod/sa/web"),
		"intermediate":     intermediate.SVID("/web"),
		"two levels":       intermediate.Intermediate().SVID("/web"),
		"edited":           ca.SVID("/web", func(c *x509.Certificate) { c.DNSNames = []string{"web.test"} }),
		"two edits":        ca.SVID("/web", func(c *x509.Certificate) { c.NotAfter = c.NotBefore.Add(time.Minute) }, func(c *x509.Certificate) { c.ExtKeyUsage = nil }),
		"signed by itself": mustSVID(t, ca, 0),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, role := range roles {
				peer := must.Get(verify(t, ca.Bundle(), svid.Chain(), role))(t)
				assert.Equal(t, svid.ID(), peer.ID())
				assert.True(t, peer.Chain()[len(peer.Chain())-1].Equal(ca.Root()))
			}
		})
	}
	svid := ca.SVID("/web")
	assert.Equal(t, "spiffe://example.org/web", svid.ID().String())
	assert.Equal(t, time.Hour, svid.NotAfter().Sub(svid.Leaf().NotBefore))
	assert.Len(t, svid.Chain(), 1, "the root is not part of the chain")
	assert.Len(t, intermediate.SVID("/web").Chain(), 2)
	assert.Equal(t, "example.org", ca.TrustDomain().String())
}

func TestRootIsAnSVIDOfTheTrustDomain(t *testing.T) {
	t.Parallel()
	root := spiffetest.NewCA(t, "example.org").Root()
	id := must.Get(spiffe.IDFromCertificate(root))(t)
	assert.Equal(t, "spiffe://example.org", id.String())
	assert.True(t, root.IsCA)
	assert.Equal(t, x509.KeyUsageCertSign|x509.KeyUsageCRLSign, root.KeyUsage)
	assert.NoError(t, root.CheckSignatureFrom(root))
}

func TestFaults(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	faults := spiffetest.Faults()
	assert.Len(t, faults, 21)
	var all []string
	for _, f := range faults {
		all = append(all, f.Name)
	}
	for _, f := range []string{
		"NoURI", "TwoURIs", "CALeaf", "PathlessID", "NoKeyUsage", "CertSignLeaf", "NoDigitalSignature",
		"UnknownDomain", "ForeignCA", "SelfSigned", "Expired", "ServerOnly", "ClientOnly",
	} {
		assert.Contains(t, all, f)
	}
	names := map[string]bool{}
	for _, f := range faults {
		assert.False(t, names[f.Name], "duplicate %v", f.Name)
		names[f.Name] = true
		for issuer, by := range map[string]*spiffetest.CA{"root": ca, "intermediate": ca.Intermediate()} {
			t.Run(f.Name+"/"+issuer, func(t *testing.T) {
				t.Parallel()
				chain, key := by.Broken(f.Name)
				assert.True(t, key.Public().(*ecdsa.PublicKey).Equal(chain[0].PublicKey), "the key belongs to the leaf")
				for _, role := range roles {
					_, err := verify(t, ca.Bundle(), chain, role)
					if !slices.Contains(f.Refused, role) {
						assert.NoError(t, err, "role %d", role)
						continue
					}
					e := must.As[*spiffe.VerifyError](err)(t, role)
					assert.Equal(t, f.Stage, e.Stage, "%v", err)
					assert.Equal(t, f.Rule, e.Rule, "%v", err)
				}
			})
		}
	}
}

// TestOneThingWrong checks, with an independent list of properties, that each fault breaks exactly one.
func TestOneThingWrong(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	for _, f := range spiffetest.Faults() {
		chain, _ := ca.Broken(f.Name)
		leaf := chain[0]
		var wrong []string
		note := func(bad bool, what string) {
			if bad {
				wrong = append(wrong, what)
			}
		}
		uris := make([]string, len(leaf.URIs))
		for i, u := range leaf.URIs {
			uris[i] = u.String()
		}
		note(!slices.Equal(uris, []string{"spiffe://example.org/broken"}), "URI")
		note(leaf.IsCA, "cA")
		note(leaf.KeyUsage != x509.KeyUsageDigitalSignature, "key usage")
		note(!slices.Equal(leaf.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}), "extended key usage")
		note(time.Now().Before(leaf.NotBefore) || time.Now().After(leaf.NotAfter), "time")
		note(len(leaf.UnhandledCriticalExtensions) > 0, "extension")
		switch {
		case len(chain) == 1:
			note(leaf.CheckSignatureFrom(ca.Root()) != nil, "signature")
		default:
			note(leaf.CheckSignatureFrom(chain[1]) != nil, "intermediate")
		}
		assert.Len(t, wrong, 1, "%v: %v", f.Name, wrong)
	}
}

func TestFaultUnknown(t *testing.T) {
	t.Parallel()
	for _, f := range []string{"", "unknown"} {
		ca, failed := fallible(t, "example.org")
		failed(func() { ca.Broken(f) })
	}
}

func TestRotation(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	sequence := uint64(0)
	grown := func() bool {
		n, ok := ca.Bundle().Sequence()
		defer func() { sequence = n }()
		return ok && n > sequence
	}
	trusts := func(b *spiffe.Bundle, s *spiffe.SVID) bool {
		_, err := verify(t, b, s.Chain(), spiffe.AnyRole)
		return err == nil
	}
	assert.True(t, grown())
	before, first, firstRoot := ca.Bundle(), ca.SVID("/web"), ca.Root()
	below := ca.Intermediate()

	ca.Prepare()
	assert.True(t, grown())
	prepared := ca.Bundle()
	assert.Equal(t, firstRoot, ca.Root(), "prepared, not active")
	assert.True(t, trusts(before, ca.SVID("/web")))

	ca.Rotate()
	assert.False(t, grown(), "activation changes no bundle")
	assert.NotEqual(t, firstRoot, ca.Root())
	second := ca.SVID("/web")
	assert.True(t, trusts(prepared, second), "who learned while it was prepared is served")
	assert.False(t, trusts(before, second))
	assert.True(t, trusts(ca.Bundle(), first))

	ca.DropOldRoots()
	assert.True(t, grown())
	assert.False(t, trusts(ca.Bundle(), first))
	assert.True(t, trusts(ca.Bundle(), second))
	assert.False(t, trusts(ca.Bundle(), below.SVID("/web")), "an intermediate stays below its root")
	assert.Equal(t, ca.Root(), below.Root())
	ca.DropOldRoots()
	assert.False(t, grown(), "there was nothing to drop")

	ca.Rotate()
	assert.True(t, grown())
	ca.Prepare()
	ca.DropOldRoots()
	assert.Len(t, slices.Collect(ca.Bundle().X509Authorities()), 2, "a prepared root is not old")
	assert.True(t, trusts(ca.Bundle(), ca.SVID("/web")))
	assert.False(t, trusts(ca.Bundle(), second))
}

func TestFederate(t *testing.T) {
	t.Parallel()
	ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
	ca.Federate(other.Bundle())
	bundles := must.Get(ca.FetchBundles(t.Context()))(t)
	assert.Equal(t, 2, bundles.Len())
	ca.Rotate()
	b, err := ca.Bundles().Bundle(other.TrustDomain())
	require.NoError(t, err, "a rotation keeps the others")
	assert.Equal(t, other.Bundle(), b)
}

func csr(t *testing.T, id string, more ...pki.SAN) *pki.CSR {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	sans := more
	if id != "" {
		sans = append([]pki.SAN{pki.IDSAN(spiffe.MustParseID(id))}, more...)
	}
	return must.Get(pki.NewCSR(key, pki.CSROptions{SANs: sans}))(t)
}

// mustSVID makes an SVID with an Ed25519 key by a signing request.
func mustSVID(t *testing.T, ca *spiffetest.CA, lifetime time.Duration) *spiffe.SVID {
	t.Helper()
	_, key := must.Get2(ed25519.GenerateKey(rand.Reader))(t)
	r, err := pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.org/web"))}})
	require.NoError(t, err)
	chain := must.Get(ca.Sign(t.Context(), r, lifetime))(t)
	return must.Get(spiffe.NewSVID(chain, key))(t)
}

func TestSign(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	ip := pki.IPSAN([]byte{192, 0, 2, 7})

	chain, err := ca.Intermediate().Sign(t.Context(), csr(t, "spiffe://example.org/web", pki.DNSSAN("web.test"), ip), 5*time.Minute)
	require.NoError(t, err)
	require.Len(t, chain, 2)
	assert.Equal(t, 5*time.Minute, chain[0].NotAfter.Sub(chain[0].NotBefore))
	assert.Equal(t, []string{"web.test"}, chain[0].DNSNames)
	assert.Equal(t, "192.0.2.7", chain[0].IPAddresses[0].String())
	peer := must.Get(verify(t, ca.Bundle(), chain, spiffe.ClientRole))(t)
	assert.Equal(t, "spiffe://example.org/web", peer.ID().String())

	assert.Zero(t, ca.Signed(), "an intermediate counts for itself")
	svid := mustSVID(t, ca, 0)
	assert.Equal(t, time.Hour, svid.NotAfter().Sub(svid.Leaf().NotBefore))
	assert.Equal(t, 1, ca.Signed())

	second := csr(t, "spiffe://example.org/web", pki.IDSAN(spiffe.MustParseID("spiffe://example.org/two")))
	for want, bad := range map[string]struct {
		csr      *pki.CSR
		lifetime time.Duration
	}{
		"0 URI names":    {csr(t, "", pki.DNSSAN("web.test")), 0},
		"2 URI names":    {second, 0},
		"not a workload": {csr(t, "spiffe://other.test/web"), 0},
		"negative":       {csr(t, "spiffe://example.org/web"), -1},
	} {
		_, err := ca.Sign(t.Context(), bad.csr, bad.lifetime)
		assert.ErrorContains(t, err, want)
	}
	assert.Equal(t, 1, ca.Signed())
}

func TestCertify(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	r := csr(t, "spiffe://example.org/web", pki.DNSSAN("web.test"))
	chain := must.Get(ca.Certify(t.Context(), r, []pki.SAN{pki.DNSSAN("web.default.linkerd.test")}, time.Minute))(t)
	assert.Empty(t, chain[0].URIs, "the names are the caller's, and not those of the request")
	assert.Equal(t, []string{"web.default.linkerd.test"}, chain[0].DNSNames)
	api := spiffe.MustParseID("spiffe://example.org/api")
	chain, err := ca.Certify(t.Context(), csr(t, ""), []pki.SAN{pki.IDSAN(api)}, 0)
	require.NoError(t, err)
	assert.Equal(t, "spiffe://example.org/api", chain[0].URIs[0].String())
	assert.Equal(t, 2, ca.Signed())
	id := pki.IDSAN(spiffe.MustParseID("spiffe://example.org/api"))
	for name, names := range map[string][]pki.SAN{
		"no names": nil, "two IDs": {id, id}, "an address alone": {pki.IPSAN(net.IPv4(192, 0, 2, 7))},
		"another trust domain": {pki.IDSAN(spiffe.MustParseID("spiffe://other.test/api"))},
	} {
		_, err := ca.Certify(t.Context(), r, names, 0)
		assert.Error(t, err, name)
	}
	_, err = ca.Certify(t.Context(), r, []pki.SAN{pki.DNSSAN("api.test"), pki.IDSAN(spiffe.MustParseID("spiffe://other.test/api"))}, 0)
	require.NoError(t, err, "beside a DNS name")
	ca.FailNext(1, io.EOF)
	_, err = ca.Certify(t.Context(), r, []pki.SAN{id}, 0)
	assert.ErrorIs(t, err, io.EOF)
}

func TestSignEdits(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	r := csr(t, "spiffe://example.org/web")
	ca.EditTemplates(func(c *x509.Certificate) { c.NotBefore = c.NotBefore.Add(-time.Hour) })
	chain := must.Get(ca.Sign(t.Context(), r, 0))(t)
	assert.Equal(t, 2*time.Hour, chain[0].NotAfter.Sub(chain[0].NotBefore))

	ca.EditTemplates(nil)
	ca.EditAnswers(func(chain []*x509.Certificate) []*x509.Certificate { return append(chain, ca.Root()) })
	chain = must.Get(ca.Sign(t.Context(), r, 0))(t)
	assert.Len(t, chain, 2)
	assert.Equal(t, time.Hour, chain[0].NotAfter.Sub(chain[0].NotBefore))

	ca.EditAnswers(nil)
	chain = must.Get(ca.Sign(t.Context(), r, 0))(t)
	assert.Len(t, chain, 1)
}

func TestFailNext(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	r := csr(t, "spiffe://example.org/web")
	down := errors.New("down")
	watch := func() error {
		for _, err := range ca.WatchBundles(t.Context()) {
			return err
		}
		return errors.New("the sequence was empty")
	}
	sign := func() error {
		_, err := ca.Sign(t.Context(), r, 0)
		return err
	}
	fetch := func() error {
		_, err := ca.FetchBundles(t.Context())
		return err
	}
	for name, call := range map[string]func() error{"sign": sign, "fetch": fetch, "watch": watch} {
		ca.FailNext(2, down)
		assert.Equal(t, down, call(), name)
		assert.Equal(t, down, call(), name)
		assert.NoError(t, call(), name)

		ca.FailNext(1000, nil)
		assert.Error(t, call(), name)
		ca.FailNext(0, nil)
		assert.NoError(t, call(), name)
	}
}

func TestDelay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		ca.Delay(time.Minute)
		start := time.Now()
		must.Get(ca.FetchBundles(t.Context()))(t)
		assert.Equal(t, time.Minute, time.Since(start))

		gone := errors.New("gone")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, gone)
		defer cancel()
		ca.FailNext(1, errors.New("down"))
		_, err := ca.Sign(ctx, csr(t, "spiffe://example.org/web"), 0)
		assert.ErrorIs(t, err, gone)
		assert.Equal(t, time.Minute+time.Second, time.Since(start))
		assert.Zero(t, ca.Signed())

		ca.Delay(0)
		_, err = ca.FetchBundles(ctx)
		assert.ErrorIs(t, err, gone, "a context that is done is noticed without a delay")
		assert.Equal(t, time.Minute+time.Second, time.Since(start))
	})
}

// TestBubble shows that the clock is the bubble's, and that a watch follows a rotation and leaves
// nothing behind: a goroutine that stays would fail the test.
func TestBubble(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		svid := ca.SVID("/web")
		assert.Equal(t, 2000, svid.Leaf().NotBefore.Year())
		time.Sleep(59 * time.Minute)
		must.Get(verify(t, ca.Bundle(), svid.Chain(), spiffe.AnyRole))(t)
		time.Sleep(2 * time.Minute)
		_, err := verify(t, ca.Bundle(), svid.Chain(), spiffe.AnyRole)
		assert.Error(t, err)

		ctx, cancel := context.WithCancel(t.Context())
		var seen []uint64
		var wg sync.WaitGroup
		wg.Go(func() {
			for bundles, err := range ca.WatchBundles(ctx) {
				if !assert.NoError(t, err) {
					return
				}
				b, err := bundles.Bundle(ca.TrustDomain())
				if assert.NoError(t, err) {
					n, _ := b.Sequence()
					seen = append(seen, n)
				}
			}
		})
		synctest.Wait()
		ca.Rotate()
		synctest.Wait()
		ca.Rotate()
		ca.DropOldRoots()
		synctest.Wait()
		cancel()
		wg.Wait()
		assert.Equal(t, uint64(1), seen[0])
		assert.Equal(t, uint64(4), seen[len(seen)-1])
		assert.True(t, slices.IsSorted(seen))
	})
}

func TestConcurrentUse(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	r := csr(t, "spiffe://example.org/web")
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 10 {
				svid := ca.SVID("/web")
				bundle := ca.Bundle() // after the SVID, so it has its root
				_, err := verify(t, bundle, svid.Chain(), spiffe.AnyRole)
				assert.NoError(t, err)
				_, err = ca.Sign(t.Context(), r, 0)
				assert.NoError(t, err)
			}
		})
	}
	for range 5 {
		ca.Rotate()
		ca.EditAnswers(nil)
		ca.FailNext(0, nil)
	}
	wg.Wait()
	assert.Equal(t, 40, ca.Signed())
}

func TestCannotPrintItsKey(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	var buf bytes.Buffer
	slog.New(slog.NewTextHandler(&buf, nil)).Info("x", "ca", ca)
	fmt.Fprintf(&buf, "%v %+v %#v %s", ca, ca, ca, ca)
	assert.Equal(t, 5, strings.Count(buf.String(), "spiffetest.CA(example.org)"), buf.String())
	point := must.Get(ca.Root().PublicKey.(*ecdsa.PublicKey).Bytes())(t)
	assert.NotContains(t, buf.String(), hex.EncodeToString(point[1:]))
}

// recorder is a testing.TB whose Fatalf can be observed.
type recorder struct {
	testing.TB
	message string
}

func (r *recorder) Helper() {}
func (r *recorder) Fatalf(format string, args ...any) {
	r.message = fmt.Sprintf(format, args...)
	panic(r)
}

// fallible returns a CA and a func that wants its argument to end the CA's test.
func fallible(t *testing.T, trustDomain string) (*spiffetest.CA, func(func())) {
	t.Helper()
	r := &recorder{TB: t}
	failed := func(f func()) {
		t.Helper()
		assert.PanicsWithValue(t, r, f)
		assert.True(t, strings.HasPrefix(r.message, "spiffetest: "), r.message)
	}
	return spiffetest.NewCA(r, trustDomain), failed
}

func TestFailsTheTest(t *testing.T) {
	t.Parallel()
	ca, failed := fallible(t, "example.org")
	failed(func() { ca.SVID("web") })
	failed(func() { ca.SVID("") })
	failed(func() { ca.Certificate("web") }) // would be of the trust domain example.orgweb
	failed(func() { ca.Certificate("/web/") })
	failed(func() { ca.SVID("/web", func(c *x509.Certificate) { c.URIs = nil }) })
	failed(func() { ca.Certificate("/web", func(c *x509.Certificate) { c.DNSNames = []string{"\x80"} }) })
	failed(func() { ca.Federate(ca.Bundle()) })

	r := &recorder{TB: t}
	assert.PanicsWithValue(t, r, func() { spiffetest.NewCA(r, "Example.org") })
	assert.Contains(t, r.message, "upper case")
	assert.PanicsWithValue(t, r, func() { spiffetest.NewCA(r, "a..b") }, "crypto/x509 cannot read such a root (GO-3)")
}
