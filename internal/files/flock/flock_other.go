//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

// Package flock does nothing on systems without flock.
package flock

import "os"

// Supported says whether locks do anything on this system.
const Supported = false

// Lock does nothing.
func Lock(*os.File) error { return nil }

// TryLock does nothing, and reports every lock as free.
func TryLock(*os.File) (bool, error) { return true, nil }

// Unlock does nothing.
func Unlock(*os.File) error { return nil }
