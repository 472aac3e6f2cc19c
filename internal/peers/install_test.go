package peers_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/examples/athenz-provider/firstuse"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// resources are where objects are at the API server, by their kinds; those with a slash at the end have no namespace.
var resources = map[string]string{
	"Namespace": "namespaces/", "ServiceAccount": "serviceaccounts", "Secret": "secrets", "ConfigMap": "configmaps", "Service": "services",
	"Role": "roles", "RoleBinding": "rolebindings", "ClusterRole": "clusterroles/", "ClusterRoleBinding": "clusterrolebindings/",
	"Deployment": "deployments", "StatefulSet": "statefulsets", "DaemonSet": "daemonsets", "NetworkPolicy": "networkpolicies", "PodDisruptionBudget": "poddisruptionbudgets",
}

// manifestObject is an object of a text that -install prints.
type manifestObject struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string
	Metadata   struct{ Name, Namespace string }
	Rules      []rule
	Spec       struct {
		Template struct {
			Metadata map[string]any
			Spec     map[string]any
		}
		VolumeClaimTemplates []struct{ Metadata struct{ Name string } } `yaml:"volumeClaimTemplates"`
	}
	text string
}

func (o *manifestObject) path() string {
	at := "/apis/" + o.APIVersion
	if !strings.Contains(o.APIVersion, "/") {
		at = "/api/" + o.APIVersion
	}
	resource, global := strings.CutSuffix(resources[o.Kind], "/")
	if !global {
		at += "/namespaces/" + o.Metadata.Namespace
	}
	return at + "/" + resource + "/" + o.Metadata.Name
}

func objectsOf(t testing.TB, text string) (all []*manifestObject) {
	t.Helper()
	for document := range strings.SplitSeq(text, "\n---\n") {
		o := &manifestObject{text: document}
		require.NoError(t, yaml.Unmarshal([]byte(document), o), "%s", document)
		require.NotEmpty(t, resources[o.Kind], "%s", document)
		require.NotEmpty(t, o.Metadata.Name)
		all = append(all, o)
	}
	return all
}

// apply is kubectl apply --server-side by a field manager, after which there may be more parameters: the API server refuses fields that it does not know, and those that are there twice.
func apply(client *http.Client, server, manager string, o *manifestObject) error {
	r, err := http.NewRequest(http.MethodPatch, server+o.path()+"?fieldValidation=Strict&fieldManager="+manager, strings.NewReader(o.text))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/apply-patch+yaml")
	answer, err := client.Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	said, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode/100 != 2 {
		err = fmt.Errorf("%s: %s", o.path(), said)
	}
	if warning := answer.Header.Values("Warning"); err == nil && warning != nil {
		err = fmt.Errorf("%s: %s", o.path(), warning)
	}
	return err
}

// applyAll applies all objects of a text.
func applyAll(t testing.TB, c *peers.Cluster, text string) []*manifestObject {
	t.Helper()
	all := objectsOf(t, text)
	for _, o := range all {
		require.NoError(t, apply(c.Admin(), c.URL, "kubectl", o), "%s", o.text)
	}
	return all
}

// buildPrograms builds programs of examples, and returns their directory.
func buildPrograms(t testing.TB, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	args := []string{"build", "-ldflags=-s -w", "-o", dir + string(filepath.Separator)}
	for _, name := range names {
		args = append(args, "github.com/svidkit/svidkit/examples/"+name)
	}
	out, err := exec.Command("go", args...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	return dir
}

// install returns what -install kubernetes of a program prints.
func install(t testing.TB, dir, program string, with ...string) string {
	t.Helper()
	args := []string{"-install", "kubernetes"}
	for _, w := range with {
		args = append(args, "-with", w)
	}
	cmd := exec.Command(filepath.Join(dir, program), args...)
	cmd.Stderr = t.Output()
	return string(must.Get(cmd.Output())(t))
}

// createPod creates the pod of a template, as a controller does: the API server judges it.
func createPod(t testing.TB, c *peers.Cluster, namespace string, o *manifestObject, name string) {
	t.Helper()
	if o.Spec.Template.Spec["serviceAccountName"] == nil {
		o.Spec.Template.Spec["serviceAccountName"] = "default" // by the admission that is turned off
	}
	var claimed []any // as the controller adds them
	for _, claim := range o.Spec.VolumeClaimTemplates {
		volume := claim.Metadata.Name
		claimed = append(claimed, map[string]any{"name": volume, "persistentVolumeClaim": map[string]any{"claimName": volume + "-" + name}})
	}
	if claimed != nil {
		o.Spec.Template.Spec["volumes"] = claimed
	}
	c.Do(t, "POST", "/api/v1/namespaces/"+namespace+"/pods", map[string]any{
		"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": name}, "spec": o.Spec.Template.Spec,
	}, nil)
}

