package istioca

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/svidkit/svidkit/internal/carpc"
	"github.com/svidkit/svidkit/internal/certchain"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

const maxCommonName = 64 // bytes; RFC 5280 calls it ub-common-name

func (s *Server) create(ctx context.Context, r *connect.Request[request]) (resp *connect.Response[response], err error) {
	c := ctx.Value(callKey{}).(*call)
	c.read = true
	defer s.contain(ctx, c, &err)
	chain, err := s.sign(ctx, c, r.Msg)
	if err != nil {
		return nil, err
	}
	b, err := s.encode(chain)
	if err != nil {
		return nil, s.failed(ctx, c, slog.LevelWarn, connect.CodeInternal, "CERT_GEN_ERROR", "the answer of the signer cannot be used", err)
	}
	s.metrics.issued.Inc()
	s.log(ctx, slog.LevelDebug, "certificate issued", c, slog.String("serial", chain[0].SerialNumber.Text(16)), slog.Time("not_after", chain[0].NotAfter))
	return connect.NewResponse(&response{b}), nil
}

// sign returns the chain for a request.
func (s *Server) sign(ctx context.Context, c *call, r *request) ([]*x509.Certificate, error) {
	if r.err != nil {
		s.metrics.badCSR.Inc()
		return nil, s.failed(ctx, c, slog.LevelInfo, connect.CodeInvalidArgument, "CSR_ERROR", r.err.Error(), r.err)
	}
	g, err := s.grant(ctx, c, r)
	if err != nil {
		return nil, err
	}
	csr, err := pki.ParseCSRPEM(r.csr)
	if err != nil {
		s.metrics.badCSR.Inc() // the text is about what the client sent
		return nil, s.failed(ctx, c, slog.LevelInfo, connect.CodeInvalidArgument, "CSR_ERROR", err.Error(), err)
	}
	req := ca.Request{
		CSR: csr, ID: g.ID, DNSNames: g.DNSNames, IPs: g.IPs,
		Caller: c.caller.ID.String(), Method: c.caller.Method, Signer: r.signer,
	}
	if cn := g.ID.String(); csr.CommonName() != "" && len(cn) <= maxCommonName {
		req.CommonName = cn // a longer one does not fit: the certificate goes without, and is good all the same
	}
	switch {
	case r.validity > math.MaxInt64/int64(time.Second):
		err := fmt.Errorf("%d seconds were asked for", r.validity)
		return nil, s.failed(ctx, c, slog.LevelInfo, connect.CodeInvalidArgument, "TTL_ERROR", textTTL, err)
	case r.validity > 0:
		req.TTL = time.Duration(r.validity) * time.Second
	}
	chain, err := s.opts.Signer.Sign(ctx, req)
	if err != nil {
		return nil, s.signError(ctx, c, err)
	}
	return chain, nil
}

// grant decides what the caller is certified for.
func (s *Server) grant(ctx context.Context, c *call, r *request) (Grant, error) {
	if r.impersonate != "" {
		id, err := s.impersonate(ctx, c, r.impersonate)
		if err != nil {
			s.metrics.unauthenticated.Inc()
			s.log(ctx, slog.LevelInfo, "impersonation refused", c, slog.String("requested", clip(r.impersonate)), slog.Any("err", err))
			return Grant{}, connect.NewError(connect.CodeUnauthenticated, errImpersonation)
		}
		return Grant{ID: id}, nil
	}
	g, err := s.opts.Policy(ctx, c.caller)
	if err == nil && g.ID.IsZero() {
		err = errors.New("the policy returned neither an ID nor an error")
	}
	if err == nil {
		return g, nil
	}
	s.metrics.noID.Inc()
	if after, ok := retryable(err); ok {
		return Grant{}, withRetryInfo(s.failed(ctx, c, slog.LevelWarn, connect.CodeUnavailable, "ID_ERROR", textUnavailable, err), after)
	}
	return Grant{}, s.failed(ctx, c, slog.LevelInfo, connect.CodePermissionDenied, "ID_ERROR", textID, err)
}

// impersonate returns the ID that the caller may have instead of its own.
func (s *Server) impersonate(ctx context.Context, c *call, text string) (spiffe.ID, error) {
	if s.opts.NodeAuthorizer == nil {
		return spiffe.ID{}, errors.New("there is no NodeAuthorizer")
	}
	id, err := spiffe.ParseID(text)
	if err != nil {
		s.metrics.noID.Inc()
		return spiffe.ID{}, err
	}
	switch {
	case !id.MemberOf(c.caller.ID.TrustDomain()):
		return spiffe.ID{}, errors.New("the requested ID is of another trust domain than the caller")
	case id.Path() == "":
		return spiffe.ID{}, errors.New("the requested ID is that of the trust domain, and of no workload")
	}
	if err := s.opts.NodeAuthorizer.Authorize(ctx, c.caller, id); err != nil {
		return spiffe.ID{}, err
	}
	return id, nil
}

// What clients are told about a failure of the signer.
const (
	textNotReady    = "the CA is not ready to sign; try again later"
	textKey         = "the key of the request must not be certified"
	textTTL         = "the lifetime is longer than the CA grants, or shorter than a second"
	textID          = "the CA does not certify this caller"
	textLimit       = "too many requests; try again later"
	textUnavailable = "the CA cannot answer now; try again later"
	textDeadline    = "the deadline of the call has passed"
	textInternal    = "the certificate could not be made"
)

