package gospiffe

import (
	"cmp"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/spiffe/go-spiffe/v2/bundle/jwtbundle"
	"github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/svidkit/svidkit/spiffe"
)

// fromBundle converts a bundle that does not change any more.
func fromBundle(td spiffe.TrustDomain, b *spiffebundle.Bundle) (*spiffe.Bundle, error) {
	c := spiffe.BundleContents{
		X509Authorities: b.X509Authorities(), JWTAuthorities: b.JWTAuthorities(), WITAuthorities: b.WITAuthorities(),
	}
	if n, ok := b.SequenceNumber(); ok {
		c.Sequence = &n
	}
	c.RefreshHint, _ = b.RefreshHint()
	return spiffe.NewBundle(td, c)
}

// toBundle converts the bundle of td.
func toBundle(td spiffeid.TrustDomain, b *spiffe.Bundle) *spiffebundle.Bundle {
	theirs := spiffebundle.New(td)
	theirs.SetX509Authorities(slices.Collect(b.X509Authorities()))
	theirs.SetJWTAuthorities(maps.Collect(b.JWTAuthorities()))
	theirs.SetWITAuthorities(b.Contents().WITAuthorities)
	if n, ok := b.Sequence(); ok {
		theirs.SetSequenceNumber(n)
	}
	if d, ok := b.RefreshHint(); ok {
		theirs.SetRefreshHint(d)
	}
	return theirs
}

// FromBundleSource returns a source of the bundles in src, with all their authorities, sequence number and refresh
// hint. A BundleSource of go-spiffe's workloadapi, a [spiffebundle.Set] and a [spiffebundle.Bundle] are such
// sources. For a source with only one kind of authorities use [FromX509BundleSource] or [FromJWTBundleSource].
//
// A bundle must follow the rules of [spiffe.NewBundle], whose errors the source returns: one authority that breaks
// them makes the whole bundle an error. The certificates and keys are shared.
//
// The source returns the same [*spiffe.Bundle] until the contents of the bundle from src change. src must not block.
// The bundle of a trust domain is kept until a later call finds none in src.
func FromBundleSource(src spiffebundle.Source) spiffe.BundleSource {
	need(src != nil, "FromBundleSource needs a source")
	return fromBundles(func(td spiffeid.TrustDomain) (*spiffebundle.Bundle, spiffeid.TrustDomain, error) {
		b, err := src.GetBundleForTrustDomain(td)
		if err != nil || b == nil {
			return nil, td, cmp.Or(err, errNone)
		}
		return b.Clone(), b.TrustDomain(), nil
	}, (*spiffebundle.Bundle).Equal, fromBundle)
}

// FromX509BundleSource is like [FromBundleSource], for a source of X.509 authorities, such as an X509Source of
// go-spiffe's workloadapi. Its bundles verify X.509-SVIDs and no tokens.
func FromX509BundleSource(src x509bundle.Source) spiffe.BundleSource {
	need(src != nil, "FromX509BundleSource needs a source")
	return fromBundles(func(td spiffeid.TrustDomain) ([]*x509.Certificate, spiffeid.TrustDomain, error) {
		b, err := src.GetX509BundleForTrustDomain(td)
		if err != nil || b == nil {
			return nil, td, cmp.Or(err, errNone)
		}
		return b.X509Authorities(), b.TrustDomain(), nil
	}, func(a, b []*x509.Certificate) bool {
		return slices.EqualFunc(a, b, func(a, b *x509.Certificate) bool { return a == b || a.Equal(b) })
	}, func(td spiffe.TrustDomain, certs []*x509.Certificate) (*spiffe.Bundle, error) {
		return spiffe.NewBundle(td, spiffe.BundleContents{X509Authorities: certs})
	})
}

// FromJWTBundleSource is like [FromBundleSource], for a source of JWT authorities, such as a JWTSource of
// go-spiffe's workloadapi. Its bundles verify JWT-SVIDs and no certificates.
func FromJWTBundleSource(src jwtbundle.Source) spiffe.BundleSource {
	need(src != nil, "FromJWTBundleSource needs a source")
	return fromBundles(func(td spiffeid.TrustDomain) (map[string]crypto.PublicKey, spiffeid.TrustDomain, error) {
		b, err := src.GetJWTBundleForTrustDomain(td)
		if err != nil || b == nil {
			return nil, td, cmp.Or(err, errNone)
		}
		return b.JWTAuthorities(), b.TrustDomain(), nil
	}, func(a, b map[string]crypto.PublicKey) bool {
		return maps.EqualFunc(a, b, func(a, b crypto.PublicKey) bool {
			k, ok := a.(interface{ Equal(crypto.PublicKey) bool })
			return sameKey(a, b) || ok && k.Equal(b)
		})
	}, func(td spiffe.TrustDomain, keys map[string]crypto.PublicKey) (*spiffe.Bundle, error) {
		return spiffe.NewBundle(td, spiffe.BundleContents{JWTAuthorities: keys})
	})
}

