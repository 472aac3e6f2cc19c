package workloadserver

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/svidkit/svidkit/authn/unixsocket"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/workloadwire"
	"github.com/svidkit/svidkit/spiffe"
)

// Handler serves the Workload API. It is safe for concurrent use, and keeps an idle stream with the one
// goroutine of its request. Close it to end the streams.
type Handler struct {
	src     Provider
	opts    Options
	grpc    *grpchttp.Handler
	done    chan struct{} // closed by Close
	refresh renew.Signal
	enc     encodings

	mu      sync.Mutex
	logged  map[string]string // method to the failure that was logged last
	closed  bool
	streams int
	byPeer  map[unixsocket.Peer]int // streams of processes that are known
}

// NewHandler returns a handler that serves what src has. opts may be nil, and is copied.
func NewHandler(src Provider, opts *Options) (*Handler, error) {
	if src == nil {
		return nil, errors.New("workloadserver: new handler: the provider is nil")
	}
	h := &Handler{src: src, done: make(chan struct{}), logged: make(map[string]string), byPeer: make(map[unixsocket.Peer]int)}
	if opts != nil {
		h.opts = *opts
	}
	if h.opts.MaxStreams < 0 {
		return nil, errors.New("workloadserver: new handler: MaxStreams is negative; 0 means 10,000")
	}
	h.opts.MaxStreams = cmp.Or(h.opts.MaxStreams, maxStreams)
	h.opts.Logger = cmp.Or(h.opts.Logger, slog.New(slog.DiscardHandler))

	methods := reflection()
	unary := func(name string, f func(ctx context.Context, request []byte) ([]byte, error)) {
		methods[workloadwire.Service+name] = grpchttp.Unary(func(ctx context.Context, request []byte) ([]byte, error) {
			response, err := f(ctx, request)
			return response, h.told(ctx, name, err)
		})
	}
	stream := func(name string, begin func(request []byte) (answer, error)) {
		methods[workloadwire.Service+name] = func(ctx context.Context, c *grpchttp.Call) error {
			return h.told(ctx, name, h.serve(ctx, c, begin))
		}
	}
	stream(workloadwire.FetchX509SVID, always(func(snap *spiffe.Snapshot, ids []Identity) ([]byte, error) {
		return h.enc.of(snap, h.crls()).svids(ids)()
	}))
	bundles := func(name string, i int) {
		stream(name, always(func(snap *spiffe.Snapshot, _ []Identity) ([]byte, error) {
			return h.enc.of(snap, h.crls()).bundles[i]()
		}))
	}
	bundles(workloadwire.FetchX509Bundles, 0)
	bundles(workloadwire.FetchJWTBundles, 1)
	if h.opts.IssueJWTSVID != nil {
		unary(workloadwire.FetchJWTSVID, h.fetchJWTSVID)
	}
	if h.opts.ValidateJWTSVID != nil {
		unary(workloadwire.ValidateJWTSVID, h.validateJWTSVID)
	}
	if h.opts.IssueWITSVID != nil {
		stream(workloadwire.FetchWITSVID, h.fetchWITSVID)
		bundles(workloadwire.FetchWITBundles, 2)
	}
	h.grpc = &grpchttp.Handler{Name: "workloadserver", Methods: methods, Admit: h.admit, MaxMessage: maxRequest, ReceiveTimeout: requestTimeout}
	return h, nil
}

// ServeHTTP serves one request: a stream for as long as it lasts. Methods that Options leave switched off,
// and unknown ones, answer Unimplemented. A request that is not gRPC is answered with 415, and one that is
// not HTTP/2 with 505.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) { h.grpc.ServeHTTP(w, r) }

// admit runs before anything of a request is read.
func (h *Handler) admit(r *http.Request) error {
	if v := r.Header.Values(workloadwire.Header); len(v) != 1 || v[0] != "true" { // WEP-6
		return refusal(`send the metadata "workload.spiffe.io: true", once`)
	}
	if from, err := netip.ParseAddrPort(r.RemoteAddr); err == nil && !h.opts.AnyNetwork { // WEP-4
		if ip := from.Addr().Unmap(); !ip.IsLoopback() && !ip.IsLinkLocalUnicast() {
			return status(grpchttp.PermissionDenied, "callers from other machines are not served")
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return errClosing()
	}
	return nil
}

// What callers are told.
func status(code grpchttp.Code, text string) error {
	return grpchttp.Errorf(code, "workloadserver: %s", text)
}
func refusal(text string) error { return status(grpchttp.InvalidArgument, text) }
func errClosing() error         { return status(grpchttp.Unavailable, "the server is shutting down") }
func errDenied() error {
	return status(grpchttp.PermissionDenied, "there is no identity for this caller; register the workload, or try again later")
}

// told returns what the caller is told of an error: a status as it is; of any other that there is nothing
// for it, or to come back, while the log has the reason.
func (h *Handler) told(ctx context.Context, method string, err error) error {
	if _, ok := err.(*grpchttp.Error); ok || err == nil { // not one that an issuer has wrapped
		return err
	}
	if errors.Is(err, ErrDenied) {
		return errDenied()
	}
	if ctx.Err() != nil { // the caller has gone
		return ended(ctx)
	}
	level, text := slog.LevelWarn, err.Error()
	h.mu.Lock()
	if h.logged[method] == text { // for another of many callers
		level = slog.LevelDebug
	}
	h.logged[method] = text
	h.mu.Unlock()
	h.opts.Logger.LogAttrs(ctx, level, "workloadserver: request failed", slog.String("method", method), slog.Any("err", err))
	return status(grpchttp.Unavailable, "the server has nothing to serve now; try again later")
}

// ended returns the status for a context that is done: its client has gone and does not hear it, or its
// deadline has passed, or the server is stopping.
func ended(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return status(grpchttp.DeadlineExceeded, "the deadline of the call has passed")
	}
	return errClosing()
}

