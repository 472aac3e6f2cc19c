// Package caservice is shared by the certificate services below pki/caserver: a gRPC service with one unary method,
// the limits and the log of its calls, and the client's texts when the signer fails.
package caservice

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/retry"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

const (
	timeout         = 75 * time.Second // for a registration authority that waits a minute for its signer
	receiveTimeout  = 10 * time.Second
	sendTimeout     = 10 * time.Second
	maxRequest      = 192 << 10 // bytes: a CSR in PEM has at most 128 KiB, one in DER or a token 64 KiB
	maxIncoming     = 8 << 20   // bytes of requests that are being received
	maxPeerIncoming = 2 << 20   // of one connection
	maxCommonName   = 64        // bytes; RFC 5280 calls it ub-common-name

	// Verifying a signing request takes more processor time than everything before it. A request that would wait for
	// a processor longer than queueTime is refused, so that an overload does not make every request late.
	queueTime = 50 * time.Millisecond
	maxQueue  = 4096
)

// Service is a gRPC service with one unary method.
type Service struct {
	Name string // of the package; log messages begin with it
	Path string // of the method

	// Logger gets each certificate at level Debug. It gets at once the first refusal of each reason and, for the
	// first 12 callers, of each caller; the others are counted every minute, so that a caller cannot fill a log. A
	// Logger that takes Debug gets all of them. Nil means silence.
	Logger *slog.Logger

	// Reasons are errors that the log distinguishes, beside the errors of package ca and the codes.
	Reasons []error

	// Answer returns the response to a call. An error is a [*grpchttp.Error]: its code and message are
	// sent, its cause is logged. A panic becomes Internal.
	Answer func(ctx context.Context, c *Call) (response []byte, err error)

	// Answered, if set, is called with the code of each answer before it is sent.
	Answered func(grpchttp.Code)

	refused *ratelog.Log
	turns   *limit.Limiter
}

// Handler returns the service as a handler of gRPC over HTTP/2.
func (s Service) Handler() http.Handler {
	s.Logger = ratelog.Patient(s.Logger)
	s.turns = limit.New(limit.Options{Concurrent: runtime.GOMAXPROCS(0), Queue: maxQueue, QueueTime: queueTime})
	s.refused = ratelog.New(s.Logger, 0)
	return &grpchttp.Handler{
		Name:           s.Name,
		Methods:        map[string]grpchttp.Method{s.Path: s.serve},
		MaxMessage:     maxRequest,
		Incoming:       grpchttp.NewIncoming(s.Name, maxIncoming, maxPeerIncoming),
		Timeout:        timeout,
		ReceiveTimeout: receiveTimeout,
		SendTimeout:    sendTimeout,
	}
}

// Call is one call of the method.
type Call struct {
	*grpchttp.Call
	Attrs  []slog.Attr       // logged with the outcome
	Secret string            // a token to remove from the logged error
	Leaf   *x509.Certificate // the certificate in the response

	unread bool
	turns  *limit.Limiter
}

// ParseCSR calls parse, which verifies a signing request, when a processor is free, and returns its results. It
// refuses the call if that would take too long.
func (c *Call) ParseCSR(ctx context.Context, parse func() (*pki.CSR, error)) (*pki.CSR, error) {
	if err := c.turns.Acquire(ctx, ""); err != nil {
		return nil, SignError(ctx, err)
	}
	defer c.turns.Release()
	return parse()
}

// Receive returns the request.
func (c *Call) Receive() ([]byte, error) {
	msg, err := c.ReceiveOnly()
	if e, ok := errors.AsType[*grpchttp.Error](err); ok {
		c.unread = true
		return nil, Refuse(e.Code, e.Message, fmt.Errorf("the request could not be read: %w", e))
	}
	return msg, nil
}

func (s *Service) serve(ctx context.Context, g *grpchttp.Call) error {
	c := &Call{Call: g, turns: s.turns}
	response, e := s.answer(ctx, c)
	code := grpchttp.OK
	if e != nil {
		code = e.Code
	}
	if s.Answered != nil {
		s.Answered(code)
	}
	s.log(ctx, c, e)
	if e != nil {
		return e
	}
	return c.SendOnly(response)
}

// log logs the outcome of a call; e is nil if a certificate was issued.
func (s *Service) log(ctx context.Context, c *Call, e *grpchttp.Error) {
	level, each := slog.LevelDebug, s.Logger.Enabled(ctx, slog.LevelDebug)
	if e != nil {
		level = c.level(e)
	}
	if !s.Logger.Enabled(ctx, level) {
		return
	}
	attrs := append(c.Attrs, slog.String("peer", c.Request().RemoteAddr))
	if e == nil {
		attrs = append(attrs, slog.String("serial", c.Leaf.SerialNumber.Text(16)),
			slog.Time("not_after", c.Leaf.NotAfter))
		s.Logger.LogAttrs(ctx, level, s.Name+": certificate issued", attrs...)
		return
	}
	cause := strings.ReplaceAll(e.Err.Error(), "\n", "; ")
	attrs = append(attrs, slog.String("code", e.Code.String()),
		slog.String("err", bearer.Redact(cause, c.Secret, strings.TrimSpace(c.Secret))))
	if refused := s.Name + ": certificate refused"; each {
		s.Logger.LogAttrs(ctx, level, refused, attrs...)
	} else {
		name := peerkey.HolderOf(c.Request()).Name()
		if len(c.Attrs) > 0 && c.Attrs[0].Key == "caller" { // proven
			name = fmt.Sprint(c.Attrs[0].Value.Resolve())
		}
		s.refused.LogOf(level, name, refused, s.reason(e), attrs...)
	}
}

