package filesink_test

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe/filesink"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// A token that lies there is taken over if it is what the sink itself would have written, and nothing else: for this audience
// and no other, for a while yet.
func TestWhichTokensStay(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := base64.RawURLEncoding.EncodeToString
		token := func(audience string, left time.Duration) string {
			return b([]byte(`{"alg":"ES256"}`)) + "." + b(fmt.Appendf(nil, `{"sub":"spiffe://example.org/web","aud":%s,"exp":%d}`, audience, time.Now().Add(left).Unix())) + ".c2ln"
		}
		away := tokenSource(func(context.Context, ...string) (string, error) { return "", errors.New("away") })
		for name, c := range map[string]struct {
			text  string
			stays bool
		}{
			"good":                  {token(`["db"]`, time.Hour), true},
			"its audience as text":  {token(`"db"`, time.Hour), true},
			"for a second":          {token(`["db"]`, time.Second), true},
			"ends now":              {token(`["db"]`, 0), false},
			"for another, too":      {token(`["db", "bank"]`, time.Hour), false},
			"for another first":     {token(`["bank", "db"]`, time.Hour), false},
			"for another":           {token(`["bank"]`, time.Hour), false},
			"for a longer name":     {token(`["db2"]`, time.Hour), false},
			"for none":              {token(`[]`, time.Hour), false},
			"torn":                  {token(`["db"]`, time.Hour)[:30], false},
			"something else":        {"a text", false},
			"nothing":               {"", false},
			"without an audience":   {b([]byte(`{"alg":"ES256"}`)) + "." + b(fmt.Appendf(nil, `{"sub":"spiffe://example.org/web","exp":%d}`, time.Now().Add(time.Hour).Unix())) + ".c2ln", false},
			"without an expiration": {b([]byte(`{"alg":"ES256"}`)) + "." + b([]byte(`{"sub":"spiffe://example.org/web","aud":"db"}`)) + ".c2ln", false},
		} {
			src, dir := spiffetest.NewCA(t, "example.org").Source("/web"), t.TempDir()
			// The files of an earlier process, of which one is another now.
			cfg := filesink.Config{Source: src, Dir: dir, Tokens: map[string]string{"db.token": "db"}, TokenSource: issue(time.Hour)}
			s := must.Get(filesink.Start(t.Context(), cfg))(t)
			require.NoError(t, s.Close())
			path := filepath.Join(dir, "db.token")
			require.NoError(t, os.WriteFile(must.Get(filepath.EvalSymlinks(path))(t), []byte(c.text), 0o600))

			src.Renew()
			cfg.TokenSource = away
			s = must.Get(filesink.Start(t.Context(), cfg))(t, name)
			data, err := os.ReadFile(path)
			if c.stays {
				if assert.NoError(t, err, name) {
					assert.Equal(t, c.text, string(data), name)
				}
			} else {
				assert.ErrorIs(t, err, os.ErrNotExist, name)
			}
			require.NoError(t, s.Close())
		}
	})
}

// A failure is forgotten with the next success: the report, and the waits, which begin anew.
func TestTokensRecover(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		down := errors.New("away")
		var asked []time.Time
		fresh := issue(10 * time.Minute)
		var d diary
		s := start(t, filesink.Config{
			Logger: d.logger(), Source: spiffetest.NewCA(t, "example.org").Source("/web"), Dir: t.TempDir(), Tokens: map[string]string{"db.token": "db"},
			TokenSource: tokenSource(func(ctx context.Context, audience ...string) (string, error) {
				mu.Lock()
				defer mu.Unlock()
				asked = append(asked, time.Now())
				if down != nil {
					return "", down
				}
				return fresh(ctx, audience...)
			}),
		})
		again := func() (waits []time.Duration) { // of an outage of half an hour, after the last success
			set := func(err error) {
				mu.Lock()
				defer mu.Unlock()
				down = err
			}
			synctest.Wait()
			mu.Lock()
			asked = asked[:0]
			mu.Unlock()
			set(errors.New("away"))
			time.Sleep(30 * time.Minute)
			synctest.Wait()
			require.ErrorContains(t, s.Report().Upstreams[1].Err, "away")
			mu.Lock()
			for i, at := range asked[1:] {
				waits = append(waits, at.Sub(asked[i]))
			}
			mu.Unlock()
			set(nil)
			time.Sleep(time.Minute)
			synctest.Wait()
			require.NoError(t, s.Report().Upstreams[1].Err)
			return waits
		}
		again() // that of the start
		for n := range 4 {
			waits := again()
			require.Greater(t, len(waits), 10)
			assert.LessOrEqual(t, waits[0], 2100*time.Millisecond, "as short as ever")
			assert.Equal(t, n+2, d.count("filesink: not all JWT-SVIDs could be fetched"), "each outage is told once")
		}
	})
}

// A sink that runs again has the tokens that it had, whatever lies in the folder.
func TestTokensOfAnEarlierRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src, dir := spiffetest.NewCA(t, "example.org").Source("/web"), t.TempDir()
		var down atomic.Bool
		fresh := issue(10 * time.Hour)
		s := must.Get(filesink.New(filesink.Config{
			Source: src, Dir: dir, Tokens: map[string]string{"db.token": "db"},
			TokenSource: tokenSource(func(ctx context.Context, audience ...string) (string, error) {
				if down.Load() {
					return "", errors.New("away")
				}
				return fresh(ctx, audience...)
			}),
		}))(t)
		run := func(f func()) {
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- s.Run(ctx) }()
			synctest.Wait()
			f()
			cancel()
			require.NoError(t, <-done)
		}
		path := filepath.Join(dir, "db.token")
		read := func() string {
			return string(must.Get(os.ReadFile(path))(t))
		}
		var own string
		run(func() { own = read() })
		real := must.Get(filepath.EvalSymlinks(path))(t)
		time.Sleep(time.Second)
		other := tokenFor(time.Now().Add(20*time.Hour), `"db"`)
		require.NotEqual(t, own, other)
		require.NoError(t, os.WriteFile(real, []byte(other), 0o600))
		down.Store(true)
		run(func() {
			src.Renew()
			synctest.Wait()
			assert.Equal(t, own, read())
		})
	})
}
