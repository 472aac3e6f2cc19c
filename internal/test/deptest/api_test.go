package deptest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestAPI compares the exported names, methods and fields of all packages that a user can import, those of nested modules
// too, with api.txt. A change of the file shows in review what a release promises or takes away.
func TestAPI(t *testing.T) {
	t.Parallel()
	var names []string
	require.NoError(t, filepath.WalkDir(rootDir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(rootDir, path)
		rel = filepath.ToSlash(rel)
		switch name := d.Name(); {
		case d.IsDir() && (rel == "examples" || name == "internal" || name == "testdata" || name == ".git"):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go"):
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err == nil && file.Name.Name != "main" {
			for _, name := range exported(file) {
				names = append(names, rel[:max(0, strings.LastIndexByte(rel, '/'))]+"."+name)
			}
		}
		return err
	}))
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
