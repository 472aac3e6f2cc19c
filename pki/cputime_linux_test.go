package pki_test

import (
	"syscall"
	"time"
)

// threadTime returns how long this thread has run: what others do on the machine is not in it.
func threadTime() time.Duration {
	const thread = 1 // RUSAGE_THREAD, which package syscall does not name
	var u syscall.Rusage
	if err := syscall.Getrusage(thread, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
