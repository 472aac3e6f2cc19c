package federation_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/certs/bundleorder"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// world is one partner with a website, in a bubble.
type world struct {
	*internet
	web, ca *spiffetest.CA
	site    *site
	diary   *diary
	cfg     federation.Config
}

func newWorld(t *testing.T) *world {
	w := &world{internet: newInternet(), web: spiffetest.NewCA(t, "web.test"), ca: spiffetest.NewCA(t, "partner.test"), diary: &diary{}}
	w.site = w.host(t, "partner.test", webCert(w.web, "partner.test"), serving(t, w.ca.Bundle()))
	w.cfg.Relationships = []federation.Relationship{{TrustDomain: partner, URL: "https://partner.test/bundle", Profile: webRoots(w.web)}}
	w.cfg.DialContext, w.cfg.Logger = w.dial, w.diary.logger()
	return w
}

// next waits until the next fetch of td is over.
func next(t *testing.T, m *federation.Manager, td spiffe.TrustDomain) {
	t.Helper()
	at := statusOf(t, m, td).NextAttempt
	require.False(t, at.IsZero())
	time.Sleep(time.Until(at))
	synctest.Wait()
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// New does nothing, Run does everything, and the readers work throughout.
func TestLife(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		m := newManager(t, w.cfg)
		synctest.Wait()
		assert.Empty(t, w.dialled())
		_, err := m.Bundle(partner)
		require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
		require.EqualError(t, err, `federation: no bundle was fetched yet for trust domain "partner.test": no trust bundle for this trust domain`)
		_, err = m.Bundle(home)
		require.EqualError(t, err, `federation: there is no relationship with trust domain "example.org": no trust bundle for this trust domain`)
		assert.Zero(t, m.Bundles().Len())
		s := statusOf(t, m, partner)
		assertPending(t, s)
		assert.Nil(t, s.Bundle)
		assert.Zero(t, s.LastSuccess)
		changed := m.Changed()

		stop := running(t, m)
		synctest.Wait()
		assert.True(t, isClosed(changed))
		assert.True(t, trusts(t, m, w.ca))
		assert.Equal(t, 1, m.Bundles().Len())
		assert.Same(t, m.Bundles(), m.Bundles(), "the same until something changes")
		s = statusOf(t, m, partner)
		assert.True(t, s.Fresh)
		assert.Equal(t, "https://partner.test/bundle", s.URL)
		assert.Same(t, inForce(t, m, partner), s.Bundle)
		assert.True(t, s.LastSuccess.Equal(time.Now()))
		assert.NoError(t, s.Err)
		require.ErrorContains(t, m.Run(t.Context()), "already running")

		// It ends, and begins again where it was.
		stop()
		before := inForce(t, m, partner)
		w.dialled()
		time.Sleep(time.Hour)
		assert.Empty(t, w.dialled())
		assertStale(t, statusOf(t, m, partner), "Run has ended")
		changed = m.Changed()
		running(t, m)
		synctest.Wait()
		assert.Len(t, w.dialled(), 1)
		assert.Same(t, before, inForce(t, m, partner))
		assert.False(t, isClosed(changed), "nothing has changed")
		assert.True(t, statusOf(t, m, partner).Fresh)

		// The end of Run in the middle of a fetch is not a failure.
		w.site.serve(mute)
		m = newManager(t, w.cfg)
		stop = running(t, m)
		synctest.Wait()
		w.diary.read()
		stop()
		assert.Empty(t, w.diary.read())
		s = statusOf(t, m, partner)
		assertPending(t, s)
		assert.Zero(t, s.Failures)
		w.site.serve(serving(t, w.ca.Bundle()))
		running(t, m)
		synctest.Wait()
		assert.True(t, trusts(t, m, w.ca))

		// Run fetches when it starts, even if nothing is due.
		m = newManager(t, w.cfg)
		stop = running(t, m)
		synctest.Wait()
		stop()
		w.dialled()
		running(t, m)
		synctest.Wait()
		assert.Len(t, w.dialled(), 1)
	})
}

// When the next fetch comes.
func TestIntervals(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-6", "FED-7", "FED-8", "BND-19", "BND-20", "BND-21", "BND-22", "DIV-15", "IST-1.7-7")
	for _, c := range []struct {
		name            string
		hint, low, high time.Duration
		cfg             federation.Config
	}{
		{name: "the hint", hint: 120 * time.Second, low: 108 * time.Second, high: 132 * time.Second},
		{name: "no hint", low: 270 * time.Second, high: 330 * time.Second},
		{name: "a short hint", hint: time.Second, low: time.Minute, high: 66 * time.Second},
		{name: "a long hint", hint: 1000 * time.Hour, low: 21*time.Hour + 36*time.Minute, high: 24 * time.Hour},
		{name: "a floor", hint: 120 * time.Second, low: time.Hour, high: 66 * time.Minute, cfg: federation.Config{MinInterval: time.Hour}},
		{name: "a ceiling", hint: 120 * time.Second, low: 81 * time.Second, high: 90 * time.Second, cfg: federation.Config{MaxInterval: 90 * time.Second}},
		{name: "one interval", low: time.Minute, high: 66 * time.Second, cfg: federation.Config{MinInterval: time.Minute, MaxInterval: time.Minute}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				w.site.serve(serving(t, bundleOf(t, w.ca, nil, c.hint)))
				w.cfg.MinInterval, w.cfg.MaxInterval = c.cfg.MinInterval, c.cfg.MaxInterval
				m := newManager(t, w.cfg)
				running(t, m)
				synctest.Wait()
				require.Len(t, w.site.asked(), 1)
				for range rounds.Of(5) {
					start := time.Now()
					in := time.Until(statusOf(t, m, partner).NextAttempt)
					assert.True(t, in >= c.low && in <= c.high, "%v", in)
					time.Sleep(in - time.Nanosecond)
					synctest.Wait()
					assert.Empty(t, w.site.asked())
					time.Sleep(time.Nanosecond)
					synctest.Wait()
					assert.Len(t, w.site.asked(), 1, "after %v", time.Since(start))
				}
			})
		})
	}
}

