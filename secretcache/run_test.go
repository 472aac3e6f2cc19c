package secretcache_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// TestRun shows that Run is alone, comes back with the cause, and can be called again; the bubble
// fails if anything of it stays.
func TestRun(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := poll(spiffetest.NewCA(t, "example.org"))
		m := newManager(t, secretcache.Config{CA: ca})
		first, stop := ready(t, m)
		stop()
		_, stop = ready(t, m)
		assert.EqualValues(t, 2, ca.fetched.Load(), "each Run fetches the bundles first")
		assert.EqualValues(t, 1, ca.signed.Load())
		assert.ErrorContains(t, m.Run(t.Context()), "secretcache: run: it is already running")
		stop()

		var heard told
		m.Subscribe(heard.add)
		time.Sleep(40 * time.Minute)
		assert.Same(t, first, current(t, m), "Run does not run")
		assert.Empty(t, heard.take())
		second, stop := ready(t, m)
		assert.NotSame(t, first, second, "what is due is done at once")
		heard.take()
		time.Sleep(20 * time.Minute)
		stop()
		time.Sleep(100 * time.Hour)
		assert.Empty(t, heard.take())

		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(errStop)
		assert.NoError(t, m.Run(ctx))
		assert.EqualValues(t, 2, ca.signed.Load())
	})
}

// TestShutdown ends Run while attempts are under way and callers wait.
func TestShutdown(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		m := newManager(t, secretcache.Config{CA: ca})
		var calls atomic.Int64
		m.Subscribe(func(string) {
			time.Sleep(10 * time.Second)
			calls.Add(1)
		})
		for i := range 50 {
			require.NoError(t, m.Add(spiffe.MustParseID(fmt.Sprintf("spiffe://example.org/w/%d", i))))
		}
		stop := start(t, m)
		synctest.Wait()
		ca.Delay(time.Minute)
		time.Sleep(5 * time.Second)
		var wg sync.WaitGroup
		for i := range 10 {
			wg.Go(func() {
				_, err := m.GenerateSecret(t.Context(), fmt.Sprintf("spiffe://example.org/w/%d", i))
				assert.ErrorIs(t, err, errStop)
				assert.ErrorIs(t, err, spiffe.ErrNotReady)
			})
		}
		synctest.Wait()
		before := time.Now()
		stop()
		assert.Less(t, time.Since(before), 1000*time.Second, "it waits for what is being told, and for no CA")
		wg.Wait()
		n := calls.Load()
		time.Sleep(time.Hour)
		assert.Equal(t, n, calls.Load(), "nothing is told after Run has returned")
		for _, s := range m.Status() {
			assert.Zero(t, s.Failures, "the end of Run is not a failure")
			assert.NoError(t, s.Err)
		}

		ca.Delay(0)
		ready(t, m)
		time.Sleep(time.Hour)
		for _, s := range m.Status()[2:] {
			assert.False(t, s.NotAfter.IsZero(), s.ID)
		}
	})
}

// TestUrgent shows that an identity that a caller waits for goes first.
func TestUrgent(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		m := newManager(t, secretcache.Config{CA: ca})
		ready(t, m)
		ca.Delay(time.Second)
		for i := range 100 {
			require.NoError(t, m.Add(spiffe.MustParseID(fmt.Sprintf("spiffe://example.org/w/%d", i))))
		}
		synctest.Wait()
		begin := time.Now()
		for _, name := range []string{"spiffe://example.org/w/50", "spiffe://example.org/w/99"} {
			must.Get(m.GenerateSecret(t.Context(), name))(t)
		}
		assert.LessOrEqual(t, time.Since(begin), 4*time.Second)
	})
}

// TestRemoveWhileBusy removes an identity while it is being obtained and waited for.
func TestRemoveWhileBusy(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		m := newManager(t, secretcache.Config{CA: ca})
		ready(t, m)
		ca.Delay(10 * time.Second)
		require.NoError(t, m.Add(worker))
		ended := make(chan error, 1)
		begin := time.Now()
		go func() {
			_, err := m.GenerateSecret(t.Context(), worker.String())
			ended <- err
		}()
		synctest.Wait()
		m.Remove(worker)
		assert.ErrorIs(t, <-ended, fs.ErrNotExist)
		assert.Zero(t, time.Since(begin))

		require.NoError(t, m.Add(worker), "it may come back")
		require.NoError(t, must.Err(m.GenerateSecret(t.Context(), worker.String())))
		assert.Equal(t, 2, ca.Signed(), "the attempt for the one that was removed ended")
		m.Remove(web)
		assert.NoError(t, must.Err(m.GenerateSecret(t.Context(), web.String())), "the default identity stays")
	})
}

