package podcert_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/podcert"
	"github.com/svidkit/svidkit/spiffe"
)

const bundles = "/apis/certificates.k8s.io/v1/clustertrustbundles/"

type bundle struct {
	Metadata struct{ Labels, Annotations map[string]string }
	Spec     struct{ SignerName, TrustBundle string }
}

// has waits until a bundle has these roots.
func (c *cluster) has(object, roots string) (o bundle) {
	c.t.Helper()
	require.Eventually(c.t, func() bool {
		o = bundle{}
		return c.Get(bundles+object, &o) && o.Spec.TrustBundle == roots
	}, time.Minute, 2*time.Millisecond, "%s: %+v\n%s", object, o, &c.logs)
	return o
}

// quick has a signer write each object every 50 ms.
func quick(s *podcert.Signer) { s.SetAgain(50 * time.Millisecond) }

func newAuthority(t testing.TB) *ca.Authority {
	t.Helper()
	return must.Get(ca.New(ca.Config{TrustDomain: td, Rotation: ca.Rotation{Propagation: time.Hour}}))(t)
}

// The roots of the CA are there, through a rotation at once, and whatever others do.
func TestBundle(t *testing.T) {
	t.Parallel()
	c, a := start(t), newAuthority(t)
	for range 2 { // replicas
		c.run(c.options(a), quick)
	}
	const object = "example.org:spiffe:example.org"
	o := c.has(object, string(a.Bundle().MarshalPEM()))
	require.Equal(t, name, o.Spec.SignerName)
	require.Equal(t, "example.org", o.Metadata.Labels["k8s.spiffe.io/peer-trust-domain"])
	old := string(a.Bundle().MarshalPEM())
	must.Get(a.Rotate(t.Context()))(t)
	both := string(a.Bundle().MarshalPEM())
	require.NotEqual(t, old, both)
	c.has(object, both)

	c.Remove(bundles + object)
	c.has(object, both)
	edited := map[string]any{
		"metadata": map[string]any{"labels": map[string]string{"mine": "stays"}}, "spec": map[string]string{"signerName": name, "trustBundle": old},
	}
	c.Put(bundles+object, edited)
	require.Equal(t, "stays", c.has(object, both).Metadata.Labels["mine"])
	edited["spec"] = map[string]string{"signerName": name, "trustBundle": both}
	c.Put(bundles+object, edited) // without the label by which volumes find it
	require.Eventually(t, func() bool {
		return c.has(object, both).Metadata.Labels["k8s.spiffe.io/peer-trust-domain"] == "example.org"
	}, time.Minute, 5*time.Millisecond)
	time.Sleep(200 * time.Millisecond)
	written := len(c.History(bundles + object))
	time.Sleep(300 * time.Millisecond)
	require.Len(t, c.History(bundles+object), written, "it is written although it is up to date")
	require.NotContains(t, c.logs.String(), "level=WARN")
}

// A program that deletes the bundle again and again is not answered as often.
func TestBundleFight(t *testing.T) {
	t.Parallel()
	c, a := start(t), newAuthority(t)
	c.run(c.options(a), func(s *podcert.Signer) { s.SetAgain(time.Second) })
	const object = "example.org:spiffe:example.org"
	c.has(object, string(a.Bundle().MarshalPEM()))
	for range 75 {
		c.Remove(bundles + object)
		time.Sleep(20 * time.Millisecond)
	}
	c.has(object, string(a.Bundle().MarshalPEM()))
	require.Less(t, c.Count(http.MethodPost, strings.TrimSuffix(bundles, "/")), 6)
}