// Without a ceiling a hint may be as long as a duration can be. It is no reason to ask at once, and the
// bundle is fresh.
func TestEndlessIntervals(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for range 20 { // of chance
			w := newWorld(t)
			w.cfg.MaxInterval = math.MaxInt64
			w.site.serve(serving(t, bundleOf(t, w.ca, nil, math.MaxInt64/time.Second*time.Second)))
			m := newManager(t, w.cfg)
			stop := running(t, m)
			time.Sleep(time.Hour)
			assert.Len(t, w.site.asked(), 1)
			s := statusOf(t, m, partner)
			assert.True(t, s.Fresh)
			assert.WithinRange(t, s.NextAttempt, time.Now().AddDate(85, 0, 0), time.Now().AddDate(115, 0, 0))
			stop()
		}
		m := newManager(t, federation.Config{MinInterval: math.MaxInt64, MaxInterval: math.MaxInt64, Relationships: newWorld(t).cfg.Relationships})
		assertPending(t, statusOf(t, m, partner))
	})
}

// A failure waits for the next interval like a success, with the last known hint.
func TestFailuresWait(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-9", "FED-10", "FED-45")
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		good := serving(t, bundleOf(t, w.ca, new(uint64(7)), 120*time.Second))
		w.site.serve(answer(500, nil))
		m := newManager(t, w.cfg)
		running(t, m)
		synctest.Wait()
		s := statusOf(t, m, partner)
		assertFailed(t, s)
		assert.Nil(t, s.Bundle)
		requireCode(t, s.Err, badStatus)
		_, err := m.Bundle(partner)
		require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
		in := time.Until(s.NextAttempt)
		assert.True(t, in >= time.Minute && in <= 66*time.Second, "no bundle and no hint: the floor, %v", in)

		w.site.serve(good)
		next(t, m, partner)
		assert.True(t, statusOf(t, m, partner).Fresh)
		assert.NoError(t, statusOf(t, m, partner).Err)
		before := inForce(t, m, partner)
		w.site.serve(answer(500, documentOf(t, bundleOf(t, w.ca, new(uint64(8)), time.Hour))))
		w.site.asked()
		for i := range 10 {
			in := time.Until(statusOf(t, m, partner).NextAttempt)
			assert.True(t, in >= 108*time.Second && in <= 132*time.Second, "%v", in)
			next(t, m, partner)
			assert.Len(t, w.site.asked(), 1, "one request per interval")
			s := statusOf(t, m, partner)
			assertStale(t, s)
			assert.Equal(t, i+1, s.Failures)
			assert.Same(t, before, inForce(t, m, partner))
		}
	})
}

// The state cases of bundle documents, fetched one after the other.
func TestStateCases(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BS-01", "BS-02", "BS-03", "BS-04", "BS-05", "BS-06", "BND-6", "BND-10", "BND-11", "BND-28", "FED-11", "FED-12")
	read := func(name string) []byte {
		doc := must.Get(os.ReadFile(filepath.Join("..", "testdata", "bundles", name)))(t)
		return doc
	}
	var index struct {
		Sequences []struct {
			ID           string
			Files        []string
			InForce      int
			Error, Alert bool
			Held         bool
		}
	}
	require.NoError(t, json.Unmarshal(read("index.json"), &index))
	require.Len(t, index.Sequences, 6)
	for i, s := range index.Sequences {
		assert.Equal(t, fmt.Sprintf("BS-%02d", i+1), s.ID)
		t.Run(s.ID, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				w.cfg.Relationships[0].TrustDomain = home
				m := newManager(t, w.cfg)
				w.site.serve(answer(200, read(s.Files[0])))
				running(t, m)
				synctest.Wait()
				w.diary.read()
				for _, f := range s.Files[1:] {
					w.site.serve(answer(200, read(f)))
					next(t, m, home)
				}
				want := must.Get(spiffe.ParseBundle(home, read(s.Files[s.InForce])))(t)
				if s.Held { // the number is lost: the publisher has to repeat that
					first := must.Get(spiffe.ParseBundle(home, read(s.Files[0])))(t)
					for start := time.Now(); time.Since(start) < bundleorder.Time; next(t, m, home) {
						require.True(t, first.Equal(inForce(t, m, home)))
						requireCode(t, statusOf(t, m, home).Err, outOfSequence)
						require.True(t, want.Equal(statusOf(t, m, home).Refused))
						lines := w.diary.read()
						require.Len(t, lines, 1)
						require.Equal(t, "federation: bundle refused for its sequence number", lines[0]["msg"])
						require.Equal(t, "held", lines[0]["outcome"])
						require.Equal(t, "WARN", lines[0]["level"])
					}
				}
				assert.True(t, want.Equal(inForce(t, m, home)))
				status := statusOf(t, m, home)
				lines := w.diary.read()
				require.Len(t, lines, len(s.Files)-1)
				reported := false
				for _, line := range lines {
					reported = reported || strings.Contains(line["msg"], "kept its sequence number") && line["level"] == "WARN"
				}
				e, _ := errors.AsType[*federation.FetchError](status.Err)
				reported = reported || e != nil && kindOf(e) == outOfSequence
				assert.Equal(t, s.Error, e != nil && kindOf(e) == badDocument)
				assert.Equal(t, s.Alert, reported, "%v", lines)
			})
		})
	}
}

