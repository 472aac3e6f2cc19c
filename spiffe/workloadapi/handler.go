package workloadapi

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/spiffe"
)

// Provider has what a [Handler] serves; a *secretcache.Manager is one, and so is a [*Source]. [Fixed]
// makes one of a snapshot. Its methods are called from many goroutines and must not block.
//
// A Provider that also has the method CRLs() [][]byte, as a Source has, serves certificate revocation
// lists in DER.
type Provider interface {
	// Snapshot returns the identity of the server or its one workload, and the trust bundles. While
	// it returns an error, callers are told to come back later; if that wraps [ErrDenied], that they
	// have no identity.
	Snapshot() (*spiffe.Snapshot, error)

	// Changed returns a channel that is closed when Snapshot would answer differently; nil means
	// never.
	Changed() <-chan struct{}
}

// Fixed returns a Provider that always has the same snapshot, for tests and for identities that
// nobody renews.
func Fixed(s *spiffe.Snapshot) Provider { return fixed{s} }

type fixed struct{ snap *spiffe.Snapshot }

func (f fixed) Snapshot() (*spiffe.Snapshot, error) { return f.snap, nil }
func (f fixed) Changed() <-chan struct{}            { return nil }

// JWTIssuer makes tokens for a [Handler].
type JWTIssuer interface {
	// IssueJWTSVID returns a JWT-SVID for id, which the caller was found to have, in compact form. All
	// of audience goes into its "aud" (WAPI-40).
	IssueJWTSVID(ctx context.Context, id spiffe.ID, audience []string) (token string, err error)
}

// JWTValidator judges tokens for a [Handler]; a [*Client] is one, which asks another server.
type JWTValidator interface {
	// ValidateJWTSVID returns the ID in a token that is good for audience, and all its claims, as
	// encoding/json decodes them.
	//
	// An error says that the token is not good, unless it passes: one that wraps [ErrNotReady] or is of
	// package context, one of a Client that the other server has not refused, and one with a method
	// Retryable() (after time.Duration, ok bool) that says so. Then callers are told to come back.
	ValidateJWTSVID(ctx context.Context, audience, token string) (id spiffe.ID, claims map[string]any, err error)
}

// Options are the choices of a [Handler]. The zero value serves the provider's identity and bundles to
// all who reach it.
type Options struct {
	// Identities decides which X.509-SVIDs the caller of a request may have, the default one first;
	// none means that the caller has no identity and gets nothing (WAPI-31). Their trust domains must
	// be among the provider's bundles. It is called with the context of the request, from which
	// [unixsocket.PeerFromContext] tells who is calling, when a stream begins and again before each push
	// (WAPI-20): after the provider has changed, and after [Handler.Refresh]. It should not block.
	//
	// An error that wraps [ErrDenied] is like none; any other says that it cannot be told now, and
	// the caller should come back (WEP-15). Callers that are given the same SVIDs share one
	// serialisation. Nil means that all get the provider's identity: the socket is the guard.
	Identities func(ctx context.Context) ([]Identity, error)

	// Issuer makes the answers of FetchJWTSVID. Nil means that the method answers Unimplemented.
	Issuer JWTIssuer

	// Validator makes the answers of ValidateJWTSVID. Nil means that the method answers Unimplemented.
	Validator JWTValidator

	// WITIssuer makes the answers of FetchWITSVID, and with it FetchWITBundles serves the WIT
	// authorities of the bundles. Nil means that both methods answer Unimplemented (WAPI-2).
	WITIssuer WITIssuer

	// MaxStreams is how many streams may be open at the same time; 0 means 10,000. One more is
	// refused with code ResourceExhausted.
	MaxStreams int

	// Logger gets what callers are not told: what Identities, the issuers and the provider fail with, as
	// warnings, and at level Debug when it is the same again. Nil means silence.
	Logger *slog.Logger
}

// Handler serves the Workload API. It is safe for concurrent use, and keeps an idle stream with the one
// goroutine of its request. Close it to end the streams.
type Handler struct {
	src  Provider
	opts Options
	grpc *grpchttp.Handler
	done chan struct{} // closed by Close
	enc  encodings

	mu      sync.Mutex
	logged  map[string]string // what to the failure that was logged last
	refresh chan struct{}     // closed by Refresh
	closed  bool
	streams int
}