func TestAddRefuses(t *testing.T) {
	t.Parallel()
	m := newManager(t, secretcache.Config{CA: spiffetest.NewCA(t, "example.org")})
	assert.ErrorIs(t, m.Add(spiffe.ID{}), spiffe.ErrZero)
	assert.ErrorContains(t, m.Add(domain.ID()), "names a trust domain")
	assert.ErrorContains(t, m.Add(spiffe.MustParseID("spiffe://other.test/web")), "not in the trust domain")
	assert.NoError(t, m.Add(web), "it is there already")
	assert.Len(t, m.Status(), 2)
}

func TestStatus(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		m := newManager(t, secretcache.Config{CA: ca, ID: worker, Jitter: 1e-9})
		require.NoError(t, m.Add(web))
		for _, s := range m.Status() {
			assert.Zero(t, s.NotBefore)
			assert.Zero(t, s.NotAfter)
			assert.Zero(t, s.LastSuccess)
			assert.Equal(t, time.Now().UTC(), s.NextAttempt.UTC())
		}
		began := time.Now()
		start(t, m)
		synctest.Wait()
		all := m.Status()
		require.Len(t, all, 3)
		assert.Equal(t, []spiffe.ID{worker, domain.ID(), web}, []spiffe.ID{all[0].ID, all[1].ID, all[2].ID})
		for _, i := range []int{0, 2} {
			assert.Equal(t, time.Hour, time.Until(all[i].NotAfter))
			assert.Equal(t, time.Hour, all[i].NotAfter.Sub(all[i].NotBefore))
			assert.InDelta(t, 30*time.Minute, time.Until(all[i].NextAttempt), float64(time.Minute))
		}
		assert.Zero(t, all[1].NotBefore)
		assert.Zero(t, all[1].NotAfter)
		for _, s := range all {
			assert.True(t, began.Equal(s.LastSuccess), "%v", s.LastSuccess)
		}

		ca.FailNext(1<<30, errDown)
		ca.Delay(10 * time.Second)
		time.Sleep(30*time.Minute + time.Second)
		assert.Zero(t, status(t, m, worker).NextAttempt, "under way")
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		s := status(t, m, worker)
		assert.ErrorIs(t, s.Err, errDown)
		assert.Greater(t, s.Failures, 5)
		assert.True(t, began.Equal(s.LastSuccess), "%v", s.LastSuccess)
		ca.FailNext(0, nil)
		time.Sleep(10 * time.Minute)
		assert.True(t, status(t, m, worker).LastSuccess.After(began))
		assert.True(t, began.Equal(m.Status()[1].LastSuccess), "the CA tells of new bundles by itself")
		ca.Rotate()
		time.Sleep(time.Minute)
		assert.True(t, m.Status()[1].LastSuccess.After(began))
	})
}

// updates yields the current snapshot of m, and each newer one until ctx is done.
func updates(ctx context.Context, m *secretcache.Manager) iter.Seq[*spiffe.Snapshot] {
	return renew.Follow(ctx, m.Changed, func() *spiffe.Snapshot { snap, _ := m.Snapshot(); return snap })
}

// TestLog shows the levels and the attributes, and that no key is among them.
func TestLog(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var buf bytes.Buffer
		logger := slog.New(slog.NewTextHandler(lockedWriter{&mu, &buf}, &slog.HandlerOptions{Level: slog.LevelDebug}))
		ca := spiffetest.NewCA(t, "example.org")
		m := newManager(t, secretcache.Config{CA: ca, Logger: logger})
		take := func() string {
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			defer buf.Reset()
			return buf.String()
		}
		first, _ := ready(t, m)
		text := take()
		assert.Contains(t, text, `level=DEBUG msg="secretcache: attempt" id=spiffe://example.org/web`)
		assert.Contains(t, text, `level=INFO msg="secretcache: new trust bundle" trust_domain=example.org authorities=1 sequence=1`)
		assert.Contains(t, text, `level=INFO msg="secretcache: new certificate" id=spiffe://example.org/web not_after=2000-01-01T01:00:00.000Z renew_in=29m`)
		assert.NotContains(t, text, "level=WARN")

		ca.FailNext(1, errDown)
		time.Sleep(31 * time.Minute)
		assert.Regexp(t, `level=WARN msg="secretcache: attempt failed" id=spiffe://example.org/web attempt=1 err="sign: the CA is down" retry_in=1\.\d+s`, take())

		logger.Info("secretcache itself", "manager", m, "status", m.Status())
		fmt.Fprintf(lockedWriter{&mu, &buf}, "%v %+v %#v %s", m, m, m, m)
		text = take()
		assert.Equal(t, 5, strings.Count(text, "secretcache.Manager(spiffe://example.org/web)"), text)
		_, key, err := first.MarshalPEM()
		require.NoError(t, err)
		assert.NotContains(t, text, string(key[40:80]))
	})
}