// containerOf returns a container of a template.
func containerOf(t testing.TB, o *manifestObject, list, name string) (c struct {
	Args         []string
	Env          []struct{ Name, Value string }
	VolumeMounts []struct{ Name, MountPath string }
}) {
	t.Helper()
	data := must.Get(json.Marshal(o.Spec.Template.Spec[list]))(t)
	var all []json.RawMessage
	require.NoError(t, json.Unmarshal(data, &all))
	for _, one := range all {
		var named struct{ Name string }
		require.NoError(t, json.Unmarshal(one, &named))
		if named.Name == name {
			require.NoError(t, json.Unmarshal(one, &c))
			return c
		}
	}
	require.Fail(t, "there is no such container", "%s in %s", name, data)
	return c
}

// account is a way to the API server with the rights of an account, as by kubectl proxy. It notes what was refused.
type account struct {
	URL     string
	mu      sync.Mutex
	refused []string
}

func newAccount(t testing.TB, c *peers.Cluster, namespace, name string) *account {
	t.Helper()
	a := new(account)
	proxy := httputil.NewSingleHostReverseProxy(must.Get(url.Parse(c.URL))(t))
	proxy.Transport = c.ClientOf(t, namespace, name).Transport
	proxy.FlushInterval = -1
	proxy.ErrorLog = log.New(io.Discard, "", 0) // an API server that is away is part of the test
	proxy.ModifyResponse = func(r *http.Response) error {
		if r.StatusCode == http.StatusForbidden || r.StatusCode == http.StatusUnprocessableEntity { // the latter for the right to sign
			said, err := io.ReadAll(r.Body)
			r.Body = io.NopCloser(bytes.NewReader(said))
			a.mu.Lock()
			defer a.mu.Unlock()
			a.refused = append(a.refused, string(said))
			return err
		}
		return nil
	}
	server := httptest.NewServer(proxy)
	t.Cleanup(server.Close)
	a.URL = server.URL
	return a
}

// err returns what was refused.
func (a *account) err() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.refused) > 0 {
		return errors.New(a.refused[0])
	}
	return nil
}

// runningCA is a CA that runs as its StatefulSet says.
type runningCA struct {
	istio string // address
	roots []byte
}

// caCommand returns the command of a CA as its StatefulSet says, with the rights of its account, and the name of the ConfigMaps with its roots.
// Further arguments are appended.
func caCommand(t testing.TB, dir string, o *manifestObject, may *account, state string, more ...string) (cmd *exec.Cmd, rootMap string) {
	t.Helper()
	args := []string{"-kubernetes-api", may.URL}
	container := containerOf(t, o, "containers", "ca")
	for _, arg := range container.Args {
		name, value, _ := strings.Cut(arg, "=")
		switch {
		case name == "-root-configmap":
			rootMap = value
		case name == "-state-dir":
			value = state
		case strings.HasPrefix(value, ":"):
			value = "127.0.0.1:0" // not of this machine
		}
		if value != "" || strings.Contains(arg, "=") {
			name += "=" + value
		}
		args = append(args, name)
	}
	cmd = exec.Command(filepath.Join(dir, "ca"), append(args, more...)...)
	cmd.Env = []string{"HOME=" + state}
	for _, e := range container.Env {
		cmd.Env = append(cmd.Env, e.Name+"="+e.Value)
	}
	return cmd, rootMap
}