// NewHandler returns a handler that serves what src has. opts may be nil, and is copied.
func NewHandler(src Provider, opts *Options) (*Handler, error) {
	if src == nil {
		return nil, errors.New("workloadapi: new handler: the provider is nil")
	}
	h := &Handler{src: src, done: make(chan struct{}), refresh: make(chan struct{}), logged: make(map[string]string)}
	if opts != nil {
		h.opts = *opts
	}
	if h.opts.MaxStreams < 0 {
		return nil, errors.New("workloadapi: new handler: MaxStreams is negative; 0 means 10,000")
	}
	h.opts.MaxStreams = cmp.Or(h.opts.MaxStreams, maxStreams)
	h.opts.Logger = cmp.Or(h.opts.Logger, slog.New(slog.DiscardHandler))

	rpcs := map[string]grpchttp.Method{
		service + fetchX509SVID:                   h.streamMethod(always(h.x509SVIDs)),
		service + fetchX509Bundles:                h.streamMethod(always(h.x509Bundles)),
		service + fetchJWTBundles:                 h.streamMethod(always(h.jwtBundles)),
		reflection + "v1" + reflectionMethod:      reflectionOf("v1"),
		reflection + "v1alpha" + reflectionMethod: reflectionOf("v1alpha"),
	}
	if h.opts.Issuer != nil {
		rpcs[service+fetchJWTSVID] = grpchttp.Unary(h.fetchJWTSVID)
	}
	if h.opts.Validator != nil {
		rpcs[service+validateJWTSVID] = grpchttp.Unary(h.validateJWTSVID)
	}
	if h.opts.WITIssuer != nil {
		rpcs[service+fetchWITSVID] = h.streamMethod(h.fetchWITSVID)
		rpcs[service+fetchWITBundles] = h.streamMethod(always(h.witBundles))
	}
	h.grpc = &grpchttp.Handler{Methods: rpcs, Admit: h.admit, MaxMessage: maxRequest, ReceiveTimeout: requestTimeout}
	return h, nil
}

// ServeHTTP serves one request: a stream for as long as it lasts. Every gRPC request without the
// header that the standard demands is refused before anything else is looked at (WEP-6). Other
// methods, and those that Options leave switched off, answer Unimplemented (WAPI-2, WEP-18). What is not
// gRPC is answered with 415, and what is not HTTP/2 with 505.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) { h.grpc.ServeHTTP(w, r) }

// admit runs before anything of a request is read.
func (h *Handler) admit(r *http.Request) error {
	if v := r.Header.Values(securityHeader); len(v) != 1 || v[0] != "true" {
		return refusal(`send the metadata "workload.spiffe.io: true", once`)
	}
	if h.grpc.Methods[r.URL.Path] == nil {
		return status(grpchttp.Unimplemented, "this server does not implement the method")
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
	return grpchttp.Errorf(code, "workloadapi: %s", text)
}
func refusal(text string) error { return status(grpchttp.InvalidArgument, text) }
func errClosing() error {
	return status(grpchttp.Unavailable, "the server is shutting down")
}
func errDenied() error {
	return status(grpchttp.PermissionDenied, "there is no identity for this caller; register the workload, or try again later")
}

// unavailable tells the caller to come back, or that there is nothing for it, and the log why.
func (h *Handler) unavailable(ctx context.Context, what string, err error) error {
	if errors.Is(err, ErrDenied) {
		return errDenied()
	}
	if ctx.Err() != nil { // the caller has gone
		return errClosing()
	}
	level, text := slog.LevelWarn, err.Error()
	h.mu.Lock()
	if h.logged[what] == text { // by another of many callers
		level = slog.LevelDebug
	}
	h.logged[what] = text
	h.mu.Unlock()
	h.opts.Logger.LogAttrs(ctx, level, "workloadapi: request failed", slog.String("what", what), slog.Any("err", err))
	return status(grpchttp.Unavailable, "the server has nothing to serve now; try again later")
}

// identities returns what the caller may have, at least one. Bundles of the own trust domains are in
// snap.
func (h *Handler) identities(ctx context.Context, snap *spiffe.Snapshot) ([]Identity, error) {
	if h.opts.Identities == nil {
		svid, err := snap.SVID()
		if err != nil {
			return nil, h.unavailable(ctx, "snapshot", err)
		}
		return []Identity{{SVID: svid}}, nil
	}
	ids, err := h.opts.Identities(ctx)
	if err != nil {
		return nil, h.unavailable(ctx, "identities", err)
	}
	if len(ids) == 0 {
		return nil, errDenied()
	}
	return ids, nil
}

// snapshot returns what there is to serve, and a channel that is closed when that may have changed.
func (h *Handler) snapshot(ctx context.Context) (*spiffe.Snapshot, [2]<-chan struct{}, error) {
	h.mu.Lock()
	changed := [2]<-chan struct{}{h.refresh, nil}
	h.mu.Unlock()
	changed[1] = h.src.Changed() // before the snapshot, so that no change is missed
	snap, err := h.src.Snapshot()
	if err == nil && snap == nil {
		err = errors.New("the provider returned no snapshot and no error")
	}
	if err != nil {
		return nil, changed, h.unavailable(ctx, "snapshot", err)
	}
	return snap, changed, nil
}

func (h *Handler) crls() [][]byte {
	if p, ok := h.src.(interface{ CRLs() [][]byte }); ok {
		return p.CRLs()
	}
	return nil
}

// answer makes the current response of a stream for its caller. If that changes by itself, next is when
// to ask again; else it is zero.
type answer func(ctx context.Context, snap *spiffe.Snapshot, ids []Identity) (m *raw, next time.Time, err error)

// always returns what begins a stream whose response does not depend on the request or the time.
func always(f func(ctx context.Context, snap *spiffe.Snapshot, ids []Identity) (*raw, error)) func([]byte) (answer, error) {
	return func([]byte) (answer, error) {
		return func(ctx context.Context, snap *spiffe.Snapshot, ids []Identity) (*raw, time.Time, error) {
			m, err := f(ctx, snap, ids)
			return m, time.Time{}, err
		}, nil
	}
}

// streamMethod returns a method that answers one request with a stream. begin reads the request.
func (h *Handler) streamMethod(begin func(request []byte) (answer, error)) grpchttp.Method {
	return func(ctx context.Context, c *grpchttp.Call) error {
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
		if !h.enter() {
			return status(grpchttp.ResourceExhausted, "too many streams are open; try again later")
		}
		defer h.leave()
		return h.stream(ctx, make, c)
	}
}

func (h *Handler) enter() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.streams >= h.opts.MaxStreams {
		return false
	}
	h.streams++
	return true
}

