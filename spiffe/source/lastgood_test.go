package source_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/source"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

var (
	_ = source.LastGoodConfig{Source: (*workloadapi.Source)(nil)}
	_ = source.LastGoodConfig{Source: (*secretcache.Manager)(nil)}
	_ = source.LastGoodConfig{Source: (*source.LastGood)(nil)}
)

var (
	td      = spiffe.MustParseTrustDomain("example.org")
	partner = spiffe.MustParseTrustDomain("partner.test")
)

// diary keeps what was logged.
type diary struct{ logtest.Buffer }

func (d *diary) logger() *slog.Logger { return slog.New(slog.NewTextHandler(d, nil)) }

// fixture is an agent, and where its workload stores the last good.
type fixture struct {
	ca  *spiffetest.CA
	api *workloadapitest.Server
	cfg source.LastGoodConfig
	log *diary
}

func newFixture(t testing.TB) *fixture {
	t.Helper()
	ca := spiffetest.NewCA(t, "example.org")
	w := &fixture{ca: ca, api: workloadapitest.NewInMemory(t, ca, "/web"), log: &diary{}}
	w.cfg = source.LastGoodConfig{Dir: filepath.Join(t.TempDir(), "store"), MaxAge: 24 * time.Hour, Identity: true, Logger: w.log.logger()}
	return w
}

// live returns a source that was not started.
func (w *fixture) live(t testing.TB) *workloadapi.Source {
	t.Helper()
	cfg := w.api.Config()
	cfg.BundlesOnly = w.cfg.BundlesOnly
	return must.Get(workloadapi.New(cfg))(t)
}

// start starts a LastGood, as a program does when it starts, and returns what ends it.
func (w *fixture) start(t testing.TB) (*source.LastGood, func()) {
	t.Helper()
	l := must.Get(w.try(t, time.Minute))(t)
	stop := sync.OnceFunc(func() { require.NoError(t, l.Close()) })
	t.Cleanup(stop)
	synctest.Wait()
	return l, stop
}

func (w *fixture) try(t testing.TB, patience time.Duration) (*source.LastGood, error) {
	t.Helper()
	w.cfg.Source = w.live(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	return source.StartLastGood(ctx, w.cfg)
}

func serial(t testing.TB, s spiffe.SVIDSource) string {
	t.Helper()
	return must.Get(s.SVID())(t).Leaf().SerialNumber.String()
}

// handshake connects two workloads with the sources by mutual TLS.
func handshake(t testing.TB, server, client source.Source) error {
	t.Helper()
	allow := spiffe.AllowMembersOf(td)
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: server, Peers: server, Allow: allow}))(t)
	sc := must.Get(endpoint.ServerConfig())(t)
	endpoint = must.Get(spiffetls.New(spiffetls.Config{Self: client, Peers: client, Allow: allow}))(t)
	cc := must.Get(endpoint.ClientConfig())(t)
	a, b := memconn.Pipe()
	defer a.Close()
	defer b.Close()
	done := make(chan error, 1)
	go func() { done <- tls.Server(a, sc).HandshakeContext(t.Context()) }()
	err := tls.Client(b, cc).HandshakeContext(t.Context())
	if err != nil {
		a.Close()
	}
	return errors.Join(err, <-done)
}

