package conformance

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

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
