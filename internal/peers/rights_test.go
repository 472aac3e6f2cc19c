package peers_test

import (
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ra"
	"github.com/svidkit/svidkit/spiffe"
)

// documented returns the YAML of the rules that the comment of a package says it needs.
func documented(t testing.TB, pkg string) string {
	t.Helper()
	files := must.Get(filepath.Glob(filepath.Join("..", "..", pkg, "*.go")))(t)
	var rules strings.Builder
	for _, name := range files {
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.PackageClauseOnly|parser.ParseComments)
		require.NoError(t, err)
		inside := false
		for line := range strings.Lines(f.Doc.Text()) {
			inside = line == "\trules:\n" || inside && strings.HasPrefix(line, "\t")
			if inside {
				rules.WriteString(strings.TrimPrefix(line, "\t"))
			}
		}
	}
	require.NotEmpty(t, rules.String(), "the comment of %s has no rules", pkg)
	return rules.String()
}

// grant gives an account rules in YAML, in a Role of its namespace or in a ClusterRole, and waits until the API server
// knows. It returns the path of the role.
func grant(t testing.TB, c *peers.Cluster, namespace, account, kind, rules string) string {
	t.Helper()
	const group = "/apis/rbac.authorization.k8s.io/v1"
	at, name := group, namespace+"-"+account
	if kind == "Role" {
		at += "/namespaces/" + namespace
	}
	roles := at + "/" + strings.ToLower(kind) + "s"
	c.Create(t, fmt.Sprintf(`POST %s
apiVersion: rbac.authorization.k8s.io/v1
kind: %s
metadata: {name: %s}
%s
POST %sbindings
apiVersion: rbac.authorization.k8s.io/v1
kind: %sBinding
metadata: {name: %s}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: %s, name: %s}
subjects: [{kind: ServiceAccount, namespace: %s, name: %s}]
`, roles, kind, name, rules, strings.TrimSuffix(roles, "s"), kind, name, kind, name, namespace, account))
	path := roles + "/" + name
	holds(t, c, namespace, account, rulesAt(t, c, path), rule{})
	return path
}

// rule is one of a role.
type rule struct {
	Groups    []string `json:"apiGroups" yaml:"apiGroups"`
	Resources []string `json:"resources"`
	Names     []string `json:"resourceNames,omitempty" yaml:"resourceNames"`
	Verbs     []string `json:"verbs"`
}

func (r rule) String() string {
	return strings.TrimSuffix(fmt.Sprint(strings.Join(r.Verbs, ","), " ", strings.Join(r.Resources, ","), " ", strings.Join(r.Names, ",")), " ")
}

func rulesAt(t testing.TB, c *peers.Cluster, path string) []rule {
	t.Helper()
	var role struct{ Rules []rule }
	c.Do(t, "GET", path, nil, &role)
	require.NotEmpty(t, role.Rules)
	return role.Rules
}

// single returns the rules one by one: each has one resource and one verb.
func single(t testing.TB, rules []rule) (out []rule) {
	t.Helper()
	for _, r := range rules {
		require.Len(t, r.Groups, 1)
		require.Len(t, r.Resources, 1)
		for _, v := range r.Verbs {
			r.Verbs = []string{v}
			out = append(out, r)
		}
	}
	return out
}

// holds waits until an account has the rules, and does not have the one that is missing.
func holds(t testing.TB, c *peers.Cluster, namespace, account string, rules []rule, missing rule) {
	t.Helper()
	allowed := func(r rule) bool {
		resource, sub, _ := strings.Cut(r.Resources[0], "/")
		attributes := map[string]any{
			"namespace": namespace, "group": r.Groups[0], "version": "v1", "resource": resource, "subresource": sub, "verb": r.Verbs[0],
		}
		if len(r.Names) > 0 {
			attributes["name"] = r.Names[0]
		}
		var answer struct{ Status struct{ Allowed bool } }
		c.Do(t, "POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", map[string]any{
			"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": map[string]any{
				"user":               "system:serviceaccount:" + namespace + ":" + account,
				"groups":             []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"},
				"resourceAttributes": attributes,
			},
		}, &answer)
		return answer.Status.Allowed
	}
	for _, r := range single(t, rules) {
		require.Eventually(t, func() bool { return allowed(r) }, passing, often, "%s is not allowed", r)
	}
	if len(missing.Verbs) > 0 {
		require.Eventually(t, func() bool { return !allowed(missing) }, passing, often, "%s is allowed", missing)
	}
}