// A program that restarts while the agent is away serves from its start, by what it has stored, and takes what the
// agent has when that is back.
func TestRestartDuringAnOutage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t)
		l, stop := w.start(t)
		st := statusOf(l)
		assert.False(t, st.InUse)
		assert.ErrorContains(t, st.Refused, "no such file")
		before := serial(t, l)
		stop()
		require.NoError(t, l.Close())

		w.api.Drop()
		time.Sleep(50 * time.Minute) // of an hour
		began := time.Now()
		l, _ = w.start(t)
		assert.Less(t, time.Since(began), time.Second, "it does not wait for the agent")
		st = statusOf(l)
		assert.True(t, st.InUse)
		assert.NoError(t, st.Refused)
		assert.NoError(t, st.Err)
		assert.Equal(t, before, serial(t, l))
		require.NoError(t, handshake(t, l, l))
		snap := must.Get(l.Snapshot())(t)
		assert.Equal(t, 1, snap.Bundles().Len())
		assert.Same(t, snap.Bundles(), l.Bundles())
		b := must.Get(l.Bundle(td))(t)
		assert.True(t, sameRoots(b, w.ca.Bundle()))
		require.Error(t, must.Err(l.Bundle(partner)))
		var metrics bytes.Buffer
		require.NoError(t, l.Report().Metrics(&metrics))
		assert.Contains(t, metrics.String(), "svidkit_last_good_in_use 1\n")

		// The agent is back, with another root.
		w.ca.Rotate()
		w.api.Mend()
		w.api.ExpireIn(5 * time.Minute)
		w.api.Rotate()
		time.Sleep(time.Minute)
		synctest.Wait()
		st = statusOf(l)
		assert.False(t, st.InUse)
		assert.NotEqual(t, before, serial(t, l))
		require.NoError(t, handshake(t, l, l))
		b = must.Get(l.Bundle(td))(t)
		assert.True(t, sameRoots(b, w.ca.Bundle()))
		assert.Contains(t, w.log.String(), "takes over from what was stored")

		// An outage while the program runs is the live source's affair; what is stored is not looked at again.
		now := serial(t, l)
		w.api.Drop()
		time.Sleep(10 * time.Minute)
		assert.Equal(t, now, serial(t, l))
	})
}

func sameRoots(a, b *spiffe.Bundle) bool { return bytes.Equal(a.MarshalPEM(), b.MarshalPEM()) }

// What has ended is not handed out: an identity that has expired, before or after the start, and all that is
// older than MaxAge.
func TestStoredEnds(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		maxAge, life, away time.Duration
		identity, bundles  bool
		reason             string
	}{
		"good":               {24 * time.Hour, time.Hour, 55 * time.Minute, true, true, ""},
		"just good":          {time.Hour, 2 * time.Hour, time.Hour - 2*time.Second, true, true, ""},
		"expired":            {24 * time.Hour, time.Hour, time.Hour + time.Second, false, true, "has expired at"},
		"older than MaxAge":  {time.Hour, 48 * time.Hour, time.Hour + time.Minute, false, false, "longer ago than the 1h0m0s of MaxAge"},
		"both":               {time.Hour, time.Hour, 3 * time.Hour, false, false, "of MaxAge"},
		"the clock put back": {24 * time.Hour, time.Hour, 0, false, false, "in the future"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t)
				w.cfg.MaxAge = test.maxAge
				w.api.ExpireIn(test.life)
				_, stop := w.start(t)
				stop()
				w.api.Drop()
				if name == "the clock put back" {
					file := filepath.Join(w.cfg.Dir, "bundles.json")
					doc := must.Get(os.ReadFile(file))(t)
					later := bytes.Replace(doc, fmt.Append(nil, time.Now().Unix()), fmt.Append(nil, time.Now().Add(2*time.Hour).Unix()), 1)
					require.NotEqual(t, doc, later)
					require.NoError(t, os.WriteFile(file, later, 0o600))
				}
				time.Sleep(test.away)
				l, err := w.try(t, time.Second)
				if test.identity {
					require.NoError(t, err)
					require.NoError(t, handshake(t, l, l))
					time.Sleep(min(test.life, test.maxAge) - test.away + time.Second) // and then it ends
					_, err = l.SVID()
					require.ErrorIs(t, err, spiffe.ErrNotReady)
					require.NoError(t, l.Close())
					return
				}
				must.Fail(t, err, spiffe.ErrNotReady, context.DeadlineExceeded, test.reason)
				require.ErrorContains(t, err, "workloadapi", "and what the agent says")

				// The bundles may be good all the same.
				w.cfg.Source = w.live(t)
				l = must.Get(source.NewLastGood(w.cfg))(t)
				done := make(chan error, 1)
				go func() { done <- l.Run(t.Context()) }()
				synctest.Wait()
				_, err = l.Bundle(td)
				assert.Equal(t, test.bundles, err == nil, "%v", err)
				assert.Equal(t, test.bundles, l.Bundles().Len() == 1)
				assert.Equal(t, test.bundles, statusOf(l).InUse)
				require.Error(t, must.Err(l.SVID()))
				require.NoError(t, l.Close())
				require.NoError(t, <-done)
			})
		})
	}
}

