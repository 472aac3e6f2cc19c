// Package deptest holds the picture of the packages: what each may import, link and weigh. There is no code to import
// here, only tests.
package deptest

import (
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

const module = "github.com/svidkit/svidkit"

var (
	update = flag.Bool("update", false, "write imports.txt and examples/PACKAGES.md again; each new line needs a reviewer")
	long   = flag.Bool("long", false, "link a program with each package, to weigh it, and build modules that import one")
)

// others are the modules of others that our code may import, with the reason.
var others = map[string]string{
	"golang.org/x/crypto/cryptobyte":             "ASN.1 built and read strictly",
	"github.com/go-jose/go-jose/v4":              "tokens: parse, verify, sign",
	"google.golang.org/protobuf":                 "wire messages",
	"github.com/fsnotify/fsnotify":               "notifications of changed files, for internal/files/follow alone",
	"github.com/rogpeppe/go-internal/testscript": "scripts of an operator's day, for internal/test/scripttest alone",
	"go.yaml.in/yaml/v3":                         "the configuration of a proxy in annotations, for sds/istioagent, and manifests, for internal/test/kubetest",
}

// forbidden is what no package links, tests and examples included.
var forbidden = []string{
	"google.golang.org/grpc", "connectrpc.com/", "github.com/envoyproxy/", "istio.io/", "k8s.io/", "github.com/linkerd/", "github.com/spiffe/",
}

// pkg is what "go list" says of a package.
type pkg struct {
	ImportPath, Doc, ForTest           string
	Standard                           bool
	Module                             *struct{ Path string }
	Imports, TestImports, XTestImports []string
}

// name returns the path of a package of ours below the module.
func (p pkg) name() string { return strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/") }

// listed returns the packages of the root module and of this one, what they and their tests import, and so on down, by
// import path. All tests share one run of "go list" in each.
var listed = sync.OnceValues(func() (map[string]pkg, error) {
	pkgs := make(map[string]pkg)
	for _, dir := range []string{"..", rootDir} {
		const fields = "ImportPath,Doc,ForTest,Standard,Module,Imports,TestImports,XTestImports"
		cmd := exec.Command("go", "list", "-deps", "-test", "-json="+fields, "./...")
		cmd.Dir, cmd.Stderr, cmd.Env = dir, os.Stderr, append(os.Environ(), "GOGC=off") // which would take a third of it
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		for d := json.NewDecoder(strings.NewReader(string(out))); ; {
			var p pkg
			if err := d.Decode(&p); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				return nil, err
			}
			if p.ForTest == "" && !strings.HasSuffix(p.ImportPath, ".test") {
				pkgs[p.ImportPath] = p // that of the root module, which has its tests, comes last
			}
		}
	}
	return pkgs, nil
})

const rootDir = "../../.."

func packages(t *testing.T) map[string]pkg {
	t.Helper()
	return must.Get(listed())(t)
}

// ours returns the packages of this module in the order of their paths.
func ours(t *testing.T) []pkg {
	t.Helper()
	var list []pkg
	for _, p := range packages(t) {
		if among(p.ImportPath, module) {
			list = append(list, p)
		}
	}
	slices.SortFunc(list, func(a, b pkg) int { return strings.Compare(a.ImportPath, b.ImportPath) })
	return list
}

// reach returns the packages that a program with the package called name links.
func reach(t *testing.T, name string) map[string]pkg {
	t.Helper()
	pkgs, reached := packages(t), make(map[string]pkg)
	var visit func(path string)
	visit = func(path string) {
		p, ok := pkgs[path]
		if _, seen := reached[path]; seen || !ok {
			return
		}
		reached[path] = p
		for _, imp := range p.Imports {
			visit(imp)
		}
	}
	visit(module + "/" + name)
	require.False(t, len(reached) == 0, "there is no package %s", name)
	return reached
}

func root(t *testing.T) string {
	t.Helper()
	return must.Get(filepath.Abs(rootDir))(t)
}

// TestImports compares what each package imports beside the standard library with imports.txt.
func TestImports(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	allowed := slices.Collect(maps.Keys(others))
	var file strings.Builder
	for _, p := range ours(t) {
		name := p.name()
		if strings.HasPrefix(name, "examples/") {
			continue // programs may import all of our packages; TestPrograms holds the rest
		}
		var imports []string
		for _, imp := range p.Imports {
			if short, ours := strings.CutPrefix(imp, module+"/"); ours {
				imports = append(imports, short)
			} else if !std(imp) {
				imports = append(imports, imp)
				assert.True(t, among(imp, allowed...), "%s imports %s, for which there is no reason in others", name, imp)
			}
		}
		for _, imp := range slices.Concat(p.TestImports, p.XTestImports) {
			ok := std(imp) || among(imp, module, "github.com/stretchr/testify") || among(imp, allowed...)
			assert.True(t, ok, "the tests of %s import %s", name, imp)
		}
		if name == "" {
			assert.Empty(t, imports, "the root is documentation only")
			continue
		}
		fmt.Fprintln(&file, strings.TrimSpace(name+": "+strings.Join(imports, " ")))
	}
	compare(t, "imports.txt", file.String())
}

// compare holds the file called name against what it should be; with -update it writes it.
func compare(t *testing.T, name, want string) {
	t.Helper()
	if *update {
		require.NoError(t, os.WriteFile(name, []byte(want), 0o644))
	}
	have := must.Get(os.ReadFile(name))(t)
	assert.Equal(t, string(have), want, "if the change is meant, run the test with -update")
}

// TestReach holds what packages link of others, through other packages too.
func TestReach(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	const cryptobyte, jose, fsnotify, sys = "golang.org/x/crypto/cryptobyte", "github.com/go-jose/go-jose/v4", "github.com/fsnotify/fsnotify", "golang.org/x/sys"
	// Of protobuf nothing but how fields are encoded. Generated messages are for tests.
	const protowire, ofIt, ofItToo = "google.golang.org/protobuf/encoding/protowire", "google.golang.org/protobuf/internal/errors", "google.golang.org/protobuf/internal/detrand"
	for _, c := range []struct{ packages, may []string }{
		{[]string{"spiffe", "spiffe/spiffetls", "spiffe/health", "spiffe/federation", "authn", "authn/kube", "authn/tokensource", "spiffe/unixsocket"}, nil},
		{[]string{"spiffe/jwtsvid", "spiffe/exp/witsvid", "authn/jwt"}, []string{jose}},
		{[]string{"caclient/stepca", "caclient/athenz", "authn/athenz/athenzname"}, []string{cryptobyte}},
		{[]string{"authn/athenz"}, []string{cryptobyte, jose}},
		{[]string{"spiffe/workloadserver"}, []string{protowire, ofIt, ofItToo}},
		{[]string{"sds", "sds/xdsproxy", "spiffe/workloadapi", "caclient/istioca", "caclient/linkerd"}, []string{protowire, ofIt, ofItToo, cryptobyte}},
		{[]string{"pki/caserver/istioca", "pki/caserver/linkerd", "caclient/caclienttest", "caclient/caclienttest/custodiantest"}, []string{protowire, ofIt, ofItToo, cryptobyte, jose, fsnotify, sys}},
		{[]string{
			"spiffe/spiffetest", "pki", "pki/ca", "pki/ca/auditlog", "pki/ca/kubesecret", "pki/ca/sqlstore", "pki/ra", "caclient", "caclient/local",
			"secretcache",
		}, []string{cryptobyte, jose, fsnotify, sys}},
	} {
		for _, name := range c.packages {
			for _, p := range reach(t, name) {
				ok := p.Standard || among(p.ImportPath, module) || among(p.ImportPath, c.may...)
				assert.True(t, ok, "%s reaches %s", name, p.ImportPath)
			}
		}
	}
}

// TestRooms holds what no import of a single package shows: authn asks who is calling and by what we prove ourselves, and
// asks no CA; and what is for tests is linked by kits alone.
func TestRooms(t *testing.T) {
	t.Parallel()
	for _, p := range ours(t) {
		name := p.name()
		if among(name, "authn") {
			for path := range reach(t, name) {
				assert.False(t, among(path, module+"/caclient", module+"/secretcache"), "%s links %s", name, path)
			}
		}
		if name == "" || among(name, "internal") || slices.Contains(floors[kits].packages, name) {
			continue
		}
		for path := range reach(t, name) {
			assert.False(t, path == "testing" || among(path, module+"/internal/test"), "%s links %s, which is for tests", name, path)
		}
	}
}

// TestPrograms: programs link no test code. A user can copy quickstart, service and grpc, as they import no internal
// package. The other programs are products.
func TestPrograms(t *testing.T) {
	t.Parallel()
	var programs, copied int
	for _, p := range ours(t) {
		name := p.name()
		if !among(name, "examples") {
			continue
		}
		programs++
		for path := range reach(t, name) {
			forTests := path == "testing" || among(path, module+"/internal/test") || slices.Contains(floors[kits].packages, strings.TrimPrefix(path, module+"/"))
			assert.False(t, forTests, "%s links %s, which is for tests", name, path)
		}
	}
	assert.Greater(t, programs, 5)
	err := filepath.WalkDir(filepath.Join(rootDir, "examples"), func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") ||
			!slices.Contains([]string{"quickstart", "service", "grpc"}, filepath.Base(filepath.Dir(path))) {
			return err
		}
		copied++
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		for _, imp := range file.Imports {
			name := must.Get(strconv.Unquote(imp.Path.Value))(t)
			ours := among(name, module) && slices.Contains(strings.Split(name, "/"), "internal")
			assert.False(t, ours, "%s imports %s, which the code of a user cannot", path, name)
		}
		return nil
	})
	require.NoError(t, err)
	assert.Greater(t, copied, 5)
}

