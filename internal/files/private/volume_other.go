//go:build !linux

package private

// PodVolume reports whether a folder is an emptyDir of the pod in which this process runs: only Linux has them.
func PodVolume(string) bool { return false }