// signError translates an error of the signer.
func (s *Server) signError(ctx context.Context, c *call, err error) error {
	e, _ := errors.AsType[*ca.SignError](err)
	after, passes := retryable(err)
	if e != nil && e.RetryAfter > 0 {
		after = e.RetryAfter
	}
	fail := func(level slog.Level, code connect.Code, label, text string) error {
		return withRetryInfo(s.failed(ctx, c, level, code, label, text, err), after)
	}
	switch {
	case ctx.Err() != nil && !errors.Is(context.Cause(ctx), errTimeout):
		return fail(slog.LevelInfo, connect.CodeDeadlineExceeded, "UNKNOWN", textDeadline) // the client's, or it has gone
	case errors.Is(err, ca.ErrLimit):
		return fail(slog.LevelWarn, connect.CodeResourceExhausted, "LIMIT_ERROR", textLimit)
	case errors.Is(err, ca.ErrAudit):
		return fail(slog.LevelWarn, connect.CodeUnavailable, "AUDIT_ERROR", textUnavailable)
	case errors.Is(err, ca.ErrNotReady):
		return fail(slog.LevelWarn, connect.CodeUnavailable, "CA_NOT_READY", textNotReady)
	case errors.Is(err, ca.ErrCSR):
		return fail(slog.LevelInfo, connect.CodeInvalidArgument, "CSR_ERROR", textKey)
	case errors.Is(err, ca.ErrTTL):
		return fail(slog.LevelInfo, connect.CodeInvalidArgument, "TTL_ERROR", textTTL)
	case errors.Is(err, ca.ErrIdentity):
		s.metrics.noID.Inc()
		return fail(slog.LevelInfo, connect.CodePermissionDenied, "ID_ERROR", textID)
	case ctx.Err() != nil, passes:
		return fail(slog.LevelWarn, connect.CodeUnavailable, "UNKNOWN", textUnavailable)
	case errors.Is(err, ca.ErrGeneration):
		return fail(slog.LevelWarn, connect.CodeInternal, "CERT_GEN_ERROR", textInternal)
	}
	return fail(slog.LevelWarn, connect.CodeInternal, "UNKNOWN", textInternal)
}

// failed counts and logs a failure, and returns what the client is told of it.
func (s *Server) failed(ctx context.Context, c *call, level slog.Level, code connect.Code, label, text string, cause error) error {
	s.metrics.failed[label].Inc()
	s.log(ctx, level, "signing failed", c, slog.String("code", code.String()), slog.Any("err", cause))
	return connect.NewError(code, errors.New("CSR signing error ("+text+")"))
}

// withRetryInfo adds to a status when to come back; 0 adds nothing. err is a *connect.Error.
func withRetryInfo(err error, after time.Duration) error {
	e, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return err
	}
	carpc.AddRetryInfo(e, after)
	return e
}

func clip(text string) string { return text[:min(len(text), 256)] }

// encode returns the response for a chain: each certificate in a text of its own, and then all
// roots in one.
func (s *Server) encode(chain []*x509.Certificate) ([]byte, error) {
	if err := certchain.CheckSize(chain); err != nil {
		return nil, fmt.Errorf("chain: %w", err)
	}
	bundle := s.opts.Signer.Bundle() // after the signing, so that the root of the leaf is in it
	t := s.tail.Load()
	if !t.is(chain[1:], bundle) {
		var err error
		if t, err = newTail(chain[1:], bundle); err != nil {
			return nil, err
		}
		s.tail.Store(t)
	}
	leaf := pki.MarshalCertificatesPEM(chain[0])
	return append(appendText(make([]byte, 0, len(leaf)+len(t.encoded)+8), leaf), t.encoded...), nil
}

func newTail(chain []*x509.Certificate, bundle *spiffe.Bundle) (*tail, error) {
	t := &tail{chain: slices.Clone(chain), bundle: bundle}
	var roots []*x509.Certificate
	if bundle != nil {
		roots = slices.Collect(bundle.X509Authorities())
	}
	if n := len(chain); len(roots) == 0 && n > 0 && chain[n-1].BasicConstraintsValid && chain[n-1].IsCA {
		roots = chain[n-1:]
	}
	if len(roots) == 0 {
		return nil, errors.New("there is no root: the bundle is empty, and the chain does not end in a CA certificate")
	}
	t.root = roots[0]
	var above []*x509.Certificate
	for i, c := range chain {
		// One that is a root here may be an intermediate for whoever has another bundle, unless it is
		// the end of the chain.
		if certchain.SelfSigned(c) || i == len(chain)-1 && contains(roots, c) || contains(above, c) {
			continue
		}
		above = append(above, c)
		t.encoded = appendText(t.encoded, pki.MarshalCertificatesPEM(c))
	}
	if len(above) > 0 {
		t.signer = above[0]
	}
	t.encoded = appendText(t.encoded, pki.MarshalCertificatesPEM(roots...))
	return t, nil
}

// appendText appends one cert_chain of an IstioCertificateResponse.
func appendText(b, text []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, 1, protowire.BytesType), text)
}