// The end of MaxAge comes while the program runs, too: a root that was revoked during an outage is not trusted for longer.
func TestMaxAgeWhileRunning(t *testing.T) {
	t.Parallel()
	for _, bundlesOnly := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := newFixture(t)
			w.cfg.MaxAge, w.cfg.BundlesOnly, w.cfg.Identity = 15*time.Minute, bundlesOnly, !bundlesOnly
			w.api.ExpireIn(48 * time.Hour)
			_, stop := w.start(t)
			saved := time.Now()
			stop()
			w.api.Drop()
			time.Sleep(10 * time.Minute)
			l, _ := w.start(t)
			has := func() (has []bool) {
				_, bundle := l.Bundle(td)
				_, snapshot := l.Snapshot()
				_, svid := l.SVID()
				ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
				defer cancel()
				return []bool{bundle == nil, l.Bundles().Len() == 1, statusOf(l).InUse, l.Ready(ctx) == nil, snapshot == nil, svid == nil}
			}
			good := []bool{true, true, true, true, !bundlesOnly, !bundlesOnly}
			require.Equal(t, good, has())
			time.Sleep(time.Until(saved.Add(w.cfg.MaxAge - 2*time.Second)))
			require.Equal(t, good, has(), "to the end")
			time.Sleep(3 * time.Second)
			require.Equal(t, make([]bool, len(good)), has(), "and no longer")
		})
	}
}

// While the live source works, what is stored stays young.
func TestStaysYoung(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t)
		w.cfg.MaxAge = 2 * time.Hour
		w.api.ExpireIn(1000 * time.Hour)
		l, stop := w.start(t)
		time.Sleep(4 * time.Hour)
		synctest.Wait()
		assert.WithinDuration(t, time.Now(), statusOf(l).Saved, w.cfg.MaxAge/10+time.Second)
		stop()
		w.api.Drop()
		time.Sleep(time.Hour)
		l, stop = w.start(t)
		saved := statusOf(l).Saved
		// What was only loaded does not get younger, however often the program starts.
		for range 5 {
			stop()
			time.Sleep(11 * time.Minute)
			l, stop = w.start(t)
			assert.Equal(t, saved, statusOf(l).Saved)
		}
		stop()
		time.Sleep(11 * time.Minute)
		require.ErrorContains(t, must.Err(w.try(t, time.Second)), "of MaxAge")
	})
}

// That the server refuses the identity is an answer, and not an outage: what is stored is deleted.
func TestWithdrawn(t *testing.T) {
	t.Parallel()
	files := func(w *fixture) (n int) {
		return len(must.Get(os.ReadDir(w.cfg.Dir))(t))
	}
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t)
		w.api.ExpireIn(10 * time.Minute)
		_, stop := w.start(t)
		stop()
		require.Equal(t, 2, files(w))
		w.api.Drop()
		l, _ := w.start(t)
		serial(t, l)
		w.api.Deny() // the agent is back, and does not know the workload any more
		time.Sleep(time.Minute)
		synctest.Wait()
		require.ErrorIs(t, must.Err(l.SVID()), workloadapi.ErrDenied)
		require.ErrorIs(t, must.Err(l.Bundle(td)), workloadapi.ErrDenied)
		assert.Zero(t, l.Bundles().Len())
		assert.Zero(t, files(w))
		assert.ErrorContains(t, statusOf(l).Refused, "was deleted")
		w.api.Drop() // and is away again
		time.Sleep(10 * time.Minute)
		require.Error(t, must.Err(l.SVID()))
		w.api.ExpireIn(time.Hour) // the first one has ended
		w.api.Mend()
		time.Sleep(time.Minute)
		synctest.Wait()
		serial(t, l)
		assert.Equal(t, 2, files(w), "it is stored again")
	})
}

