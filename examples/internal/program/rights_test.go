package program_test

import (
	"bytes"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
)

// The rights of which the texts of the tree speak, by the file, and the code that uses each. What -install prints has an account for each; what is
// written to an operator has none. That programs use these and need no others is shown where they run: by a guard of package kubetest, and by a
// real API server in internal/peers.
var rights = map[string]map[string]string{
	"examples/ca/install.yaml": {
		"svidkit/ca: get secrets istio-ca-secret in svidkit":                  "kubesecret reads the CA",
		"svidkit/ca: update secrets istio-ca-secret in svidkit":               "kubesecret writes it, in the version that was read",
		"svidkit/ca: create tokenreviews.authentication.k8s.io":               "kube.Reviewer, for each token of a pod",
		"svidkit/ca: list namespaces":                                         "caconfig keeps the roots in each",
		"svidkit/ca: watch namespaces":                                        "and in those that come",
		"svidkit/ca: create configmaps":                                       "in each; a name cannot be had for create",
		"svidkit/ca: list configmaps istio-ca-root-cert":                      "which of them are behind",
		"svidkit/ca: watch configmaps istio-ca-root-cert":                     "and which are changed",
		"svidkit/ca: patch configmaps istio-ca-root-cert":                     "the roots in them",
		"svidkit/ca: list podcertificaterequests.certificates.k8s.io":         "podcert's queue",
		"svidkit/ca: watch podcertificaterequests.certificates.k8s.io":        "and what comes",
		"svidkit/ca: patch podcertificaterequests/status.certificates.k8s.io": "podcert's answers",
		"svidkit/ca: sign signers.certificates.k8s.io cluster.local/spiffe":   "admission asks for it at each answer",
		"svidkit/ca: create clustertrustbundles.certificates.k8s.io":          "podcert's roots",
		"svidkit/ca: patch clustertrustbundles.certificates.k8s.io":           "after a rotation; whose they are is what attest says",
		"svidkit/ca: attest signers.certificates.k8s.io cluster.local/spiffe": "admission asks for it at each write of roots",
	},
	"examples/workload-agent/install.yaml": {
		"svidkit/ca: get pods":                    "kube.NodeAuthorizer: the node of the agent's pod",
		"svidkit/ca: list pods":                   "and whether the identity's account runs there",
		"svidkit-node/workload-agent: list pods":  "workloadagent selects those of its node by namespace, account and labels",
		"svidkit-node/workload-agent: watch pods": "and those that come",
	},
	"examples/athenz-provider/install.yaml": {
		"k8s-admin/athenz-callback: get pods":                                      "athenz.Provider compares a document with its pod",
		"k8s-admin/athenz-callback: get configmaps used-documents in k8s-admin":    "which documents were used",
		"k8s-admin/athenz-callback: update configmaps used-documents in k8s-admin": "and this one, in the version that was read",
	},
	"examples/athenz-agent/install.yaml": {
		"athenz-agent/athenz-agent: get nodes/pods": "the kubelet asks for it at GET /pods, from Kubernetes 1.33",
	},
	"examples/ca/linkerd.yaml": {
		"NAMESPACE/linkerd-identity: create secrets in NAMESPACE":                   "kubesecret makes the keys at the first start; a name cannot be had for create",
		"NAMESPACE/linkerd-identity: get secrets svidkit-ca-tokens in NAMESPACE":    "kubesecret reads them",
		"NAMESPACE/linkerd-identity: update secrets svidkit-ca-tokens in NAMESPACE": "and writes them, in the version that was read",
		"NAMESPACE/linkerd-identity: create tokenreviews.authentication.k8s.io":     "kube.Reviewer, for each token of a proxy",
		"NAMESPACE/linkerd-identity: create events":                                 "caconfig reports what becomes of requests",
	},
	"examples/ca/install.go": {
		"VALUE/linkerd-identity: get secrets VALUE in VALUE": "Linkerd's identity service reads its issuer",
	},
	"authn/kube/kube.go": {
		": create tokenreviews.authentication.k8s.io": "Reviewer",
		": get pods":  "NodeAuthorizer",
		": list pods": "NodeAuthorizer",
	},
	"authn/athenz/athenz.go": {
		": get pods": "Provider",
	},
	"examples/athenz-provider/README.md": {
		": get configmaps used-documents":    "USED_DOCUMENTS",
		": update configmaps used-documents": "USED_DOCUMENTS",
	},
	"examples/TOKENS.md": {
		"User spiffe://example.org/ns/prod/sa/web: get serviceaccounts web": "an example of what an operator grants",
	},
	"pki/ca/kubesecret/kubesecret.go": {
		": get secrets istio-ca-secret":    "Load",
		": update secrets istio-ca-secret": "Save",
		": create secrets":                 "Save of a new CA",
	},
	"pki/ra/ra.go": {
		": create certificatesigningrequests.certificates.k8s.io":          "each Sign",
		": get certificatesigningrequests.certificates.k8s.io":             "one that is there already, and after a conflict",
		": watch certificatesigningrequests.certificates.k8s.io":           "until it is answered",
		": delete certificatesigningrequests.certificates.k8s.io":          "once it is",
		": update certificatesigningrequests/approval.certificates.k8s.io": "the approval",
		": approve signers.certificates.k8s.io example.com/mesh":           "admission asks for it at the approval",
	},
	"pki/caserver/podcert/podcert.go": {
		": list podcertificaterequests.certificates.k8s.io":         "the queue",
		": watch podcertificaterequests.certificates.k8s.io":        "the queue",
		": patch podcertificaterequests/status.certificates.k8s.io": "the answers",
		": create clustertrustbundles.certificates.k8s.io":          "the roots",
		": patch clustertrustbundles.certificates.k8s.io":           "the roots after a rotation",
		": sign signers.certificates.k8s.io example.org/spiffe":     "admission",
		": attest signers.certificates.k8s.io example.org/spiffe":   "admission",
	},
	"examples/ca/caconfig/config.go": {
		": list namespaces":                     "-root-configmap",
		": watch namespaces":                    "-root-configmap",
		": create configmaps":                   "-root-configmap",
		": list configmaps istio-ca-root-cert":  "-root-configmap",
		": watch configmaps istio-ca-root-cert": "-root-configmap",
		": patch configmaps istio-ca-root-cert": "-root-configmap",
	},
	"sds/kubesecrets/kubesecrets.go": {
		": list secrets":  "the Secrets of gateways",
		": watch secrets": "and their changes",
		": create subjectaccessreviews.authorization.k8s.io": "Source.Resolve: whether the caller may read the Secret",
	},
}