// reason returns the kind of a refusal. A client cannot choose its text.
func (s *Service) reason(e *grpchttp.Error) string {
	for _, kind := range slices.Concat(s.Reasons, reasons) {
		if errors.Is(e.Err, kind) {
			return kind.Error()
		}
	}
	return e.Code.String()
}

// reasons are the errors that every service distinguishes.
var reasons = []error{
	errPanic, ca.ErrLimit, spiffe.ErrNotReady, ca.ErrAudit, ca.ErrCSR, ca.ErrTTL, ca.ErrIdentity, ca.ErrGeneration,
}

var errPanic = errors.New("panic")

// answer calls s.Answer.
func (s *Service) answer(ctx context.Context, c *Call) (response []byte, e *grpchttp.Error) {
	defer func() {
		switch p := recover(); p {
		case nil:
		case http.ErrAbortHandler: // the exact value, as in net/http
			panic(p)
		default: // from the embedder's part
			e = Refuse(grpchttp.Internal, "internal error", fmt.Errorf("%w: %v\n%s", errPanic, p, debug.Stack()))
		}
	}()
	response, err := s.Answer(ctx, c)
	e, _ = errors.AsType[*grpchttp.Error](err)
	return response, e
}

// level returns Info for the client's failures, Error for a panic, and otherwise Warn.
func (c *Call) level(e *grpchttp.Error) slog.Level {
	switch e.Code {
	case grpchttp.InvalidArgument, grpchttp.FailedPrecondition, grpchttp.PermissionDenied, grpchttp.Unauthenticated,
		grpchttp.Canceled, grpchttp.DeadlineExceeded:
		return slog.LevelInfo
	}
	switch {
	case c.unread:
		return slog.LevelInfo
	case errors.Is(e.Err, errPanic):
		return slog.LevelError
	}
	return slog.LevelWarn
}

// Refuse returns the error for a refused call: the client gets the code and the text, the log gets the cause, or the
// text if that is nil.
func Refuse(code grpchttp.Code, text string, cause error) *grpchttp.Error {
	if cause == nil {
		cause = errors.New(text)
	}
	return &grpchttp.Error{Code: code, Message: text, Err: cause}
}

// Texts for clients about a failure of the signer.
const (
	TextNotGranted  = "the CA does not certify this caller"
	TextUnavailable = "the CA cannot answer now; try again later"
	TextInternal    = "the certificate could not be made"

	textLimit = "too many requests; try again later"
	textTTL   = "the CA does not grant the lifetime"
)

// SignError returns the error for a call whose signer, or another part that it needs, failed with err. A reached
// limit is ResourceExhausted, after which a client keeps its connection.
func SignError(ctx context.Context, err error) *grpchttp.Error {
	e := &grpchttp.Error{Err: err}
	after, advice := retry.After(err)
	e.RetryAfter = after
	_, over := errors.AsType[*limit.Error](err)
	switch {
	case over, errors.Is(err, ca.ErrLimit):
		e.Code, e.Message = grpchttp.ResourceExhausted, textLimit
	case errors.Is(err, spiffe.ErrNotReady):
		e.Code, e.Message = grpchttp.Unavailable, "the CA is not ready to sign; try again later"
	case errors.Is(err, ca.ErrAudit):
		e.Code, e.Message = grpchttp.Unavailable, TextUnavailable
	case errors.Is(err, ca.ErrCSR):
		e.Code, e.Message = grpchttp.InvalidArgument, "the key of the request must not be certified"
	case errors.Is(err, ca.ErrTTL):
		e.Code, e.Message = grpchttp.InvalidArgument, lifetimeText(err)
	case errors.Is(err, ca.ErrIdentity):
		e.Code, e.Message = grpchttp.PermissionDenied, TextNotGranted
	case ctx.Err() != nil:
		return Ended(ctx, err)
	case advice == retry.Again:
		e.Code, e.Message = grpchttp.Unavailable, TextUnavailable
	default:
		e.Code, e.Message = grpchttp.Internal, TextInternal
	}
	return e
}

// lifetimeText tells a client which lifetime was refused, and the nearest one that would be granted.
func lifetimeText(err error) string {
	if e, ok := errors.AsType[*ca.SignError](err); ok && e.Granted > 0 {
		return textTTL + ": " + e.Err.Error()
	}
	return textTTL
}

// Ended returns the error for a call that failed with err because its context is done: it distinguishes this server's
// time limit from the client's deadline or cancellation.
func Ended(ctx context.Context, err error) *grpchttp.Error {
	switch {
	case errors.Is(context.Cause(ctx), grpchttp.ErrTimeout):
		return Refuse(grpchttp.Unavailable, TextUnavailable, err)
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return Refuse(grpchttp.DeadlineExceeded, "the deadline of the call has passed", err)
	}
	return Refuse(grpchttp.Canceled, "the call was canceled", err)
}

// CheckChain reports whether a signer's chain can be sent: it is not too large, and its leaf is not a CA and has the
// key of the request.
func CheckChain(chain []*x509.Certificate, csr *pki.CSR) error {
	if err := certchain.CheckSize(chain); err != nil {
		return fmt.Errorf("chain: %w", err)
	}
	switch leaf := chain[0]; {
	case !pki.PublicKeysEqual(leaf.PublicKey, csr.PublicKey()):
		return errors.New("the certificate is for another key")
	case leaf.IsCA:
		return errors.New("the certificate is that of a CA")
	}
	return nil
}

// CommonName returns the common name for a certificate: name, if the request has one and name fits. The certificate
// is valid without it.
func CommonName(csr *pki.CSR, name string) string {
	if csr.CommonName() == "" || len(name) > maxCommonName {
		return ""
	}
	return name
}
