package metrics

import (
	"io"
	"runtime/debug"
	"strings"
	"sync"
)

const module = "github.com/svidkit/svidkit"

// Process has the metrics that belong to no part but to the process, such as its descriptors. Who counts them adds
// them while the program is initialized.
var Process Set

// WriteProcess writes svidkit_build_info and [Process], with which each page of metrics begins. A part does not write
// them: a page has them once.
func WriteProcess(w io.Writer) error {
	var s Set
	s.Gauges("svidkit_build_info",
		"The version of svidkit, the version of Go, and the revision of the source if it is a build of a checkout.",
		func(add Add) {
			b := build()
			add(1, "version", b.version, "goversion", b.goversion, "revision", b.revision)
		})
	s.families = append(s.families, Process.families...)
	return s.Write(w)
}

type buildInfo struct{ version, goversion, revision string }

var build = sync.OnceValue(func() buildInfo {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = new(debug.BuildInfo)
	}
	return describe(info)
})

// describe returns the version of the module in a build. The revision is that of the main module, and so of this one
// only if both are of one repository.
func describe(info *debug.BuildInfo) buildInfo {
	b := buildInfo{version: "unknown", goversion: info.GoVersion}
	for _, m := range append([]*debug.Module{&info.Main}, info.Deps...) {
		if m.Path != module {
			continue
		}
		if m.Replace != nil && m.Replace.Version != "" { // a fork; one in a folder has no version
			m = m.Replace
		}
		b.version = m.Version
	}
	if !strings.HasPrefix(info.Main.Path+"/", module+"/") {
		return b
	}
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			b.revision = s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			b.revision += "-modified"
		}
	}
	return b
}
