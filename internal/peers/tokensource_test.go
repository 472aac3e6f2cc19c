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
	"github.com/svidkit/svidkit/internal/test/must"
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
	reviewer, err := kube.NewReviewer(&kube.ReviewerOptions{APIServer: c.URL, HTTPClient: c.ClientOf(t, namespace, "server")})
	require.NoError(t, err)

	request := func(client *http.Client, edit func(*tokensource.KubernetesOptions)) (string, error) {
		o := tokensource.KubernetesOptions{
			APIServer: c.URL, HTTPClient: client, Namespace: namespace, ServiceAccount: "web", Audiences: []string{"istio-ca", "other"},
			Lifetime: 20 * time.Minute,
		}
		if edit != nil {
			edit(&o)
		}
		return must.Get(tokensource.Kubernetes(o))(t).Token(t.Context())
	}
	issuer := c.ClientOf(t, namespace, "issuer")
	token := must.Get(request(issuer, nil))(t)
	a := must.Get(reviewer.Review(t.Context(), token, []string{"istio-ca"}))(t)
	assert.Equal(t, "web", a.ServiceAccount)
	assert.Empty(t, a.Name)

	token = must.Get(request(issuer, func(o *tokensource.KubernetesOptions) { o.Audiences = nil }))(t)
	a, err = reviewer.Review(t.Context(), token, []string{peers.Issuer})
	require.NoError(t, err, "without audiences the token is for the API server")

	for name, edit := range map[string]func(*tokensource.KubernetesOptions){
		"an account without the right": func(o *tokensource.KubernetesOptions) { o.HTTPClient = c.ClientOf(t, namespace, "db") },
		"another account":              func(o *tokensource.KubernetesOptions) { o.ServiceAccount = "db" },
		"a client without a token":     func(o *tokensource.KubernetesOptions) { o.HTTPClient = c.Client("garbage") },
	} {
		_, err := request(issuer, edit)
		assert.Error(t, err, name)
		assert.False(t, errors.Is(err, tokensource.ErrNoToken), name)
	}
}
