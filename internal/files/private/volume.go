package private

import (
	"os"
	"path/filepath"
	"strings"
)

// PodVolume reports whether a directory is an emptyDir of the pod in which this process runs. Root owns it, and each
// container that has it may write to it, which the operator cannot have otherwise. The path has no links.
func PodVolume(path string) bool { return podMount(path, emptyDir) }

// podMount reports whether a directory is a mount of the pod in which this process runs that is of a kind.
func podMount(path string, is func(root, rest string) bool) bool {
	if os.Getenv("KUBERNETES_SERVICE_HOST") == "" {
		return false
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	return err == nil && mounted(string(mounts), filepath.Clean(path), is)
}

// mounted calls is with the root of a mount in its file system, and with its type and what follows.
func mounted(mounts, path string, is func(root, rest string) bool) bool {
	for line := range strings.Lines(mounts) { // proc(5): ID, parent, device, root, mount point, …, a hyphen, type
		mount, rest, _ := strings.Cut(line, " - ")
		if f := strings.Fields(mount); len(f) > 4 && f[4] == path {
			return is(f[3], rest)
		}
	}
	return false
}

func emptyDir(root, rest string) bool {
	return strings.HasPrefix(rest, "tmpfs ") || strings.Contains(root, "/kubernetes.io~empty-dir/")
}

// configMap is the kind of a volume that the kubelet alone writes to: no container has it otherwise than read-only.
// It has mode 0777, and no sticky bit, as a Secret's has.
func configMap(root, _ string) bool { return strings.Contains(root, "/kubernetes.io~configmap/") }