// An empty bundle revokes everything, and so does one of which nothing can be used.
func TestRevocation(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BND-6", "BND-10", "BND-11", "BS-01", "BS-02", "FED-34")
	for doc, sequence := range map[string]*uint64{
		`{"keys":[]}`:                              nil,
		`{"keys":[{"use":"sig","kid":"a"},7]}`:     nil,
		`{"spiffe_sequence":8,"keys":[]}`:          new(uint64(7)),
		`{"spiffe_sequence":9,"keys":[{"kid":7}]}`: new(uint64(7)),
	} {
		t.Run(doc, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				w.site.serve(serving(t, bundleOf(t, w.ca, sequence, 0)))
				m := newManager(t, w.cfg)
				running(t, m)
				synctest.Wait()
				require.True(t, trusts(t, m, w.ca))
				changed := m.Changed()
				w.diary.read()

				w.site.serve(answer(200, []byte(doc)))
				next(t, m, partner)
				assert.False(t, trusts(t, m, w.ca))
				assert.True(t, isClosed(changed))
				assert.Empty(t, inForce(t, m, partner).Contents().X509Authorities)
				assert.True(t, statusOf(t, m, partner).Fresh, "it is an answer")
				lines := w.diary.read()
				require.Len(t, lines, 1)
				assert.Equal(t, "WARN", lines[0]["level"])
				assert.Contains(t, lines[0]["msg"], "revoked")

				// A later failure does not bring the old one back.
				w.site.serve(answer(500, nil))
				next(t, m, partner)
				assert.False(t, trusts(t, m, w.ca))
			})
		})
	}

	// One root of two.
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		old := w.ca.SVID("/old").Chain()
		w.ca.Rotate()
		w.site.serve(serving(t, w.ca.Bundle()))
		m := newManager(t, w.cfg)
		running(t, m)
		synctest.Wait()
		v := must.Get(spiffe.NewVerifier(m, spiffe.AllowMembersOf(partner), nil))(t)
		must.Get(v.VerifyChain(old, spiffe.ClientRole))(t)
		w.ca.DropOldRoots()
		w.site.serve(serving(t, w.ca.Bundle()))
		next(t, m, partner)
		_, err := v.VerifyChain(old, spiffe.ClientRole)
		require.Error(t, err)
		assert.True(t, trusts(t, m, w.ca))
	})
}

// A lower sequence number is refused, reported, and accepted when an operator says so.
func TestRollback(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-11", "FED-12", "FED-13", "AMB-25", "BS-04", "IST-1.7-7")
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		seven := bundleOf(t, w.ca, new(uint64(7)), 0)
		w.site.serve(serving(t, seven))
		m := newManager(t, w.cfg)
		running(t, m)
		synctest.Wait()
		require.True(t, seven.Equal(inForce(t, m, partner)))

		w.ca.Rotate()
		six := bundleOf(t, w.ca, new(uint64(6)), 0)
		w.site.serve(serving(t, six))
		w.diary.read()
		for range 2 { // and again: a 304 must not pass for consent
			next(t, m, partner)
			s := statusOf(t, m, partner)
			assert.True(t, seven.Equal(s.Bundle))
			assertStale(t, s)
			require.ErrorContains(t, requireCode(t, s.Err, outOfSequence), "is 6, and 7 is known")
			require.NotNil(t, s.Refused)
			assert.True(t, six.Equal(s.Refused))
			assert.False(t, trusts(t, m, w.ca))
			lines := w.diary.read()
			require.Len(t, lines, 1)
			assert.Equal(t, "refused", lines[0]["outcome"])
			assert.Equal(t, "WARN", lines[0]["level"])
			assert.Equal(t, "7", lines[0]["sequence"], "what is in force")
		}

		// While it is out of order it may as well be out of reach: the offer stands.
		w.site.serve(answer(500, nil))
		next(t, m, partner)
		require.NotNil(t, statusOf(t, m, partner).Refused)

		changed := m.Changed()
		require.NoError(t, m.Set(statusOf(t, m, partner).Refused))
		assert.True(t, isClosed(changed))
		assert.True(t, six.Equal(inForce(t, m, partner)))
		assert.True(t, trusts(t, m, w.ca))
		assert.Nil(t, statusOf(t, m, partner).Refused)
		w.site.serve(serving(t, six))
		next(t, m, partner)
		assert.True(t, statusOf(t, m, partner).Fresh)
		lines := w.diary.read()
		assert.Equal(t, "federation: bundle was set by an operator", lines[1]["msg"])
		assert.Equal(t, "6", lines[1]["sequence"])

		// A publisher that has found its place again is forgiven.
		w.site.serve(serving(t, bundleOf(t, w.ca, new(uint64(5)), 0)))
		next(t, m, partner)
		require.NotNil(t, statusOf(t, m, partner).Refused)
		w.site.serve(serving(t, bundleOf(t, w.ca, new(uint64(8)), 0)))
		next(t, m, partner)
		assert.Nil(t, statusOf(t, m, partner).Refused)
		assert.NoError(t, statusOf(t, m, partner).Err)

		// Without a number the later one counts, once the publisher has shown that it means it.
		w.site.serve(serving(t, bundleOf(t, w.ca, nil, 0)))
		for start := time.Now(); time.Since(start) < bundleorder.Time+renew.UsualPoll; {
			next(t, m, partner)
		}
		next(t, m, partner)
		_, has := inForce(t, m, partner).Sequence()
		assert.False(t, has)
	})
}