// What is damaged or may be of another user is not used, with the reason, and the program goes on without it.
func TestDamaged(t *testing.T) {
	t.Parallel()
	bundles, identity := "bundles.json", "identity.pem"
	edit := func(f func(b []byte) []byte) func(t *testing.T, path string) {
		return func(t *testing.T, path string) {
			require.NoError(t, os.WriteFile(path, f(must.Get(os.ReadFile(path))(t)), 0o600))
		}
	}
	all := func(text string) func([]byte) []byte { return func([]byte) []byte { return []byte(text) } }
	for name, test := range map[string]struct {
		file   string
		damage func(t *testing.T, path string)
		want   string
		unix   bool
		root   bool
	}{
		"no bundles":           {bundles, func(t *testing.T, path string) { require.NoError(t, os.Remove(path)) }, "no such file", false, false},
		"empty bundles":        {bundles, edit(all("")), "not a JSON object", false, false},
		"half the bundles":     {bundles, edit(func(b []byte) []byte { return b[:len(b)/2] }), "not JSON", false, false},
		"without the time":     {bundles, edit(all(`{"trust_domains":{}}`)), "svidkit_saved", false, false},
		"the time is a text":   {bundles, edit(all(`{"svidkit_saved":"now","trust_domains":{}}`)), "svidkit_saved", false, false},
		"the time is negative": {bundles, edit(all(`{"svidkit_saved":-1,"trust_domains":{}}`)), "svidkit_saved", false, false},
		"the time is huge":     {bundles, edit(all(`{"svidkit_saved":99999999999999,"trust_domains":{}}`)), "svidkit_saved", false, false},
		"the time twice":       {bundles, edit(func(b []byte) []byte { return append([]byte(`{"svidkit_saved":1,`), b[1:]...) }), "twice", false, false},
		"no bundle of the own": {bundles, edit(func(b []byte) []byte { return bytes.Replace(b, []byte("example.org"), []byte("example.com"), 1) }), "example.org", false, false},
		"a link": {bundles, func(t *testing.T, path string) {
			require.NoError(t, os.Rename(path, path+"2"))
			require.NoError(t, os.Symlink(path+"2", path))
		}, "not a regular file", true, false},
		"bundles for all":        {bundles, func(t *testing.T, path string) { require.NoError(t, os.Chmod(path, 0o666)) }, "not safe from other users", true, false},
		"bundles for the group":  {bundles, func(t *testing.T, path string) { require.NoError(t, os.Chmod(path, 0o620)) }, "written to by others", true, false},
		"of another user":        {bundles, func(t *testing.T, path string) { require.NoError(t, os.Chown(path, 54321, -1)) }, "belongs to user 54321", true, true},
		"a directory of another": {"", func(t *testing.T, path string) { require.NoError(t, os.Chown(path, 54321, -1)) }, "belongs to user 54321", true, true},
		"no identity":            {identity, func(t *testing.T, path string) { require.NoError(t, os.Remove(path)) }, "identity.pem: no such file", false, false},
		"an empty identity":      {identity, edit(all("")), "no certificate found", false, false},
		"half an identity":       {identity, edit(func(b []byte) []byte { return b[:len(b)-100] }), "identity.pem", false, false},
		"an identity for all":    {identity, func(t *testing.T, path string) { require.NoError(t, os.Chmod(path, 0o644)) }, "others may get at the keys", true, false},
		"an identity of another": {identity, func(t *testing.T, path string) { require.NoError(t, os.Chown(path, 54321, -1)) }, "belongs to user 54321", true, true},
		"an identity too large":  {identity, edit(func(b []byte) []byte { return append(b, make([]byte, 1<<20)...) }), "more than 1048576 bytes", false, false},
		"an identity of other CA": {identity, edit(func([]byte) []byte {
			certs, key := must.Get2(spiffetest.NewCA(t, "example.org").SVID("/web").MarshalPEM())(t)
			return append(key, certs...)
		}), "identity.pem", false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if test.unix && runtime.GOOS == "windows" || test.root && os.Geteuid() != 0 {
				t.Skip("owners and modes")
			}
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t)
				_, stop := w.start(t)
				stop()
				path := filepath.Join(w.cfg.Dir, test.file)
				test.damage(t, path)
				w.api.Drop()
				_, err := w.try(t, time.Second)
				must.Fail(t, err, spiffe.ErrNotReady, test.want)
				assert.NotContains(t, err.Error(), "PRIVATE KEY---")
				if strings.HasPrefix(test.want, "belongs") {
					require.ErrorIs(t, err, private.ErrUnsafe)
				}

				// The agent is there: all is well, and stored again.
				w.api.Mend()
				l, stop := w.start(t)
				serial(t, l)
				if name == "a directory of another" {
					assert.ErrorIs(t, statusOf(l).Err, private.ErrUnsafe)
					assert.Contains(t, w.log.String(), "was not stored")
					return
				}
				assert.NoError(t, statusOf(l).Err)
				stop()
				w.api.Drop()
				l, _ = w.start(t)
				serial(t, l)
			})
		})
	}
}

