package sdssource_test

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/filesource"
	"github.com/svidkit/svidkit/spiffe/source"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

var (
	td      = spiffe.MustParseTrustDomain("example.org")
	partner = spiffe.MustParseTrustDomain("partner.test")
)

// What the adapters are for fits them.
var (
	_ = func(a *filesource.Source, b *source.LastGood, c source.Source, d *workloadapi.Source) {
		sdssource.FromIdentity(a)
		sdssource.FromIdentity(b)
		sdssource.FromIdentity(c)
		sdssource.FromIdentity(d)
	}
	_ = func(a *filesource.Source, b *source.LastGood, c *federation.Manager) {
		sdssource.FromBundles(a, td)
		sdssource.FromBundles(b, td)
		sdssource.FromBundles(c, spiffe.TrustDomain{})
	}
)

// live is a source that a test changes.
type live struct {
	renew.Signal
	mu   sync.Mutex
	snap *spiffe.Snapshot
	err  error
}

func (l *live) set(snap *spiffe.Snapshot, err error) {
	l.mu.Lock()
	l.snap, l.err = snap, err
	l.mu.Unlock()
	l.Notify()
}

func (l *live) Snapshot() (*spiffe.Snapshot, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.snap, l.err
}

func (l *live) Bundles() *spiffe.BundleSet {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.snap.Bundles()
}

var errAway = errors.New("the agent is away")

type gone struct{}

func (gone) Error() string   { return "taken back" }
func (gone) Withdrawn() bool { return true }

func bundles(t testing.TB, all ...*spiffe.Bundle) *spiffe.BundleSet {
	t.Helper()
	return must.Get(spiffe.NewBundleSet(all...))(t)
}

// told keeps the names that a source tells of.
type told struct {
	mu    sync.Mutex
	names []string
}

func (o *told) add(name string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.names = append(o.names, name)
}

// take returns what was told since the last call.
func (o *told) take() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	names := o.names
	o.names = nil
	return names
}

// await waits until the names were told of, in that order.
func (o *told) await(t testing.TB, names ...string) {
	t.Helper()
	var all []string
	require.Eventually(t, func() bool { all = append(all, o.take()...); return len(all) >= len(names) }, patience, time.Millisecond)
	assert.Equal(t, names, all)
}

func chainOf(t testing.TB, s *pki.Secret) string {
	t.Helper()
	chain, _, ok := s.KeyPair()
	require.True(t, ok)
	return string(chain)
}

func certsOf(t testing.TB, svid *spiffe.SVID) string {
	t.Helper()
	certs, _, err := svid.MarshalPEM()
	require.NoError(t, err)
	return string(certs)
}

