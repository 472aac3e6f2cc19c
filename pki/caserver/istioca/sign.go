package istioca

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"time"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/retry"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/internal/caservice"
	"github.com/svidkit/svidkit/spiffe"
)

// create answers one call.
func (s *Server) create(ctx context.Context, c *caservice.Call) ([]byte, error) {
	s.metrics.requests.Inc()
	caller, err := s.authenticate(c.Request().WithContext(ctx))
	if err != nil {
		s.metrics.unauthenticated.Inc()
		return nil, err
	}
	c.Attrs = append(c.Attrs, slog.Any("caller", caller))
	msg, err := c.Receive()
	if err != nil {
		s.metrics.badCSR.Inc()
		return nil, err
	}
	chain, err := s.sign(ctx, c, caller, msg)
	if err != nil {
		return nil, err
	}
	c.Leaf = chain[0]
	response, err := s.encode(chain)
	if err != nil {
		return nil, s.unusable(err)
	}
	s.metrics.issued.Inc()
	return response, nil
}

// The texts are Istio's CA's, word for word.
const (
	textUnauthenticated = "request authenticate failure"
	textImpersonation   = "request impersonation authentication failure"
)

// authenticate returns the caller of a request.
func (s *Server) authenticate(r *http.Request) (*authn.Caller, error) {
	if r.TLS == nil && !s.opts.AllowPlaintext {
		return nil, caservice.Refuse(grpchttp.Unauthenticated, textUnauthenticated,
			errors.New("the connection is not encrypted, and AllowPlaintext is not set"))
	}
	caller, err := s.opts.Authenticator.Authenticate(r)
	switch {
	case err != nil && (r.Context().Err() != nil || authn.Unavailable(err)):
		e := caservice.SignError(r.Context(), err)
		if e.Code != grpchttp.ResourceExhausted {
			e.Code, e.Message = grpchttp.Unavailable, textUnauthenticated
		}
		return nil, e
	case err != nil:
		return nil, caservice.Refuse(grpchttp.Unauthenticated, textUnauthenticated, err)
	case caller == nil || caller.ID.IsZero(): // it has other names, or none
		return nil, caservice.Refuse(grpchttp.Unauthenticated, textUnauthenticated,
			fmt.Errorf("the authenticator returned neither a caller with a SPIFFE ID nor an error, but %q", caller))
	}
	return caller, nil
}

// sign returns the chain for a request, which has been checked.
func (s *Server) sign(ctx context.Context, c *caservice.Call, caller *authn.Caller,
	msg []byte) ([]*x509.Certificate, error) {
	r := new(request)
	if protofield.Read(msg, r.read) != nil {
		return nil, s.badCSR(errors.New("the message is not an IstioCertificateRequest"))
	}
	grant, err := s.grant(ctx, caller, r)
	if err != nil {
		return nil, err
	}
	csr, err := c.ParseCSR(ctx, func() (*pki.CSR, error) { return pki.ParseCSRPEM([]byte(r.csr)) })
	if over, ok := errors.AsType[*grpchttp.Error](err); ok {
		return nil, s.failed("LIMIT_ERROR", over)
	}
	if err != nil {
		return nil, s.badCSR(err)
	}
	req := s.request(caller, grant, r, csr)
	chain, err := s.opts.Signer.Sign(ctx, req)
	if err != nil {
		if errors.Is(err, ca.ErrIdentity) {
			s.metrics.noID.Inc()
		}
		return nil, s.failed(label(err), caservice.SignError(ctx, err))
	}
	if err := caservice.CheckChain(chain, csr); err != nil {
		return nil, s.unusable(err)
	}
	return chain, nil
}

