package authn

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"net/http"
	"strconv"
	"strings"

	"github.com/svidkit/svidkit/internal/guard"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/retry"
	"github.com/svidkit/svidkit/spiffe"
)

// Require returns a handler that passes a request to next if a proves its sender. next, and every hook that gets the
// request's context, reads the [Caller] with [CallerFromContext]. Require does not decide what a caller may have, and
// a caller need not have a SPIFFE ID.
//
// Other requests get a constant text: 401 with "WWW-Authenticate: Bearer" if no credential is good, and 503, with
// Retry-After if known, if a could not decide now: see [Unavailable]. A gRPC call, recognised by its content type,
// gets the status UNAUTHENTICATED or UNAVAILABLE in the header, as gRPC defines it for a response without a message.
// Before a runs, each request with an ambiguous path gets 400: a CONNECT with a path, a path that [path.Clean]
// changes, and an escaped slash below a pattern of [http.ServeMux] that ends with a slash.
//
// The logger gets warnings about refused requests, with the error and the peer's address. The first of each kind, and
// the first for each of up to 12 SPIFFE IDs that a policy denies, is logged at once; then their number each minute,
// because clients can send any number. At level Debug it gets every one. Nil means no logs.
//
// A stream is authenticated when it begins; [Caller].NotAfter says when the proof expires.
func Require(a Authenticator, next http.Handler, logger *slog.Logger) http.Handler {
	logger = ratelog.Patient(logger)
	return &required{a, next, logger, ratelog.New(logger, 0)}
}

type required struct {
	authenticator Authenticator
	next          http.Handler
	logger        *slog.Logger
	refused       *ratelog.Log
}

// callerKey is the key of a *Caller in the context of a request.
type callerKey struct{}

// CallerFromContext returns the proven caller of the request with the context ctx, if the request came through
// [Require]. For every other context it reports false.
func CallerFromContext(ctx context.Context) (*Caller, bool) {
	c, ok := ctx.Value(callerKey{}).(*Caller)
	return c, ok
}

// ServeHTTP implements [http.Handler].
func (h *required) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if err := guard.Path(r); err != nil {
		h.report(r, err, guard.ErrPath.Error())
		w.Header().Set("Cache-Control", "no-store")
		http.Error(w, http.StatusText(http.StatusBadRequest), http.StatusBadRequest)
		return
	}
	caller, err := h.authenticator.Authenticate(r)
	switch {
	case err == nil && caller.proven():
		h.next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), callerKey{}, caller)))
		return
	case err == nil:
		err = errNothing
	}
	reason, code, status := "no credential is good", grpcUnauthenticated, http.StatusUnauthorized
	if r.Context().Err() != nil || Unavailable(err) {
		reason, code, status = "credentials cannot be judged now", grpcUnavailable, http.StatusServiceUnavailable
	} else if !errors.Is(err, ErrRefused) {
		reason = "there is no credential"
	}
	h.report(r, err, reason)
	if isGRPC(r) {
		w.Header().Set("Content-Type", "application/grpc")
		w.Header().Set("Grpc-Status", code)
		w.Header().Set("Grpc-Message", http.StatusText(status))
		return // the status 200, and no body
	}
	if status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", "Bearer")
	} else if after, advice := retry.After(err); advice == retry.Again && after > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(after.Seconds()))))
	}
	w.Header().Set("Cache-Control", "no-store")
	http.Error(w, http.StatusText(status), status)
}

func (h *required) report(r *http.Request, err error, reason string) {
	const message = "authn: request refused"
	attrs := []slog.Attr{slog.String("err", strings.ReplaceAll(err.Error(), "\n", "; ")),
		slog.String("peer", r.RemoteAddr)}
	if h.logger.Enabled(r.Context(), slog.LevelDebug) {
		h.logger.LogAttrs(r.Context(), slog.LevelWarn, message, append(attrs, slog.String("reason", reason))...)
	} else {
		var name string
		if e, ok := errors.AsType[*spiffe.VerifyError](err); ok && e.Stage == "policy" {
			name = e.ID.String()
		}
		h.refused.LogOf(slog.LevelWarn, name, message, reason, attrs...)
	}
}

// Numbers of gRPC for a status.
const (
	grpcUnavailable     = "14"
	grpcUnauthenticated = "16"
)

func isGRPC(r *http.Request) bool {
	rest, ok := strings.CutPrefix(r.Header.Get("Content-Type"), "application/grpc")
	return ok && r.ProtoMajor >= 2 && (rest == "" || rest[0] == '+' || rest[0] == ';')
}

// Unavailable reports whether err, of an [Authenticator], means that the caller could not be judged now: an API
// server or an issuer did not answer, or a limit is reached. The same request may succeed later. Otherwise no
// credential is good, and err wraps [ErrNoCredential] or [ErrRefused]. With several methods, Unavailable is false
// only if all have judged: see [FirstOf].
func Unavailable(err error) bool {
	if _, ok := errors.AsType[*undecided](err); ok {
		return true
	}
	_, advice := retry.After(err)
	return err != nil && advice != retry.Never && !errors.Is(err, ErrNoCredential) && !errors.Is(err, ErrRefused)
}