// among reports whether imp is one of the paths, or below one.
func among(imp string, paths ...string) bool {
	return slices.ContainsFunc(paths, func(p string) bool { return imp == p || strings.HasPrefix(imp, p+"/") })
}

// TestForbidden shows that no package links what is forbidden, tests included.
func TestForbidden(t *testing.T) {
	t.Parallel()
	for path := range packages(t) {
		for _, f := range forbidden {
			assert.False(t, strings.HasPrefix(path, f), "%s is linked", path)
		}
	}
}

// TestTopLevel holds the list of directories and files at the root.
func TestTopLevel(t *testing.T) {
	t.Parallel()
	want := []string{
		"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "RELEASING.md", "SECURITY.md", "authn", "caclient", "doc.go",
		"examples", "go.mod", "go.sum", "internal", "pki", "sds", "secretcache", "spiffe",
	}
	entries := must.Get(os.ReadDir(root(t)))(t)
	var got []string
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			got = append(got, e.Name())
		}
	}
	assert.Equal(t, want, got)
}

func std(imp string) bool {
	first, _, _ := strings.Cut(imp, "/")
	return !strings.Contains(first, ".")
}

// silent has the parts that programs start without their logger, by file and type, with the reason.
var silent = map[string]string{
	"quickstart":                        "it prints what happens",
	"grpc":                              "it prints what happens",
	"agent/demo.go":                     "it prints what happens",
	"ca/caprogram/demo.go":              "it prints what happens",
	"service/demo.go":                   "it prints what happens",
	"svid/doctor.go":                    "it prints each failure",
	"svid/inspect.go":                   "it prints each failure",
	"node-proxy/workloads.go":           "it logs why a name has no certificate",
	"svid/fetch.go: workloadapi.Config": "watch sets it, and fetch prints each failure",
	"ca/caconfig/authority.go: istioca.Options":      "the server sets it",
	"ca/caconfig/cluster.go: caclient.TLSOptions":    "each failure is the error of a request",
	"workload-agent/ca.go: workloadagent.Config":     "serve sets it",
	"ca/caprogram/operator.go: caconfig.OpenOptions": "a command ends with its failure",
	"service/main.go: workloadapi.Config":            "one of two checks an address alone",
	"athenz-agent/agent.go: caclient.Endpoint":       "the agent sets it",
}

