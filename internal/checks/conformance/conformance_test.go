// Package conformance makes the pages of the ties between tests and rules, which package internal/test/conformance
// describes. There is no code to import here, only tests.
package conformance

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

var update = flag.Bool("update", false, "write the pages")

const root = "../../.."

// TestPages holds the pages against the tests as they are. It lists what has neither a test nor a reason, and ties to what
// does not exist.
func TestPages(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	tables, known := []*table(nil), map[string]bool{}
	for _, b := range books {
		tab := must.Get(b.readTable(b.embedded))(t, b.name)
		for _, id := range tab.ids() {
			known[id] = true
		}
		tables = append(tables, tab)
	}
	ties, functions := must.Get2(scan(os.DirFS(root), func(id string) bool { return known[id] }))(t)
	for _, tab := range tables {
		tab.add(ties)
		for _, p := range tab.problems(functions) {
			t.Errorf("%s: %s", tab.name, p)
		}
		want, file := tab.markdown(), filepath.Join(root, filepath.FromSlash(tab.page))
		if *update {
			require.NoError(t, os.WriteFile(file, []byte(want), 0o644))
		}
		have := must.Get(os.ReadFile(file))(t)
		if string(have) != want {
			t.Errorf("%s is stale: go -C internal/checks test ./conformance -update", tab.page)
		}
	}
	for _, tie := range ties {
		for _, id := range tie.rows {
			if !known[id] && !slices.ContainsFunc(tables, func(tab *table) bool { return tab.has(id) }) {
				t.Errorf("%s: %s is not a row", tie.where, id)
			}
		}
	}
}

// TestData: every line of the data is of use to a reader.
func TestData(t *testing.T) {
	t.Parallel()
	for _, b := range books {
		tab := must.Get(b.readTable(b.embedded))(t)
		require.NotEmpty(t, tab.rows, b.name)
		for _, r := range tab.rows {
			assert.NotContains(t, r.requirement, "|", "%s: it ends the column", r.id)
			assert.LessOrEqual(t, len(r.requirement), 110, "%s: in a few words", r.id)
			assert.Regexp(t, b.levels, r.level, r.id)
		}
	}
}

func TestExpand(t *testing.T) {
	t.Parallel()
	got := must.Get(expand("XV-09..XV-11 XV-19b ID-1"))(t)
	assert.Equal(t, []string{"XV-09", "XV-10", "XV-11", "XV-19b", "ID-1"}, got)
	got = must.Get(expand("IST-9.4-9..IST-9.4-11 LNK-1-2"))(t)
	assert.Equal(t, []string{"IST-9.4-9", "IST-9.4-10", "IST-9.4-11", "LNK-1-2"}, got)
	for _, bad := range []string{"ID", "id-1", "ID-1..", "ID-1..X5-2", "ID-2..ID-1", "ID-1b..ID-3", "ID-1,ID-2", "IST-9.4", "IST-9.4-1..IST-9.5-2", "ID-1..ID-99999999999999999999"} {
		assert.Error(t, must.Err(expand(bad)), bad)
	}
}

