package sds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime/debug"
	"sync"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/peerkey"
)

// stream connects a session to its client and to the table. The goroutine of the HTTP request receives requests.
// Other goroutines send responses and news from the table, and end when done: an idle stream has one.
type stream struct {
	h      *Handler
	ctx    context.Context
	end    context.CancelCauseFunc
	call   *grpchttp.Call
	inbox  inbox
	pushes sync.WaitGroup

	out sync.Mutex // held while a response is sent; locked while mu is held, to keep responses in order

	mu      sync.Mutex
	session *session
	held    holdings
	closed  bool     // all watches have ended
	news    []*watch // reused
}

// serveStream returns the method StreamSecrets or DeltaSecrets.
func (h *Handler) serveStream(delta bool) grpchttp.Method {
	return func(ctx context.Context, call *grpchttp.Call) error {
		s, err := h.newStream(ctx, call, delta)
		if err != nil {
			return err
		}
		defer s.end(nil)
		defer context.AfterFunc(s.ctx, s.call.StopReceiving)()
		defer context.AfterFunc(h.table.ctx, func() { s.end(errClosing()) })()
		defer s.close()
		return s.run()
	}
}

// newStream returns a stream. The stream is counted until it is closed.
func (h *Handler) newStream(ctx context.Context, call *grpchttp.Call, delta bool) (*stream, error) {
	p := peerkey.HolderOf(call.Request())
	if err := h.enter(call.Request(), p); err != nil {
		return nil, err
	}
	s := &stream{h: h, call: call, session: newSession(delta, h.opts.MaxNames), held: holdings{h: h, peer: p}}
	s.ctx, s.end = context.WithCancelCause(ctx)
	if h.opts.Resolve != nil {
		s.session.allow = s.resolve
	}
	s.inbox.wake = func() { s.pushes.Go(s.push) }
	return s, nil
}

// run receives until the stream ends.
func (s *stream) run() error {
	if err := s.call.SendHeader(); err != nil { // proxies between client and server wait for it
		return err
	}
	for {
		msg, err := s.call.Receive()
		if err == nil {
			err = s.request(msg)
		}
		if err == nil {
			continue
		}
		if cause := context.Cause(s.ctx); cause != nil {
			return ended(cause)
		}
		s.h.badRequest(s.ctx, s.held.peer, err)
		if errors.Is(err, io.EOF) {
			return nil
		}
		return err // nil would tell the client that its refused message was accepted
	}
}

// ended returns the reason why the context of a request is done: a push failed, the client left (and does not see
// it), its deadline passed, or the handler was closed.
func ended(cause error) error {
	switch e, ok := errors.AsType[*grpchttp.Error](cause); {
	case ok:
		return e
	case errors.Is(cause, context.DeadlineExceeded):
		return grpchttp.Errorf(grpchttp.DeadlineExceeded, "sds: the deadline of the stream has passed")
	}
	if p, ok := errors.AsType[*panicked](cause); ok {
		panic(p) // net/http recovers it and ends only this stream
	}
	return errClosing()
}

// panicked is a panic of a hook in one of our goroutines.
type panicked struct {
	value any
	stack []byte
}

func (p *panicked) Error() string { return fmt.Sprintf("%v\n%s", p.value, p.stack) }

// close ends the watches, after which no push begins, and waits for pushes already begun.
func (s *stream) close() {
	s.mu.Lock()
	s.closed = true
	for _, it := range s.session.items {
		s.unwatch(it)
	}
	s.held.release()
	s.mu.Unlock()
	s.pushes.Wait()
	s.h.open.Give(s.held.peer, 1)
}

// request handles a message, and begins to send the response that is then due.
func (s *stream) request(msg []byte) error {
	r, err := s.next(msg) // a call of its own, so that an idle stream keeps a small stack
	if r != nil {
		s.pushes.Go(func() { s.send(r) })
	}
	return err
}

// next handles a message, unless it is nil, and the news in the inbox. It returns the response that is due, with out
// locked, or nil. The client's answer often arrives before the send has returned, and is handled without waiting.
func (s *stream) next(msg []byte) (*response, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if msg != nil {
		if err := s.take(msg); err != nil {
			return nil, err
		}
	}
	s.collect()
	r := s.session.next()
	if r != nil {
		s.out.Lock()
	}
	return r, nil
}