// source is a file of the tree that is no test.
type source struct {
	name, text string
	file       *ast.File
}

// parsed returns the sources outside testdata in the order of their names. All tests share it.
var parsed = sync.OnceValues(func() (all []source, err error) {
	tree := os.DirFS(rootDir)
	return all, fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err == nil && d.IsDir() && (d.Name() == "testdata" || d.Name() == ".git"):
			return fs.SkipDir
		case err != nil || d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go"):
			return err
		}
		text, err := fs.ReadFile(tree, name)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, text, parser.SkipObjectResolution)
		all = append(all, source{name, string(text), file})
		return err
	})
})

// TestProgramsLog: each part of the library that a program starts has the program's logger, if it can have one.
func TestProgramsLog(t *testing.T) {
	t.Parallel()
	loggers := map[string]bool{} // by import path and type
	walk := func(dir string, do func(path string, file *ast.File)) {
		for _, s := range must.Get(parsed())(t) {
			if path, ok := strings.CutPrefix(s.name, dir); ok {
				do(path, s.file)
			}
		}
	}
	walk("", func(path string, file *ast.File) {
		ast.Inspect(file, func(n ast.Node) bool {
			if spec, ok := n.(*ast.TypeSpec); ok {
				if s, ok := spec.Type.(*ast.StructType); ok {
					for _, f := range s.Fields.List {
						if len(f.Names) == 1 && f.Names[0].Name == "Logger" {
							loggers[module+"/"+filepath.ToSlash(filepath.Dir(path))+"."+spec.Name.Name] = true
						}
					}
				}
			}
			return true
		})
	})
	require.Greater(t, len(loggers), 30)
	used, found := map[string]bool{}, 0
	walk("examples/", func(path string, file *ast.File) {
		imports := map[string]string{}
		for _, imp := range file.Imports {
			name, _ := strconv.Unquote(imp.Path.Value)
			short := name[strings.LastIndexByte(name, '/')+1:]
			if imp.Name != nil {
				short = imp.Name.Name
			}
			imports[short] = name
		}
		ast.Inspect(file, func(n ast.Node) bool {
			lit, ok := n.(*ast.CompositeLit)
			if !ok {
				return true
			}
			sel, ok := lit.Type.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			pkg, _ := sel.X.(*ast.Ident)
			if pkg == nil || !loggers[imports[pkg.Name]+"."+sel.Sel.Name] {
				return true
			}
			found++
			for _, e := range lit.Elts {
				if kv, ok := e.(*ast.KeyValueExpr); ok {
					if key, ok := kv.Key.(*ast.Ident); ok && key.Name == "Logger" {
						return true
					}
				}
			}
			what := path + ": " + pkg.Name + "." + sel.Sel.Name
			program, _, _ := strings.Cut(path, "/")
			for _, known := range []string{program, path, what} {
				if _, ok := silent[known]; ok {
					used[known] = true
					return true
				}
			}
			assert.Fail(t, what+" has no Logger: its failures are silent")
			return true
		})
	})
	assert.Greater(t, found, 20)
	for known := range silent {
		assert.True(t, used[known], "%s has its logger: take it out of the list", known)
	}
}

