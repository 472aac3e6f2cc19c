package xdsproxy

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/loopback"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
)

const (
	debugType     = "istio.io/debug"
	debugTime     = 5 * time.Second
	debugSendTime = 30 * time.Second // in which the client must take the answer
	maxUnread     = 4                // answers not yet taken by clients, in total
	maxDebugName  = 4 << 10          // bytes of a requested name
	shuttingDown  = "the server is shutting down"
)

// envoys are the Envoys whose streams the control plane has answered.
type envoys struct {
	mu        sync.Mutex
	connected int
	node      []byte // of the one that joined last; nil if it has none
}

func (e *envoys) join(node []byte) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.connected++
	e.node = node
}

func (e *envoys) leave() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.connected--; e.connected == 0 {
		e.node = nil
	}
}

func (e *envoys) last() (node []byte, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.node, e.connected > 0
}

// ServeDebug asks the control plane for debug information and returns its answer, for operators on the same host. It
// serves GET /debug and GET /debug/NAME, with the optional parameter resourceName: it asks the control plane for the
// type istio.io/debug or istio.io/debug/NAME, with the node of the Envoy that joined last and the credentials of
// [Config]. Serve it on a separate loopback address; Istio's agent uses 127.0.0.1:15004:
//
//	server := &http.Server{
//		Addr: "127.0.0.1:15004", Handler: http.HandlerFunc(handler.ServeDebug),
//		ReadTimeout: 30 * time.Second, IdleTimeout: 90 * time.Second,
//	}
//
// The answer is the DiscoveryResponse as JSON. A resource's content is its member "json" if it is JSON of a debug
// type, "text" if it is other text of such a type, and otherwise "value", in base64.
//
// Each request uses a separate stream to the control plane, so that its answer and an answer to Envoy cannot be
// confused, and so that it works beside incremental streams, which have other messages. Requests run one at a time;
// the next one waits. A client, which is a user of this host where the server knows the user, may have one answer
// that it has not taken yet, for 30 seconds; all clients together may have four.
//
// Requests from another host, or to an address other than loopback, are refused with 403, and so are requests that a
// page of another site makes in a browser: they carry another host name, or the browser says so. Other failures: 400
// for a bad query, 404 for another path, 405 for another method, 502 if the control plane refuses, 503 while no Envoy
// is connected to it or another answer is not taken, 504 if it does not answer within 5 seconds.
func (h *Handler) ServeDebug(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Cache-Control", "no-store")
	answer, no := h.askDebug(r)
	peer := cmp.Or(peerkey.UserFromContext(r.Context()), r.RemoteAddr)
	if no == nil && h.unread.Take(peer, 1) != nil {
		no = &refusal{http.StatusServiceUnavailable,
			"an answer to an earlier request is not taken; take it, or try again later"}
	}
	if no != nil {
		if no.status == http.StatusMethodNotAllowed {
			header.Set("Allow", http.MethodGet)
		}
		http.Error(w, no.text, no.status)
		return
	}
	defer h.unread.Give(peer, 1)
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(debugSendTime)) // some servers have no deadlines
	header.Set("Content-Type", "application/json")
	_, _ = w.Write(answer)
}

// askDebug returns the answer of the control plane to a request.
func (h *Handler) askDebug(r *http.Request) ([]byte, *refusal) {
	typeURL, names, no := debugRequest(r)
	if no != nil {
		return nil, no
	}
	ctx, cancel := context.WithTimeoutCause(r.Context(), debugTime, errDebugTime)
	defer cancel()
	defer context.AfterFunc(h.ctx, cancel)()
	select {
	case h.debugging <- struct{}{}:
		defer func() { <-h.debugging }()
	case <-ctx.Done():
		if h.ctx.Err() == nil {
			return nil, &refusal{http.StatusGatewayTimeout, "another debug request is not done; try again later"}
		}
	}
	node, ok := h.envoys.last()
	switch {
	case h.ctx.Err() != nil:
		return nil, &refusal{http.StatusServiceUnavailable, shuttingDown}
	case !ok:
		return nil, &refusal{http.StatusServiceUnavailable, "no Envoy is connected to the control plane"}
	}
	answer, err := h.debug(ctx, node, typeURL, names)
	if err == nil {
		return answer, nil
	}
	no = &refusal{http.StatusBadGateway, bearer.Redact(err.Error())}
	switch {
	case h.ctx.Err() != nil:
		no = &refusal{http.StatusServiceUnavailable, shuttingDown}
	case err == errDebugTime || context.Cause(ctx) == errDebugTime:
		no = &refusal{http.StatusGatewayTimeout, errDebugTime.Error()}
	}
	h.log.Warn("xdsproxy: a debug request has failed", typeURL[:min(len(typeURL), 60)],
		slog.Int("status", no.status), slog.String("err", no.text))
	return nil, no
}

