package ra

import (
	"cmp"
	"crypto/x509"
	"encoding/asn1"
	"errors"
	"fmt"
	"maps"
	"net"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

func oidCommonName() asn1.ObjectIdentifier { return asn1.ObjectIdentifier{2, 5, 4, 3} }

// check checks the request before anything is sent, and fills in the caller.
func (a *RA) check(r *ca.Request) *ca.SignError {
	switch {
	case r.CSR == nil || r.CSR.PublicKey() == nil:
		return fail(ca.ErrCSR, "there is none; pki.ParseCSR makes one")
	case r.TTL > a.cfg.MaxTTL:
		f := fail(ca.ErrTTL, "%v was asked for, the longest is %v", r.TTL, a.cfg.MaxTTL)
		f.Asked, f.Granted = r.TTL, a.cfg.MaxTTL
		return f
	case r.TTL > 0 && r.TTL < minTTL:
		f := fail(ca.ErrTTL, "%v was asked for, the shortest that Kubernetes allows is %v", r.TTL, minTTL)
		f.Asked, f.Granted = r.TTL, minTTL
		return f
	}
	if err := a.checkIdentity(r); err != nil {
		return fail(ca.ErrIdentity, "%w", err)
	}
	granted, err := grantedNames(r)
	if err != nil {
		return fail(ca.ErrIdentity, "%w", err)
	}
	if err := checkCSR(r, granted); err != nil {
		return fail(ca.ErrCSR, "%w", err)
	}
	return nil
}

// checkIdentity checks the identity to certify, and fills in the caller.
func (a *RA) checkIdentity(r *ca.Request) error {
	switch {
	case r.Profile == ca.SVID && r.ID.IsZero():
		return fmt.Errorf("ID: %w", spiffe.ErrZero)
	case r.Profile == ca.SVID && !r.ID.MemberOf(a.cfg.TrustDomain):
		return fmt.Errorf("the ID is not in the trust domain %q of this authority", a.cfg.TrustDomain)
	case r.Profile == ca.SVID && r.ID.Path() == "":
		return errors.New("the ID has no path, so it names no workload")
	case r.Profile == ca.SVID:
		r.Caller = cmp.Or(r.Caller, r.ID.String())
	case r.Profile != ca.DNSOnly:
		return fmt.Errorf("unknown profile %d", r.Profile)
	case !r.ID.IsZero():
		return errors.New("a certificate for DNS names only has no ID")
	case len(r.DNSNames) == 0:
		return errors.New("a certificate for DNS names only needs one")
	default:
		r.Caller = cmp.Or(r.Caller, r.DNSNames[0])
	}
	return nil
}

// grantedNames returns the names that the certificate may have.
func grantedNames(r *ca.Request) (map[pki.SAN]bool, error) {
	granted := map[pki.SAN]bool{}
	if r.Profile == ca.SVID {
		granted[pki.IDSAN(r.ID)] = true
	}
	for _, name := range r.DNSNames {
		granted[pki.DNSSAN(name)] = true
	}
	for _, ip := range r.IPs {
		if ip.To16() == nil {
			return nil, fmt.Errorf("IP address of %d bytes", len(ip))
		}
		granted[pki.IPSAN(ip)] = true
	}
	return granted, nil
}

// namesOf returns names as a set. Both forms of an IPv4 address are the same name.
func namesOf(sans []pki.SAN) (map[pki.SAN]bool, error) {
	names := map[pki.SAN]bool{}
	for _, s := range sans {
		if s.Type == pki.IP {
			s = pki.IPSAN(net.IP(s.Value))
		}
		if names[s] {
			return nil, fmt.Errorf("it has the name %.300q twice", s)
		}
		names[s] = true
	}
	return names, nil
}

// checkCSR refuses a request that asks for anything that was not granted: a signer may grant all of it.
func checkCSR(r *ca.Request, granted map[pki.SAN]bool) error {
	asked, err := namesOf(r.CSR.SANs())
	if err != nil {
		return err
	}
	for s := range asked {
		if !granted[s] {
			return fmt.Errorf("it asks for the name %.300q, which is not granted to the caller", s)
		}
	}
	switch {
	case r.Profile == ca.SVID && !asked[pki.IDSAN(r.ID)]:
		return fmt.Errorf("it does not ask for the ID %q, and the signer can only give what it asks for", r.ID)
	case len(asked) == 0:
		return errors.New("it asks for no name, and the signer can only give what it asks for")
	}
	if _, err := x509.ParseCertificateRequest(r.CSR.DER()); err != nil {
		// Kubernetes reads it with crypto/x509, which refuses some requests that package pki accepts.
		return errors.New("crypto/x509 cannot read it")
	}
	if cn := r.CSR.CommonName(); cn != "" && cn != r.CommonName {
		return fmt.Errorf("its common name (%s) is not granted to the caller", oidCommonName())
	}
	return r.CSR.OnlyNames()
}

// sameNames reports whether a certificate has exactly the names of the request, which are all granted.
func sameNames(leaf *x509.Certificate, csr *pki.CSR) error {
	sans, err := pki.ParseSANs(leaf.Extensions)
	if err != nil {
		return err
	}
	got, err := namesOf(sans)
	if err != nil {
		return err
	}
	asked, err := namesOf(csr.SANs())
	if err == nil && !maps.Equal(got, asked) {
		err = fmt.Errorf("it is for %.300v, and %.300v were asked for", sans, csr.SANs())
	}
	return err
}
