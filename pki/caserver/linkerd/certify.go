package linkerd

import (
	"context"
	"crypto/ecdsa"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/retry"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/internal/caservice"
	"github.com/svidkit/svidkit/spiffe"
)

var (
	errPlaintext = errors.New("the connection is not encrypted")
	errOtherName = errors.New("the token belongs to another name")
)

const maxCSR = 64 << 10 // bytes, as in package pki

// request is a CertifyRequest.
type request struct {
	identity string
	token    []byte
	csr      []byte // DER
}

func (r *request) read(f *protofield.Field) {
	switch f.Number {
	case 1:
		f.Text(&r.identity)
	case 2:
		f.Bytes(&r.token)
	case 3:
		f.Bytes(&r.csr)
	}
}

// response returns the encoded CertifyResponse for a leaf and its issuers.
func response(leaf *x509.Certificate, issuers []*x509.Certificate) ([]byte, error) {
	return protofield.Write(func(w *protofield.Writer) {
		w.AddBytes(1, leaf.Raw)
		for _, c := range issuers {
			w.AddBytes(2, c.Raw)
		}
		// a google.protobuf.Timestamp
		w.Message(3, func(w *protofield.Writer) { w.Varint(1, uint64(leaf.NotAfter.Unix())) })
	})
}

// certify goes through the checks in the order that the protocol demands.
func (s *Server) certify(ctx context.Context, c *caservice.Call) ([]byte, error) {
	if !s.opts.AllowPlaintext && !bearer.Confidential(c.Request()) { // before reading the token
		return nil, caservice.Refuse(grpchttp.Unauthenticated, errPlaintext.Error(), errPlaintext)
	}
	msg, err := c.Receive()
	if err != nil {
		return nil, err
	}
	var r request
	unreadable := protofield.Read(msg, r.read)
	c.Secret = string(r.token)
	c.Attrs = append(c.Attrs, slog.String("identity", r.identity[:min(len(r.identity), 253)]))
	anchors := s.anchors()
	switch {
	case anchors == nil:
		return nil, caservice.Refuse(grpchttp.Unavailable, "the issuer is not ready; try again later",
			errors.New("the signer has no trust anchors yet"))
	case unreadable != nil:
		return nil, invalid("the message is not a CertifyRequest")
	case r.identity == "":
		return nil, invalid("the identity is missing")
	case len(r.token) == 0:
		return nil, invalid("the token is missing")
	case len(r.csr) == 0:
		return nil, invalid("the certificate signing request is missing")
	case !inTime(anchors):
		return nil, s.badIssuer(ctx, &r, errors.New("no trust anchor is valid now"))
	}
	csr, err := c.ParseCSR(ctx, func() (*pki.CSR, error) { return readCSR(r.csr, r.identity) })
	if err != nil {
		return nil, err
	}
	account, err := s.review(ctx, &r)
	if err != nil {
		return nil, err
	}
	chain, err := s.sign(ctx, &r, account, csr)
	if err != nil {
		return nil, err
	}
	c.Leaf = chain[0]
	s.tell(ctx, Event{Reason: "IssuedLeafCertificate", Namespace: account.Namespace,
		ServiceAccount: account.ServiceAccount},
		"issued certificate for %s until %v", r.identity, validity{chain[0]})
	return response(chain[0], chain[1:])
}

func invalid(text string) error { return caservice.Refuse(grpchttp.InvalidArgument, text, nil) }

func failed(text string, cause error) error {
	return caservice.Refuse(grpchttp.FailedPrecondition, text, cause)
}

// readCSR returns the request for an identity. As in Linkerd, the standard library decides about the code: whether a
// refused request is one at all.
func readCSR(der []byte, identity string) (*pki.CSR, error) {
	csr, err := checkCSR(der, identity)
	if err == nil {
		return csr, nil
	}
	if len(der) <= maxCSR {
		if _, bad := x509.ParseCertificateRequest(der); bad == nil {
			return nil, failed("the certificate signing request is refused: "+err.Error(), err)
		}
	}
	return nil, caservice.Refuse(grpchttp.InvalidArgument, "the certificate signing request is not PKCS#10 in DER",
		err)
}

// checkCSR applies the rules for the form of a request for an identity.
func checkCSR(der []byte, identity string) (*pki.CSR, error) {
	csr, err := pki.ParseCSR(der)
	if err != nil {
		return nil, err
	}
	if _, ok := csr.PublicKey().(*ecdsa.PublicKey); !ok {
		return nil, fmt.Errorf("the key is %T, want ECDSA", csr.PublicKey())
	}
	names := 0
	for _, san := range csr.SANs() {
		switch san.Type {
		case pki.DNS:
			if san.Value != identity {
				return nil, fmt.Errorf("the DNS name %.256q is not the identity that is asked for", san.Value)
			}
			names++
		case pki.IP, pki.URI, pki.Email:
			return nil, fmt.Errorf("it asks for the name %.256q, and may ask for one DNS name only", san.String())
		}
	}
	if names != 1 {
		return nil, fmt.Errorf("it asks for %d DNS names, want one", names)
	}
	if cn := csr.CommonName(); cn != "" && cn != identity {
		return nil, fmt.Errorf("the common name %.256q is not the identity that is asked for", cn)
	}
	return csr, nil
}

