package private

import "os"

// MakeDirSync is MakeDir with sync in the place of fsync.
func MakeDirSync(path string, o Options, sync func(dir string) error) (*os.Root, error) {
	return openDir(path, o, sync)
}

// EmptyDir is PodVolume for a process in a pod with these mounts.
func EmptyDir(mounts, path string) bool { return mounted(mounts, path, emptyDir) }
