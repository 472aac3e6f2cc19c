package deptest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestWeight holds what each package links: the modules in the table of README.md, and a bound on
// the size of a stripped program that imports it. "go test -v -run Weight" prints the table.
func TestWeight(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("links programs")
	}
	readme, err := os.ReadFile(filepath.Join(root(t), "README.md"))
	require.NoError(t, err)
	for _, c := range []struct {
		imports string
		uses    string // what the program has of it
		modules []string
		maxMB   float64 // of 10⁶ bytes, on linux/amd64
	}{
		{"spiffe", "spiffe.NewVerifier, spiffe.ParseBundle, spiffe.ParseSVIDPEM", nil, 4},
		{"spiffe/spiffetls", "spiffetls.ConfigureServer, spiffetls.Transport", nil, 7},
		{"spiffe/jwtsvid", "jwtsvid.NewValidator, jwtsvid.NewIssuer", []string{"github.com/go-jose/go-jose/v4"}, 7},
		{"spiffe/federation", "federation.New, (*federation.Manager).Run", nil, 7},
		{"spiffe/workloadapi", "workloadapi.New, (*workloadapi.Source).Run", []string{"google.golang.org/protobuf"}, 7.2},
		{"pki", "pki.NewCSR, pki.ParseCSR, pki.NewRoot", []string{"golang.org/x/crypto"}, 4},
		{"pki/ca", "ca.Open, (*ca.Authority).Sign, (*ca.Authority).Run", []string{"github.com/fsnotify/fsnotify", "github.com/go-jose/go-jose/v4", "golang.org/x/crypto", "golang.org/x/sys"}, 6},
		{"pki/ca/kubesecret", "kubesecret.New, (*kubesecret.Store).Save", []string{"github.com/fsnotify/fsnotify", "github.com/go-jose/go-jose/v4", "golang.org/x/crypto", "golang.org/x/sys"}, 8},
		{"pki/ra", "ra.New, (*ra.RA).Sign", []string{"github.com/fsnotify/fsnotify", "github.com/go-jose/go-jose/v4", "golang.org/x/crypto", "golang.org/x/sys"}, 8},
		{"pki/caserver/istioca", "istioca.New, (*istioca.Server).ServeHTTP", []string{"github.com/fsnotify/fsnotify", "github.com/go-jose/go-jose/v4", "golang.org/x/crypto", "golang.org/x/sys", "google.golang.org/protobuf"}, 7.2},
		{"pki/caserver", "caserver.New, (*caserver.Server).Run", []string{"github.com/fsnotify/fsnotify", "github.com/go-jose/go-jose/v4", "golang.org/x/crypto", "golang.org/x/sys", "google.golang.org/protobuf"}, 7.5},
		{"pki/linkerdname", "linkerdname.Mesh.Name, linkerdname.Match", nil, 4},
		{"pki/caserver/linkerd", "linkerd.New, (*linkerd.Server).ServeHTTP", []string{"github.com/fsnotify/fsnotify", "github.com/go-jose/go-jose/v4", "golang.org/x/crypto", "golang.org/x/sys", "google.golang.org/protobuf"}, 7.2},
		{"caclient/local", "local.New, (*ca.Authority).Run", []string{"github.com/fsnotify/fsnotify", "github.com/go-jose/go-jose/v4", "golang.org/x/crypto", "golang.org/x/sys"}, 6},
		{"caclient/istioca", "istioca.New, (*istioca.CA).Sign", []string{"golang.org/x/crypto", "google.golang.org/protobuf"}, 7.2},
		{"secretcache", "secretcache.New, (*secretcache.Manager).Run", []string{"golang.org/x/crypto"}, 4.5},
		{"authn", "authn.ClientCertificate, authn.FirstOf", nil, 7},
		{"authn/kube", "kube.NewReviewer, kube.TokenReview", nil, 8},
		{"sds", "sds.NewHandler, sds.NewClient, (*unixsocket.Server).Run", []string{"golang.org/x/crypto", "google.golang.org/protobuf"}, 7.2},
	} {
		t.Run(c.imports, func(t *testing.T) {
			t.Parallel()
			var modules []string
			for m := range strings.FieldsSeq(goCommand(t, "list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", "./"+c.imports)) {
				if m != module && !slices.Contains(modules, m) {
					modules = append(modules, m)
				}
			}
			slices.Sort(modules)
			assert.Equal(t, c.modules, modules)

			mb := size(t, c.imports, c.uses)
			if runtime.GOOS == "linux" && runtime.GOARCH == "amd64" {
				assert.Less(t, mb, c.maxMB)
			}
			others := "none"
			if len(modules) > 0 {
				others = "`" + strings.Join(modules, "`, `") + "`"
			}
			row := fmt.Sprintf("| `%s` | %s |", c.imports, others)
			t.Logf("%s %.1f MB |", row, mb)
			assert.True(t, strings.Contains(string(readme), row), "README.md has no row that begins %s", row)
		})
	}
}

