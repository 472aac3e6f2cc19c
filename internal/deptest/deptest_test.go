// Package deptest holds the picture of the packages: what each may import, and why. There is no
// code to import here, only tests.
package deptest

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const module = "github.com/svidkit/svidkit"

// rules says what each package imports beside the standard library, each with its reason. A new
// import is a new line here, which a reviewer sees. Test files may import anything of ours, and
// testify.
var rules = map[string]map[string]string{
	"internal/certpem":     {},
	"internal/certchain":   {"internal/certpem": "the error for what is too large"},
	"internal/memconn":     {},
	"internal/strictjson":  {},
	"internal/conformance": {},
	"internal/faulty":      {},
	"internal/flock":       {},
	"internal/unixsocket":  {"internal/flock": "two that find the same dead socket"},
	"internal/jws":         {"internal/strictjson": "headers and keys are strict JSON"},
	"internal/kube":        {},
	"internal/kubetest":    {},
	"internal/limit":       {},
	"internal/metrics":     {},
	"internal/redirect":    {},
	"internal/renew":       {},
	"internal/hostilecsr": {
		"golang.org/x/crypto/cryptobyte":      "ASN.1 that crypto/x509 would not write",
		"golang.org/x/crypto/cryptobyte/asn1": "tags for cryptobyte",
	},
	"spiffe": {
		"internal/certpem":    "PEM with limits, shared with pki",
		"internal/strictjson": "bundle documents are refused for what encoding/json lets pass",
		"internal/jws":        "the keys of tokens in bundle documents",
	},
	"spiffe/jwtsvid": {
		"spiffe":              "identities and bundles",
		"internal/jws":        "signatures, shared with witsvid",
		"internal/redirect":   "where a token may go, shared with witsvid",
		"internal/strictjson": "claims are strict JSON",
	},
	"spiffe/witsvid": {
		"spiffe":              "identities and bundles",
		"internal/jws":        "signatures, shared with jwtsvid",
		"internal/redirect":   "where a token may go, shared with jwtsvid",
		"internal/strictjson": "claims are strict JSON",
		"internal/certpem":    "the private key that comes with a WIT-SVID",
	},
	"spiffe/federation": {"spiffe": "bundles, and the verifier of endpoints", "internal/renew": "when is the next fetch"},
	"spiffe/workloadapi": {
		"spiffe":                                "identities and bundles",
		"internal/unixsocket":                   "care for the socket, as in sds",
		"internal/strictjson":                   "JWT bundles without their use, and the claims of a WIT-SVID",
		"internal/jws":                          "what an issuer of WIT-SVIDs returns, and its keys as JWKs",
		"internal/grpchttp":                     "gRPC over net/http: every workload links this package, and connect with generated messages is 2 MB of it",
		"internal/wire/workloadapi/descriptors": "what server reflection hands out, as bytes",
		"google.golang.org/protobuf/encoding/protowire": "messages by hand, within limits and without protobuf's reflection",
	},
	"internal/grpchttp":                     {},
	"internal/wire/workloadapi/descriptors": {},
	"internal/wire/workloadapi": {
		"google.golang.org/protobuf/reflect/protoreflect": "generated code",
		"google.golang.org/protobuf/runtime/protoimpl":    "generated code",
		"google.golang.org/protobuf/types/known/structpb": "claims of a validated token",
	},
	"spiffe/spiffetest/federationtest": {
		"internal/faulty": "the fault dial", "internal/memconn": "connections inside synctest bubbles",
		"spiffe": "bundles", "spiffe/federation": "the endpoint that it breaks", "spiffe/spiffetest": "the CA behind it",
	},
	"spiffe/spiffetest/workloadapitest": {
		"internal/faulty": "the fault dial", "internal/memconn": "connections inside synctest bubbles",
		"spiffe": "identities", "spiffe/jwtsvid": "tokens", "spiffe/workloadapi": "the server that it breaks", "spiffe/spiffetest": "the CA behind it",
	},
	"spiffe/spiffetls": {"spiffe": "what is presented and verified"},
	"spiffe/spiffetest": {
		"spiffe": "what it mints",
		"pki":    "a test CA answers the CSRs of pki",
	},
	"pki": {
		"internal/certpem":                    "PEM with limits, shared with spiffe",
		"spiffe":                              "the identities that certificates carry",
		"golang.org/x/crypto/cryptobyte":      "ASN.1 built and read strictly",
		"golang.org/x/crypto/cryptobyte/asn1": "tags for cryptobyte",
	},
	"pki/ca": {
		"spiffe": "identities and bundles", "pki": "what it signs with", "spiffe/jwtsvid": "tokens",
		"internal/limit": "limits, shared with pki/ra", "internal/flock": "one writer of a folder",
	},
	"pki/ca/auditlog":   {"internal/flock": "processes that share a file", "internal/strictjson": "lines are read strictly", "pki/ca": "the records it keeps", "spiffe": "identities in records"},
	"pki/ca/kubesecret": {"internal/kube": "the API server", "pki/ca": "the store it is"},
	"pki/ra": {
		"spiffe": "identities and bundles", "pki": "CSRs and certificates", "pki/ca": "the words of requests, errors and audit records",
		"internal/kube": "the API server", "internal/limit": "limits, shared with pki/ca", "internal/certchain": "limits on an answer, shared with caclient",
		"golang.org/x/crypto/cryptobyte": "the attributes of a CSR", "golang.org/x/crypto/cryptobyte/asn1": "tags for cryptobyte",
	},
	"internal/carpc": {
		"connectrpc.com/connect":                        "gRPC over net/http",
		"google.golang.org/protobuf/encoding/protowire": "when to come back",
		"google.golang.org/protobuf/types/known/anypb":  "when to come back",
	},
	"internal/wire/istioca": {
		"google.golang.org/protobuf/reflect/protoreflect": "generated code",
		"google.golang.org/protobuf/runtime/protoimpl":    "generated code",
		"google.golang.org/protobuf/types/known/structpb": "metadata of a request",
	},
	"pki/caserver/istioca": {
		"authn": "who is asking", "internal/carpc": "gRPC, shared with linkerd", "internal/certchain": "limits on a signer's answer", "internal/metrics": "the counters", "internal/wire/istioca": "the path",
		"pki": "CSRs and PEM", "pki/ca": "requests and kinds of errors", "spiffe": "identities and bundles",
		"connectrpc.com/connect":                        "gRPC over net/http",
		"google.golang.org/protobuf/encoding/protowire": "requests are read without building them, tails are encoded once",
		"google.golang.org/protobuf/proto":              "details of a status",
	},
	"internal/wire/linkerd": {
		"google.golang.org/protobuf/reflect/protoreflect":    "generated code",
		"google.golang.org/protobuf/runtime/protoimpl":       "generated code",
		"google.golang.org/protobuf/types/known/timestamppb": "the end of a certificate",
	},
	"pki/caserver/linkerd": {
		"authn": "the error for a token that is refused", "internal/carpc": "gRPC, shared with istioca", "internal/certchain": "limits on an answer", "internal/metrics": "its metrics", "internal/wire/linkerd": "its messages",
		"pki": "CSRs", "pki/ca": "requests and their errors", "spiffe": "trust anchors, and IDs in policies",
		"connectrpc.com/connect":                             "gRPC over net/http",
		"google.golang.org/protobuf/proto":                   "messages",
		"google.golang.org/protobuf/types/known/timestamppb": "the end of a certificate",
	},
	"caclient/istioca": {
		"caclient": "the interface and codes", "internal/certchain": "roots in a chain", "internal/wire/istioca": "its messages", "pki": "CSRs and PEM",
		"spiffe": "bundles", "connectrpc.com/connect": "gRPC over net/http",
		"google.golang.org/protobuf/encoding/protowire":   "RetryInfo",
		"google.golang.org/protobuf/types/known/structpb": "metadata",
	},
	"caclient":       {"internal/certchain": "limits on an answer, shared with secretcache", "spiffe": "identities and bundles", "pki": "CSRs"},
	"caclient/local": {"spiffe": "identities and bundles", "pki": "CSRs", "pki/ca": "the authority it asks", "caclient": "the interface it meets"},
	"secretcache":    {"internal/certchain": "limits on an answer, shared with caclient", "internal/renew": "when is the next attempt", "spiffe": "identities and bundles", "pki": "keys, CSRs and secrets"},
	"authn":          {"spiffe": "the verified peer"},
	"authn/kube": {
		"authn": "the callers it proves", "spiffe": "their IDs", "internal/kube": "the API server",
		"internal/jws": "when a token ends", "internal/strictjson": "its claims",
	},
	"internal/wire/envoysds": {
		"google.golang.org/protobuf/reflect/protoreflect": "generated code",
		"google.golang.org/protobuf/runtime/protoimpl":    "generated code",
		"google.golang.org/protobuf/types/known/anypb":    "resources travel as Any",
	},
	"sds": {
		"pki":                    "the secrets it serves",
		"internal/unixsocket":    "care for the socket, as in spiffe/workloadapi",
		"internal/wire/envoysds": "its messages",
		"connectrpc.com/connect": "gRPC over net/http",
		"google.golang.org/protobuf/encoding/protojson":    "the REST form of FetchSecrets",
		"google.golang.org/protobuf/encoding/protowire":    "responses are encoded once and shared",
		"google.golang.org/protobuf/proto":                 "messages",
		"google.golang.org/protobuf/reflect/protoreflect":  "resolving the published type URL to our message",
		"google.golang.org/protobuf/reflect/protoregistry": "resolving the published type URL to our message",
	},
	"internal/envoytest": {},
}