// An endpoint that is wrong for a moment decides nothing: what it says is held, reported and not stored, and its next
// answer counts.
func TestImplausible(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-11")
	for name, wrong := range map[string]struct {
		roots, slow bool
		sequence    *uint64
	}{
		"the highest number":     {true, false, new(uint64(math.MaxUint64))},
		"2^63":                   {true, true, new(uint64(1) << 63)},
		"a time after a counter": {true, true, new(uint64(946684800000))},
		"a large step":           {true, true, new(uint64(20_000))},
		"no number":              {true, true, nil},
		"nothing":                {false, false, nil},
		"nothing, same number":   {false, false, new(uint64(7))},
		"nothing, highest":       {false, true, new(uint64(math.MaxUint64))},
	} {
		t.Run(name, func(t *testing.T) {
			if wrong.slow { // it is as the others
				rounds.Slow(t)
			}
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				w.cfg.Dir = t.TempDir()
				seven := bundleOf(t, w.ca, new(uint64(7)), 24*time.Hour)
				w.site.serve(serving(t, seven))
				m := newManager(t, w.cfg)
				running(t, m)
				synctest.Wait()
				require.True(t, seven.Equal(inForce(t, m, partner)))
				stored := readFile(t, w.cfg.Dir)

				thief := spiffetest.NewCA(t, "partner.test")
				bad := bundleOf(t, thief, wrong.sequence, 0)
				if !wrong.roots {
					c := spiffe.BundleContents{Sequence: wrong.sequence}
					bad = must.Get(spiffe.NewBundle(partner, c))(t)
				}
				w.site.serve(serving(t, bad))
				w.diary.read()
				next(t, m, partner)
				s := statusOf(t, m, partner)
				requireCode(t, s.Err, outOfSequence)
				assert.True(t, bad.Equal(s.Refused))
				assert.True(t, seven.Equal(s.Bundle))
				assert.True(t, trusts(t, m, w.ca))
				assert.False(t, trusts(t, m, thief))
				assert.Equal(t, stored, readFile(t, w.cfg.Dir), "nothing of it is stored")
				assert.LessOrEqual(t, time.Until(s.NextAttempt), 6*time.Minute, "and it is asked again soon, whatever the hint")
				lines := w.diary.read()
				require.Len(t, lines, 1)
				assert.Equal(t, "WARN", lines[0]["level"])
				assert.Equal(t, "held", lines[0]["outcome"])

				// The endpoint is itself again: with the number it had, and with the next one.
				w.site.serve(serving(t, seven))
				next(t, m, partner)
				s = statusOf(t, m, partner)
				assert.NoError(t, s.Err)
				assert.Nil(t, s.Refused)
				assert.True(t, s.Fresh)
				w.ca.Rotate()
				eight := bundleOf(t, w.ca, new(uint64(8)), time.Minute)
				w.site.serve(serving(t, eight))
				next(t, m, partner)
				assert.True(t, eight.Equal(inForce(t, m, partner)))

				// An operator decides.
				nine := bundleOf(t, w.ca, new(uint64(9)), time.Minute)
				for _, b := range []*spiffe.Bundle{bad, nine} {
					w.site.serve(serving(t, b))
					next(t, m, partner)
				}
				require.NoError(t, m.Set(bad))
				assert.True(t, bad.Equal(inForce(t, m, partner)))
				require.NoError(t, m.Set(nine))

				if !bad.Supersedes(nine) {
					return
				}
				// And so does an endpoint that stays with it, with no other answer between.
				w.site.serve(serving(t, bad))
				next(t, m, partner)
				time.Sleep(bundleorder.Time / 2)
				w.site.serve(serving(t, nine))
				next(t, m, partner)
				w.site.serve(serving(t, bad))
				next(t, m, partner)
				for begin := time.Now(); time.Since(begin) < bundleorder.Time; next(t, m, partner) {
					require.True(t, nine.Equal(inForce(t, m, partner)))
				}
				assert.True(t, bad.Equal(inForce(t, m, partner)))
				assert.True(t, statusOf(t, m, partner).Fresh)
				lines = w.diary.read()
				assert.Equal(t, "WARN", lines[len(lines)-1]["level"])
			})
		})
	}
}

// A first answer is taken as it is, unless its number leaves no room for another one. What an operator has
// accepted stays accepted over a restart.
func TestImplausibleFirst(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.cfg.Dir = t.TempDir()
		w.site.serve(serving(t, bundleOf(t, w.ca, new(uint64(math.MaxUint64)), 0)))
		m := newManager(t, w.cfg)
		stop := running(t, m)
		synctest.Wait()
		_, err := m.Bundle(partner)
		require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
		requireCode(t, statusOf(t, m, partner).Err, outOfSequence)
		require.NoError(t, m.Set(statusOf(t, m, partner).Refused))
		assert.True(t, trusts(t, m, w.ca))
		stop()

		m = newManager(t, w.cfg)
		running(t, m)
		synctest.Wait()
		assert.True(t, trusts(t, m, w.ca))
		assert.NoError(t, statusOf(t, m, partner).Err)
	})
}

// readFile returns what the only file in dir has.
func readFile(t *testing.T, dir string) string {
	t.Helper()
	files := must.Get(filepath.Glob(filepath.Join(dir, "*")))(t)
	require.Len(t, files, 1)
	doc := must.Get(os.ReadFile(files[0]))(t)
	return string(doc)
}

// A local edit stays until a fetch replaces it; a 304 is no such fetch.
func TestSet(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-13")
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		published := bundleOf(t, w.ca, new(uint64(7)), 0)
		w.site.serve(serving(t, published))
		m := newManager(t, w.cfg)
		other := spiffetest.NewCA(t, "partner.test")
		edit := bundleOf(t, other, nil, 0)
		require.NoError(t, m.Set(edit), "before Run, too")
		assert.Same(t, edit, inForce(t, m, partner))
		assertStale(t, statusOf(t, m, partner), "no endpoint has confirmed it")

		running(t, m)
		synctest.Wait()
		assert.True(t, published.Equal(inForce(t, m, partner)))
		require.NoError(t, m.Set(edit))
		assert.True(t, trusts(t, m, other))
		time.Sleep(time.Until(statusOf(t, m, partner).NextAttempt) - 1)
		synctest.Wait()
		assert.Same(t, edit, inForce(t, m, partner))
		w.site.asked()
		next(t, m, partner)
		assert.True(t, published.Equal(inForce(t, m, partner)), "nothing has changed there, and still it replaces the edit")
		asked := w.site.asked()
		require.Len(t, asked, 1)
		assert.Empty(t, asked[0].Header.Get("If-None-Match"))

		require.ErrorContains(t, m.Set(nil), "there is no bundle")
		err := m.Set(spiffetest.NewCA(t, "unknown.test").Bundle())
		require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
		assert.Equal(t, 1, m.Bundles().Len())

		// While a fetch is under way, that learns that nothing has changed.
		w.site.serve(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(time.Second)
			serving(t, published)(rw, r)
		})
		next(t, m, partner)
		require.NoError(t, m.Set(edit))
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Same(t, edit, inForce(t, m, partner))
		assertStale(t, statusOf(t, m, partner), "this one was not confirmed")
		asked = w.site.asked()
		require.Len(t, asked, 1)
		assert.NotEmpty(t, asked[0].Header.Get("If-None-Match"))
	})
}

