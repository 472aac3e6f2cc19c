package deptest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// underLock says of a function that its caller holds a lock.
var underLock = regexp.MustCompile(`(lock|locks|[Mm]u) (is|are) held|which is held`)

// TestNoLogUnderLock: no function logs between Lock and Unlock, or where its comment says that a lock is held. A logger can block:
// then nobody else gets on, either.
func TestNoLogUnderLock(t *testing.T) {
	t.Parallel()
	logs := func(text string) (found []string) {
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, "", text, parser.ParseComments)
		require.NoError(t, err)
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Body != nil {
				held := fn.Doc != nil && underLock.MatchString(strings.ReplaceAll(fn.Doc.Text(), "\n", " "))
				loggedIn(fn.Body.List, held, func(call *ast.CallExpr) { found = append(found, fset.Position(call.Pos()).String()) })
			}
		}
		return found
	}
	const head = "package p\nfunc f() {\n"
	for text, n := range map[string]int{
		head + "mu.Lock(); x.log.Warn(); mu.Unlock() }":                                1,
		head + "mu.Lock(); defer mu.Unlock(); if y { x.logger.LogAttrs() } }":          1,
		head + "mu.Lock(); mu.Unlock(); x.log.Warn() }":                                0,
		head + "mu.Lock(); say = func() { x.log.Warn() }; mu.Unlock() }":               0,
		head + "mu.RLock(); for { x.log().Info() }; mu.RUnlock() }":                    1,
		"package p\n// f does; mu is held.\nfunc f() { x.log.Error() }":                1,
		"package p\n// f does.\nfunc f() { x.log.Error(); x.other.Warn(); mu.Lock() }": 0,
	} {
		assert.Len(t, logs(text), n, text)
	}
	root := filepath.Join("..", "..", "..")
	files := 0
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (slices.Contains([]string{"testdata", ".git", "programs"}, d.Name()) || strings.HasSuffix(path, filepath.Join("internal", "test"))) {
			return fs.SkipDir
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		files++
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, path, nil, parser.ParseComments)
		if err != nil {
			return err
		}
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Body != nil {
				held := fn.Doc != nil && underLock.MatchString(strings.ReplaceAll(fn.Doc.Text(), "\n", " "))
				loggedIn(fn.Body.List, held, func(call *ast.CallExpr) {
					assert.Fail(t, "it logs while a lock is held: log when it is free", fset.Position(call.Pos()).String())
				})
			}
		}
		return nil
	}))
	assert.Greater(t, files, 300)
}

// loggedIn reports each call of a logger in statements while a lock is held, as far as one function shows it.
func loggedIn(list []ast.Stmt, held bool, report func(*ast.CallExpr)) {
	for _, s := range list {
		switch method(s) {
		case "Lock", "RLock":
			held = true
			continue
		case "Unlock", "RUnlock":
			held = false
			continue
		}
		ast.Inspect(s, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncLit: // which is called at another time
				return false
			case *ast.BlockStmt:
				loggedIn(n.List, held, report)
				return false
			case *ast.CaseClause:
				loggedIn(n.Body, held, report)
				return false
			case *ast.CommClause:
				loggedIn(n.Body, held, report)
				return false
			case *ast.CallExpr:
				if held && isLog(n) {
					report(n)
				}
			}
			return true
		})
	}
}

// method returns the name of the method that a statement calls, or "".
func method(s ast.Stmt) string {
	if e, ok := s.(*ast.ExprStmt); ok {
		if c, ok := e.X.(*ast.CallExpr); ok {
			if f, ok := c.Fun.(*ast.SelectorExpr); ok {
				return f.Sel.Name
			}
		}
	}
	return ""
}

// isLog reports whether a call is of a method of a logger, by its name and that of what has it.
func isLog(c *ast.CallExpr) bool {
	f, ok := c.Fun.(*ast.SelectorExpr)
	if !ok || !slices.Contains([]string{"Debug", "Info", "Warn", "Error", "Log", "LogAttrs"}, f.Sel.Name) {
		return false
	}
	of := f.X
	if call, ok := of.(*ast.CallExpr); ok {
		of = call.Fun
	}
	name := ""
	switch of := of.(type) {
	case *ast.Ident:
		name = of.Name
	case *ast.SelectorExpr:
		name = of.Sel.Name
	}
	name = strings.ToLower(name)
	return strings.Contains(name, "log") || strings.Contains(name, "sums") || strings.Contains(name, "refusals")
}
