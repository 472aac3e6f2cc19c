package deptest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestReadme compiles the Go snippets of README.md, each in a function of its own that has the
// names which the text around it introduces.
func TestReadme(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile(filepath.Join(root(t), "README.md"))
	require.NoError(t, err)
	snippets := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(string(readme), -1)
	require.Len(t, snippets, 3)

	var body strings.Builder
	for i, s := range snippets {
		ret := "return nil\n"
		if strings.HasPrefix(lastLine(s[1]), "return") {
			ret = ""
		}
		fmt.Fprintf(&body, `func snippet%d(t *testing.T, ctx context.Context, td spiffe.TrustDomain, handler http.Handler) error {
	return func() error {
		%s
		%s}()
}

`, i, s[1], ret)
	}
	src := body.String()
	imports := []string{"context", "testing", "net/http", module + "/spiffe"}
	for _, name := range []string{
		"os", module + "/secretcache", module + "/pki/ca", module + "/spiffe/spiffetls", module + "/spiffe/spiffetest", module + "/caclient/local",
		module + "/sds", module + "/authn/unixsocket", module + "/spiffe/workloadapi", "github.com/stretchr/testify/require",
	} {
		if strings.Contains(src, filepath.Base(name)+".") {
			imports = append(imports, name)
		}
	}
	var file strings.Builder
	file.WriteString("package snippets\n\nimport (\n")
	for _, i := range imports {
		fmt.Fprintf(&file, "\t%q\n", i)
	}
	file.WriteString(")\n\n" + src)

	// The file is laid over a place in the module, so that nothing is written to the tree.
	dir := t.TempDir()
	path := filepath.Join(dir, "snippets.go")
	require.NoError(t, os.WriteFile(path, []byte(file.String()), 0o600))
	overlay := filepath.Join(dir, "overlay.json")
	at := filepath.Join(root(t), "internal", "test", "deptest", "snippets", "snippets.go")
	require.NoError(t, os.WriteFile(overlay, fmt.Appendf(nil, `{"Replace":{%q:%q}}`, at, path), 0o600))
	cmd := exec.Command("go", "build", "-overlay", overlay, "./internal/test/deptest/snippets")
	cmd.Dir = root(t)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s\n%s", out, file.String())
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return lines[len(lines)-1]
}
