package federation

import (
	"errors"
	"fmt"
	"strings"

	"github.com/svidkit/svidkit/spiffe"
)

// ParseIstioString parses the bundle endpoints that Istio once had in an environment variable:
//
//	example.org|https://example.org/bundle||other.test|https://other.test:8443/bundle
//
// Tuples are separated by "||" and have a trust domain and a URL, separated by "|". As there,
// "https://" is put before a URL that does not begin with exactly that, and of two tuples for one
// trust domain the later one counts. The relationships have the profile [Web] with the roots of the
// host; set another one for those with roots of their own. Their order is that in which the trust
// domains first appear.
//
// A tuple of another form, and the empty string, are errors that name the tuple. So is a name that is
// not one of a trust domain, which wraps a [*spiffe.ParseError], and a URL that cannot be that of an
// endpoint.
//
// [New] takes them.
func ParseIstioString(s string) ([]Relationship, error) {
	var all []Relationship
	at := map[spiffe.TrustDomain]int{}
	for tuple := range strings.SplitSeq(s, "||") {
		name, url, ok := strings.Cut(tuple, "|")
		if !ok || strings.Contains(url, "|") {
			return nil, fmt.Errorf("federation: Istio's bundle endpoints: tuple %s: want TRUST-DOMAIN|URL, and || between tuples", shortTuple(tuple))
		}
		td, err := spiffe.ParseTrustDomain(name)
		if e, ok := errors.AsType[*spiffe.ParseError](err); ok && strings.ContainsAny(name, "@?") {
			shown := *e
			shown.Input, shown.Offset = "…", 0 // a URL in the wrong place
			err = &shown
		}
		if err != nil {
			return nil, fmt.Errorf("federation: Istio's bundle endpoints: tuple %s: %w", shortTuple(tuple), err)
		}
		if !strings.HasPrefix(url, "https://") {
			url = "https://" + url
		}
		r := Relationship{TrustDomain: td, URL: url, Profile: Web{}}
		if _, err := r.check(); err != nil {
			return nil, fmt.Errorf("federation: Istio's bundle endpoints: %w", err)
		}
		if i, there := at[td]; there {
			all[i] = r
			continue
		}
		at[td] = len(all)
		all = append(all, r)
	}
	return all, nil
}

// shortTuple quotes a tuple for an error, without the password and the query that a URL may have.
func shortTuple(tuple string) string {
	if i := strings.LastIndexByte(tuple, '@'); i >= 0 {
		tuple = "…" + tuple[i:]
	}
	if i := strings.IndexByte(tuple, '?'); i >= 0 {
		tuple = tuple[:i] + "?…"
	}
	if len(tuple) > 128 {
		return fmt.Sprintf("%q…", tuple[:128])
	}
	return fmt.Sprintf("%q", tuple)
}