// Keys are stored only when asked for, and for this user alone.
func TestIdentityOnlyWhenAsked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t)
		_, stop := w.start(t)
		stop()
		path := filepath.Join(w.cfg.Dir, "identity.pem")
		for _, path := range []string{path, filepath.Join(w.cfg.Dir, "bundles.json")} {
			info := must.Get(os.Stat(path))(t)
			if runtime.GOOS != "windows" {
				assert.Equal(t, fs.FileMode(0o600), info.Mode())
			}
		}
		w.cfg.Identity = false
		w.api.Drop()
		require.ErrorIs(t, must.Err(w.try(t, time.Second)), spiffe.ErrNotReady)
		assert.NoFileExists(t, path, "one from before is deleted")
		w.api.Mend()
		l, stop := w.start(t)
		serial(t, l)
		w.api.Rotate()
		synctest.Wait()
		stop()
		entries := must.Get(os.ReadDir(w.cfg.Dir))(t)
		require.Len(t, entries, 1)
		assert.NotContains(t, string(must.Get(os.ReadFile(filepath.Join(w.cfg.Dir, entries[0].Name())))(t)), "PRIVATE")
	})
}

// A program that only verifies is ready with bundles.
func TestBundlesOnly(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t)
		w.cfg.Identity, w.cfg.BundlesOnly = false, true
		_, stop := w.start(t)
		stop()
		w.api.Drop()
		l, _ := w.start(t)
		assert.True(t, statusOf(l).InUse)
		b := must.Get(l.Bundle(td))(t)
		assert.True(t, sameRoots(b, w.ca.Bundle()))
		require.ErrorIs(t, must.Err(l.SVID()), spiffe.ErrNotReady)
		w.ca.Rotate()
		w.api.Mend()
		time.Sleep(time.Minute)
		synctest.Wait()
		assert.False(t, statusOf(l).InUse)
		b = must.Get(l.Bundle(td))(t)
		assert.True(t, sameRoots(b, w.ca.Bundle()))
		assert.Equal(t, 1, l.Bundles().Len())
	})
}

func TestLastGoodConfig(t *testing.T) {
	t.Parallel()
	live := must.Get(workloadapi.New(workloadapi.Config{Address: "unix:///none"}))(t)
	good := source.LastGoodConfig{Source: live, Dir: "dir", MaxAge: time.Hour}
	for text, edit := range map[string]func(*source.LastGoodConfig){
		"Source is required":               func(c *source.LastGoodConfig) { c.Source = nil },
		"Dir is required":                  func(c *source.LastGoodConfig) { c.Dir = "" },
		"MaxAge is required":               func(c *source.LastGoodConfig) { c.MaxAge = 0 },
		"Identity and BundlesOnly are bot": func(c *source.LastGoodConfig) { c.Identity, c.BundlesOnly = true, true },
		"has no method Bundles":            func(c *source.LastGoodConfig) { c.Source, c.BundlesOnly = &flip{}, true },
	} {
		cfg := good
		edit(&cfg)
		require.ErrorContains(t, must.Err(source.NewLastGood(cfg)), text)
	}
	l := must.Get(source.NewLastGood(good))(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	must.Fail(t, l.Ready(ctx), spiffe.ErrNotReady, "neither called Start nor Run")
	assert.NoDirExists(t, "dir", "New does nothing")
	require.NoError(t, l.Close())
	require.ErrorContains(t, l.Ready(t.Context()), "closed")

	// A source that was started already is a mistake of the program, which is told.
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t)
		w.cfg.Source = must.Get(workloadapi.Start(t.Context(), w.api.Config()))(t)
		l := must.Get(source.NewLastGood(w.cfg))(t)
		require.ErrorContains(t, l.Run(t.Context()), "alternatives")
		require.NoError(t, l.Close())
	})
}

// flip is a live source that a test switches.
var errAway = errors.New("the agent is away")

type flip struct {
	life lifecycle.Life
	*spiffetest.Source
}