// A fetch that began before the edit does not replace it, whatever it brings: it may be the very endpoint
// whose authority the operator has just taken away.
func TestSetDuringFetch(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-13")
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		published := bundleOf(t, w.ca, nil, 0)
		w.site.serve(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(time.Second)
			serving(t, published)(rw, r)
		})
		m := newManager(t, w.cfg)
		running(t, m)
		synctest.Wait()
		edit := bundleOf(t, spiffetest.NewCA(t, "partner.test"), nil, 0)
		require.NoError(t, m.Set(edit))
		w.diary.read()
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Same(t, edit, inForce(t, m, partner))
		s := statusOf(t, m, partner)
		assertStale(t, s, "this one was not confirmed")
		require.NoError(t, s.Err)
		lines := w.diary.read()
		require.Len(t, lines, 1)
		assert.Equal(t, "overtaken by an operator", lines[0]["outcome"])
		next(t, m, partner)
		time.Sleep(time.Second)
		synctest.Wait()
		assert.True(t, published.Equal(inForce(t, m, partner)), "the next one does")
	})
}

// Conditional requests.
func TestNotModified(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-34")
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		m := newManager(t, w.cfg)
		running(t, m)
		synctest.Wait()
		before := inForce(t, m, partner)
		assert.Empty(t, w.site.asked()[0].Header.Get("If-None-Match"))
		w.diary.read()
		for range 3 {
			next(t, m, partner)
			asked := w.site.asked()
			require.Len(t, asked, 1)
			assert.NotEmpty(t, asked[0].Header.Get("If-None-Match"))
			s := statusOf(t, m, partner)
			assert.True(t, s.Fresh)
			assert.True(t, s.LastSuccess.Equal(time.Now()))
			assert.Same(t, before, inForce(t, m, partner))
		}
		for _, line := range w.diary.read() {
			assert.Equal(t, "not modified", line["outcome"])
			assert.Equal(t, "1", line["sequence"])
		}
		w.ca.Rotate()
		w.site.serve(serving(t, w.ca.Bundle()))
		next(t, m, partner)
		assert.True(t, trusts(t, m, w.ca))

		// A document with the same bytes and no tag is no change either.
		before = inForce(t, m, partner)
		changed := m.Changed()
		w.site.serve(answer(200, documentOf(t, before)))
		next(t, m, partner)
		assert.Same(t, before, inForce(t, m, partner))
		assert.False(t, isClosed(changed))
		w.site.asked()
		next(t, m, partner)
		assert.Empty(t, w.site.asked()[0].Header.Get("If-None-Match"), "the tag is that of the last answer")
	})
}

// An entity tag is that of one URL: elsewhere the same one may stand for something else.
func TestTagOfAnotherURL(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		counts := func(b *spiffe.Bundle) http.HandlerFunc { // versions begin at 1 everywhere
			doc := documentOf(t, b)
			return func(rw http.ResponseWriter, r *http.Request) {
				rw.Header().Set("Etag", `"1"`)
				if r.Header.Get("If-None-Match") == `"1"` {
					rw.WriteHeader(http.StatusNotModified)
					return
				}
				_, _ = rw.Write(doc)
			}
		}
		old := w.host(t, "old.test", webCert(w.web, "old.test"), counts(w.ca.Bundle()))
		w.ca.Rotate()
		w.host(t, "new.test", webCert(w.web, "new.test"), counts(w.ca.Bundle()))
		w.site.serve(redirect(http.StatusFound, "https://old.test/"))
		m := newManager(t, w.cfg)
		running(t, m)
		synctest.Wait()
		next(t, m, partner)
		asked := old.asked()
		require.Len(t, asked, 2)
		assert.Equal(t, `"1"`, asked[1].Header.Get("If-None-Match"))
		for _, r := range w.site.asked() {
			assert.Empty(t, r.Header.Get("If-None-Match"), "it gave no tag")
		}
		assert.True(t, statusOf(t, m, partner).Fresh)

		w.site.serve(redirect(http.StatusFound, "https://new.test/"))
		next(t, m, partner)
		assert.True(t, trusts(t, m, w.ca))

		// A 304 to an unconditional request is a failure.
		w.site.serve(answer(http.StatusNotModified, nil))
		next(t, m, partner)
		requireCode(t, statusOf(t, m, partner).Err, badStatus)
	})
}

// Redirects are not remembered, not even permanent ones.
func TestRedirectsAreForgotten(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-42")
	for _, status := range []int{301, 302, 307, 308} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				moved := w.host(t, "moved.test", webCert(w.web, "moved.test"), serving(t, w.ca.Bundle()))
				w.site.serve(redirect(status, "https://moved.test/secret?signature=secret"))
				m := newManager(t, w.cfg)
				running(t, m)
				synctest.Wait()
				assert.Len(t, w.site.asked(), 1)
				assert.Len(t, moved.asked(), 1)
				lines := w.diary.read()
				require.Len(t, lines, 1)
				assert.Equal(t, "https://partner.test/bundle", lines[0]["url"])
				assert.Equal(t, "https://moved.test/secret?…", lines[0]["redirected_to"])
				assert.Equal(t, "moved.test", lines[0]["peer"])
				next(t, m, partner)
				assert.Len(t, w.site.asked(), 1)
				assert.Len(t, moved.asked(), 1)
				w.site.serve(serving(t, w.ca.Bundle()))
				next(t, m, partner)
				assert.Len(t, w.site.asked(), 1)
				assert.Empty(t, moved.asked())
			})
		})
	}
}

