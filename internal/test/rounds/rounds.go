// Package rounds says how often a test repeats what is random, or a race that is not lost every time. A test on a
// developer's machine repeats it a few times, .ci/run four times as often, and -long, where a test has that flag, for
// hours.
package rounds

import (
	"os"
	"strconv"
)

// Of returns n, times the number in the variable SVIDKIT_ROUNDS if that is set.
func Of(n int) int {
	times, err := strconv.Atoi(os.Getenv("SVIDKIT_ROUNDS"))
	if err != nil || times < 1 {
		return n
	}
	return n * times
}
