package sds

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"mime"
	"net/http"
	"strconv"

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/strictjson"
)

// fetch answers one request from the table, like a stream that ends with its first response. It waits for names that were not
// looked up yet.
//
// The answer has the names that exist. None is an error, as an empty answer means to Envoy that it may open its port without
// a certificate.
func (h *Handler) fetch(ctx context.Context, p peerkey.Holder, r *request) (*response, error) {
	s := newSession(false, h.opts.MaxNames, h.opts.Wildcard, h.frames)
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
	waited, err := l.wait(ctx)
	if err != nil {
		return nil, err
	}
	return l.answer(ctx, waited)
}

// lookups are the names of a fetch.
type lookups struct {
	h     *Handler
	peer  peerkey.Holder
	node  string
	items []*item // without a watch if the client may not have the name
}

// wait waits until the table has looked up each name, and reports whether it had to.
func (l *lookups) wait(ctx context.Context) (waited bool, err error) {
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
			waited = true
			select {
			case <-news:
				in.take(nil)
			case <-ctx.Done():
				return false, ended(ctx.Err())
			case <-l.h.table.ctx.Done():
				return false, errClosing()
			}
		}
	}
	return waited, nil
}

// end ends what wait has begun.
func (l *lookups) end() {
	for _, it := range l.items {
		if it.watch != nil {
			l.h.table.unwatch(it.watch)
		}
	}
}

// answer returns the secrets of the names. If wait has waited, they are resolved and read again, as they may have changed.
func (l *lookups) answer(ctx context.Context, waited bool) (*response, error) {
	var resp response
	failed := false
	for _, it := range l.items {
		if it.watch == nil {
			continue
		}
		if waited {
			source, ok := l.h.resolve(ctx, l.peer, l.node, it)
			if !ok {
				continue
			}
			if source != it.watch.res.source { // the client asks again
				failed = true
				continue
			}
			if st := it.watch.res.cur.Load(); st != nil {
				it.cur = st
			}
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
	case failed: // the reason is in our log; it is not the client's business
		return nil, grpchttp.Errorf(grpchttp.Unavailable, "sds: fetch: the secret is not available now; try again")
	}
	return nil, errNotFound(l.items[0].name)
}

// serveFetch is FetchSecrets in gRPC.
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

// httpStatus has the HTTP statuses of the errors that a REST request can have.
var httpStatus = map[grpchttp.Code]int{
	grpchttp.InvalidArgument:   http.StatusBadRequest,
	grpchttp.NotFound:          http.StatusNotFound,
	grpchttp.ResourceExhausted: http.StatusRequestEntityTooLarge,
	grpchttp.Unavailable:       http.StatusServiceUnavailable,
	grpchttp.Unimplemented:     http.StatusNotImplemented,
	grpchttp.DeadlineExceeded:  http.StatusGatewayTimeout,
}

// serveREST is FetchSecrets in Envoy's JSON form.
func (h *Handler) serveREST(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		w.WriteHeader(http.StatusMethodNotAllowed)
		return
	}
	if media, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")); media != "application/json" {
		w.Header().Set("Accept-Post", "application/json")
		w.WriteHeader(http.StatusUnsupportedMediaType)
		return
	}
	body, err := h.rest(w, r)
	w.Header().Set("Cache-Control", "no-store")
	switch {
	case err == nil && body == nil:
		w.WriteHeader(http.StatusNotModified)
	case err == nil:
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(body) // an error means that the client has gone
	default:
		e, ok := errors.AsType[*grpchttp.Error](err)
		if !ok {
			e = grpchttp.Errorf(grpchttp.Internal, "sds: internal error")
		}
		body, _ := json.Marshal(map[string]any{"code": e.Code, "message": e.Message}) // of numbers and strings: cannot fail
		w.Header().Set("Content-Type", "application/json")
		status := cmp.Or(httpStatus[e.Code], http.StatusInternalServerError)
		if e.RetryAfter > 0 { // it is not the request that is too large
			status = http.StatusTooManyRequests
			w.Header().Set("Retry-After", strconv.Itoa(int(e.RetryAfter.Seconds())))
		}
		w.WriteHeader(status)
		_, _ = w.Write(body)
	}
}

