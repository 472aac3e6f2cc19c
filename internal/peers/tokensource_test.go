package peers_test

import (
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/authn/tokensource"
	"github.com/svidkit/svidkit/internal/peers"
)

// testTokenRequest requests tokens from the API server, with the one right that takes.
func testTokenRequest(t *testing.T, c *cluster) {
	const namespace = "request"
	c.Account(t, namespace, "issuer")
	grant(t, c.Cluster, namespace, "issuer", "Role",
		`rules: [{apiGroups: [""], resources: [serviceaccounts/token], resourceNames: [web], verbs: [create]}]`)
	c.Account(t, namespace, "server")
	grant(t, c.Cluster, namespace, "server", "ClusterRole", documented(t, "authn/kube"))
	c.Account(t, namespace, "web")
	c.Account(t, namespace, "db")
	uid := c.Pod(t, namespace, "web", "web-1", "node-a")
	reviewer, err := kube.NewReviewer(&kube.ReviewerOptions{APIServer: c.URL, HTTPClient: c.ClientOf(t, namespace, "server")})
	require.NoError(t, err)

	request := func(client *http.Client, edit func(*tokensource.KubernetesOptions)) (string, error) {
		o := tokensource.KubernetesOptions{
			APIServer: c.URL, HTTPClient: client, Namespace: namespace, ServiceAccount: "web", Audiences: []string{"istio-ca", "other"},
			Lifetime: 20 * time.Minute, Bound: &tokensource.BoundObject{Kind: "Pod", Name: "web-1"},
		}
		if edit != nil {
			edit(&o)
		}
		s, err := tokensource.Kubernetes(o)
		require.NoError(t, err)
		return s.Token(t.Context())
	}
	issuer := c.ClientOf(t, namespace, "issuer")
	token, err := request(issuer, nil)
	require.NoError(t, err)
	a, err := reviewer.Review(t.Context(), token, []string{"istio-ca"})
	require.NoError(t, err)
	assert.Equal(t, "web", a.ServiceAccount)
	assert.Equal(t, "web-1", a.Name)
	assert.Equal(t, uid, a.UID)

	token, err = request(issuer, func(o *tokensource.KubernetesOptions) { o.Audiences, o.Bound = nil, nil })
	require.NoError(t, err)
	a, err = reviewer.Review(t.Context(), token, []string{peers.Issuer})
	require.NoError(t, err, "without audiences the token is for the API server")
	assert.Empty(t, a.Name)

	for name, edit := range map[string]func(*tokensource.KubernetesOptions){
		"an account without the right": func(o *tokensource.KubernetesOptions) { o.HTTPClient = c.ClientOf(t, namespace, "db") },
		"another account":              func(o *tokensource.KubernetesOptions) { o.ServiceAccount = "db" },
		"no such pod":                  func(o *tokensource.KubernetesOptions) { o.Bound.Name = "web-2" },
		"a pod with another UID":       func(o *tokensource.KubernetesOptions) { o.Bound.UID = "6d5e5bbf-0f7f-4b7c-8a3b-9c1f0a5a1d11" },
		"a pod of another account":     func(o *tokensource.KubernetesOptions) { o.Bound.Name = c.podOf(t, namespace, "db") },
		"a client without a token":     func(o *tokensource.KubernetesOptions) { o.HTTPClient = c.Client("garbage") },
	} {
		_, err := request(issuer, edit)
		assert.Error(t, err, name)
		assert.False(t, errors.Is(err, tokensource.ErrNoToken), name)
	}
}

// podOf creates a pod of an account, and returns its name.
func (c *cluster) podOf(t *testing.T, namespace, account string) string {
	c.Pod(t, namespace, account, account+"-1", "node-a")
	return account + "-1"
}
