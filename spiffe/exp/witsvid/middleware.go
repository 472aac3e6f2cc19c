package witsvid

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/tokens/token"
)

// MiddlewareOptions are the choices of [Middleware] that have a default.
type MiddlewareOptions struct {
	// Tokens are the names of further header fields that carry tokens, saying on whose behalf a request is
	// made. Where they are present, a proof has to cover them, and a proof that covers another field is
	// refused (WPT-13). Authorization and Txn-Token are always covered.
	Tokens []string

	// MaxBody is the largest body in bytes of a signed request, and of a signed response, that is kept in
	// memory to make a digest of. 0 means 1 MiB; a larger request is refused with 413, a larger response
	// becomes 501.
	MaxBody int64

	// TLSTerminated says that TLS ends at a proxy in front of this server, and that no other machine can reach
	// or read the link between them. Otherwise a request that did not come by TLS is refused (WIT-44).
	TLSTerminated bool

	// Prover signs responses to clients that demand it (HSIG-10). Nil means that they are answered 501.
	Prover *Prover

	// Logger is told of requests that are refused (Info) and of responses that could not be signed (Error), with
	// the attributes reason, err and remote: the first of each reason at once, and a count of the others every
	// minute, so that a client cannot fill a log. One that takes Debug is told of each. Nil means silence.
	Logger *slog.Logger
}

