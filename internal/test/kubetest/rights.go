package kubetest

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.yaml.in/yaml/v3"
)

// Right is one verb for one resource. As what an account has, an empty name or namespace is all of them; as
// what a request needs, it is one for more than one object, or for more than one namespace.
type Right struct{ Verb, Resource, Name, Namespace string } // the resource is PLURAL/SUBRESOURCE.GROUP

// String returns a line such as "get secrets ca in svidkit".
func (r Right) String() string {
	text := r.Verb + " " + r.Resource
	if r.Name != "" {
		text += " " + r.Name
	}
	if r.Namespace != "" {
		text += " in " + r.Namespace
	}
	return text
}

// covers reports whether an account that has r may do what needs the other.
func (r Right) covers(need Right) bool {
	return r.Verb == need.Verb && r.Resource == need.Resource && (r.Name == "" || r.Name == need.Name) &&
		(r.Namespace == "" || r.Namespace == need.Namespace)
}

type rule struct {
	Groups    []string `yaml:"apiGroups"`
	Resources []string `yaml:"resources"`
	Names     []string `yaml:"resourceNames"`
	Verbs     []string `yaml:"verbs"`
}

// Rights returns what the objects in a text of YAML give, by the account, which is NAMESPACE/NAME. Rules of no
// role have no account, and so have those of a role that nothing binds.
func Rights(yamlText string) (map[string][]Right, error) {
	type role struct{ kind, namespace, name string }
	rules, bound, all := map[role][]Right{}, map[role]bool{}, map[string][]Right{}
	type object struct {
		Kind     string `yaml:"kind"`
		Metadata struct {
			Name      string `yaml:"name"`
			Namespace string `yaml:"namespace"`
		} `yaml:"metadata"`
		Rules       []map[string]any `yaml:"rules"`
		Aggregation any              `yaml:"aggregationRule"`
		RoleRef     struct {
			Kind string `yaml:"kind"`
			Name string `yaml:"name"`
		} `yaml:"roleRef"`
		Subjects []struct {
			Kind      string `yaml:"kind"`
			Name      string `yaml:"name"`
			Namespace string `yaml:"namespace"`
		} `yaml:"subjects"`
	}
	var bindings []object
	for d := yaml.NewDecoder(strings.NewReader(yamlText)); ; {
		var o object
		if err := d.Decode(&o); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		if strings.HasSuffix(o.Kind, "Binding") && o.RoleRef.Name != "" {
			bindings = append(bindings, o)
		}
		if o.Aggregation != nil {
			return nil, fmt.Errorf("%s %s has the rules of others", o.Kind, o.Metadata.Name)
		}
		of := role{o.Kind, o.Metadata.Namespace, o.Metadata.Name}
		for _, raw := range o.Rules {
			data, err := yaml.Marshal(raw)
			if err != nil {
				return nil, err
			}
			var r rule
			strict := yaml.NewDecoder(bytes.NewReader(data))
			strict.KnownFields(true)
			if err := strict.Decode(&r); err != nil {
				return nil, fmt.Errorf("%s %s: %w", o.Kind, o.Metadata.Name, err)
			}
			if r.Names == nil {
				r.Names = []string{""}
			}
			for _, group := range r.Groups {
				for _, resource := range r.Resources {
					if group != "" {
						resource += "." + group
					}
					for _, name := range r.Names {
						for _, verb := range r.Verbs {
							rules[of] = append(rules[of], Right{verb, resource, name, ""})
						}
					}
				}
			}
		}
	}
	for _, b := range bindings {
		of := role{b.RoleRef.Kind, "", b.RoleRef.Name}
		if of.kind == "Role" {
			of.namespace = b.Metadata.Namespace
		}
		if rules[of] == nil {
			return nil, fmt.Errorf("%s %s binds a role that is elsewhere: %v", b.Kind, b.Metadata.Name, of)
		}
		bound[of] = true
		for _, s := range b.Subjects {
			who := cmp.Or(s.Namespace, b.Metadata.Namespace) + "/" + s.Name
			if s.Kind != "ServiceAccount" {
				who = s.Kind + " " + s.Name
			}
			for _, r := range rules[of] {
				if b.Kind == "RoleBinding" {
					r.Namespace = b.Metadata.Namespace
				}
				all[who] = append(all[who], r)
			}
		}
	}
	for of, list := range rules {
		for _, r := range list {
			if !bound[of] {
				r.Namespace = of.namespace
				all[""] = append(all[""], r)
			}
		}
	}
	for who, list := range all {
		slices.SortFunc(list, func(a, b Right) int { return cmp.Compare(a.String(), b.String()) })
		all[who] = slices.Compact(list)
	}
	return all, nil
}

// everyone are rights of each account, which Kubernetes binds itself.
var everyone = []Right{
	{Verb: "create", Resource: "selfsubjectaccessreviews.authorization.k8s.io"},
	{Verb: "list", Resource: "clustertrustbundles.certificates.k8s.io"}, {Verb: "watch",
		Resource: "clustertrustbundles.certificates.k8s.io"},
}

