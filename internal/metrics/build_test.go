package metrics

import (
	"io"
	"io/fs"
	"net/http/httptest"
	"os"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestPages looks at the source: metrics are served by [Page] alone, which has those of the process with them.
func TestPages(t *testing.T) {
	t.Parallel()
	var pages []string
	require.NoError(t, fs.WalkDir(os.DirFS("../.."), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return err
		}
		source, err := os.ReadFile("../../" + name)
		if strings.Contains(string(source), "text/plain; version=") {
			pages = append(pages, name)
		}
		return err
	}))
	assert.Equal(t, []string{"internal/metrics/page.go"}, pages)

	w := httptest.NewRecorder()
	require.NoError(t, new(Page).Serve(w, func(w io.Writer) error {
		_, err := io.WriteString(w, "more 1\n")
		return err
	}))
	assert.Regexp(t, "(?s)svidkit_build_info.*more 1\n$", w.Body.String())
	w = httptest.NewRecorder()
	assert.ErrorIs(t, new(Page).Serve(w, func(io.Writer) error { return io.ErrShortWrite }), io.ErrShortWrite)
	assert.Empty(t, w.Body.String())
}

func TestDescribe(t *testing.T) {
	t.Parallel()
	vcs := []debug.BuildSetting{{Key: "-buildmode", Value: "exe"}, {Key: "vcs.revision", Value: "abc"}, {Key: "vcs.modified", Value: "true"}}
	dep := &debug.Module{Path: module, Version: "v0.1.0"}
	fork := &debug.Module{Path: module, Version: "v0.1.0", Replace: &debug.Module{Path: "example.org/fork", Version: "v0.2.0"}}
	folder := &debug.Module{Path: module, Version: "v0.1.0", Replace: &debug.Module{Path: "../svidkit"}}
	for name, c := range map[string]struct {
		info debug.BuildInfo
		want buildInfo
	}{
		"checkout":      {debug.BuildInfo{GoVersion: "go1", Main: debug.Module{Path: module, Version: "v0.1.1-0.2026"}, Settings: vcs}, buildInfo{"v0.1.1-0.2026", "go1", "abc-modified"}},
		"unchanged":     {debug.BuildInfo{GoVersion: "go1", Main: debug.Module{Path: module, Version: "v0.1.0"}, Settings: vcs[:2]}, buildInfo{"v0.1.0", "go1", "abc"}},
		"nested module": {debug.BuildInfo{GoVersion: "go1", Main: debug.Module{Path: module + "/examples/grpc"}, Deps: []*debug.Module{folder}, Settings: vcs[:2]}, buildInfo{"v0.1.0", "go1", "abc"}},
		"a stranger's":  {debug.BuildInfo{GoVersion: "go1", Main: debug.Module{Path: "example.org/x", Version: "v9"}, Deps: []*debug.Module{{Path: "a"}, dep}, Settings: vcs}, buildInfo{"v0.1.0", "go1", ""}},
		"a fork":        {debug.BuildInfo{GoVersion: "go1", Main: debug.Module{Path: module + "s"}, Deps: []*debug.Module{fork}, Settings: vcs}, buildInfo{"v0.2.0", "go1", ""}},
		"without":       {debug.BuildInfo{}, buildInfo{"unknown", "", ""}},
	} {
		assert.Equal(t, c.want, describe(&c.info), name)
	}
}
