package unixsocket

import (
	"os"

	"github.com/svidkit/svidkit/internal/flock"
)

// lockDir waits for the lock on a folder, which lasts from here to unlock or the end of the process.
// It is held for moments only, and leaves no file behind. Without flock it does nothing.
func lockDir(dir string) (unlock func(), err error) {
	if !flock.Supported {
		return func() {}, nil
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := flock.Lock(f); err != nil {
		f.Close()
		return nil, err
	}
	return func() { f.Close() }, nil
}
