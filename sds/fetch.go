package sds

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/svidkit/svidkit/internal/wire/envoysds"
)

// fetch answers one request from the table, like a stream that ends with its first response. It
// waits for what has not been looked up yet.
//
// If some of the names exist they are the answer. None is an error, as an empty answer means to
// Envoy that it may open its port without a certificate.
func (h *Handler) fetch(ctx context.Context, r *request) (*response, error) {
	s := newSession(false, h.opts.MaxNames, h.opts.Wildcard, "")
	out, err := s.request(r)
	if err != nil {
		return nil, err
	}
	if len(out.added) == 0 {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("sds: fetch: name at least one resource"))
	}
	in := newInbox()
	for _, it := range out.added {
		if h.opts.Authorize != nil {
			if err := h.opts.Authorize(ctx, it.name); err != nil {
				h.logDenied(ctx, s.node, it.name, err)
				continue
			}
		}
		it.watch = h.table.watch(it.name, in, nil)
		defer h.table.unwatch(it.watch)
	}
	var failed bool
	for _, it := range out.added {
		if it.watch == nil {
			continue
		}
		st := it.watch.res.cur.Load()
		for ; st == nil; st = it.watch.res.cur.Load() {
			select {
			case <-in.wake:
			case <-ctx.Done():
				return nil, ended(ctx)
			case <-h.done:
				return nil, errClosing()
			}
		}
		switch {
		case st.entry != nil:
			s.news(it, present, st.entry)
		case st.err != nil:
			failed = true
		}
	}
	if resp := s.all(); resp != nil {
		return resp, nil
	}
	if failed { // the reason is in our log; it is not the client's business
		return nil, connect.NewError(connect.CodeUnavailable, errors.New("sds: fetch: the secret is not available now; try again"))
	}
	return nil, errNotFound(out.added[0].name)
}

// all is next without the bound on the size: there is no second response.
func (s *session) all() *response {
	var all *response
	for {
		r := s.next()
		if r == nil {
			return all
		}
		if all == nil {
			all = r
		} else {
			all.entries = append(all.entries, r.entries...)
			all.version = r.version
		}
		s.awaiting = false
	}
}

func (h *Handler) serveFetch(ctx context.Context, r *connect.Request[request]) (*connect.Response[response], error) {
	resp, err := h.fetch(ctx, r.Msg)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(resp), nil
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
	switch code := connect.CodeOf(err); {
	case err == nil && body == nil:
		w.WriteHeader(http.StatusNotModified)
	case err == nil:
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(body) // the client has gone
	default:
		status, ok := map[connect.Code]int{
			connect.CodeInvalidArgument:   http.StatusBadRequest,
			connect.CodeNotFound:          http.StatusNotFound,
			connect.CodeResourceExhausted: http.StatusRequestEntityTooLarge,
			connect.CodeUnavailable:       http.StatusServiceUnavailable,
			connect.CodeDeadlineExceeded:  http.StatusGatewayTimeout,
		}[code]
		if !ok {
			status = http.StatusInternalServerError
		}
		body, _ := json.Marshal(struct { // of numbers and strings: cannot fail
			Code    uint32 `json:"code"` // of gRPC
			Message string `json:"message"`
		}{uint32(code), messageOf(err)})
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = w.Write(body)
	}
}

func messageOf(err error) string {
	if e, ok := errors.AsType[*connect.Error](err); ok {
		return e.Message()
	}
	return "internal error"
}

// rest returns the body of the response, or nil if the client has that version.
func (h *Handler) rest(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	ctx := r.Context()
	if _, err := h.admit(ctx, connect.Spec{}, connect.Peer{}, r.Header); err != nil {
		return nil, err
	}
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxJSON))
	if err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return nil, connect.NewError(connect.CodeResourceExhausted, errors.New("sds: fetch: the request is larger than 256 KiB"))
		}
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("sds: fetch: the request ended early"))
	}
	var msg envoysds.DiscoveryRequest
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true, Resolver: resolver{}}).Unmarshal(data, &msg); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("sds: fetch: the body is not a DiscoveryRequest in JSON"))
	}
	req := &request{node: msg.GetNode().GetId(), typeURL: msg.GetTypeUrl(), names: msg.GetResourceNames()}
	for i, name := range req.names {
		if req.tooLarge == nil {
			req.tooLarge = codec{maxNames: h.opts.MaxNames}.check(i+1, len(name))
		}
	}
	resp, err := h.fetch(ctx, req)
	if err != nil {
		return nil, err
	}
	resp.nonce = ""
	if msg.GetVersionInfo() == resp.version.String() {
		return nil, nil
	}
	var out envoysds.DiscoveryResponse
	if err := proto.Unmarshal(resp.append(nil), &out); err != nil {
		return nil, err
	}
	return protojson.MarshalOptions{Resolver: resolver{}}.Marshal(&out)
}

// resolver knows our Secret by the published type URL, and nothing else.
type resolver struct{}

func (resolver) FindMessageByURL(url string) (protoreflect.MessageType, error) {
	if url == typeURL {
		return (*envoysds.Secret)(nil).ProtoReflect().Type(), nil
	}
	return nil, protoregistry.NotFound
}

func (resolver) FindMessageByName(protoreflect.FullName) (protoreflect.MessageType, error) {
	return nil, protoregistry.NotFound
}

func (resolver) FindExtensionByName(protoreflect.FullName) (protoreflect.ExtensionType, error) {
	return nil, protoregistry.NotFound
}

func (resolver) FindExtensionByNumber(protoreflect.FullName, protoreflect.FieldNumber) (protoreflect.ExtensionType, error) {
	return nil, protoregistry.NotFound
}