type lockedWriter struct {
	mu *sync.Mutex
	w  *bytes.Buffer
}

func (l lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

// TestEmptyBundleIsLoud shows the warning that every identity is revoked.
func TestEmptyBundleIsLoud(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var buf bytes.Buffer
		p := poll(spiffetest.NewCA(t, "example.org"))
		p.bundles.Store(set(t, bundle(t, spiffe.BundleContents{})))
		m := newManager(t, secretcache.Config{CA: p, Logger: slog.New(slog.NewTextHandler(lockedWriter{&mu, &buf}, nil))})
		stop := start(t, m)
		synctest.Wait()
		stop()
		assert.Contains(t, buf.String(), `level=WARN msg="secretcache: the trust bundle is empty: every identity of the trust domain is revoked" trust_domain=example.org authorities=0`)
		assert.ErrorIs(t, must.Err(m.SVID()), spiffe.ErrNotReady)
	})
}

// TestBothAtOnce starts Run while an attempt of a caller is under way, which is then Run's too.
func TestBothAtOnce(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		ca.Delay(time.Second)
		m := newManager(t, secretcache.Config{CA: ca})
		ended := make(chan error, 1)
		go func() {
			_, err := m.GenerateSecret(t.Context(), "default")
			ended <- err
		}()
		time.Sleep(1500 * time.Millisecond) // the bundles are there, the certificate is not
		stop := start(t, m)
		assert.NoError(t, <-ended)
		time.Sleep(10 * time.Minute)
		assert.Equal(t, 1, ca.Signed())
		stop()
	})
}

// TestCanceledCA shows that an error of the CA when Run ends is not a failure, whatever it says.
func TestCanceledCA(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		m := newManager(t, secretcache.Config{CA: ca, Jitter: 1e-9})
		first, stop := ready(t, m)
		ca.Delay(time.Hour)
		time.Sleep(30*time.Minute + time.Second)
		stop()
		s := status(t, m, web)
		assert.NoError(t, s.Err)
		assert.False(t, errors.Is(s.Err, errStop))
		assert.Same(t, first, current(t, m))
	})
}

// deaf is a CA that does not listen to its context.
type deaf struct{ *spiffetest.CA }

func (d deaf) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	return d.CA.Sign(context.WithoutCancel(ctx), csr, lifetime)
}

// TestRemovedMeanwhile shows that an answer for an identity that is gone is dropped.
func TestRemovedMeanwhile(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		m := newManager(t, secretcache.Config{CA: deaf{ca}})
		ready(t, m)
		ca.Delay(10 * time.Second)
		require.NoError(t, m.Add(worker))
		synctest.Wait()
		m.Remove(worker)
		var heard told
		m.Subscribe(heard.add)
		time.Sleep(time.Minute)
		assert.Equal(t, 2, ca.Signed())
		assert.Empty(t, heard.take())
		assert.Len(t, m.Status(), 2)
	})
}

// TestLateAnswer shows that an answer that comes when Run has been told to end is not lost.
func TestLateAnswer(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		m := newManager(t, secretcache.Config{CA: deaf{ca}})
		first, stop := ready(t, m)
		var heard told
		m.Subscribe(heard.add)
		for ca.Delay(10 * time.Second); !status(t, m, web).NextAttempt.IsZero(); synctest.Wait() {
			time.Sleep(time.Second)
		}
		stop()
		assert.NotSame(t, first, current(t, m))
		assert.Equal(t, []string{"default", web.String()}, heard.take(), "and was told before Run returned")
	})
}

