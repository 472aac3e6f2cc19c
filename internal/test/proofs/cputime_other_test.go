//go:build !linux

package proofs

import "time"

var began = time.Now()

// processTime returns the time that has passed, where that of a process is hard to know.
func processTime() time.Duration { return time.Since(began) }
