package gospiffe

import (
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
	theirs.SetWITAuthorities(maps.Collect(b.WITAuthorities()))
	if n, ok := b.Sequence(); ok {
		theirs.SetSequenceNumber(n)
	}
	if d, ok := b.RefreshHint(); ok {
		theirs.SetRefreshHint(d)
	}
	return theirs
}

// FromBundleSource returns a source of the bundles that src has, with all their authorities, sequence number
// and refresh hint. A BundleSource of go-spiffe's workloadapi, a [spiffebundle.Set] and a [spiffebundle.Bundle]
// are such sources. Sources that have one kind of authorities only are for [FromX509BundleSource] and
// [FromJWTBundleSource].
//
// A bundle is held to the rules of [spiffe.NewBundle], whose errors the source returns: one authority that
// breaks them makes the whole bundle an error. The certificates and keys are shared.
//
// It returns the same [*spiffe.Bundle] until the contents of what src returns change. src must not block.
// A bundle is kept for each trust domain that src had one of, until src is asked again and has none.
func FromBundleSource(src spiffebundle.Source) spiffe.BundleSource {
	if src == nil {
		panic("gospiffe: FromBundleSource needs a source")
	}
	return fromBundles(func(td spiffeid.TrustDomain) (*spiffebundle.Bundle, spiffeid.TrustDomain, error) {
		b, err := src.GetBundleForTrustDomain(td)
		if err != nil || b == nil {
			return nil, td, missing(err)
		}
		return b.Clone(), b.TrustDomain(), nil
	}, (*spiffebundle.Bundle).Equal, fromBundle)
}

// FromX509BundleSource is [FromBundleSource] for a source of X.509 authorities, such as an X509Source of
// go-spiffe's workloadapi. Its bundles verify X.509-SVIDs and no tokens.
func FromX509BundleSource(src x509bundle.Source) spiffe.BundleSource {
	if src == nil {
		panic("gospiffe: FromX509BundleSource needs a source")
	}
	return fromBundles(func(td spiffeid.TrustDomain) ([]*x509.Certificate, spiffeid.TrustDomain, error) {
		b, err := src.GetX509BundleForTrustDomain(td)
		if err != nil || b == nil {
			return nil, td, missing(err)
		}
		return b.X509Authorities(), b.TrustDomain(), nil
	}, func(a, b []*x509.Certificate) bool {
		return slices.EqualFunc(a, b, func(a, b *x509.Certificate) bool { return a == b || a.Equal(b) })
	}, func(td spiffe.TrustDomain, certs []*x509.Certificate) (*spiffe.Bundle, error) {
		return spiffe.NewBundle(td, spiffe.BundleContents{X509Authorities: certs})
	})
}

// FromJWTBundleSource is [FromBundleSource] for a source of JWT authorities, such as a JWTSource of
// go-spiffe's workloadapi. Its bundles verify JWT-SVIDs and no certificates.
func FromJWTBundleSource(src jwtbundle.Source) spiffe.BundleSource {
	if src == nil {
		panic("gospiffe: FromJWTBundleSource needs a source")
	}
	return fromBundles(func(td spiffeid.TrustDomain) (map[string]crypto.PublicKey, spiffeid.TrustDomain, error) {
		b, err := src.GetJWTBundleForTrustDomain(td)
		if err != nil || b == nil {
			return nil, td, missing(err)
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

// missing returns the error of a source that has no bundle. A source that was closed could not say whether
// there is one; go-spiffe tells the two apart by their text alone.
func missing(err error) error {
	switch {
	case err == nil:
		return errors.New("the source returned no bundle, and no error")
	case strings.HasSuffix(err.Error(), "source is closed"):
		return closedError{err}
	}
	return err
}

type closedError struct{ error }

func (e closedError) Unwrap() error { return e.error }

// fromBundles returns a source of what get returns at the moment: the contents of a bundle, in a copy, and the
// trust domain that it says it is of. make is called for contents that are not the same as those of the last
// call.
func fromBundles[C any](get func(spiffeid.TrustDomain) (C, spiffeid.TrustDomain, error), same func(a, b C) bool,
	make func(spiffe.TrustDomain, C) (*spiffe.Bundle, error),
) spiffe.BundleSource {
	type converted struct {
		from   C
		bundle *spiffe.Bundle
		err    error
	}
	var mu sync.RWMutex
	known := map[spiffe.TrustDomain]*converted{}
	return bundleSource(func(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
		theirs, err := toTrustDomain(td)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", err, spiffe.ErrUnknownTrustDomain)
		}
		from, of, err := get(theirs)
		mu.RLock()
		last := known[td]
		mu.RUnlock()
		switch {
		case err != nil:
			if last != nil {
				mu.Lock()
				delete(known, td)
				mu.Unlock()
			}
			if _, closed := err.(closedError); closed {
				return nil, errorf("trust domain %q: %w", td, err)
			}
			return nil, errorf("trust domain %q: %w: %w", td, spiffe.ErrUnknownTrustDomain, err)
		case of != theirs:
			return nil, errorf("trust domain %q: %w: the source returned the bundle of %q",
				td, spiffe.ErrUnknownTrustDomain, of)
		case last != nil && same(from, last.from):
			return last.bundle, last.err
		}
		c := &converted{from: from}
		c.bundle, c.err = make(td, from)
		mu.Lock()
		defer mu.Unlock()
		if now := known[td]; now != nil && now != last && same(from, now.from) { // another reader was faster
			return now.bundle, now.err
		}
		known[td] = c
		return c.bundle, c.err
	})
}

type bundleSource func(spiffe.TrustDomain) (*spiffe.Bundle, error)

func (f bundleSource) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return f(td) }

// ToBundleSource returns a source for go-spiffe, of each kind that it has, of the bundles that src has. Each
// bundle that it returns is the caller's own, so that an authority which one reader adds is trusted by no other;
// the certificates and keys are shared. The error for a trust domain that src has no bundle of is that of src,
// wrapped.
func ToBundleSource(src spiffe.BundleSource) interface {
	x509bundle.Source
	jwtbundle.Source
	spiffebundle.Source
} {
	if src == nil {
		panic("gospiffe: ToBundleSource needs a source")
	}
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

// bundlesFor returns the bundle of the trust domain that it is asked for.
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