func (f *flip) Run(ctx context.Context) error {
	return f.life.Run(ctx, func(ctx context.Context) error { <-ctx.Done(); return nil })
}
func (f *flip) Close() error { return f.life.Close() }
func (f *flip) Ready(ctx context.Context) error {
	return f.life.Await(ctx, f.Changed, func() bool { _, err := f.Snapshot(); return err == nil })
}

// From what is stored to the live source, and through its renewals, no reader ever misses anything, in real time.
func TestTakeover(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	cfg := source.LastGoodConfig{Dir: filepath.Join(t.TempDir(), "store"), MaxAge: time.Hour, Identity: true}
	away := errors.New("the agent is away")
	for round := range rounds.Of(2) {
		live := &flip{Source: ca.Source("/web")}
		if round > 0 {
			live.Fail(away)
		}
		cfg.Source = live
		l := must.Get(source.StartLastGood(t.Context(), cfg))(t)
		stop := make(chan struct{})
		var readers sync.WaitGroup
		for range 2 {
			readers.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					snap, err := l.Snapshot()
					if !assert.NoError(t, err) {
						return
					}
					if _, err := snap.Bundle(td); !assert.NoError(t, err) {
						return
					}
					if _, err := l.Bundle(td); !assert.NoError(t, err) {
						return
					}
					runtime.Gosched()
				}
			})
		}
		time.Sleep(5 * time.Millisecond)
		live.Fail(nil)
		for range rounds.Of(8) {
			live.Renew(func(c *x509.Certificate) { c.NotAfter = c.NotAfter.Add(time.Minute) })
			time.Sleep(time.Millisecond)
		}
		want := serial(t, live)
		assert.Equal(t, want, serial(t, l))
		require.Eventually(t, func() bool {
			b, err := os.ReadFile(filepath.Join(cfg.Dir, "identity.pem"))
			if err != nil {
				return false
			}
			svid, err := spiffe.ParseSVIDPEM(b, b)
			return err == nil && svid.Leaf().SerialNumber.String() == want
		}, time.Minute, 5*time.Millisecond, "the last one is stored")
		close(stop)
		readers.Wait()
		live.Fail(away) // what was stored is not looked at again
		require.ErrorIs(t, must.Err(l.Snapshot()), away)
		require.ErrorIs(t, must.Err(l.Bundle(td)), away)
		require.NoError(t, l.Close())
	}
}

// FuzzStored gives a LastGood files. Whatever is in them, it starts, hands out nothing that does not verify, and takes
// what the live source has.
func FuzzStored(f *testing.F) {
	ca := spiffetest.NewCA(f, "example.org")
	certs, key := must.Get2(ca.SVID("/web").MarshalPEM())(f)
	doc := must.Get(ca.Bundles().Marshal())(f)
	src := ca.Source("/web")
	f.Add(append(fmt.Appendf(nil, `{"svidkit_saved":%d,`, time.Now().Unix()), doc[1:]...), append(key, certs...))
	f.Add([]byte(`{"svidkit_saved":4102444800,"trust_domains":{}}`), certs)
	f.Add([]byte(`{"trust_domains":{"example.org":{"keys":[]}},"svidkit_saved":1e9}`), key)
	f.Add([]byte(nil), []byte(nil))
	f.Fuzz(func(t *testing.T, bundles, identity []byte) {
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, "bundles.json"), bundles, 0o600))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "identity.pem"), identity, 0o600))
		live := &flip{Source: src}
		live.Fail(errors.New("away"))
		l, err := source.NewLastGood(source.LastGoodConfig{Source: live, Dir: dir, MaxAge: 100 * 365 * 24 * time.Hour, Identity: true})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.NoError(t, l.Run(ctx)) // it loads first
		if snap, err := l.Snapshot(); err == nil {
			svid := must.Get(snap.SVID())(t)
			v := must.Get(spiffe.NewVerifier(snap, spiffe.AllowIDs(svid.ID()), nil))(t)
			must.Get(v.VerifyChain(svid.Chain(), spiffe.AnyRole))(t)
		} else {
			require.Error(t, statusOf(l).Refused)
		}
		live.Fail(nil)
		require.Equal(t, serial(t, live), serial(t, l))
	})
}
