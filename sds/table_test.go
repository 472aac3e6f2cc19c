package sds

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// answers is a source whose look-ups are functions.
type answers struct {
	mu    sync.Mutex
	of    map[string]func(context.Context) (*pki.Secret, error)
	calls map[string]int
}

func (a *answers) GenerateSecret(ctx context.Context, name string) (*pki.Secret, error) {
	a.mu.Lock()
	a.calls[name]++
	f := a.of[name]
	a.mu.Unlock()
	if f == nil {
		return nil, fmt.Errorf("%q: %w", name, fs.ErrNotExist)
	}
	return f(ctx)
}

func (a *answers) Subscribe(func(string)) func() { return func() {} }

func (a *answers) set(name string, f func(context.Context) (*pki.Secret, error)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.of[name] = f
}

func (a *answers) count(name string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.calls[name]
}

func always(s *pki.Secret) func(context.Context) (*pki.Secret, error) {
	return func(context.Context) (*pki.Secret, error) { return s, nil }
}

func fails(err error) func(context.Context) (*pki.Secret, error) {
	return func(context.Context) (*pki.Secret, error) { return nil, err }
}

func newAnswers() *answers {
	return &answers{of: make(map[string]func(context.Context) (*pki.Secret, error)), calls: make(map[string]int)}
}

var errDown = errors.New("CA down")

// quietInbox is one that the test looks into by itself.
func quietInbox() *inbox { return &inbox{wake: func() {}} }

// A look-up that fails is repeated with a growing wait; the name stays pending, and others go on.
func TestTableRetries(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		src := newAnswers()
		src.set("web", fails(errDown))
		src.set("ROOTCA", always(roots(t, ca, "ROOTCA")))
		table := newTable(src, slog.New(slog.DiscardHandler))
		defer table.close()
		in := quietInbox()
		web, trust := table.watch("web", "web", in, new(item), table.turn.Load()), table.watch("ROOTCA", "ROOTCA", in, new(item), table.turn.Load())
		synctest.Wait()
		assert.ErrorIs(t, web.res.cur.Load().err, errDown)
		assert.NotNil(t, trust.res.cur.Load().entry)

		start := time.Now()
		var waits []time.Duration
		for n := 2; n <= 12; n++ {
			began := time.Now()
			for src.count("web") < n {
				time.Sleep(10 * time.Millisecond)
				synctest.Wait()
			}
			waits = append(waits, time.Since(began))
		}
		for i, w := range waits {
			full := min(firstRetry<<i, emptyRetry)
			assert.GreaterOrEqual(t, w, firstRetry/2, "wait %d of %v", i, waits)
			assert.LessOrEqual(t, w, full+10*time.Millisecond, "wait %d of %v", i, waits)
		}
		assert.Equal(t, 12, web.res.Failures(), "which the wait grows with")
		assert.Equal(t, 1, src.count("ROOTCA"))

		first := pair(t, ca, "web")
		src.set("web", always(first))
		time.Sleep(lastRetry)
		synctest.Wait()
		require.NotNil(t, web.res.cur.Load().entry, "after %v", time.Since(start))

		// Now that it is served, a failure takes nothing away, and the waits begin anew.
		assert.Zero(t, web.res.Failures())
		served := web.res.cur.Load().entry
		src.set("web", fails(errDown))
		table.changed("web")
		synctest.Wait()
		assert.Same(t, served, web.res.cur.Load().entry)
		second := pair(t, ca, "web")
		src.set("web", always(second))
		time.Sleep(firstRetry)
		synctest.Wait()
		assert.NotEqual(t, served.version, web.res.cur.Load().entry.version)

		// However often it fails, no wait is longer than 4 % of the life that is left.
		short := pair(t, ca, "web", func(c *x509.Certificate) { c.NotBefore, c.NotAfter = time.Now(), time.Now().Add(time.Minute) })
		src.set("web", always(short))
		table.changed("web")
		synctest.Wait()
		src.set("web", fails(errDown))
		table.changed("web")
		for left := time.Minute; left > 5*time.Second; left = time.Until(short.NotAfter()) {
			calls := src.count("web")
			time.Sleep(left / 24)
			synctest.Wait()
			assert.Greater(t, src.count("web"), calls, "with %v left", left)
		}
		src.set("web", always(second))
		time.Sleep(emptyRetry)
		synctest.Wait()

		// What does not exist is not asked for again, until the source says so.
		src.set("web", nil)
		table.changed("web")
		synctest.Wait()
		assert.Equal(t, &state{}, web.res.cur.Load())
		calls := src.count("web")
		time.Sleep(time.Hour)
		assert.Equal(t, calls, src.count("web"))
		src.set("web", always(second))
		table.changed("web")
		synctest.Wait()
		assert.NotNil(t, web.res.cur.Load().entry)
	})
}