func (h *Handler) leave() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.streams--
}

// stream sends the first response at once, and another after each change of it. While a caller does
// not read, changes pile up to one: the newest.
func (h *Handler) stream(ctx context.Context, make answer, c *grpchttp.Call) error {
	var last *raw
	for {
		snap, changed, err := h.snapshot(ctx)
		if err != nil {
			return err
		}
		ids, err := h.identities(ctx, snap)
		if err != nil {
			return err
		}
		m, next, err := make(ctx, snap, ids)
		if err != nil {
			return err
		}
		if last == nil || m != last && !bytes.Equal(m.b, last.b) {
			if err := c.Send(m.b); err != nil {
				return err
			}
		}
		last = m
		if err := h.wait(ctx, changed, next); err != nil {
			return err
		}
	}
}

// wait returns nil when the response of a stream may be another one.
func (h *Handler) wait(ctx context.Context, changed [2]<-chan struct{}, next time.Time) error {
	var due <-chan time.Time
	if !next.IsZero() {
		t := time.NewTimer(time.Until(next))
		defer t.Stop()
		due = t.C
	}
	select {
	case <-changed[0]:
	case <-changed[1]:
	case <-due:
	case <-ctx.Done():
		return ended(ctx)
	case <-h.done:
		return errClosing()
	}
	return nil
}

// ended says why a context is done: its client has gone and does not hear it, or its deadline
// passed, or the server is going.
func ended(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return status(grpchttp.DeadlineExceeded, "the deadline of the stream has passed")
	}
	return errClosing()
}

func (h *Handler) x509SVIDs(ctx context.Context, snap *spiffe.Snapshot, ids []Identity) (*raw, error) {
	m, err := h.enc.x509SVIDs(snap, h.crls(), ids)
	if err != nil {
		return nil, h.unavailable(ctx, fetchX509SVID, err)
	}
	return m, nil
}

func (h *Handler) x509Bundles(ctx context.Context, snap *spiffe.Snapshot, _ []Identity) (*raw, error) {
	m, err := h.enc.x509Bundles(snap, h.crls())
	if err != nil {
		return nil, h.unavailable(ctx, fetchX509Bundles, err)
	}
	return m, nil
}

func (h *Handler) jwtBundles(ctx context.Context, snap *spiffe.Snapshot, _ []Identity) (*raw, error) {
	m, err := h.enc.jwtBundles(snap, h.crls())
	if err != nil {
		return nil, h.unavailable(ctx, fetchJWTBundles, err)
	}
	return m, nil
}

