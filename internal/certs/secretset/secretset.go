// Package secretset defines and resolves the names by which Envoy requests the secrets of identities and trust
// bundles:
//
//	default                    the key pair of the own identity
//	spiffe://TRUST-DOMAIN/PATH the key pair of the identity with that ID: the first, if there are several
//	ROOTCA                     the X.509 authorities of the own trust domain
//	spiffe://TRUST-DOMAIN      the X.509 authorities of any trust domain with a bundle
//	ALL                        those of all of them, each for its own trust domain
package secretset

import (
	"crypto/x509"
	"fmt"
	"io/fs"
	"maps"
	"slices"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// The resource names that have no trust domain in them.
const (
	Default = "default"
	Root    = "ROOTCA"
	All     = "ALL"
)

// IsName reports whether there may be a secret with that name.
func IsName(name string) bool {
	_, err := spiffe.ParseID(name)
	return err == nil || name == Default || name == Root || name == All
}

// Unknown is the error of a package for a name that does not exist. It wraps [fs.ErrNotExist].
func Unknown(pkg, name string) error {
	return fmt.Errorf(`%s: no secret %.256q: the names are "default", "ROOTCA", "ALL", the IDs of the workload's `+
		`identities, and "spiffe://" with a trust domain that has a bundle: %w`, pkg, name, fs.ErrNotExist)
}

// Set is the identities and bundles at one moment. A nil Set is empty.
type Set struct {
	Own         *spiffe.SVID       // nil if there is none
	TrustDomain spiffe.TrustDomain // the own trust domain; zero means the trust domain of Own
	Identities  []*spiffe.SVID     // the identities that can be requested by ID
	Bundles     *spiffe.BundleSet

	// Joined says that ROOTCA has the authorities of all trust domains, each once, instead of only the own
	// authorities.
	Joined bool
}

// Material is the content for a secret: one of the first three fields is set. Unchanged sources yield equal Materials.
type Material struct {
	SVID    *spiffe.SVID
	Bundle  *spiffe.Bundle
	Bundles *spiffe.BundleSet
	Joined  bool // of Bundles: all in one
}

// Secret returns the secret made of m.
func (m Material) Secret(name string) (*pki.Secret, error) {
	switch {
	case m.Joined:
		return join(name, m.Bundles)
	case m.Bundles != nil:
		return pki.NewTrustDomainsSecret(name, m.Bundles)
	case m.Bundle != nil:
		return pki.NewTrustSecret(name, m.Bundle)
	}
	return pki.NewKeyPairSecret(name, m.SVID)
}

// join returns the secret with the authorities of all trust domains, in an order that does not depend on the trust
// domains.
func join(name string, set *spiffe.BundleSet) (*pki.Secret, error) {
	var td spiffe.TrustDomain
	var certs []*x509.Certificate
	for b := range set.All() {
		td, certs = b.TrustDomain(), slices.AppendSeq(certs, b.X509Authorities())
	}
	if len(certs) == 0 {
		return nil, fmt.Errorf("no secret %q: no trust domain has X.509 authorities: %w", name, spiffe.ErrNoAuthority)
	}
	all, err := spiffe.NewBundle(td, spiffe.BundleContents{X509Authorities: certchain.Set(certs)})
	if err != nil {
		return nil, err
	}
	return pki.NewTrustSecret(name, all)
}

// Lookup returns the Material of the secret name, and whether there is such a secret.
func (s *Set) Lookup(name string) (m Material, ok bool) {
	if s == nil {
		return m, false
	}
	td := s.TrustDomain
	switch id, err := spiffe.ParseID(name); {
	case name == Default:
		return Material{SVID: s.Own}, s.Own != nil
	case name == All:
		return Material{Bundles: s.Bundles}, true
	case name == Root && s.Joined:
		return Material{Bundles: s.Bundles, Joined: true}, true
	case name == Root && td.IsZero() && s.Own != nil:
		td = s.Own.ID().TrustDomain()
	case name == Root && !td.IsZero():
	case err != nil:
		return m, false
	case id.Path() != "":
		for _, svid := range s.Identities {
			if svid.ID() == id {
				return Material{SVID: svid}, true
			}
		}
		return m, false
	default:
		td = id.TrustDomain()
	}
	b, err := s.Bundles.Bundle(td)
	return Material{Bundle: b}, err == nil
}

// Changes returns the names of the secrets that appear, disappear or change from old to s: bundles first, so that
// subscribers learn of a bundle before the certificate that it verifies.
func (s *Set) Changes(old *Set) []string {
	all := map[string]bool{Default: true, Root: true, All: true}
	for _, set := range []*Set{s, old} {
		if set == nil {
			continue
		}
		for _, svid := range set.Identities {
			all[svid.ID().String()] = true
		}
		for b := range set.Bundles.All() {
			all[b.TrustDomain().ID().String()] = true
		}
	}
	var bundles, pairs []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		before, was := old.Lookup(name)
		after, is := s.Lookup(name)
		switch {
		case was == is && before == after:
		case before.SVID != nil || after.SVID != nil:
			pairs = append(pairs, name)
		default:
			bundles = append(bundles, name)
		}
	}
	return append(bundles, pairs...)
}
