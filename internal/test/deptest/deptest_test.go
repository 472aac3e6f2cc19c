// Package deptest holds the picture of the packages: what each may import. There is no code to import
// here, only tests.
package deptest

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
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

var update = flag.Bool("update", false, "write imports.txt again; each new line needs a reviewer")

// others are the modules of others that our code may import, with the reason.
var others = map[string]string{
	"golang.org/x/crypto/cryptobyte": "ASN.1 built and read strictly",
	"github.com/go-jose/go-jose/v4":  "tokens: parse, verify, sign",
	"google.golang.org/protobuf":     "wire messages",
	"github.com/fsnotify/fsnotify":   "notifications of changed files, for internal/files/follow alone",
}

// forbidden is what no package links, tests and examples included.
var forbidden = []string{
	"google.golang.org/grpc", "connectrpc.com/", "github.com/envoyproxy/", "istio.io/", "k8s.io/", "github.com/linkerd/", "github.com/spiffe/",
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
	dir, err := filepath.Abs("../../..")
	require.NoError(t, err)
	return dir
}

// TestImports compares what each package imports beside the standard library with imports.txt.
func TestImports(t *testing.T) {
	t.Parallel()
	var file strings.Builder
	for _, p := range list(t, "./...") {
		name := strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/")
		if strings.HasPrefix(name, "examples/") {
			continue // programs may import all of our packages; TestForbidden holds the rest
		}
		var imports []string
		for _, imp := range p.Imports {
			if short, ours := strings.CutPrefix(imp, module+"/"); ours {
				imports = append(imports, short)
			} else if !std(imp) {
				imports = append(imports, imp)
				assert.True(t, among(imp, slices.Collect(maps.Keys(others))...), "%s imports %s, for which there is no reason in others", name, imp)
			}
		}
		for _, imp := range slices.Concat(p.TestImports, p.XTestImports) {
			ok := std(imp) || among(imp, module, "github.com/stretchr/testify") || among(imp, slices.Collect(maps.Keys(others))...)
			assert.True(t, ok, "the tests of %s import %s", name, imp)
		}
		if name == "" {
			assert.Empty(t, imports, "the root is documentation only")
			continue
		}
		fmt.Fprintln(&file, strings.TrimSpace(name+": "+strings.Join(imports, " ")))
	}
	if *update {
		require.NoError(t, os.WriteFile("imports.txt", []byte(file.String()), 0o644))
	}
	want, err := os.ReadFile("imports.txt")
	require.NoError(t, err)
	assert.Equal(t, string(want), file.String(), "if the change is meant, run the test with -update")
}

// TestReach holds what packages link of others, through other packages too.
func TestReach(t *testing.T) {
	t.Parallel()
	const cryptobyte, jose, fsnotify, sys = "golang.org/x/crypto/cryptobyte", "github.com/go-jose/go-jose/v4", "github.com/fsnotify/fsnotify", "golang.org/x/sys"
	// Of protobuf nothing but how fields are encoded. Generated messages are for tests.
	const protowire, ofIt, ofItToo = "google.golang.org/protobuf/encoding/protowire", "google.golang.org/protobuf/internal/errors", "google.golang.org/protobuf/internal/detrand"
	for _, c := range []struct{ packages, may []string }{
		{[]string{"spiffe", "spiffe/spiffetls", "spiffe/health", "spiffe/federation", "authn", "authn/kube", "authn/tokensource", "authn/unixsocket"}, nil},
		{[]string{"spiffe/jwtsvid", "spiffe/exp/witsvid", "authn/jwt"}, []string{jose}},
		{[]string{"caclient/stepca", "caclient/athenz", "pki/athenzname"}, []string{cryptobyte}},
		{[]string{"authn/athenz"}, []string{cryptobyte, jose}},
		{[]string{"spiffe/workloadserver"}, []string{protowire, ofIt, ofItToo}},
		{[]string{"sds", "sds/xdsproxy", "spiffe/workloadapi", "caclient/istioca", "caclient/linkerd"}, []string{protowire, ofIt, ofItToo, cryptobyte}},
		{[]string{"pki/caserver/istioca", "pki/caserver/linkerd", "caclient/caclienttest"}, []string{protowire, ofIt, ofItToo, cryptobyte, jose, fsnotify, sys}},
		{[]string{
			"spiffe/spiffetest", "pki", "pki/ca", "pki/ca/auditlog", "pki/ca/kubesecret", "pki/ra", "caclient", "caclient/local", "secretcache",
		}, []string{cryptobyte, jose, fsnotify, sys}},
	} {
		for _, name := range c.packages {
			for _, p := range list(t, "-deps", "./"+name) {
				ok := p.Standard || among(p.ImportPath, module) || among(p.ImportPath, c.may...)
				assert.True(t, ok, "%s reaches %s", name, p.ImportPath)
			}
		}
	}
}

// among reports whether imp is one of the paths, or below one.
func among(imp string, paths ...string) bool {
	return slices.ContainsFunc(paths, func(p string) bool { return imp == p || strings.HasPrefix(imp, p+"/") })
}

// TestForbidden shows that no package links what is forbidden, tests included.
func TestForbidden(t *testing.T) {
	t.Parallel()
	for _, p := range list(t, "-deps", "-test", "./...") {
		for _, f := range forbidden {
			assert.False(t, strings.HasPrefix(p.ImportPath, f), "%s is linked", p.ImportPath)
		}
	}
}

// TestTopLevel holds the list of folders and files at the root.
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

// TestConsumer builds a module that imports one of our packages, and compares what that adds to its
// go.mod: for spiffe, one line, which is our module.
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

// Consumer returns the modules that the tidied go.mod of a program requires if it imports only the given
// package.
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

func std(imp string) bool {
	first, _, _ := strings.Cut(imp, "/")
	return !strings.Contains(first, ".")
}
