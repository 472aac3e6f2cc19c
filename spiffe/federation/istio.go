package federation

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/spiffe"
)

// ParseIstioString parses the format in which Istio's discontinued environment variable listed bundle endpoints:
//
//	example.org|https://example.org/bundle||other.test|https://other.test:8443/bundle
//
// Each tuple has a trust domain and a URL. As in Istio, a URL without "https://" in front gets it, and of two tuples
// for one trust domain the later one counts. The relationships have the profile [Web] with the roots of the host, in
// the order in which the trust domains first appear.
//
// The error names the tuple that has another form, or a URL that an endpoint cannot have, and wraps a
// [*spiffe.ParseError] for a name that is not a trust domain name.
func ParseIstioString(s string) ([]Relationship, error) {
	var all []Relationship
	at := map[spiffe.TrustDomain]int{}
	for tuple := range strings.SplitSeq(s, "||") {
		name, url, ok := strings.Cut(tuple, "|")
		if !ok || strings.Contains(url, "|") || strings.ContainsAny(name, "@?") { // these belong to URLs
			return nil, fmt.Errorf("federation: Istio's bundle endpoints: tuple %s: "+
				"want TRUST-DOMAIN|URL, and || between tuples", shortTuple(tuple))
		}
		td, err := spiffe.ParseTrustDomain(name)
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
	return strconv.Quote(redact.Clip(tuple, 128))
}
