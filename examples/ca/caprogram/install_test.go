package caprogram

import (
	"bytes"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	istiowire "github.com/svidkit/svidkit/internal/test/wire/istioca"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// installed runs -install and writes the data of the Secret to files, as a volume has them. It returns the trust anchors.
func installed(t testing.TB, scheme, anchors, dir string) []byte {
	t.Helper()
	out := must.Get(shell(t, "", "-install", scheme, "-anchor-dir", anchors, "-issuer-ttl", "720h"))(t)
	configMap, secret, ok := strings.Cut(out, "\n---\n")
	require.True(t, ok)
	require.NotContains(t, configMap, "PRIVATE KEY")
	require.NoError(t, os.MkdirAll(dir, 0o700))
	for _, m := range regexp.MustCompile(`(?m)^  ([a-z.]+): ([A-Za-z0-9+/=]{20,})$`).FindAllStringSubmatch(secret, -1) {
		data := must.Get(base64.StdEncoding.DecodeString(m[2]))(t)
		require.NoError(t, os.WriteFile(filepath.Join(dir, m[1]), data, 0o600))
	}
	_, block, ok := strings.Cut(configMap, ": |\n")
	require.True(t, ok)
	return []byte(regexp.MustCompile(`(?m)^    `).ReplaceAllString(block+"\n", ""))
}

// The objects have the names, keys and types that Linkerd's programs look for, or those of the design, and nothing else.
func TestInstallObjects(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-6.2-1", "LNK-6.2-2", "LNK-1-6")
	for scheme, want := range map[string][2]string{
		"kubernetes.io/tls": {
			"ConfigMap linkerd-identity-trust-roots mesh: ca-bundle.crt",
			"Secret linkerd-identity-issuer mesh kubernetes.io/tls: tls.crt tls.key ca.crt",
		},
		"linkerd.io/tls": {
			"ConfigMap linkerd-identity-trust-roots mesh: ca-bundle.crt",
			"Secret linkerd-identity-issuer mesh Opaque: crt.pem key.pem ca.crt",
		},
		"design": {
			"ConfigMap linkerd-trust-anchor mesh: trust-anchors.pem",
			"Secret linkerd-identity-signing mesh Opaque: crt.pem key.pem ca.crt",
		},
	} {
		out, err := shell(t, "", "-install", scheme, "-anchor-dir", filepath.Join(t.TempDir(), "anchors"), "-linkerd-namespace", "mesh")
		require.NoError(t, err)
		objects := strings.Split(out, "\n---\n")
		require.Len(t, objects, 12)
		for i, text := range objects[:2] {
			var got []string // kind, name, namespace, type, and then the keys
			for _, m := range regexp.MustCompile(`(?m)^( *)([A-Za-z.-]+):(?: (.*))?$`).FindAllStringSubmatch(text, -1) {
				switch indent, name, value := m[1], m[2], m[3]; {
				case indent == "" && name == "apiVersion":
					assert.Equal(t, "v1", value)
				case indent == "" && name == "metadata":
				case indent == "" && name == "data":
					got[len(got)-1] += ":"
				case indent == "" || name == "name" || name == "namespace":
					got = append(got, value)
				default:
					got = append(got, name)
				}
			}
			assert.Equal(t, want[i], strings.Join(got, " "), scheme)
		}
		// The account of the identity service may get the Secret, and nothing else. The API server of internal/peers takes all of it.
		secret := strings.Fields(want[1])[1]
		assert.Contains(t, objects[2], "kind: ServiceAccount\nmetadata: {name: linkerd-identity, namespace: mesh}")
		assert.Contains(t, objects[3], "kind: Role\nmetadata: {name: linkerd-identity, namespace: mesh}\nrules:\n- {apiGroups: [\"\"], resources: [secrets], resourceNames: ["+secret+"], verbs: [get]}")
		assert.Contains(t, objects[11], "image: registry.example.org/ca:1")
		assert.Contains(t, objects[11], "secretName: "+secret+",")
		assert.NotRegexp(t, "NAMESPACE|SECRET|TRUST-DOMAIN", out)
		args := regexp.MustCompile(`(?m)^        - (-.*)$`).FindAllStringSubmatch(objects[11], -1)
		require.NotEmpty(t, args)
		var flags []string
		for _, m := range args {
			flags = append(flags, m[1])
		}
		o := must.Get(alone.parse(flags, env{}.get, io.Discard))(t, "the program takes what is printed")
		assert.Equal(t, "mesh", o.mesh.ControlNamespace)
		assert.Contains(t, objects[4], "kind: Role, name: linkerd-identity}\nsubjects: [{kind: ServiceAccount, name: linkerd-identity, namespace: mesh}]")
	}
}

// What -install prints is what a CA signs with for proxies, in each scheme, and the next issuer is under the same anchor.
func TestInstall(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "LNK-6.2-3", "LNK-6.2-6", "LNK-1-4", "LNK-1-5")
	for scheme, names := range map[string][]string{
		"kubernetes.io/tls": {"tls.crt", "tls.key"}, "linkerd.io/tls": {"crt.pem", "key.pem"}, "design": {"crt.pem", "key.pem"},
	} {
		t.Run(scheme, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			anchors, folder := filepath.Join(dir, "anchors"), filepath.Join(dir, "plugged-in")
			pem := installed(t, scheme, anchors, folder)
			require.Len(t, must.Get(pki.ParseCertificatesPEM(pem))(t), 1)
			files := must.Get(os.ReadDir(folder))(t)
			var found []string
			for _, f := range files {
				found = append(found, f.Name())
			}
			assert.ElementsMatch(t, append(names, "ca.crt"), found)
			key := must.Get(os.ReadFile(filepath.Join(folder, names[1])))(t)
			assert.Equal(t, scheme != "design", bytes.HasPrefix(key, []byte("-----BEGIN")))
			info := must.Get(os.Stat(filepath.Join(anchors, anchorKey)))(t)
			assert.Equal(t, os.FileMode(0o600), info.Mode().Perm())

			_, args := cluster(t)
			s, _ := start(t, newConfig(t, dir, append(args, "-linkerd-ttl", "10m", "-create=false")...))
			require.Equal(t, pem, rootsOf(s))
			client := newClient(s.ca.Bundle(), nil)
			defer client.CloseIdleConnections()
			const name = "web.demo.serviceaccount.identity.linkerd.cluster.local"
			issue := func() []*x509.Certificate {
				chain, err := certify(t.Context(), client, "https://"+s.at.Linkerd.Addr().String(), "token-web", name, proxyCSR(t, name))
				require.NoError(t, err)
				require.NoError(t, checkLinkerd(chain, name, s.ca.Bundle()))
				return chain
			}
			first := issue()
			assert.Equal(t, "identity.linkerd.cluster.local", first[1].Subject.CommonName)

			// The next issuer takes over without a restart, and no client has to learn of a root.
			require.Equal(t, pem, installed(t, scheme, anchors, folder))
			require.Eventually(t, func() bool { return !issue()[1].Equal(first[1]) }, time.Minute, 100*time.Millisecond)
		})
	}
}

