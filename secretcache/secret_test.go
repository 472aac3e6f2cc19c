package secretcache_test

import (
	"context"
	"crypto"
	"io"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func TestNames(t *testing.T) {
	conformance.Covers(t, "IST-7.1-1", "IST-7.1-2", "IST-7.2-1", "IST-7.2-2", "IST-7.3-2")
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		other := spiffetest.NewCA(t, "other.test")
		ca.Federate(other.Bundle())
		m := newManager(t, secretcache.Config{CA: ca})
		require.NoError(t, m.Add(worker))
		start(t, m)
		created := time.Now()
		time.Sleep(time.Minute)

		for _, name := range []string{"default", web.String(), worker.String()} {
			s := must.Get(m.GenerateSecret(t.Context(), name))(t, name)
			assert.Equal(t, name, s.Name())
			chain, key, ok := s.KeyPair()
			require.True(t, ok, name)
			svid := must.Get(spiffe.ParseSVIDPEM(chain, key))(t)
			assert.Equal(t, svid.NotAfter(), s.NotAfter())
			if name == "default" {
				assert.Equal(t, current(t, m).Chain(), svid.Chain())
				assert.Equal(t, current(t, m).Signer(), svid.Signer())
				assert.Equal(t, created, m.Report().Identities[0].LastSuccess)
			}
			assert.Same(t, s, must.Get(m.GenerateSecret(t.Context(), name))(t))
		}
		for name, b := range map[string]*spiffe.Bundle{"ROOTCA": ca.Bundle(), "spiffe://example.org": ca.Bundle(), "spiffe://other.test": other.Bundle()} {
			s := must.Get(m.GenerateSecret(t.Context(), name))(t, name)
			assert.Equal(t, name, s.Name())
			roots, ok := s.Roots()
			assert.True(t, ok)
			assert.Equal(t, string(b.MarshalPEM()), string(roots))
			_, _, ok = s.KeyPair()
			assert.False(t, ok, "roots come without a key")
		}
		all := must.Get(m.GenerateSecret(t.Context(), "ALL"))(t)
		domains, _ := all.TrustDomains()
		assert.Equal(t, map[spiffe.TrustDomain][]byte{ca.TrustDomain(): ca.Bundle().MarshalPEM(), other.TrustDomain(): other.Bundle().MarshalPEM()}, domains)
		for _, name := range []string{
			"", "DEFAULT", "rootca", "default ", "file-cert:a~b", "file-root:system", "builtin://", "spiffe://",
			"spiffe://example.org/", "spiffe://example.org/unknown", "spiffe://other.test/web", "spiffe://unknown.test",
			"spiffe://Example.org", "web", "/web", strings.Repeat("x", 5000),
		} {
			s, err := m.GenerateSecret(t.Context(), name)
			assert.ErrorIs(t, err, fs.ErrNotExist, name)
			assert.Nil(t, s, "unknown names never yield anything")
			assert.ErrorContains(t, err, `the names are "default", "ROOTCA"`)
			assert.Less(t, len(err.Error()), 600)
		}
		assert.Equal(t, 2, ca.Signed(), "no name but a known one makes a request")
	})
}

// TestOneRequestForAll has a hundred callers ask at the same time, with Run and without.
func TestOneRequestForAll(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-7.3-3")
	for _, running := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			ca := spiffetest.NewCA(t, "example.org")
			ca.Delay(time.Second)
			counted := poll(ca)
			m := newManager(t, secretcache.Config{CA: counted})
			if running {
				start(t, m)
				synctest.Wait()
			}
			got := make([]*pki.Secret, 100)
			var wg sync.WaitGroup
			for i := range got {
				wg.Go(func() {
					var err error
					got[i], err = m.GenerateSecret(t.Context(), "default")
					assert.NoError(t, err)
				})
			}
			wg.Wait()
			for _, s := range got {
				assert.Same(t, got[0], s)
			}
			assert.EqualValues(t, 1, counted.signed.Load())
			assert.EqualValues(t, 1, counted.fetched.Load())
		})
	}
}

// TestCallersContext shows that a context bounds the wait and not the work.
func TestCallersContext(t *testing.T) {
	t.Parallel()
	for _, running := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			ca := spiffetest.NewCA(t, "example.org")
			ca.Delay(5 * time.Second)
			m := newManager(t, secretcache.Config{CA: poll(ca)})
			if running {
				start(t, m)
				synctest.Wait()
			}
			begin := time.Now()
			ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, errStop)
			defer cancel()
			_, err := m.GenerateSecret(ctx, "default")
			assert.ErrorIs(t, err, spiffe.ErrNotReady)
			assert.ErrorIs(t, err, errStop)
			assert.Equal(t, time.Second, time.Since(begin))
			must.Get(m.GenerateSecret(t.Context(), "ROOTCA"))(t)
			assert.Equal(t, 5*time.Second, time.Since(begin), "the work of the first caller went on")
			must.Get(m.GenerateSecret(t.Context(), web.String()))(t)
			assert.Equal(t, 10*time.Second, time.Since(begin))
			assert.Equal(t, 1, ca.Signed())
		})
	}
}

