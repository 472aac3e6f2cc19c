package ca

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// The kinds of a [SignError], to test for with [errors.Is].
var (
	// ErrCSR says that the signing request is missing, or that its key must not be certified.
	ErrCSR = errors.New("bad signing request")
	// ErrTTL says that the lifetime is more than the authority grants, or less than a second.
	ErrTTL = errors.New("bad lifetime")
	// ErrIdentity says that the ID is not that of a workload of the authority's trust domain, or
	// that one of the other names cannot be in its certificate.
	ErrIdentity = errors.New("bad identity")
	// ErrNotReady says that the active root is not valid at the present moment, so that it cannot
	// sign: it has expired, or the clock was set back to a time before it. It may pass.
	ErrNotReady = errors.New("not ready to sign")
	// ErrGeneration says that building or signing the certificate failed.
	ErrGeneration = errors.New("certificate generation failed")
	// ErrLimit says that too much is asked for at the moment; [SignError.RetryAfter] says when to
	// come back.
	ErrLimit = errors.New("too many requests")
	// ErrAudit says that the record of the issuance could not be made durable, so that the
	// certificate was thrown away.
	ErrAudit = errors.New("no audit record")
)

// SignError is the error of [Authority.Sign], unless its context was done. It wraps Kind and Err.
type SignError struct {
	Kind error     // ErrCSR, ErrTTL, ErrIdentity, ErrNotReady, ErrGeneration, ErrLimit or ErrAudit
	ID   spiffe.ID // as the caller gave it
	Err  error     // what is wrong

	// RetryAfter is when to come back; 0 if nobody knows.
	RetryAfter time.Duration
}

func (e *SignError) Error() string {
	return fmt.Sprintf("ca: sign %q: %v: %v", e.ID, e.Kind, e.Err)
}

// Unwrap returns Kind and Err.
func (e *SignError) Unwrap() []error { return []error{e.Kind, e.Err} }

// minTTL is the shortest lifetime: certificates carry whole seconds, so that less may be nothing.
const minTTL = time.Second

// Request asks for a certificate. Everything in it except the CSR is the word of the caller of
// [Authority.Sign], and is signed as it stands.
type Request struct {
	// CSR holds the public key to certify. Nothing else of it is used: not its names, not its
	// extensions, not its subject.
	CSR *pki.CSR

	// ID is the workload: in the authority's trust domain, with a path.
	ID spiffe.ID

	DNSNames []string // further names, beside the ID
	IPs      []net.IP // further addresses, beside the ID

	// CommonName is the subject's common name, for peers that look for a name there ("dual use");
	// at most 64 bytes. Empty means an empty subject.
	CommonName string

	// TTL is the lifetime from now; 0 or less means the authority's default.
	TTL time.Duration

	// Backdate is how far before now the validity begins; 0 means the authority's.
	Backdate time.Duration

	// Profile says what kind of certificate this is; the zero value is an X.509-SVID.
	Profile Profile

	// Caller is who asked, as far as it was proven, and Method how: for limits per caller and for
	// the audit record. An empty Caller means ID, or the first DNS name.
	Caller, Method string

	// Signer names one of several signers behind a registration authority; an [Authority] has one
	// and ignores it.
	Signer string
}

// Profile is the kind of a certificate.
type Profile int

const (
	// SVID is an X.509-SVID: ID is required, and is the one URI name.
	SVID Profile = iota
	// DNSOnly is a certificate for DNSNames (at least one) without a SPIFFE ID, as Linkerd's
	// proxies and servers that are called by name have. ID must be zero.
	DNSOnly
)