var errDebugTime = fmt.Errorf("the control plane has not answered within %v", debugTime)

// refusal is an error response to a request.
type refusal struct {
	status int
	text   string
}

// debugRequest returns the type and the names that a request asks for.
func debugRequest(r *http.Request) (typeURL string, names []string, no *refusal) {
	name, ok := strings.CutPrefix(r.URL.Path, "/debug")
	query, err := url.ParseQuery(r.URL.RawQuery)
	names = query["resourceName"]
	switch foreign := loopback.Local(r); {
	case foreign != nil:
		return "", nil, &refusal{http.StatusForbidden, foreign.Error()}
	case !ok || name != "" && name[0] != '/':
		return "", nil, &refusal{http.StatusNotFound, "the path is not /debug or /debug/NAME"}
	case r.Method != http.MethodGet:
		return "", nil, &refusal{http.StatusMethodNotAllowed, "the method is not GET"}
	case err != nil:
		return "", nil, &refusal{http.StatusBadRequest, "the query is malformed"}
	case len(names) > 1, len(names) != len(query):
		return "", nil, &refusal{http.StatusBadRequest,
			"the query has more than one resourceName, or another parameter"}
	case len(r.URL.Path)+len(r.URL.RawQuery) > maxDebugName:
		return "", nil, &refusal{http.StatusBadRequest,
			fmt.Sprintf("path and query are longer than %d bytes", maxDebugName)}
	case !utf8.ValidString(name + strings.Join(names, "")):
		return "", nil, &refusal{http.StatusBadRequest, "the path or the resourceName is not UTF-8"}
	}
	return debugType + strings.TrimSuffix(name, "/"), names, nil
}

// debug sends a request on a separate stream, and returns the answer as JSON.
func (h *Handler) debug(ctx context.Context, node []byte, typeURL string, names []string) ([]byte, error) {
	metadata, token, err := h.metadata(ctx)
	if err != nil {
		return nil, err
	}
	request, err := protofield.Write(func(w *protofield.Writer) {
		w.Bytes(sotwRequest.node, node)
		for _, name := range names {
			w.AddText(3, name)
		}
		w.Text(sotwRequest.typeURL, typeURL)
	})
	if err != nil {
		return nil, err
	}
	s := h.client.Open(ctx, service+"StreamAggregatedResources", metadata)
	defer s.Close()
	if err := s.Send(request); err == nil { // otherwise Receive returns the reason
		defer s.CloseSend()
	}
	for {
		msg, err := s.Receive()
		if err != nil {
			if e, ok := errors.AsType[*grpchttp.Error](err); ok {
				if e.Code == grpchttp.DeadlineExceeded { // the control plane has our deadline, and ended the call
					return nil, errDebugTime
				}
				return nil, fmt.Errorf("the control plane has refused: %v: %s", e.Code,
					bearer.Redact(e.Message, token))
			}
			return nil, errors.New("the control plane has ended the stream without an answer")
		}
		if answer, err := debugAnswer(msg, typeURL); answer != nil || err != nil {
			return answer, err
		}
	}
}

// debugAnswer returns a DiscoveryResponse as JSON, or nil if it has another type.
func debugAnswer(msg []byte, typeURL string) ([]byte, error) {
	answer := map[string]any{}
	var resources []map[string]any
	texts := map[protofield.Number]string{1: "versionInfo", 4: "typeUrl", 5: "nonce"}
	err := protofield.Read(msg, func(f *protofield.Field) {
		switch name := texts[f.Number]; {
		case f.Data == nil: // all fields that are read are texts and messages
		case name != "":
			var text string
			f.Text(&text)
			answer[name] = text
		case f.Number == 2:
			resources = append(resources, debugResource(f.Any()))
			answer["resources"] = resources
		case f.Number == 6:
			f.Message(func(f *protofield.Field) {
				var identifier string
				if f.Number == 1 {
					f.Text(&identifier)
					answer["controlPlane"] = map[string]any{"identifier": identifier}
				}
			})
		}
	})
	if err != nil {
		return nil, errors.New("the control plane has sent a malformed response")
	}
	if answer["typeUrl"] != typeURL {
		return nil, nil
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(answer); err != nil {
		return nil, fmt.Errorf("the answer has no form as JSON: %w", err)
	}
	return b.Bytes(), nil
}

// debugResource returns the JSON form of a resource. It decodes only types of debug information; all other types are
// messages unknown here.
func debugResource(url string, value []byte) map[string]any {
	switch text := strings.HasPrefix(url, debugType) && utf8.Valid(value); {
	case text && json.Valid(value):
		return map[string]any{"@type": url, "json": json.RawMessage(value)}
	case text:
		return map[string]any{"@type": url, "text": string(value)}
	}
	return map[string]any{"@type": url, "value": value}
}
