package metrics

import (
	"runtime/debug"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestDescribe(t *testing.T) {
	t.Parallel()
	vcs := []debug.BuildSetting{{Key: "-buildmode", Value: "exe"}, {Key: "vcs.revision", Value: "abc"}, {Key: "vcs.modified", Value: "true"}}
	dep := &debug.Module{Path: module, Version: "v0.1.0"}
	fork := &debug.Module{Path: module, Version: "v0.1.0", Replace: &debug.Module{Path: "example.org/fork", Version: "v0.2.0"}}
	folder := &debug.Module{Path: module, Version: "v0.1.0", Replace: &debug.Module{Path: "../svidkit"}}
	for name, c := range map[string]struct {
		info debug.BuildInfo
		want [2]string
	}{
		"checkout":      {debug.BuildInfo{GoVersion: "go1", Main: debug.Module{Path: module, Version: "v0.1.1-0.2026"}, Settings: vcs}, [2]string{"v0.1.1-0.2026", "abc-modified"}},
		"unchanged":     {debug.BuildInfo{GoVersion: "go1", Main: debug.Module{Path: module, Version: "v0.1.0"}, Settings: vcs[:2]}, [2]string{"v0.1.0", "abc"}},
		"nested module": {debug.BuildInfo{GoVersion: "go1", Main: debug.Module{Path: module + "/examples/grpc"}, Deps: []*debug.Module{folder}, Settings: vcs[:2]}, [2]string{"v0.1.0", "abc"}},
		"a stranger's":  {debug.BuildInfo{GoVersion: "go1", Main: debug.Module{Path: "example.org/x", Version: "v9"}, Deps: []*debug.Module{{Path: "a"}, dep}, Settings: vcs}, [2]string{"v0.1.0", ""}},
		"a fork":        {debug.BuildInfo{GoVersion: "go1", Main: debug.Module{Path: module + "s"}, Deps: []*debug.Module{fork}, Settings: vcs}, [2]string{"v0.2.0", ""}},
		"without":       {debug.BuildInfo{}, [2]string{"unknown", ""}},
	} {
		version, revision := describe(&c.info)
		assert.Equal(t, c.want, [2]string{version, revision}, name)
	}
}