// Sign certifies the public key of r.CSR for r.ID and returns the chain to present, leaf first,
// which is the leaf alone as the roots sign it themselves; the roots are in [Authority.Bundle]. The
// caller owns the result.
//
// The leaf is valid from Backdate before now until TTL from now, or until the end of the root that
// signs it, if that is earlier. A TTL over the authority's MaxTTL is refused, not shortened.
//
// The error is a [*SignError], or wraps the cause of ctx's end.
func (a *Authority) Sign(ctx context.Context, r Request) ([]*x509.Certificate, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("ca: sign %q: %w", r.ID, context.Cause(ctx))
	}
	if kind, err := a.check(&r); err != nil {
		return nil, &SignError{Kind: kind, ID: r.ID, Err: err}
	}
	g, err := a.reserve(r.TTL)
	if err != nil {
		return nil, &SignError{Kind: ErrNotReady, ID: r.ID, Err: err}
	}
	leaf, err := g.issuer.IssueLeaf(pki.LeafOptions{
		PublicKey:  r.CSR.PublicKey(),
		ID:         r.ID,
		DNSNames:   r.DNSNames,
		IPs:        r.IPs,
		CommonName: r.CommonName,
		NotBefore:  g.notBefore,
		NotAfter:   g.notAfter,
	})
	if err != nil {
		kind := ErrGeneration
		if errors.Is(err, pki.ErrWeakKey) {
			kind = ErrCSR
		} else if _, ok := errors.AsType[*pki.ProfileError](err); ok {
			kind = ErrIdentity // the key and the dates are in order, so it is one of the names
		}
		return nil, &SignError{Kind: kind, ID: r.ID, Err: err}
	}
	return []*x509.Certificate{leaf}, nil
}

// check tests what was asked for and fills in the default lifetime.
func (a *Authority) check(r *Request) (kind, err error) {
	switch {
	case r.CSR == nil || r.CSR.PublicKey() == nil:
		return ErrCSR, errors.New("there is none; pki.ParseCSR makes one")
	case r.ID.IsZero():
		return ErrIdentity, fmt.Errorf("ID: %w", spiffe.ErrZero)
	case !r.ID.MemberOf(a.cfg.TrustDomain):
		return ErrIdentity, fmt.Errorf("the ID is not in the trust domain %q of this authority", a.cfg.TrustDomain)
	case r.ID.Path() == "":
		return ErrIdentity, errors.New("the ID has no path, so it names no workload (X5-6)")
	}
	if r.TTL <= 0 {
		r.TTL = a.cfg.DefaultTTL
	}
	switch {
	case r.TTL > a.cfg.MaxTTL:
		return ErrTTL, fmt.Errorf("%v was asked for, the longest is %v", r.TTL, a.cfg.MaxTTL)
	case r.TTL < minTTL:
		return ErrTTL, fmt.Errorf("%v was asked for, the shortest is %v", r.TTL, minTTL)
	}
	return nil, nil
}

// grant is a signer and the dates that it may put on a leaf.
type grant struct {
	issuer              *pki.Issuer
	notBefore, notAfter time.Time
}

// reserve chooses the root that signs a leaf of the lifetime ttl, and notes the leaf's end first:
// the root cannot retire before it, however long the signing takes and whatever happens meanwhile.
func (a *Authority) reserve(ttl time.Duration) (grant, error) {
	a.mu.Lock()
	now := time.Now() // under the lock, so that a later caller has a later time
	s, steps := a.advance(now)
	active := s.active()
	wall := now.Round(0)
	left := active.cert.NotAfter.Sub(wall)
	ready := left > 0 && !wall.Before(active.cert.NotBefore)
	g := grant{issuer: active.issuer, notBefore: now.Add(-a.cfg.Backdate), notAfter: now.Add(min(ttl, left))}
	if ready && g.notAfter.After(a.lastLeaf) {
		a.lastLeaf = g.notAfter
	}
	a.mu.Unlock()
	a.log(steps)
	if !ready {
		return grant{}, fmt.Errorf("the signing root %s is valid from %s to %s; rotate it, or check the clock", serial(active.cert),
			active.cert.NotBefore.UTC().Format(time.RFC3339), active.cert.NotAfter.UTC().Format(time.RFC3339))
	}
	return g, nil
}
