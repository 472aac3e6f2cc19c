package sds

import (
	"context"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/peerkey"
)

// fetch answers one request from the table, like a stream that ends with its first response. It waits until all names
// have been looked up.
//
// The response contains the names that exist. If none does, fetch returns an error: Envoy would take an empty
// response as permission to open its port without a certificate.
func (h *Handler) fetch(ctx context.Context, p peerkey.Holder, r *request) (*response, error) {
	s := newSession(false, h.opts.MaxNames, h.frames)
	out, err := s.request(r)
	if err != nil {
		return nil, err
	}
	held := holdings{h: h, peer: p}
	if err := held.hold(s); err != nil {
		h.badRequest(ctx, p, err)
		return nil, err
	}
	defer held.release()
	if len(out.added) == 0 {
		return nil, grpchttp.Errorf(grpchttp.InvalidArgument, "sds: fetch: name at least one resource")
	}
	l := lookups{h: h, peer: p, node: s.node, items: out.added}
	defer l.end()
	if err := l.wait(ctx); err != nil {
		return nil, err
	}
	return l.answer(ctx)
}

// lookups are the names of a fetch.
type lookups struct {
	h     *Handler
	peer  peerkey.Holder
	node  string
	items []*item // without a watch if the client may not have the name
}

// wait waits until the table has looked up each name.
func (l *lookups) wait(ctx context.Context) error {
	news := make(chan struct{}, 1)
	in := &inbox{wake: func() {
		select {
		case news <- struct{}{}:
		default:
		}
	}}
	turn := l.h.table.turn.Load()
	for _, it := range l.items {
		if source, ok := l.h.resolve(ctx, l.peer, l.node, it); ok {
			it.watch = l.h.table.watch(source, it.name, in, nil, turn)
		}
	}
	for _, it := range l.items {
		if it.watch == nil {
			continue
		}
		for it.cur = it.watch.res.cur.Load(); it.cur == nil; it.cur = it.watch.res.cur.Load() {
			select {
			case <-news:
				in.take(nil)
			case <-ctx.Done():
				return ended(ctx.Err())
			case <-l.h.table.ctx.Done():
				return errClosing()
			}
		}
	}
	return nil
}

// end ends the watches that wait has begun.
func (l *lookups) end() {
	for _, it := range l.items {
		if it.watch != nil {
			l.h.table.unwatch(it.watch)
		}
	}
}

// answer returns the secrets of the names. It resolves them again, as much may have changed during wait.
func (l *lookups) answer(ctx context.Context) (*response, error) {
	var resp response
	failed := false
	for _, it := range l.items {
		if it.watch == nil {
			continue
		}
		source, ok := l.h.resolve(ctx, l.peer, l.node, it)
		if !ok {
			continue
		}
		if source != it.watch.res.source { // the name resolves to another secret now; the client asks again
			failed = true
			continue
		}
		if st := it.watch.res.cur.Load(); st != nil {
			it.cur = st
		}
		switch {
		case it.cur.entry != nil:
			resp.entries = append(resp.entries, it.cur.entry)
			resp.version = resp.version.xor(it.cur.entry.version)
		case it.cur.err != nil:
			failed = true
		}
	}
	switch {
	case len(resp.entries) > 0:
		return &resp, nil
	case failed: // the reason is in our log; the client does not need it
		return nil, grpchttp.Errorf(grpchttp.Unavailable, "sds: fetch: the secret is not available now; try again")
	}
	return nil, errNotFound(l.items[0].name)
}

// serveFetch serves FetchSecrets over gRPC.
func (h *Handler) serveFetch(ctx context.Context, call *grpchttp.Call) error {
	p := peerkey.HolderOf(call.Request())
	if err := h.enter(call.Request(), p); err != nil {
		return err
	}
	defer h.open.Give(p, 1)
	return grpchttp.Unary(func(ctx context.Context, msg []byte) ([]byte, error) {
		r, err := decode(msg, false, h.opts.MaxNames)
		if err != nil {
			return nil, err
		}
		resp, err := h.fetch(ctx, p, r)
		if err != nil {
			return nil, err
		}
		return resp.encode(""), nil // nothing acknowledges it
	})(ctx, call)
}
