package deptest

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/programtest"
)

var (
	metricName = regexp.MustCompile(`^[a-z][a-z0-9]*(_[a-z0-9]+)*$`)
	metricHelp = regexp.MustCompile(`^[A-Z][^\n]* [^\n]*\.$`)
)

type metric struct{ name, help, pkg string }

// TestMetrics writes the table of examples/METRICS.md: a metric is a name beside its help, as arguments or in a table. A function that
// completes names has their common beginning.
func TestMetrics(t *testing.T) {
	t.Parallel()
	var all []metric
	tree := os.DirFS(root(t))
	require.NoError(t, fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() && (d.Name() == "testdata" || name == "internal/test" || name == "internal/peers" || name == "internal/compare") {
			return cmp.Or(err, fs.SkipDir)
		}
		if d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		src, err := fs.ReadFile(tree, name)
		if err != nil {
			return err
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, src, parser.SkipObjectResolution)
		if err != nil || !strings.Contains(string(src), "svidkit/internal/metrics\"") {
			return err
		}
		for _, decl := range f.Decls {
			all = append(all, metricsOf(decl, path.Dir(name))...)
		}
		return nil
	}))
	slices.SortFunc(all, func(a, b metric) int { return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.pkg, b.pkg)) })
	require.Greater(t, len(all), 50)
	table := "\n| metric | meaning | package |\n|---|---|---|\n"
	for _, m := range slices.Compact(all) {
		table += fmt.Sprintf("| `%s` | %s | [`%s`](../%s) |\n", m.name, m.help, m.pkg, m.pkg)
	}
	programtest.Section(t, *update, "../../../examples/METRICS.md", "<!-- metrics -->", "<!-- /metrics -->", table)
}

func metricsOf(decl ast.Decl, pkg string) []metric {
	var found []metric
	prefix := ""
	ast.Inspect(decl, func(n ast.Node) bool {
		var list []ast.Expr
		switch n := n.(type) {
		case *ast.BinaryExpr:
			if s, ok := literal(n.X); ok && strings.HasSuffix(s, "_") {
				prefix = s
			}
		case *ast.CallExpr:
			list = n.Args
		case *ast.CompositeLit:
			list = n.Elts
		}
		for i := range max(len(list)-1, 0) {
			name, ok := literal(list[i])
			help, also := literal(list[i+1])
			if ok && also && metricName.MatchString(name) && metricHelp.MatchString(help) {
				found = append(found, metric{name, help, pkg})
			}
		}
		return true
	})
	for i := range found {
		if first, _, _ := strings.Cut(prefix, "_"); !strings.HasPrefix(found[i].name, first+"_") {
			found[i].name = prefix + found[i].name
		}
	}
	return found
}

// literal returns the value of a string literal, or of several that are joined.
func literal(e ast.Expr) (string, bool) {
	if sum, ok := e.(*ast.BinaryExpr); ok {
		x, first := literal(sum.X)
		y, second := literal(sum.Y)
		return x + y, first && second
	}
	l, ok := e.(*ast.BasicLit)
	if !ok || l.Kind != token.STRING {
		return "", false
	}
	s, err := strconv.Unquote(l.Value)
	return s, err == nil
}