// useCA runs the CA with the arguments of its StatefulSet and the rights of its account: it becomes ready, signs for a pod, and keeps
// its roots in the namespaces. It returns what was refused, if anything is, and leaves the CA running for the rest of the test.
func useCA(t *testing.T, c *peers.Cluster, dir string, objects []*manifestObject) (*runningCA, error) {
	t.Helper()
	o := objects[slices.IndexFunc(objects, func(o *manifestObject) bool { return o.Kind == "StatefulSet" })]
	namespace := o.Metadata.Namespace
	may, state := newAccount(t, c, namespace, "ca"), t.TempDir()
	cmd, rootMap := caCommand(t, dir, o, may, state)
	out := must.Get(os.Create(filepath.Join(state, "out")))(t)
	cmd.Stdout, cmd.Stderr = out, out
	require.NoError(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	log := func() string {
		return string(must.Get(os.ReadFile(out.Name()))(t))
	}
	eventually := func(what string, done func() bool) error {
		until := time.After(passing)
		for !done() {
			if err := may.err(); err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			select {
			case err := <-ended:
				return fmt.Errorf("%s: it has ended: %w\n%s", what, errors.Join(err, may.err()), log())
			case <-until:
				return fmt.Errorf("%s: it does not come\n%s", what, log())
			case <-time.After(50 * time.Millisecond):
			}
		}
		return may.err()
	}
	ca, admin := new(runningCA), ""
	err := eventually("ready", func() bool {
		istio, ready := regexp.MustCompile(`Istio's API: +https://([^/]+)/`).FindStringSubmatch(log()), regexp.MustCompile(`metrics, health: +(\S+)/metrics`).FindStringSubmatch(log())
		if istio == nil || ready == nil {
			return false
		}
		ca.istio, admin = istio[1], ready[1]
		answer, err := http.Get(admin + "/ready")
		if err != nil {
			return false
		}
		defer answer.Body.Close()
		return answer.StatusCode == http.StatusOK
	})
	if err != nil {
		return nil, err
	}
	ca.roots = must.Get(os.ReadFile(filepath.Join(state, "root-cert.pem")))(t)
	prod := namespace + "-prod"
	c.Account(t, prod, "web")
	mounted := func() bool {
		code, answer, err := c.Send("GET", "/api/v1/namespaces/"+prod+"/configmaps/"+rootMap, nil)
		var o struct{ Data map[string]string }
		return err == nil && code == http.StatusOK && json.Unmarshal(answer, &o) == nil && o.Data["root-cert.pem"] == string(ca.roots)
	}
	if err := eventually("the roots in another namespace", mounted); err != nil {
		return nil, err
	}
	c.Do(t, "PATCH", "/api/v1/namespaces/"+prod+"/configmaps/"+rootMap, map[string]any{"data": map[string]any{"root-cert.pem": "of another"}}, nil)
	if err := eventually("the roots after they were changed", mounted); err != nil {
		return nil, err
	}
	c.Pod(t, prod, "web", "web-1", "node-a")
	token := c.Token(t, prod, "web", "web-1", "istio-ca")
	td := spiffe.MustParseTrustDomain("cluster.local")
	client, err := istioca.New(istioca.Options{ClusterID: "Kubernetes", Endpoint: caclient.Endpoint{
		URL: "https://" + ca.istio, TrustDomain: td, RootsFile: filepath.Join(state, "root-cert.pem"), Token: func(context.Context) (string, error) { return token, nil },
	}})
	require.NoError(t, err)
	id := must.Get(td.WorkloadID("ns", prod, "sa", "web"))(t)
	if _, err = checked(t, client, id); err != nil {
		return nil, errors.Join(err, may.err())
	}
	signer := ""
	for _, arg := range containerOf(t, o, "containers", "ca").Args {
		if value, ok := strings.CutPrefix(arg, "-pod-signer="); ok {
			signer = value
		}
	}
	asked := requestPod(t, c, prod, podRequest(t, c, signer, prod, "web-1", "web", "node-a", nil))
	if err := eventually("the certificate of a pod", func() bool { return len(answerOf(t, c, asked)) > 0 }); err != nil {
		return nil, err
	}
	require.Equal(t, "Issued", answerOf(t, c, asked)[0].Type)
	bundle := "/apis/certificates.k8s.io/v1/clustertrustbundles/" + strings.ReplaceAll(signer, "/", ":") + ":cluster.local"
	kept := func() bool {
		code, answer, err := c.Send("GET", bundle, nil)
		var o struct{ Spec struct{ TrustBundle string } }
		return err == nil && code == http.StatusOK && json.Unmarshal(answer, &o) == nil && o.Spec.TrustBundle == string(ca.roots)
	}
	if err := eventually("the roots for volumes", kept); err != nil {
		return nil, err
	}
	c.Do(t, "PATCH", bundle, map[string]any{"spec": map[string]any{"trustBundle": string(pki.MarshalCertificatesPEM(otherRoot(t)))}}, nil)
	return ca, eventually("the roots for volumes after they were changed", kept)
}

// otherRoot returns a root that is not of the CA.
func otherRoot(t testing.TB) *x509.Certificate {
	t.Helper()
	return spiffetest.NewCA(t, "cluster.local").Root()
}

// without returns objects in which one of the rights is missing, which it names: the ith of all.
func without(objects []*manifestObject, i int) (out []*manifestObject, missing rule, ok bool) {
	for _, o := range objects {
		copied := *o
		var rules []rule
		for _, r := range o.Rules {
			for _, verb := range r.Verbs {
				one := rule{r.Groups, r.Resources, r.Names, []string{verb}}
				if i == 0 {
					missing, ok = one, true
				} else {
					rules = append(rules, one)
				}
				i--
			}
		}
		if o.Rules != nil {
			var raw map[string]any
			_ = yaml.Unmarshal([]byte(o.text), &raw)
			raw["rules"] = rules
			data, _ := json.Marshal(raw)
			copied.text, copied.Rules = string(data), rules
		}
		out = append(out, &copied)
	}
	return out, missing, ok
}

// TestInstall does what KUBERNETES.md says with a real API server, with kubectl if that is installed, and with the rights that were
// printed: a CA, and a Deployment whose pods have an identity. Without any one of the rights the CA fails, and says which.
func TestInstall(t *testing.T) {
	t.Parallel()
	c := peers.NewCluster(t)
	dir := buildPrograms(t, "ca", "agent")
	runPage(t, c, dir, "../../examples/KUBERNETES.md")
	template := func(kind, namespace, name string) *manifestObject {
		o := &manifestObject{APIVersion: "apps/v1", Kind: kind}
		o.Metadata.Namespace, o.Metadata.Name = namespace, name
		c.Do(t, "GET", o.path(), nil, o)
		createPod(t, c, namespace, o, name+"-1")
		return o
	}
	template("StatefulSet", "svidkit", "ca")
	template("Deployment", "default", "shop")
	web := template("Deployment", "default", "web")

	// What the page has applied at last makes no CA, so the one that runs here is told to.
	objects := applyAll(t, c, install(t, dir, "ca", "create=true"))
	holdsAll(t, c, objects, rule{})
	ca := must.Get(useCA(t, c, dir, objects))(t, "the rights are sufficient")
	useAgent(t, c, dir, web, ca)

	for i := 0; ; i++ {
		namespace := fmt.Sprint("less-", i)
		// The CA before would create the ConfigMaps for it, if they had one name.
		text := strings.ReplaceAll(install(t, dir, "ca", "create=true", "namespace="+namespace, "signer="+namespace+".example.org/spiffe"), "istio-ca-root-cert", namespace+"-roots")
		objects, missing, ok := without(objectsOf(t, text), i)
		if !ok {
			require.Equal(t, 16, i, "rights that were printed")
			break
		}
		t.Run("without "+missing.String(), func(t *testing.T) {
			t.Parallel()
			for _, o := range objects {
				require.NoError(t, apply(c.Admin(), c.URL, "kubectl", o), "%s", o.text)
			}
			holdsAll(t, c, objects, missing)
			_, err := useCA(t, c, dir, objects)
			require.Error(t, err)
			t.Log(err)
			says := "(cannot|may not) " + missing.Verbs[0] + ` (resource \\")?` + missing.Resources[0]
			if missing.Resources[0] == "signers" {
				says = `not permitted to (\\")?` + missing.Verbs[0] + `(\\")? for signer`
			}
			assert.Regexp(t, says, err.Error())
		})
	}
}

// ofRole leaves out the rules of roles whose names end otherwise, as they are another account's.
func ofRole(objects []*manifestObject, end string) []*manifestObject {
	for _, o := range objects {
		if !strings.HasSuffix(o.Metadata.Name, end) {
			o.Rules = nil
		}
	}
	return objects
}

// testInstalled has the API server take what the other programs print, and the pods of it, and shows that the rights in it are
// sufficient, and that none is too much.
func testInstalled(t *testing.T, c *cluster) {
	dir := buildPrograms(t, "ca", "workload-agent", "linkerd-proxy", "athenz-agent", "athenz-provider", "athenz-sia")
	athenz := []string{"provider-service=k8s.admin.athenz-callback", "zts=https://zts.athenz.svc:4443"}
	for _, p := range []struct {
		program, namespace, account string
		with                        []string
		role                        string // the end of the names of the roles that are the account's; empty means all
		rights                      int
		use                         func(t *testing.T, c *cluster, namespace string, objects []*manifestObject) error
	}{
		{"athenz-provider", "namespace", "athenz-callback", append(athenz, "zts-name=zts.example.cloud", "node-names=k8s.admin.k8s-node"), "", 3, useProvider},
		{"athenz-agent", "namespace", "athenz-agent", append(athenz, "signing=https://athenz-callback.k8s-admin.svc:4444"), "", 1, useKubelet},
		{"workload-agent", "ca-namespace", "ca", nil, "-ca-nodes", 2, useNodes},
		{"workload-agent", "namespace", "workload-agent", nil, "-workload-agent", 4, usePods},
	} {
		for i := -1; i < p.rights; i++ {
			namespace := fmt.Sprint("installed-", p.program, "-", p.account, "-", i+1)
			with := append([]string{p.namespace + "=" + namespace}, p.with...)
			if p.namespace != "namespace" {
				with = append(with, "namespace="+namespace+"-node")
				c.Account(t, namespace, p.account)
			}
			objects, missing, ok := without(ofRole(objectsOf(t, install(t, dir, p.program, with...)), p.role), i)
			require.Equal(t, i >= 0, ok)
			name := p.program
			if ok {
				name += " without " + missing.String()
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				for _, o := range objects {
					require.NoError(t, apply(c.Admin(), c.URL, "kubectl", o), "%s", o.text)
				}
				var rules []rule
				for _, o := range objects {
					if rules = append(rules, o.Rules...); o.Spec.Template.Spec != nil {
						createPod(t, c.Cluster, o.Metadata.Namespace, o, "pod")
					}
				}
				holds(t, c.Cluster, namespace, p.account, rules, missing)
				err := p.use(t, c, namespace, objects)
				if !ok {
					require.NoError(t, err, "the rights are sufficient")
					return
				}
				require.Error(t, err)
				t.Log(err)
				assert.ErrorContains(t, err, strings.Split(missing.Resources[0], "/")[0])
			})
		}
		_, _, more := without(ofRole(objectsOf(t, install(t, dir, p.program, append(p.with, p.namespace+"=x")...)), p.role), p.rights)
		require.False(t, more, "%s has more rights", p.program)
	}
	for program, with := range map[string][]string{"linkerd-proxy": {"app-port=8080"}, "athenz-sia": {"container=app"}} {
		namespace := "sidecar-" + program
		c.Account(t, namespace, "web")
		c.Do(t, "PATCH", "/api/v1/namespaces/"+namespace, map[string]any{"metadata": map[string]any{"labels": map[string]string{
			"pod-security.kubernetes.io/enforce": map[string]string{"linkerd-proxy": "restricted", "athenz-sia": "privileged"}[program], // for its kind of volume
		}}}, nil)
		web := objectsOf(t, fmt.Sprintf(`apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: %s}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      serviceAccountName: web
      securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
      containers: [{name: app, image: none, securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}}]
`, namespace))[0]
		require.NoError(t, apply(c.Admin(), c.URL, "kubectl", web))
		objects := objectsOf(t, install(t, dir, program, append(with, "deployment=web", "namespace="+namespace)...))
		require.Len(t, objects, 1, "it needs no right")
		require.NoError(t, apply(c.Admin(), c.URL, "svidkit", objects[0]))
		var whole manifestObject
		c.Do(t, "GET", web.path(), nil, &whole)
		require.Contains(t, fmt.Sprint(whole.Spec.Template.Spec["containers"]), "name:app")
		require.Contains(t, fmt.Sprint(whole.Spec.Template.Spec["initContainers"]), "registry.example.org/"+program+":1")
		createPod(t, c.Cluster, namespace, &whole, "web-1")
	}
}

