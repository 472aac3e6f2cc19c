package workloadapi

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/asn1"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/spiffe"
)

// BundlesUpdate is what one response of FetchX509Bundles or FetchJWTBundles says: all that the
// caller may trust, never a change to what was before (WAPI-10). It does not change and is shared.
type BundlesUpdate struct {
	// Bundles are the trust bundles, that of the own trust domain among them. Those of
	// FetchX509Bundles have X.509 authorities only, those of FetchJWTBundles JWT authorities only
	// (WAPI-16). A bundle that was received without any content is here, and is empty: nothing of
	// its trust domain is trusted.
	Bundles *spiffe.BundleSet

	// CRLs are certificate revocation lists in DER, as they were received. Nothing of this library
	// looks into them (AMB-23). FetchJWTBundles has none.
	CRLs [][]byte

	// Skipped says what was not taken over: the bundle of a trust domain that is damaged, for which
	// the one from before stays, or an authority in a bundle. They are worth a line in the log.
	Skipped []error
}

// kept is a bundle with the hash of what it was made of, so that what has not changed is not
// parsed again, and is the same value to those who compare.
type kept struct {
	sum    [sha256.Size]byte
	bundle *spiffe.Bundle
	notes  []error
}

// shelf has the bundles of the last good response of a stream.
type shelf map[spiffe.TrustDomain]kept

// parser makes a bundle of the value in a message. The notes say what was left out of it.
type parser func(td spiffe.TrustDomain, value []byte) (b *spiffe.Bundle, notes []error, err error)

// take returns the bundle that value stands for.
func (s shelf) take(td spiffe.TrustDomain, value []byte, parse parser) (kept, error) {
	k := kept{sum: sha256.Sum256(value)}
	if old, ok := s[td]; ok && old.sum == k.sum {
		return old, nil
	}
	var err error
	k.bundle, k.notes, err = parse(td, value)
	return k, err
}

// takeAll puts the bundles of a map into next, each by itself: one that is damaged hides no other
// and leaves what s has of its trust domain. A trust domain that next has already is left alone.
func (s shelf) takeAll(next shelf, m map[string][]byte, parse parser) (skipped []error) {
	for _, key := range slices.Sorted(maps.Keys(m)) {
		td, err := trustDomain(key)
		if err != nil {
			skipped = append(skipped, err)
			continue
		}
		if _, there := next[td]; there {
			skipped = append(skipped, fmt.Errorf("workloadapi: bundle of %q: skipped: it is the own trust domain, whose bundle comes with the identity", td))
			continue
		}
		k, err := s.take(td, m[key], parse)
		if err != nil {
			skipped = append(skipped, fmt.Errorf("workloadapi: bundle of %q: skipped: %w", td, err))
			old, ok := s[td]
			if !ok {
				continue
			}
			k = old
		}
		next[td] = k
		skipped = append(skipped, k.notes...)
	}
	return atMost(maxNotes, skipped)
}

// atMost cuts notes to n and counts the rest: a stranger must not fill the log.
func atMost(n int, notes []error) []error {
	if len(notes) <= n {
		return notes
	}
	return append(notes[:n:n], fmt.Errorf("workloadapi: and %d more", len(notes)-n))
}

// set returns the bundles as a set, old if that has the same.
func (s shelf) set(old *spiffe.BundleSet) *spiffe.BundleSet {
	all := make([]*spiffe.Bundle, 0, len(s))
	for _, k := range s {
		all = append(all, k.bundle)
	}
	set, err := spiffe.NewBundleSet(all...)
	if err != nil {
		panic(err) // the map has one bundle for each trust domain
	}
	if set.Equal(old) {
		return old
	}
	return set
}

// trustDomain parses the key of a map of bundles.
func trustDomain(key string) (spiffe.TrustDomain, error) {
	id, err := spiffe.ParseID(key)
	switch {
	case err != nil:
		return spiffe.TrustDomain{}, fmt.Errorf("workloadapi: a bundle was skipped: its name: %w", err)
	case id.Path() != "":
		return spiffe.TrustDomain{}, fmt.Errorf("workloadapi: a bundle was skipped: its name %q is not the ID of a trust domain", clip(key, 128))
	}
	return id.TrustDomain(), nil
}

