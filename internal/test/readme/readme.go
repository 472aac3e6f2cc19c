// Package readme makes a package of the Go snippets of README.md, for tests that build it.
package readme

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
)

const module = "github.com/svidkit/svidkit/"

// names are the packages that snippets use, without those that Source imports anyway.
var names = []string{
	"os", module + "spiffe/unixsocket", module + "caclient/local", module + "pki/ca", module + "sds", module + "secretcache", module + "spiffe/spiffetest",
	module + "spiffe/spiffetls", module + "spiffe/workloadapi", "github.com/stretchr/testify/require",
}

var fence = regexp.MustCompile("(?s)```go\n(.*?)```")

// Source returns the Go source of a package with each snippet of the README below root in a function of its own, which
// has the names that the text around the snippet introduces.
func Source(root string) (string, error) {
	text, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		return "", err
	}
	snippets := fence.FindAllStringSubmatch(string(text), -1)
	if len(snippets) == 0 {
		return "", fmt.Errorf("README.md below %s has no snippets", root)
	}
	var body strings.Builder
	for i, s := range snippets {
		lines := strings.Split(strings.TrimSpace(s[1]), "\n")
		last := "return nil\n"
		if strings.HasPrefix(lines[len(lines)-1], "return") {
			last = ""
		}
		fmt.Fprintf(&body, `
func snippet%d(t *testing.T, ctx context.Context, td spiffe.TrustDomain, handler http.Handler) error {
	return func() error {
		%s
		%s}()
}
`, i, s[1], last)
	}
	var file strings.Builder
	file.WriteString("package snippets\n\nimport (\n\t\"context\"\n\t\"net/http\"\n\t\"testing\"\n\n\t\"" + module + "spiffe\"\n")
	for _, name := range names {
		if strings.Contains(body.String(), path.Base(name)+".") {
			fmt.Fprintf(&file, "\t%q\n", name)
		}
	}
	file.WriteString(")\n" + body.String())
	return file.String(), nil
}