// A replica that knows less does not write over what one that knows more has written, and one that has read an old object
// writes nothing.
func TestNewerBundle(t *testing.T) {
	t.Parallel()
	c, a := start(t), newAuthority(t)
	const object = "example.org:spiffe:example.org"
	newer := newAuthority(t).Bundle()
	put := func(sequence string) {
		c.Put(bundles+object, map[string]any{
			"metadata": map[string]any{"annotations": map[string]string{"svidkit.github.io/sequence": sequence}},
			"spec":     map[string]string{"signerName": name, "trustBundle": string(newer.MarshalPEM())},
		})
	}
	put("18446744073709551615")
	c.run(c.options(a), quick)
	c.issued(c.ask(nil)) // the signer is at work
	time.Sleep(300 * time.Millisecond)
	require.Len(t, c.History(bundles+object), 1)
	put("0")
	c.has(object, string(a.Bundle().MarshalPEM()))

	var raced atomic.Bool
	c.Faults(func(r *http.Request) *kubetest.Fault {
		if r.Method == http.MethodPatch && r.URL.Path == bundles+object && raced.CompareAndSwap(false, true) {
			go put("18446744073709551615")
			time.Sleep(20 * time.Millisecond) // it is written before the patch that is under way
		}
		return nil
	})
	put("0")
	require.Eventually(t, raced.Load, time.Minute, time.Millisecond)
	time.Sleep(300 * time.Millisecond)
	var o bundle
	require.True(t, c.Get(bundles+object, &o))
	require.Equal(t, string(newer.MarshalPEM()), o.Spec.TrustBundle)
}

// Bundles of federated trust domains have objects of their own; what cannot be written is said, and keeps nothing else back.
func TestFederatedBundles(t *testing.T) {
	t.Parallel()
	c, a := start(t), newAuthority(t)
	other, under := spiffe.MustParseTrustDomain("other.test"), spiffe.MustParseTrustDomain("under_score.test")
	empty := must.Get(spiffe.NewBundle(spiffe.MustParseTrustDomain("empty.test"), spiffe.BundleContents{}))(t)
	of := func(td spiffe.TrustDomain) *spiffe.Bundle {
		return must.Get(ca.New(ca.Config{TrustDomain: td}))(t).Bundle()
	}
	own := must.Get(spiffe.NewBundle(td, spiffe.BundleContents{}))(t)
	all := must.Get(spiffe.NewBundleSet(of(other), of(under), empty, own))(t)
	var set atomic.Pointer[spiffe.BundleSet]
	o := c.options(a)
	o.Federated = func() *spiffe.BundleSet { return set.Load() }
	c.run(o, quick)
	c.has("example.org:spiffe:example.org", string(a.Bundle().MarshalPEM()))
	set.Store(all)
	for _, b := range []struct {
		td     spiffe.TrustDomain
		object string
	}{{other, "example.org:spiffe:other.test"}, {under, fmt.Sprintf("example.org:spiffe:td-%x", sha256.Sum256([]byte("under_score.test")))[:54]}} {
		want := must.Get(all.Bundle(b.td))(t)
		got := c.has(b.object, string(want.MarshalPEM()))
		require.Equal(t, b.td.String(), got.Metadata.Labels["k8s.spiffe.io/peer-trust-domain"])
	}
	require.Eventually(t, func() bool {
		return strings.Contains(c.logs.String(), "has no root") && strings.Contains(c.logs.String(), "example.org:spiffe:empty.test")
	}, time.Minute, 5*time.Millisecond)
	c.has("example.org:spiffe:example.org", string(a.Bundle().MarshalPEM())) // and not the one of the set

	// A trust domain that has gone keeps its object, which an operator deletes.
	none := must.Get(spiffe.NewBundleSet())(t)
	set.Store(none)
	time.Sleep(200 * time.Millisecond)
	var left bundle
	require.True(t, c.Get(bundles+"example.org:spiffe:other.test", &left))
	c.Remove(bundles + "example.org:spiffe:other.test")
	time.Sleep(200 * time.Millisecond)
	require.False(t, c.Get(bundles+"example.org:spiffe:other.test", &left))
}

