package private

import (
	"os"
	"path/filepath"
	"strings"
)

// PodVolume reports whether a folder is an emptyDir of the pod in which this process runs. Root owns it, and each container
// that has it may write to it, which the operator cannot have otherwise. The path has no links.
func PodVolume(path string) bool {
	if os.Getenv("KUBERNETES_SERVICE_HOST") == "" {
		return false
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	return err == nil && emptyDir(string(mounts), filepath.Clean(path))
}

func emptyDir(mounts, path string) bool {
	for line := range strings.Lines(mounts) { // proc(5): ID, parent, device, root, mount point, …, a hyphen, type
		mount, rest, _ := strings.Cut(line, " - ")
		if f := strings.Fields(mount); len(f) > 4 && f[4] == path {
			return strings.HasPrefix(rest, "tmpfs ") || strings.Contains(f[3], "/kubernetes.io~empty-dir/")
		}
	}
	return false
}