// Guard is a Server in front of which an account has its rights and no other: requests beyond them are refused,
// as RBAC and the admission of certificates do.
type Guard struct {
	*Server
	rights []Right

	mu      sync.Mutex
	refused []Right
	uses    map[Right]map[Right]bool // what needed each right
}

// StartGuard serves for an account with rights, on 127.0.0.1 until the test ends, and returns the URL.
func StartGuard(t testing.TB, rights []Right) (g *Guard, url string) {
	t.Helper()
	g = &Guard{Server: New(1), rights: rights, uses: map[Right]map[Right]bool{}}
	g.AccessReviews(func(s AccessReviewSpec) AccessReviewStatus {
		a := s.ResourceAttributes
		return AccessReviewStatus{Allowed: len(g.covering(Right{a.Verb,
			resourceName(a.Resource, a.Subresource, a.Group), a.Name, a.Namespace})) > 0}
	})
	server := httptest.NewServer(g)
	t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
	return g, server.URL
}

func resourceName(plural, subresource, group string) string {
	if subresource != "" {
		plural += "/" + subresource
	}
	if group != "" {
		plural += "." + group
	}
	return plural
}

func (g *Guard) covering(need Right) (found []Right) {
	for _, r := range append(slices.Clone(everyone), g.rights...) {
		if r.covers(need) {
			found = append(found, r)
		}
	}
	return found
}

// ServeHTTP implements [http.Handler].
func (g *Guard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		return // the client has gone
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	for _, need := range g.needs(r, body) {
		found := g.covering(need)
		g.mu.Lock()
		for _, f := range found {
			if g.uses[f] == nil {
				g.uses[f] = map[Right]bool{}
			}
			g.uses[f][need] = true
		}
		if len(found) == 0 {
			g.refused = append(g.refused, need)
		}
		g.mu.Unlock()
		if len(found) == 0 {
			write(w, failure(http.StatusForbidden, "Forbidden", "may not %s", need))
			return
		}
	}
	g.Server.ServeHTTP(w, r)
}

// needs returns the rights that a request needs.
func (g *Guard) needs(r *http.Request, body []byte) []Right {
	if kind := reviews[r.URL.Path]; kind != "" {
		return []Right{{"create", strings.ToLower(kind) + "s." + strings.Split(r.URL.Path, "/")[2], "", ""}}
	}
	t, ok := parsePath(r.URL.Path)
	if !ok {
		return []Right{{r.Method, r.URL.Path, "", ""}}
	}
	need := Right{Resource: resourceName(t.plural, t.subresource, t.group), Name: t.name, Namespace: t.namespace}
	need.Verb = map[string]string{http.MethodPost: "create", http.MethodPut: "update",
		http.MethodPatch: "patch", http.MethodDelete: "delete"}[r.Method]
	if r.Method == http.MethodGet {
		need.Verb = "get"
		if t.name == "" {
			need.Verb = "list"
			for field := range strings.SplitSeq(r.URL.Query().Get("fieldSelector"), ",") {
				if name, ok := strings.CutPrefix(field, "metadata.name="); ok {
					need.Name = name
				}
			}
		}
		if isWatch(r) {
			need.Verb = "watch"
		}
	}
	// Admission: what is signed, and what is trusted for a signer, are rights for the signer.
	of := func(o object) string { return o.text("spec", "signerName") }
	signer := func(verb string, o object) []Right {
		if of(o) == "" {
			return []Right{need}
		}
		return []Right{need, {verb, "signers.certificates.k8s.io", of(o), ""}}
	}
	stored := func() object { o, _ := g.store.get(t); return o }
	sent, _ := decodeObject(body)
	switch {
	case t.plural == "podcertificaterequests" && t.subresource == "status",
		t.plural == "certificatesigningrequests" && t.subresource == "status":
		return signer("sign", stored())
	case t.plural == "certificatesigningrequests" && t.subresource == "approval":
		return signer("approve", stored())
	case t.plural == "clustertrustbundles" && need.Verb == "create":
		return signer("attest", sent)
	case t.plural == "clustertrustbundles" && need.Verb != "list" && need.Verb != "watch" && need.Verb != "get":
		return signer("attest", stored())
	}
	return []Right{need}
}

// Done says that everything that the account is for was done. Nothing was refused; each right was needed, and
// those without a name were needed for more than one, and those without a namespace in more than one. Rights in
// wider are as wide as they are for another reason.
func (g *Guard) Done(t testing.TB, wider map[Right]string) {
	t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, r := range g.refused {
		t.Errorf("the program may not %s, and does it", r)
	}
	for _, r := range g.rights {
		names, namespaces := map[string]bool{}, map[string]bool{}
		for need := range g.uses[r] {
			names[need.Name], namespaces[need.Namespace] = true, true
		}
		narrow := r.Name == "" && !names[""] && len(names) == 1 || r.Namespace == "" && !namespaces[""] &&
			len(namespaces) == 1
		switch _, known := wider[r]; {
		case len(g.uses[r]) == 0:
			t.Errorf("the program may %s, and does not", r)
		case narrow && !known:
			t.Errorf("the program may %s, and needs %v", r, g.uses[r])
		case !narrow && known:
			t.Errorf("that the program may %s is not wider than what it needs", r)
		}
	}
}