func TestFromIdentity(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca, other := spiffetest.NewCA(t, td.String()), spiffetest.NewCA(t, partner.String())
		one, two := ca.SVID("/web"), ca.SVID("/web")
		both := bundles(t, ca.Bundle(), other.Bundle())
		l := &live{err: errAway}
		src := sdssource.FromIdentity(l)
		var news told
		cancel := src.Subscribe(news.add)

		// Nothing is there yet: it waits, and says why in the end.
		short, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		_, err := src.GenerateSecret(short, "default")
		require.ErrorIs(t, err, errAway)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.NotErrorIs(t, err, fs.ErrNotExist)
		_, err = src.GenerateSecret(t.Context(), "file-cert:/a~/b")
		require.ErrorIs(t, err, fs.ErrNotExist, "no such name is waited for")
		go func() {
			time.Sleep(time.Second)
			l.set(spiffe.NewSnapshot(one, both), nil)
		}()
		s := must.Get(src.GenerateSecret(t.Context(), "default"))(t)
		assert.Equal(t, certsOf(t, one), chainOf(t, s))
		synctest.Wait()
		assert.Equal(t, []string{"ALL", "ROOTCA", "spiffe://example.org", "spiffe://partner.test", "default", "spiffe://example.org/web"}, news.take(), "bundles first")

		for name, want := range map[string]string{"ROOTCA": string(ca.Bundle().MarshalPEM()),
			"spiffe://example.org": string(ca.Bundle().MarshalPEM()), "spiffe://partner.test": string(other.Bundle().MarshalPEM())} {
			s, err := src.GenerateSecret(t.Context(), name)
			require.NoError(t, err, name)
			roots, ok := s.Roots()
			assert.True(t, ok, name)
			assert.Equal(t, want, string(roots), name)
			assert.Equal(t, name, s.Name())
		}
		s = must.Get(src.GenerateSecret(t.Context(), "ALL"))(t)
		domains, _ := s.TrustDomains()
		assert.ElementsMatch(t, []spiffe.TrustDomain{td, partner}, slices.Collect(maps.Keys(domains)))
		for _, name := range []string{"", "rootca", "spiffe://example.org/api", "spiffe://none.test", "spiffe://", "kubernetes://a"} {
			assert.ErrorIs(t, must.Err(src.GenerateSecret(t.Context(), name)), fs.ErrNotExist, name)
		}

		l.set(spiffe.NewSnapshot(two, both), nil)
		synctest.Wait()
		assert.Equal(t, []string{"default", "spiffe://example.org/web"}, news.take())
		l.set(spiffe.NewSnapshot(two, both), nil)
		synctest.Wait()
		assert.Empty(t, news.take(), "nothing has changed")
		empty := must.Get(spiffe.NewBundle(partner, spiffe.BundleContents{}))(t)
		l.set(spiffe.NewSnapshot(two, bundles(t, ca.Bundle(), empty)), nil)
		synctest.Wait()
		assert.Subset(t, news.take(), []string{"ALL", "spiffe://partner.test"})
		assert.ErrorIs(t, must.Err(src.GenerateSecret(t.Context(), "spiffe://partner.test")), spiffe.ErrNoAuthority)

		// A source that fails keeps its names; one that was told to stop does not.
		l.set(nil, errAway)
		_, err = src.GenerateSecret(short, "ROOTCA")
		assert.NotErrorIs(t, err, fs.ErrNotExist)
		assert.ErrorIs(t, err, errAway)
		l.set(nil, gone{})
		assert.ErrorIs(t, must.Err(src.GenerateSecret(t.Context(), "ROOTCA")), fs.ErrNotExist)

		// What has expired is not handed out, and its successor is waited for.
		l.set(spiffe.NewSnapshot(two, both), nil)
		time.Sleep(time.Until(two.NotAfter()))
		short, stop = context.WithTimeout(t.Context(), time.Second)
		defer stop()
		require.ErrorContains(t, must.Err(src.GenerateSecret(short, "default")), "has expired")
		go l.set(spiffe.NewSnapshot(ca.SVID("/web"), both), nil)
		must.Get(src.GenerateSecret(t.Context(), "default"))(t)

		synctest.Wait()
		news.take()
		cancel()
		cancel()
		l.set(spiffe.NewSnapshot(one, both), nil)
		synctest.Wait()
		assert.Empty(t, news.take(), "after cancel")
	}) // which fails if a goroutine is left
}

// workload is a source of several identities, as a *workloadapi.Source is.
type workload struct {
	live
	all []*spiffe.SVID // guarded by mu
	set *spiffe.BundleSet
}

func (w *workload) SVIDs() []*spiffe.SVID {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.all
}

func (w *workload) Bundles() *spiffe.BundleSet {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.set
}

