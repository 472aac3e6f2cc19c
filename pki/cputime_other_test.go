//go:build !linux

package pki_test

import "time"

var began = time.Now()

// threadTime returns the time that has passed, where that of a thread is hard to know.
func threadTime() time.Duration { return time.Since(began) }