// testRules says what the tests of a package import beyond testify, ours and what its package imports.
var testRules = map[string]map[string]string{
	"spiffe/jwtsvid":    {"github.com/go-jose/go-jose/v4": "an independent judge of tokens"},
	"internal/grpchttp": {"connectrpc.com/connect": "an independent peer on both sides"},
}

// kept out of the whole tree, tests and examples included; see doc.go.
var forbidden = []string{
	"google.golang.org/grpc", "github.com/envoyproxy/", "istio.io/", "k8s.io/", "github.com/linkerd/", "github.com/spiffe/",
}

type pkg struct {
	ImportPath   string
	Standard     bool
	Imports      []string
	TestImports  []string
	XTestImports []string
}

func list(t *testing.T, args ...string) []pkg {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-json=ImportPath,Standard,Imports,TestImports,XTestImports"}, args...)...)
	cmd.Dir = root(t)
	out, err := cmd.Output()
	require.NoError(t, err, "go list")
	var pkgs []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs
		} else {
			require.NoError(t, err)
		}
		pkgs = append(pkgs, p)
	}
}

func root(t *testing.T) string {
	t.Helper()
	dir, err := filepath.Abs("../..")
	require.NoError(t, err)
	return dir
}

// TestImports holds what each package imports directly.
func TestImports(t *testing.T) {
	t.Parallel()
	imports := map[string][]string{}
	for _, p := range list(t, "./...") {
		name := strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/")
		imports[name] = p.Imports
		if strings.HasPrefix(name, "examples/") {
			continue // programs may use all of ours; TestForbidden holds the rest
		}
		allowed, ok := rules[name]
		if !ok && len(p.Imports) > 0 {
			t.Errorf("package %q has no line in rules: say what it may import and why", name)
			continue
		}
		for _, imp := range p.Imports {
			if short := strings.TrimPrefix(imp, module+"/"); !std(imp) && allowed[short] == "" {
				t.Errorf("%s imports %s: not in rules; if it has to, add it with the reason", name, short)
			}
		}
		for _, imp := range slices.Concat(p.TestImports, p.XTestImports) {
			ok := std(imp) || strings.HasPrefix(imp, module) || strings.HasPrefix(imp, "github.com/stretchr/testify/")
			for a := range allowed { // and what its package has to do with anyway
				ok = ok || !std(a) && strings.HasPrefix(imp, repository(a))
			}
			for a := range testRules[name] {
				ok = ok || strings.HasPrefix(imp, a)
			}
			assert.True(t, ok, "the tests of %s import %s", name, imp)
		}
	}
	assert.Empty(t, imports[""], "the root is documentation only")
	for name, allowed := range rules {
		have, ok := imports[name]
		assert.True(t, ok, "rules has a line for %s, which does not exist", name)
		for imp := range allowed {
			used := slices.Contains(have, imp) || slices.Contains(have, module+"/"+imp)
			assert.True(t, used, "rules lets %s import %s, which it does not", name, imp)
		}
	}
}

