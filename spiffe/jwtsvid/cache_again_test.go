package jwtsvid_test

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// handmade is a source of tokens whose claims a test writes.
type handmade struct {
	mu    sync.Mutex
	asked map[string]int // by the first audience
	spoil bool           // what it was given
	claim func(audience []string) string
}

func (h *handmade) Fetch(_ context.Context, audience ...string) (string, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.asked == nil {
		h.asked = map[string]int{}
	}
	h.asked[audience[0]]++
	b := base64.RawURLEncoding.EncodeToString
	token := b([]byte(`{"alg":"ES256","typ":"JWT"}`)) + "." + b([]byte(h.claim(audience))) + "." + b(make([]byte, 64))
	if h.spoil {
		for i := range audience {
			audience[i] = "spoilt"
		}
	}
	return token, nil
}

func (h *handmade) count(audience string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.asked[audience]
}

// claims are those of a token for audiences, in JSON, that ends after a while.
func claims(audience string, left time.Duration) string {
	return fmt.Sprintf(`{"sub":"spiffe://example.org/web","aud":%s,"exp":%d}`, audience, time.Now().Add(left).Unix())
}

// A token that is dropped for another one is renewed no more, and the one that was asked for last is kept.
func TestCacheDropsForGood(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		source := &handmade{claim: func(audience []string) string { return claims(fmt.Sprintf("%q", audience[0]), 5*time.Minute) }}
		c := must.Get(jwtsvid.NewCache(source, nil))(t)
		start(t, c)
		get := func(audience string) {
			t.Helper()
			must.Get(c.Fetch(t.Context(), audience))(t)
			time.Sleep(2 * time.Second) // so that which was last is certain
		}
		get("a")
		get("b")
		get("a")
		get("a")
		require.Equal(t, 1, source.count("a"))
		fill := func() {
			for i := range 998 { // with a and another, there are a thousand
				must.Get(c.Fetch(t.Context(), fmt.Sprint(i)))(t)
			}
			time.Sleep(2 * time.Second)
		}
		fill()
		get("b")
		require.Equal(t, 1, source.count("b"), "there is room for all")
		get("a")
		fill()
		get("c") // instead of b
		get("a")
		require.Equal(t, 1, source.count("a"), "it is still there")
		fill()
		get("d") // instead of c
		get("e") // instead of a
		fill()
		for i := range 998 {
			require.Equal(t, 1, source.count(fmt.Sprint(i)))
		}
		for range 200 {
			get("d")
			get("e")
		}
		assert.Equal(t, 1, source.count("a"), "no one asks for it")
		assert.Equal(t, 1, source.count("b"))
		assert.Equal(t, 1, source.count("c"))
		assert.Greater(t, source.count("d"), 3)
		get("a")
		assert.Equal(t, 2, source.count("a"))
	})
}

// The audiences of a cached token are the cache's own, whatever the source and the caller do with theirs.
func TestCacheKeepsItsAudiences(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		source := &handmade{spoil: true, claim: func(audience []string) string {
			return claims(fmt.Sprintf(`[%q,%q]`, audience[0], audience[1]), 5*time.Minute)
		}}
		c := must.Get(jwtsvid.NewCache(source, nil))(t)
		for range 3 {
			mine := []string{"db", "cache"}
			token := must.Get(c.Fetch(t.Context(), mine...))(t)
			assert.Equal(t, []string{"db", "cache"}, mine)
			u := must.Get(jwtsvid.ParseUnverified(token))(t)
			assert.ElementsMatch(t, mine, u.Audience)
			mine[0] = "other"
			time.Sleep(5 * time.Minute)
		}
		assert.Equal(t, 3, source.count("cache"))
		assert.Zero(t, source.count("spoilt"))
	})
}

// A token is taken if its audiences are the set that was asked for, in any order, and if it has not ended, to the last second.
func TestCacheTakes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for name, c := range map[string]struct {
			audience string
			left     time.Duration
			want     string // the error
		}{
			"as asked":       {`["a","b"]`, time.Minute, ""},
			"another order":  {`["b","a"]`, time.Minute, ""},
			"one twice":      {`["a","b","a"]`, time.Minute, ""},
			"one missing":    {`["a"]`, time.Minute, "a token for"},
			"one as text":    {`"a"`, time.Minute, "a token for"},
			"one more":       {`["a","b","c"]`, time.Minute, "a token for"},
			"one other":      {`["a","c"]`, time.Minute, "a token for"},
			"a second left":  {`["a","b"]`, time.Second, ""},
			"it ends now":    {`["a","b"]`, 0, "that ended at"},
			"it has ended":   {`["a","b"]`, -time.Second, "that ended at"},
			"long ago ended": {`["a","b"]`, -time.Hour, "that ended at"},
		} {
			cache, err := jwtsvid.NewCache(&handmade{claim: func([]string) string { return claims(c.audience, c.left) }}, nil)
			require.NoError(t, err)
			token, err := cache.Fetch(t.Context(), "a", "b")
			if c.want == "" {
				assert.NoError(t, err, name)
			} else if assert.ErrorContains(t, err, c.want, name) {
				assert.Empty(t, token)
			}
		}
	})
}

// After a success the waits begin anew: the first after an outage is as short as ever.
func TestCacheWaitsAnew(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	for _, running := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			c, source := newCache(t, nil)
			if running {
				start(t, c)
			}
			var mu sync.Mutex
			var at []time.Time
			source.set(func(m *mint) {
				m.wait = func(context.Context) error {
					mu.Lock()
					defer mu.Unlock()
					at = append(at, time.Now())
					return nil
				}
			})
			use := func(d time.Duration) (attempts []time.Time) {
				mu.Lock()
				at = nil
				mu.Unlock()
				for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(time.Second / 4) {
					fetch(t, c, "db")
				}
				mu.Lock()
				defer mu.Unlock()
				return slices.Clone(at)
			}
			for range rounds.Of(2) {
				fresh := fetch(t, c, "db")
				source.set(func(m *mint) { m.err = errors.New("away") })
				attempts := use(4 * time.Minute) // the token lasts longer
				require.Equal(t, fresh, fetch(t, c, "db"), "it is served all the time")
				require.Greater(t, len(attempts), 10)
				if running {
					assert.LessOrEqual(t, attempts[1].Sub(attempts[0]), 1300*time.Millisecond, "the first wait is the shortest")
				} else { // callers are noticed once a second
					assert.LessOrEqual(t, attempts[1].Sub(attempts[0]), 2500*time.Millisecond)
				}
				source.set(func(m *mint) { m.err = nil })
				use(20 * time.Second)
				require.NotEqual(t, fresh, fetch(t, c, "db"))
			}
		})
	}
}