// The end of a relationship takes effect at once.
func TestRemove(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-18")
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		m := newManager(t, w.cfg)
		running(t, m)
		synctest.Wait()
		require.True(t, trusts(t, m, w.ca))
		changed := m.Changed()
		w.dialled()
		require.NoError(t, m.Remove(partner))
		assert.False(t, trusts(t, m, w.ca))
		assert.True(t, isClosed(changed))
		_, err := m.Bundle(partner)
		require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
		assert.Zero(t, m.Bundles().Len())
		assert.Empty(t, m.Status())
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		assert.Empty(t, w.dialled())
		changed = m.Changed()
		require.NoError(t, m.Remove(partner), "once is enough")
		assert.False(t, isClosed(changed))

		// And back, and gone while a fetch is under way, which changes nothing any more.
		require.NoError(t, m.Add(w.cfg.Relationships[0]))
		synctest.Wait()
		assert.True(t, trusts(t, m, w.ca))
		gone := make(chan time.Time, 1)
		w.site.serve(func(rw http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			gone <- time.Now()
		})
		next(t, m, partner)
		assert.Zero(t, statusOf(t, m, partner).NextAttempt, "an attempt is under way")
		w.diary.read()
		require.NoError(t, m.Remove(partner))
		now := time.Now()
		assert.Equal(t, now, <-gone)
		synctest.Wait()
		assert.Zero(t, m.Bundles().Len())
		lines := w.diary.read()
		require.Len(t, lines, 1, "the end of Run is not a failure")
		assert.Equal(t, "federation: relationship ended", lines[0]["msg"])
	})
}

// Relationships that come and change while Run runs.
func TestAdd(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-16", "FED-14", "FED-15", "BND-3", "BND-4", "BND-7")
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		m := newManager(t, federation.Config{DialContext: w.cfg.DialContext, Logger: w.cfg.Logger})
		running(t, m)
		synctest.Wait()
		require.NoError(t, m.Add(w.cfg.Relationships[0]))
		synctest.Wait()
		require.True(t, trusts(t, m, w.ca))

		// Other parameters: the bundle stays, and the fetch comes at once.
		moved := w.host(t, "moved.test", webCert(w.web, "moved.test"), answer(500, nil))
		r := w.cfg.Relationships[0]
		r.URL = "https://moved.test/"
		before := inForce(t, m, partner)
		w.dialled()
		require.NoError(t, m.Add(r))
		synctest.Wait()
		assert.Equal(t, []string{"moved.test:443"}, w.dialled())
		assert.Len(t, moved.asked(), 1)
		assert.Same(t, before, inForce(t, m, partner))
		s := statusOf(t, m, partner)
		assertStale(t, s)
		assert.Equal(t, "https://moved.test/", s.URL)
		moved.serve(serving(t, w.ca.Bundle()))
		next(t, m, partner)
		assert.True(t, statusOf(t, m, partner).Fresh)
		assert.Equal(t, []string{"moved.test:443"}, w.dialled(), "the old URL is not asked any more")

		// One that is refused changes nothing.
		r.URL = "http://partner.test/"
		require.ErrorContains(t, m.Add(r), "does not begin with https")
		r.URL, r.Profile = "https://partner.test/", federation.SPIFFE{EndpointID: spiffe.MustParseID("spiffe://unknown.test/e")}
		require.ErrorContains(t, m.Add(r), "set SPIFFE.Bundles")
		assert.Equal(t, "https://moved.test/", statusOf(t, m, partner).URL)

		// Another domain, whose authority speaks for itself only.
		ca := spiffetest.NewCA(t, "third.test")
		w.host(t, "third.test", webCert(w.web, "third.test"), serving(t, ca.Bundle()))
		require.NoError(t, m.Add(federation.Relationship{TrustDomain: ca.TrustDomain(), URL: "https://third.test/", Profile: webRoots(w.web)}))
		synctest.Wait()
		assert.True(t, trusts(t, m, ca))
		assert.Equal(t, 2, m.Bundles().Len())
		impostor, key := ca.Certificate("/workload", func(c *x509.Certificate) { c.URIs[0].Host = "partner.test" })
		v := must.Get(spiffe.NewVerifier(m, spiffe.AllowAnyPeer(), nil))(t)
		_, err := v.VerifyChain(impostor, spiffe.ClientRole)
		e, ok := errors.AsType[*spiffe.VerifyError](err)
		require.True(t, ok)
		assert.Equal(t, "X5-31", e.Rule)
		assert.NotNil(t, key)
		for b := range m.Bundles().All() {
			assert.Len(t, b.Contents().X509Authorities, 1)
		}
	})
}