// A stream that comes when a certificate has expired gets it only if the source still gives it: others keep
// it, and nothing else is known that could be better.
func TestTableExpired(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		src := newAnswers()
		short := pair(t, ca, "web")
		src.set("web", always(short))
		table := newTable(src, slog.New(slog.DiscardHandler))
		defer table.close()
		first, second := quietInbox(), quietInbox()
		old := table.watch("web", "web", first, new(item), table.turn.Load())
		synctest.Wait()
		assert.Len(t, first.take(nil), 1)
		table.unwatch(table.watch("web", "web", second, new(item), table.turn.Load()))
		assert.Len(t, second.take(nil), 1, "told at once")
		assert.Equal(t, 1, src.count("web"))

		time.Sleep(time.Until(short.NotAfter()) - time.Nanosecond)
		table.unwatch(table.watch("web", "web", second, new(item), table.turn.Load()))
		assert.Len(t, second.take(nil), 1, "still good")
		time.Sleep(time.Nanosecond)
		src.set("web", func(ctx context.Context) (*pki.Secret, error) {
			time.Sleep(time.Second)
			return nil, errDown
		})
		late := table.watch("web", "web", second, new(item), table.turn.Load())
		synctest.Wait()
		assert.Empty(t, second.take(nil))
		assert.Equal(t, map[string]string{"web": ""}, table.versions())
		later := table.watch("web", "web", second, new(item), table.turn.Load())
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Equal(t, 2, src.count("web"), "one look-up for all")
		assert.ElementsMatch(t, []*watch{late, later}, second.take(nil))
		assert.ErrorIs(t, late.res.cur.Load().err, errDown)
		assert.Equal(t, []*watch{old}, first.take(nil), "which changes nothing for a stream that has it")

		// A source that gives it all the same knows best.
		src.set("web", always(short))
		time.Sleep(2 * firstRetry)
		synctest.Wait()
		assert.Len(t, second.take(nil), 2)
		assert.NotNil(t, late.res.cur.Load().entry)
		again := table.watch("web", "web", second, new(item), table.turn.Load())
		synctest.Wait()
		assert.Contains(t, second.take(nil), again)

		// A stream that has not looked at its news yet finds nothing new.
		s := &stream{h: &Handler{table: table}, session: newSession(true, 1)}
		s.inbox.wake = func() {}
		must.Get(s.session.request(ask("web")))(t)
		it := s.session.items["web"]
		it.watch = table.watch("web", "web", &s.inbox, it, table.turn.Load())
		synctest.Wait()
		src.set("web", func(context.Context) (*pki.Secret, error) {
			time.Sleep(time.Second)
			return short, nil
		})
		table.watch("web", "web", second, new(item), table.turn.Load())
		require.Nil(t, it.watch.res.cur.Load())
		s.collect()
		assert.Nil(t, it.cur)
	})
}

// One look-up and one encoding serve all who wait, and a change during a look-up leads to another.
func TestTableLooksUpOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		src := newAnswers()
		release := make(chan struct{})
		secrets := []*pki.Secret{pair(t, ca, "web"), pair(t, ca, "web")}
		src.set("web", func(context.Context) (*pki.Secret, error) {
			n := src.count("web") - 1
			<-release
			return secrets[min(n, 1)], nil
		})
		table := newTable(src, slog.New(slog.DiscardHandler))
		defer table.close()
		var inboxes []*inbox
		for range 1000 {
			in := quietInbox()
			inboxes = append(inboxes, in)
			table.watch("web", "web", in, new(item), table.turn.Load())
		}
		synctest.Wait()
		for range 100 {
			table.changed("web")
		}
		release <- struct{}{}
		synctest.Wait()
		assert.Equal(t, 2, src.count("web"))
		release <- struct{}{}
		synctest.Wait()
		assert.Equal(t, 2, src.count("web"))
		var e *entry
		for _, in := range inboxes {
			news := in.take(nil)
			require.Len(t, news, 1)
			got := news[0].res.cur.Load().entry
			if e == nil {
				e = got
			}
			require.Same(t, e, got)
		}
		assert.Equal(t, must.Get(newEntry("web", secrets[1], nil))(t).version, e.version)

		// The same content again is no news.
		close(release)
		table.changed("web")
		synctest.Wait()
		assert.Equal(t, 3, src.count("web"))
		assert.Same(t, e, table.names["web"]["web"].cur.Load().entry)
		assert.Empty(t, inboxes[0].take(nil))
	})
}

// A look-up ends when no stream waits for it, after its time, and when the table is closed.
func TestTableCancels(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := newAnswers()
		ended := make(chan error, 10)
		src.set("web", func(ctx context.Context) (*pki.Secret, error) {
			<-ctx.Done()
			ended <- ctx.Err()
			return nil, ctx.Err()
		})
		var log strings.Builder // read when nothing writes
		table := newTable(src, slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})))
		in := quietInbox()
		one, two := table.watch("web", "web", in, new(item), table.turn.Load()), table.watch("web", "web", in, new(item), table.turn.Load())
		synctest.Wait()
		table.unwatch(one)
		table.unwatch(one)
		synctest.Wait()
		assert.Empty(t, ended)
		table.unwatch(two)
		assert.ErrorIs(t, <-ended, context.Canceled)
		assert.Empty(t, table.versions())
		synctest.Wait()
		assert.Empty(t, log.String(), "no stream asked for it")

		start := time.Now()
		table.watch("web", "web", in, new(item), table.turn.Load())
		assert.ErrorIs(t, <-ended, context.DeadlineExceeded)
		assert.Equal(t, lookupTimeout, time.Since(start))
		time.Sleep(firstRetry)
		synctest.Wait()
		assert.Equal(t, 3, src.count("web"), "it is repeated")
		assert.Equal(t, map[string]string{"web": ""}, table.versions())

		table.close()
		assert.ErrorIs(t, <-ended, context.Canceled)
		table.close()
		table.changed("web")
		table.watch("other", "other", in, new(item), table.turn.Load())
		time.Sleep(time.Hour)
		assert.Equal(t, 3, src.count("web"))
		assert.Zero(t, src.count("other"))
	})
}

// A source that returns nothing at all is a failure, not a panic.
func TestTableNilSecret(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := newAnswers()
		src.set("web", always(nil))
		table := newTable(src, slog.New(slog.DiscardHandler))
		defer table.close()
		w := table.watch("web", "web", quietInbox(), new(item), table.turn.Load())
		synctest.Wait()
		assert.Error(t, w.res.cur.Load().err)
	})
}
