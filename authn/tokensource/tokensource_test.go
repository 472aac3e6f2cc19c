package tokensource_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/tokensource"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

func TestStaticAndFile(t *testing.T) {
	t.Parallel()
	good := jwt(inAnHour(), "istio-ca")
	for _, c := range []struct {
		name, contents, want string
		is                   error
		says                 string
	}{
		{"a JWT", good, good, nil, ""},
		{"opaque", "s.ome-" + secret, "s.ome-" + secret, nil, ""},
		{"white space around it", " \t" + good + "\r\n\n", good, nil, ""},
		{"without an end", jwtOf(`{"aud":"a"}`), jwtOf(`{"aud":"a"}`), nil, ""},
		{"looks like a JWT", secret + "..x", secret + "..x", nil, ""},
		{"as long as may be", strings.Repeat("x", 16<<10), strings.Repeat("x", 16<<10), nil, ""},
		{"empty", "", "", tokensource.ErrNoToken, "it is empty"},
		{"white space only", " \n", "", tokensource.ErrNoToken, "it is empty"},
		{"expired", jwt(time.Unix(1e9, 0), "istio-ca"), "", tokensource.ErrExpired, "it ended at 2001-09-09T01:46:40Z; have it renewed, or compare the clocks"},
		{"just expired", jwt(time.Now(), "istio-ca"), "", tokensource.ErrExpired, "it ended at"},
		{"two lines", good + "\n" + good, "", nil, "characters other than printable ASCII, or spaces"},
		{"a space", "a " + secret, "", nil, "characters other than"},
		{"a control character", "a\x00" + secret, "", nil, "characters other than"},
		{"not ASCII", "é" + secret, "", nil, "characters other than"},
		{"not UTF-8", "\xff" + secret, "", nil, "characters other than"},
		{"too long", strings.Repeat("x", 16<<10+1), "", nil, "the token has 16385 bytes, the limit is 16384"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "token")
			require.NoError(t, os.WriteFile(file, []byte(c.contents), 0o600))
			for name, s := range map[string]*tokensource.Source{"static": tokensource.Static(c.contents), "file " + file: tokensource.File(file)} {
				if c.want != "" {
					requireToken(t, c.want, s)
					continue
				}
				err := requireNone(t, s)
				assert.ErrorContains(t, err, "tokensource: "+name+": ")
				assert.ErrorContains(t, err, c.says)
				for _, e := range []error{tokensource.ErrNoToken, tokensource.ErrExpired} {
					assert.Equal(t, e == c.is, errors.Is(err, e), "%v", e)
				}
				assert.Equal(t, c.is == tokensource.ErrNoToken, errors.Is(err, fs.ErrNotExist)) // of the table
			}
		})
	}
}

func TestFileIsReadAgain(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "token")
	s := tokensource.File(file)
	err := requireNone(t, s)
	must.Fail(t, err, tokensource.ErrNoToken, fs.ErrNotExist)

	require.NoError(t, os.WriteFile(file, []byte("one"), 0o600))
	requireToken(t, "one", s)
	require.NoError(t, os.WriteFile(file, []byte("two"), 0o600))
	requireToken(t, "two", s)
	require.ErrorIs(t, must.Err(s.Token(done(t))), context.Canceled)

	require.NoError(t, os.WriteFile(file, make([]byte, 64<<10+1), 0o600))
	require.ErrorContains(t, requireNone(t, s), "has more than 65536 bytes")
	require.NoError(t, os.Remove(file))
	require.ErrorIs(t, requireNone(t, s), tokensource.ErrNoToken)
	require.ErrorContains(t, requireNone(t, tokensource.File(dir)), "not a regular file")
	require.ErrorIs(t, requireNone(t, tokensource.File("")), tokensource.ErrNoToken)
	require.NotErrorIs(t, requireNone(t, tokensource.File(filepath.Join(dir, "x\x00"))), tokensource.ErrNoToken)
}

func TestZeroSource(t *testing.T) {
	t.Parallel()
	var none *tokensource.Source
	for _, s := range []*tokensource.Source{none, {}} {
		require.ErrorContains(t, requireNone(t, s), "not made by a constructor")
		assert.NotEmpty(t, fmt.Sprint(s))
	}
}

// issuer answers as GCE with tokens that live for life, and are all different.
func issuer(life time.Duration) *exchanged {
	var n atomic.Int64
	return &exchanged{answer: func(w http.ResponseWriter, r *http.Request) {
		claims := fmt.Sprintf(`{"aud":"ca","exp":%d,"n":%d}`, time.Now().Add(life).Unix(), n.Add(1))
		if life == 0 {
			claims = fmt.Sprintf(`{"aud":"ca","n":%d}`, n.Add(1))
		}
		text(200, jwtOf(claims))(w, r)
	}}
}

