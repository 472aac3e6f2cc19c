package sealtest

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/authn/tokensource"
	"github.com/svidkit/svidkit/examples/athenz-sia/sidecar"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// walk is a program that calls each method of zero values, twice, and prints what panics and what does not return. %s are the
// imports and the values.
//
//go:embed testdata/walk.go.txt
var walk string

// TestZeroValues calls each method of a zero value of each exported struct, and again. Many are of use only as a constructor has
// made them, and panic: but none keeps a caller waiting, such as by a lock that a panic has left, and none ends the program by a
// panic that no caller can recover from.
func TestZeroValues(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	var imports, values strings.Builder
	n := 0
	for i, p := range packages(t) {
		scope, name, used := p.Scope(), fmt.Sprintf("p%d", i), false
		for _, id := range scope.Names() {
			o, ok := scope.Lookup(id).(*types.TypeName)
			if !ok || !o.Exported() || o.IsAlias() {
				continue
			}
			named, ok := o.Type().(*types.Named)
			if !ok || named.TypeParams().Len() > 0 {
				continue
			}
			if _, ok := named.Underlying().(*types.Struct); ok {
				fmt.Fprintf(&values, "\tnew(%s.%s),\n", name, id)
				used = true
				n++
			}
		}
		if used {
			fmt.Fprintf(&imports, "\t%s %q\n", name, p.Path())
		}
	}
	require.Greater(t, n, 100)
	file := filepath.Join(t.TempDir(), "main.go")
	require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, walk, imports.String(), values.String()), 0o600))
	program := filepath.Join(filepath.Dir(file), "walk")
	build := exec.Command("go", "build", "-o", program, file)
	build.Dir = "../../.."
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	for from := 0; from < n; {
		out, err := exec.Command(program, strconv.Itoa(from)).CombinedOutput()
		at := ""
		for line := range strings.Lines(string(out)) {
			if text, ok := strings.CutPrefix(line, "at "); ok {
				at = strings.TrimSpace(text)
			}
			assert.NotContains(t, line, " hangs")
		}
		if err == nil {
			break
		}
		t.Errorf("a zero value ends the program by a goroutine of its own: %s\n%s", at, out[max(0, len(out)-2000):])
		number, _, _ := strings.Cut(at, " ")
		from = must.Get(strconv.Atoi(number))(t)
		from++
	}
}

const module = "github.com/svidkit/svidkit"

