package internal_test

import (
	"bytes"
	"context"
	"fmt"
	"log"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/ratelog"
)

// lines is a logger's output without times.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

// take returns the lines since the last call.
func (l *lines) take() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := strings.Split(strings.TrimSuffix(l.buf.String(), "\n"), "\n")
	l.buf.Reset()
	return s
}

func (l *lines) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
}

func TestRateLogWarn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		out := &lines{}
		log := ratelog.New(out.logger(), 0)
		for i := range 12_000 {
			log.Warn("refused", "no header", slog.Int("uid", i))
			if i == 7 {
				log.Warn("refused", "no identity", slog.Int("uid", i))
			}
		}
		assert.Equal(t, []string{
			`level=WARN msg=refused reason="no header" uid=0`,
			`level=WARN msg=refused reason="no identity" uid=7`,
		}, out.take(), "the first of each at once")

		time.Sleep(time.Minute + time.Second)
		assert.Equal(t, []string{`level=WARN msg=refused reason="no header" uid=11999 count=11999 interval=1m0s`}, out.take(), "the others counted")

		log.Warn("refused", "no identity", slog.Int("uid", 9))
		log.Warn("refused", "no header", slog.Int("uid", 1))
		assert.Equal(t, []string{`level=WARN msg=refused reason="no identity" uid=9`}, out.take(), "which was forgotten after an interval without any; the other was not")
		time.Sleep(time.Minute)
		assert.Equal(t, []string{`level=WARN msg=refused reason="no header" uid=1 count=1 interval=1m0s`}, out.take(), "nothing is missed")

		time.Sleep(10 * time.Minute) // all timers have ended, or the bubble would wait for ever
		assert.Equal(t, []string{""}, out.take())
		log.Warn("refused", "no header")
		assert.Equal(t, []string{`level=WARN msg=refused reason="no header"`}, out.take())
		time.Sleep(2 * time.Minute)
	})
}

// TestRateLogWarnKinds sends more kinds of events than a program has.
func TestRateLogWarnKinds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		out := &lines{}
		log := ratelog.New(out.logger(), time.Second)
		for i := range 10_000 {
			log.Warn("refused", fmt.Sprint("reason ", i))
		}
		got := out.take()
		require.Len(t, got, 129)
		assert.Contains(t, got[128], ratelog.Other)
		time.Sleep(1500 * time.Millisecond)
		assert.Equal(t, []string{`level=WARN msg="other reasons" reason="other reasons" count=9871 interval=1s`}, out.take())
		time.Sleep(3 * time.Second)
	})
}

// A second name is seen, and names without end crowd out neither reasons nor, once they have ended, other names.
func TestRateLogOf(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		out := &lines{}
		log := ratelog.New(out.logger(), time.Second)
		for i := range 10_000 {
			log.LogOf(slog.LevelWarn, fmt.Sprint("name ", i/2), "refused", "denied", slog.Int("i", i))
		}
		got := out.take()
		require.Len(t, got, 13)
		assert.Equal(t, `level=WARN msg=refused reason=denied i=0`, got[0])
		assert.Equal(t, `level=WARN msg=refused reason=denied i=2`, got[1])
		log.Warn("refused", "another reason")
		assert.Equal(t, []string{`level=WARN msg=refused reason="another reason"`}, out.take())
		time.Sleep(1500 * time.Millisecond)
		synctest.Wait()
		got = out.take()
		require.Len(t, got, 13)
		assert.Contains(t, got, `level=WARN msg=refused reason=denied i=1 count=1 interval=1s`)
		assert.Contains(t, got, `level=WARN msg=refused reason=denied i=9999 count=9975 interval=1s`)
		time.Sleep(3 * time.Second)
		synctest.Wait()
		log.LogOf(slog.LevelWarn, "another name", "refused", "denied")
		log.LogOf(slog.LevelWarn, "yet another", "refused", "denied")
		assert.Len(t, out.take(), 2, "the first have ended")
		time.Sleep(3 * time.Second)
	})
}

// TestRateLogOfLevels: names that only inform take no lines from names that warn.
func TestRateLogOfLevels(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		out := &lines{}
		log := ratelog.New(out.logger(), 0)
		for i := range 20 {
			log.LogOf(slog.LevelInfo, fmt.Sprint("name ", i), "old key", "classical")
		}
		log.LogOf(slog.LevelWarn, "one", "refused", "denied", slog.Int("i", 1))
		log.LogOf(slog.LevelWarn, "another", "refused", "denied", slog.Int("i", 2))
		got := out.take()
		require.Len(t, got, 12+1+2)
		assert.Contains(t, got[14], "i=2")
		time.Sleep(3 * time.Minute)
	})
}

