package workloadserver_test

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// manager runs a SecretManager until the test ends.
func manager(t testing.TB, ca *spiffetest.CA, path string) *secretcache.Manager {
	t.Helper()
	id := must.Get(spiffe.ParseID(ca.TrustDomain().ID().String() + path))(t)
	m := must.Get(secretcache.New(secretcache.Config{ID: id, CA: ca}))(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = m.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	must.Get(m.GenerateSecret(t.Context(), "default"))(t)
	return m
}

// current returns the SVID that a source has, and fails the test if it has expired.
func current(t testing.TB, s spiffe.SVIDSource) *spiffe.SVID {
	t.Helper()
	svid := must.Get(s.SVID())(t)
	require.False(t, time.Now().After(svid.NotAfter()), "it ended at %v, and it is %v", svid.NotAfter(), time.Now())
	return svid
}

// An agent with a manager for itself and one for each workload, as in the example of NewHandler, keeps its
// workloads current for a day, without a call of Refresh: whether Identities returns the managers, or what
// they have at the moment.
func TestLiveManagers(t *testing.T) {
	t.Parallel()
	for name, identity := range map[string]func(t testing.TB, m *secretcache.Manager) workloadserver.Identity{
		"as providers": func(_ testing.TB, m *secretcache.Manager) workloadserver.Identity {
			return workloadserver.Identity{Provider: m}
		},
		"as they are now": func(t testing.TB, m *secretcache.Manager) workloadserver.Identity {
			svid, err := m.SVID()
			assert.NoError(t, err)
			return workloadserver.Identity{SVID: svid}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ca := spiffetest.NewCA(t, "example.org") // of leaves that live an hour
				agent, web := manager(t, ca, "/agent"), manager(t, ca, "/web")
				time.Sleep(11 * time.Minute) // the phases of managers and streams differ
				var asked atomic.Int64
				h := handler(t, agent, &workloadserver.Options{Identities: func(context.Context) ([]workloadserver.Identity, error) {
					asked.Add(1)
					return []workloadserver.Identity{identity(t, web)}, nil
				}})
				s := readySource(t, workloadapi.Config{Client: inMemory(t, h)})
				least := time.Hour
				minutes := rounds.Of(rounds.Of(90)) // in CI a day
				for range minutes {
					time.Sleep(time.Minute)
					least = min(least, time.Until(current(t, s).NotAfter()))
					if name == "as providers" {
						synctest.Wait()
						want, _ := web.SVID()
						require.Equal(t, want.Chain(), current(t, s).Chain(), "at once")
					}
				}
				assert.Greater(t, least, 20*time.Minute, "long before the end")
				assert.Less(t, asked.Load(), int64(minutes), "and not in a loop")
			})
		})
	}
}

// still is a Provider that has forgotten to tell of changes.
type still struct{ *provider }

func (still) Changed() <-chan struct{} { return nil }

// What a Provider does not tell of arrives all the same: bundles within minutes, an identity before the one
// before it ends, and a withdrawal.
func TestForgetfulProvider(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home, other := workloadtest.NewDomain(t, "example.org"), workloadtest.NewDomain(t, "other.test")
		src := &provider{}
		web := home.SVID("/web")
		src.set(snapshot(t, web, home), nil)
		h := handler(t, still{src}, nil)
		s := readySource(t, workloadapi.Config{Client: inMemory(t, h), JWTBundles: true})
		updates := updatesOf(s, "jwt")
		c := home.Bundle().Contents()
		c.JWTAuthorities = map[string]crypto.PublicKey{"k": workloadtest.NewKey(t).Public()}
		set := must.Get(spiffe.NewBundleSet(must.Get(spiffe.NewBundle(home.TrustDomain(), c))(t), other.Bundle()))(t)
		src.set(spiffe.NewSnapshot(web, set), nil)
		time.Sleep(6 * time.Minute)
		must.Get(s.Bundle(other.TrustDomain()))(t)
		assert.Equal(t, updates+1, updatesOf(s, "jwt"))

		for range 20 {
			src.set(snapshot(t, home.SVID("/web"), home), nil)
			time.Sleep(31 * time.Minute)
			assert.Greater(t, time.Until(current(t, s).NotAfter()), 15*time.Minute)
		}
		src.set(nil, workloadserver.ErrDenied)
		time.Sleep(6 * time.Minute)
		require.ErrorIs(t, must.Err(s.SVID()), workloadapi.ErrDenied)
	})
}

