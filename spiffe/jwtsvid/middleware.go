package jwtsvid

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"

	"github.com/svidkit/svidkit/internal/guard"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/spiffe"
)

// validateHeader validates the token in the values of an "Authorization" header (JWT-SVID section 5). There must be
// exactly one value, with the scheme Bearer in upper or lower case.
func (v *Validator) validateHeader(values []string) (*Verified, error) {
	err := errNoHeader
	switch len(values) {
	case 0:
	case 1:
		scheme, text, _ := strings.Cut(values[0], " ")
		if strings.EqualFold(scheme, "Bearer") {
			return v.Validate(strings.TrimLeft(text, " ")) // RFC 9110 section 11.4 allows several spaces
		}
		err = errScheme
	default:
		err = errHeaders
	}
	return nil, &token.Error{Kind: kind, Reason: token.NoToken, Rule: "JWT-32", Err: err}
}

// Reasons for refusing a request. The second and the last mean a broken request; the others ask for a token.
var (
	errNoHeader = errors.New("there is no Authorization header")
	errHeaders  = errors.New("there is more than one Authorization header")
	errScheme   = errors.New("the scheme of the Authorization header is not Bearer")
	errReadable = errors.New("the connection is not encrypted, so that others can read a token; " +
		"use TLS or a Unix socket, or set TLSTerminated")
)

// MiddlewareOptions are the choices of [Middleware] that have a default.
type MiddlewareOptions struct {
	// TLSTerminated says that TLS ends at a proxy in front of this server, and that no other machine can reach or
	// read the link between them. Otherwise a request must arrive over TLS or on a Unix socket, or it is refused.
	TLSTerminated bool

	// Peer is spiffetls.PeerFromRequest, or another function that returns the proven client of the connection. If it
	// is set, only the workload that a token names can send it, so that an intercepted or forwarded token is
	// useless: any other client gets 401, and so does an unproven one. It must be safe for concurrent use. Nil lets
	// any client send a token.
	Peer func(*http.Request) (*spiffe.Peer, error)

	// Logger gets warnings about refused requests: the first for each reason, and for each proven ID of the first
	// 12, at once, and the number of the others each minute, as clients can send as many as they like. The
	// attributes are reason, err, remote and, if the token was valid, id. At level Debug each refusal is logged. Nil
	// means no logs.
	Logger *slog.Logger
}

// Middleware returns a function that wraps handlers. The handler gets only requests with a valid token of a workload
// that the policy allows at that moment, and reads the proof with [FromContext]. A policy that can allow no peer is
// an error; see [spiffe.CheckPolicySource]. The options may be nil.
//
// Other requests are answered as in RFC 6750 section 3, with a WWW-Authenticate header and no reason: 401 without a
// token or with an invalid one, 400 with more than one Authorization header, and 403 if the token is valid and the
// policy does not allow its ID. See [MiddlewareOptions].Peer for the token of another client. If the bundle source
// fails, the answer is 503 without that header.
//
// A request that arrives without TLS and not on a Unix socket is answered 400, with a token or without (JWT-SVID
// section 7.3), and the token is not read: anyone on the network could copy it. See
// [MiddlewareOptions].TLSTerminated. A request whose path can be read in two ways is answered 400, too; see
// RequirePeer of package spiffetls. The same middleware serves gRPC over net/http.
func Middleware(
	v *Validator, allow spiffe.PolicySource, opts *MiddlewareOptions,
) (func(http.Handler) http.Handler, error) {
	err := spiffe.CheckPolicySource(allow)
	switch {
	case v == nil || v.check == nil:
		err = errNotMade
	case v.audience == nil:
		err = errors.New("the Validator is one for agents and has no audience")
	}
	if err != nil {
		return nil, fmt.Errorf("jwtsvid: middleware: %w", err)
	}
	o := *cmp.Or(opts, &MiddlewareOptions{})
	o.Logger = ratelog.Patient(o.Logger)
	m := &middleware{o, v, allow, ratelog.New(o.Logger, 0)}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { m.serve(w, r, next) })
	}, nil
}

