//go:build !unix

package private

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

const noBlock = 0

// follow returns path and its info, or the last existing directory and the missing names.
func follow(path string, _ *Options) (at string, missing []string, info fs.FileInfo, err error) {
	if path == "" {
		return "", nil, nil, errors.New("the path is empty")
	}
	if at, err = filepath.Abs(path); err != nil {
		return "", nil, nil, err
	}
	for {
		info, err = os.Stat(at)
		above := filepath.Dir(at)
		if !errors.Is(err, fs.ErrNotExist) || above == at {
			return at, missing, info, err
		}
		missing = append([]string{filepath.Base(at)}, missing...)
		at = above
	}
}

func checkOwner(string, fs.FileInfo, *Options) error { return nil }

func checkKeys(string, fs.FileInfo) error { return nil }

func checkReadable(string, fs.FileInfo) error { return nil }

func checkWritable(string, fs.FileInfo, *Options) error { return nil }

func hasOwner(fs.FileInfo) bool { return false }

// SyncDir does nothing: these systems keep their own journal of names.
func SyncDir(string) error { return nil }
