package deptest

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

// TestWeight compares the sizes in examples/PACKAGES.md with those of stripped programs that use the packages, each of
// which has a bound; with -update it writes them.
func TestWeight(t *testing.T) {
	if !*long {
		t.Skip("links a program with each package; run it with -long")
	}
	stated := sizes(string(must.Get(os.ReadFile(pageName))(t)))
	for _, c := range []struct {
		name  string
		uses  string  // what the program has of it
		maxMB float64 // of 10⁶ bytes, on linux/amd64
	}{
		{"spiffe", "spiffe.NewVerifier, spiffe.ParseBundle, spiffe.ParseSVIDPEM", 4},
		{"spiffe/spiffetls", "(*spiffetls.Endpoint).ConfigureServer, (*spiffetls.Endpoint).Transport", 7},
		{"spiffe/jwtsvid", "jwtsvid.NewValidator, jwtsvid.NewIssuer", 5},
		{"spiffe/federation", "federation.New, (*federation.Manager).Run", 7},
		{"spiffe/workloadapi", "workloadapi.New, (*workloadapi.Source).Run", 7.2},
		{"spiffe/workloadserver", "workloadserver.NewHandler, (*unixsocket.Server).Run", 7.2},
		{"spiffe/filesource", "filesource.New, (*filesource.Source).Run", 7.2},
		{"spiffe/filesink", "filesink.New, (*filesink.Sink).Run", 4.2},
		{"spiffe/source", "source.NewLastGood, source.NewMerge", 7.2},
		{"spiffe/health", "health.New, (*health.Handler).ServeHTTP", 7.2},
		{"pki", "pki.NewCSR, pki.ParseCSR, pki.NewRoot", 4},
		{"pki/ca", "ca.Open, (*ca.Authority).Sign, (*ca.Authority).Run", 6.1},
		{"pki/ca/auditlog", "auditlog.Open, (*auditlog.Log).Record, auditlog.Verify", 6},
		{"pki/ca/kubesecret", "kubesecret.New, (*kubesecret.Store).Save", 8},
		{"pki/ca/sqlstore", "sqlstore.New, sqlstore.Schema", 8},
		{"pki/ra", "ra.New, (*ra.RA).Sign", 8},
		{"pki/caserver", "caserver.New, (*caserver.Server).Run", 7.6},
		{"pki/caserver/podcert", "podcert.New, (*podcert.Signer).Run", 7.2},
		{"pki/caserver/istioca", "istioca.New, (*istioca.Server).ServeHTTP, caserver.Serve", 7.2},
		{"pki/caserver/linkerd", "linkerd.New, (*linkerd.Server).ServeHTTP, caserver.Serve", 7.2},
		{"authn/athenz/athenzname", "athenzname.Mapping.Service, athenzname.ParseService", 4},
		{"pki/linkerdname", "linkerdname.Mesh.Name, linkerdname.Match", 4},
		{"caclient", "caclient.New", 5},
		{"caclient/local", "local.New, (*ca.Authority).Run", 6},
		{"caclient/istioca", "istioca.New, (*istioca.CA).Sign", 7.2},
		{"caclient/linkerd", "linkerd.New, (*linkerd.CA).Sign", 7.2},
		{"caclient/stepca", "stepca.New, (*stepca.CA).Sign", 7.2},
		{"caclient/vault", "vault.New, (*vault.CA).Sign", 7.2},
		{"caclient/googlecas", "googlecas.New, (*googlecas.CA).Sign", 7.2},
		{"caclient/athenz", "athenz.New, (*athenz.CA).Sign", 7.2},
		{"secretcache", "secretcache.New, (*secretcache.Manager).Run", 5.2}, // the interface of package caclient, whose clients are those of net/http
		{"sds", "sds.NewHandler, sds.NewClient, (*unixsocket.Server).Run", 7.2},
		{"sds/sdssource", "sdssource.Mux, sdssource.NewFiles", 7.2},
		{"sds/xdsproxy", "xdsproxy.NewHandler, (*unixsocket.Server).Run", 7.2},
		{"sds/kubesecrets", "kubesecrets.New, (*kubesecrets.Source).Run", 7.2},
		{"sds/istioagent", "istioagent.New, istioagent.FromEnvironment", 10.2},      // of which YAML is 0.5
		{"sds/workloadagent", "workloadagent.New, (*workloadagent.Agent).Run", 8.1}, // of which 2 are a client of the API server,
		{"authn", "authn.ClientCertificate, authn.FirstOf", 7},
		{"authn/jwt", "jwt.New, jwt.SVID", 7.5},
		{"authn/kube", "kube.NewReviewer, kube.TokenReview", 8},
		{"authn/tokensource", "tokensource.Exchange, (*tokensource.Source).Token", 7},
		{"spiffe/unixsocket", "(*unixsocket.Server).Run, unixsocket.PeerFromContext", 7.2},
		{"authn/athenz", "athenz.NewProvider, athenz.NewSigner, athenz.VerifyServiceToken", 7.5},
		{"spiffe/report", "report.Report{}", 3},
	} {
		mb := build(t, c.name, c.uses)
		t.Logf("%s: %.1f MB", c.name, mb)
		if *update {
			stated[c.name] = fmt.Sprintf("%.1f", mb)
		}
		if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
			continue
		}
		assert.Less(t, mb, c.maxMB, c.name)
		size := must.Get(strconv.ParseFloat(stated[c.name], 64))(t, "examples/PACKAGES.md has no size for %s", c.name)
		assert.InDelta(t, mb, size, 0.11, "%s: the size in examples/PACKAGES.md is another one", c.name)
	}
	if *update {
		compare(t, pageName, page(t, stated))
	}
}

