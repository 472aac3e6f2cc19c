package peers_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// TestPod runs examples/ca as in a pod: it finds the API server and its account there, keeps its CA in a Secret, its roots
// in a ConfigMap of each namespace, and reviews tokens, with the rights that the documentation names.
func TestPod(t *testing.T) {
	t.Parallel()
	c := peers.NewCluster(t)
	c.Account(t, "istio-system", "ca")
	grant(t, c, "istio-system", "ca", "Role", documented(t, "pki/ca/kubesecret"))
	grant(t, c, "istio-system", "ca", "ClusterRole", documented(t, "authn/kube")+strings.TrimPrefix(documented(t, "examples/ca/caconfig"), "rules:\n"))
	c.Account(t, "prod", "web")
	c.Pod(t, "prod", "web", "web-1", "node-a")

	dir := t.TempDir()
	program, account, state := filepath.Join(dir, "ca"), filepath.Join(dir, "account"), filepath.Join(dir, "state")
	out, err := exec.Command("go", "build", "-o", program, "github.com/svidkit/svidkit/examples/ca").CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.NoError(t, os.Mkdir(account, 0o755))
	write := func(name string, data []byte) {
		require.NoError(t, os.WriteFile(filepath.Join(account, name), data, 0o600))
	}
	api := must.Get(os.ReadFile(c.RootsFile()))(t)
	write("ca.crt", api)
	write("namespace", []byte("istio-system"))
	write("token", []byte(c.Token(t, "istio-system", "ca", "", peers.Issuer)))

	port := peers.FreePorts(t, 1)[0]
	cmd := exec.Command(program, "-kubernetes", "-trust-domain", domain.String(), "-state-dir", state,
		"-istio-addr", fmt.Sprint("127.0.0.1:", port), "-linkerd-addr=", "-bundle-addr=", "-admin-addr=")
	cmd.Env = append(os.Environ(), "PILOT_CA_CERT_CONFIGMAP=istio-ca-root-cert", "CA_CREATE=true")
	p := peers.StartInPod(t, filepath.Join(dir, "log"), cmd, c, account)
	roots := filepath.Join(state, "root-cert.pem")
	token := c.Token(t, "prod", "web", "web-1", "istio-ca")
	client := must.Get(istioca.New(istioca.Options{ClusterID: "Kubernetes", Endpoint: caclient.Endpoint{
		URL: fmt.Sprint("https://localhost:", port), TrustDomain: domain, RootsFile: roots,
		Token: func(context.Context) (string, error) { return token, nil },
	}}))(t)
	p.Ready(t, func() error { _, err := checked(t, client, webID); return err })

	chain := must.Get(checked(t, client, webID))(t)
	secret := must.Get(spiffe.ParseBundlePEM(domain, secretOf(t, c, "istio-system")["root-cert.pem"]))(t)
	verifies(t, secret, chain)
	pem := must.Get(os.ReadFile(roots))(t)
	require.Equal(t, serials(pem), serials(pki.MarshalCertificatesPEM(bundleCerts(secret)...)))

	mounted := func(namespace string) {
		t.Helper()
		require.Eventually(t, func() bool {
			code, answer, err := c.Send("GET", "/api/v1/namespaces/"+namespace+"/configmaps/istio-ca-root-cert", nil)
			var o struct{ Data map[string]string }
			return err == nil && code == http.StatusOK && json.Unmarshal(answer, &o) == nil && o.Data["root-cert.pem"] == string(pem)
		}, passing, often, "the roots are in namespace %s", namespace)
	}
	mounted("prod")
	mounted("default")
	c.Account(t, "later", "web")
	mounted("later")
	c.Do(t, "DELETE", "/api/v1/namespaces/prod/configmaps/istio-ca-root-cert", nil, nil)
	mounted("prod")
	other := map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]string{"name": "istio-ca-root-cert"}}
	other["data"] = map[string]string{"root-cert.pem": "of another", "other": "stays"}
	c.Do(t, "PUT", "/api/v1/namespaces/later/configmaps/istio-ca-root-cert", other, nil)
	mounted("later")
	_, changed := must.Get2(c.Send("GET", "/api/v1/namespaces/later/configmaps/istio-ca-root-cert", nil))(t)
	require.Contains(t, string(changed), `"other":"stays"`)
	require.Equal(t, http.StatusNotFound, c.Status(t, "GET", "/api/v1/namespaces/kube-system/configmaps/istio-ca-root-cert"))

	write("token", []byte("garbage"))
	_, err = checked(t, client, webID)
	require.ErrorIs(t, err, caclient.ErrUnavailable, "the CA reads its token anew")
	write("token", []byte(c.Token(t, "istio-system", "ca", "", peers.Issuer)))
	require.Eventually(t, func() bool { _, err := checked(t, client, webID); return err == nil }, passing, time.Second)
}