// All identities of a workload are served by their IDs, also while none of them is the default one.
func TestFromWorkload(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, td.String())
	web, db := ca.SVID("/web"), ca.SVID("/db")
	set := bundles(t, ca.Bundle())
	w := &workload{live: live{err: spiffe.ErrNotReady}}
	src := sdssource.FromIdentity(w)
	var news told
	t.Cleanup(src.Subscribe(news.add))
	publish := func(snap *spiffe.Snapshot, err error, set *spiffe.BundleSet, all ...*spiffe.SVID) {
		w.mu.Lock()
		w.all, w.set = all, set
		w.mu.Unlock()
		w.live.set(snap, err)
	}
	has := func(name string, want error) {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, must.Err(src.GenerateSecret(ctx, name)), want, name)
	}
	publish(spiffe.NewSnapshot(web, set), nil, set, web, db)
	news.await(t, "ALL", "ROOTCA", td.ID().String(), "default", db.ID().String(), web.ID().String())
	for _, name := range []string{"default", "ROOTCA", "ALL", web.ID().String(), db.ID().String()} {
		has(name, nil)
	}
	publish(nil, spiffe.ErrNotReady, set, db)
	news.await(t, "ROOTCA", "default", web.ID().String())
	has(db.ID().String(), nil)
	has("ALL", nil)
	has("default", fs.ErrNotExist)
	publish(nil, gone{}, nil)
	news.await(t, "ALL", td.ID().String(), db.ID().String())
	has(db.ID().String(), fs.ErrNotExist)
}

func TestFromBundles(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca, other := spiffetest.NewCA(t, td.String()), spiffetest.NewCA(t, partner.String())
		l := &live{snap: spiffe.NewSnapshot(ca.SVID("/web"), bundles(t))}
		src, federated := sdssource.FromBundles(l, td), sdssource.FromBundles(l, spiffe.TrustDomain{})
		var news told
		defer src.Subscribe(news.add)()
		require.ErrorIs(t, must.Err(src.GenerateSecret(t.Context(), "ROOTCA")), fs.ErrNotExist, "not yet")
		l.set(spiffe.NewSnapshot(ca.SVID("/web"), bundles(t, ca.Bundle(), other.Bundle())), nil)
		synctest.Wait()
		assert.Equal(t, []string{"ALL", "ROOTCA", "spiffe://example.org", "spiffe://partner.test"}, news.take())
		roots, _ := must.Get(src.GenerateSecret(t.Context(), "ROOTCA"))(t).Roots()
		assert.Equal(t, string(ca.Bundle().MarshalPEM()), string(roots))
		_, err := federated.GenerateSecret(t.Context(), "ROOTCA")
		assert.ErrorIs(t, err, fs.ErrNotExist, "there is no own trust domain")
		assert.NoError(t, must.Err(federated.GenerateSecret(t.Context(), "spiffe://partner.test")))
		for _, name := range []string{"default", "spiffe://example.org/web"} {
			_, err = src.GenerateSecret(t.Context(), name)
			assert.ErrorIs(t, err, fs.ErrNotExist, "%s: there is no identity", name)
		}
		l.set(spiffe.NewSnapshot(ca.SVID("/web"), bundles(t, ca.Bundle())), nil)
		synctest.Wait()
		assert.Equal(t, []string{"ALL", "spiffe://partner.test"}, news.take())
	})
	assert.Panics(t, func() { sdssource.FromIdentity(nil) })
	assert.Panics(t, func() { sdssource.FromBundles(nil, td) })
}

// named is a source that answers with its own name, and has been asked.
type named struct {
	name string
	subs *told
	f    []func(string)
}

func (n *named) GenerateSecret(_ context.Context, name string) (*pki.Secret, error) {
	n.subs.add(n.name + " " + name)
	return nil, errAway
}

func (n *named) Subscribe(f func(string)) func() {
	n.f = append(n.f, f)
	return func() { n.f = nil }
}

func (n *named) tell(name string) {
	for _, f := range n.f {
		f(name)
	}
}