// A bundle of more than a MiB is not sent.
func TestLargeBundle(t *testing.T) {
	t.Parallel()
	c, a := start(t), newAuthority(t)
	large := spiffe.MustParseTrustDomain("large.test")
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	var roots []*x509.Certificate
	for i := range 100 {
		tmpl := &x509.Certificate{
			SerialNumber: big.NewInt(int64(i + 1)), Subject: pkix.Name{CommonName: strings.Repeat("x", 64), Organization: []string{strings.Repeat("x", 9000)}},
			NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
		}
		der := must.Get(x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key))(t)
		root := must.Get(x509.ParseCertificate(der))(t)
		roots = append(roots, root)
	}
	b := must.Get(spiffe.NewBundle(large, spiffe.BundleContents{X509Authorities: roots}))(t)
	set := must.Get(spiffe.NewBundleSet(b))(t)
	o := c.options(a)
	o.Federated = func() *spiffe.BundleSet { return set }
	c.run(o, quick)
	require.Eventually(t, func() bool { return strings.Contains(c.logs.String(), "and the API takes 1048576") }, time.Minute, 5*time.Millisecond, "%s", &c.logs)
	c.has("example.org:spiffe:example.org", string(a.Bundle().MarshalPEM()))
	require.Zero(t, c.Count(http.MethodPost, bundles+"example.org:spiffe:large.test"))
}

// A right that is missing is named.
func TestBundleRights(t *testing.T) {
	t.Parallel()
	c, a := start(t), newAuthority(t)
	var forbidden atomic.Bool
	forbidden.Store(true)
	c.Faults(func(r *http.Request) *kubetest.Fault {
		if forbidden.Load() && strings.Contains(r.URL.Path, "clustertrustbundles") && r.Method != http.MethodGet {
			return &kubetest.Fault{Code: 403, Reason: "Forbidden", Message: "may not attest"}
		}
		return nil
	})
	c.run(c.options(a), quick)
	require.Eventually(t, func() bool {
		return strings.Contains(c.logs.String(), "create and patch clustertrustbundles, and attest for the signer example.org/spiffe")
	}, time.Minute, 5*time.Millisecond, "%s", &c.logs)
	forbidden.Store(false)
	c.has("example.org:spiffe:example.org", string(a.Bundle().MarshalPEM()))
}

// The end of Run ends everything, also while the API server hangs.
func TestRunEnds(t *testing.T) {
	t.Parallel()
	c, a := start(t), newAuthority(t)
	c.Faults(func(*http.Request) *kubetest.Fault { return &kubetest.Fault{Hang: true} })
	require.ErrorContains(t, new(podcert.Signer).Run(t.Context()), "New makes one")
	s := must.Get(podcert.New(c.options(a)))(t)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	began := time.Now()
	require.NoError(t, s.Run(ctx))
	require.Less(t, time.Since(began), 5*time.Second)
}

// A replica that is behind waits ten minutes for the news of another one each time: those in which the replicas agreed do not count, and after them
// what it knows is written.
func TestBehindAgain(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		c := &cluster{Server: kubetest.StartOn(t, 1, memconn.Listen()), t: t}
		defer c.Client().CloseIdleConnections()
		a := newAuthority(t)
		_, stop := c.run(c.options(a))
		defer stop()
		const object = "example.org:spiffe:example.org"
		own, newer := string(a.Bundle().MarshalPEM()), string(newAuthority(t).Bundle().MarshalPEM())
		put := func(sequence, roots string) {
			c.Put(bundles+object, map[string]any{
				"metadata": map[string]any{"annotations": map[string]string{"svidkit.github.io/sequence": sequence}, "labels": map[string]string{"k8s.spiffe.io/peer-trust-domain": "example.org"}},
				"spec":     map[string]string{"signerName": name, "trustBundle": roots},
			})
		}
		now := func() string {
			var o bundle
			c.Get(bundles+object, &o)
			return o.Spec.TrustBundle
		}
		time.Sleep(time.Minute)
		require.Equal(t, own, now())
		for range 3 {
			put("18446744073709551615", newer)
			time.Sleep(9 * time.Minute)
			require.Equal(t, newer, now(), "another replica is ahead")
			put("1", own) // it has gone back, or this one has caught up
			time.Sleep(9 * time.Minute)
			require.Equal(t, own, now())
		}
		put("18446744073709551615", newer)
		time.Sleep(11 * time.Minute)
		require.Equal(t, own, now(), "there is no such replica any more")
	})
}