// The service can be on its own, with the rights that it needs for one thing: to have tokens reviewed, and to tell of what it
// does. It reads the issuer from its volume, so nobody else needs a right to the Secret, and it has none itself. What ends an
// identity early is the end of its account: nothing else revokes a certificate, which is short-lived.
func TestLinkerdAlone(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "LNK-1-6", "LNK-1-8", "LNK-3-7")
	dir := t.TempDir()
	installed(t, "linkerd.io/tls", filepath.Join(dir, "anchors"), filepath.Join(dir, "plugged-in"))
	k, args := cluster(t)
	rights := map[string]bool{
		"POST /apis/authentication.k8s.io/v1/tokenreviews": true, "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews": true,
		"POST /api/v1/namespaces/demo/events": true,
		// Its own keys for tokens, in its own namespace.
		"GET /api/v1/namespaces/istio-system/secrets/svidkit-ca-tokens": true, "PUT /api/v1/namespaces/istio-system/secrets/svidkit-ca-tokens": true,
		"POST /api/v1/namespaces/istio-system/secrets": true,
	}
	k.Faults(func(r *http.Request) *kubetest.Fault {
		if rights[r.Method+" "+r.URL.Path] {
			return nil
		}
		return &kubetest.Fault{Code: http.StatusForbidden, Reason: "Forbidden"}
	})
	s, _ := start(t, newConfig(t, dir, append(args, "-istio-addr", "", "-create=false")...))
	assert.Nil(t, s.at.Istio)
	client := newClient(s.ca.Bundle(), nil)
	defer client.CloseIdleConnections()
	const name = "web.demo.serviceaccount.identity.linkerd.cluster.local"
	ask := func() ([]*x509.Certificate, error) {
		return certify(t.Context(), client, "https://"+s.at.Linkerd.Addr().String(), "token-web", name, proxyCSR(t, name))
	}
	chain := must.Get(ask())(t)
	assert.WithinDuration(t, time.Now().Add(24*time.Hour), chain[0].NotAfter, time.Minute)
	assert.Empty(t, chain[0].OCSPServer)
	assert.Empty(t, chain[0].CRLDistributionPoints)
	require.Eventually(t, func() bool { return k.Count("POST", "/api/v1/namespaces/demo/events") > 0 }, time.Minute, 10*time.Millisecond)
	k.TokenReviews(reviews(nil)) // the account is deleted
	require.ErrorContains(t, must.Err(ask()), "token")
	for _, r := range k.Requests() {
		assert.NotContains(t, r.Path, "linkerd-identity-issuer")
		assert.Equal(t, rights[r.Method+" "+r.Path], r.Code != http.StatusForbidden, "%s %s", r.Method, r.Path)
	}
}

