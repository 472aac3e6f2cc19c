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
	mounts, err := os.ReadFile("/proc/self/mountinfo") // proc(5): ID, parent, device, root, mount point, …, a hyphen, type
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(mounts)) {
		mount, rest, _ := strings.Cut(line, " - ")
		if f := strings.Fields(mount); len(f) > 4 && f[4] == filepath.Clean(path) {
			return strings.HasPrefix(rest, "tmpfs ") || strings.Contains(f[3], "/kubernetes.io~empty-dir/")
		}
	}
	return false
}
