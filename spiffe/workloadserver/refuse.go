package workloadserver

import (
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

// refusal is the refusal of a request: what the caller is told, and what is logged.
type refusal struct {
	status *grpchttp.Error
	reason string    // one of a few
	text   string    // more about it; may be empty
	id     spiffe.ID // that was asked for; zero if none was
}

func (r *refusal) Error() string { return r.status.Error() }
func (r *refusal) Unwrap() error { return r.status }

// What callers are told.
func status(code grpchttp.Code, text string) *grpchttp.Error {
	return grpchttp.Errorf(code, "workloadserver: %s", text)
}
func refuse(code grpchttp.Code, reason, text string) error {
	return &refusal{status: status(code, text), reason: reason}
}
func badRequest(text string) error {
	return &refusal{status: status(grpchttp.InvalidArgument, text), reason: "bad request", text: text}
}
func errClosing() error { return status(grpchttp.Unavailable, "the server is shutting down") }

// errDenied is the refusal of a caller that has no identity, or not the one that it asks for.
func errDenied(id spiffe.ID) error {
	e := status(grpchttp.PermissionDenied, "there is no identity for this caller; register the workload, or try again later")
	e.Err = ErrDenied
	return &refusal{status: e, reason: "no identity for the caller", id: id}
}

// errAudience is the refusal of a caller whose identities may have no token for the audience, of which id is the last.
func errAudience(id spiffe.ID, audience []string, err error) error {
	e := status(grpchttp.PermissionDenied, fmt.Sprintf("no identity of this caller may have a token for %s; have the audience permitted for one", redact.Clip(fmt.Sprintf("%q", audience), 300)))
	e.Err = ErrDenied
	return &refusal{status: e, reason: "audience not permitted", text: plain(fmt.Sprintf("for %q: %v", audience, err)), id: id}
}

// tooMany is the refusal of a request over a share.
func tooMany(err error) error {
	e := status(grpchttp.ResourceExhausted, "too many streams are open; try again later")
	e.Err, e.RetryAfter = err, retryFull
	r := &refusal{status: e, reason: "too many streams"}
	if over, ok := errors.AsType[*limit.Error](err); ok {
		r.reason = over.Reason
	}
	return r
}

// ended returns the status for a context that is done: the client has gone, the deadline has passed, or the server is
// stopping.
func ended(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return status(grpchttp.DeadlineExceeded, "the deadline of the call has passed")
	}
	return errClosing()
}

// failure is an error of a part of the handler.
type failure struct {
	part string // "provider", "identities", "issuer" or "validator"
	err  error
}

func (f *failure) Error() string { return f.part + ": " + f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// issuerError returns the error for an issuer that failed with err to issue a token for id.
func issuerError(id spiffe.ID, err error) error {
	_, advice := retry.After(err)
	switch {
	case errors.Is(err, ErrDenied):
		return errDenied(id)
	case advice == retry.Again:
	case errors.Is(err, errors.ErrUnsupported), errors.Is(err, workloadwire.ErrUnimplemented):
		const text = "no tokens of this kind are issued here"
		return &refusal{status: status(grpchttp.Unimplemented, text), reason: "bad request", text: "the issuer: " + plain(err.Error()), id: id}
	case errors.Is(err, fs.ErrInvalid):
		return badRequest("the issuer refuses the request: " + plain(err.Error()))
	case errors.Is(err, workloadwire.ErrRefused): // of another server, whose text is for this one
		return badRequest("the issuer refuses the request")
	}
	return &failure{"issuer", err}
}

// passes reports whether err is a failure of a part, and neither an answer nor the end of the call.
func passes(ctx context.Context, err error) bool {
	switch err.(type) { //nolint:errorlint // not one that a hook has wrapped
	case *refusal, *grpchttp.Error:
		return false
	}
	return ctx.Err() == nil && !errors.Is(err, ErrDenied)
}

// told returns what the caller is told of an error: a status as it is, and otherwise that there is nothing for it, or
// to come back. It logs refusals and failures.
func (h *Handler) told(ctx context.Context, r *http.Request, err error) error {
	switch e := err.(type) { //nolint:errorlint // not one that a hook has wrapped
	case nil:
		return nil
	case *refusal:
		h.refused(ctx, r, e)
		return e.status
	case *grpchttp.Error:
		return err
	}
	if errors.Is(err, ErrDenied) {
		return h.told(ctx, r, errDenied(spiffe.ID{}))
	}
	if ctx.Err() != nil { // the caller has gone
		return ended(ctx)
	}
	h.failed(ctx, r, err)
	e := status(grpchttp.Unavailable, unavailable(err))
	e.RetryAfter, _ = retry.After(err)
	return e
}

// unavailable is what a caller is told of a failure: which part has failed, and not why.
func unavailable(err error) string {
	text := "the server cannot answer now"
	if f, ok := errors.AsType[*failure](err); ok {
		switch f.part {
		case "provider":
			text = "the server has no identity and trust bundles to serve now"
		case "identities":
			text = "the server cannot tell now which identities this caller has"
		case "issuer":
			text = "the server cannot issue tokens now"
		case "validator":
			text = "the server cannot check tokens now"
		}
	}
	return text + "; its log says why; try again later"
}

// failed logs a failure, for which the caller is not to blame.
func (h *Handler) failed(ctx context.Context, r *http.Request, err error) {
	reason := "the response cannot be made"
	if f, ok := errors.AsType[*failure](err); ok {
		reason = f.part
	}
	inc(h.counts.failed, reason)
	h.warn(ctx, r, "workloadserver: request failed", reason, slog.Any("err", err))
}

// refused logs a refusal.
func (h *Handler) refused(ctx context.Context, r *http.Request, e *refusal) {
	var more []slog.Attr
	if e.text != "" {
		more = append(more, slog.String("err", e.text))
	}
	if !e.id.IsZero() {
		more = append(more, slog.String("id", e.id.String()))
	}
	inc(h.counts.refused, refusals[e.reason])
	h.warn(ctx, r, "workloadserver: request refused", e.reason, more...)
}

// warn logs, at a bounded rate, an event that callers can cause.
func (h *Handler) warn(ctx context.Context, r *http.Request, message, reason string, more ...slog.Attr) {
	attrs := []slog.Attr{slog.String("method", redact.Clip(strings.TrimPrefix(r.URL.Path, workloadwire.Service), 64))}
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
	return advice == retry.Again || errors.Is(err, workloadwire.ErrUnimplemented) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// withoutToken returns text as a caller may see and log it: without any part of the token (WAPI-53).
func withoutToken(text, token string) string {
	for part := range strings.SplitSeq(token, ".") {
		if len(part) > 8 && strings.Contains(text, part[:len(part)/2]) {
			return "the reason quotes it, and is withheld"
		}
	}
	return plain(text)
}

// plain returns a text of a hook as a caller may see it.
func plain(text string) string {
	if !utf8.ValidString(text) {
		return "the reason is not a text"
	}
	return redact.Clip(text, maxText)
}
