package certchain

import (
	"crypto/x509"
	"fmt"
	"slices"
	"time"
)

// Usages returns all extended key usages that a role needs, where role is a spiffe.Role, and nil for any other number.
// To crypto/x509 no usage would mean serverAuth.
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
// certificate rules out one of usages, of which there is at least one. While roots overlap there may be several paths;
// this is the one that lasts longest. chain has passed [CheckCost]. The error is one of crypto/x509.
func Path(chain []*x509.Certificate, roots *x509.CertPool, usages []x509.ExtKeyUsage,
	now time.Time) ([]*x509.Certificate, error) {
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
	for _, p := range paths {
		if !permits(p, usages[1:]) { // for crypto/x509 one of several usages is enough
			continue
		}
		if longest == nil || End(p).After(End(longest)) {
			longest = p
		}
	}
	if longest == nil {
		return nil, x509.CertificateInvalidError{Cert: chain[0], Reason: x509.IncompatibleUsage}
	}
	return longest, nil
}

// permits reports whether no certificate of path rules out one of usages, as crypto/x509 sees it.
func permits(path []*x509.Certificate, usages []x509.ExtKeyUsage) bool {
	for _, c := range path {
		if len(c.ExtKeyUsage) == 0 && len(c.UnknownExtKeyUsage) == 0 ||
			slices.Contains(c.ExtKeyUsage, x509.ExtKeyUsageAny) {
			continue
		}
		for _, usage := range usages {
			if !slices.Contains(c.ExtKeyUsage, usage) {
				return false
			}
		}
	}
	return true
}

// Roles reports the roles in which chain can authenticate: those that none of its certificates rules out.
func Roles(chain []*x509.Certificate) (server, client bool) {
	return permits(chain, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}), permits(chain,
		[]x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth})
}

// InTime returns why a leaf is not valid at now. Wherever identities come from, one that is not valid replaces none,
// and the source says why with this error.
func InTime(leaf *x509.Certificate, now time.Time) error {
	switch {
	case !now.Before(leaf.NotAfter):
		return fmt.Errorf("the certificate has expired at %s", stamp(leaf.NotAfter))
	case now.Before(leaf.NotBefore):
		return fmt.Errorf("the certificate is valid from %s on; compare the clocks", stamp(leaf.NotBefore))
	}
	return nil
}

// Now is the time in UTC, in which errors of crypto/x509 and crypto/tls then say it, as they say when a certificate
// ends.
func Now() time.Time { return time.Now().UTC() }

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// End returns the time at which the first certificate of a path expires.
func End(path []*x509.Certificate) time.Time {
	first := slices.MinFunc(path, func(a, b *x509.Certificate) int { return a.NotAfter.Compare(b.NotAfter) })
	return first.NotAfter
}
