package workloadserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/retry"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// callError says why a request ends: the status is for the caller, the rest is for the log.
type callError struct {
	status *grpchttp.Error
	reason string    // what refused or failed, as the metrics say it
	err    error     // details for the log only; may be nil
	id     spiffe.ID // the requested ID; zero if none
	failed bool      // a part of the server failed; the caller is not at fault
}

func (e *callError) Error() string {
	if e.failed {
		return e.reason + ": " + e.err.Error()
	}
	return e.status.Error()
}

func (e *callError) Unwrap() []error { return []error{e.status, e.err} }

// status returns a status for the caller.
func status(code grpchttp.Code, text string) *grpchttp.Error {
	return grpchttp.Errorf(code, "workloadserver: %s", text)
}

func refuse(code grpchttp.Code, reason, text string) error {
	return &callError{status: status(code, text), reason: reason}
}

func badRequest(text string) error {
	e := status(grpchttp.InvalidArgument, text)
	return &callError{status: e, reason: "bad_request", err: errors.New(text)}
}

// refusal returns the error for a request that a Front refuses.
func refusal(e *grpchttp.Error) error {
	return &callError{status: e, reason: "broker", err: cmp.Or(e.Err, error(e))}
}

func errClosing() error { return status(grpchttp.Unavailable, "the server is shutting down") }

// errDenied returns the error for a caller that has no identity, or not the requested one.
func errDenied(id spiffe.ID) error {
	return denial("no_identity", "there is no identity for this caller; register the workload, or try again later",
		id, nil)
}

func denial(reason, text string, id spiffe.ID, why error) error {
	e := status(grpchttp.PermissionDenied, text)
	e.Err = ErrDenied
	return &callError{status: e, reason: reason, err: why, id: id}
}

// errAudience returns the error for a caller none of whose identities may have a token for the audience. id is the
// last identity that was refused.
func errAudience(id spiffe.ID, audience []string, err error) error {
	names := redact.Clip(fmt.Sprintf("%q", audience), 300)
	text := "no identity of this caller may have a token for " + names + "; have the audience permitted for one"
	return denial("audience", text, id, errors.New(plain(fmt.Sprintf("for %q: %v", audience, err))))
}

// tooMany returns the error for a request beyond a limit.
func tooMany(err error) error {
	e := status(grpchttp.ResourceExhausted, "too many streams are open; try again later")
	e.Err, e.RetryAfter = err, retryFull
	reason := "too_many_streams"
	if over, ok := errors.AsType[*limit.Error](err); ok && over.Reason == limit.CallerShare {
		reason = "too_many_streams_of_peer"
	}
	return &callError{status: e, reason: reason}
}

// ended returns the status for a context that is done because the client has gone, the deadline has passed, or the
// server is stopping.
func ended(ctx context.Context) error {
	if e, ok := errors.AsType[*grpchttp.Error](context.Cause(ctx)); ok { // of a Front
		return e
	}
	if errors.Is(context.Cause(ctx), fs.ErrNotExist) { // of a Front's workload
		return status(grpchttp.NotFound, "the workload has ended")
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return status(grpchttp.DeadlineExceeded, "the deadline of the call has passed")
	}
	return errClosing()
}

// parts has the texts for the caller when a part of the server fails.
var parts = map[string]string{
	"provider":   "the server has no identity and trust bundles to serve now",
	"identities": "the server cannot tell now which identities this caller has",
	"issuer":     "the server cannot issue tokens now",
	"validator":  "the server cannot check tokens now",
	"response":   "the server cannot answer now",
}

// failure returns the error for a part of the server that failed with err. The caller does not see err, but an error
// that wraps [ErrDenied] becomes a denial.
func failure(part string, err error) error {
	if errors.Is(err, ErrDenied) {
		return errDenied(spiffe.ID{})
	}
	e := status(grpchttp.Unavailable, parts[part]+"; its log says why; try again later")
	e.RetryAfter, _ = retry.After(err)
	return &callError{status: e, reason: part, err: err, failed: true}
}

// issuerError returns the error for an issuer that failed with err to issue a token for id.
func issuerError(id spiffe.ID, err error) error {
	_, advice := retry.After(err)
	switch {
	case errors.Is(err, ErrDenied):
		return errDenied(id)
	case advice == retry.Again:
	case errors.Is(err, errors.ErrUnsupported):
		e := status(grpchttp.Unimplemented, "no tokens of this kind are issued here")
		return &callError{status: e, reason: "bad_request", err: errors.New("the issuer: " + plain(err.Error())),
			id: id}
	case errors.Is(err, fs.ErrInvalid):
		return badRequest("the issuer refuses the request: " + plain(err.Error()))
	case errors.Is(err, workloadwire.ErrRefused): // the text of the other server is not for this caller
		return badRequest("the issuer refuses the request")
	}
	return failure("issuer", err)
}

// hasFailed reports whether err says that a part of the server failed while the call was still wanted.
func hasFailed(ctx context.Context, err error) bool {
	e, ok := err.(*callError) // not one that a hook has wrapped
	return ok && e.failed && ctx.Err() == nil
}

// told converts err to the status for the caller. It logs refusals and failures.
func (h *Handler) told(ctx context.Context, r *http.Request, err error) error {
	switch e := err.(type) { // not one that a hook has wrapped
	case nil, *grpchttp.Error:
		return err
	case *callError:
		if e.failed && ctx.Err() != nil { // the caller has gone
			return ended(ctx)
		}
		h.note(ctx, r, e)
		return e.status
	}
	return h.told(ctx, r, failure("response", err))
}

// note logs and counts e.
func (h *Handler) note(ctx context.Context, r *http.Request, e *callError) {
	var more []slog.Attr
	if e.err != nil {
		more = append(more, slog.Any("err", e.err))
	}
	if !e.id.IsZero() {
		more = append(more, slog.String("id", e.id.String()))
	}
	message, counter := "workloadserver: request refused", h.counts.refused
	if e.failed {
		message, counter = "workloadserver: request failed", h.counts.failed
	}
	counter[e.reason].Inc()
	h.warn(ctx, r, message, e.reason, more...)
}

// warn logs an event that callers can cause, at a bounded rate.
func (h *Handler) warn(ctx context.Context, r *http.Request, message, reason string, more ...slog.Attr) {
	method := redact.Clip(strings.TrimPrefix(r.URL.Path, workloadwire.Service), 64)
	attrs := []slog.Attr{slog.String("method", method)}
	if p, ok := unixsocket.PeerFromContext(ctx); ok {
		attrs = append(attrs, slog.Int64("uid", int64(p.UID)), slog.Int64("pid", int64(p.PID)))
	} else if r.RemoteAddr != "" {
		attrs = append(attrs, slog.String("remote", r.RemoteAddr))
	}
	h.log.LogOf(slog.LevelWarn, peerkey.HolderOf(r).Name(), message, reason, append(attrs, more...)...)
}

// unjudged reports whether an error of ValidateJWTSVID says nothing about the token.
func unjudged(err error) bool {
	_, advice := retry.After(err)
	return advice == retry.Again || errors.Is(err, errors.ErrUnsupported) ||
		errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// plain returns the text of a hook's error in a form that a caller may see.
func plain(text string) string {
	if !utf8.ValidString(text) {
		return "the reason is not a text"
	}
	return redact.Clip(text, maxText)
}