// TestCore shows that no package of the core reaches connect or protobuf, even indirectly.
func TestCore(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		"spiffe", "spiffe/spiffetls", "spiffe/jwtsvid", "spiffe/witsvid", "spiffe/federation", "spiffe/spiffetest", "pki", "pki/ca", "pki/ca/auditlog", "pki/ca/kubesecret", "pki/ra", "caclient", "caclient/local", "secretcache", "authn", "authn/kube",
	} {
		for _, p := range list(t, "-deps", "./"+name) {
			ok := p.Standard || strings.HasPrefix(p.ImportPath, module) || strings.HasPrefix(p.ImportPath, "golang.org/x/crypto/cryptobyte")
			assert.True(t, ok, "%s reaches %s; the core takes the standard library and x/crypto/cryptobyte", name, p.ImportPath)
		}
	}
}

// TestWorkloadAPI shows that a workload links neither connect nor, beyond how bytes are read and written,
// protobuf. They are larger than the rest of a small program. Tests have both, as judges and peers.
func TestWorkloadAPI(t *testing.T) {
	t.Parallel()
	for _, p := range list(t, "-deps", "./spiffe/workloadapi") {
		ok := p.Standard || strings.HasPrefix(p.ImportPath, module) || slices.Contains([]string{
			"google.golang.org/protobuf/encoding/protowire",
			"google.golang.org/protobuf/internal/errors", "google.golang.org/protobuf/internal/detrand", // of protowire
		}, p.ImportPath)
		assert.True(t, ok, "spiffe/workloadapi reaches %s", p.ImportPath)
		assert.NotEqual(t, module+"/internal/wire/workloadapi", p.ImportPath, "the generated messages are for tests")
	}
}