// What a table can have wrong is found.
func TestProblems(t *testing.T) {
	t.Parallel()
	good := map[string]string{
		"rows.tsv":    "ID-1\tMUST V\tone\nID-2\tSHOULD P\ttwo\nID-3\tfact V\tthree\n",
		"vectors.tsv": "IV-1..IV-2\tstrings\n",
		"tests.tsv":   "ID-1 IV-1..IV-2\tspiffe\tTestA TestB\n",
		"reasons.tsv": "ID-2\toperators do it\n",
	}
	spiffe := books[0]
	functions := map[string]bool{"spiffe.TestA": true, "spiffe.TestB": true}
	for _, c := range []struct {
		file, old, new string
		want           []string
	}{
		{},
		{"tests.tsv", "TestB", "TestC", []string{"tests.tsv: there is no spiffe.TestC"}},
		{"tests.tsv", "ID-1 ", "", []string{"ID-1 (MUST V: one): neither a test nor a reason"}},
		{"tests.tsv", "ID-1", "ID-9", []string{"tests.tsv: ID-9 is not a row", "ID-1 (MUST V: one): neither a test nor a reason"}},
		{"tests.tsv", "ID-1", "ID-1 ID-2", []string{"reasons.tsv: ID-2 has tests (spiffe.TestA spiffe.TestB): drop the reason"}},
		{"tests.tsv", "IV-1..IV-2", "IV-1", []string{"IV-2 (strings): no test"}},
		{"reasons.tsv", "ID-2", "ID-3", []string{"ID-2 (SHOULD P: two): neither a test nor a reason"}},
		{"reasons.tsv", "ID-2", "ID-2 ID-9", []string{"reasons.tsv: ID-9 is not a row"}},
		{"rows.tsv", "ID-3", "ID-4\tMUST V\tfour\nID-3", []string{"ID-4 (MUST V: four): neither a test nor a reason"}},
	} {
		tab := must.Get(spiffe.readTable(func(name string) (string, error) {
			if name == c.file {
				return strings.Replace(good[name], c.old, c.new, 1), nil
			}
			return good[name], nil
		}))(t)
		assert.Equal(t, c.want, tab.problems(functions), "%+v", c)
	}

	for _, c := range []struct{ file, text, want string }{
		{"rows.tsv", "ID-1\tMUST V\n", "rows.tsv:1: want 3 columns, all filled"},
		{"rows.tsv", "ID-1\tMUST V\t\n", "rows.tsv:1: want 3 columns, all filled"},
		{"rows.tsv", "ZZ-1\tMUST V\tx\n", `rows.tsv:1: "ZZ-1" belongs to no document`},
		{"rows.tsv", "ID-1\tMUST V\tx\nID-1\tMUST V\ty\n", "ID-1 is there twice"},
		{"vectors.tsv", "ID-1\tx\n", "ID-1 is there twice"},
		{"vectors.tsv", "x\tx\n", `vectors.tsv:1: "x" is not an id`},
		{"tests.tsv", "x\tx\tTestA\n", `tests.tsv:1: "x" is not an id`},
		{"reasons.tsv", "ID-1\ta\nID-1\tb\n", "reasons.tsv:2: ID-1 has two reasons"},
		{"reasons.tsv", "ID-1..ID-1\ta\n", `reasons.tsv:1: "ID-1..ID-1" is not a range`},
	} {
		_, err := spiffe.readTable(func(name string) (string, error) {
			if name == c.file {
				return c.text, nil
			}
			return good[name], nil
		})
		assert.EqualError(t, err, c.want)
	}
}

func TestScan(t *testing.T) {
	t.Parallel()
	const head = "package a\nimport (\"testing\"; \"github.com/svidkit/svidkit/internal/test/conformance\")\n"
	known := func(id string) bool { return strings.HasPrefix(id, "ID-") }
	for _, c := range []struct {
		src  string
		want string // rows and tests
	}{
		{head + `func TestA(t *testing.T) { conformance.Covers(t, "ID-1", "XX-1") }`, "[ID-1 XX-1] [a/b.TestA]"},
		{head + `func TestA(t *testing.T) { t.Run("x", func(t *testing.T) { conformance.Covers(t, "ID-1") }) }`, "[ID-1] [a/b.TestA]"},
		{head + `func FuzzA(f *testing.F) { conformance.Covers(f, "ID-1"); conformance.Covers(f, "ID-2") }`, "[ID-1] [a/b.FuzzA]; [ID-2] [a/b.FuzzA]"},
		{head + "func TestA(t *testing.T) { for _, c := range []struct{ rule string }{{\"ID-1\"}, {`ID-2`}, {\"other\"}} { conformance.Covers(t, c.rule) } }", "[ID-1 ID-2] [a/b.TestA]"},
		{head + `func TestA(t *testing.T) { _ = "ID-2"; conformance.Covers(t, "ID-1") }`, "[ID-1] [a/b.TestA]"},
		{head + `func TestA(t *testing.T) { other.Covers(t, "ID-1"); Covers(t, "ID-2"); conformance.Other(t, "ID-3") }`, ""},
		{strings.Replace(head, "; ", "; c ", 1) + `func TestA(t *testing.T) { c.Covers(t, "ID-1") }`, "[ID-1] [a/b.TestA]"},
		{"package a\nfunc TestA(t *testing.T) { conformance.Covers(t, \"ID-1\") }", ""},
		{head + `func helper(t *testing.T) { conformance.Covers(t, "ID-1") }`, "a/b/x_test.go:3:29: Covers is called in helper, which go test does not run"},
		{head + `func (s suite) TestA(t *testing.T) { conformance.Covers(t, "ID-1") }`, "a/b/x_test.go:3:38: Covers is called in TestA, which go test does not run"},
		{head + `func Testing(t *testing.T) { conformance.Covers(t, "ID-1") }`, "a/b/x_test.go:3:30: Covers is called in Testing, which go test does not run"},
		{"package 1 //" + importPath, "a/b/x_test.go:1:9: expected 'IDENT', found 1"},
	} {
		ties, _, err := scan(fstest.MapFS{
			"a/b/x_test.go":          {Data: []byte(c.src)},
			"a/b/x.go":               {Data: []byte("not Go")},
			"a/testdata/x_test.go":   {Data: []byte("not Go")},
			".git/x_test.go":         {Data: []byte("not Go")},
			"_examples/x/xy_test.go": {Data: []byte("not Go")},
		}, known)
		var got []string
		for _, tie := range ties {
			got = append(got, fmt.Sprint(tie.rows, " ", tie.tests))
		}
		if err != nil {
			got = []string{err.Error()}
		}
		assert.Equal(t, c.want, strings.Join(got, "; "), c.src)
	}

	_, functions, err := scan(fstest.MapFS{"a/x_test.go": {Data: []byte(
		"package a\nfunc TestA() {}\nfunc ExampleB() {}\nfunc helper() {}\nfunc (T) TestC() {}\nvar TestD int\n")}}, known)
	require.NoError(t, err)
	assert.Equal(t, map[string]bool{"a.TestA": true, "a.ExampleB": true}, functions)
}

