package peers_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/sds/kubesecrets"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// pairOf returns the content of a Secret with a new certificate.
func pairOf(t testing.TB, ca *spiffetest.CA) map[string][]byte {
	t.Helper()
	certs, key := must.Get2(ca.SVID("/gateway").MarshalPEM())(t)
	return map[string][]byte{"tls.crt": certs, "tls.key": key}
}

// putSecret creates or replaces a Secret.
func putSecret(t testing.TB, c *peers.Cluster, namespace, name, kind string, data map[string][]byte) {
	t.Helper()
	path := "/api/v1/namespaces/" + namespace + "/secrets"
	object := map[string]any{
		"apiVersion": "v1", "kind": "Secret", "type": kind, "data": data,
		"metadata": map[string]any{"name": name, "labels": map[string]string{"gateway": "yes"}},
	}
	if c.Status(t, "GET", path+"/"+name) == http.StatusOK {
		c.Do(t, "PUT", path+"/"+name, object, nil)
	} else {
		c.Do(t, "POST", path, object, nil)
	}
}

// callerOf returns the context of a request of a service account.
func callerOf(t testing.TB, namespace, account string) (ctx context.Context) {
	t.Helper()
	id := must.Get(domain.KubernetesID(namespace, account))(t)
	method := authn.Func(func(*http.Request) (*authn.Caller, error) { return &authn.Caller{ID: id, Method: "test"}, nil })
	next := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { ctx = r.Context() })
	authn.Require(method, next, nil).ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/", nil))
	return ctx
}

// testGatewaySecrets follows Secrets, in pages and by watches, and asks what service accounts may read.
func testGatewaySecrets(t *testing.T, c *cluster) {
	const namespace, other = "gateways", "gateways-other"
	ca := spiffetest.NewCA(t, "servers.test")
	c.Account(t, namespace, "agent")
	c.Account(t, namespace, "gateway")
	c.Account(t, namespace, "unbound")
	c.Account(t, other, "gateway")
	grant(t, c.Cluster, namespace, "agent", "ClusterRole", documented(t, "sds/kubesecrets"))
	may := "rules:\n- {apiGroups: [\"\"], resources: [secrets], verbs: [get, list, watch]}\n"
	role := grant(t, c.Cluster, namespace, "gateway", "Role", may)
	first := pairOf(t, ca)
	for i := range 130 { // more than one page
		putSecret(t, c.Cluster, namespace, fmt.Sprint("web-", i), "kubernetes.io/tls", first)
	}
	putSecret(t, c.Cluster, other, "web", "kubernetes.io/tls", first)
	putSecret(t, c.Cluster, namespace, "generic", "Opaque", map[string][]byte{"cert": first["tls.crt"], "key": first["tls.key"], "cacert": ca.Bundle().MarshalPEM()})
	putSecret(t, c.Cluster, namespace, "helm", "helm.sh/release.v1", first)

	for _, cfg := range []kubesecrets.Config{
		{AllNamespaces: true, LabelSelector: "gateway=yes", TrustDomain: domain, ReviewInterval: time.Second},
		{AllNamespaces: true, Type: "kubernetes.io/tls"},
		{Namespace: namespace},
	} {
		cfg.APIServer, cfg.HTTPClient = c.URL, c.ClientOf(t, namespace, "agent")
		src := must.Get(kubesecrets.Start(t.Context(), cfg))(t)
		defer src.Close()
		await := func(name string, want map[string][]byte) {
			t.Helper()
			require.Eventually(t, func() bool {
				secret, err := src.GenerateSecret(t.Context(), name)
				if err != nil {
					return want == nil && errors.Is(err, fs.ErrNotExist)
				}
				chain, _, _ := secret.KeyPair()
				return string(chain) == string(want["tls.crt"])
			}, passing, often, name)
		}
		name := "kubernetes://" + namespace + "/web-"
		putSecret(t, c.Cluster, namespace, "web-0", "kubernetes.io/tls", first)
		for _, i := range []int{0, 64, 129} {
			await(fmt.Sprint(name, i), first)
		}
		await("kubernetes://"+namespace+"/helm", nil)
		if cfg.Type == "" {
			await("kubernetes://"+namespace+"/generic", first)
			must.Get(src.GenerateSecret(t.Context(), "kubernetes://"+namespace+"/generic-cacert"))(t)
		}
		if cfg.AllNamespaces {
			await("kubernetes://"+other+"/web", first)
		}
		for range 3 {
			next := pairOf(t, ca)
			putSecret(t, c.Cluster, namespace, "web-0", "kubernetes.io/tls", next)
			await(name+"0", next)
		}
		c.Do(t, "DELETE", "/api/v1/namespaces/"+namespace+"/secrets/web-0", nil, nil)
		await(name+"0", nil)
		putSecret(t, c.Cluster, namespace, "web-0", "kubernetes.io/tls", first)
		await(name+"0", first)
		require.NoError(t, src.Report().Upstreams[0].Err)
		if cfg.TrustDomain.IsZero() {
			continue
		}

		allowed := func(namespace, account string) func() bool {
			ctx := callerOf(t, namespace, account)
			return func() bool {
				got, err := src.Resolve(ctx, "kubernetes://web")
				return err == nil && got == "kubernetes://"+namespace+"/web"
			}
		}
		require.Eventually(t, allowed(namespace, "gateway"), passing, often)
		assert.Never(t, allowed(namespace, "unbound"), 3*time.Second, often)
		assert.Never(t, allowed(other, "gateway"), time.Second, often, "an account of the same name")
		_, err := src.Resolve(callerOf(t, namespace, "gateway"), "kubernetes://"+other+"/web")
		require.Error(t, err)
		c.Do(t, "DELETE", role, nil, nil)
		still := allowed(namespace, "gateway")
		require.Eventually(t, func() bool { return !still() }, passing, often, "the right is taken")
	}
}

// useSecrets follows a Secret that changes, and asks what an account may read.
func useSecrets(t *testing.T, c *cluster, namespace string, client *http.Client) error {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	src, err := kubesecrets.Start(ctx, kubesecrets.Config{AllNamespaces: true, TrustDomain: domain, APIServer: c.URL, HTTPClient: client})
	if err != nil {
		return err
	}
	defer src.Close()
	ca := spiffetest.NewCA(t, "servers.test")
	putSecret(t, c.Cluster, namespace, "web", "kubernetes.io/tls", pairOf(t, ca))
	for end := time.Now().Add(passing); ; time.Sleep(often) {
		_, err := src.GenerateSecret(t.Context(), "kubernetes://"+namespace+"/web")
		if failed := src.Report().Upstreams[0].Err; failed != nil {
			return failed
		}
		if err == nil {
			break
		}
		if time.Now().After(end) {
			return err
		}
	}
	c.Account(t, namespace, "gateway")
	grant(t, c.Cluster, namespace, "gateway", "Role", "rules:\n- {apiGroups: [\"\"], resources: [secrets], verbs: [get]}\n")
	for end := time.Now().Add(passing); ; time.Sleep(often) {
		_, err := src.Resolve(callerOf(t, namespace, "gateway"), "kubernetes://web")
		if err == nil || time.Now().After(end) || strings.Contains(err.Error(), "may not ask") {
			return err
		}
	}
}
