package spiffetls

import (
	"fmt"
	"net/http"

	"github.com/svidkit/svidkit/internal/paths"
	"github.com/svidkit/svidkit/spiffe"
)

// Paths returns the policy of [RequirePeer] that says for each path which clients may request it. Keys are patterns of
// [http.ServeMux]: "/admin/" is all below, "/admin/{$}" that path alone, "POST /orders/{id}" one method of HTTP, and the most
// specific decides:
//
//	allow, err := spiffetls.Paths(map[string]spiffe.PolicySource{
//		"/":             spiffe.AllowIDs(web, ops),
//		"DELETE /user/": spiffe.AllowIDs(ops),
//	})
//	…
//	handler, err := spiffetls.RequirePeer(allow, mux)
//
// A request for which there is no pattern is denied, and so is one that a ServeMux would redirect, as its path is not clean
// ("//", "/./", "/../", a last slash missing) or is another one when its escapes are decoded ("%2F", "%2E%2E"). What runs
// behind the policy should be a ServeMux, too, with the same path: a router that ignores case, say, runs other handlers. The map is
// copied; the policies in it may be live. As the policy of a server or a client it is an error.
func Paths(allow map[string]spiffe.PolicySource) (spiffe.PolicySource, error) {
	table, err := paths.New(allow, func(p spiffe.PolicySource) error {
		if _, hosts := p.(interface{ byHost() }); hosts {
			return errHosts
		}
		return spiffe.CheckPolicySource(p)
	})
	if err != nil {
		return nil, fmt.Errorf("spiffetls: paths: %w", err)
	}
	return pathPolicies{table}, nil
}

type pathPolicies struct {
	table paths.Table[spiffe.PolicySource]
}

// Policy implements [spiffe.PolicySource]. It returns the zero Policy, which allows no peer.
func (pathPolicies) Policy() spiffe.Policy { return spiffe.Policy{} }

// ByRequest tells [spiffe.CheckPolicySource] that it takes more than an ID to decide.
func (pathPolicies) ByRequest() {}

// of returns the policy for r.
func (p pathPolicies) of(r *http.Request) (spiffe.PolicySource, error) {
	allow, ok := p.table.Find(r)
	if !ok {
		return nil, fmt.Errorf("%w: no policy is for the path %.200q", spiffe.ErrDenied, r.URL.Path)
	}
	return allow, nil
}
