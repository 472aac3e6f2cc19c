package main

import (
	"encoding/pem"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	istiowire "github.com/svidkit/svidkit/internal/test/wire/istioca"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// deployment returns the arguments and variables of the CA's container in a text of YAML, for ports of this machine and a folder for the state.
func deployment(t testing.TB, text, api, state string) (args []string, vars env) {
	t.Helper()
	for d := yaml.NewDecoder(strings.NewReader(text)); ; {
		var o struct {
			Kind string `yaml:"kind"`
			Spec struct {
				Template struct {
					Spec struct {
						Containers []struct {
							Args []string `yaml:"args"`
							Env  []struct {
								Name  string `yaml:"name"`
								Value string `yaml:"value"`
							} `yaml:"env"`
						} `yaml:"containers"`
					} `yaml:"spec"`
				} `yaml:"template"`
			} `yaml:"spec"`
		}
		require.NoError(t, d.Decode(&o), "a StatefulSet")
		if o.Kind != "StatefulSet" {
			continue
		}
		args, vars = []string{"-kubernetes-api", api}, env{}
		for _, arg := range o.Spec.Template.Spec.Containers[0].Args {
			switch name, value, _ := strings.Cut(arg, "="); {
			case name == "-state-dir":
				arg = name + "=" + state
			case strings.HasPrefix(value, ":"):
				arg = name + "=127.0.0.1:0"
			}
			args = append(args, arg)
		}
		for _, e := range o.Spec.Template.Spec.Containers[0].Env {
			vars[e.Name] = e.Value
		}
		return args, vars
	}
}

// The CA has all the rights that it uses and uses all that it has, when it runs as its manifest says, with that of an agent of nodes: it signs for
// pods and nodes, answers what volumes ask for, keeps its roots in new namespaces and bundles, and puts right what others have changed there.
func TestRightsOfTheManifest(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	manifest, err := shell(t, "", "-install", "kubernetes", "-with", "node-accounts=svidkit-node/workload-agent", "-with", "create=true")
	require.NoError(t, err)
	nodes := must.Get(os.ReadFile("../workload-agent/install.yaml"))(t)
	var agent strings.Builder
	require.NoError(t, (&program.Manifest{Text: string(nodes)}).Print(&agent))
	rights := must.Get(kubetest.Rights(manifest + "\n---\n" + agent.String()))(t)
	k, api := kubetest.StartGuard(t, rights["svidkit/ca"])

	// What kubectl has applied, and three pods.
	k.Put("/api/v1/namespaces/svidkit/secrets/istio-ca-secret", map[string]any{"type": "istio.io/ca-root"})
	for _, namespace := range []string{"svidkit", "demo"} {
		k.Put("/api/v1/namespaces/"+namespace, map[string]any{"metadata": map[string]any{"name": namespace}})
	}
	for at, account := range map[string]string{"svidkit-node/pods/agent-0": "workload-agent", "demo/pods/web-0": "web", "later/pods/db-0": "db"} {
		namespace, _, _ := strings.Cut(at, "/")
		k.Put("/api/v1/namespaces/"+at, map[string]any{
			"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": filepath.Base(at), "namespace": namespace, "uid": "uid-" + account},
			"spec": map[string]any{"serviceAccountName": account, "nodeName": "n1"}, "status": map[string]any{"phase": "Running"},
		})
	}
	k.TokenReviews(func(s kubetest.TokenReviewSpec) kubetest.TokenReviewStatus {
		return kubetest.TokenReviewStatus{Authenticated: s.Token == "token-agent", Audiences: s.Audiences, User: kubetest.UserInfo{
			Username: "system:serviceaccount:svidkit-node:workload-agent",
			Groups:   []string{"system:serviceaccounts", "system:serviceaccounts:svidkit-node", "system:authenticated"},
			Extra:    map[string][]string{"authentication.kubernetes.io/pod-name": {"agent-0"}, "authentication.kubernetes.io/pod-uid": {"uid-workload-agent"}},
		}}
	})
	args, vars := deployment(t, manifest, api, t.TempDir())
	s, _ := start(t, must.Get(parse(args, vars.get, io.Discard))(t).Config)

	client := newClient(s.ca.Bundle(), nil)
	defer client.CloseIdleConnections()
	for _, id := range []string{"spiffe://cluster.local/ns/demo/sa/web", "spiffe://cluster.local/ns/later/sa/db"} {
		metadata := must.Get(structpb.NewStruct(map[string]any{"ImpersonatedIdentity": id}))(t)
		request := must.Get(proto.Marshal(&istiowire.IstioCertificateRequest{Csr: newCSR(t), Metadata: metadata}))(t)
		_, err := grpchttp.NewClient(client, "https://"+s.at.Istio.Addr().String(), 1<<20).Unary(t.Context(), istioca.CreateCertificate, http.Header{"Authorization": {"Bearer token-agent"}}, request)
		require.NoError(t, err)
	}

	block, _ := pem.Decode([]byte(newCSR(t)))
	for _, namespace := range []string{"demo", "later"} {
		k.Put("/api/v1/namespaces/"+namespace, map[string]any{"metadata": map[string]any{"name": namespace}})
		path := "/apis/certificates.k8s.io/v1/namespaces/" + namespace + "/podcertificaterequests/of-" + namespace
		k.Put(path, map[string]any{"metadata": map[string]any{}, "spec": map[string]any{
			"signerName": "cluster.local/spiffe", "podName": "web-0", "podUID": "uid-web", "serviceAccountName": "web", "serviceAccountUID": "uid",
			"nodeName": "n1", "nodeUID": "uid", "maxExpirationSeconds": 86400, "stubPKCS10Request": block.Bytes,
		}})
		require.Eventually(t, func() bool {
			var o struct {
				Status struct{ CertificateChain string }
			}
			return k.Get(path, &o) && o.Status.CertificateChain != ""
		}, time.Minute, 10*time.Millisecond)
	}

	roots := string(rootsOf(s))
	kept := func(path, part, key string) {
		t.Helper()
		require.Eventually(t, func() bool {
			var o map[string]any
			k.Get(path, &o)
			data, _ := o[part].(map[string]any)
			return data[key] == roots
		}, time.Minute, 10*time.Millisecond, path)
	}
	change := func(path string, o map[string]any) {
		t.Helper()
		var was map[string]any
		require.True(t, k.Get(path, &was))
		maps.Copy(was, o)
		k.Put(path, was)
	}
	other := string(pki.MarshalCertificatesPEM(spiffetest.NewCA(t, "cluster.local").Root()))
	const bundle = "/apis/certificates.k8s.io/v1/clustertrustbundles/cluster.local:spiffe:cluster.local"
	maps := []string{"/api/v1/namespaces/svidkit/configmaps/istio-ca-root-cert", "/api/v1/namespaces/later/configmaps/istio-ca-root-cert"}
	all := func() {
		t.Helper()
		kept(bundle, "spec", "trustBundle")
		for _, path := range maps {
			kept(path, "data", "root-cert.pem")
		}
	}
	all()
	for _, path := range maps {
		change(path, map[string]any{"data": map[string]any{"root-cert.pem": other}})
	}
	change(bundle, map[string]any{"spec": map[string]any{"signerName": "cluster.local/spiffe", "trustBundle": other}})
	all()

	k.Done(t, map[kubetest.Right]string{
		{Verb: "patch", Resource: "clustertrustbundles.certificates.k8s.io"}: "the name depends on the signer and the trust domain; whose bundles it may write is what attest says",
		{Verb: "get", Resource: "pods"}:                                      "agents may have any namespace, and list, which is for all of them, tells as much",
	})
}
