// Package testtree reads the tests of all packages in a tree from their source, without running them. It is for tests that
// hold a list of tests against what there is.
package testtree

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// File is a test file.
type File struct {
	*ast.File
	Path      string // below the root
	Positions *token.FileSet
}

// Files parses all test files below the root of fsys, those of nested modules too. Folders that the go command leaves out
// are left out.
func Files(fsys fs.FS) ([]File, error) {
	var files []File
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
		files = append(files, File{f, name, positions})
		return err
	})
	return files, err
}

// Functions returns the functions of the file, methods not included.
func (f File) Functions() []*ast.FuncDecl {
	var all []*ast.FuncDecl
	for _, d := range f.Decls {
		if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Body != nil {
			all = append(all, fn)
		}
	}
	return all
}

// Test returns the name of a function of the file with the folder of its package, such as "spiffe.TestIDVectors", and
// whether go test runs it.
func (f File) Test(fn *ast.FuncDecl) (name string, runs bool) {
	runs = fn.Recv == nil && slices.ContainsFunc([]string{"Test", "Fuzz", "Example", "Benchmark"}, func(p string) bool {
		rest, ok := strings.CutPrefix(fn.Name.Name, p)
		c, _ := utf8.DecodeRuneInString(rest)
		return ok && !unicode.IsLower(c)
	})
	return path.Dir(f.Path) + "." + fn.Name.Name, runs
}

// Skipped reports whether a test calls Skip, Skipf or SkipNow on every way through it: in a statement of its own body
// and not below a condition.
func Skipped(fn *ast.FuncDecl) bool {
	return slices.ContainsFunc(fn.Body.List, func(s ast.Stmt) bool {
		x, ok := s.(*ast.ExprStmt)
		if !ok {
			return false
		}
		call, ok := x.X.(*ast.CallExpr)
		if !ok {
			return false
		}
		sel, ok := call.Fun.(*ast.SelectorExpr)
		return ok && slices.Contains([]string{"Skip", "Skipf", "SkipNow"}, sel.Sel.Name)
	})
}
