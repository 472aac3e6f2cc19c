package main

import (
	"testing"

	"github.com/svidkit/svidkit/internal/test/scripttest"
)

// The operator's day: each script in testdata/script is commands, what they print and how they end; and each slip, and
// what the program says helps.
func TestScripts(t *testing.T) {
	t.Parallel()
	scripttest.Run(t, "testdata/script", "ca", "svid", "agent")
}
