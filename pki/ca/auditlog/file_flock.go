//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package auditlog

import "os"

func (osFileSystem) Rename(_ file, from, to string) error { return os.Rename(from, to) }

func (osFileSystem) SyncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