func (h *Handler) fetchJWTSVID(ctx context.Context, request []byte) ([]byte, error) {
	var req jwtSVIDRequest
	if decode(request, &req, maxAudiences+8) != nil {
		return nil, refusal("the request is not a JWTSVIDRequest, or has too many audiences")
	}
	audience := req.audience
	if len(audience) == 0 || len(audience) > maxAudiences {
		return nil, refusal("name an audience, and at most 64 (WAPI-13)")
	}
	if slices.Contains(audience, "") {
		return nil, refusal("an audience is empty (WAPI-13)")
	}
	var want spiffe.ID
	if s := req.spiffeID; s != "" {
		var err error
		if want, err = spiffe.ParseID(s); err != nil {
			return nil, refusal("spiffe_id is not a SPIFFE ID")
		}
	}
	snap, _, err := h.snapshot(ctx)
	if err != nil {
		return nil, err
	}
	ids, err := h.identities(ctx, snap)
	if err != nil {
		return nil, err
	}
	if err := checkIdentities(ids); err != nil {
		return nil, h.unavailable(ctx, fetchJWTSVID, err)
	}
	resp := &jwtSVIDResponse{}
	for _, id := range ids {
		if !want.IsZero() && id.SVID.ID() != want {
			continue
		}
		token, err := h.opts.Issuer.IssueJWTSVID(ctx, id.SVID.ID(), audience)
		if err == nil && token == "" {
			err = errors.New("the issuer returned no token and no error")
		}
		if err != nil {
			return nil, h.unavailable(ctx, fetchJWTSVID, err)
		}
		resp.svids = append(resp.svids, jwtSVID{spiffeID: id.SVID.ID().String(), svid: token, hint: id.Hint})
	}
	if len(resp.svids) == 0 {
		return nil, errDenied() // WAPI-42
	}
	m, err := encode(resp)
	if err != nil {
		return nil, h.unavailable(ctx, fetchJWTSVID, err)
	}
	return m.b, nil
}

func (h *Handler) validateJWTSVID(ctx context.Context, request []byte) ([]byte, error) {
	var req validateJWTSVIDRequest
	if decode(request, &req, 16) != nil {
		return nil, refusal("the request is not a ValidateJWTSVIDRequest")
	}
	if req.audience == "" || req.svid == "" {
		return nil, refusal("the audience or the svid is empty (WAPI-52)")
	}
	id, claims, err := h.opts.Validator.ValidateJWTSVID(ctx, req.audience, req.svid)
	if err != nil && unjudged(err) {
		return nil, h.unavailable(ctx, validateJWTSVID, err)
	}
	if err != nil {
		return nil, refusal("the JWT-SVID is not valid: " + withoutToken(err.Error(), req.svid))
	}
	if len(claims) == 0 || id.IsZero() {
		return nil, h.unavailable(ctx, validateJWTSVID, errors.New("the validator returned no claims or no ID, and no error"))
	}
	m, err := encode(&validateJWTSVIDResponse{spiffeID: id.String(), claims: claims})
	if err != nil {
		return nil, h.unavailable(ctx, validateJWTSVID, err)
	}
	return m.b, nil
}

// unjudged reports whether an error of a JWTValidator says nothing about the token.
func unjudged(err error) bool {
	if e, ok := errors.AsType[*Error](err); ok && !errors.Is(e, ErrRefused) {
		return true
	}
	if e, ok := errors.AsType[interface {
		error
		Retryable() (after time.Duration, ok bool)
	}](err); ok {
		if _, passes := e.Retryable(); passes {
			return true
		}
	}
	return errors.Is(err, ErrNotReady) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// withoutToken returns a text that a caller may see and log: not one that has a part of the token
// (WAPI-53).
func withoutToken(text, token string) string {
	for part := range strings.SplitSeq(token, ".") {
		if len(part) > 8 && strings.Contains(text, part[:len(part)/2]) {
			return "the reason quotes it, and stays here"
		}
	}
	if !utf8.ValidString(text) {
		return "the reason is not a text"
	}
	return clip(text, maxText)
}

// Refresh has [Options].Identities asked again for each stream: call it when it would answer
// differently although the provider has not changed, for instance after a workload was registered or
// removed, or when one of several identities was renewed.
func (h *Handler) Refresh() {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.refresh)
	h.refresh = make(chan struct{})
}

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
