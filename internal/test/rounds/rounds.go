// Package rounds says how much of a test is run. What is random, or a race that is not lost every time, is repeated a few
// times on a developer's machine and four times as often by .ci/run; what waits for seconds runs in .ci/run alone. Both
// read the variable SVIDKIT_ROUNDS. Where a test has a flag -long, that means hours.
package rounds

import (
	"os"
	"strconv"
	"testing"
)

// Of returns n, times SVIDKIT_ROUNDS if that is set.
func Of(n int) int { return n * max(1, times()) }

// Slow skips a test that waits for seconds, or starts programs, unless SVIDKIT_ROUNDS is set.
func Slow(t testing.TB) {
	t.Helper()
	if times() < 1 {
		t.Skip("it takes seconds: run it with SVIDKIT_ROUNDS=1, as .ci/run does")
	}
}

func times() int {
	n, _ := strconv.Atoi(os.Getenv("SVIDKIT_ROUNDS")) // else 0
	return n
}