// useProvider asks for a pod, and notes that a document was used.
func useProvider(t *testing.T, c *cluster, namespace string, _ []*manifestObject) error {
	client := c.ClientOf(t, namespace, "athenz-callback")
	pods := must.Get(athenz.NewAPIServer(c.URL, client))(t)
	first := must.Get(firstuse.InConfigMap(c.URL, client, namespace+"/used-documents"))(t)
	c.Account(t, namespace, "web")
	pod := "web-1"
	c.Create(t, fmt.Sprintf("POST /api/v1/namespaces/%s/pods\n{apiVersion: v1, kind: Pod, metadata: {name: %s}, spec: {serviceAccountName: web, nodeName: node-a, "+
		"securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}, "+
		"containers: [{name: main, image: none, securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}}]}}", namespace, pod))
	_, err := pods(t.Context(), namespace, pod)
	was, used := first(t.Context(), [32]byte{1}, time.Now().Add(time.Minute))
	if err == nil && used == nil && !was {
		err = errors.New("the document was used before")
	}
	if err != nil {
		err = fmt.Errorf("pods: %w", err)
	}
	if used != nil {
		used = fmt.Errorf("configmaps: %w", used)
	}
	return errors.Join(err, used)
}

// useKubelet asks as the kubelet does whether the agent may have its pods.
func useKubelet(t *testing.T, c *cluster, namespace string, _ []*manifestObject) error {
	allowed := func(subresource string) bool {
		var answer struct{ Status struct{ Allowed bool } }
		c.Do(t, "POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", map[string]any{
			"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": map[string]any{
				"user":               "system:serviceaccount:" + namespace + ":athenz-agent",
				"resourceAttributes": map[string]any{"version": "v1", "resource": "nodes", "subresource": subresource, "name": "node-a", "verb": "get"},
			},
		}, &answer)
		return answer.Status.Allowed
	}
	require.False(t, allowed("proxy"), "by which commands run in pods")
	if !allowed("pods") {
		return errors.New("get nodes/pods is not allowed")
	}
	return nil
}