// directories are those of the library. What is in one and its internal packages count; kits do not.
var directories = []string{"authn", "caclient", "pki", "sds", "secretcache", "spiffe"}

// left are the pairs of directories that import each other, and may not for long.
var left []string

// betweenDirectories returns, for each directory that imports another, the imports, as "package -> package".
func betweenDirectories(t *testing.T) map[[2]string][]string {
	t.Helper()
	imports := map[[2]string][]string{}
	for _, p := range ours(t) {
		from, _, _ := strings.Cut(p.name(), "/")
		if !slices.Contains(directories, from) || slices.Contains(floors[kits].packages, p.name()) {
			continue
		}
		for _, imp := range p.Imports {
			path, ours := strings.CutPrefix(imp, module+"/")
			if to, _, _ := strings.Cut(path, "/"); ours && to != from && slices.Contains(directories, to) {
				edge := [2]string{from, to}
				imports[edge] = append(imports[edge], p.name()+" -> "+path)
			}
		}
	}
	return imports
}

// TestDirectories: of two directories of the library, one at most imports the other.
func TestDirectories(t *testing.T) {
	t.Parallel()
	imports, found := betweenDirectories(t), map[string]bool{}
	for edge, there := range imports {
		back := imports[[2]string{edge[1], edge[0]}]
		if edge[0] > edge[1] || back == nil {
			continue
		}
		pair := edge[0] + " and " + edge[1]
		found[pair] = true
		assert.Contains(t, left, pair, "they import each other:\n%s\n\n%s", strings.Join(there, "\n"), strings.Join(back, "\n"))
	}
	assert.ElementsMatch(t, left, slices.Collect(maps.Keys(found)), "take what is mended out of the list")
}