type middleware struct {
	MiddlewareOptions // with the defaults

	validator *Validator
	allow     spiffe.PolicySource
	log       *ratelog.Log
}

func (m *middleware) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	var proof *Verified
	var err error = &token.Error{Kind: kind, Reason: token.NoToken, Rule: "JWT-34", Err: errReadable}
	if unclear := guard.Path(r); unclear != nil {
		err = &token.Error{Kind: kind, Reason: "unclear path", Err: unclear}
	} else if m.TLSTerminated || bearer.Confidential(r) {
		proof, err = m.validator.validateHeader(r.Header["Authorization"])
	}
	if err != nil {
		var reason token.Reason
		if e, ok := errors.AsType[*token.Error](err); ok { // all errors of a Validator are
			reason = e.Reason
		}
		m.refused(r, spiffe.ID{}, string(reason), slog.Any("err", err))
		status, challenge := answer(err)
		refuseRequest(w, status, challenge)
		return
	}
	if err := m.sentBy(r, proof.ID()); err != nil {
		m.refused(r, proof.ID(), "not the token of the client", slog.String("id", proof.String()),
			slog.Any("err", err))
		refuseRequest(w, http.StatusUnauthorized, `Bearer error="invalid_token"`)
		return
	}
	if err := m.allow.Policy().Check(proof.ID()); err != nil {
		m.refused(r, proof.ID(), string(token.Denied), slog.String("id", proof.String()), slog.Any("err", err))
		refuseRequest(w, http.StatusForbidden, `Bearer error="insufficient_scope"`)
		return
	}
	next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), proofKey{}, proof)))
}

// sentBy returns an error if id is not the client of the connection.
func (m *middleware) sentBy(r *http.Request, id spiffe.ID) error {
	if m.Peer == nil {
		return nil
	}
	switch peer, err := m.Peer(r); {
	case err != nil:
		return err
	case peer == nil:
		return errors.New("the client of the connection is not proven")
	case peer.ID() != id:
		return fmt.Errorf("the client of the connection is %s", peer.ID())
	}
	return nil
}

// refused logs a refused request. id is the ID that its token proved, or zero.
func (m *middleware) refused(r *http.Request, id spiffe.ID, reason string, attrs ...slog.Attr) {
	const message = "jwtsvid: request refused"
	attrs = append(attrs, slog.String("remote", r.RemoteAddr))
	m.log.LogOf(slog.LevelWarn, id.String(), message, reason, attrs...)
	m.Logger.LogAttrs(r.Context(), slog.LevelDebug, message, attrs...)
}

// answer returns the status and the challenge for an error of validateHeader.
func answer(err error) (status int, challenge string) {
	switch {
	case errors.Is(err, errHeaders), errors.Is(err, errReadable), errors.Is(err, guard.ErrPath):
		return http.StatusBadRequest, `Bearer error="invalid_request"`
	case errors.Is(err, token.NoToken):
		return http.StatusUnauthorized, `Bearer realm="jwt-svid"` // RFC 6750: no error if there was no attempt
	case errors.Is(err, ErrUnavailable):
		return http.StatusServiceUnavailable, ""
	}
	return http.StatusUnauthorized, `Bearer error="invalid_token"`
}

func refuseRequest(w http.ResponseWriter, status int, challenge string) {
	if challenge != "" {
		w.Header().Set("WWW-Authenticate", challenge)
	}
	http.Error(w, http.StatusText(status), status)
}

// proofKey is the key of a *Verified in the context of a request.
type proofKey struct{}

// FromContext returns the caller's proof from the context of a request that came through [Middleware]. For every
// other context it reports false.
func FromContext(ctx context.Context) (*Verified, bool) {
	p, ok := ctx.Value(proofKey{}).(*Verified)
	return p, ok
}