// TestWithoutRun shows that GenerateSecret works alone, waits between its attempts too, renews what
// has expired and nothing sooner.
func TestWithoutRun(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		counted := poll(ca)
		m := newManager(t, secretcache.Config{CA: counted})
		ca.FailNext(3, errDown)
		begin := time.Now()
		for range 1000 { // impatient
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			_, err := m.GenerateSecret(ctx, "ROOTCA")
			cancel()
			assert.ErrorIs(t, err, errDown)
		}
		assert.EqualValues(t, 1, counted.fetched.Load(), "a second has not passed")
		first := must.Get(m.GenerateSecret(t.Context(), "default"))(t)
		assert.LessOrEqual(t, time.Since(begin), 30*time.Second)
		assert.EqualValues(t, 4, counted.fetched.Load())

		time.Sleep(58 * time.Minute)
		assert.Same(t, first, must.Get(m.GenerateSecret(t.Context(), "default"))(t))
		time.Sleep(2 * time.Minute)
		second := must.Get(m.GenerateSecret(t.Context(), "default"))(t)
		assert.NotSame(t, first, second)
		assert.True(t, second.NotAfter().After(time.Now()))
	})
}

// TestSequences is Istio's table of requests and callbacks, as far as it applies: there, renewal
// waits for a request, and here it does not.
func TestSequences(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-7.3-2", "IST-7.3-5", "IST-7.3-7", "IST-7.3-10", "IST-7.3-12")
	trust := []string{"ALL", "ROOTCA", "spiffe://example.org"}
	leaf := []string{"default", "spiffe://example.org/web"}
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		m := newManager(t, secretcache.Config{CA: ca})
		var heard told
		defer m.Subscribe(heard.add)()
		ask := func(names ...string) {
			for _, name := range names {
				must.Get(m.GenerateSecret(t.Context(), name))(t)
			}
		}

		ask("ROOTCA")
		assert.Equal(t, trust, heard.take())
		assert.Zero(t, ca.Signed())
		ask("default")
		assert.Equal(t, leaf, heard.take(), "the first one is told too")
		assert.Equal(t, 1, ca.Signed())
		ask("ROOTCA", "default", web.String(), domain.ID().String())
		assert.Empty(t, heard.take(), "from the cache")
		assert.Equal(t, 1, ca.Signed())

		start(t, m)
		assert.Empty(t, heard.take(), "the bundle is the same, and the certificate is good")
		time.Sleep(30 * time.Minute)
		assert.Equal(t, leaf, heard.take(), "renewal, root unchanged")
		assert.Equal(t, 2, ca.Signed())

		ca.Prepare()
		assert.Equal(t, trust, heard.take(), "a new root")
		assert.Equal(t, 2, ca.Signed(), "the old one is still there, and the leaf with it")
		ca.Federate(spiffetest.NewCA(t, "other.test").Bundle())
		assert.Equal(t, []string{"ALL", "spiffe://other.test"}, heard.take())

		ca.Rotate()
		ca.DropOldRoots()
		assert.Equal(t, append(trust, leaf...), heard.take(), "the leaf's root is gone")
		assert.Equal(t, 3, ca.Signed())
		ask("ROOTCA", "default")
		assert.Empty(t, heard.take())
	})

	synctest.Test(t, func(t *testing.T) {
		m := newManager(t, secretcache.Config{CA: spiffetest.NewCA(t, "example.org")})
		var heard told
		cancel := m.Subscribe(heard.add)
		must.Get(m.GenerateSecret(t.Context(), "default"))(t)
		assert.Equal(t, append(trust, leaf...), heard.take(), "default first: ROOTCA before default")

		require.NoError(t, m.Add(worker))
		require.NoError(t, m.Add(worker))
		assert.Equal(t, []string{worker.String()}, heard.take(), "the name appeared")
		must.Get(m.GenerateSecret(t.Context(), worker.String()))(t)
		assert.Equal(t, []string{worker.String()}, heard.take())
		m.Remove(worker)
		m.Remove(worker)
		assert.Equal(t, []string{worker.String()}, heard.take(), "the name is gone")
		cancel()
		cancel()
		require.NoError(t, m.Add(worker))
		assert.Empty(t, heard.take())
	})
}

// TestSubscribers shows that a callback may do what it likes but wait for another name.
func TestSubscribers(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		m := newManager(t, secretcache.Config{CA: ca})
		var first, second told
		var cancelFirst func()
		cancelFirst = m.Subscribe(func(name string) {
			assert.NoError(t, must.Err(m.GenerateSecret(t.Context(), name)))
			m.Status()
			first.add(name)
			if name == "default" {
				cancelFirst()
				m.Subscribe(second.add)
				assert.NoError(t, m.Add(worker))
			}
		})
		start(t, m)
		assert.Equal(t, []string{"ALL", "ROOTCA", "spiffe://example.org", "default"}, first.take())
		assert.Equal(t, []string{worker.String()}, slices.Compact(second.take()), "a subscriber is told of what changes after it has subscribed")
	})
}

type hardware struct{ crypto.Signer }

func (h hardware) Sign(r io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	return h.Signer.Sign(r, digest, opts)
}

func TestKeysInHardware(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		m := newManager(t, secretcache.Config{CA: spiffetest.NewCA(t, "example.org"), NewKey: func() (crypto.Signer, error) {
			k, err := pki.NewKey("ecdsa-p256")
			return hardware{k}, err
		}})
		svid, _ := ready(t, m)
		assert.IsType(t, hardware{}, svid.Signer())
		for _, name := range []string{"default", web.String()} {
			s, err := m.GenerateSecret(t.Context(), name)
			assert.ErrorContains(t, err, "cannot be exported")
			assert.Nil(t, s)
		}
	})
}

func newKeyFails(err error) func() (crypto.Signer, error) {
	return func() (crypto.Signer, error) { return nil, err }
}