// usePods lists and watches the pods of a node and, for brokers, the service accounts, as the agent does.
func usePods(t *testing.T, c *cluster, namespace string, _ []*manifestObject) error {
	client := c.ClientOf(t, namespace, "workload-agent")
	const pods, accounts = "pods?fieldSelector=spec.nodeName%3Dnode-a", "serviceaccounts?"
	const watch = "&watch=true&timeoutSeconds=1"
	for _, path := range []string{pods, pods + watch, accounts, accounts + watch} {
		answer := must.Get(client.Get(c.URL + "/api/v1/" + path))(t)
		said, err := io.ReadAll(answer.Body)
		require.NoError(t, errors.Join(err, answer.Body.Close()))
		if answer.StatusCode != http.StatusOK {
			return errors.New(string(said))
		}
	}
	return nil
}

// useNodes asks as the CA does whether a pod is on the node of the agent.
func useNodes(t *testing.T, c *cluster, namespace string, _ []*manifestObject) error {
	grant(t, c.Cluster, namespace, "ca", "ClusterRole", "rules:\n- {apiGroups: [authentication.k8s.io], resources: [tokenreviews], verbs: [create]}\n")
	node := namespace + "-node"
	reviewer := must.Get(kube.NewReviewer(&kube.ReviewerOptions{APIServer: c.URL, HTTPClient: c.ClientOf(t, namespace, "ca")}))(t)
	nodes := must.Get(kube.NewNodeAuthorizer(reviewer, []string{node + "/workload-agent"}, nil))(t)
	c.Pod(t, node, "workload-agent", "agent-1", "node-a")
	c.Account(t, namespace, "web")
	c.Pod(t, namespace, "web", "web-1", "node-a")
	reviewer, err := kube.NewReviewer(&kube.ReviewerOptions{APIServer: c.URL, HTTPClient: c.ClientOf(t, namespace, "ca")})
	require.NoError(t, err)
	a, err := reviewer.Review(t.Context(), c.Token(t, node, "workload-agent", "agent-1", "istio-ca"), []string{"istio-ca"})
	require.NoError(t, err)
	agent := must.Get(domain.WorkloadID("ns", a.Namespace, "sa", a.ServiceAccount))(t)
	web := must.Get(domain.WorkloadID("ns", namespace, "sa", "web"))(t)
	return nodes.Authorize(t.Context(), &authn.Caller{ID: agent, Pod: &spiffe.Pod{Namespace: a.Namespace, ServiceAccount: a.ServiceAccount, Name: a.Name, UID: a.UID}}, web)
}

