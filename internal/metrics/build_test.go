package metrics

import (
	"io/fs"
	"os"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestPages looks at the source: what writes a page of metrics writes the build into it.
func TestPages(t *testing.T) {
	t.Parallel()
	pages := 0
	require.NoError(t, fs.WalkDir(os.DirFS("../.."), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return err
		}
		source, err := os.ReadFile("../../" + name)
		if strings.Contains(string(source), "text/plain; version=") {
			pages++
			assert.Contains(t, string(source), "metrics.WriteProcess", name)
		}
		return err
	}))
	assert.GreaterOrEqual(t, pages, 3)
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