// TestWriteMetrics follows a Manager from before its start, over an outage, to the end of its certificate.
func TestWriteMetrics(t *testing.T) {
	rounds.NotShort(t)
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		web, db := spiffe.MustParseID("spiffe://example.org/web"), spiffe.MustParseID("spiffe://example.org/db")
		m := newManager(t, secretcache.Config{CA: ca, GraceRatio: 0.1})
		require.NoError(t, m.Add(db))
		read := func() map[string]float64 { return must.Get(metricstest.Of(m.Report().Metrics))(t).Samples }
		s := read()
		assert.Equal(t, 2., s[`svidkit_secretcache_identities{state="missing"}`])
		assert.NotContains(t, s, `svidkit_secretcache_bundles_confirmed_timestamp_seconds`)
		assert.NotContains(t, s, `svidkit_secretcache_identity_end_timestamp_seconds{identity="spiffe://example.org/web"}`)

		began := time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- m.Run(ctx) }()
		synctest.Wait()
		svid := must.Get(m.SVID())(t)
		s = read()
		assert.Equal(t, 2., s[`svidkit_secretcache_identities{state="valid"}`])
		assert.EqualValues(t, svid.NotAfter().Unix(), s[`svidkit_secretcache_identity_end_timestamp_seconds{identity="spiffe://example.org/web"}`])
		assert.Contains(t, s, `svidkit_secretcache_identity_end_timestamp_seconds{identity="spiffe://example.org/db"}`)
		assert.Equal(t, 2., s[`svidkit_secretcache_attempts_total{kind="certificate",outcome="good"}`])
		assert.Equal(t, 1., s[`svidkit_secretcache_attempts_total{kind="bundles",outcome="good"}`])
		assert.EqualValues(t, began.Unix(), s[`svidkit_secretcache_bundles_confirmed_timestamp_seconds`])
		assert.Equal(t, 1., s[`svidkit_secretcache_bundles_watched`], "the CA has a watch")

		const of = `_timestamp_seconds{identity="spiffe://example.org/web"}`
		assert.EqualValues(t, svid.Leaf().NotBefore.Unix(), s[`svidkit_secretcache_identity_start`+of])
		next := s[`svidkit_secretcache_identity_attempt`+of]
		assert.Greater(t, next, float64(began.Unix()))
		assert.Less(t, next, float64(svid.NotAfter().Unix()))
		assert.NotContains(t, s, `svidkit_secretcache_identity_failing`+of)

		ca.FailNext(-1, errors.New("down"))
		time.Sleep(61 * time.Minute)
		s = read()
		assert.InDelta(t, next, s[`svidkit_secretcache_identity_failing`+of], 1, "it fails since the attempt that was due")
		assert.Greater(t, s[`svidkit_secretcache_identity_attempt`+of], float64(time.Now().Unix()))
		assert.Equal(t, 2., s[`svidkit_secretcache_identities{state="expired"}`])
		assert.Zero(t, s[`svidkit_secretcache_identities{state="valid"}`])
		assert.Positive(t, s[`svidkit_secretcache_identity_failures{identity="spiffe://example.org/web"}`])
		assert.Greater(t, s[`svidkit_secretcache_attempts_total{kind="certificate",outcome="failed"}`], 10.)

		ca.FailNext(0, nil)
		time.Sleep(time.Hour)
		assert.NotContains(t, read(), `svidkit_secretcache_identity_failing`+of)
		cancel()
		require.NoError(t, <-done)

		// What is cut short is no failure.
		ca.Delay(time.Hour)
		m = must.Get(secretcache.New(secretcache.Config{ID: web, CA: ca}))(t)
		ctx, cancel = context.WithCancel(t.Context())
		go func() { done <- m.Run(ctx) }()
		time.Sleep(time.Second)
		cancel()
		require.NoError(t, <-done)
		for key, v := range read() {
			assert.False(t, strings.HasPrefix(key, "svidkit_secretcache_attempts_total") && v != 0, key)
		}
	})
}

// TestWriteMetricsBounded: the samples of a Manager with very many identities are bounded, the sums are not.
func TestWriteMetricsBounded(t *testing.T) {
	t.Parallel()
	td := spiffe.MustParseTrustDomain("example.org")
	m, err := secretcache.New(secretcache.Config{Expect: pki.ExpectDNSName(td, "web.test"), CA: spiffetest.NewCA(t, "example.org")})
	require.NoError(t, err)
	for i := range 1500 {
		require.NoError(t, m.Add(spiffe.MustParseID(fmt.Sprintf("spiffe://example.org/w%04d", i))))
	}
	text := must.Get(metricstest.Of(m.Report().Metrics))(t)
	assert.Equal(t, 1501., text.Samples[`svidkit_secretcache_identities{state="missing"}`])
	assert.Contains(t, text.Samples, `svidkit_secretcache_identity_failures{identity="spiffe://example.org/w0998"}`)
	assert.NotContains(t, text.Samples, `svidkit_secretcache_identity_failures{identity="spiffe://example.org/w0999"}`)
	assert.Less(t, len(text.Samples), 2020)
}