func gce(x *exchanged, l *logs) *tokensource.Source {
	o := &tokensource.GCEOptions{HTTPClient: x.client()}
	if l != nil {
		o.Logger = l.logger()
	}
	return made(tokensource.GCE("ca", o))
}

// A token is fetched again at half of its life, and not before it is asked for.
func TestRenewal(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-6.5-2")
	synctest.Test(t, func(t *testing.T) {
		x, l := issuer(time.Hour), new(logs)
		s := gce(x, l)
		first := must.Get(s.Token(t.Context()))(t)
		time.Sleep(23 * time.Minute) // a tenth of the life before the half of it
		requireToken(t, first, s)
		synctest.Wait()
		require.Equal(t, 1, x.count())

		time.Sleep(8 * time.Minute)
		synctest.Wait()
		require.Equal(t, 1, x.count(), "an idle source does nothing")
		requireToken(t, first, s) // the old one, while the new one is on its way
		synctest.Wait()
		require.Equal(t, 2, x.count())
		second := must.Get(s.Token(t.Context()))(t)
		require.NotEqual(t, first, second)
		require.Equal(t, 2, l.count("new token"))
		require.NotContains(t, l.String(), secret)

		time.Sleep(2 * time.Hour) // it has expired
		third := must.Get(s.Token(t.Context()))(t)
		require.NotEqual(t, second, third)
		require.Equal(t, 3, x.count())
	})
}

func TestRenewalOfShortLives(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		x := issuer(2 * time.Second)
		s := gce(x, nil)
		for range 3000 { // for half a minute
			require.NoError(t, must.Err(s.Token(t.Context())))
			time.Sleep(10 * time.Millisecond)
		}
		synctest.Wait()
		assert.LessOrEqual(t, x.count(), 31, "at most one a second")
		assert.GreaterOrEqual(t, x.count(), 15)
	})
}

func TestUnknownLife(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		x := issuer(0)
		s := gce(x, nil)
		first := must.Get(s.Token(t.Context()))(t)
		time.Sleep(3*time.Minute + 59*time.Second)
		requireToken(t, first, s)
		synctest.Wait()
		require.Equal(t, 1, x.count())
		time.Sleep(61 * time.Second)
		requireToken(t, first, s)
		synctest.Wait()
		require.Equal(t, 2, x.count())

		second := must.Get(s.Token(t.Context()))(t)
		x.become(text(400, ""))
		for range 1000 { // for 28 hours
			time.Sleep(100 * time.Second)
			requireToken(t, second, s)
		}
		require.LessOrEqual(t, x.count(), 1002)
	})
}

// The old token is used until it expires, whatever the server does, and calls fail quickly after that.
func TestOutage(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		x, l := issuer(time.Hour), new(logs)
		s := gce(x, l)
		first := must.Get(s.Token(t.Context()))(t)
		good := x.answer
		x.become(text(503, "no"))
		for range 3599 {
			requireToken(t, first, s)
			time.Sleep(time.Second)
		}
		synctest.Wait()
		failures := l.count("no new token; the old one stays")
		assert.GreaterOrEqual(t, failures, 45, "the waits grow to 30 seconds, or 4 %% of what is left")
		assert.LessOrEqual(t, failures, 250)
		require.NotContains(t, l.String(), secret)

		time.Sleep(2 * time.Second)
		before := x.count()
		for range 6_000 { // for a minute
			err := requireNone(t, s)
			e, ok := errors.AsType[*tokensource.StatusError](err)
			require.True(t, ok, "%v", err)
			require.Equal(t, 503, e.StatusCode)
			time.Sleep(10 * time.Millisecond)
		}
		asked := x.count() - before
		assert.GreaterOrEqual(t, asked, 60/8, "at least every 5 seconds and a little")
		assert.LessOrEqual(t, asked, 60, "at most once a second")

		x.become(good)
		time.Sleep(5 * time.Second)
		second := must.Get(s.Token(t.Context()))(t)
		require.NotEqual(t, first, second)
	})
}

// A hundred calls cost one fetch, and those that leave do not end it for the others.
func TestOneFetch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		x := issuer(time.Hour)
		good := x.answer
		x.become(func(w http.ResponseWriter, r *http.Request) {
			time.Sleep(4 * time.Second)
			good(w, r)
		})
		s := gce(x, nil)
		var got, left atomic.Int64
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				if i%4 == 0 { // the first of them, too
					cancel2 := time.AfterFunc(time.Second, cancel)
					defer cancel2.Stop()
				}
				start := time.Now()
				_, err := s.Token(ctx)
				if i%4 == 0 {
					assert.ErrorIs(t, err, context.Canceled)
					assert.Equal(t, time.Second, time.Since(start))
					left.Add(1)
				} else if assert.NoError(t, err) {
					got.Add(1)
				}
			})
		}
		wg.Wait()
		assert.EqualValues(t, 25, left.Load())
		assert.EqualValues(t, 75, got.Load())
		assert.Equal(t, 1, x.count())
	})
}

