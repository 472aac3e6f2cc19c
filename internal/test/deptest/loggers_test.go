package deptest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// silent has the parts that programs start without their logger, by file and type, with the reason.
var silent = map[string]string{
	"quickstart":                        "it prints what happens",
	"grpc":                              "it prints what happens",
	"agent/demo.go":                     "it prints what happens",
	"ca/demo.go":                        "it prints what happens",
	"service/demo.go":                   "it prints what happens",
	"svid/doctor.go":                    "it prints each failure",
	"svid/inspect.go":                   "it prints each failure",
	"svid/fetch.go: workloadapi.Config": "watch sets it, and fetch prints each failure",
	"ca/caconfig/authority.go: istioca.Options":   "the server sets it",
	"ca/caconfig/cluster.go: caclient.TLSOptions": "each failure is the error of a request",
	"workload-agent/ca.go: workloadagent.Config":  "serve sets it",
	"ca/operator.go: caconfig.OpenOptions":        "a command ends with its failure",
	"service/main.go: workloadapi.Config":         "one of two checks an address alone",
	"athenz-agent/agent.go: caclient.Endpoint":    "the agent sets it",
}

// TestProgramsLog: each part of the library that a program starts has the program's logger, if it can have one.
func TestProgramsLog(t *testing.T) {
	t.Parallel()
	loggers := map[string]bool{} // by import path and type
	walk := func(dir string, do func(path string, file *ast.File)) {
		require.NoError(t, filepath.WalkDir(filepath.Join(rootDir, dir), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() && (d.Name() == "testdata" || d.Name() == "test" && dir == "") || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err == nil {
				rel, _ := filepath.Rel(filepath.Join(rootDir, dir), path)
				do(filepath.ToSlash(rel), file)
			}
			return err
		}))
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
	walk("examples", func(path string, file *ast.File) {
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