// holdsAll waits until the accounts of the objects have the rights.
func holdsAll(t testing.TB, c *peers.Cluster, objects []*manifestObject, missing rule) {
	t.Helper()
	var all []rule
	namespace, name := "", ""
	for _, o := range objects {
		all = append(all, o.Rules...)
		if o.Kind == "ServiceAccount" {
			namespace, name = o.Metadata.Namespace, o.Metadata.Name
		}
	}
	holds(t, c, namespace, name, all, missing)
}

// useAgent runs the agent as the sidecar of a pod: it has the identity of the account of the pod.
func useAgent(t *testing.T, c *peers.Cluster, dir string, web *manifestObject, ca *runningCA) {
	t.Helper()
	sidecar, app := containerOf(t, web, "initContainers", "svidkit-agent"), containerOf(t, web, "containers", "app")
	require.Len(t, app.VolumeMounts, 2)
	root := shortDir(t)
	c.Account(t, "default", "default")
	write(t, filepath.Join(root, "var/run/secrets/tokens/istio-token"), c.Token(t, "default", "default", "web-1", "istio-ca"))
	write(t, filepath.Join(root, "var/run/secrets/istio/root-cert.pem"), string(ca.roots))
	environ := []string{"HOME=" + root}
	for _, e := range sidecar.Env {
		switch e.Name {
		case "CA_ADDR":
			assert.Equal(t, "ca.svidkit.svc:15012", e.Value)
			e.Value = ca.istio
		case "OUTPUT_CERTS":
			assert.Equal(t, e.Value, app.VolumeMounts[0].MountPath)
			e.Value = filepath.Join(root, e.Value)
		case "POD_NAMESPACE", "SERVICE_ACCOUNT":
			e.Value = "default"
		}
		if e.Value != "" {
			environ = append(environ, e.Name+"="+e.Value)
		}
	}
	require.Equal(t, []string{"-admin=:15020"}, sidecar.Args)
	port := peers.FreePorts(t, 1)[0]
	cmd := exec.Command(filepath.Join(dir, "agent"), "-root", root, fmt.Sprint("-admin=127.0.0.1:", port))
	cmd.Env = environ
	p := peers.Start(t, filepath.Join(root, "log"), cmd)
	p.Ready(t, func() error {
		answer, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/healthz/ready", port))
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			return errors.New(answer.Status)
		}
		return nil
	})
	chain := must.Get(os.ReadFile(filepath.Join(root, app.VolumeMounts[0].MountPath, "cert-chain.pem")))(t)
	certs := must.Get(pki.ParseCertificatesPEM(chain))(t)
	id := must.Get(spiffe.IDFromCertificate(certs[0]))(t)
	assert.Contains(t, string(must.Get(os.ReadFile("../../examples/KUBERNETES.md"))(t)), "`"+id.String()+"`")
}