// request returns the request to the signer.
func (s *Server) request(caller *authn.Caller, grant Grant, r *request, csr *pki.CSR) ca.Request {
	req := ca.Request{
		CSR: csr, ID: grant.ID, DNSNames: grant.DNSNames, IPs: grant.IPs,
		CommonName: caservice.CommonName(csr, grant.ID.String()),
		Caller:     caller.ID.String(), Method: caller.Method, LimitKey: limitKey(caller, grant.ID), Signer: r.signer,
	}
	if caller.Pod != nil {
		req.Pod = *caller.Pod
	}
	switch {
	case r.validity > math.MaxInt64/int64(time.Second):
		req.TTL = math.MaxInt64 // no signer grants it
	case r.validity > 0:
		req.TTL = time.Duration(r.validity) * time.Second
	}
	s.renewal(caller, &req)
	return req
}

// limitKey returns the key for the limits per caller: the pod, so that pods of a service account do not use up each
// other's share. For a proxy that asks for other workloads, each workload counts separately.
func limitKey(caller *authn.Caller, id spiffe.ID) (key string) {
	if p := caller.Pod; p != nil && p.UID != "" {
		key = p.Cluster + " " + p.UID
	}
	if id != caller.ID {
		key = cmp.Or(key, caller.ID.String()) + " for " + id.String()
	}
	return key
}

// grant returns the identity and names to certify for the caller.
func (s *Server) grant(ctx context.Context, caller *authn.Caller, r *request) (Grant, error) {
	if r.impersonate != "" {
		id, err := s.impersonate(ctx, caller, r.impersonate)
		if err != nil {
			err = fmt.Errorf("impersonation of %.256q: %w", r.impersonate, err)
			if _, advice := retry.After(err); advice == retry.Again {
				return Grant{}, caservice.SignError(ctx, err)
			}
			s.metrics.unauthenticated.Inc()
			return Grant{}, caservice.Refuse(grpchttp.Unauthenticated, textImpersonation, err)
		}
		return Grant{ID: id}, nil
	}
	g, err := s.opts.Policy(ctx, caller)
	switch {
	case err == nil && !g.ID.IsZero():
		return g, nil
	case err == nil:
		err = errors.New("the policy returned neither an ID nor an error")
	}
	s.metrics.noID.Inc()
	e := caservice.Refuse(grpchttp.PermissionDenied, caservice.TextNotGranted, err)
	if _, advice := retry.After(err); advice == retry.Again {
		e = caservice.SignError(ctx, err)
	}
	return Grant{}, s.failed("ID_ERROR", e)
}

// impersonate returns the ID that the caller may use instead of its own.
func (s *Server) impersonate(ctx context.Context, caller *authn.Caller, text string) (spiffe.ID, error) {
	if s.opts.NodeAuthorizer == nil {
		return spiffe.ID{}, errors.New("there is no NodeAuthorizer")
	}
	id, err := spiffe.ParseID(text)
	if err != nil {
		s.metrics.noID.Inc()
		return spiffe.ID{}, err
	}
	switch {
	case !id.MemberOf(caller.ID.TrustDomain()):
		return spiffe.ID{}, errors.New("the requested ID is of another trust domain than the caller")
	case id.Path() == "":
		return spiffe.ID{}, errors.New("the requested ID is that of the trust domain, and of no workload")
	}
	return id, s.opts.NodeAuthorizer(ctx, caller, id)
}

// failed counts a failure and gives its text the form that Istio's CA uses.
func (s *Server) failed(label string, e *grpchttp.Error) error {
	s.metrics.failed[label].Inc()
	e.Message = "CSR signing error (" + e.Message + ")"
	return e
}

// badCSR is the error for an unreadable request. The text of err is about the client's input.
func (s *Server) badCSR(err error) error {
	s.metrics.badCSR.Inc()
	return s.failed("CSR_ERROR", caservice.Refuse(grpchttp.InvalidArgument, err.Error(), err))
}

func (s *Server) unusable(err error) error {
	return s.failed("CERT_GEN_ERROR", caservice.Refuse(grpchttp.Internal, "the answer of the signer cannot be used",
		err))
}