func TestInstallRefuses(t *testing.T) {
	t.Parallel()
	half, foreign, broken, open, readable := t.TempDir(), filepath.Join(t.TempDir(), "a"), t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "a")
	require.NoError(t, os.WriteFile(filepath.Join(half, anchorKey), []byte("x"), 0o600))
	for _, dir := range []string{half, broken} {
		require.NoError(t, os.Chmod(dir, 0o700))
	}
	must.Get(shell(t, "", "-install", "design", "-anchor-dir", foreign, "-trust-domain", "example.org"))(t)
	must.Get(shell(t, "", "-install", "design", "-anchor-dir", readable))(t)
	require.NoError(t, os.Chmod(filepath.Join(readable, anchorKey), 0o640))
	for _, name := range []string{anchorKey, anchorCert} {
		require.NoError(t, os.WriteFile(filepath.Join(broken, name), []byte("x"), 0o600))
	}
	require.NoError(t, os.Chmod(open, 0o777))
	for _, v := range [][]string{
		{"none of kubernetes.io/tls", "-install", "tls", "-anchor-dir", filepath.Join(half, "x")},
		{"-anchor-dir names", "-install", "design"},
		{"one of root-cert.pem and root-key.pem", "-install", "design", "-anchor-dir", half},
		{"not for the trust domain cluster.local", "-install", "design", "-anchor-dir", foreign},
		{"-anchor-dir", "-install", "design", "-anchor-dir", broken},
		{"chmod", "-install", "design", "-anchor-dir", open},
		{"run: chmod 0600", "-install", "design", "-anchor-dir", readable},
		{"-issuer-ttl: a trust anchor lives for", "-install", "design", "-trust-domain", "example.org", "-anchor-dir", foreign, "-issuer-ttl", "100000h"},
		{"less than an hour", "-install", "design", "-anchor-dir", foreign, "-issuer-ttl", "1m"},
		{"-linkerd-namespace", "-install", "design", "-anchor-dir", foreign, "-linkerd-namespace", "a.b"},
		{"it is for -install", "-status", "-anchor-dir", foreign},
		{"-with: it is for -install", "-status", "-with", "image=x"},
		{"one command", "-install", "design", "-status"},
	} {
		if runtime.GOOS == "windows" && strings.Contains(v[0], "chmod") {
			continue // there are no modes
		}
		out, err := shell(t, "", v[1:]...)
		if v[0] == "-linkerd-namespace" { // checked with all that has a mesh
			require.Error(t, err)
			continue
		}
		require.ErrorContains(t, err, v[0], "%v", v)
		assert.NotContains(t, out, "BEGIN")
	}
}

