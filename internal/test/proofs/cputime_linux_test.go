package proofs

import (
	"syscall"
	"time"
)

// processTime returns how long this process has run: what others do on the machine is not in it.
func processTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