// review returns the account that the token proves, if its name is the requested identity.
func (s *Server) review(ctx context.Context, r *request) (*spiffe.Pod, error) {
	account, err := s.opts.Review(ctx, string(r.token), []string{audience})
	switch {
	case err == nil && account == nil:
		return nil, caservice.Refuse(grpchttp.Internal, "the token could not be reviewed",
			errors.New("the review returned neither an account nor an error"))
	case errors.Is(err, kube.ErrNotAuthenticated):
		return nil, failed("the token is not authenticated", err)
	case errors.Is(err, kube.ErrInvalidToken):
		return nil, caservice.Refuse(grpchttp.InvalidArgument, "the token is invalid", err)
	case err != nil && ctx.Err() != nil:
		return nil, caservice.Ended(ctx, err)
	case err != nil:
		if after, advice := retry.After(err); advice == retry.Again { // a limit on reviews
			return nil, &grpchttp.Error{Code: grpchttp.Unavailable,
				Message: "the token cannot be reviewed now; try again later", Err: err, RetryAfter: after}
		}
		return nil, caservice.Refuse(grpchttp.Internal, "the token could not be reviewed", err)
	}
	name, err := s.opts.Mesh.Name(account.Namespace, account.ServiceAccount)
	switch {
	case err != nil:
		return nil, caservice.Refuse(grpchttp.InvalidArgument,
			"the token is that of an account that has no name in the mesh", err)
	case name != r.identity:
		return nil, failed("the token does not belong to the identity that is asked for",
			fmt.Errorf("%w: %s", errOtherName, name))
	}
	return account, nil
}

// sign returns the chain for a proven identity: the leaf and its issuers. It checks the signer's answer.
func (s *Server) sign(ctx context.Context, r *request, account *spiffe.Pod,
	csr *pki.CSR) ([]*x509.Certificate, error) {
	chain, err := s.opts.Signer.Sign(ctx, ca.Request{
		CSR: csr, Profile: ca.DNSOnly, DNSNames: []string{r.identity},
		CommonName: caservice.CommonName(csr, r.identity),
		TTL:        s.opts.Lifetime + s.opts.ClockSkew, Backdate: s.opts.ClockSkew,
		Caller: r.identity, Method: "kubernetes-token", LimitKey: account.UID,
		Pod: *account,
	})
	if err != nil {
		e := caservice.SignError(ctx, err)
		switch {
		case errors.Is(err, ca.ErrCSR):
			e.Code = grpchttp.FailedPrecondition
		case errors.Is(err, ca.ErrTTL), errors.Is(err, ca.ErrIdentity): // this server chooses both
			e.Code, e.Message = grpchttp.Internal, caservice.TextInternal
		}
		return nil, e
	}
	if err := checkLeaf(chain, csr, r.identity); err != nil {
		return nil, caservice.Refuse(grpchttp.Internal, caservice.TextInternal,
			fmt.Errorf("the answer of the signer cannot be used: %w", err))
	}
	// The current anchors: the earlier ones may lack the root of the leaf.
	anchors := s.anchors()
	if anchors == nil {
		return nil, s.badIssuer(ctx, r, errors.New("the signer has no trust anchors any more"))
	}
	issuers, err := above(chain, anchors)
	if err != nil {
		return nil, s.badIssuer(ctx, r, err)
	}
	issuer := issuers[0]
	if last := s.issuer.Swap(issuer); last != nil && !last.Equal(issuer) {
		s.tell(ctx, Event{Reason: "IssuerUpdated"}, "the issuer is now %q until %v", issuer.Subject, validity{issuer})
	}
	return append(chain[:1:1], issuers...), nil
}

// badIssuer is the error for an issuer that does not verify.
func (s *Server) badIssuer(ctx context.Context, r *request, err error) error {
	err = fmt.Errorf("the issuer does not verify against the trust anchors: %w", err)
	s.tell(ctx, Event{Reason: "IssuerValidationFailed", Warning: true}, "no certificate for %.253q: %v", r.identity,
		err)
	return caservice.Refuse(grpchttp.Unavailable, "the issuer cannot be used now; try again later", err)
}

// checkLeaf reports whether the signer has made the requested certificate.
func checkLeaf(chain []*x509.Certificate, csr *pki.CSR, name string) error {
	if err := caservice.CheckChain(chain, csr); err != nil {
		return err
	}
	leaf := chain[0]
	if len(leaf.DNSNames) != 1 || leaf.DNSNames[0] != name ||
		len(leaf.URIs)+len(leaf.IPAddresses)+len(leaf.EmailAddresses) > 0 {
		return fmt.Errorf("the certificate is for %q, %v, %v and %q, and not only for %s", leaf.DNSNames, leaf.URIs,
			leaf.IPAddresses, leaf.EmailAddresses, name)
	}
	return nil
}
