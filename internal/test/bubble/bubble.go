// Package bubble runs parallel tests in bubbles of testing/synctest.
package bubble

import (
	"testing"
	"testing/synctest"
)

// Test has t run beside others, in a bubble.
func Test(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, f)
}

// Run runs a subtest beside others, in a bubble.
func Run(t *testing.T, name string, f func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { Test(t, f) })
}
