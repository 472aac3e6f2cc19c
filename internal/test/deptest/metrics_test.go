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
	metricName = regexp.MustCompile(`^[a-z*][a-z0-9*]*(_[a-z0-9*]+)*$`)
	metricHelp = regexp.MustCompile(`^[A-Z][^\n]* [^\n]*\.$`)
)

type metric struct{ name, help, pkg string }

// TestMetrics writes the table of examples/METRICS.md: a metric is a name beside its help, as arguments or in a table. A
// function that completes names has their common beginning. What is not constant is a star.
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
		if err != nil {
			return err
		}
		uses := strings.Contains(string(src), "svidkit/internal/metrics\"")
		for _, decl := range f.Decls {
			for _, m := range metricsOf(decl, constsOf(f), path.Dir(name)) {
				if uses || strings.HasPrefix(m.name, "svidkit_") {
					all = append(all, m)
				}
			}
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