// TestWeightOfPrograms bounds the size of programs that use several packages. Most of it is net/http with TLS
// and HTTP/2: a program that serves and calls with net/http and uses nothing of this module has 6.6 MB, and
// log/slog adds 0.3.
func TestWeightOfPrograms(t *testing.T) {
	t.Parallel()
	if !*long {
		t.Skip("links programs; run it with -long")
	}
	workload := "spiffe.NewVerifier, secretcache.New, (*secretcache.Manager).Run, workloadapi.New, (*workloadapi.Source).Run"
	peers := ", (*spiffetls.Endpoint).ConfigureServer, (*spiffetls.Endpoint).Transport"
	for _, c := range []struct {
		name, uses string
		maxMB      float64 // of 10⁶ bytes, on linux/amd64
	}{
		{"a service that serves and calls with an identity from an agent", "spiffe.NewVerifier, workloadapi.New, (*workloadapi.Source).Run" + peers + ", (*http.Server).ServeTLS, (*http.Client).Do", 7.5},
		{"identity from an agent and from a CA", workload, 7.5},
		{"and mutual TLS, and the agent's handler", workload + peers + ", workloadserver.NewHandler", 7.85},
		{"and a server and a client of net/http", workload + peers + ", workloadserver.NewHandler, (*unixsocket.Server).Run, (*http.Server).ServeTLS, (*http.Client).Do", 8.6},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			mb := build(t, "", c.uses)
			t.Logf("%.2f MB", mb)
			if runtime.GOOS == "linux" && runtime.GOARCH == "amd64" {
				assert.Less(t, mb, c.maxMB)
			}
		})
	}
}

// build returns the size of a stripped program that holds on to uses, in 10⁶ bytes. It imports the package
// called name, if that is not empty, and what else uses names. The paths of the checkout are trimmed, as a size must not
// depend on where that lies.
func build(t *testing.T, name, uses string) float64 {
	t.Helper()
	var imports []string
	if name != "" {
		imports = append(imports, module+"/"+name)
	}
	for _, other := range []string{
		module + "/spiffe", module + "/spiffe/spiffetls", module + "/spiffe/workloadapi", module + "/spiffe/workloadserver", module + "/secretcache",
		module + "/pki/ca", module + "/pki/caserver", module + "/spiffe/unixsocket", "net/http",
	} {
		if regexp.MustCompile(`\b`+filepath.Base(other)+`\.`).MatchString(uses) && other != module+"/"+name {
			imports = append(imports, other)
		}
	}
	dir := t.TempDir()
	src := filepath.Join(dir, "main.go")
	text := fmt.Sprintf("package main\n\nimport (\n\t\"runtime\"\n\t\"%s\"\n)\n\nfunc main() { runtime.KeepAlive([]any{%s}) }\n", strings.Join(imports, "\"\n\t\""), uses)
	require.NoError(t, os.WriteFile(src, []byte(text), 0o600))
	bin := filepath.Join(dir, "main")
	goCommand(t, "build", "-trimpath", "-ldflags=-s -w", "-o", bin, src)
	return float64(must.Get(os.Stat(bin))(t).Size()) / 1e6
}

func goCommand(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.Command("go", args...)
	cmd.Dir = root(t)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "go %s: %s", strings.Join(args, " "), out)
	return string(out)
}

// TestConsumer builds a module that imports one of our packages, and compares what that adds to its
// go.mod: for spiffe, one line, which is our module.
func TestConsumer(t *testing.T) {
	t.Parallel()
	if !*long {
		t.Skip("builds other modules; run it with -long")
	}
	for _, c := range []struct {
		imports string
		want    []string
	}{
		{"spiffe", []string{module}},
		{"spiffe/spiffetls", []string{module}},
		{"secretcache", []string{module, "golang.org/x/crypto"}},
	} {
		t.Run(c.imports, func(t *testing.T) {
			t.Parallel()
			assert.Equal(t, c.want, consumer(t, c.imports))
		})
	}
}

// consumer returns the modules that the tidied go.mod of a program requires if it imports only the given
// package, ours first.
func consumer(t *testing.T, imports string) []string {
	t.Helper()
	dir := t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	write("go.mod", "module consumer.test\n\ngo 1.26.0\n\nrequire "+module+" v0.0.0\n\nreplace "+module+" => "+root(t)+"\n")
	write("main.go", "package main\n\nimport _ \""+module+"/"+imports+"\"\n\nfunc main() {}\n")
	run := func(args ...string) string {
		cmd := exec.Command("go", args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod", "GOWORK=off")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "go %s: %s", strings.Join(args, " "), out)
		return string(out)
	}
	run("mod", "tidy")
	run("build", "-o", filepath.Join(dir, "consumer"), ".")
	var mod struct{ Require []struct{ Path string } }
	require.NoError(t, json.Unmarshal([]byte(run("mod", "edit", "-json")), &mod))
	var paths []string
	for _, r := range mod.Require {
		paths = append(paths, r.Path)
	}
	slices.SortFunc(paths, func(a, b string) int {
		return strings.Compare(strings.Replace(a, module, "", 1), strings.Replace(b, module, "", 1))
	})
	return paths
}