func TestMarkdown(t *testing.T) {
	t.Parallel()
	tab := &table{
		book:    books[0],
		rows:    []row{{"ID-1", "MUST V", "one"}, {"ID-2", "SHOULD P", "two"}, {"ID-3", "fact", "three"}},
		vectors: []series{{[]string{"IV-1", "IV-2", "IV-3", "IV-4", "IV-5"}, "strings"}},
		ties: []tie{
			{rows: []string{"ID-1", "IV-1", "IV-2", "IV-4", "IV-5"}, tests: []string{"spiffe.TestB", "spiffe.TestA", "pki/ca.TestC"}},
			{rows: []string{"IV-3"}, tests: []string{"spiffe.TestA"}},
		},
		reasons: map[string]string{"ID-2": "operators do it"},
	}
	text := tab.markdown()
	for _, line := range []string{
		"| ID-1 | MUST V | one | `pki/ca` TestC; `spiffe` TestA, TestB |",
		"| ID-2 | SHOULD P | two | *operators do it* |",
		"| ID-3 | fact | three | |",
		"| SPIFFE ID | 3 | 1 | 1 | 1 |",
		"| IV-1, IV-2, IV-4, IV-5 | strings | `pki/ca` TestC; `spiffe` TestA, TestB |",
		"| IV-3 | strings | `spiffe` TestA |",
	} {
		assert.Contains(t, text, "\n"+line+"\n")
	}
	assert.Equal(t, "IV-1 to IV-3, IV-5, XV-19b", ranges([]string{"IV-1", "IV-2", "IV-3", "IV-5", "XV-19b"}, []string{"IV-1", "IV-2", "IV-3", "IV-4", "IV-5", "XV-19b"}))
}

const importPath = "github.com/svidkit/svidkit/internal/test/conformance"

// scan reads all test files below fsys and returns the ties of their calls of Covers, and the names
// of all functions that go test runs, as "spiffe.TestIDVectors".
func scan(fsys fs.FS, known func(id string) bool) (ties []tie, functions map[string]bool, err error) {
	files, err := testFiles(fsys)
	if err != nil {
		return nil, nil, err
	}
	functions = map[string]bool{}
	for _, f := range files {
		found, err := scanFile(f, known, functions)
		if err != nil {
			return nil, nil, err
		}
		ties = append(ties, found...)
	}
	return ties, functions, nil
}

func scanFile(f file, known func(id string) bool, functions map[string]bool) ([]tie, error) {
	covers := "" // how the file calls the package of Covers
	for _, i := range f.Imports {
		if p, err := strconv.Unquote(i.Path.Value); err == nil && p == importPath {
			covers = path.Base(importPath)
			if i.Name != nil {
				covers = i.Name.Name
			}
		}
	}
	var ties []tie
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok {
			continue
		}
		test, runs := f.test(fn)
		if runs {
			functions[test] = true
		}
		if covers == "" || fn.Body == nil {
			continue
		}
		for n := range ast.Preorder(fn.Body) {
			call, ok := n.(*ast.CallExpr)
			if !ok || !isCovers(call, covers) {
				continue
			}
			where := f.Positions.Position(call.Pos()).String()
			if !runs {
				return nil, fmt.Errorf("%s: Covers is called in %s, which go test does not run", where, fn.Name.Name)
			}
			ties = append(ties, tie{rowsOf(call, fn, known), []string{test}, where})
		}
	}
	return ties, nil
}

