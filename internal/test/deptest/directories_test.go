package deptest

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// directories are those of the library. What is in one and its internal packages count; kits do not.
var directories = []string{"authn", "caclient", "pki", "sds", "secretcache", "spiffe"}

// left are the pairs of directories that import each other, and may not for long.
var left []string

// betweenDirectories returns, for each directory that imports another, the imports, as "package -> package".
func betweenDirectories(t *testing.T) map[[2]string][]string {
	t.Helper()
	imports := map[[2]string][]string{}
	for _, p := range ours(t) {
		from, _, _ := strings.Cut(p.name(), "/")
		if !slices.Contains(directories, from) || slices.Contains(floors[kits].packages, p.name()) {
			continue
		}
		for _, imp := range p.Imports {
			path, ours := strings.CutPrefix(imp, module+"/")
			if to, _, _ := strings.Cut(path, "/"); ours && to != from && slices.Contains(directories, to) {
				edge := [2]string{from, to}
				imports[edge] = append(imports[edge], p.name()+" -> "+path)
			}
		}
	}
	return imports
}

// TestDirectories: of two directories of the library, one at most imports the other.
func TestDirectories(t *testing.T) {
	t.Parallel()
	imports, found := betweenDirectories(t), map[string]bool{}
	for edge, there := range imports {
		back := imports[[2]string{edge[1], edge[0]}]
		if edge[0] > edge[1] || back == nil {
			continue
		}
		pair := edge[0] + " and " + edge[1]
		found[pair] = true
		assert.Contains(t, left, pair, "they import each other:\n%s\n\n%s", strings.Join(there, "\n"), strings.Join(back, "\n"))
	}
	assert.ElementsMatch(t, left, slices.Collect(maps.Keys(found)), "take what is mended out of the list")
}