// A self-serving endpoint is verified by the newest bundle that is known.
func TestSelfServing(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-61", "FED-67", "BND-6")
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		initial := w.ca.Bundle()
		w.cfg.Relationships[0].Profile = federation.SPIFFE{EndpointID: spiffe.MustParseID("spiffe://partner.test/endpoint"), Initial: initial}
		w.site.present(svidCert(w.ca, "/endpoint"))
		w.ca.Prepare() // the next root is in the bundle before it signs
		w.site.serve(serving(t, w.ca.Bundle()))
		m := newManager(t, w.cfg)
		_, err := m.Bundle(partner)
		require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain, "the initial bundle is for the endpoint only")
		running(t, m)
		synctest.Wait()
		assert.Len(t, inForce(t, m, partner).Contents().X509Authorities, 2)
		assert.Equal(t, "spiffe://partner.test/endpoint", w.diary.read()[0]["peer"])

		// The endpoint's new root is not in the configured bundle.
		w.ca.Rotate()
		w.site.present(svidCert(w.ca, "/endpoint"))
		w.ca.DropOldRoots()
		w.site.serve(serving(t, w.ca.Bundle()))
		next(t, m, partner)
		assert.True(t, statusOf(t, m, partner).Fresh)
		assert.Len(t, inForce(t, m, partner).Contents().X509Authorities, 1)

		// The old root counts for nothing now, even for the endpoint itself.
		w.ca.Rotate()
		w.ca.DropOldRoots()
		w.site.present(svidCert(w.ca, "/endpoint"))
		w.site.serve(serving(t, w.ca.Bundle()))
		w.site.asked()
		next(t, m, partner)
		e := requireCode(t, statusOf(t, m, partner).Err, authentication)
		ve, ok := errors.AsType[*spiffe.VerifyError](e)
		require.True(t, ok)
		assert.Equal(t, "X5-31", ve.Rule)
		assert.Empty(t, w.site.asked())
		assert.Equal(t, "none", w.diary.read()[1]["peer"])

		// A rotation was missed: an operator brings the new bundle, and need not wait.
		require.NoError(t, m.Set(w.ca.Bundle()))
		synctest.Wait()
		assert.True(t, statusOf(t, m, partner).Fresh)
		assert.Len(t, w.site.asked(), 1)

		// Or configures it: the one with the higher number counts.
		w.ca.Rotate()
		w.ca.DropOldRoots()
		w.site.present(svidCert(w.ca, "/endpoint"))
		w.site.serve(serving(t, w.ca.Bundle()))
		next(t, m, partner)
		requireCode(t, statusOf(t, m, partner).Err, authentication)
		r := w.cfg.Relationships[0]
		r.Profile = federation.SPIFFE{EndpointID: spiffe.MustParseID("spiffe://partner.test/endpoint"), Initial: w.ca.Bundle()}
		require.NoError(t, m.Add(r))
		synctest.Wait()
		assert.True(t, statusOf(t, m, partner).Fresh)
		assert.True(t, trusts(t, m, w.ca))

		// Everything is revoked: then there is nothing to verify it by, and nothing is sent.
		w.site.serve(answer(200, []byte(`{"spiffe_sequence":99,"keys":[]}`)))
		next(t, m, partner)
		assert.False(t, trusts(t, m, w.ca))
		w.dialled()
		next(t, m, partner)
		assert.Empty(t, w.dialled())
		require.ErrorIs(t, statusOf(t, m, partner).Err, spiffe.ErrNoAuthority)
	})

	// What is older than the configured bundle is refused.
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.cfg.Relationships[0].Profile = federation.SPIFFE{EndpointID: spiffe.MustParseID("spiffe://partner.test/endpoint"), Initial: bundleOf(t, w.ca, new(uint64(9)), 0)}
		w.site.present(svidCert(w.ca, "/endpoint"))
		w.site.serve(serving(t, bundleOf(t, w.ca, new(uint64(8)), 0)))
		m := newManager(t, w.cfg)
		running(t, m)
		synctest.Wait()
		s := statusOf(t, m, partner)
		requireCode(t, s.Err, outOfSequence)
		assert.Nil(t, s.Bundle)
		require.NotNil(t, s.Refused)

		// Until an operator says otherwise.
		require.NoError(t, m.Set(s.Refused))
		next(t, m, partner)
		assert.True(t, statusOf(t, m, partner).Fresh)
	})
}

// An endpoint in the trust domain of another relationship: its anchors come from there, the newest
// ones, as soon as they are there.
func TestBorrowedAnchors(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-63", "FED-68")
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		prod := spiffetest.NewCA(t, "prod.partner.test")
		td := prod.TrustDomain()
		s := w.host(t, "prod.test", svidCert(w.ca, "/endpoint"), serving(t, prod.Bundle()))
		parent := w.cfg.Relationships[0]
		w.cfg.Relationships = append(w.cfg.Relationships, federation.Relationship{
			TrustDomain: td, URL: "https://prod.test/", Profile: federation.SPIFFE{EndpointID: spiffe.MustParseID("spiffe://partner.test/endpoint")},
		})
		w.site.serve(func(rw http.ResponseWriter, r *http.Request) {
			time.Sleep(7 * time.Second)
			serving(t, w.ca.Bundle())(rw, r)
		})
		m := newManager(t, w.cfg)
		running(t, m)
		synctest.Wait()
		require.ErrorIs(t, statusOf(t, m, td).Err, spiffe.ErrUnknownTrustDomain)
		assert.Equal(t, []string{"partner.test:443"}, w.dialled(), "without anchors nothing is sent")
		time.Sleep(7 * time.Second)
		synctest.Wait()
		assert.True(t, trusts(t, m, prod), "as soon as they are there")
		assert.Equal(t, []string{"prod.test:443"}, w.dialled())

		// The anchors rotate.
		w.ca.Rotate()
		w.ca.DropOldRoots()
		w.site.serve(serving(t, w.ca.Bundle()))
		s.present(svidCert(w.ca, "/endpoint"))
		time.Sleep(15 * time.Minute)
		synctest.Wait()
		assert.True(t, statusOf(t, m, td).Fresh)
		time.Sleep(5 * time.Minute)

		// Without the other relationship it fails, and has what it had.
		require.NoError(t, m.Remove(partner))
		next(t, m, td)
		require.ErrorIs(t, statusOf(t, m, td).Err, spiffe.ErrUnknownTrustDomain)
		assert.True(t, trusts(t, m, prod))
		w.dialled()
		require.NoError(t, m.Add(parent))
		synctest.Wait()
		assert.True(t, statusOf(t, m, td).Fresh)
		assert.ElementsMatch(t, []string{"partner.test:443", "prod.test:443"}, w.dialled())

		// Gone while it waits.
		require.NoError(t, m.Remove(partner))
		next(t, m, td)
		require.NoError(t, m.Remove(td))
		require.NoError(t, m.Add(parent))
		synctest.Wait()
		assert.Equal(t, 1, m.Bundles().Len())
	})
}

