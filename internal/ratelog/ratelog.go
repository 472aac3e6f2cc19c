// Package ratelog logs events that a peer can cause at will, such as refused requests: the first event of a kind at
// once, and later ones as one line with their number in each interval. So the log misses no kind, even in a flood.
//
//	log := ratelog.New(logger, 0)
//	…
//	log.Warn("sds: request refused", "no header", slog.Int("uid", uid))
//
// [Patient] is for other logging: a log that blocks holds up nothing.
package ratelog

import (
	"cmp"
	"context"
	"log"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Limits on the kinds of events with lines of their own. Kinds beyond the limit are counted under Other.
const (
	maxKinds = 128
	maxNamed = 12 // kinds with a peer's name; Patient queues 16 lines
	Other    = "other reasons"
)

// Log is a logger that counts. New creates one. It is safe for concurrent use, and has no goroutine: a timer runs
// while events come. Its logger is Patient.
type Log struct {
	logger   *slog.Logger
	interval time.Duration

	mu    sync.Mutex
	kinds map[kind]*events
	named map[slog.Level]int // kinds with a peer's name
}

type kind struct {
	level                 slog.Level
	message, reason, name string
}

type events struct {
	count int         // since the last line
	last  []slog.Attr // of the newest event
}

// New returns a Log that writes to logger; nil discards. An interval of 0 means a minute.
func New(logger *slog.Logger, interval time.Duration) *Log {
	return &Log{logger: Patient(logger), interval: cmp.Or(interval, time.Minute), kinds: map[kind]*events{},
		named: map[slog.Level]int{}}
}

// Warn calls Log with level Warn.
func (l *Log) Warn(message, reason string, attrs ...slog.Attr) {
	l.Log(slog.LevelWarn, message, reason, attrs...)
}

// Log logs an event. Events are of one kind if level, message and reason are equal. reason must be a text from a
// small fixed set, never chosen by a peer. The first event of a kind is written at once, with attrs. Later events are
// written at the end of the interval, as one line with the attrs of the newest and the attributes count and interval.
// After an interval without events, a kind starts anew.
func (l *Log) Log(level slog.Level, message, reason string, attrs ...slog.Attr) {
	l.log(kind{level: level, message: message, reason: reason}, attrs)
}

// LogOf is like Log, for events with a name that a peer can choose, such as its ID: each of the first 12 names of
// a level has its own lines, so that the refusal of a second peer is seen. Further names share the lines of their reason.
func (l *Log) LogOf(level slog.Level, name, message, reason string, attrs ...slog.Attr) {
	l.log(kind{level, message, reason, name}, attrs)
}

func (l *Log) log(k kind, attrs []slog.Attr) {
	level := k.level
	if !l.logger.Enabled(context.Background(), level) {
		return
	}
	l.mu.Lock()
	e, known := l.kinds[k]
	if !known && k.name != "" && l.named[k.level] >= maxNamed {
		k.name = ""
		e, known = l.kinds[k]
	}
	if !known && len(l.kinds) >= maxKinds {
		k = kind{level: level, message: Other, reason: Other}
		e, known = l.kinds[k]
	}
	if known {
		e.count++
		e.last = slices.Clone(attrs)
		l.mu.Unlock()
		return
	}
	l.kinds[k] = &events{}
	if k.name != "" {
		l.named[k.level]++
	}
	l.mu.Unlock()
	l.write(k, attrs)
	time.AfterFunc(l.interval, func() { l.flush(k) })
}

// flush writes the events since the last line of a kind, or forgets the kind.
func (l *Log) flush(k kind) {
	l.mu.Lock()
	e := l.kinds[k]
	count, last := e.count, e.last
	if count == 0 {
		delete(l.kinds, k)
		if k.name != "" {
			l.named[k.level]--
		}
	}
	e.count, e.last = 0, nil
	l.mu.Unlock()
	if count == 0 {
		return
	}
	l.write(k, append(last, slog.Int("count", count), slog.Duration("interval", l.interval)))
	time.AfterFunc(l.interval, func() { l.flush(k) })
}

func (l *Log) write(k kind, attrs []slog.Attr) {
	l.logger.LogAttrs(context.Background(), k.level, k.message,
		append([]slog.Attr{slog.String("reason", k.reason)}, attrs...)...)
}

// Patient returns a logger that writes to logger; nil discards. A handler that blocks, such as a handler on a full
// pipe, delays one caller by a tenth of a second, and no more callers until it has taken a line. While 16 lines wait,
// further lines are dropped. A handler that panics ends the program, even where net/http would have recovered,
// because it runs in a separate goroutine.
func Patient(logger *slog.Logger) *slog.Logger {
	if logger == nil {
		return slog.New(slog.DiscardHandler)
	}
	h := logger.Handler()
	if _, is := h.(*patient); is {
		return logger
	}
	return slog.New(&patient{h, new(lines)})
}

type patient struct {
	to slog.Handler
	*lines
}

func (p *patient) Enabled(ctx context.Context, level slog.Level) bool {
	return p.to.Enabled(ctx, level)
}

// lines are the lines on their way to a handler.
type lines struct {
	waiting atomic.Int32
	blocked atomic.Bool // a line has waited for too long
}

const (
	maxWaiting = 16
	patience   = 100 * time.Millisecond
)

func (p *patient) Handle(ctx context.Context, r slog.Record) error {
	if p.waiting.Add(1) > maxWaiting {
		p.waiting.Add(-1)
		return nil
	}
	done := make(chan struct{})
	go func() {
		_ = p.to.Handle(ctx, r) // a Logger ignores the error
		p.waiting.Add(-1)
		p.blocked.Store(false)
		close(done)
	}()
	if !p.blocked.Load() {
		select {
		case <-done:
		case <-time.After(patience):
			p.blocked.Store(true)
		}
	}
	return nil
}

func (p *patient) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &patient{p.to.WithAttrs(attrs), p.lines}
}

func (p *patient) WithGroup(name string) slog.Handler {
	return &patient{p.to.WithGroup(name), p.lines}
}

// ErrorLog returns a logger for the ErrorLog of an [http.Server]. It logs failed TLS handshakes, which any peer can
// cause, as events of l at the given level. Everything else, such as the panic of a handler, goes to the standard
// logger, as without an ErrorLog.
func ErrorLog(l *Log, level slog.Level) *log.Logger { return log.New(errorLog{l, level}, "", 0) }

type errorLog struct {
	log   *Log
	level slog.Level
}

// Write handles one line of net/http.
func (e errorLog) Write(p []byte) (int, error) {
	line := strings.TrimSuffix(string(p), "\n")
	if rest, ok := strings.CutPrefix(line, "http: TLS handshake error from "); ok {
		remote, err, _ := strings.Cut(rest, ": ")
		e.log.Log(e.level, "http: TLS handshake error", "handshake failed", slog.String("remote", remote),
			slog.String("err", err))
	} else {
		log.Print(line)
	}
	return len(p), nil
}
