package sds

import (
	"context"
	crand "crypto/rand"
	"errors"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/certs/secretset"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/renew"
)

const (
	lookupTimeout = 30 * time.Second // after which a look-up counts as failed and is repeated
	firstRetry    = 500 * time.Millisecond
	emptyRetry    = 5 * time.Second // while there is nothing to serve
	lastRetry     = 30 * time.Second
)

// patience is the retry policy for failed look-ups, and for the streams of a client.
var patience = renew.Patience{Low: firstRetry / 2, Impatient: emptyRetry, Longest: lastRetry, Wish: lastRetry}

// waitAfter returns how long to wait after f. If have is set, a secret in use expires at end; zero means never.
// Otherwise end is zero.
func waitAfter(f renew.Failure, have bool, end time.Time) time.Duration {
	if have && end.IsZero() {
		return patience.WaitEndless(f, rand.Float64())
	}
	left := max(time.Until(end), 0)
	return patience.Wait(f, left, left, rand.Float64())
}

// table holds the names that streams watch, each with its current state in the source. It looks up and encodes a name
// once, outside of any lock, for all streams that watch it, and forgets it when the last watch ends. A secret that
// clients ask for under another name than the source's is a separate entry, as its encoding contains the clients'
// name.
type table struct {
	src    Source
	log    *ratelog.Log
	failed atomic.Uint64   // failed look-ups
	salt   []byte          // for the versions of guessable content
	ctx    context.Context // done when the table is closed
	cancel context.CancelFunc
	wg     sync.WaitGroup // the loop, which waits for its look-ups

	mu    sync.Mutex
	loop  renew.Loop[*resource]
	names map[string]map[string]*resource // by the source's name, then by the clients' name

	// turn counts how often streams were told to ask again. It is written with mu locked.
	turn atomic.Uint64
}

// resource is one watched name.
type resource struct {
	source string                // its name in the source; "" for streams that were refused the name, and ask again
	name   string                // its name in the clients' requests
	cur    atomic.Pointer[state] // nil before the first look-up is done, and again once its secret has expired

	// table.mu guards the rest.
	renew.Entry
	watches map[*watch]struct{}
	dirty   bool // changed during its look-up
}

// state is the known state of a name: an entry; an error, if the look-up failed and no older entry can be served; or
// both nil, if there is no such name.
type state struct {
	entry *entry
	err   error
}

// watch is one stream's interest in one name.
type watch struct {
	res   *resource
	inbox *inbox
	item  *item // the stream's
	dirty bool  // in the inbox; guarded by inbox.mu
}

// inbox tells one stream which of its watches have news. It holds each watch at most once, so nothing piles up for a
// busy stream, which finds the newest state.
type inbox struct {
	wake func() // called when the empty inbox gets news; it returns at once

	mu   sync.Mutex
	news []*watch
}

func (in *inbox) put(w *watch) {
	in.mu.Lock()
	first := len(in.news) == 0
	if !w.dirty {
		w.dirty = true
		in.news = append(in.news, w)
	}
	in.mu.Unlock()
	if first {
		in.wake()
	}
}

// take empties the inbox into buf.
func (in *inbox) take(buf []*watch) []*watch {
	in.mu.Lock()
	defer in.mu.Unlock()
	for _, w := range in.news {
		w.dirty = false
	}
	buf = append(buf, in.news...)
	clear(in.news)
	in.news = in.news[:0]
	return buf
}

func newTable(src Source, log *slog.Logger) *table {
	t := &table{
		src: src, log: ratelog.New(log, 0), salt: []byte(crand.Text()),
		names: make(map[string]map[string]*resource),
	}
	t.loop.Mu, t.loop.Attempt = &t.mu, t.lookUp
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.wg.Go(func() { t.loop.Run(t.ctx) })
	return t
}

// watch notifies in from now on about the source's secret, which clients ask for by name. It notifies at once if the
// state is known. turn is the time of the decision for this secret: if refresh or changed ran since, watch notifies
// at once as well, as a look-up may be slow. If source is "", the name was refused: it is not looked up, and watch
// notifies in to ask again when the secret of that name changes or all streams must ask again.
func (t *table) watch(source, name string, in *inbox, it *item, turn uint64) *watch {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.names[source][name]
	if r == nil {
		r = &resource{source: source, name: name, watches: make(map[*watch]struct{})}
		if t.names[source] == nil {
			t.names[source] = make(map[string]*resource, 1)
		}
		t.names[source][name] = r
		if source != "" {
			t.loop.Put(r, 0)
		}
	}
	w := &watch{res: r, inbox: in, item: it}
	r.watches[w] = struct{}{}
	st := r.cur.Load() // nil: the pending look-up will notify
	if st != nil && st.entry != nil && secretset.Expired(st.entry.secret) {
		st = nil
		r.cur.Store(nil) // existing streams keep it; a new stream gets what the source returns
		t.loop.Put(r, 0)
	}
	if st != nil || t.turn.Load() != turn {
		in.put(w)
	}
	return w
}

