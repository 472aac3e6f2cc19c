package metricspage_test

import (
	"io"
	"io/fs"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/metrics/metricspage"
)

// TestPages looks at the source: metrics are served by [metricspage.Page] alone, which has those of the process with them.
func TestPages(t *testing.T) {
	t.Parallel()
	var pages []string
	require.NoError(t, fs.WalkDir(os.DirFS("../../.."), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return err
		}
		source, err := os.ReadFile("../../../" + name)
		if strings.Contains(string(source), "text/plain; version=") {
			pages = append(pages, name)
		}
		return err
	}))
	assert.Equal(t, []string{"internal/metrics/metricspage/page.go"}, pages)

	w := httptest.NewRecorder()
	require.NoError(t, new(metricspage.Page).Serve(w, func(w io.Writer) error {
		_, err := io.WriteString(w, "more 1\n")
		return err
	}))
	assert.Regexp(t, "(?s)svidkit_build_info.*more 1\n$", w.Body.String())
	w = httptest.NewRecorder()
	assert.ErrorIs(t, new(metricspage.Page).Serve(w, func(io.Writer) error { return io.ErrShortWrite }), io.ErrShortWrite)
	assert.Empty(t, w.Body.String())
}