// An identity that is never renewed is asked for often in the second half of its life, less often than once
// a second, and is not taken away. The log says when it has expired.
func TestNeverRenewed(t *testing.T) {
	t.Parallel()
	for _, life := range []time.Duration{20 * time.Second, time.Hour, 24 * time.Hour} {
		t.Run(life.String(), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				home := workloadtest.NewDomain(t, "example.org")
				svid := home.SVID("/web", func(c *x509.Certificate) {
					c.NotBefore = time.Now()
					c.NotAfter = time.Now().Add(life)
				})
				var mu sync.Mutex
				var all []time.Duration
				looks := func() []time.Duration {
					synctest.Wait()
					mu.Lock()
					defer mu.Unlock()
					return slices.Clone(all)
				}
				start := time.Now()
				var log syncBuffer
				h := handler(t, fixed(snapshot(t, home.SVID("/agent"), home)), &workloadserver.Options{
					Identities: func(context.Context) ([]workloadserver.Identity, error) {
						mu.Lock()
						defer mu.Unlock()
						all = append(all, time.Since(start))
						return []workloadserver.Identity{{SVID: svid}}, nil
					},
					Logger: workloadtest.Logger(&log),
				})
				s := readySource(t, workloadapi.Config{Client: inMemory(t, h)})
				time.Sleep(life - time.Second)
				asked := looks()
				early, late := 0, 0
				gap := time.Duration(0)
				for i, at := range asked[1:] {
					if at < life/2 {
						early++
						continue
					}
					late++
					gap = max(gap, at-max(asked[i], life/2))
				}
				assert.LessOrEqual(t, early, int(life/2/(4*time.Minute))+1)
				assert.GreaterOrEqual(t, late, 10)
				assert.LessOrEqual(t, gap, min(31*time.Second, life/20), "at most 4 % of what is left, and half a minute")
				assert.NotContains(t, log.String(), "has expired")

				time.Sleep(time.Hour)
				more := len(looks()) - len(asked)
				assert.Less(t, more, 3700, "no tight loop")
				assert.Greater(t, more, 100)
				assert.Equal(t, svid.Chain(), must.Get(s.SVID())(t).Chain())
				assert.Equal(t, 1, updatesOf(s, "x509"))
				assert.Contains(t, log.String(), `msg="workloadserver: an identity that is served has expired"`)
				assert.Contains(t, log.String(), "id=spiffe://example.org/web")
			})
		})
	}
}

// A hook that fails while nothing has changed costs no stream; a change that it fails for does, and so does a
// denial.
func TestFailureWithoutChange(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		var svid atomic.Pointer[spiffe.SVID]
		var failure atomic.Pointer[error]
		svid.Store(home.SVID("/web"))
		var log syncBuffer
		src := &provider{}
		src.set(snapshot(t, home.SVID("/agent"), home), nil)
		h := handler(t, src, &workloadserver.Options{
			Identities: func(context.Context) ([]workloadserver.Identity, error) {
				if err := failure.Load(); err != nil {
					return nil, *err
				}
				return []workloadserver.Identity{{SVID: svid.Load()}}, nil
			},
			Logger: workloadtest.Logger(&log),
		})
		s := readySource(t, workloadapi.Config{Client: inMemory(t, h)})

		kaputt := errors.New("kaputt")
		failure.Store(&kaputt)
		time.Sleep(10 * time.Minute) // of the first half of the life
		svid.Store(home.SVID("/web"))
		failure.Store(nil)
		time.Sleep(31 * time.Second)
		assert.Equal(t, svid.Load().Chain(), current(t, s).Chain(), "soon after the failure has gone")

		failure.Store(&kaputt)
		time.Sleep(45 * time.Minute)
		assert.Contains(t, log.String(), "kaputt")
		assert.True(t, isOpen(s), "the stream is still there")
		assert.Zero(t, s.Report().Upstreams[0].Failures)
		svid.Store(home.SVID("/web"))
		failure.Store(nil)
		time.Sleep(40 * time.Second)
		assert.Equal(t, svid.Load().Chain(), current(t, s).Chain(), "soon after the failure has gone")

		failure.Store(&kaputt)
		src.set(snapshot(t, home.SVID("/agent"), home), nil)
		synctest.Wait()
		assert.ErrorContains(t, s.Report().Upstreams[0].Err, "status unavailable", "of a change the caller is told")
		failure.Store(nil)
		time.Sleep(time.Minute)
		require.True(t, isOpen(s))

		denied := workloadserver.ErrDenied
		failure.Store(&denied)
		time.Sleep(6 * time.Minute)
		require.ErrorIs(t, must.Err(s.SVID()), workloadapi.ErrDenied)
	})
}

