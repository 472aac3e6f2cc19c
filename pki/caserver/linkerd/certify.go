package linkerd

import (
	"context"
	"crypto/ecdsa"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/carpc"
	wire "github.com/svidkit/svidkit/internal/wire/linkerd"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
)

const (
	maxCSR        = 64 << 10 // bytes, as in package pki
	maxCommonName = 64       // bytes; RFC 5280 calls it ub-common-name
)

// request is a CertifyRequest, or what is wrong with it.
type request struct {
	wire.CertifyRequest
	err error
}

// codec replaces connect's own under the same name, so that a message that cannot be read comes to
// us, in its turn.
type codec struct{}

func (codec) Name() string { return "proto" }

func (c codec) Marshal(m any) ([]byte, error) { return c.MarshalAppend(nil, m) }

func (codec) MarshalAppend(b []byte, m any) ([]byte, error) {
	if m, ok := m.(proto.Message); ok {
		return proto.MarshalOptions{}.MarshalAppend(b, m)
	}
	return nil, fmt.Errorf("linkerd: encode: unexpected %T", m)
}

func (codec) Unmarshal(data []byte, m any) error {
	r, ok := m.(*request)
	if !ok {
		return fmt.Errorf("linkerd: decode: unexpected %T", m)
	}
	if (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(data, &r.CertifyRequest) != nil {
		r.Reset()
		r.err = errors.New("the message is not a CertifyRequest") // the text of the cause may quote it
	}
	return nil
}

// refusal is why a request is not answered with a certificate.
type refusal struct {
	code  connect.Code
	text  string        // for the client
	err   error         // for the log
	after time.Duration // when to come back; 0 if that is not known
}

func (r *refusal) level() slog.Level {
	switch r.code {
	case connect.CodeInvalidArgument, connect.CodeFailedPrecondition, connect.CodeCanceled, connect.CodeDeadlineExceeded:
		return slog.LevelInfo
	}
	return slog.LevelWarn
}

func refuse(code connect.Code, text string, err error) *refusal {
	return &refusal{code: code, text: text, err: err}
}

func (s *Server) certify(ctx context.Context, r *connect.Request[request]) (resp *connect.Response[wire.CertifyResponse], err error) {
	peer, _ := ctx.Value(peerKey{}).(string)
	token := string(r.Msg.GetToken())
	defer func() {
		p := recover() // of a part that was given to us
		if p == nil {
			return
		}
		if p == http.ErrAbortHandler { //nolint:errorlint // the very value, as in net/http
			panic(p)
		}
		s.opts.Logger.LogAttrs(ctx, slog.LevelError, "linkerd: panic", slog.String("peer", peer), slog.String("panic", conceal(fmt.Sprint(p), token)), slog.String("stack", conceal(string(debug.Stack()), token)))
		s.answered[connect.CodeInternal.String()].Inc()
		resp, err = nil, connect.NewError(connect.CodeInternal, errors.New("internal error"))
	}()
	answer, leaf, no := s.answer(ctx, r.Msg)
	if no != nil {
		s.answered[no.code.String()].Inc()
		s.opts.Logger.LogAttrs(ctx, no.level(), "linkerd: certificate refused", slog.String("identity", clip(r.Msg.GetIdentity())),
			slog.String("code", no.code.String()), slog.String("err", conceal(no.err.Error(), token)), slog.String("peer", peer))
		return nil, no.status()
	}
	s.answered["ok"].Inc()
	s.opts.Logger.LogAttrs(ctx, slog.LevelDebug, "linkerd: certificate issued", slog.String("identity", r.Msg.GetIdentity()),
		slog.String("serial", leaf.SerialNumber.Text(16)), slog.Time("not_after", leaf.NotAfter), slog.String("peer", peer))
	return connect.NewResponse(answer), nil
}

// answer goes through the checks in the order that the protocol demands.
func (s *Server) answer(ctx context.Context, r *request) (*wire.CertifyResponse, *x509.Certificate, *refusal) {
	invalid := func(text string) *refusal {
		return refuse(connect.CodeInvalidArgument, text, errors.New(text))
	}
	a := s.currentAnchors()
	switch {
	case a == nil:
		return nil, nil, refuse(connect.CodeUnavailable, "the issuer is not ready; try again later", errors.New("the signer has no trust anchors yet"))
	case r.err != nil:
		return nil, nil, invalid(r.err.Error())
	case r.GetIdentity() == "":
		return nil, nil, invalid("the identity is missing")
	case len(r.GetToken()) == 0:
		return nil, nil, invalid("the token is missing")
	case len(r.GetCertificateSigningRequest()) == 0:
		return nil, nil, invalid("the certificate signing request is missing")
	}
	der := r.GetCertificateSigningRequest()
	if err := readable(der); err != nil {
		return nil, nil, refuse(connect.CodeInvalidArgument, "the certificate signing request is not PKCS#10 in DER", err)
	}
	if err := a.verifyIssuer(s.opts.Issuer); err != nil {
		return nil, nil, s.badIssuer(ctx, r, err)
	}
	csr, err := checkCSR(der, r.GetIdentity())
	if err != nil {
		return nil, nil, refuse(connect.CodeFailedPrecondition, "the certificate signing request is refused: "+err.Error(), err)
	}
	account, name, no := s.review(ctx, string(r.GetToken()))
	if no != nil {
		return nil, nil, no
	}
	if name != r.GetIdentity() {
		return nil, nil, refuse(connect.CodeFailedPrecondition, "the token does not belong to the identity that is asked for",
			fmt.Errorf("the token belongs to %s", name))
	}
	return s.issue(ctx, r, account, name, csr)
}

// readable reports whether der is a request at all. That is the standard library's word, as it is
// in Linkerd; what package pki thinks of it comes later and has another code.
func readable(der []byte) error {
	if len(der) > maxCSR {
		return fmt.Errorf("%d bytes, the limit is %d", len(der), maxCSR)
	}
	_, err := x509.ParseCertificateRequest(der)
	return err
}

// checkCSR applies the rules for the shape of a request for an identity.
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

// review returns the name that a token proves.
func (s *Server) review(ctx context.Context, token string) (*kube.Account, string, *refusal) {
	account, err := s.opts.Review(ctx, token, []string{Audience})
	switch {
	case err == nil && account == nil:
		return nil, "", refuse(connect.CodeInternal, "the token could not be reviewed", errors.New("the review returned neither an account nor an error"))
	case errors.Is(err, kube.ErrNotAuthenticated):
		return nil, "", refuse(connect.CodeFailedPrecondition, "the token is not authenticated", err)
	case errors.Is(err, kube.ErrInvalidToken):
		return nil, "", refuse(connect.CodeInvalidArgument, "the token is invalid", err)
	case err != nil:
		if no := s.ended(ctx, err); no != nil {
			return nil, "", no
		}
		return nil, "", refuse(connect.CodeInternal, "the token could not be reviewed", err)
	}
	name, err := s.opts.Mesh.Name(account.Namespace, account.ServiceAccount)
	if err != nil {
		return nil, "", refuse(connect.CodeInvalidArgument, "the token is that of an account that has no name in the mesh", err)
	}
	return account, name, nil
}

// issue has the certificate signed, and checks what comes back.
func (s *Server) issue(ctx context.Context, r *request, account *kube.Account, name string, csr *pki.CSR) (*wire.CertifyResponse, *x509.Certificate, *refusal) {
	req := ca.Request{
		CSR: csr, Profile: ca.DNSOnly, DNSNames: []string{name},
		TTL: s.opts.Lifetime + s.opts.ClockSkew, Backdate: s.opts.ClockSkew,
		Caller: name, Method: "kubernetes-token",
	}
	if csr.CommonName() != "" && len(name) <= maxCommonName {
		req.CommonName = name // a longer one does not fit: the certificate goes without, and is good all the same
	}
	ticket := s.tickets.Add(1)
	chain, err := s.opts.Signer.Sign(ctx, req)
	if err != nil {
		return nil, nil, s.signError(ctx, err)
	}
	if err := checkLeaf(chain, name, csr); err != nil {
		return nil, nil, refuse(connect.CodeInternal, "the certificate could not be made", fmt.Errorf("the answer of the signer cannot be used: %w", err))
	}
	// The anchors of now: those at the beginning may not have had the root of the leaf.
	a := s.currentAnchors()
	if a == nil {
		return nil, nil, s.badIssuer(ctx, r, errors.New("the signer has no trust anchors any more"))
	}
	above, err := a.verify(chain)
	if err != nil {
		return nil, nil, s.badIssuer(ctx, r, err)
	}
	leaf := chain[0]
	answer := &wire.CertifyResponse{LeafCertificate: leaf.Raw, ValidUntil: &timestamppb.Timestamp{Seconds: leaf.NotAfter.Unix()}}
	for _, c := range above {
		answer.IntermediateCertificates = append(answer.IntermediateCertificates, c.Raw)
	}
	s.learn(ctx, ticket, above[0])
	s.tell(ctx, Event{
		Reason: "IssuedLeafCertificate", Namespace: account.Namespace, ServiceAccount: account.ServiceAccount,
		Message: fmt.Sprintf("issued certificate for %s until %s: %x", name, leaf.NotAfter.UTC().Format(time.RFC3339), sha256.Sum256(leaf.Raw)),
	})
	return answer, leaf, nil
}

// badIssuer is the refusal for what signs and does not verify.
func (s *Server) badIssuer(ctx context.Context, r *request, err error) *refusal {
	s.tell(ctx, Event{
		Reason: "IssuerValidationFailed", Warning: true,
		Message: fmt.Sprintf("no certificate for %q: the issuer does not verify against the trust anchors: %v", clip(r.GetIdentity()), err),
	})
	return refuse(connect.CodeUnavailable, "the issuer cannot be used now; try again later", fmt.Errorf("the issuer does not verify against the trust anchors: %w", err))
}

// learn notes which certificate signs. Of answers that overtake each other, the latest request
// counts.
func (s *Server) learn(ctx context.Context, ticket uint64, issuer *x509.Certificate) {
	s.mu.Lock()
	updated := false
	if ticket > s.ticket {
		updated = s.issuer != nil && !s.issuer.Equal(issuer)
		s.ticket, s.issuer = ticket, issuer
	}
	s.mu.Unlock()
	if updated {
		s.tell(ctx, Event{
			Reason:  "IssuerUpdated",
			Message: fmt.Sprintf("the issuer is now %q until %s: %x", issuer.Subject, issuer.NotAfter.UTC().Format(time.RFC3339), sha256.Sum256(issuer.Raw)),
		})
	}
}

func (s *Server) tell(ctx context.Context, e Event) {
	if s.opts.Events != nil {
		s.opts.Events(ctx, e)
	}
}

// signError translates an error of the signer.
func (s *Server) signError(ctx context.Context, err error) *refusal {
	fail := func(code connect.Code, text string) *refusal {
		no := refuse(code, text, err)
		if e, ok := errors.AsType[*ca.SignError](err); ok {
			no.after = e.RetryAfter
		}
		if e, ok := errors.AsType[retryable](err); ok && no.after <= 0 {
			no.after, _ = e.Retryable()
		}
		return no
	}
	switch {
	case errors.Is(err, ca.ErrLimit):
		return fail(connect.CodeResourceExhausted, "too many requests; try again later")
	case errors.Is(err, ca.ErrNotReady):
		return fail(connect.CodeUnavailable, "the issuer is not ready; try again later")
	case errors.Is(err, ca.ErrAudit):
		return fail(connect.CodeUnavailable, "the issuer cannot answer now; try again later")
	case errors.Is(err, ca.ErrCSR):
		return fail(connect.CodeFailedPrecondition, "the key of the certificate signing request must not be certified")
	}
	if no := s.ended(ctx, err); no != nil {
		return no
	}
	if e, ok := errors.AsType[retryable](err); ok {
		if _, passes := e.Retryable(); passes {
			return fail(connect.CodeUnavailable, "the issuer cannot answer now; try again later")
		}
	}
	return fail(connect.CodeInternal, "the certificate could not be made")
}

// retryable is an error that knows whether it passes.
type retryable interface {
	error
	Retryable() (after time.Duration, ok bool)
}

// ended says whose time was up, if that is why err came about.
func (s *Server) ended(ctx context.Context, err error) *refusal {
	switch {
	case ctx.Err() == nil:
		return nil
	case errors.Is(context.Cause(ctx), errTimeout):
		return refuse(connect.CodeUnavailable, "the certifier took too long; try again later", err)
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return refuse(connect.CodeDeadlineExceeded, "the deadline of the call has passed", err)
	}
	return refuse(connect.CodeCanceled, "the call was cancelled", err)
}

// status is what the client gets, with the time to come back if it is known.
func (r *refusal) status() *connect.Error {
	e := connect.NewError(r.code, errors.New(r.text))
	carpc.AddRetryInfo(e, r.after)
	return e
}

// conceal takes the token out of a text that somebody else wrote.
func conceal(text, token string) string {
	for _, t := range []string{token, strings.TrimSpace(token)} {
		if t != "" {
			text = strings.ReplaceAll(text, t, "[token]")
		}
	}
	return text
}

func clip(s string) string { return s[:min(len(s), 253)] }
