package deptest

import (
	"fmt"
	"go/ast"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

// The floors of the house, from the top. A package imports its own floor and those below, and a kit imports all of them.
const (
	systems = iota
	delivery
	core
	ground
	exp
	kits
)

var floors = []struct {
	id, title, text string
	packages        []string
}{
	systems: {"systems", "For one system", "Each puts other packages together for one system. They are best effort.", []string{
		"pki/caserver/podcert", "sds/istioagent", "sds/workloadagent",
	}},
	delivery: {"delivery", "Delivery", "What is served and asked for by gRPC, which is spoken over net/http.", []string{
		"caclient/istioca", "caclient/linkerd", "pki/caserver", "pki/caserver/istioca", "pki/caserver/linkerd",
		"sds", "sds/kubesecrets", "sds/sdssource", "sds/xdsproxy", "spiffe/workloadapi", "spiffe/workloadserver",
	}},
	core: {"core", "Core", "The standard library, go-jose for tokens, x/crypto for ASN.1, fsnotify for files.", []string{
		"authn", "authn/athenz", "authn/athenz/athenzname", "authn/jwt", "authn/kube", "authn/tokensource",
		"caclient", "caclient/athenz", "caclient/googlecas", "caclient/local", "caclient/stepca", "caclient/vault",
		"pki", "pki/ca", "pki/ca/auditlog", "pki/ca/kubesecret", "pki/ca/sqlstore", "pki/linkerdname", "pki/ra", "secretcache",
		"spiffe/federation", "spiffe/filesink", "spiffe/filesource", "spiffe/health", "spiffe/jwtsvid", "spiffe/source", "spiffe/spiffetls",
		"spiffe/unixsocket",
	}},
	ground: {"ground", "Ground", "The standard library alone.", []string{"spiffe", "spiffe/report"}},
	exp: {"exp", "Experiments", "They may change or go with any version.", []string{
		"spiffe/exp/broker", "spiffe/exp/witsvid",
	}},
	kits: {"kits", "Kits for tests", "They are best effort.", []string{
		"caclient/caclienttest", "caclient/caclienttest/custodiantest", "sds/sdstest", "spiffe/spiffetest", "spiffe/spiffetest/federationtest", "spiffe/spiffetest/workloadapitest",
	}},
}

// stable are the packages whose names stay.
var stable = []string{"caclient", "pki", "sds", "secretcache", "spiffe", "spiffe/spiffetls", "spiffe/workloadapi"}

// TestFloors: each package that a user can import has a floor, and imports no higher one.
func TestFloors(t *testing.T) {
	t.Parallel()
	floor := make(map[string]int)
	for i, f := range floors {
		assert.True(t, slices.IsSorted(f.packages), f.id)
		for _, name := range f.packages {
			floor[name] = i
			_, ok := packages(t)[module+"/"+name]
			assert.True(t, ok, "there is no package %s", name)
		}
	}
	doc := must.Get(os.ReadFile(filepath.Join(rootDir, "doc.go")))(t)
	for _, p := range ours(t) {
		name := p.name()
		if name == "" || among(name, "examples") || slices.Contains(strings.Split(name, "/"), "internal") {
			continue
		}
		at, ok := floor[name]
		if !assert.True(t, ok, "%s has no floor", name) {
			continue
		}
		assert.True(t, regexp.MustCompile(`(?m)^//\t`+regexp.QuoteMeta(name)+` `).Match(doc), "doc.go does not list %s", name)
		for _, imp := range p.Imports {
			below, ok := floor[strings.TrimPrefix(imp, module+"/")]
			if ok && at != exp && at != kits {
				assert.GreaterOrEqual(t, below, at, "%s, of the %s, imports %s, of the %s", name, floors[at].id, imp, floors[below].id)
				assert.True(t, below < exp || below == exp && at == systems, "%s imports %s", name, imp) // best effort, too
			}
		}
	}
}

var link = regexp.MustCompile(`\[([\w.]+)\]`) // of a doc comment

const pageName = "../../../examples/PACKAGES.md"

var row = regexp.MustCompile("(?m)^\\| \\[`([^`]+)`\\].*\\| ([0-9.]+|–) \\|$")

// TestPage holds examples/PACKAGES.md, which is written from the tree, against it. The sizes in it stay as they are here;
// TestWeight measures them.
func TestPage(t *testing.T) {
	t.Parallel()
	old := must.Get(os.ReadFile(pageName))(t)
	compare(t, pageName, page(t, sizes(string(old))))
}

// sizes returns the sizes in a page, by the name of the package.
func sizes(page string) map[string]string {
	cells := make(map[string]string)
	for _, m := range row.FindAllStringSubmatch(page, -1) {
		cells[m[1]] = m[2]
	}
	return cells
}

func page(t *testing.T, sizes map[string]string) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("# The packages\n\n```mermaid\nflowchart TD\n")
	for i, f := range floors {
		fmt.Fprintf(&b, "    %s[\"<b>%s</b><br/>%s\"]\n", f.id, strings.ToLower(f.title), strings.Join(f.packages, "<br/>"))
		if i > 0 && i < exp {
			fmt.Fprintf(&b, "    %s --> %s\n", floors[i-1].id, f.id)
		}
	}
	b.WriteString("    exp --> ground\n    kits --> delivery\n```\n\n" + `An arrow means "imports, and what is below". Packages on the same floor meet in the types of spiffe and pki, and in small
interfaces that the importing package declares. The names of these packages are stable: ` + list(stable) + `.

The directories, kits aside, import each other in one direction alone:

` + "```mermaid\nflowchart TD\n")
	for _, edge := range slices.SortedFunc(maps.Keys(betweenDirectories(t)), func(a, b [2]string) int { return slices.Compare(a[:], b[:]) }) {
		fmt.Fprintf(&b, "    %s --> %s\n", edge[0], edge[1])
	}
	b.WriteString("```\n" + `
The programs in this directory are no packages for import, and on no floor: quickstart, service and grpc import packages
on these floors alone, and the others have packages of their own and internal ones.

The tables say what each package imports of ours, which modules it links beside the standard library, and the size in
10⁶ bytes of a stripped program that uses it (linux/amd64, Go 1.26; a program that only gets an https URL with net/http
has 5.9). The page is written from the tree by ` + "`go -C internal/checks test ./deptest -update`" + `, and with ` + "`-long`" + ` its sizes, too.
`)
	for _, f := range floors {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n\n| package | what it does | imports | links | program |\n|---|---|---|---|--:|\n", f.title, f.text)
		for _, name := range f.packages {
			p := packages(t)[module+"/"+name]
			first := strings.TrimSuffix(p.Doc, ".")
			if _, after, ok := strings.Cut(first, "Package "+filepath.Base(name)+" "); ok {
				first = after
			}
			first = link.ReplaceAllString(first, "$1")
			size := sizes[name]
			if size == "" {
				size = "–"
			}
			fmt.Fprintf(&b, "| [`%s`](../%[1]s) | %s | %s | %s | %s |\n", name, first, list(imports(p)), links(t, name), size)
		}
	}
	return b.String()
}

