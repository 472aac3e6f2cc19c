//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

package unixsocket

// lockDir does nothing on systems without flock.
func lockDir(string) (unlock func(), err error) { return func() {}, nil }