// errNone is the error of a source that returns no bundle and no error.
var errNone = errors.New("the source returned no bundle, and no error")

// fromBundles returns a source of the bundles from get, which returns a copy of the contents and the trust domain
// that they claim. make is called when the contents differ from the last call's.
func fromBundles[C any](get func(spiffeid.TrustDomain) (C, spiffeid.TrustDomain, error), same func(a, b C) bool,
	make func(spiffe.TrustDomain, C) (*spiffe.Bundle, error),
) spiffe.BundleSource {
	type converted struct {
		from   C
		bundle *spiffe.Bundle
		err    error
	}
	var mu sync.Mutex
	known := map[spiffe.TrustDomain]*converted{}
	return bundleSource(func(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
		theirs, err := toTrustDomain(td)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", err, spiffe.ErrUnknownTrustDomain)
		}
		from, of, err := get(theirs)
		mu.Lock()
		defer mu.Unlock()
		switch {
		case err != nil && strings.HasSuffix(err.Error(), "source is closed"): // go-spiffe says it by its text alone
			return nil, errorf("trust domain %q: %w", td, err)
		case err != nil:
			delete(known, td)
			return nil, errorf("trust domain %q: %w: %w", td, spiffe.ErrUnknownTrustDomain, err)
		case of != theirs:
			return nil, errorf("trust domain %q: %w: the source returned the bundle of %q",
				td, spiffe.ErrUnknownTrustDomain, of)
		}
		c := known[td]
		if c == nil || !same(from, c.from) {
			c = &converted{from: from}
			c.bundle, c.err = make(td, from)
			known[td] = c
		}
		return c.bundle, c.err
	})
}

type bundleSource func(spiffe.TrustDomain) (*spiffe.Bundle, error)

func (f bundleSource) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return f(td) }

// ToBundleSource returns a source for go-spiffe, of each kind that go-spiffe has, of the bundles in src. The caller
// owns each bundle that it returns, so an authority that one reader adds is trusted by no other; the certificates
// and keys are shared. For a trust domain without a bundle in src, the error wraps the error of src.
func ToBundleSource(src spiffe.BundleSource) interface {
	x509bundle.Source
	jwtbundle.Source
	spiffebundle.Source
} {
	need(src != nil, "ToBundleSource needs a source")
	return bundlesFor(func(theirs spiffeid.TrustDomain) (*spiffe.Bundle, error) {
		td, err := fromTrustDomain(theirs)
		if err != nil {
			return nil, err
		}
		b, err := src.Bundle(td)
		switch {
		case err != nil:
			return nil, errorf("trust domain %q: %w", td, err)
		case b == nil || b.TrustDomain() != td:
			return nil, errorf("trust domain %q: %w: the source returned another or none",
				td, spiffe.ErrUnknownTrustDomain)
		}
		return b, nil
	})
}

// bundlesFor returns the bundle of the given trust domain.
type bundlesFor func(spiffeid.TrustDomain) (*spiffe.Bundle, error)

func (f bundlesFor) GetX509BundleForTrustDomain(td spiffeid.TrustDomain) (*x509bundle.Bundle, error) {
	b, err := f(td)
	if err != nil {
		return nil, err
	}
	// FromX509Authorities copies the list, so that this one need not be on the heap.
	authorities := slices.AppendSeq(make([]*x509.Certificate, 0, 8), b.X509Authorities())
	return x509bundle.FromX509Authorities(td, authorities), nil
}

func (f bundlesFor) GetJWTBundleForTrustDomain(td spiffeid.TrustDomain) (*jwtbundle.Bundle, error) {
	b, err := f(td)
	if err != nil {
		return nil, err
	}
	theirs := jwtbundle.New(td)
	for id, key := range b.JWTAuthorities() {
		if err := theirs.AddJWTAuthority(id, key); err != nil {
			return nil, errorf("trust domain %q: %w", td, err)
		}
	}
	return theirs, nil
}

func (f bundlesFor) GetBundleForTrustDomain(td spiffeid.TrustDomain) (*spiffebundle.Bundle, error) {
	b, err := f(td)
	if err != nil {
		return nil, err
	}
	return toBundle(td, b), nil
}