// A server that does not answer is given up after 5 seconds.
func TestSilence(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		x := &exchanged{answer: func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }}
		s := gce(x, nil)
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		require.ErrorIs(t, must.Err(s.Token(ctx)), context.DeadlineExceeded)
		require.Equal(t, 3*time.Second, time.Since(start))

		err := requireNone(t, s)
		must.Fail(t, err, context.DeadlineExceeded, "no answer in 5s")
		require.Equal(t, 5*time.Second, time.Since(start))
		require.Equal(t, 1, x.count())

		start = time.Now()
		requireNone(t, s)
		require.Zero(t, time.Since(start), "a call after a failure does not wait")
	})
}

// A refusal says whether asking again may help, and no redirect is followed.
func TestStatus(t *testing.T) {
	t.Parallel()
	for status, want := range map[int]bool{
		400: false, 401: false, 403: false, 404: false, 410: false, 418: false, 429: true, 500: true, 501: false, 502: true, 503: true,
		504: true, 505: false, 511: false, 599: true, 201: false, 204: false, 301: false, 302: false, 307: false, 308: false,
	} {
		x := &exchanged{answer: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", "http://127.0.0.1/elsewhere")
			w.Header().Set("Retry-After", "7")
			w.WriteHeader(status)
		}}
		e, ok := errors.AsType[*tokensource.StatusError](requireNone(t, gce(x, nil)))
		require.True(t, ok)
		assert.Equal(t, 1, x.count())
		assert.Equal(t, status, e.StatusCode)
		after, again := e.Retryable()
		assert.Equal(t, want, again, status)
		if again {
			assert.Equal(t, 7*time.Second, after)
		}
	}
	s := made(tokensource.GCE("ca", &tokensource.GCEOptions{URL: "http://127.0.0.1:1"}))
	require.ErrorContains(t, requireNone(t, s), "connection refused")
}

func TestCachedAllocs(t *testing.T) { // not parallel: allocations are counted
	x := &exchanged{answer: text(200, jwt(inAnHour(), "ca"))}
	s := gce(x, nil)
	require.NoError(t, must.Err(s.Token(t.Context())))
	ctx := t.Context()
	assert.Zero(t, testing.AllocsPerRun(100, func() { _, _ = s.Token(ctx) }))
}

// The life of a token begins when it is asked for: an answer that was long on its way does not make it longer.
func TestLifeBeginsWithTheRequest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		x, down := &exchanged{}, false
		x.become(func(w http.ResponseWriter, r *http.Request) {
			if down {
				text(503, "")(w, r)
				return
			}
			down = true
			time.Sleep(4 * time.Second)
			text(200, `{"access_token":"`+secret+`","token_type":"Bearer","expires_in":60}`)(w, r)
		})
		o := tokensource.ClientOptions{URL: "https://sts.example/token", HTTPClient: x.client()}
		s, asked := made(tokensource.Exchange(tokensource.Static("subject"), o)), time.Now()
		requireToken(t, secret, s)
		time.Sleep(time.Until(asked.Add(time.Minute - time.Nanosecond)))
		requireToken(t, secret, s)
		time.Sleep(time.Nanosecond)
		err := requireNone(t, s)
		require.ErrorContains(t, err, "503")
		synctest.Wait()
	})
}

// After a success failures are counted from one again: the waits of the next outage are those of the first.
func TestNextOutageBeginsAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		x, down := &exchanged{}, false
		x.become(func(w http.ResponseWriter, r *http.Request) {
			if down {
				text(429, "")(w, r) // which is asked once in each fetch
				return
			}
			text(200, `{"access_token":"`+secret+`","token_type":"Bearer","expires_in":3600}`)(w, r)
		})
		s := made(tokensource.Exchange(tokensource.Static("subject"), tokensource.ClientOptions{URL: "https://sts.example/token", HTTPClient: x.client()}))
		outage := func() (waits []time.Duration) {
			requireToken(t, secret, s)
			down = true
			last := time.Time{}
			for end := time.Now().Add(50 * time.Minute); time.Now().Before(end) && len(waits) < 8; time.Sleep(100 * time.Millisecond) {
				before := x.count()
				requireToken(t, secret, s)
				synctest.Wait()
				if x.count() > before {
					if !last.IsZero() {
						waits = append(waits, time.Since(last))
					}
					last = time.Now()
				}
			}
			down = false
			time.Sleep(time.Minute)
			requireToken(t, secret, s)
			synctest.Wait()
			return waits
		}
		first, second := outage(), outage()
		require.Len(t, first, 8)
		require.Len(t, second, 8)
		assert.Less(t, first[0], 3*time.Second)
		assert.Less(t, second[0], 3*time.Second, "%v", second)
		assert.Greater(t, max(first[5], first[6], first[7]), 3*time.Second, "they grow: %v", first)
	})
}