// Two hundred endpoints that hang do not delay one that answers, and cost no goroutine while they wait.
func TestHangingEndpointsDelayNoOther(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		var most, now atomic.Int64
		dial := w.dial
		w.cfg.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if addr == "dead.test:443" {
				n := now.Add(1)
				defer now.Add(-1)
				for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
				}
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return dial(ctx, network, addr)
		}
		good := w.cfg.Relationships[0]
		w.cfg.Relationships = nil
		for i := range 1600 { // so many that there is no time for all of them within their interval
			w.cfg.Relationships = append(w.cfg.Relationships, federation.Relationship{
				TrustDomain: spiffe.MustParseTrustDomain(fmt.Sprint("dead-", i)), URL: "https://dead.test/", Profile: webRoots(w.web),
			})
		}
		w.cfg.Relationships = append(w.cfg.Relationships, good)
		w.cfg.Logger = nil
		m := newManager(t, w.cfg)
		running(t, m)
		synctest.Wait()
		assert.LessOrEqual(t, now.Load(), int64(16))

		// All are new: it comes to its turn behind as many as hang, a second for each 16.
		time.Sleep(105 * time.Second)
		synctest.Wait()
		require.True(t, trusts(t, m, w.ca))

		// From then on those that failed come last.
		late := time.Duration(0)
		for range rounds.Of(rounds.Of(1)) {
			at := statusOf(t, m, partner).NextAttempt
			w.site.asked()
			time.Sleep(time.Until(at) + time.Second)
			synctest.Wait()
			assert.Len(t, w.site.asked(), 1)
			late = max(late, statusOf(t, m, partner).LastSuccess.Sub(at))
		}
		assert.LessOrEqual(t, late, time.Second)
		assert.LessOrEqual(t, most.Load(), int64(16*31))
	})
}

// A relationship that waits has neither goroutine nor timer.
func TestGoroutines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refuse := func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("refused") }
		cfg := federation.Config{DialContext: refuse}
		for i := range rounds.Of(1250) {
			cfg.Relationships = append(cfg.Relationships, federation.Relationship{
				TrustDomain: spiffe.MustParseTrustDomain(fmt.Sprint("td-", i)), URL: "https://a.test/", Profile: federation.Web{},
			})
		}
		m := newManager(t, cfg)
		before := runtime.NumGoroutine()
		running(t, m)
		synctest.Wait()
		assert.LessOrEqual(t, runtime.NumGoroutine()-before, 40)
		for _, s := range m.Status() {
			assertFailed(t, s)
			require.Equal(t, 1, s.Failures)
		}
	})
}

// Every fetch has a line of its own.
func TestLog(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-19", "MAP-8")
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.cfg.Relationships[0].URL += "?token=secret"
		w.site.serve(answer(200, append(bytes.TrimSuffix(documentOf(t, bundleOf(t, w.ca, new(uint64(7)), 0)), []byte("]}")), `,{"use":"sig"}]}`...)))
		m := newManager(t, w.cfg)
		running(t, m)
		synctest.Wait()
		lines := w.diary.read()
		require.Len(t, lines, 1)
		assert.NotEmpty(t, lines[0]["next"])
		delete(lines[0], "next")
		assert.Equal(t, map[string]string{
			"time": time.Now().UTC().Format(time.RFC3339), "level": "INFO", "msg": "federation: bundle fetched", "trust_domain": "partner.test",
			"url": "https://partner.test/bundle?…", "peer": "partner.test", "outcome": "new", "sequence": "7", "authorities": "1",
			"skipped":       "1",
			"first_skipped": lines[0]["first_skipped"],
		}, lines[0])
		assert.Contains(t, lines[0]["first_skipped"], `"use" is missing or unknown`)

		w.site.serve(answer(503, nil))
		next(t, m, partner)
		lines = w.diary.read()
		require.Len(t, lines, 1)
		assert.Equal(t, "WARN", lines[0]["level"])
		assert.Equal(t, "failed", lines[0]["outcome"])
		assert.Equal(t, "partner.test", lines[0]["peer"])
		assert.Equal(t, "7", lines[0]["sequence"], "what stays in force")
		assert.Equal(t, `federation: bundle of "partner.test" from https://partner.test/bundle?…: HTTP status 503, not 200`, lines[0]["err"])
		s := statusOf(t, m, partner)
		n, ok := s.Bundle.Sequence()
		assert.True(t, ok)
		assert.Equal(t, uint64(7), n)
	})
}

// Readers, writers and Run at the same time; for the race detector.
func TestConcurrency(t *testing.T) {
	t.Parallel()
	web, ca := spiffetest.NewCA(t, "web.test"), spiffetest.NewCA(t, "partner.test")
	_, url := listen(t, webCert(web, "127.0.0.1"), func(w http.ResponseWriter, r *http.Request) { serving(t, ca.Bundle())(w, r) })
	r := federation.Relationship{TrustDomain: partner, URL: url, Profile: webRoots(web)}
	m := newManager(t, federation.Config{Relationships: []federation.Relationship{r}, MinInterval: time.Millisecond, MaxInterval: time.Millisecond, Dir: filepath.Join(t.TempDir(), "store")})
	running(t, m)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for n := range rounds.Of(15) {
				changed := m.Changed()
				_, _ = m.Bundle(partner)
				m.Bundles()
				m.Status()
				switch {
				case i == 0 && n%10 == 5:
					assert.NoError(t, m.Remove(partner))
				case i == 0:
					assert.NoError(t, m.Add(r))
				case i == 1 && n%10 == 0:
					ca.Rotate()
				case i == 2:
					_ = m.Set(ca.Bundle())
				}
				select {
				case <-changed:
				case <-time.After(5 * time.Millisecond):
				}
			}
		})
	}
	wg.Wait()
	require.NoError(t, m.Add(r))
	require.Eventually(t, func() bool { return trusts(t, m, ca) }, time.Minute, time.Millisecond)
}