// imports returns what p imports of our packages that a user can import, too.
func imports(p pkg) []string {
	var names []string
	for _, imp := range p.Imports {
		if name, ok := strings.CutPrefix(imp, module+"/"); ok && !slices.Contains(strings.Split(name, "/"), "internal") {
			names = append(names, name)
		}
	}
	return names
}

func list(names []string) string {
	if len(names) == 0 {
		return "–"
	}
	return "`" + strings.Join(names, "`, `") + "`"
}

// short are the names of modules on the page.
var short = map[string]string{
	"github.com/fsnotify/fsnotify":  "fsnotify",
	"go.yaml.in/yaml/v3":            "yaml",
	"github.com/go-jose/go-jose/v4": "go-jose",
	"github.com/stretchr/testify":   "testify",
	"golang.org/x/crypto":           "x/crypto",
	"golang.org/x/sys":              "x/sys",
	"google.golang.org/protobuf":    "protobuf",
}

// links returns the modules that a program with the package links beside ours, as a cell of the page.
func links(t *testing.T, name string) string {
	t.Helper()
	mods := make(map[string]bool)
	for _, p := range reach(t, name) {
		if p.Module != nil && p.Module.Path != module {
			mods[p.Module.Path] = true
		}
	}
	var cells []string
	for m := range maps.Keys(mods) {
		if assert.NotEmpty(t, short[m], m) {
			cells = append(cells, short[m])
		}
	}
	if len(cells) == 0 {
		return "–"
	}
	slices.Sort(cells)
	return strings.Join(cells, ", ")
}