// A hook that waits for something is told to stop after half a minute, and the caller to come back.
func TestHookThatHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		hang := func(ctx context.Context) error {
			<-ctx.Done()
			return context.Cause(ctx)
		}
		var identities atomic.Bool // whether that hook hangs
		identities.Store(true)
		h := handler(t, fixed(snapshot(t, home.SVID("/web"), home)), &workloadserver.Options{
			Identities: func(ctx context.Context) ([]workloadserver.Identity, error) {
				if identities.Load() {
					return nil, hang(ctx)
				}
				return []workloadserver.Identity{{SVID: home.SVID("/web")}}, nil
			},
			IssueJWTSVID: func(ctx context.Context, _ spiffe.ID, _ []string) (string, error) { return "", hang(ctx) },
			ValidateJWTSVID: func(ctx context.Context, _, _ string) (spiffe.ID, map[string]any, error) {
				return spiffe.ID{}, nil, hang(ctx)
			},
		})
		c := http2(t, h)
		bodies := map[string][]byte{
			"FetchX509SVID":   frame(&wire.X509SVIDRequest{}),
			"FetchJWTBundles": frame(&wire.JWTBundlesRequest{}),
			"FetchJWTSVID":    frame(&wire.JWTSVIDRequest{Audience: []string{"a"}}),
			"ValidateJWTSVID": frame(&wire.ValidateJWTSVIDRequest{Audience: "a", Svid: "x"}),
		}
		hangs := func(method string) {
			start := time.Now()
			code, message := post(t, c, service+method, bodies[method], header, "true").Status()
			assert.Equal(t, workloadtest.Unavailable, code, "%s: %s", method, message)
			assert.Equal(t, 30*time.Second, time.Since(start), method)
		}
		for method := range bodies {
			hangs(method)
		}
		identities.Store(false)
		hangs("FetchJWTSVID")
		hangs("ValidateJWTSVID")
		synctest.Wait()
		assert.Zero(t, streams(h))
	})
}

// An identity has a source or an SVID, and a source may say no, or not yet.
func TestIdentityProviders(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		web, db := &provider{}, &provider{}
		web.set(snapshot(t, home.SVID("/web"), home), nil)
		db.set(snapshot(t, home.SVID("/db"), home), nil)
		ids := []workloadserver.Identity{{Provider: web, Hint: "front"}, {Provider: db}}
		var mu sync.Mutex
		var log syncBuffer
		h := handler(t, fixed(snapshot(t, home.SVID("/agent"), home)), &workloadserver.Options{
			Identities: func(context.Context) ([]workloadserver.Identity, error) {
				mu.Lock()
				defer mu.Unlock()
				return ids, nil
			},
			Logger: workloadtest.Logger(&log),
		})
		s := readySource(t, workloadapi.Config{Client: inMemory(t, h)})
		paths := func() (got []string) {
			synctest.Wait()
			for _, svid := range s.SVIDs() {
				got = append(got, svid.ID().Path())
			}
			return got
		}
		assert.Equal(t, []string{"/web", "/db"}, paths())
		for range 3 { // each of them tells of its changes
			for i, p := range []*provider{web, db} {
				next := home.SVID([]string{"/web", "/db"}[i])
				p.set(snapshot(t, next, home), nil)
				synctest.Wait()
				assert.Equal(t, next.Chain(), s.SVIDs()[i].Chain())
			}
		}

		web.set(nil, workloadserver.ErrDenied)
		assert.Equal(t, []string{"/db"}, paths(), "one is withdrawn")
		web.set(snapshot(t, home.SVID("/web"), home), nil)
		assert.Equal(t, []string{"/web", "/db"}, paths(), "and there again")
		db.set(nil, errors.New("not now"))
		assert.Equal(t, []string{"/web", "/db"}, paths(), "one that fails takes nothing away")
		assert.Contains(t, log.String(), "not now")
		db.set(nil, workloadserver.ErrDenied)
		web.set(nil, workloadserver.ErrDenied)
		time.Sleep(time.Minute)
		assert.Empty(t, paths(), "all are withdrawn")
		web.set(nil, nil) // neither a snapshot nor an error
		time.Sleep(time.Minute)
		assert.ErrorContains(t, s.Report().Upstreams[0].Err, "status unavailable")
		web.set(snapshot(t, home.SVID("/web"), home), nil)
		time.Sleep(time.Minute)
		assert.Equal(t, []string{"/web"}, paths())

		mu.Lock()
		ids = []workloadserver.Identity{{Provider: web, SVID: home.SVID("/web")}}
		mu.Unlock()
		h.Refresh()
		time.Sleep(time.Second)
		assert.ErrorContains(t, s.Report().Upstreams[0].Err, "status unavailable")
		assert.Equal(t, []string{"/web"}, paths())
	})
}