// parseX509Bundle parses certificates in DER, back to back. What is not a certificate damages the
// whole; what is not fit for an authority is left out (X5-41). Nothing at all is the empty bundle.
func parseX509Bundle(td spiffe.TrustDomain, der []byte) (*spiffe.Bundle, []error, error) {
	if len(der) > spiffe.MaxBundleSize {
		return nil, nil, fmt.Errorf("%d bytes, the limit is %d: %w", len(der), spiffe.MaxBundleSize, spiffe.ErrTooLarge)
	}
	var authorities []*x509.Certificate
	var notes []error
	for n := 1; len(der) > 0; n++ {
		if n > spiffe.MaxBundleKeys {
			return nil, nil, fmt.Errorf("more than %d certificates: %w", spiffe.MaxBundleKeys, spiffe.ErrTooLarge)
		}
		var one asn1.RawValue
		rest, err := asn1.Unmarshal(der, &one)
		if err != nil {
			return nil, nil, fmt.Errorf("certificate %d: not DER", n)
		}
		cert, err := x509.ParseCertificate(one.FullBytes)
		if err != nil {
			return nil, nil, fmt.Errorf("certificate %d: %w", n, &localError{err})
		}
		der = rest
		if _, err := spiffe.NewBundle(td, spiffe.BundleContents{X509Authorities: []*x509.Certificate{cert}}); err != nil {
			notes = append(notes, fmt.Errorf("workloadapi: authority %d skipped: %w", n, err))
			continue
		}
		authorities = append(authorities, cert)
	}
	b, err := spiffe.NewBundle(td, spiffe.BundleContents{X509Authorities: authorities})
	return b, atMost(maxBundleNotes, notes), err
}

// parseJWTBundle parses a JWK Set. The keys of a standard one have no "use", which a bundle document
// demands (WAPI-46), so we write it there; keys of another use are left out. Nothing at all, and a
// set without usable keys, is the empty bundle.
func parseJWTBundle(td spiffe.TrustDomain, doc []byte) (*spiffe.Bundle, []error, error) {
	var parsed *spiffe.Bundle
	if len(doc) > 0 {
		if len(doc) > spiffe.MaxBundleSize {
			return nil, nil, fmt.Errorf("%d bytes, the limit is %d: %w", len(doc), spiffe.MaxBundleSize, spiffe.ErrTooLarge)
		}
		doc, err := withUse(doc)
		if err != nil {
			return nil, nil, err
		}
		if parsed, err = spiffe.ParseBundle(td, doc); err != nil {
			return nil, nil, err
		}
	}
	var c spiffe.BundleContents
	var notes []error
	if parsed != nil {
		c.JWTAuthorities = parsed.Contents().JWTAuthorities
		notes = parsed.Skipped()
	}
	b, err := spiffe.NewBundle(td, c)
	return b, atMost(maxBundleNotes, notes), err
}

const useJWT = `"jwt-svid"`

// withUse returns the document with a "use" for JWT-SVIDs in each key that has none or that is for
// signatures in general. All else, and what is wrong with the document, stays as it is.
func withUse(doc []byte) ([]byte, error) {
	type edit struct {
		from, to int // in doc
		text     string
	}
	var edits []edit
	r := strictjson.NewReader(doc)
	if r.Kind() != strictjson.Object {
		r.Skip()
	}
	for name := range r.Members() {
		if string(name) != "keys" {
			continue
		}
		for range r.Elements() {
			start, members, use := r.Offset()+1, 0, false
			for name := range r.Members() {
				members++
				if string(name) != "use" {
					continue
				}
				use = true
				from := r.Offset()
				if v, ok := r.Text(); ok && string(v) == "sig" {
					edits = append(edits, edit{from, r.Offset(), useJWT})
				}
			}
			if !use && members > 0 {
				edits = append(edits, edit{start, start, `"use":` + useJWT + ","})
			}
		}
	}
	if err := r.End(); err != nil {
		return nil, fmt.Errorf("not a JWK Set: %w", err)
	}
	out, done := make([]byte, 0, len(doc)+len(edits)*20), 0
	for _, e := range edits {
		out = append(append(out, doc[done:e.from]...), e.text...)
		done = e.to
	}
	return append(out, doc[done:]...), nil
}

// bundlesReader reads the responses of one watch of bundles.
type bundlesReader struct {
	shelf shelf
	last  *BundlesUpdate
}

func (r *bundlesReader) forget() { *r = bundlesReader{} }

func (r *bundlesReader) readX509(data []byte) (*BundlesUpdate, error) {
	var m x509BundlesResponse
	if err := decode(data, &m, maxElements); err != nil {
		return nil, err
	}
	return r.update(m.bundles, m.crl, parseX509Bundle)
}

func (r *bundlesReader) readJWT(data []byte) (*BundlesUpdate, error) {
	var m jwtBundlesResponse
	if err := decode(data, &m, maxElements); err != nil {
		return nil, err
	}
	return r.update(m.bundles, nil, parseJWTBundle)
}

func (r *bundlesReader) update(m map[string][]byte, crls [][]byte, parse parser) (*BundlesUpdate, error) {
	if len(m) == 0 {
		return nil, errors.New("it has no bundles (WAPI-14)")
	}
	next := make(shelf, len(m))
	u := &BundlesUpdate{CRLs: crls, Skipped: r.shelf.takeAll(next, m, parse)}
	if len(next) == 0 {
		return nil, fmt.Errorf("no bundle in it can be used: %w", u.Skipped[0])
	}
	var old *spiffe.BundleSet
	if r.last != nil {
		old = r.last.Bundles
	}
	u.Bundles = next.set(old)
	r.shelf, r.last = next, u
	return u, nil
}
