package sealtest

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
)

const module = "github.com/svidkit/svidkit"

// packages returns the packages of the module that other modules can import, those of programs too.
func packages(t *testing.T) []*types.Package {
	t.Helper()
	cmd := exec.Command("go", "list", "-export", "-deps", "-json=ImportPath,Name,Export", "./...")
	cmd.Dir, cmd.Stderr = "../../..", os.Stderr
	out := must.Get(cmd.Output())(t, "go list")
	exports, mains := map[string]string{}, map[string]bool{}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct{ ImportPath, Name, Export string }
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else {
			require.NoError(t, err)
		}
		exports[p.ImportPath], mains[p.ImportPath] = p.Export, p.Name == "main"
	}
	imp := importer.ForCompiler(token.NewFileSet(), "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })
	var all []*types.Package
	for _, path := range slices.Sorted(maps.Keys(exports)) {
		inside, ok := strings.CutPrefix(path, module+"/")
		if !ok || mains[path] || exports[path] == "" || slices.Contains(strings.Split(inside, "/"), "internal") {
			continue
		}
		all = append(all, must.Get(imp.Import(path))(t, path))
	}
	return all
}

// keys are the types of the standard library that are private keys, or can be.
var keys = map[string]bool{
	"crypto.Signer": true, "crypto.PrivateKey": true, "crypto.Decrypter": true, "crypto.MessageSigner": true,
	"crypto/ecdsa.PrivateKey": true, "crypto/rsa.PrivateKey": true, "crypto/ed25519.PrivateKey": true, "crypto/ecdh.PrivateKey": true,
	"crypto/tls.Certificate": true, "crypto/tls.Config": true,
}

// keyName is how a field with a private key, or a token, in bytes or text is called.
var keyName = regexp.MustCompile(`(?i)^(keyPEM|.*privateKey|secret|token|bearer|password)$`)

// search finds how a private key is reached from a type: through fields, elements and what functions without
// parameters return. Interfaces are not looked into, other than those of the standard library that are keys.
type search struct {
	seen  map[types.Type]bool
	found []path
}

type path struct {
	steps  []string
	sealed bool // a function is on the way, which packages fmt, slog and json do not call
}

func (s *search) walk(t types.Type, steps []string, sealed bool) {
	if s.seen[t] {
		return
	}
	s.seen[t] = true
	defer delete(s.seen, t) // another way to it may not be sealed
	if len(steps) > 8 {
		return
	}
	hit := func() { s.found = append(s.found, path{slices.Clone(steps), sealed}) }
	switch t := types.Unalias(t).(type) {
	case *types.Named:
		if o := t.Obj(); o.Pkg() != nil && keys[o.Pkg().Path()+"."+o.Name()] {
			hit()
			return
		}
		if o := t.Obj(); o.Pkg() != nil && !strings.HasPrefix(o.Pkg().Path(), module) {
			return // of others nothing else is a key; an atomic.Pointer is an address
		}
		s.walk(t.Underlying(), steps, sealed)
	case *types.Pointer:
		s.walk(t.Elem(), append(steps, "*"), sealed)
	case *types.Slice:
		s.walk(t.Elem(), append(steps, "[]"), sealed)
	case *types.Array:
		s.walk(t.Elem(), append(steps, "[]"), sealed)
	case *types.Chan:
		s.walk(t.Elem(), append(steps, "chan"), true)
	case *types.Map:
		s.walk(t.Key(), append(steps, "[key]"), sealed)
		s.walk(t.Elem(), append(steps, "[value]"), sealed)
	case *types.Signature:
		if t.Params().Len() == 0 {
			for r := range t.Results().Variables() {
				s.walk(r.Type(), append(steps, "()"), true)
			}
		}
	case *types.Struct:
		for f := range t.Fields() {
			if keyName.MatchString(f.Name()) && text(f.Type()) || f.Name() == "key" && isBytes(f.Type()) {
				s.found = append(s.found, path{append(slices.Clone(steps), f.Name()), sealed})
				continue
			}
			s.walk(f.Type(), append(steps, f.Name()), sealed)
		}
	}
}

// text reports whether t is bytes or a string.
func text(t types.Type) bool {
	u, ok := t.Underlying().(*types.Basic)
	return ok && u.Kind() == types.String || isBytes(t)
}

func isBytes(t types.Type) bool {
	u, ok := t.Underlying().(*types.Slice)
	if !ok {
		return false
	}
	b, ok := u.Elem().Underlying().(*types.Basic)
	return ok && b.Kind() == types.Byte
}

// Reasons for which there is no value among those of TestNothingPrints either.
const (
	callers = "the certificates are its caller's"
	fixture = "the keys and tokens are made for one test"
)

// open are the types that reach a key without a function on the way, with the reason.
var open = map[string]string{
	"pki/caserver.ServeOptions":                 callers,
	"caclient/caclienttest.Fake":                fixture,
	"examples/athenz-agent/nodeagent.Config":    callers,
	"caclient/athenz.Options":                   callers,
	"caclient/stepca.Options":                   callers,
	"spiffe/spiffetest.Source":                  fixture,
	"spiffe/spiffetest/federationtest.Endpoint": "the tls.Config of its dialer takes certificates from functions",
	"spiffe/spiffetls.Endpoint":                 "its tls.Config takes certificates from functions",
	"spiffe/spiffetest/workloadapitest.Server":  "the tls.Config of its dialer takes certificates from functions",
}

// TestKeysAreSealed shows that whatever can hold a private key holds it behind a function: packages fmt, slog and json follow
// unexported fields, pointers and interfaces, and call no method of what they find there, so that no String method helps.
// What has one behind a function is among the values of TestNothingPrints.
func TestKeysAreSealed(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	have := values(t, pki.Ed25519)
	for _, p := range packages(t) {
		for _, name := range p.Scope().Names() {
			o, ok := p.Scope().Lookup(name).(*types.TypeName)
			if !ok || !o.Exported() || o.IsAlias() {
				continue
			}
			s := search{seen: map[types.Type]bool{}}
			s.walk(o.Type(), nil, false)
			full := strings.TrimPrefix(p.Path(), module+"/") + "." + name
			for _, f := range s.found {
				if open[full] == "" {
					assert.True(t, f.sealed, "%s prints a key at %s; put it behind a function", full, strings.Join(f.steps, "."))
				}
			}
			if len(s.found) > 0 && open[full] != callers && open[full] != fixture {
				assert.Contains(t, have, full, "it can hold a key: give TestNothingPrints a value")
			}
		}
	}
}
