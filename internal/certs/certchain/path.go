package certchain

import (
	"crypto"
	"crypto/x509"
	"fmt"
	"slices"
	"time"
)

// Usages returns all extended key usages that a role needs, where role is a spiffe.Role, and nil for any other
// number. For crypto/x509 an empty list means serverAuth.
func Usages(role int) []x509.ExtKeyUsage {
	switch role {
	case 0:
		return []x509.ExtKeyUsage{x509.ExtKeyUsageAny}
	case 1:
		return []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	case 2:
		return []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	case 3:
		return []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	}
	return nil
}

// Path returns a path from the first certificate of chain over the others, in any order, to one of roots, on which no
// certificate rules out any of usages, of which there is at least one, and allowed refuses no key. While roots overlap
// there may be several paths; it returns the path that lasts longest. chain has passed [CheckCost]. The error comes from
// crypto/x509 or from allowed.
func Path(chain []*x509.Certificate, roots *x509.CertPool, usages []x509.ExtKeyUsage, now time.Time,
	allowed func(crypto.PublicKey) error) ([]*x509.Certificate, error) {
	opts := x509.VerifyOptions{Roots: roots, CurrentTime: now.UTC(), KeyUsages: usages[:1]}
	if len(chain) > 1 {
		opts.Intermediates = x509.NewCertPool()
		for _, c := range chain[1:] {
			opts.Intermediates.AddCert(c)
		}
	}
	paths, err := chain[0].Verify(opts)
	if err != nil {
		return nil, err
	}
	var longest []*x509.Certificate
	var refused error = x509.CertificateInvalidError{Cert: chain[0], Reason: x509.IncompatibleUsage}
	for _, p := range paths {
		// crypto/x509 accepts one of several usages
		if !permits(p, usages[1:]) || longest != nil && !End(p).After(End(longest)) {
			continue
		}
		if err := checkKeys(p, allowed); err != nil {
			refused = err
			continue
		}
		longest = p
	}
	if longest == nil {
		return nil, refused
	}
	return longest, nil
}

// checkKeys returns the error of allowed for the first key of path that it refuses.
func checkKeys(path []*x509.Certificate, allowed func(crypto.PublicKey) error) error {
	for _, c := range path {
		if err := allowed(c.PublicKey); err != nil {
			return err
		}
	}
	return nil
}

// permits reports whether no certificate of path rules out any of usages, by the rules of crypto/x509.
func permits(path []*x509.Certificate, usages []x509.ExtKeyUsage) bool {
	for _, c := range path {
		if len(c.ExtKeyUsage) == 0 && len(c.UnknownExtKeyUsage) == 0 ||
			slices.Contains(c.ExtKeyUsage, x509.ExtKeyUsageAny) {
			continue
		}
		lacks := func(usage x509.ExtKeyUsage) bool { return !slices.Contains(c.ExtKeyUsage, usage) }
		if slices.ContainsFunc(usages, lacks) {
			return false
		}
	}
	return true
}

// Roles reports the roles that chain can authenticate: the roles that none of its certificates rules out.
func Roles(chain []*x509.Certificate) (server, client bool) {
	return permits(chain, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}), permits(chain,
		[]x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth})
}

// InTime returns why a leaf is not valid at now. Every identity source keeps its current identity rather than take a
// leaf that is not valid, and reports this error.
func InTime(leaf *x509.Certificate, now time.Time) error {
	switch {
	case !now.Before(leaf.NotAfter):
		return fmt.Errorf("the certificate has expired at %s", stamp(leaf.NotAfter))
	case now.Before(leaf.NotBefore):
		return fmt.Errorf("the certificate is valid from %s on; compare the clocks", stamp(leaf.NotBefore))
	}
	return nil
}

// Now is the time in UTC, so that errors of crypto/x509 and crypto/tls print it in the same zone as a certificate's
// end.
func Now() time.Time { return time.Now().UTC() }

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// End returns the time at which the first certificate of a path expires.
func End(path []*x509.Certificate) time.Time {
	first := slices.MinFunc(path, func(a, b *x509.Certificate) int { return a.NotAfter.Compare(b.NotAfter) })
	return first.NotAfter
}
