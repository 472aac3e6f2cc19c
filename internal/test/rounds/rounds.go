// Package rounds says how much of a test is run. What is random, or a race that is not lost every time, is repeated a
// few times on a developer's machine and four times as often by .ci/run; what waits for seconds, or measures, runs in
// .ci/run alone. Both read the variable SVIDKIT_ROUNDS. With -short, only what takes no fifth of a second runs. Where
// a test has a flag -long, that means hours, and all that .ci/run runs.
package rounds

import (
	"flag"
	"os"
	"strconv"
	"testing"
)

// Of returns n, times SVIDKIT_ROUNDS if that is set, and times four at least with -long.
func Of(n int) int { return n * max(1, times()) }

// Slow skips a test that waits for seconds, measures, or starts programs, unless SVIDKIT_ROUNDS is set or -long given.
func Slow(t testing.TB) {
	t.Helper()
	if times() < 1 {
		t.Skip("it waits for seconds, measures, or starts programs: run it with SVIDKIT_ROUNDS=1, as .ci/run does")
	}
}

// NotShort skips a test that takes a fifth of a second or more if -short is given.
func NotShort(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("it takes a fifth of a second or more: run it without -short")
	}
}

// Parallel has n tests of a package run at once unless -parallel is given, whatever the processors, as they wait more
// than they compute. TestMain calls it before M.Run.
func Parallel(n int) {
	_ = flag.Set("test.parallel", strconv.Itoa(n)) // -parallel is parsed after this
}

func times() int {
	n, _ := strconv.Atoi(os.Getenv("SVIDKIT_ROUNDS")) // else 0
	if long := flag.Lookup("long"); long != nil && long.Value.String() == "true" {
		n = max(n, 4)
	}
	return n
}
