package witsvid

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/http"

	"github.com/svidkit/svidkit/internal/guard"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/tokens/token"
)

// MiddlewareOptions are the choices of [Middleware] that have a default.
type MiddlewareOptions struct {
	// TLSTerminated says that TLS ends at a proxy in front of this server, and that no other machine can reach or
	// read the link between them. Otherwise a request without TLS is refused.
	TLSTerminated bool

	// Logger gets refused requests (Info), with the attributes reason, err and remote: the first for each reason,
	// and for each ID of the first 12 that the policy denies, at once, and a count of the others every minute, so
	// that a client cannot fill a log. At level Debug each refusal is logged. Nil means no logs.
	Logger *slog.Logger
}

// Middleware returns a function that wraps handlers. The handler gets only requests with a token and a valid proof,
// in the fields Workload-Identity-Token and Workload-Proof-Token, and reads the proof with [FromContext]. The
// options may be nil.
//
// A proof must cover the tokens in the fields Authorization and Txn-Token, and one that covers another field is
// refused.
//
// The targets are the names of this server, and a proof must be for one of them: an origin such as
// "https://db.example.org", which the path of the request follows, or another value that clients use as a whole.
// They come from configuration alone; no header field of a request can add to them.
//
// Other requests never reach the handler. Nor do requests whose path can be read in two ways; see RequirePeer of
// package spiffetls. They are answered 400, with a problem document (RFC 9457) that names the reason in a word or
// two; 403 if the proof is valid and the policy does not allow its ID; and 503 for [ErrUnavailable]. There is no
// 401, which would invite a client to put the token into the field Authorization.
func Middleware(v *Validator, targets []string, opts *MiddlewareOptions) (func(http.Handler) http.Handler, error) {
	o := *cmp.Or(opts, &MiddlewareOptions{})
	at, err := newTargets(targets)
	if v == nil || v.check == nil {
		err = errNotMade
	}
	if err != nil {
		return nil, fmt.Errorf("witsvid: middleware: %w", err)
	}
	o.Logger = ratelog.Patient(o.Logger)
	m := &middleware{o, v, at, ratelog.New(o.Logger, 0)}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.serve(w, r, next) })
	}, nil
}

type middleware struct {
	MiddlewareOptions // with the defaults

	validator *Validator
	targets   *targets
	log       *ratelog.Log
}

func (m *middleware) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	proof, e := m.validate(r)
	if e != nil {
		reason := e.What + ": " + string(e.Reason)
		m.report(r, reason, e)
		problem(w, status(e.Reason), reason)
		return
	}
	next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), proofKey{}, proof)))
}

// report logs a refusal. Clients can cause any number of them.
func (m *middleware) report(r *http.Request, reason string, err *token.Error) {
	const message = "witsvid: request refused"
	attrs := []slog.Attr{slog.Any("err", err), slog.String("remote", r.RemoteAddr)}
	if m.Logger.Enabled(r.Context(), slog.LevelDebug) {
		m.Logger.LogAttrs(r.Context(), slog.LevelInfo, message, append(attrs, slog.String("reason", reason))...)
		return
	}
	var name string
	if err.Reason == token.Denied {
		name = err.ID.String()
	}
	m.log.LogOf(slog.LevelInfo, name, message, reason, attrs...)
}

// status returns the HTTP status for a refusal.
func status(r token.Reason) int {
	switch r {
	case token.BundleSource, token.Busy:
		return http.StatusServiceUnavailable
	case token.Denied:
		return http.StatusForbidden
	}
	return http.StatusBadRequest
}

// problem answers with a problem document (RFC 9457).
func problem(w http.ResponseWriter, status int, detail string) {
	h := w.Header()
	h.Set("Content-Type", "application/problem+json")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = fmt.Fprintf(w, `{"title":%q,"status":%d,"detail":%q}`+"\n", http.StatusText(status), status, detail)
}

// validate validates the token and the proof of a request; the proof then counts as used.
func (m *middleware) validate(r *http.Request) (*Proof, *token.Error) {
	if r.TLS == nil && !m.TLSTerminated {
		return nil, requests.Refuse("misplaced", "WIT-44", "it did not come by TLS")
	}
	if err := guard.Path(r); err != nil {
		return nil, requests.Refuse("unclear path", "", "%w", err)
	}
	if e := misplaced(r.Header); e != nil {
		return nil, e
	}
	text, e := single(r.Header, headerToken, "WIT-49")
	if e != nil {
		return nil, e
	}
	if len(r.Header[headerProof]) == 0 {
		return nil, requests.Refuse("missing", "WIT-40", "there is a token and no proof of its key")
	}
	holder, now, e := m.validator.verifyToken(text)
	if e != nil {
		return nil, e
	}
	proof, e := single(r.Header, headerProof, "WPT-1")
	var call Call
	if e == nil {
		call, e = fields(r.Header)
	}
	if e != nil {
		e.ID = holder.id
		return nil, e
	}
	target := requestTarget(r)
	return m.validator.verifyProof(holder, text, proof, &call, now,
		func(aud string) bool { return m.targets.accept(aud, target) })
}

// proofKey is the key of a *Proof in the context of a request.
type proofKey struct{}

// FromContext returns the caller's proof from the context of a request that came through [Middleware]. For every
// other context it reports false.
func FromContext(ctx context.Context) (*Proof, bool) {
	p, ok := ctx.Value(proofKey{}).(*Proof)
	return p, ok
}