// packages returns the packages of the module that other modules can import, those of programs too.
func packages(t *testing.T) []*types.Package {
	t.Helper()
	cmd := exec.Command("go", "list", "-export", "-deps", "-json=ImportPath,Name,Export", "./...")
	cmd.Dir, cmd.Stderr, cmd.Env = "../../..", os.Stderr, append(os.Environ(), "GOGC=off") // which would take a third of it
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
	have := values(t, "ed25519")
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

const (
	ready   = "ready"   // the zero value works
	refused = "refused" // with an error, by what takes it
	told    = "told"    // the field is one that this library fills in
)

// fields are those of exported structs that lead to another exported struct of this library: what becomes of a zero one.
var fields = map[string]struct {
	what string
	use  func(t *testing.T, source *spiffetest.Source) error
}{
	"authn.Caller.Pod":            {what: told},
	"sidecar.Identity.Credential": {what: told},
	"caconfig.Authority.Own":      {what: told},
	"federation.Status.Bundle":    {what: told},
	"federation.Status.Refused":   {what: told},
	"workloadapi.Identity.SVID":   {what: told},
	"workloadapi.Update.Bundles":  {what: told},

	"athenz.ProviderConfig.Verifier": {refused, func(*testing.T, *spiffetest.Source) error {
		return must.Err(athenz.NewProvider(athenz.ProviderConfig{
			Service: athenzname.Service{Domain: "k8s.admin", Name: "callback"}, Verifier: new(athenz.Verifier), Suffix: "svc.cluster.local",
			ZTS: authn.Func(func(*http.Request) (*authn.Caller, error) { return nil, authn.ErrNoCredential }), Pods: noPods,
		}))
	}},
	"ca.Config.JWT": {ready, func(t *testing.T, _ *spiffetest.Source) error {
		a, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org"), JWT: new(ca.JWTConfig)})
		require.NoError(t, err)
		_, err = a.SignJWT(t.Context(), ca.JWTRequest{ID: spiffe.MustParseID("spiffe://example.org/web"), Audience: []string{"a"}})
		return err
	}},
	"ca.Request.CSR": {refused, func(t *testing.T, _ *spiffetest.Source) error {
		a := must.Get(ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org")}))(t)
		_, err := a.Sign(t.Context(), ca.Request{ID: spiffe.MustParseID("spiffe://example.org/web"), CSR: new(pki.CSR)})
		return err
	}},
	"caserver.Options.Istio": {refused, func(t *testing.T, _ *spiffetest.Source) error {
		return serverOf(t, caserver.Options{Istio: new(istioca.Options)})
	}},
	"caserver.Options.Linkerd": {refused, func(t *testing.T, _ *spiffetest.Source) error {
		return serverOf(t, caserver.Options{Linkerd: new(linkerd.Options)})
	}},
	"kube.TokenReviewOptions.Reviewer": {refused, func(*testing.T, *spiffetest.Source) error {
		_, err := kube.TokenReview(kube.TokenReviewOptions{Reviewer: new(kube.Reviewer), TrustDomain: spiffe.MustParseTrustDomain("example.org"), Audiences: []string{"a"}})
		return err
	}},
	"tokensource.ClientOptions.ClientAssertion": {refused, func(_ *testing.T, _ *spiffetest.Source) error {
		_, err := tokensource.ClientCredentials(tokensource.ClientOptions{URL: "https://sts.example/token", Issuer: "https://sts.example", ClientAssertion: new(tokensource.Source)})
		return err
	}},
	"federation.SPIFFE.Initial": {refused, func(t *testing.T, _ *spiffetest.Source) error {
		m := must.Get(federation.New(federation.Config{}))(t)
		return m.Add(federation.Relationship{
			TrustDomain: spiffe.MustParseTrustDomain("other.test"), URL: "https://other.test/",
			Profile: federation.SPIFFE{EndpointID: spiffe.MustParseID("spiffe://other.test/endpoint"), Initial: new(spiffe.Bundle)},
		})
	}},
	"spiffetls.Config.Metrics": {ready, func(t *testing.T, s *spiffetest.Source) error {
		return handshakes(t, s, spiffetls.Config{Metrics: new(spiffetls.Metrics)})
	}},
	"spiffetls.Config.Governor": {ready, func(t *testing.T, s *spiffetest.Source) error {
		return handshakes(t, s, spiffetls.Config{Governor: new(spiffetls.Governor)})
	}},
	"workloadapi.Config.Client": {refused, func(_ *testing.T, _ *spiffetest.Source) error {
		return must.Err(workloadapi.New(workloadapi.Config{Client: new(workloadapi.Client)}))
	}},
	"workloadserver.Identity.SVID": {refused, func(t *testing.T, s *spiffetest.Source) error {
		h, err := workloadserver.NewHandler(s, &workloadserver.Options{Identities: func(context.Context) ([]workloadserver.Identity, error) {
			return []workloadserver.Identity{{SVID: new(spiffe.SVID)}}, nil
		}})
		require.NoError(t, err)
		defer h.Close()
		srv := httptest.NewUnstartedServer(h)
		srv.Config.Protocols = new(http.Protocols)
		srv.Config.Protocols.SetUnencryptedHTTP2(true)
		srv.Start()
		defer srv.Close()
		c := must.Get(workloadapi.NewClient("tcp://"+srv.Listener.Addr().String(), nil))(t)
		defer c.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		for _, err := range c.WatchX509SVIDs(ctx) {
			return err
		}
		return ctx.Err()
	}},
}

var _ = sidecar.Identity{} // its fields are above

func noPods(context.Context, string, string) (*athenz.Pod, error) { return nil, athenz.ErrNoPod }

func serverOf(t *testing.T, o caserver.Options) error {
	a := must.Get(ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org")}))(t)
	id := spiffe.MustParseID("spiffe://example.org/ca")
	o.CA, o.TrustDomain, o.Identity = a, id.TrustDomain(), caservertest.Identity(t, a, id)
	return must.Err(caserver.New(o))
}

// handshakes makes two, as the first may leave a lock.
func handshakes(t *testing.T, s *spiffetest.Source, c spiffetls.Config) error {
	inner := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer inner.Close()
	c.Self, c.Peers, c.Allow = s, s, spiffe.AllowAnyPeer()
	endpoint, err := spiffetls.New(c)
	if err != nil {
		return err
	}
	l, err := endpoint.Listener(inner)
	if err != nil {
		return err
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "hello")
			_ = c.Close()
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for range 2 {
		c, err := endpoint.DialContext(ctx, "tcp", inner.Addr().String())
		if err != nil {
			return err
		}
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		_, err = io.ReadAll(c)
		_ = c.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// TestZeroFields: what is given a zero struct of this library works with it, or refuses it. Each field that can have one is in
// the table.
func TestZeroFields(t *testing.T) {
	t.Parallel()
	there := map[string]bool{}
	for _, p := range packages(t) {
		for _, id := range p.Scope().Names() {
			o, ok := p.Scope().Lookup(id).(*types.TypeName)
			if !ok || !o.Exported() {
				continue
			}
			s, ok := o.Type().Underlying().(*types.Struct)
			if !ok {
				continue
			}
			for f := range s.Fields() {
				to, ok := f.Type().(*types.Pointer)
				if !ok || !f.Exported() {
					continue
				}
				named, ok := to.Elem().(*types.Named)
				if !ok || named.Obj().Pkg() == nil || !strings.HasPrefix(named.Obj().Pkg().Path(), module) {
					continue
				}
				if _, ok := named.Underlying().(*types.Struct); ok {
					name := p.Name() + "." + id + "." + f.Name()
					there[name] = true
					if _, ok := fields[name]; !ok {
						t.Errorf("say what becomes of a zero %s", name)
					}
				}
			}
		}
	}
	source := spiffetest.NewCA(t, "example.org").Source("/web")
	for name, f := range fields {
		assert.True(t, there[name], "%s is no more", name)
		if f.use == nil {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var err error
			require.NotPanics(t, func() { err = f.use(t, source) })
			if f.what == ready {
				require.NoError(t, err)
			} else {
				require.Error(t, err)
				t.Log(err)
			}
		})
	}
}