func TestRateLogWarnSilent(t *testing.T) { // not parallel, as it counts allocations
	ratelog.New(nil, 0).Warn("refused", "for no reason")
	out := &lines{}
	quiet := slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: slog.LevelError}))
	log := ratelog.New(quiet, 0)
	assert.Zero(t, testing.AllocsPerRun(100, func() { log.Warn("refused", "for no reason") }))
	assert.Equal(t, []string{""}, out.take())
}

func TestRateLogWarnConcurrent(t *testing.T) {
	t.Parallel()
	out := &lines{}
	log := ratelog.New(out.logger(), time.Millisecond)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 1000 {
				log.Warn("refused", "no header", slog.Int("n", 1))
			}
		})
	}
	all.Wait()
	total := 0
	assert.Eventually(t, func() bool {
		for _, line := range out.take() {
			n := 1
			if _, rest, ok := strings.Cut(line, "count="); ok {
				fmt.Sscan(rest, &n)
			} else if line == "" {
				n = 0
			}
			total += n
		}
		return total == 8000
	}, time.Minute, 2*time.Millisecond, "every event is counted once")
}

// A level is a part of what tells events apart, and one that the logger does not take costs nothing.
func TestRateLogLevels(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		out := &lines{}
		log := ratelog.New(out.logger(), 0)
		for range 3 {
			log.Log(slog.LevelDebug, "refused", "no header")
			log.Log(slog.LevelInfo, "refused", "no header")
			log.Log(slog.LevelError, "refused", "no header")
		}
		assert.Equal(t, []string{`level=INFO msg=refused reason="no header"`, `level=ERROR msg=refused reason="no header"`}, out.take())
		time.Sleep(time.Minute + time.Second)
		assert.ElementsMatch(t, []string{`level=INFO msg=refused reason="no header" count=2 interval=1m0s`, `level=ERROR msg=refused reason="no header" count=2 interval=1m0s`}, out.take())
		time.Sleep(2 * time.Minute)
	})
}

// The lines of net/http: failed handshakes are counted, and all else reaches the standard logger. It is not
// parallel, as that is one for all.
func TestRateLogErrorLog(t *testing.T) {
	out, standard := &lines{}, &lines{}
	flags := log.Flags()
	log.SetOutput(standard)
	log.SetFlags(0)
	t.Cleanup(func() {
		log.SetOutput(os.Stderr)
		log.SetFlags(flags)
	})
	logger := ratelog.ErrorLog(ratelog.New(out.logger(), 0), slog.LevelWarn)
	for i := range 100 {
		logger.Printf("http: TLS handshake error from %s: %v", fmt.Sprintf("[::1]:%d", i), "remote error: tls: bad certificate")
	}
	logger.Printf("http: panic serving %s: %v\ngoroutine 1", "127.0.0.1:1", "oops")
	assert.Equal(t, []string{`level=WARN msg="http: TLS handshake error" reason="handshake failed" remote=[::1]:0 err="remote error: tls: bad certificate"`}, out.take())
	assert.Equal(t, []string{"http: panic serving 127.0.0.1:1: oops", "goroutine 1"}, standard.take())
}

// stuck is a handler that takes no line until free is closed.
type stuck struct {
	slog.Handler
	free chan struct{}
}

func (s stuck) Handle(ctx context.Context, r slog.Record) error {
	<-s.free
	return s.Handler.Handle(ctx, r)
}

func (s stuck) WithAttrs(attrs []slog.Attr) slog.Handler {
	return stuck{s.Handler.WithAttrs(attrs), s.free}
}
func (s stuck) WithGroup(name string) slog.Handler { return stuck{s.Handler.WithGroup(name), s.free} }

// A handler that blocks delays one line a little and the others not at all; the lines that wait are bounded. When it goes on, so do
// they, in their order again.
func TestRateLogStuckHandler(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		out, free := &lines{}, make(chan struct{})
		log := ratelog.Patient(slog.New(stuck{out.logger().Handler(), free}))
		assert.Same(t, log, ratelog.Patient(log))
		begun := time.Now()
		counts := ratelog.New(log.With("k", "v"), 24*time.Hour)
		for i := range 4000 {
			log.WithGroup("g").Warn("refused", "n", i)
			counts.Warn("refused", strconv.Itoa(i))
		}
		assert.Equal(t, 100*time.Millisecond, time.Since(begun))
		close(free)
		synctest.Wait()
		assert.Len(t, out.take(), 16)
		var want []string
		for i := range 100 {
			log.Info("said", "n", i)
			want = append(want, fmt.Sprintf("level=INFO msg=said n=%d", i))
		}
		synctest.Wait()
		assert.Equal(t, want, out.take())
	})
}

func TestRateLogPatientNil(t *testing.T) {
	t.Parallel()
	assert.Equal(t, slog.DiscardHandler, ratelog.Patient(nil).Handler())
}
