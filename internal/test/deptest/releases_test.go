package deptest

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

// TestReleases: go.mod names the older one of the two releases of Go that are supported, the next one is the newest, and
// CI, the workflow and the pages have these two.
func TestReleases(t *testing.T) {
	t.Parallel()
	read := func(name string) string {
		return string(must.Get(os.ReadFile(filepath.Join(root(t), filepath.FromSlash(name))))(t))
	}
	minor := regexp.MustCompile(`(?m)^go 1\.(\d+)`).FindStringSubmatch(read("go.mod"))
	require.NotNil(t, minor)
	n := must.Get(strconv.Atoi(minor[1]))(t)
	older, newest := "1."+strconv.Itoa(n), "1."+strconv.Itoa(n+1)

	assert.Regexp(t, `(?m)^older=go`+regexp.QuoteMeta(older)+`\.\d+ newest=go`+regexp.QuoteMeta(newest)+`\.\d+ `, read(".ci/run"))
	workflow := read(".github/workflows/ci.yml")
	assert.Contains(t, workflow, `go: ["`+older+`.x", "`+newest+`.x"]`)
	assert.Contains(t, workflow, `go-version: "${{ matrix.go }}"`)
	for _, page := range []string{"README.md", "RELEASING.md"} {
		assert.Contains(t, strings.Join(strings.Fields(read(page)), " "), "Go "+older+" and "+newest, page)
	}
	for _, page := range []string{"examples/MACHINE.md", "examples/SERVICE.md"} {
		assert.Contains(t, read(page), "Go "+older+" ", page)
	}
}