// rest returns the body of the response, or nil if the client has that version.
func (h *Handler) rest(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	if err := h.admit(r); err != nil {
		return nil, err
	}
	p := peerkey.HolderOf(r)
	if err := h.enter(r, p); err != nil {
		return nil, err
	}
	defer h.open.Give(p, 1)
	size := maxJSON
	if r.ContentLength >= 0 && r.ContentLength < maxJSON {
		size = int(r.ContentLength)
	}
	if err := h.incoming.Take(r, size); err != nil {
		h.badRequest(r.Context(), p, err)
		return nil, err
	}
	req, err := h.readJSON(w, r)
	h.incoming.Give(r, size)
	if err != nil {
		return nil, err
	}
	resp, err := h.fetch(r.Context(), p, req)
	if err != nil || req.version == resp.version.String() {
		return nil, err
	}
	return resp.encodeJSON()
}

func (h *Handler) readJSON(w http.ResponseWriter, r *http.Request) (*request, error) {
	data, err := conns.ReadBody(w, r, maxJSON)
	if err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return nil, grpchttp.Errorf(grpchttp.ResourceExhausted, "sds: fetch: the request is larger than 256 KiB")
		}
		return nil, grpchttp.Errorf(grpchttp.InvalidArgument, "sds: fetch: the request ended early")
	}
	return decodeJSON(data, h.opts.MaxNames)
}

// decodeJSON reads a DiscoveryRequest in JSON. Members have either of two names, as the mapping of
// Protocol Buffers has it, null is like a member that is not there, and others are ignored.
func decodeJSON(data []byte, maxNames int) (*request, error) {
	var r request
	var tooLarge error
	malformed := false
	in := strictjson.NewReader(data)
	is := func(kind strictjson.Kind) bool {
		malformed = malformed || in.Kind() != kind && in.Kind() != strictjson.Null
		return in.Kind() == kind
	}
	text := func(to *string) {
		if is(strictjson.String) {
			s, _ := in.Text()
			*to = string(s)
		}
	}
	seen := make(map[string]bool)
	known := func(name string) {
		malformed = malformed || seen[name]
		seen[name] = true
	}
	malformed = in.Kind() != strictjson.Object
	for name := range in.Members() {
		switch string(name) {
		case "node":
			if is(strictjson.Object) {
				for name := range in.Members() {
					if string(name) == "id" {
						text(&r.node)
					}
				}
			}
		case "version_info", "versionInfo":
			known("version_info")
			text(&r.version)
		case "type_url", "typeUrl":
			known("type_url")
			text(&r.typeURL)
		case "resource_names", "resourceNames":
			known("resource_names")
			if !is(strictjson.Array) {
				continue
			}
			for i := range in.Elements() {
				name, ok := in.Text()
				malformed = malformed || !ok
				if tooLarge == nil {
					tooLarge = checkName(i+1, len(name), maxNames)
					r.names = append(r.names, string(name))
				}
			}
		}
	}
	if in.End() != nil || malformed {
		return nil, grpchttp.Errorf(grpchttp.InvalidArgument, "sds: fetch: the body is not a DiscoveryRequest in JSON")
	}
	return &r, tooLarge
}

// encodeJSON returns a DiscoveryResponse in JSON, without a nonce.
func (r *response) encodeJSON() ([]byte, error) {
	var resources []any
	for _, e := range r.entries {
		c, err := contentOf(e.secret)
		if err != nil {
			return nil, err
		}
		if c.json == nil { // the configuration of a key provider is a message of a type that we do not know
			return nil, grpchttp.Errorf(grpchttp.Unimplemented, "sds: fetch: %q has a key provider, which has no form in JSON here; fetch it by gRPC", clip(e.name))
		}
		resources = append(resources, map[string]any{"@type": typeURL, "name": e.name, c.jsonName: c.json})
	}
	return json.Marshal(map[string]any{"versionInfo": r.version.String(), "typeUrl": typeURL, "resources": resources})
}