// Middleware returns a function that wraps handlers so that only requests with a token and a valid proof
// get through: in the fields Workload-Identity-Token and Workload-Proof-Token, or with a message signature in the place of
// the latter. With both, both have to be valid. The handler reads the proof with [FromContext]. The
// options may be nil.
//
// The targets say what this server is called, and a proof has to be for one of them: an origin such as
// "https://db.example.org", behind which comes the path of the request, or another value that clients use
// as a whole. They come from configuration alone; no header field of a request can add to them (WPT-5).
//
// Other requests never reach the handler. They are answered 400, with a problem document (RFC 9457) that
// names the reason in a word or two; 403 if the proof is valid and the policy does not allow its ID; 413
// if a body is too large to check; and 503 for [ErrUnavailable]. There is no 401, which would invite a
// client to put the token into the field Authorization (WIT-50).
//
// The body of a signed request is read last, when all else is valid and the proof counts as used. After a
// body that is not what was signed the client needs a new proof.
//
// A response that is to be signed is buffered until the handler returns, and the handler's writer has the
// methods of http.ResponseWriter only. Handlers that change responses, such as compression, must be inside.
func Middleware(v *Validator, targets []string, opts *MiddlewareOptions) (func(http.Handler) http.Handler, error) {
	o := *cmp.Or(opts, &MiddlewareOptions{})
	var err error
	o.Tokens, err = tokenFields(o.Tokens)
	at, targetsErr := newTargets(targets)
	switch {
	case v == nil || v.check == nil:
		err = errNotMade
	case targetsErr != nil:
		err = targetsErr
	case o.Prover != nil && o.Prover.source == nil:
		err = errors.New("the Prover was not made by NewProver")
	case o.MaxBody < 0:
		err = fmt.Errorf("MaxBody is %d, which is less than 0", o.MaxBody)
	}
	if err != nil {
		return nil, fmt.Errorf("witsvid: middleware: %w", err)
	}
	o.MaxBody, o.Logger = cmp.Or(o.MaxBody, defaultMaxBody), cmp.Or(o.Logger, slog.New(slog.DiscardHandler))
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

// report logs what clients can cause as often as they like.
func (m *middleware) report(r *http.Request, level slog.Level, message, reason string, err error) {
	attrs := []slog.Attr{slog.Any("err", err), slog.String("remote", r.RemoteAddr)}
	if m.Logger.Enabled(r.Context(), slog.LevelDebug) {
		m.Logger.LogAttrs(r.Context(), level, message, append([]slog.Attr{slog.String("reason", reason)}, attrs...)...)
		return
	}
	m.log.Log(level, message, reason, attrs...)
}

func (m *middleware) serve(w http.ResponseWriter, r *http.Request, next http.Handler) {
	p := &received{r: r, m: m, message: &message{method: r.Method, target: requestTarget(r), header: r.Header}}
	proof, e := p.validate()
	if e != nil {
		m.report(r, slog.LevelInfo, "witsvid: request refused", e.What+": "+string(e.Reason), e)
		problem(w, status(e.Reason), e.What+": "+string(e.Reason))
		return
	}
	r = r.WithContext(context.WithValue(r.Context(), proofKey{}, proof))
	if p.body != nil {
		r.Body = p.body
	}
	if p.signed == nil || !p.signed.signResponse {
		next.ServeHTTP(w, r)
		return
	}
	m.serveSigned(w, r, next, p)
}

// status returns the HTTP status for a refusal.
func status(r token.Reason) int {
	switch r {
	case token.BundleSource, token.Busy:
		return http.StatusServiceUnavailable
	case token.Denied:
		return http.StatusForbidden
	case token.TooLarge:
		return http.StatusRequestEntityTooLarge
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

// received is a request on its way to the handler.
type received struct {
	r       *http.Request
	m       *middleware
	message *message
	signed  *signed       // nil if it has no message signature
	body    io.ReadCloser // that was read; nil if it was not
}

// validate validates all that the request has: the token, its proofs, which then count as used, and only
// then the body, whose sender decides how long it takes to read.
func (p *received) validate() (*Proof, *token.Error) {
	v, h := p.m.validator, p.r.Header
	if p.r.TLS == nil && !p.m.TLSTerminated {
		return nil, requests.Refuse("misplaced", "WIT-44", "it did not come by TLS")
	}
	if e := misplaced(h); e != nil {
		return nil, e
	}
	text, e := single(h, requests, headerToken, "WIT-49")
	if e != nil {
		return nil, e
	}
	hasProof := len(h[headerProof]) > 0
	hasSignature := hasProfile(h) || !hasProof && len(h["Signature-Input"]) > 0
	if !hasProof && !hasSignature {
		return nil, requests.Refuse("missing", "WIT-40", "there is a token and no proof of its key")
	}
	holder, now, e := v.verifyToken(text)
	if e != nil {
		return nil, e
	}
	var all []evidence
	if hasProof {
		all, e = p.validateProof(holder, text, now)
	}
	if e == nil && hasSignature {
		p.signed, e = p.validateSignature(holder, now)
		all = append(all, p.signed.evidence(signatures))
	}
	proof, e := v.admit(holder, text, now, e, all...)
	if e == nil && hasSignature {
		p.body, e = p.message.checkBody(requests, p.r.Body, p.r.ContentLength, p.m.MaxBody)
	}
	if e != nil {
		e.ID = holder.id
		return nil, e
	}
	return proof, nil
}

func (p *received) accept(aud string) bool { return p.m.targets.accept(aud, p.message.target) }

// validateProof validates the Workload Proof Token.
func (p *received) validateProof(holder *holder, text string, now time.Time) ([]evidence, *token.Error) {
	proof, e := single(p.r.Header, requests, headerProof, "WPT-1")
	if e != nil {
		return nil, e
	}
	call, e := fields(p.r.Header, p.m.Tokens)
	if e != nil {
		return nil, e
	}
	ev, e := p.m.validator.verifyProof(holder, text, proof, &call, now, p.accept)
	return []evidence{ev}, e
}

// validateSignature validates the message signature, but for the body.
func (p *received) validateSignature(holder *holder, now time.Time) (*signed, *token.Error) {
	s, e := p.m.validator.verifyMessage(holder, p.message, now)
	if e != nil {
		return nil, e
	}
	if !p.accept(s.audience) {
		return nil, signatures.Refuse(token.Audience, "HSIG-5", `"wimse-aud" is %q, which is not what is called here`, token.Clip(s.audience, 4*token.MaxQuoted))
	}
	for _, f := range p.m.Tokens {
		if p.message.has(f) && !slices.Contains(s.list, string(textItem(f))) {
			return nil, signatures.Refuse("binding", "HSIG-2", "the signature does not cover %q", f)
		}
	}
	return s, nil
}

// serveSigned calls the handler and signs its response.
func (m *middleware) serveSigned(w http.ResponseWriter, r *http.Request, next http.Handler, p *received) {
	fail := func(err error) {
		m.report(r, slog.LevelError, "witsvid: response not signed", "the client demands a signed response", err)
		problem(w, http.StatusNotImplemented, "response: cannot be signed")
	}
	if m.Prover == nil {
		fail(errors.New("the client demands a signed response, and there is no Prover"))
		return
	}
	if _, _, err := m.Prover.current(); err != nil { // before the handler has effects
		fail(err)
		return
	}
	rec := &recorder{header: w.Header().Clone(), limit: m.MaxBody}
	next.ServeHTTP(rec, r)
	if rec.tooLarge {
		fail(fmt.Errorf("the response is too large to be signed: %w", errBodyTooLarge(m.MaxBody)))
		return
	}
	rec.finish(r.Method)
	s, now, err := m.Prover.current() // again, as the handler may have taken long
	if err != nil {
		fail(err)
		return
	}
	rec.header.Set(headerToken, s.Token())
	answer := &message{status: rec.status, header: rec.header, request: p.message}
	if _, err := m.Prover.sign(s, now, answer, nil, param{"wimse-req-nonce", textItem(p.signed.nonce)}); err != nil {
		fail(err)
		return
	}
	h := w.Header()
	clear(h)
	for name, values := range rec.header {
		h[name] = slices.Clone(values)
	}
	w.WriteHeader(rec.status)
	_, _ = w.Write(rec.body.Bytes())
}

// recorder is an http.ResponseWriter that keeps the response.
type recorder struct {
	header   http.Header
	status   int
	sent     http.Header // header, as it was when the status was written
	body     bytes.Buffer
	limit    int64
	tooLarge bool
}

func (rec *recorder) Header() http.Header { return rec.header }

func (rec *recorder) WriteHeader(status int) {
	if rec.status == 0 && status >= 200 {
		rec.status, rec.sent = status, rec.header.Clone()
	}
}

func (rec *recorder) Write(data []byte) (int, error) {
	rec.WriteHeader(http.StatusOK)
	if rec.tooLarge || int64(rec.body.Len()+len(data)) > rec.limit {
		rec.tooLarge = true
		return 0, errBodyTooLarge(rec.limit)
	}
	return rec.body.Write(data)
}

// finish does what net/http would do later, after the signature.
func (rec *recorder) finish(method string) {
	rec.WriteHeader(http.StatusOK)
	rec.header = rec.sent
	h, body := rec.header, rec.body.Bytes()
	if _, ok := h["Content-Type"]; !ok && len(body) > 0 && h.Get("Content-Encoding") == "" {
		h.Set("Content-Type", http.DetectContentType(body))
	}
	h.Del("Content-Digest")
	switch {
	case rec.status == http.StatusNoContent || rec.status == http.StatusNotModified:
		rec.body.Reset()
		if rec.status == http.StatusNotModified {
			h.Del("Content-Type") // as net/http does
		}
	case method == http.MethodHead:
		if len(body) > 0 {
			h.Set("Content-Length", strconv.Itoa(len(body)))
		}
		rec.body.Reset()
	default:
		h.Set("Content-Length", strconv.Itoa(len(body)))
		if len(body) > 0 {
			h.Set("Content-Digest", contentDigest(body))
		}
	}
}

// proofKey is the key of a *Proof in the context of a request.
type proofKey struct{}

// FromContext returns the proof of the caller whose request is behind ctx, if the request came through
// [Middleware]. For every other context it reports false.
func FromContext(ctx context.Context) (*Proof, bool) {
	p, ok := ctx.Value(proofKey{}).(*Proof)
	return p, ok
}
