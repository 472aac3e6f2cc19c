package spiffe

import (
	"errors"
	"fmt"

	"github.com/svidkit/svidkit/internal/strictjson"
)

// Limits on bundle maps. The limits on bundle documents hold for each member as well.
const (
	maxMapSize    = 16 << 20 // bytes of a map
	maxMapDomains = 4096     // members of a map
	maxMapKeys    = 100_000  // entries of all members together
)

// ParseBundleMap parses a bundle map, which holds the bundle documents of many trust domains by name, as
// [BundleSet.Marshal] writes it. The result is complete: it replaces the previous set, and a domain that is missing
// from it is removed. It shares no memory with doc.
//
// If one member is malformed or duplicate, the whole map is refused with a [*ParseError], whose offset
// counts from the start of the map: keep the last good set. In a member, entries that are unknown or
// damaged are skipped as [ParseBundle] does. A refresh hint in a member is dropped.
//
// A map may have 16 MiB, 4,096 trust domains and 100,000 keys in all members together. A larger one
// gives an error that wraps [ErrTooLarge].
func ParseBundleMap(doc []byte) (*BundleSet, error) {
	if len(doc) > maxMapSize {
		return nil, mapFault(maxMapSize, "BND-33", fmt.Sprintf("longer than %d bytes", maxMapSize), ErrTooLarge)
	}
	var m map[TrustDomain]*Bundle
	var fault *ParseError
	err := strictjson.ReadObject(doc, func(name string, r *strictjson.Reader) {
		if name == "trust_domains" && m == nil {
			m = make(map[TrustDomain]*Bundle)
			fault = readBundleMap(r, m)
		}
	})
	switch {
	case fault != nil:
		return nil, fault
	case err != nil:
		return nil, jsonFault(mapFault(0, "MAP-1", "", nil), err)
	case m == nil:
		return nil, mapFault(0, "MAP-1", `the member "trust_domains" is missing`, nil)
	}
	return &BundleSet{m: m}, nil
}

// readBundleMap reads the member "trust_domains" into m.
func readBundleMap(r *strictjson.Reader, m map[TrustDomain]*Bundle) *ParseError {
	if k := r.Kind(); k != strictjson.Object && k != strictjson.None {
		return mapFault(r.Offset(), "MAP-1", `"trust_domains" is not an object`, nil)
	}
	keys := 0
	for name := range r.Members() {
		from := r.Offset()
		td, err := ParseTrustDomain(string(name))
		switch {
		case err != nil:
			return mapFault(from, "MAP-2", "the name of a member is not that of a trust domain", err)
		case m[td] != nil:
			return mapFault(from, "MAP-4", fmt.Sprintf("the member %q occurs twice", td), nil)
		case len(m) == maxMapDomains:
			return mapFault(from, "BND-33", fmt.Sprintf("more than %d trust domains", maxMapDomains), ErrTooLarge)
		}
		p := bundleParser{doc: r.Skip(), base: from, uses: knownUses[:2]}
		if p.doc == nil {
			return nil // the error is that of r
		}
		b, err := p.parse(td)
		if err != nil {
			e := mapFault(from, "MAP-10", "a member is not a bundle document", err)
			if pe, ok := errors.AsType[*ParseError](err); ok {
				e.Offset = pe.Offset
			}
			return e
		}
		if keys += len(b.x509) + len(b.jwt) + len(b.skipped); keys > maxMapKeys {
			reason := fmt.Sprintf("more than %d keys in all members together", maxMapKeys)
			return mapFault(from, "BND-33", reason, ErrTooLarge)
		}
		b.hint = 0
		m[td] = b
	}
	return nil
}

func mapFault(offset int, rule, reason string, cause error) *ParseError {
	return &ParseError{What: "bundle map", Offset: offset, Rule: rule, Reason: reason, Err: cause}
}

// Marshal returns the bundle map of the set: compact JSON with a member for each trust domain, sorted by
// name, so that equal sets with equal orders of authorities give the same bytes. The members have no
// refresh hint, and [ParseBundleMap] reads the result back. The result is the caller's own.
//
// It fails where [Bundle.Marshal] fails. A map over the limits of [ParseBundleMap] gives an error that wraps
// [ErrTooLarge].
func (s *BundleSet) Marshal() ([]byte, error) {
	if s.Len() > maxMapDomains {
		return nil, fmt.Errorf("spiffe: bundle map: %d trust domains, the limit is %d: %w", s.Len(), maxMapDomains,
			ErrTooLarge)
	}
	doc := []byte(`{"trust_domains":{`)
	keys := 0
	for b := range s.All() {
		member, err := b.marshal(0)
		if err != nil {
			return nil, err
		}
		if doc[len(doc)-1] != '{' {
			doc = append(doc, ',')
		}
		doc = append(doc, `"`+b.td.name+`":`...)
		doc = append(doc, member...)
		keys += len(b.x509) + len(b.jwt) + len(b.wit)
		if len(doc)+len("}}") > maxMapSize || keys > maxMapKeys {
			return nil, fmt.Errorf("spiffe: bundle map: more than %d bytes or %d keys: %w", maxMapSize, maxMapKeys,
				ErrTooLarge)
		}
	}
	return append(doc, "}}"...), nil
}
