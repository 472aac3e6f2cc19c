package flock

import (
	"os"
	"time"
)

// TryLockFor is [TryLock], repeated until the lock is free or the time is over.
func TryLockFor(f *os.File, wait time.Duration) (bool, error) {
	for end := time.Now().Add(wait); ; time.Sleep(10 * time.Millisecond) {
		if got, err := TryLock(f); got || err != nil || !time.Now().Before(end) {
			return got, err
		}
	}
}