// A directory or a key of another user is refused.
func TestInstallForeign(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root can give files away")
	}
	for _, foreign := range []string{".", anchorKey} {
		dir := filepath.Join(t.TempDir(), "anchors")
		must.Get(shell(t, "", "-install", "design", "-anchor-dir", dir))(t)
		require.NoError(t, os.Chown(filepath.Join(dir, foreign), 54321, -1))
		require.ErrorContains(t, must.Err(shell(t, "", "-install", "design", "-anchor-dir", dir)), "belongs to user 54321; run: chown 0")
	}
}

// What happens at Linkerd's API is an event in the cluster, of the service account or of the Deployment.
func TestLinkerdEvents(t *testing.T) {
	t.Parallel()
	rounds.Slow(t)
	conformance.Covers(t, "LNK-13.1-1", "LNK-13.1-2", "LNK-13.1-3", "LNK-13-4")
	dir := t.TempDir()
	anchors, folder := filepath.Join(dir, "anchors"), filepath.Join(dir, "plugged-in")
	installed(t, "linkerd.io/tls", anchors, folder)
	k, args := cluster(t)
	s, _ := start(t, newConfig(t, dir, append(args, "-linkerd-ttl", "10m", "-create=false")...))
	client := newClient(s.ca.Bundle(), nil)
	defer client.CloseIdleConnections()
	const name = "web.demo.serviceaccount.identity.linkerd.cluster.local"
	ask := func() {
		_, err := certify(t.Context(), client, "https://"+s.at.Linkerd.Addr().String(), "token-web", name, proxyCSR(t, name))
		require.NoError(t, err)
	}
	ask()
	e := await(t, k, "IssuedLeafCertificate")
	assert.Equal(t, "demo", e.Metadata.Namespace)
	assert.Equal(t, object{"v1", "ServiceAccount", "demo", "web"}, e.InvolvedObject)
	assert.Equal(t, "Normal", e.Type)
	assert.Equal(t, "linkerd-identity", e.Source.Component)
	assert.Regexp(t, regexp.QuoteMeta(name)+`.*20\d\d-.*[0-9a-f]{64}`, e.Message)

	// Files that are refused, and then good ones.
	require.NoError(t, os.WriteFile(filepath.Join(folder, "crt.pem"), []byte("x"), 0o600))
	e = await(t, k, "IssuerUpdateSkipped")
	assert.Equal(t, "Warning", e.Type)
	assert.Equal(t, object{"apps/v1", "Deployment", "linkerd", "linkerd-identity"}, e.InvolvedObject)
	installed(t, "linkerd.io/tls", anchors, folder)
	require.Eventually(t, func() bool { ask(); return events(t, k, "IssuerUpdated") != nil }, time.Minute, 200*time.Millisecond)
	assert.Equal(t, "linkerd-identity", events(t, k, "IssuerUpdated").InvolvedObject.Name)

	// An API server that refuses events costs no certificate.
	k.Faults(func(r *http.Request) *kubetest.Fault {
		if strings.HasSuffix(r.URL.Path, "/events") {
			return &kubetest.Fault{Code: http.StatusForbidden, Reason: "Forbidden"}
		}
		return nil
	})
	ask()
}

// With -linkerd-events=false there are none.
func TestNoLinkerdEvents(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	k, args := cluster(t)
	s, stop := start(t, newConfig(t, t.TempDir(), append(args, "-linkerd-events=false")...))
	client := newClient(s.ca.Bundle(), nil)
	defer client.CloseIdleConnections()
	const name = "web.demo.serviceaccount.identity.linkerd.cluster.local"
	_, err := certify(t.Context(), client, "https://"+s.at.Linkerd.Addr().String(), "token-web", name, proxyCSR(t, name))
	require.NoError(t, err)
	stop()
	require.Zero(t, k.Count("POST", "/api/v1/namespaces/demo/events"))
}

