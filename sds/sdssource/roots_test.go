package sdssource_test

import (
	"crypto/x509"
	"encoding/pem"
	"io/fs"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/source"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// rootsOf returns the roots of a secret, each once, by what they are.
func rootsOf(t testing.TB, src sds.Source, name string) map[string]int {
	t.Helper()
	rest, ok := must.Get(src.GenerateSecret(t.Context(), name))(t).Roots()
	require.True(t, ok)
	all := map[string]int{}
	for {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			return all
		}
		all[string(block.Bytes)]++
	}
}

func once(cas ...*x509.Certificate) map[string]int {
	all := map[string]int{}
	for _, c := range cas {
		all[string(c.Raw)] = 1
	}
	return all
}

// A *secretcache.Manager has nil for a set before its first bundles.
func TestFromBundlesBeforeTheFirst(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, td.String())
	manager := must.Get(secretcache.New(secretcache.Config{TrustDomain: td, CA: ca}))(t)
	defer manager.Close()
	src := sdssource.FromBundles(manager, td)
	for _, name := range []string{"ROOTCA", td.ID().String()} {
		require.ErrorIs(t, must.Err(src.GenerateSecret(t.Context(), name)), fs.ErrNotExist, name)
	}
	require.Error(t, must.Err(src.GenerateSecret(t.Context(), "ALL")))
	var news told
	defer src.Subscribe(news.add)()
	ran := make(chan struct{})
	go func() { defer close(ran); _ = manager.Run(t.Context()) }()
	require.NoError(t, manager.Ready(t.Context()))
	assert.Equal(t, once(ca.Bundle().Contents().X509Authorities...), rootsOf(t, src, "ROOTCA"))
	assert.NoError(t, manager.Close())
	<-ran
}

// TestAllRoots serves the roots of a CA, of files and of federation in one ROOTCA, while the CA rotates: no certificate
// is told of before its root is in ROOTCA, and none of the places takes away what another has.
func TestAllRoots(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-7.7-3")
	synctest.Test(t, func(t *testing.T) {
		ca, abroad, third := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "partner.test"), spiffetest.NewCA(t, "third.test")
		manager, err := secretcache.Start(t.Context(), secretcache.Config{ID: spiffe.MustParseID("spiffe://example.org/web"), CA: ca})
		require.NoError(t, err)
		defer manager.Close()
		files, federated, foreign := new(federated), new(federated), abroad.SVID("/x")
		set := func(f *live, all ...*spiffe.Bundle) { f.set(spiffe.NewSnapshot(foreign, bundles(t, all...)), nil) }
		set(&files.live, abroad.Bundle())
		set(&federated.live, abroad.Bundle(), third.Bundle())
		all := must.Get(source.NewMerge(td, manager, files, federated))(t)
		defer all.Close()
		src, plain := sdssource.FromIdentityWithAllRoots(all), sdssource.FromIdentity(all)
		first := must.Get(src.GenerateSecret(t.Context(), "ROOTCA"))(t)
		assert.Equal(t, once(ca.Root(), third.Root(), abroad.Root()), rootsOf(t, src, "ROOTCA"))
		assert.Equal(t, once(ca.Root()), rootsOf(t, plain, "ROOTCA"), "of the own trust domain")
		for _, s := range []sds.Source{src, plain} {
			assert.Equal(t, once(abroad.Root()), rootsOf(t, s, "spiffe://partner.test"))
			domains, _ := must.Get(s.GenerateSecret(t.Context(), "ALL"))(t).TrustDomains()
			assert.Len(t, domains, 3)
		}

		// vouched checks a certificate at the moment in which it is told of.
		leaves := 0
		defer src.Subscribe(func(name string) {
			if name != "default" {
				return
			}
			leaves++
			secret, err := src.GenerateSecret(t.Context(), "default")
			if !assert.NoError(t, err) {
				return
			}
			chain, _, _ := secret.KeyPair()
			roots, err := src.GenerateSecret(t.Context(), "ROOTCA")
			if !assert.NoError(t, err) {
				return
			}
			pool := x509.NewCertPool()
			rootsPEM, _ := roots.Roots()
			pool.AppendCertsFromPEM(rootsPEM)
			block, _ := pem.Decode(chain)
			leaf, err := x509.ParseCertificate(block.Bytes)
			if assert.NoError(t, err) {
				_, err = leaf.Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
				assert.NoError(t, err, "the certificate comes before its root")
			}
		})()
		for range 4 {
			ca.Rotate()
			time.Sleep(time.Hour)
			ca.DropOldRoots()
			time.Sleep(time.Hour)
			assert.Equal(t, once(ca.Root(), third.Root(), abroad.Root()), rootsOf(t, src, "ROOTCA"))
		}
		assert.GreaterOrEqual(t, leaves, 4)

		// A root that moves from one place to another makes no other secret.
		before := must.Get(src.GenerateSecret(t.Context(), "ROOTCA"))(t)
		set(&files.live)
		synctest.Wait()
		after := must.Get(src.GenerateSecret(t.Context(), "ROOTCA"))(t)
		a, _ := before.Roots()
		b, _ := after.Roots()
		assert.Equal(t, string(a), string(b))
		f, _ := first.Roots()
		assert.NotEqual(t, string(f), string(a))

		// What is empty is a statement.
		set(&federated.live, must.Get(spiffe.NewBundle(partner, spiffe.BundleContents{}))(t))
		synctest.Wait()
		assert.Equal(t, once(ca.Root()), rootsOf(t, src, "ROOTCA"))
		_, err = src.GenerateSecret(t.Context(), "spiffe://partner.test")
		require.ErrorIs(t, err, spiffe.ErrNoAuthority, "to Envoy, no roots would mean no verification")
	})
}

// federated has bundles that a test changes.
type federated struct{ live }

func (f *federated) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return f.Bundles().Bundle(td)
}

// TestAllRootsFirst has a certificate and its root in one change.
func TestAllRootsFirst(t *testing.T) {
	t.Parallel()
	one, two := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org")
	l := &live{snap: spiffe.NewSnapshot(one.SVID("/web"), one.Bundles())}
	var o told
	defer sdssource.FromIdentityWithAllRoots(l).Subscribe(o.add)()
	l.set(spiffe.NewSnapshot(two.SVID("/web"), two.Bundles()), nil)
	o.await(t, "ALL", "ROOTCA", "spiffe://example.org", "default", "spiffe://example.org/web")
	l.set(spiffe.NewSnapshot(two.SVID("/web"), two.Bundles()), nil)
	o.await(t, "default", "spiffe://example.org/web")
}

// TestNoRoots has no trust domain with a root.
func TestNoRoots(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	l := &live{snap: spiffe.NewSnapshot(ca.SVID("/web"), bundles(t))}
	_, err := sdssource.FromIdentityWithAllRoots(l).GenerateSecret(t.Context(), "ROOTCA")
	require.ErrorIs(t, err, spiffe.ErrNoAuthority)
	require.ErrorContains(t, err, "ROOTCA")
	assert.Panics(t, func() { sdssource.FromIdentityWithAllRoots(nil) })
}