// current returns what there is to serve and which identities the caller may have, at least one.
func (h *Handler) current(ctx context.Context) (*spiffe.Snapshot, []Identity, error) {
	snap, err := h.src.Snapshot()
	if err == nil && snap == nil {
		err = errors.New("it returned no snapshot and no error")
	}
	var ids []Identity
	if err == nil && h.opts.Identities == nil {
		var svid *spiffe.SVID
		svid, err = snap.SVID()
		ids = []Identity{{SVID: svid}}
	}
	if err != nil {
		return nil, nil, fmt.Errorf("provider: %w", err)
	}
	if h.opts.Identities != nil {
		if ids, err = h.opts.Identities(ctx); err == nil {
			err = checkIdentities(ids)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("identities: %w", err)
		}
	}
	return snap, ids, nil
}

// checkIdentities refuses what the Identities hook must not return.
func checkIdentities(ids []Identity) error {
	if len(ids) == 0 {
		return ErrDenied
	}
	hints := make(map[string]bool)
	for _, id := range ids {
		switch {
		case id.SVID == nil:
			return errors.New("an Identity has no SVID")
		case len(id.Hint) > maxHint:
			return fmt.Errorf("the hint of %q has %d bytes, the limit is %d", id.SVID.ID(), len(id.Hint), maxHint)
		case !utf8.ValidString(id.Hint):
			return fmt.Errorf("the hint of %q is not UTF-8", id.SVID.ID())
		case id.Hint != "" && hints[id.Hint]:
			return fmt.Errorf("two identities have the hint %.128q", id.Hint)
		}
		hints[id.Hint] = true
	}
	return nil
}

func (h *Handler) crls() [][]byte {
	if p, ok := h.src.(interface{ CRLs() [][]byte }); ok {
		return p.CRLs()
	}
	return nil
}

// answer makes the current response of a stream for its caller. If that changes by itself, next is when
// to ask again; else it is zero.
type answer func(ctx context.Context, snap *spiffe.Snapshot, ids []Identity) (m []byte, next time.Time, err error)

// always returns what begins a stream whose response does not depend on the request or the time.
func always(f func(snap *spiffe.Snapshot, ids []Identity) ([]byte, error)) func([]byte) (answer, error) {
	return func([]byte) (answer, error) {
		return func(_ context.Context, snap *spiffe.Snapshot, ids []Identity) ([]byte, time.Time, error) {
			m, err := f(snap, ids)
			return m, time.Time{}, err
		}, nil
	}
}

// serve answers one request with a stream: the first response at once, and another after each change of
// it. While a caller does not read, changes become one: the newest.
func (h *Handler) serve(ctx context.Context, c *grpchttp.Call, begin func([]byte) (answer, error)) error {
	request, err := c.ReceiveOnly()
	if err != nil {
		if ctx.Err() != nil {
			return ended(ctx)
		}
		return err
	}
	make, err := begin(request)
	if err != nil {
		return err
	}
	leave, ok := h.enter(ctx)
	if !ok {
		return status(grpchttp.ResourceExhausted, "too many streams are open; try again later")
	}
	defer leave()
	var last []byte
	for {
		refreshed, changed := h.refresh.Changed(), h.src.Changed() // before the snapshot, so that no change is missed
		snap, ids, err := h.current(ctx)
		if err != nil {
			return err
		}
		m, next, err := make(ctx, snap, ids)
		if err != nil {
			return err
		}
		if last == nil || !bytes.Equal(m, last) {
			if err := c.Send(m); err != nil {
				return err
			}
		}
		last = m
		var due <-chan time.Time
		if !next.IsZero() {
			due = time.After(time.Until(next))
		}
		select {
		case <-refreshed:
		case <-changed:
		case <-due:
		case <-ctx.Done():
			return ended(ctx)
		case <-h.done:
			return errClosing()
		}
	}
}

