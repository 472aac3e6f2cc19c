package secretcache

import "time"

// The arithmetic, for the tables in renew_test.go.
var (
	RenewAt     = renewAt
	RetryIn     = retryIn
	PollIn      = pollIn
	PollAgainIn = pollAgainIn
	AttemptTime = attemptTime
	Elapsed     = elapsed
)

// NewWallClock returns the readers' clock as it is after the wall clock leapt ahead by leap.
func NewWallClock(leap time.Duration) (unixNano func() int64) {
	now := time.Now()
	c := &wallClock{epoch: now, base: now.Add(-leap).UnixNano()}
	return c.unixNano
}

type Refusal = refusal

func NewRefusal(times int, wish time.Duration, final bool) Refusal {
	return refusal{times: times, wish: wish, final: final}
}