var (
	metricName = regexp.MustCompile(`^[a-z*][a-z0-9*]*(_[a-z0-9*]+)*$`)
	metricHelp = regexp.MustCompile(`^[A-Z][^\n]* [^\n]*\.$`)
)

type metric struct{ name, help, pkg string }

// TestMetrics writes the table of examples/METRICS.md: a metric is a name beside its help, as arguments or in a table. A
// function that completes names has their common beginning. What is not constant is a star.
func TestMetrics(t *testing.T) {
	t.Parallel()
	var all []metric
	for _, s := range must.Get(parsed())(t) {
		if among(s.name, "internal/test", "internal/checks", "internal/peers", "internal/compare") {
			continue
		}
		uses, consts := strings.Contains(s.text, "svidkit/internal/metrics\""), constsOf(s.file)
		for _, decl := range s.file.Decls {
			for _, m := range metricsOf(decl, consts, path.Dir(s.name)) {
				if uses || strings.HasPrefix(m.name, "svidkit_") {
					all = append(all, m)
				}
			}
		}
	}
	slices.SortFunc(all, func(a, b metric) int { return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.pkg, b.pkg)) })
	require.Greater(t, len(all), 50)
	var table strings.Builder
	table.WriteString("\n| metric | meaning | package |\n|---|---|---|\n")
	for _, m := range slices.Compact(all) {
		table.WriteString(fmt.Sprintf("| `%s` | %s | [`%s`](../%s) |\n", m.name, m.help, m.pkg, m.pkg))
	}
	programtest.Section(t, *update, "../../../examples/METRICS.md", "<!-- metrics -->", "<!-- /metrics -->", table.String())
}

func metricsOf(decl ast.Decl, consts map[string]string, pkg string) []metric {
	var found []metric
	prefix := ""
	ast.Inspect(decl, func(n ast.Node) bool {
		var list []ast.Expr
		switch n := n.(type) {
		case *ast.BinaryExpr:
			if s := textOf(n.X, consts); strings.HasSuffix(s, "_") && !strings.Contains(s, "*") {
				prefix = s
			}
		case *ast.CallExpr:
			list = n.Args
		case *ast.CompositeLit:
			list = n.Elts
		}
		for i := range max(len(list)-1, 0) {
			name, help := textOf(list[i], consts), textOf(list[i+1], consts)
			if metricName.MatchString(name) && metricHelp.MatchString(help) {
				found = append(found, metric{name, strings.ReplaceAll(help, "*", "…"), pkg})
			}
		}
		return true
	})
	for i := range found {
		if first, _, _ := strings.Cut(prefix, "_"); !strings.HasPrefix(found[i].name, first+"_") {
			found[i].name = prefix + found[i].name
		}
	}
	return slices.DeleteFunc(found, func(m metric) bool { return strings.HasPrefix(m.name, "*") })
}

// textOf returns the text of an expression, with * for each part that is not constant.
func textOf(e ast.Expr, consts map[string]string) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		if s, err := strconv.Unquote(e.Value); err == nil {
			return s
		}
	case *ast.Ident:
		if s, ok := consts[e.Name]; ok {
			return s
		}
	case *ast.BinaryExpr:
		return textOf(e.X, consts) + textOf(e.Y, consts)
	}
	return "*"
}

// constsOf returns the constant texts of a file.
func constsOf(f *ast.File) map[string]string {
	consts := map[string]string{}
	ast.Inspect(f, func(n ast.Node) bool {
		if v, ok := n.(*ast.ValueSpec); ok && len(v.Values) == len(v.Names) {
			for i, name := range v.Names {
				if s := textOf(v.Values[i], consts); !strings.Contains(s, "*") {
					consts[name.Name] = s
				}
			}
		}
		return true
	})
	return consts
}
