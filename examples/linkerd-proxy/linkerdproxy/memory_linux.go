package linkerdproxy

import "syscall"

// inMemory reports whether a directory's files are in memory, as far as the kernel tells.
func inMemory(dir string) bool {
	const tmpfs, ramfs = 0x01021994, 0x858458f6
	var s syscall.Statfs_t
	err := syscall.Statfs(dir, &s)
	kind := uint32(s.Type) // it has 32 bits
	return err != nil || kind == tmpfs || kind == ramfs
}
