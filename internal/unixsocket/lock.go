package unixsocket

import (
	"os"
	"time"

	"github.com/svidkit/svidkit/internal/flock"
)

const (
	lockTime = 10 * time.Second // others need a second of it at most
	lockStep = 10 * time.Millisecond
)

// lockDir waits for the lock on a folder, which lasts from here to unlock or the end of the process.
// It is held for moments only, and leaves no file behind. As everybody who may read the folder can hold
// it, for as long as they like, there is an end to the wait, and it goes on without the lock. Without
// flock it does nothing.
func lockDir(dir string) (unlock func(), err error) {
	if !flock.Supported {
		return func() {}, nil
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	for waited := time.Duration(0); ; waited += lockStep {
		ok, err := flock.TryLock(f)
		if err != nil {
			f.Close()
			return nil, err
		}
		if ok || waited >= lockTime {
			return func() { f.Close() }, nil
		}
		time.Sleep(lockStep)
	}
}
