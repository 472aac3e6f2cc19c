package metrics

import (
	"io"
	"runtime/debug"
	"strings"
)

const module = "github.com/svidkit/svidkit"

// Process has the metrics of the process itself, such as its descriptors. Packages that count them add them while the
// program is initialized.
var Process Set

// WriteProcess writes svidkit_build_info and [Process], which begin each page of metrics. A page has them once, so
// parts do not write them.
func WriteProcess(w io.Writer) error {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = new(debug.BuildInfo)
	}
	var s Set
	s.Gauges("svidkit_build_info",
		"The version of svidkit, the version of Go, and the revision of the source if it is a build of a checkout.",
		func(add Add) {
			version, revision := describe(info)
			add(1, "version", version, "goversion", info.GoVersion, "revision", revision)
		})
	s.families = append(s.families, Process.families...)
	return s.Write(w)
}

// describe returns the version of the module in a build. The revision is the main module's, and so this module's only
// if both are in one repository.
func describe(info *debug.BuildInfo) (version, revision string) {
	version = "unknown"
	for _, m := range append([]*debug.Module{&info.Main}, info.Deps...) {
		if m.Path == module && m.Replace != nil && m.Replace.Version != "" { // a fork; a directory has no version
			version = m.Replace.Version
		} else if m.Path == module {
			version = m.Version
		}
	}
	if !strings.HasPrefix(info.Main.Path+"/", module+"/") {
		return version, ""
	}
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			revision = s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			revision += "-modified"
		}
	}
	return version, revision
}
