package sds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/grpchttp"
)

// stream connects a session to its client and to the table. The goroutine of the HTTP request receives,
// and answers what it has received. News of the table is sent by a goroutine that lasts until that is
// done, so that an idle stream has one goroutine.
type stream struct {
	h      *Handler
	ctx    context.Context
	end    context.CancelCauseFunc
	call   *grpchttp.Call
	inbox  inbox
	pushes sync.WaitGroup

	mu      sync.Mutex // held while a response is sent
	session *session
	news    []*watch // reused
	refused error    // what ends a strict stream
}

// serveStream returns the method StreamSecrets or DeltaSecrets.
func (h *Handler) serveStream(delta bool) grpchttp.Method {
	return func(ctx context.Context, call *grpchttp.Call) error {
		ctx, end := context.WithCancelCause(ctx)
		defer end(nil)
		s := &stream{h: h, ctx: ctx, end: end, call: call, session: newSession(delta, h.opts.MaxNames, h.opts.Wildcard, h.frames)}
		s.session.allow = s.mayHave
		s.inbox.wake = func() {
			s.pushes.Add(1)
			go s.push()
		}
		defer context.AfterFunc(ctx, call.StopReceiving)()
		defer context.AfterFunc(h.table.ctx, func() { end(errClosing()) })()
		h.count(1)
		defer h.count(-1)
		defer s.close()
		return s.run()
	}
}

// run receives until the stream ends.
func (s *stream) run() error {
	if err := s.call.SendHeader(); err != nil { // proxies in between wait for it
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
		if errors.Is(err, io.EOF) {
			return nil
		}
		return err // nil would tell the client that its refused message was fine
	}
}

// ended says why a request is over whose context is done: a push has failed, its client has gone and does
// not hear it, its deadline has passed, or the handler is closed.
func ended(cause error) error {
	switch e, ok := errors.AsType[*grpchttp.Error](cause); {
	case ok:
		return e
	case errors.Is(cause, context.DeadlineExceeded):
		return grpchttp.Errorf(grpchttp.DeadlineExceeded, "sds: the deadline of the stream has passed")
	}
	if p, ok := errors.AsType[*panicked](cause); ok {
		panic(p) // for net/http, which ends this stream and no other
	}
	return errClosing()
}

// panicked is a panic of a hook in a goroutine of ours.
type panicked struct {
	value any
	stack []byte
}

func (p *panicked) Error() string { return fmt.Sprintf("%v\n%s", p.value, p.stack) }

// close ends the watches, after which no push begins, and waits for those that have begun.
func (s *stream) close() {
	s.mu.Lock()
	for _, it := range s.session.items {
		s.unwatch(it)
	}
	s.mu.Unlock()
	s.pushes.Wait()
}

// request takes a message and answers it.
func (s *stream) request(msg []byte) error {
	r, err := decode(msg, s.session.delta, s.session.maxNames)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out, err := s.session.request(r)
	if err != nil {
		return err
	}
	if out.nack != nil {
		out.nack.Time = time.Now()
		s.h.nacked(s.ctx, out.nack)
	}
	for _, it := range out.dropped {
		s.unwatch(it)
	}
	for _, it := range out.added {
		if s.allowed(it) {
			it.watch = s.h.table.watch(it.name, &s.inbox, it)
		} else if err := s.tell(it, absent, nil); err != nil {
			return err
		}
	}
	return s.send()
}

// push sends the news of the table.
func (s *stream) push() {
	defer s.pushes.Done()
	defer func() {
		if v := recover(); v != nil {
			s.end(&panicked{v, debug.Stack()})
		}
	}()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.send(); err != nil {
		s.end(err)
	}
}

// send hands what is in the inbox to the session, and sends the response that it has.
func (s *stream) send() error {
	if err := s.collect(); err != nil {
		return err
	}
	r := s.session.next()
	if s.refused != nil {
		return s.refused
	}
	if r == nil {
		return nil
	}
	return s.call.SendFrame(r.frame.wire)
}

// allowed asks Authorize, and logs the first refusal of a name.
func (s *stream) allowed(it *item) bool {
	if s.h.opts.Authorize == nil {
		return true
	}
	err := s.h.opts.Authorize(s.ctx, it.name)
	if err != nil && !it.denied {
		it.denied = true
		s.h.logDenied(s.ctx, s.session.node, it.name, err)
	}
	return err == nil
}

// mayHave is allowed for content that is about to be sent.
func (s *stream) mayHave(it *item) bool {
	ok := s.allowed(it)
	if !ok && s.h.opts.Strict && it.asked {
		s.refused = errNotFound(it.name)
	}
	return ok
}

func (h *Handler) logDenied(ctx context.Context, node, name string, err error) {
	h.opts.Logger.LogAttrs(ctx, slog.LevelWarn, "sds: resource refused to a client",
		slog.String("node", node), slog.String("name", name), slog.Any("err", err))
}

func (s *stream) unwatch(it *item) {
	if it.watch != nil {
		s.h.table.unwatch(it.watch)
		it.watch = nil
	}
}

// collect hands what is in the inbox to the session.
func (s *stream) collect() error {
	s.news = s.inbox.take(s.news[:0])
	defer clear(s.news)
	for _, w := range s.news {
		it := w.item
		if it.watch != w {
			continue // no longer wanted
		}
		k, st := unknown, w.res.cur.Load()
		switch {
		case st == nil, st.err != nil:
			continue
		case st.entry == nil:
			k = absent
		default:
			k = present
		}
		if err := s.tell(it, k, st.entry); err != nil {
			return err
		}
	}
	return nil
}

// tell hands one piece of news to the session.
func (s *stream) tell(it *item, k knowledge, e *entry) error {
	if k == absent && s.h.opts.Strict && it.asked {
		return errNotFound(it.name)
	}
	s.session.news(it, k, e)
	return nil
}

func errNotFound(name string) error {
	return grpchttp.Errorf(grpchttp.NotFound, "sds: no resource with the name %q", clip(name))
}