// TestForbidden shows that what doc.go keeps out is not linked by anything, tests included.
func TestForbidden(t *testing.T) {
	t.Parallel()
	for _, p := range list(t, "-deps", "-test", "./...") {
		for _, f := range forbidden {
			assert.False(t, strings.HasPrefix(p.ImportPath, f), "%s is linked", p.ImportPath)
		}
	}
}

// TestTopLevel holds the list of folders and files that a visitor sees first.
func TestTopLevel(t *testing.T) {
	t.Parallel()
	want := []string{
		"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md", "authn", "caclient", "doc.go",
		"examples", "go.mod", "go.sum", "internal", "pki", "sds", "secretcache", "spiffe",
	}
	entries, err := os.ReadDir(root(t))
	require.NoError(t, err)
	var got []string
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			got = append(got, e.Name())
		}
	}
	assert.Equal(t, want, got)
}

// TestConsumer builds a throw-away module that imports one package of ours and looks at what that
// adds to its go.mod: for spiffe, one line, which is ours.
func TestConsumer(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("builds other modules")
	}
	for _, c := range []struct {
		imports string
		want    []string
	}{
		{"spiffe", []string{module}},
		{"spiffe/spiffetls", []string{module}},
		{"secretcache", []string{module, "golang.org/x/crypto"}},
	} {
		t.Run(c.imports, func(t *testing.T) {
			t.Parallel()
			assert.Equal(t, c.want, Consumer(t, c.imports))
		})
	}
}

// Consumer returns the modules that the tidied go.mod of a program requires that imports only the
// given package of ours.
func Consumer(t *testing.T, imports string) []string {
	t.Helper()
	dir := t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	write("go.mod", "module consumer.test\n\ngo 1.26.0\n\nrequire "+module+" v0.0.0\n\nreplace "+module+" => "+root(t)+"\n")
	write("main.go", "package main\n\nimport _ \""+module+"/"+imports+"\"\n\nfunc main() {}\n")
	run := func(args ...string) string {
		cmd := exec.Command("go", args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOWORK=off")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "go %s: %s", strings.Join(args, " "), out)
		return string(out)
	}
	run("mod", "tidy")
	run("build", "-o", filepath.Join(dir, "consumer"), ".")
	var mod struct{ Require []struct{ Path string } }
	require.NoError(t, json.Unmarshal([]byte(run("mod", "edit", "-json")), &mod))
	var paths []string
	for _, r := range mod.Require {
		paths = append(paths, r.Path)
	}
	slices.Sort(paths)
	slices.SortFunc(paths, func(a, b string) int { // ours first
		return strings.Compare(strings.Replace(a, module, "", 1), strings.Replace(b, module, "", 1))
	})
	return paths
}

// repository is the beginning of an import path that names a repository, closely enough.
func repository(imp string) string {
	n := 2
	if strings.HasPrefix(imp, "github.com/") {
		n = 3
	}
	parts := strings.Split(imp, "/")
	return strings.Join(parts[:min(len(parts), n)], "/")
}

func std(imp string) bool {
	first, _, _ := strings.Cut(imp, "/")
	return !strings.Contains(first, ".")
}
