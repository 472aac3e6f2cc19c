package compare

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/mod/module"
	"golang.org/x/mod/zip"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/readme"
)

// release is the version that RELEASING.md releases next. The nested modules require it of the root.
const release = "v0.1.0"

// TestRelease has the modules as a stranger has them: zipped as the module proxy does it, and without the replace
// directives of this repository. In an empty module "go get" adds the root and the nested modules, the program of
// README.md builds, and its test passes.
func TestRelease(t *testing.T) {
	t.Parallel()
	const root = "github.com/svidkit/svidkit"
	repository := must.Get(filepath.Abs("../.."))(t)
	proxy, dir := t.TempDir(), t.TempDir()
	nested := []string{"spiffe/spiffegrpc", "spiffe/gospiffe", "pki/tpmkey", "pki/pkcs11key"}
	publish(t, proxy, module.Version{Path: root, Version: release}, repository)
	for _, folder := range nested {
		publish(t, proxy, module.Version{Path: root + "/" + folder, Version: release}, filepath.Join(repository, folder))
	}

	files := must.Get(readme.Snippets(repository))(t)
	maps.Copy(files, map[string]string{
		"go.mod": "module stranger.test/program\n\ngo 1.26.0\n",
		"adapters.go": `package program

import (
	_ "` + root + `/pki/pkcs11key"
	_ "` + root + `/pki/tpmkey"
	_ "` + root + `/spiffe/gospiffe"
	_ "` + root + `/spiffe/spiffegrpc"
)
`,
	})
	for name, text := range files {
		file := filepath.Join(dir, filepath.FromSlash(name))
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o700))
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	}

	// What these modules need of others comes from the cache of this machine, where it is, or from the usual proxy. The
	// modules themselves go into a cache of their own: the same version has another content after each commit.
	cache := strings.TrimSpace(run(t, "", nil, "go", "env", "GOMODCACHE"))
	usual := strings.TrimSpace(run(t, "", nil, "go", "env", "GOPROXY"))
	env := []string{
		"GOWORK=off", "GOFLAGS=-modcacherw -trimpath", "GOMODCACHE=" + t.TempDir(), "GONOSUMDB=" + root, "GONOPROXY=none", "GOPRIVATE=",
		"GOPROXY=" + fileURL(proxy) + "," + fileURL(filepath.Join(cache, "cache", "download")) + "," + usual,
	}
	get := []string{"get", root + "@" + release}
	for _, folder := range nested {
		get = append(get, root+"/"+folder+"@"+release)
	}
	run(t, dir, env, "go", get...)
	run(t, dir, env, "go", "get", "-t", "./...")
	run(t, dir, env, "go", "build", "./...")
	run(t, dir, env, "go", "test", "./...")

	// Each nested module alone brings the root of its own version.
	for _, folder := range nested {
		alone := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(alone, "go.mod"), []byte("module stranger.test/alone\n\ngo 1.26.0\n"), 0o600))
		run(t, alone, env, "go", "get", root+"/"+folder+"@"+release)
		got := run(t, alone, env, "go", "list", "-m", "-f", "{{.Version}}", root)
		require.Equal(t, release, strings.TrimSpace(got), folder)
	}
}

func fileURL(dir string) string { return "file://" + filepath.ToSlash(dir) }

// publish puts a version of the module in dir into a directory that is laid out as a proxy serves it.
func publish(t *testing.T, proxy string, v module.Version, dir string) {
	t.Helper()
	at := filepath.Join(proxy, filepath.FromSlash(v.Path), "@v")
	require.NoError(t, os.MkdirAll(at, 0o700))
	mod := must.Get(os.ReadFile(filepath.Join(dir, "go.mod")))(t)
	for name, data := range map[string][]byte{
		"list":              []byte(v.Version + "\n"),
		v.Version + ".info": []byte(`{"Version":"` + v.Version + `"}`),
		v.Version + ".mod":  mod,
	} {
		require.NoError(t, os.WriteFile(filepath.Join(at, name), data, 0o600))
	}
	f := must.Get(os.Create(filepath.Join(at, v.Version+".zip")))(t)
	require.NoError(t, zip.CreateFromDir(f, v, dir), "%s", v)
	require.NoError(t, f.Close())
}

// run runs a command with more variables, and returns what it prints.
func run(t *testing.T, dir string, env []string, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s %s: %s", name, strings.Join(args, " "), out)
	return string(out)
}
