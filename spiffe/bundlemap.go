package spiffe

import (
	"errors"
	"fmt"

	"github.com/svidkit/svidkit/internal/strictjson"
)

// Limits on bundle maps. Each member has those of a bundle document as well.
const (
	MaxBundleMapSize    = 16 << 20 // bytes of a map
	MaxBundleMapDomains = 10_000   // members of a map
	MaxBundleMapKeys    = 100_000  // entries of all members together
)

// BundleMapError says why a bundle map is refused. Unwrap gives the cause, if there is one: a
// [*BundleError] for a member's document, a [*ParseError] for its name, or [ErrTooLarge].
type BundleMapError struct {
	Member string // the name of the member that it is about, as it was written; "" for the map itself
	Offset int    // in the map, in bytes
	Rule   string // the rule's id, as in testdata and the conformance table, such as "MAP-4"
	Reason string // the rule in words
	Err    error  // the cause, or nil
}

func (e *BundleMapError) Error() string {
	what := "document"
	if e.Member != "" {
		what = "member " + short(e.Member)
	}
	why := e.Reason
	if e.Err != nil {
		why += ": " + clip(inner(e.Err), maxInError)
	}
	return fmt.Sprintf("spiffe: bundle map: %s, at byte %d: %s (%s)", what, e.Offset, why, e.Rule)
}

func (e *BundleMapError) Unwrap() error { return e.Err }

// ParseBundleMap parses a bundle map, which holds the bundle documents of many trust domains by
// their names, as [BundleSet.Marshal] writes it. The set that it returns is the state of the world:
// it takes the place of the one before, and a domain that is not in it is gone (MAP-7).
//
// One member that is malformed, or is there twice, has the whole map refused with a
// [*BundleMapError]: keep the last good set then. In a member, entries that are unknown or damaged
// are skipped as [ParseBundle] does. A refresh hint in a member means nothing for the map and is
// dropped (MAP-6).
//
// A map over [MaxBundleMapSize], [MaxBundleMapDomains] or [MaxBundleMapKeys] gives an error that
// wraps [ErrTooLarge]. The result shares no memory with doc.
func ParseBundleMap(doc []byte) (*BundleSet, error) {
	members, err := readBundleMap(doc)
	if err != nil {
		return nil, err
	}
	set := &BundleSet{m: make(map[TrustDomain]*Bundle, len(members))}
	keys := 0
	for _, m := range members {
		b, err := ParseBundle(m.td, doc[m.from:m.to])
		if err != nil {
			e := &BundleMapError{Member: m.td.name, Offset: m.from, Rule: "MAP-10", Reason: "its bundle document is malformed", Err: err}
			if be, ok := errors.AsType[*BundleError](err); ok {
				be.Offset += m.from
				e.Offset = be.Offset
			}
			return nil, e
		}
		for _, skipped := range b.skipped {
			if be, ok := errors.AsType[*BundleError](skipped); ok {
				be.Offset += m.from
			}
		}
		if keys += len(b.x509) + len(b.jwt) + len(b.skipped); keys > MaxBundleMapKeys {
			return nil, &BundleMapError{
				Member: m.td.name, Offset: m.from, Rule: "BND-33",
				Reason: fmt.Sprintf("more than %d keys in all members together", MaxBundleMapKeys), Err: ErrTooLarge,
			}
		}
		b.hint = 0
		set.m[m.td] = b
	}
	return set, nil
}

// mapMember is a member of a bundle map and where its document is.
type mapMember struct {
	td       TrustDomain
	from, to int
}

// readBundleMap finds the members. The whole map is read before any key is looked at: keys are the
// costly part, and not worth it if the map is refused.
func readBundleMap(doc []byte) ([]mapMember, error) {
	if len(doc) > MaxBundleMapSize {
		return nil, &BundleMapError{Offset: MaxBundleMapSize, Rule: "BND-33", Reason: fmt.Sprintf("longer than %d bytes", MaxBundleMapSize), Err: ErrTooLarge}
	}
	r := strictjson.NewReader(doc)
	object := r.Kind() == strictjson.Object
	if !object {
		r.Skip()
	}
	var members []mapMember
	found := false
	for name := range r.Members() {
		if string(name) != "trust_domains" {
			continue
		}
		if r.Kind() != strictjson.Object {
			return nil, &BundleMapError{Offset: r.Offset(), Rule: "MAP-1", Reason: `"trust_domains" is not an object`}
		}
		found = true
		seen := map[string]bool{}
		for name := range r.Members() {
			member := string(name)
			from := r.Offset()
			refuse := func(rule, reason string, cause error) ([]mapMember, error) {
				return nil, &BundleMapError{Member: member, Offset: from, Rule: rule, Reason: reason, Err: cause}
			}
			td, err := ParseTrustDomain(member)
			switch {
			case err != nil:
				return refuse("MAP-2", "its name is not that of a trust domain", err)
			case seen[member]:
				return refuse("MAP-4", "it is there twice", nil)
			case len(members) == MaxBundleMapDomains:
				return refuse("BND-33", fmt.Sprintf("more than %d trust domains", MaxBundleMapDomains), ErrTooLarge)
			}
			seen[member] = true
			r.Skip()
			members = append(members, mapMember{td, from, r.Offset()})
		}
	}
	if err := r.End(); err != nil {
		return nil, mapFault(err)
	}
	switch {
	case !object:
		return nil, &BundleMapError{Rule: "MAP-1", Reason: "not a JSON object"}
	case !found:
		return nil, &BundleMapError{Rule: "MAP-1", Reason: `the member "trust_domains" is missing`}
	}
	return members, nil
}

func mapFault(err error) error {
	e, _ := errors.AsType[*strictjson.Error](err)
	f := &BundleMapError{Offset: e.Offset, Rule: "BND-28", Reason: e.Reason}
	switch e.Code {
	case strictjson.Syntax:
		f.Rule, f.Reason = "MAP-1", "not JSON: "+e.Reason
	case strictjson.TooLarge:
		f.Rule, f.Err = "BND-33", ErrTooLarge
	}
	return f
}

// Marshal returns the bundle map of the set: compact JSON with a member for each trust domain,
// sorted by name, so that equal sets with equal orders of authorities give the same bytes. The
// members have no refresh hint (MAP-5), and [ParseBundleMap] reads the result back. The result is
// the caller's own.
//
// It fails where [Bundle.Marshal] does, and for a map over the limits of ParseBundleMap, which wraps
// [ErrTooLarge].
func (s *BundleSet) Marshal() ([]byte, error) {
	if s.Len() > MaxBundleMapDomains {
		return nil, fmt.Errorf("spiffe: bundle map: %d trust domains, the limit is %d: %w", s.Len(), MaxBundleMapDomains, ErrTooLarge)
	}
	doc := []byte(`{"trust_domains":{`)
	first, keys := true, 0
	for b := range s.All() {
		member, err := b.marshal(0)
		if err != nil {
			return nil, err
		}
		if !first {
			doc = append(doc, ',')
		}
		first = false
		doc = append(strictjson.AppendText(doc, b.td.name), ':')
		doc = append(doc, member...)
		keys += len(b.x509) + len(b.jwt) + len(b.wit)
		if len(doc)+len("}}") > MaxBundleMapSize || keys > MaxBundleMapKeys {
			return nil, fmt.Errorf("spiffe: bundle map: more than %d bytes or %d keys: %w", MaxBundleMapSize, MaxBundleMapKeys, ErrTooLarge)
		}
	}
	return append(doc, "}}"...), nil
}