var pageBlock = regexp.MustCompile(`<!-- run -->\n\n((?:    .*\n|\n)+)`)

// runPage runs the commands of a page that need a cluster. Without kubectl, this test is it: see [kubectl].
func runPage(t *testing.T, c *peers.Cluster, dir, page string) {
	t.Helper()
	text := must.Get(os.ReadFile(page))(t)
	kubeconfig(t, c, filepath.Join(dir, "kubeconfig"))
	if path, err := exec.LookPath("kubectl"); err == nil {
		t.Log("by " + path)
	} else {
		require.NoError(t, os.Symlink(must.Get(os.Executable())(t), filepath.Join(dir, "kubectl")))
	}
	blocks := pageBlock.FindAllStringSubmatch(string(text), -1)
	require.Len(t, blocks, strings.Count(string(text), "<!-- run -->"))
	require.Len(t, blocks, 4)
	for _, b := range blocks {
		commands := regexp.MustCompile(`(?m)^    `).ReplaceAllString(b[1], "")
		cmd := exec.Command("bash", "-euo", "pipefail", "-c", commands)
		cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "KUBECONFIG="+filepath.Join(dir, "kubeconfig"), "HOME="+dir, asKubectl+"=1")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s\n%s", commands, out)
		assert.NotContains(t, strings.ToLower(string(out)), "warning")
	}
}

// kubeconfig writes a file with all rights in a cluster.
func kubeconfig(t *testing.T, c *peers.Cluster, path string) {
	t.Helper()
	roots := must.Get(filepath.Abs(c.RootsFile()))(t)
	c.Account(t, "istio-system", "operator")
	c.Create(t, "POST /apis/rbac.authorization.k8s.io/v1/clusterrolebindings\n{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, metadata: {name: operator}, "+
		"roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}, subjects: [{kind: ServiceAccount, name: operator, namespace: istio-system}]}")
	write(t, path, fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{name: c, cluster: {server: %q, certificate-authority: %q}}]\n"+
		"contexts: [{name: c, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {token: %q}}]\n", c.URL, roots, c.Token(t, "istio-system", "operator", "", peers.Issuer)))
}