type object struct{ APIVersion, Kind, Namespace, Name string }

type kubeEvent struct {
	Metadata       struct{ Namespace, Name string }
	InvolvedObject object
	Reason, Type   string
	Message        string
	Source         struct{ Component string }
}

// events returns the first event with the reason.
func events(t testing.TB, k *kubetest.Server, reason string) *kubeEvent {
	api := must.Get(kube.New(kube.Options{URL: k.URL(), Client: k.Client()}))(t)
	var list struct{ Items []*kubeEvent }
	require.NoError(t, api.Get(t.Context(), kube.Path("api", "v1", "events"), nil, &list))
	for _, e := range list.Items {
		if e.Reason == reason {
			return e
		}
	}
	return nil
}

func await(t testing.TB, k *kubetest.Server, reason string) (e *kubeEvent) {
	t.Helper()
	require.Eventually(t, func() bool { e = events(t, k, reason); return e != nil }, time.Minute, 50*time.Millisecond, reason)
	return e
}

// Whichever file of a new trust anchor cannot be written: there is no certificate whose key is lost. It would be handed out, and nothing could be
// signed under it.
func TestAnchorInPart(t *testing.T) {
	t.Parallel()
	for _, stuck := range []string{anchorKey, anchorCert} {
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, stuck), []byte("of another process"), 0o600))
		root := must.Get(os.OpenRoot(dir))(t)
		defer root.Close()
		require.ErrorIs(t, must.Err(makeAnchor(root, spiffe.MustParseTrustDomain("example.org"), time.Now())), os.ErrExist, stuck)
		data, err := os.ReadFile(filepath.Join(dir, anchorCert))
		if err == nil {
			_, err = pki.ParseCertificatesPEM(data)
		}
		assert.Error(t, err, "with %s in the way there is a certificate", stuck)
		data = must.Get(os.ReadFile(filepath.Join(dir, stuck)))(t)
		assert.Equal(t, "of another process", string(data))
	}
}

// The issuer signs leaves of proxies and no further CA, and ends when -issuer-ttl says, under an anchor that may sign issuers.
func TestIssuerOfTheMesh(t *testing.T) {
	t.Parallel()
	for scheme, file := range map[string]string{"kubernetes.io/tls": "tls.crt", "linkerd.io/tls": "crt.pem", "design": "crt.pem"} {
		dir := t.TempDir()
		anchors := must.Get(pki.ParseCertificatesPEM(installed(t, scheme, filepath.Join(dir, "anchors"), filepath.Join(dir, "issuer"))))(t)
		data := must.Get(os.ReadFile(filepath.Join(dir, "issuer", file)))(t)
		issuers := must.Get(pki.ParseCertificatesPEM(data))(t)
		require.Len(t, issuers, 1)
		issuer := issuers[0]
		require.NoError(t, issuer.CheckSignatureFrom(anchors[0]))
		assert.True(t, issuer.IsCA && issuer.BasicConstraintsValid)
		assert.Zero(t, issuer.MaxPathLen)
		assert.True(t, issuer.MaxPathLenZero, "a CA below it would be one of the mesh")
		assert.WithinDuration(t, time.Now().Add(720*time.Hour), issuer.NotAfter, time.Minute)
		assert.False(t, anchors[0].MaxPathLenZero, "it signs the issuers")
	}
}

// deployment returns the arguments and variables of the CA's container in a text of YAML, for ports of this machine and a directory for the state.
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
	nodes := must.Get(os.ReadFile("../../workload-agent/install.yaml"))(t)
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
	s, _ := start(t, must.Get(alone.parse(args, vars.get, io.Discard))(t).Config)

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
		}, time.Minute, 100*time.Millisecond)
	}

	roots := string(rootsOf(s))
	kept := func(path, part, key string) {
		t.Helper()
		require.Eventually(t, func() bool {
			var o map[string]any
			k.Get(path, &o)
			data, _ := o[part].(map[string]any)
			return data[key] == roots
		}, time.Minute, 100*time.Millisecond, path)
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
