package istioca

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"time"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/internal/caservice"
	"github.com/svidkit/svidkit/spiffe"
)

// ClientCertificates authenticates callers of the trust domain by the signer's own certificates: see
// [authn.ClientCertificate]. It verifies them with the signer's CallerBundle, which has no tainted roots.
//
// A caller may renew by certificate alone until longest after its last other proof, such as a token; 0 means without
// end. A stolen key can be renewed for as long. [ca.Signer].Proven says when the last other proof was; if it does not
// know, the caller is refused. With [authn.FirstOf], a caller with another proof beside its certificate is
// authenticated by that.
//
// A request with the header X-Forwarded-Client-Cert comes from a client of a proxy, which must not get the proxy's
// certificate: it has no credential here.
func ClientCertificates(signer ca.Signer, td spiffe.TrustDomain, longest time.Duration) (authn.Authenticator, error) {
	if longest < 0 {
		return nil, fmt.Errorf("istioca: client certificates: the longest time is negative (%v)", longest)
	}
	v, err := spiffe.NewVerifier(caservice.Bundles(signer.CallerBundle), spiffe.AllowMembersOf(td), nil)
	if err != nil {
		return nil, err
	}
	proof := authn.ClientCertificate(v.WithAlgorithms(spiffe.AnyAlgorithm())) // the signer has decided
	return authn.Func(func(r *http.Request) (*authn.Caller, error) {
		if len(r.Header.Values("X-Forwarded-Client-Cert")) > 0 {
			return nil, fmt.Errorf("istioca: client certificate: the request is forwarded for another client: %w",
				authn.ErrNoCredential)
		}
		caller, err := proof.Authenticate(r)
		if err != nil || longest == 0 {
			return caller, err
		}
		proven := signer.Proven(caller.Certificate)
		if age := time.Since(proven); proven.IsZero() || age > longest {
			return nil, fmt.Errorf("istioca: client certificate: %w: %w: at %s, the limit is %v", authn.ErrRefused,
				errRenewed, proven.UTC().Format(time.RFC3339), longest)
		}
		return caller, nil
	}), nil
}

// ForwardedCertificates authenticates callers of the trust domain by the certificates that proxies at these addresses
// forward: see [authn.ForwardedCertificate]. A proxy does not say which root has signed a
// certificate, so while the signer has a tainted root, all forwarded certificates are refused: the thief of the root's
// key could use them.
func ForwardedCertificates(signer ca.Signer, td spiffe.TrustDomain,
	proxies []netip.Prefix) (authn.Authenticator, error) {
	forwarded, err := authn.ForwardedCertificate(spiffe.AllowMembersOf(td), proxies...)
	if err != nil {
		return nil, err
	}
	return authn.Func(func(r *http.Request) (*authn.Caller, error) {
		caller, err := forwarded.Authenticate(r)
		if err != nil {
			return nil, err
		}
		all, good := signer.Bundle(), signer.CallerBundle()
		switch {
		case caller.ID.IsZero():
			return nil, fmt.Errorf("istioca: forwarded certificate: %w: %q has no SPIFFE ID", authn.ErrRefused, caller)
		case all == nil || good == nil || all != good && !all.Equal(good):
			return nil, fmt.Errorf("istioca: forwarded certificate: %w: a root of the CA is tainted, "+
				"and the header does not "+
				"say which one has signed; use a token until the root is gone", authn.ErrRefused)
		}
		return caller, nil
	}), nil
}

// errRenewed says that a caller needs another proof than its certificate again.
var errRenewed = errors.New("its holder was last proven by something else than a certificate too long ago")

// defaultCertificateTTL is the longest lifetime for a caller whose only proof is its certificate.
const defaultCertificateTTL = 24 * time.Hour

// byProxy is the method of [authn.ForwardedCertificate]: a proxy has verified the certificate.
const byProxy = "forwarded-certificate"

// renewal limits a request of a caller whose only proof is its certificate.
func (s *Server) renewal(caller *authn.Caller, r *ca.Request) {
	switch {
	case caller.Certificate != nil:
		r.Proven = s.opts.Signer.Proven(caller.Certificate)
	case caller.Method != byProxy:
		return
	}
	most := s.opts.CertificateTTL
	r.TTL = min(cmp.Or(r.TTL, most), cmp.Or(most, defaultCertificateTTL))
}