// write writes a file, or makes a directory if its name ends with a slash, and the directories above it.
func write(t *testing.T, name, data string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o755))
	if data != "" {
		require.NoError(t, os.WriteFile(name, []byte(data), 0o755))
	}
}

const asKubectl = "SVIDKIT_TEST_KUBECTL"

// TestMain makes of the test what its name says, for commands of a page.
func TestMain(m *testing.M) {
	if os.Getenv(asKubectl) == "" || filepath.Base(os.Args[0]) != "kubectl" {
		os.Exit(m.Run())
	}
	if err := kubectl(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// kubectl stands in for the program, with the one command that a page has.
func kubectl(args []string) error {
	command := regexp.MustCompile(`^apply --server-side (?:--field-manager=(\w+) )?-f -$`).FindStringSubmatch(strings.Join(args, " "))
	if command == nil {
		return fmt.Errorf("%q is for the real kubectl", args)
	}
	data, err := os.ReadFile(os.Getenv("KUBECONFIG"))
	if err != nil {
		return err
	}
	var config struct {
		Clusters []struct {
			Cluster struct {
				Server string
				CA     string `yaml:"certificate-authority"`
			}
		}
		Users []struct{ User struct{ Token string } }
	}
	if err := yaml.Unmarshal(data, &config); err != nil {
		return err
	}
	roots, err := os.ReadFile(config.Clusters[0].Cluster.CA)
	if err != nil {
		return err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(roots)
	client := &http.Client{Timeout: passing, Transport: &oauth{config.Users[0].User.Token, &http.Transport{TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool}}}}
	text, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		o := &manifestObject{text: document}
		if err := yaml.Unmarshal([]byte(document), o); err != nil {
			return err
		}
		if err := apply(client, config.Clusters[0].Cluster.Server, cmp.Or(command[1], "kubectl"), o); err != nil {
			return err
		}
	}
	return nil
}

type oauth struct {
	token string
	next  http.RoundTripper
}

func (o *oauth) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+o.token)
	return o.next.RoundTrip(r)
}

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
	return must.Err(s.Save(t.Context(), ca.NewRecord(version, data)))
}

// useTokens reviews a token, and asks for a workload of the node of its pod.
func useTokens(t *testing.T, c *cluster, namespace string, client *http.Client) error {
	c.Account(t, namespace, "proxy")
	c.Pod(t, namespace, "proxy", "proxy", "node-a")
	reviewer := must.Get(kube.NewReviewer(&kube.ReviewerOptions{APIServer: c.URL, HTTPClient: client}))(t)
	nodes, err := kube.NewNodeAuthorizer(reviewer, []string{namespace + "/proxy"}, nil)
	require.NoError(t, err)

	account, errReview := reviewer.Review(t.Context(), c.Token(t, namespace, "proxy", "proxy", "istio-ca"), []string{"istio-ca"})
	assert.Equal(t, errReview == nil, reviewer.Check(t.Context()) == nil, "Check says what Review does")
	if errReview != nil {
		return errReview
	}
	id := must.Get(domain.WorkloadID("ns", account.Namespace, "sa", account.ServiceAccount))(t)
	errNodes := nodes.Authorize(t.Context(), &authn.Caller{ID: id, Pod: &spiffe.Pod{
		Namespace: account.Namespace, ServiceAccount: account.ServiceAccount, Name: account.Name, UID: account.UID,
	}}, id)
	assert.Equal(t, errNodes == nil, nodes.Check(t.Context()) == nil, "Check says what Authorize does")
	return errNodes
}

// useSigner has a certificate signed while another client edits the request, so that the first approval conflicts.
func useSigner(t *testing.T, c *cluster, namespace string, client *http.Client) error {
	client.Transport = &meddler{t: t, cluster: c.Cluster, next: client.Transport, done: map[string]bool{}}
	a := c.signer.registration(t, client, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err := a.Sign(ctx, ca.Request{CSR: csrFor(t, webID), ID: webID})
	if err == nil && c.signer.pending(t, namespace, "server") > 0 {
		err = errors.New("the request was not deleted")
	}
	return err
}