// blocks are the parts of a file that may be objects of Kubernetes.
var blocks = map[string]*regexp.Regexp{
	".yaml": regexp.MustCompile(`(?s).+`),
	".md":   regexp.MustCompile("(?s)(?:```yaml\n.*?\n```|(?:^|\n)(?:    .*?(?:\n|$))+)"),
	".go":   regexp.MustCompile("(?:(?m:^//\t.*\n)+|(?s)`[^`]*`)"),
}

// yamlOf returns the objects and rules in a file.
func yamlOf(t *testing.T, name string, data []byte) string {
	t.Helper()
	ext := filepath.Ext(name)
	if ext == ".yaml" && bytes.Contains(data, []byte("${")) {
		m := program.Manifest{Text: regexp.MustCompile(`(?m)^(#   [a-z-]+=)\?`).ReplaceAllString(string(data), "${1}value")}
		var out bytes.Buffer
		require.NoError(t, m.Print(&out), name)
		return out.String()
	}
	var found []string
	for _, block := range blocks[ext].FindAllString(string(data), -1) {
		for text := range strings.SplitSeq(block, "\n---\n") {
			if !strings.Contains(text, "rules:") && !strings.Contains(text, "roleRef:") {
				continue
			}
			text = strings.Trim(strings.TrimPrefix(text, "```yaml"), "`\n")
			text = regexp.MustCompile(`(?m)^(?://\t|    )`).ReplaceAllString(text, "")
			found = append(found, regexp.MustCompile(`%(?:\[\d+\])?s`).ReplaceAllString(text, "VALUE"))
		}
	}
	return strings.Join(found, "\n---\n")
}

// TestRights: each right that a text of the tree gives, or asks an operator for, is in the table with the code that uses it. One that is missing,
// and one that is wider, by a name, a namespace, a verb or an account, is a failure.
func TestRights(t *testing.T) {
	t.Parallel()
	got := map[string]map[string]bool{}
	tree := os.DirFS("../../..")
	require.NoError(t, fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if base := d.Name(); d.IsDir() && name != "." && (base == "testdata" || base[0] == '.' || base[0] == '_') {
			return fs.SkipDir
		}
		if d.IsDir() || blocks[filepath.Ext(name)] == nil || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		data, err := fs.ReadFile(tree, name)
		if err != nil || !bytes.Contains(data, []byte("apiGroups:")) && !bytes.Contains(data, []byte("roleRef:")) || strings.HasPrefix(name, "internal/") {
			return err
		}
		all := must.Get(kubetest.Rights(yamlOf(t, name, data)))(t, name)
		if len(all) == 0 {
			return nil // a webhook has apiGroups, too
		}
		got[name] = map[string]bool{}
		for who, list := range all {
			for _, r := range list {
				got[name][who+": "+r.String()] = true
			}
		}
		return nil
	}))
	for _, name := range slices.Sorted(maps.Keys(rights)) {
		assert.ElementsMatch(t, slices.Collect(maps.Keys(rights[name])), slices.Collect(maps.Keys(got[name])), name)
		for right, why := range rights[name] {
			assert.NotEmpty(t, why, "%s: %s", name, right)
		}
		delete(got, name)
	}
	assert.Empty(t, got, "files with rights that are not in the table")
}