// testRights shows that the rules in the comments of our packages are sufficient, and that none of them is too much:
// without any of them something does not work.
func testRights(t *testing.T, c *cluster) {
	for _, p := range []struct {
		pkg, kind string
		use       func(t *testing.T, c *cluster, namespace string, client *http.Client) error
	}{
		{"pki/ca/kubesecret", "Role", useStore},
		{"authn/kube", "ClusterRole", useTokens},
		{"pki/ra", "ClusterRole", useSigner},
		{"sds/kubesecrets", "ClusterRole", useSecrets},
	} {
		rules := documented(t, p.pkg)
		base := "rights-" + strings.ReplaceAll(p.pkg, "/", "-")
		t.Run(p.pkg, func(t *testing.T) {
			t.Parallel()
			c.Account(t, base, "server")
			path := grant(t, c.Cluster, base, "server", p.kind, rules)
			require.NoError(t, p.use(t, c, base, c.ClientOf(t, base, "server")), "the rules are sufficient")
			all := single(t, rulesAt(t, c.Cluster, path))
			for i, without := range all {
				rest := slices.Delete(slices.Clone(all), i, i+1)
				t.Run("without "+without.String(), func(t *testing.T) {
					t.Parallel()
					namespace := fmt.Sprint(base, "-", i)
					c.Account(t, namespace, "server")
					path := grant(t, c.Cluster, namespace, "server", p.kind, rules)
					var role map[string]any
					c.Do(t, "GET", path, nil, &role)
					role["rules"] = rest
					c.Do(t, "PUT", path, role, nil)
					holds(t, c.Cluster, namespace, "server", rest, without)
					err := p.use(t, c, namespace, c.ClientOf(t, namespace, "server"))
					require.Error(t, err)
					t.Log(err)
				})
			}
		})
	}
}

// useStore does everything that a store of a CA does.
func useStore(t *testing.T, c *cluster, namespace string, client *http.Client) error {
	s := secretStore(t, c.Cluster, namespace, client)
	if _, err := s.Load(t.Context()); !errors.Is(err, ca.ErrNoRecord) {
		return fmt.Errorf("want no record: %w", err)
	}
	data := map[string][]byte{"svidkit-test": []byte("1")}
	version, err := s.Save(t.Context(), ca.NewRecord("", data))
	if err != nil {
		return err
	}
	if _, err := s.Load(t.Context()); err != nil {
		return err
	}
	_, err = s.Save(t.Context(), ca.NewRecord(version, data))
	return err
}

// useTokens reviews a token, and asks for a workload of the node of its pod.
func useTokens(t *testing.T, c *cluster, namespace string, client *http.Client) error {
	c.Account(t, namespace, "proxy")
	c.Pod(t, namespace, "proxy", "proxy", "node-a")
	reviewer := must.Get(kube.NewReviewer(&kube.ReviewerOptions{APIServer: c.URL, HTTPClient: client}))(t)
	nodes, err := kube.NewNodeAuthorizer(kube.NodeAuthorizerOptions{APIServer: c.URL, HTTPClient: client, Accounts: []string{namespace + "/proxy"}})
	require.NoError(t, err)

	account, errReview := reviewer.Review(t.Context(), c.Token(t, namespace, "proxy", "proxy", "istio-ca"), []string{"istio-ca"})
	assert.Equal(t, errReview == nil, reviewer.Check(t.Context()) == nil, "Check says what Review does")
	if errReview != nil {
		return errReview
	}
	id := must.Get(domain.KubernetesID(account.Namespace, account.ServiceAccount))(t)
	errNodes := nodes.Authorize(t.Context(), &authn.Caller{ID: id, Pod: &spiffe.Pod{
		Namespace: account.Namespace, ServiceAccount: account.ServiceAccount, Name: account.Name, UID: account.UID,
	}}, id)
	assert.Equal(t, errNodes == nil, nodes.Check(t.Context()) == nil, "Check says what Authorize does")
	return errNodes
}

// useSigner has a certificate signed while another client edits the request, so that the first approval conflicts.
func useSigner(t *testing.T, c *cluster, namespace string, client *http.Client) error {
	client.Transport = &meddler{t: t, cluster: c.Cluster, next: client.Transport, done: map[string]bool{}}
	a := c.signer.registration(t, client, func(c *ra.Config) { c.Timeout = 5 * time.Second })
	_, err := a.Sign(t.Context(), ca.Request{CSR: csrFor(t, webID), ID: webID})
	if err == nil && c.signer.pending(t, namespace, "server") > 0 {
		err = errors.New("the request was not deleted")
	}
	return err
}
