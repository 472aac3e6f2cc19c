package peers_test

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/inject"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/linkerdname"
)

// testLinkerdMesh has the API server take what examples/ca -install prints, in each scheme, and call the webhook of the
// injector for the pods of a namespace.
func testLinkerdMesh(t *testing.T, c *cluster) {
	program := filepath.Join(t.TempDir(), "ca")
	out, err := exec.Command("go", "build", "-o", program, "github.com/svidkit/svidkit/examples/ca").CombinedOutput()
	require.NoError(t, err, "%s", out)
	var anchors string
	for scheme, names := range map[string][3]string{
		"kubernetes.io/tls": {"mesh-tls", "linkerd-identity-trust-roots", "linkerd-identity-issuer"},
		"linkerd.io/tls":    {"mesh-linkerd", "linkerd-identity-trust-roots", "linkerd-identity-issuer"},
		"design":            {"mesh-design", "linkerd-trust-anchor", "linkerd-identity-signing"},
	} {
		c.Account(t, names[0], "web")
		install := exec.Command(program, "-install", scheme, "-anchor-dir", filepath.Join(t.TempDir(), "anchors"), "-linkerd-namespace", names[0])
		install.Stderr = t.Output()
		objects := strings.Split(string(must.Get(install.Output())(t)), "\n---\n")
		require.Len(t, objects, 12)
		for i, path := range []string{
			"/api/v1/namespaces/%s/configmaps", "/api/v1/namespaces/%s/secrets", "/api/v1/namespaces/%s/serviceaccounts",
			"/apis/rbac.authorization.k8s.io/v1/namespaces/%s/roles", "/apis/rbac.authorization.k8s.io/v1/namespaces/%s/rolebindings",
			"/apis/rbac.authorization.k8s.io/v1/namespaces/%s/roles", "/apis/rbac.authorization.k8s.io/v1/namespaces/%s/rolebindings",
			"/apis/rbac.authorization.k8s.io/v1/clusterroles", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
			"/api/v1/namespaces/%s/services", "/api/v1/namespaces/%s/services", "/apis/apps/v1/namespaces/%s/deployments",
		} {
			c.Do(t, "POST", strings.ReplaceAll(path, "%s", names[0]), objects[i]+"\n", nil)
		}
		// The account of the identity service may read the issuer, and no other account may.
		may := func(account, path string) int {
			answer, err := c.ClientOf(t, names[0], account).Get(c.URL + "/api/v1/namespaces/" + names[0] + path)
			require.NoError(t, err)
			require.NoError(t, answer.Body.Close())
			return answer.StatusCode
		}
		require.Eventually(t, func() bool { return may("linkerd-identity", "/secrets/"+names[2]) == http.StatusOK }, time.Minute, often)
		assert.Equal(t, http.StatusForbidden, may("linkerd-identity", "/secrets"))
		assert.Equal(t, http.StatusForbidden, may("linkerd-identity", "/secrets/other"))
		assert.Equal(t, http.StatusForbidden, may("web", "/secrets/"+names[2]))
		var m struct{ Data map[string]string }
		c.Do(t, "GET", "/api/v1/namespaces/"+names[0]+"/configmaps/"+names[1], nil, &m)
		require.Len(t, m.Data, 1)
		for _, anchors = range m.Data {
		}
		var s struct{ Data map[string][]byte }
		c.Do(t, "GET", "/api/v1/namespaces/"+names[0]+"/secrets/"+names[2], nil, &s)
		require.Len(t, s.Data, 3)
		assert.Equal(t, anchors, string(s.Data["ca.crt"]))
	}

	in := must.Get(inject.New(inject.Config{
		Mesh:         linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"},
		TrustAnchors: []byte(anchors), TokenAudience: "identity.l5d.io", DownwardAPI: true,
	}))(t)
	server := httptest.NewTLSServer(in)
	t.Cleanup(server.Close)
	const namespace = "emojivoto"
	c.Account(t, namespace, "web")
	rule := func(group, version string, resources ...string) map[string]any {
		return map[string]any{
			"apiGroups": []string{group}, "apiVersions": []string{version}, "resources": resources, "operations": []string{"CREATE", "UPDATE"},
		}
	}
	c.Do(t, "POST", "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations", map[string]any{
		"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration", "metadata": map[string]string{"name": "injector"},
		"webhooks": []any{map[string]any{
			"name": "injector.svidkit.test", "sideEffects": "None", "admissionReviewVersions": []string{"v1"}, "failurePolicy": "Fail",
			"clientConfig": map[string]any{
				"url":      server.URL + "/inject",
				"caBundle": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
			},
			"rules":             []any{rule("", "v1", "pods", "services"), rule("apps", "v1", "deployments")},
			"namespaceSelector": map[string]any{"matchLabels": map[string]string{"kubernetes.io/metadata.name": namespace}},
		}},
	}, nil)

	type podSpec struct {
		Containers []struct {
			Name string
			Env  []struct {
				Name, Value string
				ValueFrom   *struct{ FieldRef struct{ FieldPath string } }
			}
		}
		Volumes []struct {
			Name     string
			EmptyDir *struct{ Medium string }
		}
	}
	const spec = "{serviceAccountName: web, containers: [{name: web, image: none}, {name: linkerd-proxy, image: none, env: [{name: LINKERD2_PROXY_TLS_CERT, value: old}]}]}"
	check := func(s podSpec) {
		env := map[string]string{}
		for _, e := range s.Containers[1].Env {
			if env[e.Name] = e.Value; e.ValueFrom != nil {
				env[e.Name] = e.ValueFrom.FieldRef.FieldPath
			}
		}
		assert.Equal(t, "$(_pod_sa).$(_pod_ns).serviceaccount.identity.linkerd.cluster.local", env["LINKERD2_PROXY_IDENTITY_LOCAL_NAME"])
		assert.Equal(t, "spec.serviceAccountName", env["_pod_sa"])
		assert.Equal(t, "metadata.namespace", env["_pod_ns"])
		assert.Equal(t, anchors, env["LINKERD2_PROXY_IDENTITY_TRUST_ANCHORS"])
		assert.NotContains(t, env, "LINKERD2_PROXY_TLS_CERT")
		assert.Len(t, s.Containers[0].Env, 0)
		require.Len(t, s.Volumes, 2)
		assert.Equal(t, "Memory", s.Volumes[0].EmptyDir.Medium)
	}
	// The API server uses the configuration when it has read it.
	n := 0
	var pod json.RawMessage
	require.Eventually(t, func() bool {
		n++
		c.Do(t, "POST", "/api/v1/namespaces/"+namespace+"/pods", fmt.Sprintf("{apiVersion: v1, kind: Pod, metadata: {name: web-%d}, spec: %s}", n, spec), &pod)
		return strings.Contains(string(pod), "linkerd.io/identity")
	}, time.Minute, often)
	var p struct{ Spec podSpec }
	require.NoError(t, json.Unmarshal(pod, &p))
	check(p.Spec)
	name := must.Get(in.Identity(pod, 80))(t)
	assert.Equal(t, "web.emojivoto.serviceaccount.identity.linkerd.cluster.local", name)
	// An update of the pod does not try to change what cannot be changed.
	c.Do(t, "PATCH", fmt.Sprintf("/api/v1/namespaces/%s/pods/web-%d", namespace, n), map[string]any{"metadata": map[string]any{"labels": map[string]string{"a": "b"}}}, nil)

	var d struct {
		Spec struct{ Template struct{ Spec podSpec } }
	}
	c.Do(t, "POST", "/apis/apps/v1/namespaces/"+namespace+"/deployments", "{apiVersion: apps/v1, kind: Deployment, metadata: {name: web}, "+
		"spec: {selector: {matchLabels: {app: web}}, template: {metadata: {labels: {app: web}}, spec: "+spec+"}}}", &d)
	check(d.Spec.Template.Spec)

	code, answer, err := c.Send("POST", "/api/v1/namespaces/"+namespace+"/services",
		"{apiVersion: v1, kind: Service, metadata: {name: web, annotations: {linkerd.io/identity: enabled}}, spec: {ports: [{port: 80}]}}")
	require.NoError(t, err)
	assert.Equal(t, http.StatusForbidden, code)
	assert.Contains(t, string(answer), "which is not a pod: set it on pods or in their template")
}