// TestReleases: go.mod names the older one of the two releases of Go that are supported, the next one is the newest, and
// CI, the workflow and the pages have these two.
func TestReleases(t *testing.T) {
	t.Parallel()
	read := func(name string) string {
		return string(must.Get(os.ReadFile(filepath.Join(root(t), filepath.FromSlash(name))))(t))
	}
	minor := regexp.MustCompile(`(?m)^go 1\.(\d+)`).FindStringSubmatch(read("go.mod"))
	require.NotNil(t, minor)
	n := must.Get(strconv.Atoi(minor[1]))(t)
	older, newest := "1."+strconv.Itoa(n), "1."+strconv.Itoa(n+1)

	assert.Regexp(t, `(?m)^older=go`+regexp.QuoteMeta(older)+`\.\d+ newest=go`+regexp.QuoteMeta(newest)+`\.\d+ `, read(".ci/run"))
	workflow := read(".github/workflows/ci.yml")
	assert.Contains(t, workflow, `go: ["`+older+`.x", "`+newest+`.x"]`)
	assert.Contains(t, workflow, `go-version: "${{ matrix.go }}"`)
	for _, page := range []string{"README.md", "RELEASING.md"} {
		assert.Contains(t, strings.Join(strings.Fields(read(page)), " "), "Go "+older+" and "+newest, page)
	}
	for _, page := range []string{"examples/MACHINE.md", "examples/NODE.md", "examples/SERVICE.md"} {
		assert.Contains(t, read(page), "Go "+older+" ", page)
	}
}

// TestAPI compares the exported names, methods and fields of all packages that a user can import, those of nested modules
// too, with api.txt. A change of the file shows in review what a release promises or takes away.
func TestAPI(t *testing.T) {
	t.Parallel()
	var names []string
	for _, s := range must.Get(parsed())(t) {
		dir := s.name[:max(0, strings.LastIndexByte(s.name, '/'))]
		if !among(dir, "examples") && !slices.Contains(strings.Split(dir, "/"), "internal") && s.file.Name.Name != "main" {
			for _, name := range exported(s.file) {
				names = append(names, dir+"."+name)
			}
		}
	}
	slices.Sort(names)
	names = slices.Compact(names) // a name can stand once for each system
	assert.Greater(t, len(names), 1000)
	compare(t, "api.txt", strings.Join(names, "\n")+"\n")
}

// exported returns the exported names of a file: "Func", "Type", "Type.Method" and "Type.Field".
func exported(file *ast.File) (names []string) {
	add := func(parts ...string) {
		if !slices.ContainsFunc(parts, func(p string) bool { return !ast.IsExported(p) }) {
			names = append(names, strings.Join(parts, "."))
		}
	}
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil {
				add(d.Name.Name)
			} else {
				add(typeName(d.Recv.List[0].Type), d.Name.Name)
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch spec := spec.(type) {
				case *ast.ValueSpec:
					for _, name := range spec.Names {
						add(name.Name)
					}
				case *ast.TypeSpec:
					add(spec.Name.Name)
					for _, member := range members(spec.Type) {
						add(spec.Name.Name, member)
					}
				}
			}
		}
	}
	return names
}

// members returns the fields of a struct, and the methods of an interface. What is embedded has the name of its type.
func members(of ast.Expr) (names []string) {
	var list *ast.FieldList
	switch of := of.(type) {
	case *ast.StructType:
		list = of.Fields
	case *ast.InterfaceType:
		list = of.Methods
	default:
		return nil
	}
	for _, field := range list.List {
		for _, name := range field.Names {
			names = append(names, name.Name)
		}
		if field.Names == nil {
			names = append(names, typeName(field.Type))
		}
	}
	return names
}

// typeName returns the name of a type without its package, pointer and type parameters.
func typeName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.StarExpr:
		return typeName(e.X)
	case *ast.SelectorExpr:
		return e.Sel.Name
	case *ast.IndexExpr:
		return typeName(e.X)
	default:
		return ""
	}
}