func TestMux(t *testing.T) {
	t.Parallel()
	var asked told
	a, b, c := &named{name: "a", subs: &asked}, &named{name: "b", subs: &asked}, &named{name: "c", subs: &asked}
	routes := map[string]sds.Source{"default": a, "ROOTCA": a, "file-*": b, "file-root:*": c, "file-root:system": b, "spiffe://*": a}
	m := must.Get(sdssource.Mux(routes))(t)
	delete(routes, "default") // it was copied
	for name, want := range map[string]string{
		"default": "a", "ROOTCA": "a", "file-cert:x~y": "b", "file-": "b", "file-root:x": "c", "file-root:": "c", "file-root:system": "b",
		"file-root:system2": "c", "spiffe://td": "a",
	} {
		_, err := m.GenerateSecret(t.Context(), name)
		assert.ErrorIs(t, err, errAway, "%s: what fails does not fall through", name)
		assert.Equal(t, []string{want + " " + name}, asked.take(), name)
	}
	for _, name := range []string{"", "defaul", "default2", "DEFAULT", "file", "*", "ALL"} {
		assert.ErrorIs(t, must.Err(m.GenerateSecret(t.Context(), name)), fs.ErrNotExist, name)
		assert.Empty(t, asked.take(), name)
	}

	var news told
	cancel := m.Subscribe(news.add)
	a.tell("default")
	a.tell("file-root:x") // that it has, too
	b.tell("file-root:x")
	c.tell("file-root:x")
	c.tell("ALL")
	assert.Equal(t, []string{"default", "file-root:x"}, news.take(), "each once, and from the source that is asked")
	cancel()
	a.tell("default")
	assert.Empty(t, news.take())

	all, err := sdssource.Mux(map[string]sds.Source{"*": a, "x": m})
	require.NoError(t, err, "a mux of a mux")
	_, _ = all.GenerateSecret(t.Context(), "anything")
	require.ErrorIs(t, must.Err(all.GenerateSecret(t.Context(), "x")), fs.ErrNotExist)
	assert.Equal(t, []string{"a anything"}, asked.take())

	for _, bad := range []map[string]sds.Source{nil, {}, {"": a}, {"a": nil}, {"a*b": a}, {"**": a}, {"*a": a}} {
		assert.Error(t, must.Err(sdssource.Mux(bad)), "%v", slices.Collect(maps.Keys(bad)))
	}
}

// The identity of a workload from mounted files, as default and ROOTCA: what is deleted does not fall through to another
// source, and what comes back is taken over.
func TestMountedIdentity(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-7.3-1", "IST-7.4-1", "IST-7.4-2", "IST-7.10-7")
	onlyUnix(t)
	ca := spiffetest.NewCA(t, td.String())
	dir := t.TempDir()
	one := ca.SVID("/web")
	swap(t, dir, 1, volume(t, one, ca.Bundle()))
	mounted, err := filesource.Start(t.Context(), filesource.Config{
		CertFile: filepath.Join(dir, "tls.crt"), KeyFile: filepath.Join(dir, "tls.key"), Bundles: []filesource.BundleFile{{Path: filepath.Join(dir, "ca.crt")}},
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, mounted.Close()) })
	var asked, news told
	src, err := sdssource.Mux(map[string]sds.Source{
		"default": sdssource.FromIdentity(mounted), "ROOTCA": sdssource.FromBundles(mounted, td), "*": &named{name: "the CA", subs: &asked},
	})
	require.NoError(t, err)
	t.Cleanup(src.Subscribe(news.add))
	has := func(svid *spiffe.SVID) {
		t.Helper()
		assert.Equal(t, certsOf(t, svid), chainOf(t, must.Get(src.GenerateSecret(t.Context(), "default"))(t)))
		must.Get(src.GenerateSecret(t.Context(), "ROOTCA"))(t)
	}
	has(one)
	require.NoError(t, os.Remove(filepath.Join(dir, "tls.crt")))
	require.NoError(t, os.Remove(filepath.Join(dir, "ca.crt")))
	require.Eventually(t, func() bool { return mounted.Report().Upstreams[0].Err != nil }, patience, time.Millisecond)
	has(one)
	assert.Empty(t, asked.take())
	assert.Empty(t, news.take())
	ca.Rotate()
	two := ca.SVID("/web")
	swap(t, dir, 2, volume(t, two, ca.Bundle()))
	var all []string
	require.Eventually(t, func() bool { all = append(all, news.take()...); return len(all) == 2 }, patience, time.Millisecond)
	assert.ElementsMatch(t, []string{"default", "ROOTCA"}, all)
	has(two)
}
