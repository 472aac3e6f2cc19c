package main

import (
	"testing"

	"github.com/svidkit/svidkit/internal/test/scripttest"
)

// What an operator asks, slips included: each script in testdata/script is commands, what they print and how they end.
func TestScripts(t *testing.T) {
	t.Parallel()
	scripttest.Run(t, "testdata/script", "svid", "ca")
}
