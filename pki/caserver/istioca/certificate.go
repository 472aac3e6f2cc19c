package istioca

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// ClientCertificates proves callers of the trust domain by certificates of the signer itself: see
// [authn.ClientCertificate]. They are verified with its CallerBundle, which has no tainted roots.
//
// A caller may renew by certificate alone for longest since its last other proof, such as a token; 0 means without end. A
// stolen key can be renewed for as long. [ca.Signer].Proven tells when the last other proof was; a caller for which it
// cannot tell is refused. With [authn.FirstOf] a caller with another proof beside its certificate is authenticated by
// that.
func ClientCertificates(signer ca.Signer, td spiffe.TrustDomain, longest time.Duration) (authn.Authenticator, error) {
	if longest < 0 {
		return nil, fmt.Errorf("istioca: client certificates: the longest time is negative (%v)", longest)
	}
	v, err := spiffe.NewVerifier(callers{signer, td}, spiffe.AllowMembersOf(td), nil)
	if err != nil {
		return nil, err
	}
	proof := authn.ClientCertificate(v)
	if longest == 0 {
		return proof, nil
	}
	return authn.Func(func(r *http.Request) (*authn.Caller, error) {
		caller, err := proof.Authenticate(r)
		if err != nil {
			return nil, err
		}
		proven := signer.Proven(caller.Certificate)
		if age := time.Since(proven); proven.IsZero() || age > longest {
			return nil, fmt.Errorf("istioca: client certificate: %w: %w: at %s, the limit is %v", authn.ErrRefused, errRenewed, proven.UTC().Format(time.RFC3339), longest)
		}
		return caller, nil
	}), nil
}

// errRenewed says that a caller needs another proof than its certificate again.
var errRenewed = errors.New("its holder was last proven by something else than a certificate too long ago")

// callers is the source of the bundle that callers are verified by.
type callers struct {
	signer ca.Signer
	td     spiffe.TrustDomain
}

// Bundle implements [spiffe.BundleSource].
func (c callers) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if b := c.signer.CallerBundle(); b != nil && b.TrustDomain() == td && td == c.td {
		return b, nil
	}
	return nil, fmt.Errorf("istioca: no caller is from %q: %w", td, spiffe.ErrUnknownTrustDomain)
}

// defaultCertificateTTL is the longest lifetime for a caller that its certificate alone proves.
const defaultCertificateTTL = 24 * time.Hour

// byProxy is the method of callers by [authn.ForwardedCertificate], whose certificate a proxy has seen.
const byProxy = "forwarded-certificate"

// renewal limits a request of a caller that its certificate alone proves.
func (s *Server) renewal(caller *authn.Caller, r *ca.Request) {
	switch {
	case caller.Certificate != nil:
		r.Proven = s.opts.Signer.Proven(caller.Certificate)
	case caller.Method != byProxy:
		return
	}
	switch most := s.opts.CertificateTTL; {
	case r.TTL > cmp.Or(most, defaultCertificateTTL):
		r.TTL = cmp.Or(most, defaultCertificateTTL)
	case r.TTL == 0:
		r.TTL = most
	}
}
