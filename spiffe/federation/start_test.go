package federation_test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// mute gives no answer, also not to a client that has just left.
func mute(_ http.ResponseWriter, r *http.Request) {
	<-r.Context().Done()
	panic(http.ErrAbortHandler)
}

// TestReadySays: each bundle that is missing is named with the reason.
func TestReadySays(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.host(t, "slow.test", webCert(w.ca, "slow.test"), mute)
		w.host(t, "broken.test", webCert(w.ca, "broken.test"), answer(http.StatusNotFound, nil))
		for _, name := range []string{"slow.test", "broken.test"} {
			w.cfg.Relationships = append(w.cfg.Relationships, federation.Relationship{
				TrustDomain: spiffe.MustParseTrustDomain(name), URL: "https://" + name + "/bundle", Profile: webRoots(w.ca),
			})
		}
		const slow, broken = `no bundle of "slow.test": its endpoint has not answered yet`, `no bundle of "broken.test": federation: bundle of "broken.test" from https://broken.test/bundle: `
		check := func(err error) {
			t.Helper()
			require.ErrorIs(t, err, spiffe.ErrNotReady)
			require.ErrorIs(t, err, errOver)
			require.ErrorContains(t, err, slow)
			require.ErrorContains(t, err, broken)
			require.NotContains(t, err.Error(), partner.String())
			require.NotErrorIs(t, err, lifecycle.ErrNotStarted)
			requireCode(t, err, badStatus)
		}
		ctx, cancel := context.WithTimeoutCause(t.Context(), 5*time.Second, errOver)
		defer cancel()
		begun := time.Now()
		m, err := federation.Start(ctx, w.cfg)
		check(err)
		assert.Nil(t, m)
		assert.Equal(t, 5*time.Second, time.Since(begun))

		// By hand, with one context for both.
		m = newManager(t, w.cfg)
		ctx, cancel = context.WithTimeoutCause(t.Context(), 5*time.Second, errOver)
		defer cancel()
		ended := make(chan error, 1)
		go func() { ended <- m.Run(ctx) }()
		check(m.Ready(ctx))
		require.NoError(t, <-ended)

		// The relationship that is ended is not waited for.
		m = newManager(t, w.cfg)
		running(t, m)
		ready := make(chan error, 1)
		go func() { ready <- m.Ready(t.Context()) }()
		time.Sleep(5 * time.Second)
		assert.Empty(t, ready)
		require.NoError(t, m.Remove(spiffe.MustParseTrustDomain("slow.test")))
		synctest.Wait()
		assert.Empty(t, ready)
		require.NoError(t, m.Remove(spiffe.MustParseTrustDomain("broken.test")))
		require.NoError(t, <-ready)
	})
}

func TestReadySaysNeverStarted(t *testing.T) {
	t.Parallel()
	cfg := federation.Config{}
	for i := range 12 {
		cfg.Relationships = append(cfg.Relationships, federation.Relationship{
			TrustDomain: spiffe.MustParseTrustDomain(fmt.Sprintf("d%02d.test", i)), URL: "https://nowhere.test", Profile: federation.Web{},
		})
	}
	m := newManager(t, cfg)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	err := m.Ready(ctx)
	require.ErrorIs(t, err, spiffe.ErrNotReady)
	require.ErrorIs(t, err, lifecycle.ErrNotStarted)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, `no bundle of "d09.test"`)
	require.ErrorContains(t, err, "; and 2 more; waited for it")
	require.NoError(t, m.Close())
	require.ErrorIs(t, m.Ready(t.Context()), lifecycle.ErrClosed)
	require.ErrorIs(t, m.Run(t.Context()), lifecycle.ErrClosed)

	m = must.Get(federation.Start(t.Context(), federation.Config{}))(t, "there is nothing to wait for")
	require.NoError(t, m.Close())
}

// TestStart: the context bounds the start and nothing after it; Close ends what is under way.
func TestStart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		m := must.Get(federation.Start(ctx, w.cfg))(t)
		require.ErrorIs(t, m.Run(t.Context()), lifecycle.ErrRunning)
		assert.True(t, trusts(t, m, w.ca))
		w.dialled()
		time.Sleep(time.Hour)
		assert.NotEmpty(t, w.dialled(), "it fetches on")
		w.site.serve(mute)
		time.Sleep(6 * time.Minute)
		require.NoError(t, m.Close())
		w.dialled()
		require.NoError(t, m.Close())
		time.Sleep(time.Hour)
		assert.Empty(t, w.dialled())
		assert.True(t, trusts(t, m, w.ca), "what was fetched stays")
		require.NoError(t, m.Ready(t.Context()))
	})
}

// TestStartOfBadDir: Run fails, and Start does not wait for what will not come.
func TestStartOfBadDir(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	ca := spiffetest.NewCA(t, "partner.test")
	_, err := federation.Start(t.Context(), federation.Config{Dir: file, Relationships: []federation.Relationship{
		{TrustDomain: ca.TrustDomain(), URL: "https://nowhere.test", Profile: federation.Web{}},
	}})
	require.ErrorIs(t, err, spiffe.ErrNotReady)
	require.ErrorContains(t, err, "Config.Dir: ")
}
