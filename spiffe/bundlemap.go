package spiffe

import (
	"errors"
	"fmt"

	"github.com/svidkit/svidkit/internal/strictjson"
)

// Limits on bundle maps. The limits on bundle documents hold for each member as well.
const (
	maxMapSize    = 16 << 20 // bytes of a map
	maxMapDomains = 10_000   // members of a map
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
// A map may have 16 MiB, 10,000 trust domains and 100,000 keys in all members together. A larger one
// gives an error that wraps [ErrTooLarge].
func ParseBundleMap(doc []byte) (*BundleSet, error) {
	members, err := readBundleMap(doc)
	if err != nil {
		return nil, err
	}
	set := &BundleSet{m: make(map[TrustDomain]*Bundle, len(members))}
	keys := 0
	for _, m := range members {
		b, err := parseBundle(m.td, doc[m.from:m.to], m.from, false)
		if err != nil {
			e := mapFault(m.from, "MAP-10", "a member is not a bundle document", err)
			if pe, ok := errors.AsType[*ParseError](err); ok {
				e.Offset = pe.Offset
			}
			return nil, e
		}
		if keys += len(b.x509) + len(b.jwt) + len(b.skipped); keys > maxMapKeys {
			return nil, mapFault(m.from, "BND-33",
				fmt.Sprintf("more than %d keys in all members together", maxMapKeys), ErrTooLarge)
		}
		b.hint = 0
		set.m[m.td] = b
	}
	return set, nil
}

func mapFault(offset int, rule, reason string, cause error) *ParseError {
	return &ParseError{What: "bundle map", Offset: offset, Rule: rule, Reason: reason, Err: cause}
}

// mapMember is a member of a bundle map and where its document is.
type mapMember struct {
	td       TrustDomain
	from, to int
}

// readBundleMap finds the members. It reads the whole map before any key is parsed: keys are the costly
// part, and are not parsed if the map is refused.
func readBundleMap(doc []byte) ([]mapMember, error) {
	if len(doc) > maxMapSize {
		return nil, mapFault(maxMapSize, "BND-33", fmt.Sprintf("longer than %d bytes", maxMapSize), ErrTooLarge)
	}
	var members []mapMember
	var fault *ParseError
	found := false
	err := strictjson.ReadObject(doc, func(name string, r *strictjson.Reader) {
		if name == "trust_domains" {
			found = true
			members, fault = readMapMembers(r)
		}
	})
	switch {
	case fault != nil:
		return nil, fault
	case err != nil:
		return nil, jsonFault(mapFault(0, "MAP-1", "", nil), err)
	case !found:
		return nil, mapFault(0, "MAP-1", `the member "trust_domains" is missing`, nil)
	}
	return members, nil
}

// readMapMembers reads the member "trust_domains".
func readMapMembers(r *strictjson.Reader) (members []mapMember, fault *ParseError) {
	if r.Kind() != strictjson.Object {
		return nil, mapFault(r.Offset(), "MAP-1", `"trust_domains" is not an object`, nil)
	}
	seen := map[TrustDomain]bool{}
	for name := range r.Members() {
		from := r.Offset()
		td, err := ParseTrustDomain(string(name))
		switch {
		case err != nil:
			return nil, mapFault(from, "MAP-2", "the name of a member is not that of a trust domain", err)
		case seen[td]:
			return nil, mapFault(from, "MAP-4", fmt.Sprintf("the member %q occurs twice", td), nil)
		case len(members) == maxMapDomains:
			reason := fmt.Sprintf("more than %d trust domains", maxMapDomains)
			return nil, mapFault(from, "BND-33", reason, ErrTooLarge)
		}
		seen[td] = true
		members = append(members, mapMember{td, from, from + len(r.Skip())})
	}
	return members, nil
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
		doc = append(strictjson.AppendText(doc, b.td.name), ':')
		doc = append(doc, member...)
		keys += len(b.x509) + len(b.jwt) + len(b.wit)
		if len(doc)+len("}}") > maxMapSize || keys > maxMapKeys {
			return nil, fmt.Errorf("spiffe: bundle map: more than %d bytes or %d keys: %w", maxMapSize, maxMapKeys,
				ErrTooLarge)
		}
	}
	return append(doc, "}}"...), nil
}