// enter counts a stream, unless too many are open: of all callers, or of the process that calls.
func (h *Handler) enter(ctx context.Context) (leave func(), ok bool) {
	peer, known := unixsocket.PeerFromContext(ctx)
	known = known && peer.PID != 0
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.streams >= h.opts.MaxStreams || known && h.byPeer[peer] >= maxOfProcess {
		return nil, false
	}
	h.streams++
	if known {
		h.byPeer[peer]++
	}
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.streams--
		if known {
			if h.byPeer[peer]--; h.byPeer[peer] == 0 {
				delete(h.byPeer, peer)
			}
		}
	}, true
}

func (h *Handler) fetchJWTSVID(ctx context.Context, request []byte) ([]byte, error) {
	audience, id, err := workloadwire.ReadJWTSVIDRequest(request, maxAudiences+8)
	switch {
	case err != nil:
		return nil, refusal("the request is not a JWTSVIDRequest, or has too many audiences")
	case len(audience) == 0 || len(audience) > maxAudiences:
		return nil, refusal("name an audience, and at most 64")
	case slices.Contains(audience, ""):
		return nil, refusal("an audience is empty")
	}
	want, err := parseWanted(id)
	if err != nil {
		return nil, err
	}
	_, ids, err := h.current(ctx)
	if err != nil {
		return nil, err
	}
	m := &workloadwire.SVIDs{}
	for _, id := range ids {
		if !want.IsZero() && id.SVID.ID() != want {
			continue
		}
		token, err := h.opts.IssueJWTSVID(ctx, id.SVID.ID(), audience)
		if err == nil && token == "" {
			err = errors.New("it returned no token and no error")
		}
		if err != nil {
			return nil, fmt.Errorf("issuer: %w", err)
		}
		m.SVIDs = append(m.SVIDs, workloadwire.SVID{ID: id.SVID.ID().String(), Hint: id.Hint, Parts: [3][]byte{[]byte(token)}})
	}
	if len(m.SVIDs) == 0 {
		return nil, errDenied() // WAPI-42
	}
	return workloadwire.JWT.WriteSVIDs(m)
}

// parseWanted parses the ID in a request, the zero ID for "".
func parseWanted(id string) (spiffe.ID, error) {
	if id == "" {
		return spiffe.ID{}, nil
	}
	want, err := spiffe.ParseID(id)
	if err != nil {
		return spiffe.ID{}, refusal("spiffe_id is not a SPIFFE ID")
	}
	return want, nil
}

func (h *Handler) validateJWTSVID(ctx context.Context, request []byte) ([]byte, error) {
	var audience, token string
	if workloadwire.ReadTexts(request, &audience, &token) != nil {
		return nil, refusal("the request is not a ValidateJWTSVIDRequest")
	}
	if audience == "" || token == "" {
		return nil, refusal("the audience or the svid is empty")
	}
	id, claims, err := h.opts.ValidateJWTSVID(ctx, audience, token)
	switch {
	case err != nil && unjudged(err):
		return nil, fmt.Errorf("validator: %w", err)
	case err != nil:
		return nil, refusal("the JWT-SVID is not valid: " + withoutToken(err.Error(), token))
	case len(claims) == 0 || id.IsZero():
		return nil, errors.New("validator: it returned no claims or no ID, and no error")
	}
	return workloadwire.WriteClaims(id.String(), claims)
}

// unjudged reports whether an error of ValidateJWTSVID says nothing about the token.
func unjudged(err error) bool {
	if e, ok := errors.AsType[interface {
		error
		Retryable() (after time.Duration, ok bool)
	}](err); ok {
		if _, again := e.Retryable(); again {
			return true
		}
	}
	return errors.Is(err, workloadwire.ErrUnimplemented) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// withoutToken returns a text that a caller may see and log: not one that has a part of the token
// (WAPI-53).
func withoutToken(text, token string) string {
	for part := range strings.SplitSeq(token, ".") {
		if len(part) > 8 && strings.Contains(text, part[:len(part)/2]) {
			return "the reason quotes it, and is withheld"
		}
	}
	if !utf8.ValidString(text) {
		return "the reason is not a text"
	}
	return workloadwire.Clip(text, maxText)
}

// Refresh has [Options].Identities asked again for each stream. Call it when the hook would answer
// differently although the provider has not changed, for instance after a workload was registered or
// removed, or when one of several identities was renewed.
func (h *Handler) Refresh() { h.refresh.Notify() }

// Close ends all streams with code Unavailable, so that clients keep what they have and look for
// another server. It does not wait for them: they belong to the http.Server. Requests that come later
// are refused. Close may be called twice; it returns nil.
func (h *Handler) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.closed {
		h.closed = true
		close(h.done)
	}
	return nil
}

// Streams returns how many streams are open, for metrics.
func (h *Handler) Streams() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.streams
}
