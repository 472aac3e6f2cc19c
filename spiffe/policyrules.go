package spiffe

import (
	"cmp"
	"maps"
	"slices"
	"strings"
)

// A rule is a string: an ID allows that ID, a string that ends in a slash allows everything below it, and "*"
// allows every workload. A path segment that is a star stands for any one segment. No ID ends in a slash or has a
// star, so a rule cannot be mistaken for an ID.

const (
	maxFew         = 4  // rules without stars up to which a scan is faster than a map
	maxStars       = 64 // path segments in which a star can stand
	maxArrangement = 16 // different places of the stars in a policy
)

// rules is a set of rules for look-ups. A look-up does not allocate. Its time is bounded by the length of the ID
// and the number of arrangements of stars, not by the number of rules: for each arrangement, the segments of the
// ID at its stars become stars, and the result is looked up in a map.
type rules struct {
	set     map[string]struct{}
	few     []string // those without a star, if they are few and set is not asked for them
	hashed  bool     // they are not few
	any     bool     // "*" is in set
	longest int      // length of the longest rule that ends in a slash
	exact   uint64   // bit n: there is a rule that is an ID and has n bytes, modulo 64
	below   uint64   // the same for rules that end in a slash
	stars   []uint64 // the arrangements; bit n: segment n of the path is a star
}

func newRules(set map[string]struct{}) rules {
	r := rules{set: set}
	for rule := range set {
		if rule == anyRule {
			r.any = true
			continue
		}
		if rule[len(rule)-1] == '/' {
			r.longest = max(r.longest, len(rule))
			r.below |= 1 << (len(rule) % 64)
		} else {
			r.exact |= 1 << (len(rule) % 64)
		}
		if stars := starsOf(rule); stars != 0 {
			if len(r.stars) <= maxArrangement && !slices.Contains(r.stars, stars) {
				r.stars = append(r.stars, stars)
			}
		} else if r.hashed = r.hashed || len(r.few) == maxFew; !r.hashed {
			r.few = append(r.few, rule)
		}
	}
	return r
}

// starsOf returns the arrangement of the stars of a rule other than "*".
func starsOf(rule string) (stars uint64) {
	if !strings.Contains(rule, anyRule) {
		return 0
	}
	_, path, _ := strings.Cut(rule[len(scheme):], "/")
	for n := 0; path != "" && n < maxStars; n++ {
		var segment string
		if segment, path, _ = strings.Cut(path, "/"); segment == anyRule {
			stars |= 1 << n
		}
	}
	return stars
}

// has reports whether a rule covers s, an ID or another rule but "*", whose path begins at byte path.
func (r *rules) has(s string, path int) bool {
	if r.any && path < len(s) {
		return true
	}
	if r.hashed {
		if lookUp(r, s, path) {
			return true
		}
	} else {
		for _, rule := range r.few {
			// The byte at the end is asked first, as most rules differ there.
			end := len(rule) - 1
			if end < len(s) && s[end] == rule[end] && (len(s) == len(rule) || rule[end] == '/') && s[:end] == rule[:end] {
				return true
			}
		}
	}
	for _, stars := range r.stars {
		if r.hasBehind(stars, s, path) {
			return true
		}
	}
	return false
}

// hasBehind is has for s with an arrangement of stars in it. An s with too few segments for all of them finds
// rules with those that it got, which cover it as well.
func (r *rules) hasBehind(stars uint64, s string, path int) bool {
	var buf [maxID + 1]byte
	b := append(buf[:0], s[:path]...)
	for at := path; at < len(s); stars >>= 1 {
		end := at + 1
		for end < len(s) && s[end] != '/' {
			end++
		}
		if stars&1 != 0 {
			b = append(b, wildcard...)
		} else {
			b = append(b, s[at:end]...)
		}
		at = end
	}
	return lookUp(r, b, path)
}

func lookUp[S string | []byte](r *rules, s S, path int) bool {
	for i := path; i < len(s) && i < r.longest; i++ {
		if s[i] != '/' || r.below>>((i+1)%64)&1 == 0 {
			continue
		}
		if _, ok := r.set[string(s[:i+1])]; ok {
			return true
		}
	}
	if r.exact>>(len(s)%64)&1 == 0 {
		return false
	}
	_, ok := r.set[string(s)]
	return ok
}

// sorted returns the rules in the order in which they are written.
func (r *rules) sorted() []string { return slices.Sorted(maps.Keys(r.set)) }

// narrowest returns the rule that covers id and says most about it, or "".
func (r *rules) narrowest(id ID) (best string) {
	for rule := range r.set {
		if !id.IsZero() && covers(rule, id.s) && (best == "" || compareRules(rule, best) < 0) {
			best = rule
		}
	}
	return best
}

// compareRules orders rules that cover the same ID, the narrowest first: the one with more segments, an ID
// before the rule for everything below it, then the one with fewer stars.
func compareRules(a, b string) int {
	below := func(rule string) int { return len(rule) - len(strings.TrimSuffix(rule, "/")) }
	return cmp.Or(
		cmp.Compare(strings.Count(b, "/"), strings.Count(a, "/")),
		cmp.Compare(below(a), below(b)),
		cmp.Compare(strings.Count(a, anyRule), strings.Count(b, anyRule)),
		strings.Compare(a, b),
	)
}

// covers is the slow form of rules.has for one rule: it reports whether every ID that s stands for, an
// ID or a rule, is one that rule allows.
func covers(rule, s string) bool {
	if rule == anyRule {
		return s == anyRule || strings.Contains(s[len(scheme):], "/")
	}
	for {
		a, restA, moreA := strings.Cut(rule, "/")
		b, restB, moreB := strings.Cut(s, "/")
		switch {
		case a != b && (a != anyRule || b == ""):
			return false
		case !moreA:
			return !moreB
		case !moreB:
			return false
		case restA == "":
			return true
		}
		rule, s = restA, restB
	}
}

// ruleDomain returns the name of the trust domain that a rule is about, or "" for any.
func ruleDomain(rule string) string {
	name, _, _ := strings.Cut(strings.TrimPrefix(rule, scheme), "/")
	if name == anyRule {
		return ""
	}
	return name
}

// pathStart returns where the path of an ID or a rule begins.
func pathStart(s string) int { return min(len(scheme)+len(ruleDomain(s)), len(s)) }

// ruleText is a rule as it is written.
func ruleText(r string) string {
	if r[len(r)-1] == '/' {
		return r + anyRule
	}
	return r
}