// send sends a response that next returned.
func (s *stream) send(r *response) {
	defer s.out.Unlock()
	s.h.counts.responses.Inc()
	s.h.pushed(r.push)
	if err := s.call.Send(r.encode()); err != nil {
		s.end(err)
	}
}

// take handles a message.
func (s *stream) take(msg []byte) error {
	r, err := decode(msg, s.session.delta, s.session.maxNames)
	if err != nil {
		return err
	}
	out, err := s.session.request(r)
	if err == nil {
		err = s.held.hold(s.session)
	}
	for _, it := range out.dropped {
		s.unwatch(it)
	}
	if err != nil {
		return err
	}
	if out.over > 0 {
		s.h.refused(s.ctx, s.held.peer, "a name is one too many for its stream", errTooMany(s.session.maxNames))
	}
	if out.nack != nil {
		s.h.rejected(s.ctx, s.held.peer, out.nack)
	}
	for _, it := range out.added {
		if !s.resolve(it) {
			s.session.news(it, absent)
		}
	}
	return nil
}

// resolve resolves a name for the client again, and reports whether the client may have it. From then on the stream
// watches the result. A name that the client may not have is not looked up; the table tells when to resolve it again.
func (s *stream) resolve(it *item) bool {
	turn := s.h.table.turn.Load()
	source, ok := s.h.resolve(s.ctx, s.held.peer, s.session.node, it)
	if s.closed || it.watch != nil && it.watch.res.source == source {
		return ok
	}
	if ok {
		it.cur = nil
	}
	s.unwatch(it)
	it.watch = s.h.table.watch(source, it.name, &s.inbox, it, turn)
	return ok
}

// push sends the news of the table.
func (s *stream) push() {
	defer func() {
		if v := recover(); v != nil {
			s.end(&panicked{v, debug.Stack()})
		}
	}()
	if r, _ := s.next(nil); r != nil {
		s.send(r)
	}
}

// collect passes the news in the inbox to the session.
func (s *stream) collect() {
	for s.news = s.inbox.take(s.news[:0]); len(s.news) > 0; s.news = s.inbox.take(s.news[:0]) {
		for _, w := range s.news {
			s.tell(w)
		}
		clear(s.news)
	}
}

// tell passes the news of one watch to the session.
func (s *stream) tell(w *watch) {
	it := w.item
	if it.watch != w {
		return // no longer wanted
	}
	if w.res.source == "" { // the name was refused
		s.resolve(it)
		return
	}
	switch st := w.res.cur.Load(); {
	case st != nil && st.entry != nil:
		s.session.news(it, st) // the session calls allow before it sends
	case s.session.allow != nil && !s.resolve(it):
		s.session.news(it, absent)
	case it.watch == w && st != nil && st.err == nil:
		s.session.news(it, st)
	}
}

// resolve calls [Options].Resolve, which decides whether the client may have a name, and which secret it gets under
// that name: "" if it may not have it. It logs the first refusal.
func (h *Handler) resolve(ctx context.Context, p peerkey.Holder, node string, it *item) (source string, ok bool) {
	if h.opts.Resolve == nil {
		return it.name, true
	}
	source, err := h.opts.Resolve(ctx, it.name)
	if err == nil && source == "" {
		err = errors.New("it returned no name")
	}
	if err != nil && !it.denied {
		h.table.log.LogOf(slog.LevelWarn, p.Name(), "sds: resource refused to a client", "Resolve says no",
			append(attrs(ctx, p),
				slog.String("node", node), slog.String("name", clip(it.name)), slog.Any("err", err))...)
	}
	if it.denied = err != nil; it.denied {
		return "", false
	}
	return source, true
}

func (s *stream) unwatch(it *item) {
	if it.watch != nil {
		s.h.table.unwatch(it.watch)
		it.watch = nil
	}
}

func errNotFound(name string) error {
	return grpchttp.Errorf(grpchttp.NotFound, "sds: no resource with the name %q", clip(name))
}
