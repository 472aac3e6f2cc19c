package deptest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/rounds"
)

// calledUnderLock has the calls of loggers and of functions of users that are made while a lock is held, by the function that
// holds it, with the reason why that lock keeps nothing from going on that could.
var calledUnderLock = map[string]string{
	"spiffe/unixsocket.Server.Listen: log":                "only another start waits for it",
	"spiffe/unixsocket.Server.again: log":                 "only another start waits for it",
	"pki/ca/auditlog.Log.write: log":                      "records wait for the disk anyway, and Err for a second at most",
	"pki/ca/auditlog.Log.Reopen: log":                     "likewise",
	"pki/ca.Authority.record: log":                        "the next record of a key's event waits for it, and nothing else",
	"internal/files/follow.Follower.look: log":            "the next look at the files waits for it, and no reader",
	"sds.stream.next: Resolve":                            "of one stream, whose answer waits for it anyway",
	"sds.stream.next: log":                                "of one stream, and Patient",
	"examples/internal/statuspage.Handler.render: Report": "the page waits for all reports anyway",
	"secretcache.Manager.fetch: Bundles":                  "sources of bundles hand out what they have",
	"secretcache.Manager.followFederated: Bundles":        "likewise",
	"secretcache.Manager.watchBundles: Bundles":           "likewise",
	"secretcache.Manager.attempt: RenewIn":                "its comment says that it computes and returns at once",
	"secretcache.Manager.adopt: RenewIn":                  "likewise",
	"secretcache.Manager.install: RenewIn":                "likewise",
	"secretcache.Manager.adopt: MarshalPEM":               "of a spiffe.SVID",
	"secretcache.Manager.adopt: NotAfter":                 "of a spiffe.SVID",
	"spiffe/federation.Manager.attempt: Bundle":           "of another relationship of the Manager",
	"spiffe/federation.dialling.dial: DialContext":        "of one fetch, which dials once at a time, with a deadline",
	"spiffe/filesink.Sink.Write: FederatedName":           "only the next Write waits for it; Report and readers do not",
	"spiffe/filesink.Sink.Write: Snapshot":                "likewise",
	"spiffe/filesink.Sink.Write: log":                     "likewise",
	"spiffe/workloadapi.Source.failed: log":               "the next response of the same stream waits for it, and no reader",
	"spiffe/workloadapi.Source.took: log":                 "likewise",
	"spiffe/workloadapi.Source.took: Bundle":              "of a spiffe.BundleSet",
	"spiffe/workloadapi.Source.took: Policy":              "it allows the one ID",
	"spiffe/source.merge.Changed: Changed":                "all readers ask all parts anyway",
	"spiffe/source.merge.Snapshot: Bundles":               "likewise",
	"spiffe/source.merge.Snapshot: Snapshot":              "likewise",
}

// TestNothingOfUsersUnderLock: no function calls a logger, a func of a public struct or a method of a public interface while a
// sync.Mutex is held, itself or by what it calls. What is not ours can block, and can call us.
func TestNothingOfUsersUnderLock(t *testing.T) {
	t.Parallel()
	rounds.NotShort(t)
	found := underLock(t, filepath.Join("..", "..", ".."), "./...")
	for what, at := range found {
		if _, known := calledUnderLock[what]; !known {
			assert.Fail(t, what+" under a lock: call it when the lock is free", "%s", strings.Join(at, "\n"))
		}
	}
	for what := range calledUnderLock {
		if _, still := found[what]; !still {
			assert.Fail(t, what+" is called under no lock any more: take it out of the list")
		}
	}
}

