package conformance

import (
	"fmt"
	"go/ast"
	"go/token"
	"io/fs"
	"path"
	"slices"
	"strconv"

	"github.com/svidkit/svidkit/internal/test/testtree"
)

const importPath = "github.com/svidkit/svidkit/internal/test/conformance"

// scan reads all test files below fsys and returns the ties of their calls of Covers, and the names
// of all functions that go test runs, as "spiffe.TestIDVectors".
func scan(fsys fs.FS, known func(id string) bool) (ties []tie, functions map[string]bool, err error) {
	files, err := testtree.Files(fsys)
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

func scanFile(f testtree.File, known func(id string) bool, functions map[string]bool) ([]tie, error) {
	covers := "" // how the file calls this package
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
		test, runs := f.Test(fn)
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
