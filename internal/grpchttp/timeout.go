package grpchttp

import (
	"math"
	"strconv"
	"time"
)

// units are the units of grpc-timeout, the smallest first.
var units = []struct {
	name byte
	unit time.Duration
}{
	{'n', time.Nanosecond}, {'u', time.Microsecond}, {'m', time.Millisecond},
	{'S', time.Second}, {'M', time.Minute}, {'H', time.Hour},
}

const maxTimeoutDigits = 8

// formatTimeout formats d for the grpc-timeout header: the finest unit in which d fits into 8 digits, rounded up so
// that the server does not give up before its client.
func formatTimeout(d time.Duration) string {
	if d <= 0 {
		return "0n"
	}
	for _, u := range units {
		n := d / u.unit
		if d%u.unit != 0 {
			n++
		}
		if n < 1e8 {
			return strconv.FormatInt(int64(n), 10) + string(u.name)
		}
	}
	return "99999999H" // not reached: the longest Duration has 2,562,048 hours
}

// parseTimeout reverses formatTimeout. Times too long for a Duration become the longest Duration.
func parseTimeout(s string) (time.Duration, bool) {
	if len(s) < 2 || len(s) > maxTimeoutDigits+1 {
		return 0, false
	}
	n, err := strconv.ParseUint(s[:len(s)-1], 10, 32)
	for _, u := range units {
		switch {
		case err != nil || u.name != s[len(s)-1]:
		case int64(n) > math.MaxInt64/int64(u.unit):
			return math.MaxInt64, true
		default:
			return time.Duration(n) * u.unit, true
		}
	}
	return 0, false
}