func isCovers(call *ast.CallExpr, pkg string) bool {
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || sel.Sel.Name != "Covers" {
		return false
	}
	x, ok := sel.X.(*ast.Ident)
	return ok && x.Name == pkg
}

// rowsOf returns the literals of the call and, if it has other arguments, all ids among the literals
// of the function.
func rowsOf(call *ast.CallExpr, fn *ast.FuncDecl, known func(id string) bool) []string {
	var rows []string
	table := false
	for _, a := range call.Args[min(1, len(call.Args)):] {
		if s, ok := literal(a); ok {
			rows = append(rows, s)
		} else {
			table = true
		}
	}
	if table {
		for n := range ast.Preorder(fn.Body) {
			if s, ok := literal(n); ok && known(s) && !slices.Contains(rows, s) {
				rows = append(rows, s)
			}
		}
	}
	return rows
}

func literal(n ast.Node) (string, bool) {
	l, ok := n.(*ast.BasicLit)
	if !ok || l.Kind != token.STRING {
		return "", false
	}
	s, err := strconv.Unquote(l.Value)
	return s, err == nil
}

// file is a test file.
type file struct {
	*ast.File
	Path      string // below the root
	Positions *token.FileSet
}

// testFiles parses all test files below the root of fsys, those of nested modules too. Directories that the go command leaves out
// are left out.
func testFiles(fsys fs.FS) ([]file, error) {
	var files []file
	err := fs.WalkDir(fsys, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if base := d.Name(); d.IsDir() && name != "." && (base == "testdata" || base[0] == '.' || base[0] == '_') {
			return fs.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(name, "_test.go") {
			return nil
		}
		src, err := fs.ReadFile(fsys, name)
		if err != nil {
			return err
		}
		if text := string(src); !strings.Contains(text, importPath) { // it has names alone
			src = []byte("package x\n")
			for _, f := range strings.Split(text, "\nfunc ")[1:] {
				if name, _, _ := strings.Cut(f, "("); name != "" && !strings.ContainsAny(name, "[ \n") {
					src = fmt.Appendf(src, "func %s() {}\n", name)
				}
			}
		}
		positions := token.NewFileSet()
		f, err := parser.ParseFile(positions, name, src, parser.SkipObjectResolution)
		files = append(files, file{f, name, positions})
		return err
	})
	return files, err
}

// test returns the name of a function of the file with the directory of its package, such as "spiffe.TestIDVectors", and
// whether go test runs it.
func (f file) test(fn *ast.FuncDecl) (name string, runs bool) {
	runs = fn.Recv == nil && slices.ContainsFunc([]string{"Test", "Fuzz", "Example", "Benchmark"}, func(p string) bool {
		rest, ok := strings.CutPrefix(fn.Name.Name, p)
		c, _ := utf8.DecodeRuneInString(rest)
		return ok && !unicode.IsLower(c)
	})
	return path.Dir(f.Path) + "." + fn.Name.Name, runs
}

const made = `This page is made from the tests by ` + "`go -C internal/checks test ./conformance -update`" + `
and a test fails when it is stale, or when a rule has neither a test nor a reason for having none.
`

const spiffeIntro = `# Conformance

Which test proves which rule. ` + made + `
The rules are those of the SPIFFE standards at commit 665a28f3253ecdce59f26f3ef29c0d6408b37c3d (1 July 2026), restated in
our words: SPIFFE-ID, X509-SVID, JWT-SVID, Trust Domain and Bundle, Federation, Workload Endpoint and Workload API, which are Stable,
and WIT-SVID with its section of the Workload API, Broker API and Broker Endpoint, which are Incubating. Whatever is built on an
Incubating document is off unless asked for.

The level is the word of the standard; † marks a rule of a document that it makes binding (an RFC, or a WIMSE draft). ADVICE is a
recommendation without such a word, REC our reading where the standard leaves room, fact a definition with nothing to demand.
The letters say whose rule it is: **P** producer, issuer or publisher; **V** validator or consumer; **C** client; **S** server; **O** operator.
`

