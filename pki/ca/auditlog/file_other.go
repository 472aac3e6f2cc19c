//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

package auditlog

import "os"

// Rename closes the file first: Windows does not rename one that is open.
func (osFileSystem) Rename(f file, from, to string) error {
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(from, to)
}

// SyncDir does nothing: folders cannot be opened for that everywhere.
func (osFileSystem) SyncDir(string) error { return nil }
