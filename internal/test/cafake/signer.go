package cafake

import (
	"context"
	"crypto/x509"
	"errors"
	"slices"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// Signer returns the CA as the servers of package caserver and caclient/local take it, with its faults.
func (f *Fake) Signer() *Signer { return &Signer{f.ca} }

// Signer is a [ca.Signer] over a [spiffetest.CA], and what caclient/local takes. [Fake.Signer] makes one. It
// is safe for concurrent use.
type Signer struct{ ca *spiffetest.CA }

// Bundle returns that of the CA.
func (s *Signer) Bundle() *spiffe.Bundle { return s.ca.Bundle() }

// CallerBundle is Bundle.
func (s *Signer) CallerBundle() *spiffe.Bundle { return s.ca.Bundle() }

// Proven returns zero, for "not known".
func (s *Signer) Proven(*x509.Certificate) time.Time { return time.Time{} }

// Sign implements [ca.Signer]. An error of FailNext that is a [*caclient.Error] comes as a [*ca.SignError] of the
// kind that is nearest.
func (s *Signer) Sign(ctx context.Context, r ca.Request) ([]*x509.Certificate, error) {
	chain, err := s.ca.Certify(ctx, r.CSR, names(r), max(r.TTL, 0))
	if err == nil || ctx.Err() != nil {
		return chain, err
	}
	kind := spiffe.ErrNotReady
	e, _ := errors.AsType[*caclient.Error](err)
	if e == nil {
		e = new(caclient.Error)
	}
	switch e.Kind {
	case caclient.ErrInvalid:
		kind = ca.ErrCSR
	case caclient.ErrDenied, caclient.ErrUnauthenticated:
		kind = ca.ErrIdentity
	}
	return nil, &ca.SignError{Kind: kind, ID: r.ID, Err: err, RetryAfter: e.RetryAfter}
}

// HonestSigner returns the CA for a real server, which checks what it is given: an answer that the server would
// refuse or change is kept for the wire, and the server gets a good one.
func (f *Fake) HonestSigner() ca.Signer { return honest{f.Signer(), f} }

type honest struct {
	*Signer
	f *Fake
}

func (h honest) Sign(ctx context.Context, r ca.Request) ([]*x509.Certificate, error) {
	chain, err := h.Signer.Sign(ctx, r)
	if err != nil || h.unremarkable(chain, r.CSR) {
		return chain, err
	}
	good, err := h.f.ca.Intermediate().Certify(ctx, r.CSR, names(r), max(r.TTL, 0))
	if o, ok := ctx.Value(outcomeKey{}).(*outcome); ok && err == nil {
		o.set, o.chain = true, chain
	}
	return good, err
}

// unremarkable reports whether a server sends chain as it is.
func (h honest) unremarkable(chain []*x509.Certificate, csr *pki.CSR) bool {
	if Check(chain, csr, h.f.want, h.Bundle()) != nil {
		return false
	}
	return slices.EqualFunc(chain, certchain.Tidy(chain, csr.PublicKey()), (*x509.Certificate).Equal)
}

// Check returns why chain is no good answer to csr: it has another key, something beside the certificates of CAs above
// its leaf, or it is not what want expects.
func Check(chain []*x509.Certificate, csr *pki.CSR, want pki.Expectation, bundles spiffe.BundleSource) error {
	if err := certchain.CheckSize(chain); err != nil {
		return err
	}
	if !pki.PublicKeysEqual(chain[0].PublicKey, csr.PublicKey()) {
		return errors.New("there is no leaf with the key of the request")
	}
	if slices.ContainsFunc(chain[1:], func(c *x509.Certificate) bool { return !c.IsCA }) {
		return errors.New("there is a second leaf")
	}
	_, err := want.Verify(chain, bundles, spiffe.BothRoles, time.Now())
	return err
}

// names returns what a request grants.
func names(r ca.Request) []pki.SAN {
	var out []pki.SAN
	if !r.ID.IsZero() {
		out = append(out, pki.IDSAN(r.ID))
	}
	for _, name := range r.DNSNames {
		out = append(out, pki.DNSSAN(name))
	}
	for _, ip := range r.IPs {
		out = append(out, pki.IPSAN(ip))
	}
	return out
}

// bundle is the bundle of a CA as it is now.
type bundle struct{ ca *spiffetest.CA }

func (b bundle) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return b.ca.Bundle().Bundle(td)
}