// What a program weighs that uses the packages together, and not only imports them. Most of it is
// net/http with TLS and HTTP/2: a program that serves and calls with net/http and uses nothing of ours has
// 6.6 MB, and log/slog adds 0.3.
func TestWeightOfPrograms(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("links programs")
	}
	workload := "spiffe.NewVerifier, secretcache.New, (*secretcache.Manager).Run, workloadapi.New, (*workloadapi.Source).Run"
	peers := ", spiffetls.ConfigureServer, spiffetls.Transport"
	for _, c := range []struct {
		name, uses string
		maxMB      float64 // of 10⁶ bytes, on linux/amd64
	}{
		{"a service that serves and calls with an identity from an agent", "spiffe.NewVerifier, workloadapi.New, (*workloadapi.Source).Run" + peers + ", (*http.Server).ServeTLS, (*http.Client).Do", 7.5},
		{"identity from an agent and from a CA", workload, 7.5},
		{"the agent's side of the Workload API", "workloadserver.NewHandler, (*unixsocket.Server).Run", 7.2},
		{"and mutual TLS, and the agent's handler", workload + peers + ", workloadserver.NewHandler", 7.5},
		{"and a server and a client of net/http", workload + peers + ", workloadserver.NewHandler, (*unixsocket.Server).Run, (*http.Server).ServeTLS, (*http.Client).Do", 8.2},
		{"Istio's certificate service", "istioca.New, (*istioca.Server).ServeHTTP, caserver.Serve", 7.2},
		{"Linkerd's certificate service", "linkerd.New, (*linkerd.Server).ServeHTTP, caserver.Serve", 7.2},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var imports []string
			for _, name := range []string{module + "/pki/caserver", module + "/pki/caserver/istioca", module + "/pki/caserver/linkerd", module + "/secretcache", module + "/spiffe", module + "/spiffe/workloadapi", module + "/spiffe/workloadserver", module + "/authn/unixsocket", module + "/spiffe/spiffetls", "net/http"} {
				if strings.Contains(c.uses, filepath.Base(name)+".") {
					imports = append(imports, name)
				}
			}
			mb := build(t, fmt.Sprintf("package main\n\nimport (\n\t\"runtime\"\n\t\"%s\"\n)\n\nfunc main() { runtime.KeepAlive([]any{%s}) }\n",
				strings.Join(imports, "\"\n\t\""), c.uses))
			t.Logf("%.2f MB", mb)
			if runtime.GOOS == "linux" && runtime.GOARCH == "amd64" {
				assert.Less(t, mb, c.maxMB)
			}
		})
	}
}

// size returns the size of a stripped program that holds on to uses, in 10⁶ bytes.
func size(t *testing.T, imports, uses string) float64 {
	t.Helper()
	text := fmt.Sprintf("package main\n\nimport (\n\t\"runtime\"\n\n\t%q\n", module+"/"+imports)
	if beside := map[string]string{"caclient/local": "/pki/ca", "sds": "/authn/unixsocket"}[imports]; beside != "" {
		text += fmt.Sprintf("\t%q\n", module+beside)
	}
	text += ")\n\nfunc main() { runtime.KeepAlive([]any{" + uses + "}) }\n"
	return build(t, text)
}

// build returns the size of a stripped program in 10⁶ bytes.
func build(t *testing.T, text string) float64 {
	t.Helper()
	dir := t.TempDir()
	src := filepath.Join(dir, "main.go")
	require.NoError(t, os.WriteFile(src, []byte(text), 0o600))
	bin := filepath.Join(dir, "main")
	goCommand(t, "build", "-ldflags=-s -w", "-o", bin, src)
	fi, err := os.Stat(bin)
	require.NoError(t, err)
	return float64(fi.Size()) / 1e6
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
