package sds

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/peerkey"
)

// fetch answers one request from the source.
//
// The response contains the names that exist. If none does, fetch returns an error: Envoy would take an empty
// response as permission to open its port without a certificate.
func (h *Handler) fetch(ctx context.Context, p peerkey.Holder, r *request) (*response, error) {
	s := newSession(false, h.opts.MaxNames)
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
	resp, failed := new(response), false
	for _, f := range h.find(ctx, p, s.node, out.added) {
		// Resolve again, as much may have changed during the look-ups.
		source, ok := h.resolve(ctx, p, s.node, f.item)
		switch {
		case ctx.Err() != nil:
			return nil, ended(ctx.Err())
		case h.table.ctx.Err() != nil:
			return nil, errClosing()
		case !ok, errors.Is(f.err, fs.ErrNotExist):
		case f.err != nil, source != f.source: // the client asks again
			failed = true
		default:
			resp.entries = append(resp.entries, f.entry)
			resp.version = resp.version.xor(f.entry.version)
		}
	}
	switch {
	case len(resp.entries) > 0:
		return resp, nil
	case failed: // the reason is in our log; the client does not need it
		return nil, grpchttp.Errorf(grpchttp.Unavailable, "sds: fetch: the secret is not available now; try again")
	}
	return nil, errNotFound(out.added[0].name)
}

// found is the result of the look-up for a fetch.
type found struct {
	item   *item
	source string
	entry  *entry
	err    error
}

// find looks up the names that the client may have.
func (h *Handler) find(ctx context.Context, p peerkey.Holder, node string, items []*item) (all []found) {
	lookup, cancel := context.WithTimeout(h.table.ctx, lookupTimeout) // without the values of ctx
	defer cancel()
	defer context.AfterFunc(ctx, cancel)()
	for _, it := range items {
		source, ok := h.resolve(ctx, p, node, it)
		if !ok {
			continue
		}
		e, err := h.table.entry(lookup, source, it.name)
		all = append(all, found{it, source, e, err})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			h.table.failed.Add(1)
			h.opts.Logger.Debug("sds: look-up failed", slog.String("name", clip(it.name)), slog.Any("err", err))
		}
	}
	return all
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
		return resp.encode(), nil // without a nonce, as nothing acknowledges it
	})(ctx, call)
}