// refresh tells all streams to ask again about all their names.
func (t *table) refresh() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.turn.Add(1)
	for _, rs := range t.names {
		for _, r := range rs {
			for w := range r.watches {
				w.inbox.put(w)
			}
		}
	}
}

// unwatch ends a watch. News already in the inbox stays there.
func (t *table) unwatch(w *watch) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := w.res
	delete(r.watches, w)
	if rs := t.names[r.source]; len(r.watches) == 0 && rs[r.name] == r {
		if delete(rs, r.name); len(rs) == 0 {
			delete(t.names, r.source)
		}
		if r.source != "" {
			t.loop.Remove(r)
			r.Cancel()
		}
	}
}

// changed is the source's callback.
func (t *table) changed(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.turn.Add(1)
	if name == "" {
		return
	}
	for _, r := range t.names[name] {
		r.dirty = r.Busy() // the pending look-up may return the old secret
		t.loop.Put(r, 0)
	}
	if refused := t.names[""][name]; refused != nil {
		for w := range refused.watches {
			w.inbox.put(w)
		}
	}
}

// lookUp is one attempt of the loop.
func (t *table) lookUp(ctx context.Context, r *resource) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	e, err := t.entry(ctx, r.source, r.name)
	t.mu.Lock()
	wait, say := t.found(r, e, err)
	if r.dirty {
		r.dirty, wait = false, 0
	}
	t.loop.Done(r, wait)
	t.mu.Unlock()
	say() // a logger can block
}

// entry asks the source for a secret, and encodes it under the clients' name.
func (t *table) entry(ctx context.Context, source, name string) (*entry, error) {
	s, err := t.src.GenerateSecret(ctx, source)
	if err != nil {
		return nil, err
	}
	return newEntry(name, s, t.salt)
}

// found publishes the result of a look-up. It returns how long to wait for the next one, and a function that logs it.
func (t *table) found(r *resource, e *entry, err error) (wait time.Duration, say func()) {
	wait, say = renew.Longest, func() {}
	old := r.cur.Load()
	switch {
	case r.Removed() || t.ctx.Err() != nil: // no stream waits for it
	case err == nil:
		r.Succeeded()
		if old == nil || old.entry == nil || old.entry.version != e.version {
			t.publish(r, &state{entry: e})
		}
	case errors.Is(err, fs.ErrNotExist):
		r.Succeeded()
		if old == nil || old.entry != nil || old.err != nil {
			say = t.says(r, "sds: no such resource; it is served when it appears", "the source does not have it")
			t.publish(r, &state{})
		}
	default:
		have := old != nil && old.entry != nil
		var end time.Time
		if have {
			end = old.entry.secret.NotAfter()
		}
		wait = waitAfter(r.Failed(err), have, end)
		t.failed.Add(1)
		say = t.says(r, "sds: look-up failed", "the source failed",
			slog.Any("err", err), slog.Duration("retry_in", wait))
		if !have { // otherwise the old entry stays in use
			t.publish(r, &state{err: err})
		}
	}
	return wait, say
}

// says returns a function that logs something about r.
func (t *table) says(r *resource, message, reason string, attrs ...slog.Attr) func() {
	attrs = append([]slog.Attr{slog.String("name", clip(r.name))}, attrs...)
	if r.source != r.name {
		attrs = append(attrs, slog.String("source_name", clip(r.source)))
	}
	return func() { t.log.Warn(message, reason, attrs...) }
}

// publish makes s the state of r and tells its watches.
func (t *table) publish(r *resource, s *state) {
	r.cur.Store(s)
	for w := range r.watches {
		w.inbox.put(w)
	}
}

func (t *table) versions() map[string]string {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := make(map[string]string, len(t.names))
	for source, rs := range t.names {
		if source == "" {
			continue
		}
		for name, r := range rs {
			if name != source {
				name += " (" + source + ")"
			}
			m[name] = ""
			if s := r.cur.Load(); s != nil && s.entry != nil {
				m[name] = s.entry.version.String()
			}
		}
	}
	return m
}

// close cancels look-ups and waits for them.
func (t *table) close() {
	t.cancel()
	t.wg.Wait()
}
