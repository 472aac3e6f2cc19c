package sds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"connectrpc.com/connect"
)

// serveStream returns the handler of StreamSecrets or DeltaSecrets.
func (h *Handler) serveStream(delta bool) func(context.Context, *connect.BidiStream[request, response]) error {
	return func(ctx context.Context, conn *connect.BidiStream[request, response]) error {
		h.mu.Lock()
		h.streams++
		h.mu.Unlock()
		s := &stream{
			h:       h,
			conn:    conn,
			inbox:   newInbox(),
			session: newSession(delta, h.opts.MaxNames, h.opts.Wildcard, strconv.FormatUint(uint64(rand.Uint32()), 36)+"-"),
		}
		defer func() {
			for _, it := range s.session.items {
				s.unwatch(it)
			}
			h.mu.Lock()
			h.streams--
			h.mu.Unlock()
		}()
		return s.run(ctx)
	}
}

// stream connects a session to its client and to the table. One goroutine receives, the other does
// all the rest.
type stream struct {
	h       *Handler
	conn    *connect.BidiStream[request, response]
	session *session
	inbox   *inbox
	news    []*watch // reused
	refused error    // what ends a strict stream
}

func (s *stream) run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	s.session.allow = func(it *item) bool {
		ok := s.allowed(ctx, it)
		if !ok && s.h.opts.Strict && it.asked {
			s.refused = errNotFound(it.name)
		}
		return ok
	}
	if err := s.conn.Send(nil); err != nil { // the headers: proxies in between wait for them
		return err
	}
	requests := make(chan *request)
	failed := make(chan error, 1)
	ctx.Value(receiverKey{}).(*sync.WaitGroup).Go(func() {
		for {
			r, err := s.conn.Receive()
			if err != nil {
				failed <- err
				return
			}
			select {
			case requests <- r:
			case <-ctx.Done():
				return
			}
		}
	})
	for {
		select {
		case r := <-requests:
			if err := s.request(ctx, r); err != nil {
				return err
			}
		case err := <-failed:
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err // nil would tell the client that its refused message was fine
		case <-s.inbox.wake:
		case <-ctx.Done():
			return ended(ctx)
		case <-s.h.done:
			return errClosing()
		}
		if err := s.collect(ctx); err != nil {
			return err
		}
		r := s.session.next()
		if s.refused != nil {
			return s.refused
		}
		if r != nil {
			if err := s.conn.Send(r); err != nil {
				return err
			}
		}
	}
}

// ended says why a context is done: its client has gone and does not hear it, or its deadline
// passed, or the server is going.
func ended(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return connect.NewError(connect.CodeDeadlineExceeded, errors.New("sds: the deadline of the stream has passed"))
	}
	return errClosing()
}

func (s *stream) request(ctx context.Context, r *request) error {
	out, err := s.session.request(r)
	if err != nil {
		return err
	}
	if out.nack != nil {
		out.nack.Time = time.Now()
		s.h.nacked(ctx, out.nack)
	}
	for _, it := range out.dropped {
		s.unwatch(it)
	}
	for _, it := range out.added {
		if !s.allowed(ctx, it) {
			if err := s.tell(it, absent, nil); err != nil {
				return err
			}
			continue
		}
		it.watch = s.h.table.watch(it.name, s.inbox, it)
	}
	return nil
}

// allowed asks Authorize, and logs the first refusal of a name.
func (s *stream) allowed(ctx context.Context, it *item) bool {
	if s.h.opts.Authorize == nil {
		return true
	}
	err := s.h.opts.Authorize(ctx, it.name)
	if err != nil && !it.denied {
		it.denied = true
		s.h.logDenied(ctx, s.session.node, it.name, err)
	}
	return err == nil
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
func (s *stream) collect(ctx context.Context) error {
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
	if k == absent {
		if s.h.opts.Strict && it.asked {
			return errNotFound(it.name)
		}
		e = nil
	}
	s.session.news(it, k, e)
	return nil
}

func errNotFound(name string) error {
	return connect.NewError(connect.CodeNotFound, fmt.Errorf("sds: no resource with the name %q", clip(name)))
}