// TestUnderLock: what the test above sees, and what it does not take for a call under a lock.
func TestUnderLock(t *testing.T) {
	t.Parallel()
	rounds.NotShort(t)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module "+module+"\n\ngo 1.26\n"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "p.go"), []byte(`package p

import (
	"log/slog"
	"sync"
	"time"
)

type Options struct {
	Logger *slog.Logger
	Hook   func()
	Source Source
}

type Source interface{ Get() }

type P struct {
	mu sync.RWMutex
	o  Options
	in inner
}

var o sync.Mutex

type inner interface{ say() }

type speaker struct{ log *slog.Logger }

func (s speaker) say() { s.log.Info("") }

func (p *P) Direct()   { p.mu.Lock(); p.o.Logger.Warn(""); p.mu.Unlock() }
func (p *P) Deferred() { p.mu.Lock(); defer p.mu.Unlock(); if p.in != nil { p.o.Hook() } }
func (p *P) Read()     { p.mu.RLock(); for { p.o.Source.Get() }; p.mu.RUnlock() }
func (p *P) Deep()     { p.mu.Lock(); defer p.mu.Unlock(); p.deeper() }
func (p *P) deeper()   { deepest(p.o) }
func deepest(o Options) { o.Logger.Info("") }
func (p *P) Inner()    { p.mu.Lock(); defer p.mu.Unlock(); p.in.say() }
func (p *P) Closure()  { f := func() { p.mu.Lock(); defer p.mu.Unlock(); p.o.Hook() }; f() }
func (p *P) Own()      { p.mu.Lock(); defer p.mu.Unlock(); p.own() }
func (p *P) own()      { o.Lock(); o.Unlock(); p.o.Hook() }
func (p *P) Nested()   { p.mu.Lock(); o.Lock(); o.Unlock(); p.o.Hook(); p.mu.Unlock() }
func (p *P) Branch()   { p.mu.Lock(); if p.in == nil { p.mu.Unlock(); return }; p.o.Hook(); p.mu.Unlock() }

func (p *P) Then()     { p.mu.Lock(); p.then() }
func (p *P) then()     { p.release(); p.o.Hook() }
func (p *P) After()    { p.mu.Lock(); p.mu.Unlock(); p.o.Hook() }
func (p *P) Later()    { p.mu.Lock(); defer p.mu.Unlock(); time.AfterFunc(1, func() { p.o.Hook() }); go p.o.Hook() }
func (p *P) Released() { p.mu.Lock(); p.release() }
func (p *P) release()  { p.mu.Unlock(); p.o.Hook() }
func (p *P) Early()    { p.mu.Lock(); if p.in == nil { p.mu.Unlock(); p.o.Hook(); return }; p.mu.Unlock() }
`), 0o600))
	found := underLock(t, dir, ".")
	assert.ElementsMatch(t, []string{
		"P.Direct: log", "P.Deferred: Hook", "P.Read: Get", "P.Deep: log", "P.Inner: log", "P.Closure: Hook", "P.Branch: Hook", "P.Own: Hook", "P.Nested: Hook",
	}, slices.Collect(maps.Keys(found)))
}

// TestLoggers: each package that users give a Logger makes it a Patient one, or leaves it to one that does.
func TestLoggers(t *testing.T) {
	t.Parallel()
	given := regexp.MustCompile(`(?m)^\tLogger +\*slog\.Logger`)
	n := 0
	for _, p := range ours(t) {
		for _, file := range p.GoFiles {
			text, err := os.ReadFile(filepath.Join(p.Dir, file))
			require.NoError(t, err)
			if given.Match(text) && !strings.Contains(p.ImportPath, "/internal/") {
				n++
				assert.True(t, slices.ContainsFunc([]string{"/internal/ratelog", "/pki/caserver/internal/caservice"}, func(path string) bool {
					return slices.Contains(p.Imports, module+path)
				}), "%s does not import internal/ratelog", p.ImportPath)
			}
		}
	}
	assert.Greater(t, n, 25)
}

// TestBodies: no handler waits for the body of a request without an end: it reads it by conns.ReadBody, or as grpchttp does.
func TestBodies(t *testing.T) {
	t.Parallel()
	for _, p := range ours(t) {
		if inside := strings.TrimPrefix(p.ImportPath, module); inside == "/internal/conns" || strings.HasPrefix(inside, "/internal/test/") {
			continue
		}
		for _, file := range p.GoFiles {
			text, err := os.ReadFile(filepath.Join(p.Dir, file))
			require.NoError(t, err)
			assert.NotContains(t, string(text), "http.MaxBytesReader(", "%s/%s", p.ImportPath, file)
			assert.NotContains(t, string(text), "io.ReadAll(r.Body", "%s/%s", p.ImportPath, file)
		}
	}
}

// underLock type-checks packages and returns what is called under locks, as "PACKAGE.FUNCTION: WHAT", and where.
func underLock(t *testing.T, dir string, patterns ...string) map[string][]string {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-export", "-deps", "-json=ImportPath,Export,Dir,GoFiles"}, patterns...)...)
	cmd.Dir, cmd.Stderr = dir, os.Stderr
	out, err := cmd.Output()
	require.NoError(t, err, "go list")
	c := &lockChecker{t: t, fset: token.NewFileSet(), own: map[string]*types.Package{}, functions: map[*types.Func]*function{}, reached: map[*types.Func]map[string]string{}}
	exports := map[string]string{}
	c.std = importer.ForCompiler(c.fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			ImportPath, Export, Dir string
			GoFiles                 []string
		}
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else {
			require.NoError(t, err)
		}
		exports[p.ImportPath] = p.Export
		if strings.HasPrefix(p.ImportPath, module) { // after what it imports
			c.load(p.ImportPath, p.Dir, p.GoFiles)
		}
	}
	found := map[string][]string{}
	for _, f := range c.functions {
		if strings.HasPrefix(f.name, "internal/test/") {
			continue
		}
		for _, call := range f.calls {
			if call.state.held == 0 {
				continue
			}
			for what, by := range c.effects(call) {
				key := f.name + ": " + what
				found[key] = append(found[key], fmt.Sprint(c.fset.Position(call.pos), by))
			}
		}
	}
	return found
}

// lockChecker follows calls through the packages of the module.
type lockChecker struct {
	t         *testing.T
	fset      *token.FileSet
	std       types.Importer
	own       map[string]*types.Package
	concrete  []types.Type // types of the module with methods
	functions map[*types.Func]*function
	reached   map[*types.Func]map[string]string
}

type function struct {
	name     string
	body     *ast.BlockStmt // until its package is read
	calls    []lockCall
	releases bool // a lock of its caller
}

type lockCall struct {
	pos   token.Pos
	state lockState
	what  string      // of a logger or a user, or
	to    *types.Func // of the module, which may be the method of an interface
}

// lockState says how many locks a function holds, and whether it has released one of its caller.
type lockState struct {
	held     int
	released bool
}

func (s lockState) unlock() lockState {
	if s.held == 0 {
		s.released = true
	}
	s.held = max(s.held-1, 0)
	return s
}

// Import implements [types.Importer].
func (c *lockChecker) Import(path string) (*types.Package, error) {
	if p := c.own[path]; p != nil {
		return p, nil
	}
	return c.std.Import(path)
}

func (c *lockChecker) load(path, dir string, names []string) {
	var files []*ast.File
	for _, name := range names {
		f, err := parser.ParseFile(c.fset, filepath.Join(dir, name), nil, parser.SkipObjectResolution)
		require.NoError(c.t, err)
		files = append(files, f)
	}
	info := &types.Info{Uses: map[*ast.Ident]types.Object{}, Defs: map[*ast.Ident]types.Object{}}
	p, err := (&types.Config{Importer: c}).Check(path, c.fset, files, info)
	require.NoError(c.t, err)
	c.own[path] = p
	for _, name := range p.Scope().Names() {
		if n, ok := p.Scope().Lookup(name).(*types.TypeName); ok && !types.IsInterface(n.Type()) {
			c.concrete = append(c.concrete, types.NewPointer(n.Type()))
		}
	}
	for _, f := range files {
		for _, d := range f.Decls {
			if d, ok := d.(*ast.FuncDecl); ok && d.Body != nil {
				of := info.Defs[d.Name].(*types.Func)
				short := strings.NewReplacer("(", "", ")", "", "*", "", module+"/", "", module+".", "").Replace(of.FullName())
				c.functions[of] = &function{name: short, body: d.Body}
			}
		}
	}
	for range 3 { // until it is known which of them release the locks of their callers
		for _, f := range c.functions {
			if f.body != nil {
				f.calls = nil
				f.releases = (&lockWalk{c, info, f}).list(f.body.List, lockState{}).released
			}
		}
	}
	for _, f := range c.functions {
		f.body = nil
	}
}

// effects returns what a call comes to of loggers and users, and by which functions.
func (c *lockChecker) effects(call lockCall) map[string]string {
	if call.what != "" {
		return map[string]string{call.what: ""}
	}
	all := map[string]string{}
	for _, to := range c.targets(call.to) {
		for what, by := range c.reach(to) {
			all[what] = " > " + to.Name() + by
		}
	}
	return all
}

// reach is effects for all calls that a function makes before it releases a lock of its caller.
func (c *lockChecker) reach(f *types.Func) map[string]string {
	if all, known := c.reached[f]; known || c.functions[f] == nil {
		return all
	}
	all := map[string]string{}
	c.reached[f] = all // for recursion
	for _, call := range c.functions[f].calls {
		if call.state.held > 0 || !call.state.released {
			maps.Copy(all, c.effects(call))
		}
	}
	return all
}

// targets returns what a call of f calls: f, or the methods of the module that implement it.
func (c *lockChecker) targets(f *types.Func) []*types.Func {
	recv := f.Signature().Recv()
	if recv == nil || !types.IsInterface(recv.Type()) {
		return []*types.Func{f}
	}
	var all []*types.Func
	for _, t := range c.concrete {
		if i, ok := recv.Type().Underlying().(*types.Interface); ok && types.Implements(t, i) {
			o, _, _ := types.LookupFieldOrMethod(t, true, f.Pkg(), f.Name())
			if m, ok := o.(*types.Func); ok {
				all = append(all, m.Origin())
			}
		}
	}
	return all
}

// lockWalk reads the calls of one function.
type lockWalk struct {
	c    *lockChecker
	info *types.Info
	fn   *function
}

// list reads statements and returns the state after them.
func (w *lockWalk) list(list []ast.Stmt, state lockState) lockState {
	for _, s := range list {
		var call *ast.CallExpr
		if e, ok := s.(*ast.ExprStmt); ok {
			call, _ = e.X.(*ast.CallExpr)
		}
		switch f := w.called(call); {
		case f == nil:
			w.node(s, state)
		case f.Pkg().Path() == "sync" && (f.Name() == "Lock" || f.Name() == "RLock"):
			state.held++
		case f.Pkg().Path() == "sync" && (f.Name() == "Unlock" || f.Name() == "RUnlock"):
			state = state.unlock()
		default:
			w.node(s, state)
			if to := w.c.functions[f.Origin()]; to != nil && to.releases {
				state = state.unlock()
			}
		}
	}
	return state
}

// called returns the function or method that is called, or nil.
func (w *lockWalk) called(call *ast.CallExpr) *types.Func {
	if call == nil {
		return nil
	}
	var id *ast.Ident
	switch fun := ast.Unparen(call.Fun).(type) {
	case *ast.Ident:
		id = fun
	case *ast.SelectorExpr:
		id = fun.Sel
	}
	if f, ok := w.info.Uses[id].(*types.Func); ok && f.Pkg() != nil {
		return f
	}
	return nil
}

func (w *lockWalk) node(n ast.Node, state lockState) {
	ast.Inspect(n, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncLit: // it is called at another time
			w.list(n.Body.List, lockState{released: true})
			return false
		case *ast.GoStmt:
			for _, arg := range append(n.Call.Args, n.Call.Fun) {
				w.node(arg, lockState{released: true})
			}
			return false
		case *ast.BlockStmt:
			w.list(n.List, state)
			return false
		case *ast.CaseClause:
			for _, e := range n.List {
				w.node(e, state)
			}
			w.list(n.Body, state)
			return false
		case *ast.CommClause:
			w.list(n.Body, state)
			return false
		case *ast.CallExpr:
			if now, ok := n.Fun.(*ast.FuncLit); ok {
				w.list(now.Body.List, state)
				for _, arg := range n.Args {
					w.node(arg, state)
				}
				return false
			}
			w.call(n, state)
		}
		return true
	})
}

func (w *lockWalk) call(n *ast.CallExpr, state lockState) {
	fun := ast.Unparen(n.Fun)
	if generic, ok := fun.(*ast.IndexExpr); ok {
		fun = generic.X
	}
	var id *ast.Ident
	switch fun := fun.(type) {
	case *ast.Ident:
		id = fun
	case *ast.SelectorExpr:
		id = fun.Sel
	default:
		return
	}
	call := lockCall{pos: n.Pos(), state: state}
	switch o := w.info.Uses[id].(type) {
	case *types.Var:
		if !o.IsField() || !o.Exported() || !public(o.Pkg()) {
			return
		}
		call.what = o.Name()
	case *types.Func:
		call.to = o.Origin()
		recv := o.Signature().Recv()
		path := ""
		if o.Pkg() != nil {
			path = o.Pkg().Path()
		}
		switch {
		case path == "log" || path == "log/slog" && recv != nil && strings.HasSuffix(recv.Type().String(), "slog.Logger") &&
			slices.Contains([]string{"Debug", "Info", "Warn", "Error", "Log", "LogAttrs"}, o.Name()):
			call.what, call.to = "log", nil
		case !strings.HasPrefix(path, module):
			return
		case recv != nil && types.IsInterface(recv.Type()) && o.Exported() && public(o.Pkg()):
			if n, named := recv.Type().(*types.Named); !named || n.Obj().Exported() {
				call.what = o.Name()
			}
		}
	}
	if call.what != "" || call.to != nil {
		w.fn.calls = append(w.fn.calls, call)
	}
}

// public reports whether users can import a package.
func public(p *types.Package) bool {
	return p != nil && strings.HasPrefix(p.Path(), module) && !strings.Contains(p.Path()+"/", "/internal/") && !strings.Contains(p.Path(), "/examples/")
}