const marksIntro = `
The mark says where a rule comes from. Those that the design states have a test, or a reason for having none: **S** the design, and
the current program agrees (also S=I); **S≠**, **S≠I** the design, and the current program does something else; **S/I**, **S/H** the
thing is in the design, its name or details in the current or an older program. The others are for interoperation, and have tests
where it depends on them: **S-era** published beside the design; **I** only in the current program; **H** only in older ones;
**N** defined nowhere.
`

const istioIntro = `# Istio's agent and CA: conformance

What Istio's agent and its CA do for identity, and which test of ours proves that we do it. ` + made + `
The rules are those of their founding designs and of Istio's master branch of 22 August 2026, restated in our words. Numbers
are those of the sections of our description.
` + marksIntro

const linkerdIntro = `# Linkerd's identity: conformance

What Linkerd's certifier and its workloads do, and which test of ours proves that we do it. ` + made + `
The rules are those of Linkerd's proposal for transparent mutual identity and of its current control plane and proxy, restated in
our words. Numbers are those of the sections of our description.
` + marksIntro

const athenzIntro = `# Athenz on Kubernetes: conformance

What Athenz does to give pods an identity, and which test of ours proves that we do it. ` + made + `
The rules are those of the design for bootstrapping service identities on Kubernetes, and of the programs since, restated in our
words. Numbers are those of the sections of our description.
` + marksIntro

// markdown returns the page.
func (t *table) markdown() string {
	var b strings.Builder
	b.WriteString(t.intro)
	tests := t.tests()
	b.WriteString("\n" + t.summary(tests))
	for _, d := range t.documents {
		fmt.Fprintf(&b, "\n## %s\n\n| row | %s | requirement | tests |\n|---|---|---|---|\n", d.title, t.columns[0])
		for _, r := range t.rows {
			if d.has(r.id) {
				fmt.Fprintf(&b, "| %s | %s | %s |%s |\n", r.id, r.level, r.requirement, t.proof(r.id, tests))
			}
		}
	}
	if len(t.vectors) == 0 {
		return b.String()
	}
	b.WriteString("\n## Test vectors\n\n| vectors | what | tests |\n|---|---|---|\n")
	for _, s := range t.vectors {
		var proofs []string // in order of appearance
		by := map[string][]string{}
		for _, id := range s.ids {
			p := t.proof(id, tests)
			if by[p] == nil {
				proofs = append(proofs, p)
			}
			by[p] = append(by[p], id)
		}
		for _, p := range proofs {
			fmt.Fprintf(&b, "| %s | %s |%s |\n", ranges(by[p], s.ids), s.what, p)
		}
	}
	return b.String()
}

// summary counts the rows that a test proves, by document.
func (t *table) summary(tests map[string][]string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "| document | rows | with tests | with a reason for none | %s |\n|---|---|---|---|---|\n", t.columns[1])
	for _, d := range t.documents {
		var all, tested, reasoned int
		for _, r := range t.rows {
			if !d.has(r.id) {
				continue
			}
			all++
			switch {
			case len(tests[r.id]) > 0:
				tested++
			case t.reasons[r.id] != "":
				reasoned++
			}
		}
		fmt.Fprintf(&b, "| %s | %d | %d | %d | %d |\n", d.title, all, tested, reasoned, all-tested-reasoned)
	}
	return b.String()
}

// proof returns the cell that says what proves the row, with a space in front if there is any.
func (t *table) proof(id string, tests map[string][]string) string {
	if reason := t.reasons[id]; reason != "" {
		return " *" + reason + "*"
	}
	var b strings.Builder
	last := ""
	for _, test := range tests[id] {
		i := strings.LastIndexByte(test, '.')
		pkg, name := test[:i], test[i+1:]
		switch {
		case pkg == last:
			b.WriteString(", " + name)
		case last == "":
			fmt.Fprintf(&b, " `%s` %s", pkg, name)
		default:
			fmt.Fprintf(&b, "; `%s` %s", pkg, name)
		}
		last = pkg
	}
	return b.String()
}

// ranges writes ids, some of all, with runs of three and more as "IV-1 to IV-3".
func ranges(ids, all []string) string {
	var parts []string
	for i := 0; i < len(ids); {
		at, n := slices.Index(all, ids[i]), 1
		for i+n < len(ids) && at+n < len(all) && all[at+n] == ids[i+n] {
			n++
		}
		if n < 3 {
			n = 1
			parts = append(parts, ids[i])
		} else {
			parts = append(parts, ids[i]+" to "+ids[i+n-1])
		}
		i += n
	}
	return strings.Join(parts, ", ")
}
