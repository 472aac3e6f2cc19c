// Package sourcereport makes the report of a source of SPIFFE identities and trust bundles, and says why the source
// has none.
package sourcereport

import (
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Of reports the identity and the trust bundles of sources, each of which may be nil. It includes all bundles if the
// source can list them, and the bundles of the identity's trust domain and of domains.
func Of(svids spiffe.SVIDSource, bundles spiffe.BundleSource, origin string,
	domains ...spiffe.TrustDomain) (r report.Report) {
	if svids != nil {
		svid, err := svids.SVID()
		if err == nil && svid == nil {
			err = errors.New("the source returned no SVID and no error")
		}
		i := report.Identity{Own: true, Err: err}
		if err == nil {
			if td := svid.ID().TrustDomain(); !slices.Contains(domains, td) {
				domains = append([]spiffe.TrustDomain{td}, domains...)
			}
			i, err = identity(svid, bundles)
		}
		r.Identities, r.NotReady = []report.Identity{i}, err
	}
	if bundles != nil {
		r.Bundles = list(bundles, origin, domains)
	}
	return r
}

// identity returns the report of svid, and why peers with the same bundle refuse it. NotAfter is when the chain that
// they verify ends: certificates outside that chain may end earlier. A bundle without a good X.509 authority is
// reported elsewhere.
func identity(svid *spiffe.SVID, bundles spiffe.BundleSource) (report.Identity, error) {
	i := report.Identity{Name: svid.ID().String(), Own: true, NotBefore: svid.Leaf().NotBefore,
		NotAfter: svid.NotAfter(), ChainEnd: certchain.End(svid.Chain()), Certificate: svid.Leaf}
	now, td := time.Now(), svid.ID().TrustDomain()
	if bundles == nil || now.After(i.NotAfter) {
		return i, nil
	}
	b, err := bundles.Bundle(td)
	if err != nil || b == nil || !slices.ContainsFunc(slices.Collect(b.X509Authorities()),
		func(c *x509.Certificate) bool { return !now.After(c.NotAfter) }) {
		return i, nil
	}
	path, err := certchain.Path(svid.Chain(), b.CertPool(), certchain.Usages(int(spiffe.AnyRole)), now,
		spiffe.AnyAlgorithm().Check)
	if err != nil {
		return i, fmt.Errorf("no peer that has this trust bundle of %q accepts the SVID of %q: %w", td, svid.ID(), err)
	}
	i.NotAfter = certchain.End(path)
	return i, nil
}

// Refused returns why peers with these bundles refuse svid at the given time, or nil.
func Refused(svid *spiffe.SVID, bundles spiffe.BundleSource, at time.Time) error {
	v, err := spiffe.NewVerifier(bundles, spiffe.AllowIDs(svid.ID()),
		func() time.Time { return at })
	if err == nil {
		_, err = v.WithAlgorithms(spiffe.AnyAlgorithm()).VerifyChain(svid.Chain(), spiffe.AnyRole)
	}
	return err
}

// Usages returns why svid must not replace old, which may be nil: its extended key usages permit neither a server nor
// a client, or less than those of old, which is still valid. The note is about an identity for one side only.
func Usages(svid, old *spiffe.SVID) (note, err error) {
	server, client := certchain.Roles(svid.Chain())
	if server && client {
		return nil, nil
	}
	if !server && !client {
		return nil, fmt.Errorf("the extended key usages of %q permit neither a server nor a client", svid.ID())
	}
	if old != nil && time.Now().Before(old.NotAfter()) {
		if s, c := certchain.Roles(old.Chain()); s && !server || c && !client {
			return nil, fmt.Errorf("the extended key usages of the new certificate of %q permit less than those of "+
				"the certificate in force", svid.ID())
		}
	}
	side := "server"
	if client {
		side = "client"
	}
	return fmt.Errorf("the extended key usages of %q permit a %s only", svid.ID(), side), nil
}

// list returns the bundles that src can list, and the bundles of domains.
func list(src spiffe.BundleSource, origin string, domains []spiffe.TrustDomain) (all []report.Bundle) {
	var set *spiffe.BundleSet
	switch s := src.(type) {
	case *spiffe.Bundle:
		all = append(all, Bundle(s, origin))
	case *spiffe.BundleSet:
		set = s
	case interface{ Bundles() *spiffe.BundleSet }:
		set = s.Bundles()
	case interface {
		Snapshot() (*spiffe.Snapshot, error)
	}:
		if snap, err := s.Snapshot(); err == nil && snap != nil {
			set = snap.Bundles()
		}
	}
	if set != nil {
		for b := range set.All() {
			all = append(all, Bundle(b, origin))
		}
	}
	for _, td := range domains {
		if slices.ContainsFunc(all, func(b report.Bundle) bool { return b.TrustDomain == td.String() }) {
			continue
		}
		b, err := src.Bundle(td)
		if err == nil && b == nil {
			err = errors.New("the source returned no bundle and no error")
		}
		if err != nil {
			all = append(all, report.Bundle{TrustDomain: td.String(), Origin: origin, Err: err})
		} else {
			all = append(all, Bundle(b, origin))
		}
	}
	return all
}

// Bundle returns the report of b.
func Bundle(b *spiffe.Bundle, origin string) report.Bundle {
	c := b.Contents()
	return report.Bundle{
		TrustDomain: b.TrustDomain().String(), Origin: origin, X509: c.X509Authorities,
		JWT: slices.Sorted(maps.Keys(c.JWTAuthorities)), WIT: slices.Sorted(maps.Keys(c.WITAuthorities)),
		Sequence: c.Sequence, RefreshHint: c.RefreshHint,
	}
}

// Withdrawn reports whether a source has no identity because its server withdrew or denied it: errors say so with a
// method Withdrawn.
func Withdrawn(err error) bool {
	e, ok := errors.AsType[interface {
		error
		Withdrawn() bool
	}](err)
	return ok && e.Withdrawn()
}

// Joined returns the errors in one line; of more than most errors only the first ones.
func Joined(errs []error, most int) (all error) {
	for i, err := range errs {
		switch {
		case i == most:
			return fmt.Errorf("%w; and %d more", all, len(errs)-i)
		case i == 0:
			all = err
		default:
			all = fmt.Errorf("%w; %w", all, err)
		}
	}
	return all
}
