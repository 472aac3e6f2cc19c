// Package retry reads from an error whether and when to repeat what failed. The comment of spiffe.ErrNotReady tells
// users how an error says so.
package retry

import (
	"errors"
	"time"
)

// ErrNotReady is spiffe.ErrNotReady.
var ErrNotReady = errors.New("not ready")

// Error is an error that says whether repeating may help, and how long the server asked its clients to wait before; 0
// means that it did not.
type Error interface {
	error
	Retryable() (after time.Duration, ok bool)
}

// Advice is what an error says about repeating what failed.
type Advice int

// The advices. Where the parts of an error differ, the greater one wins.
const (
	Unknown Advice = iota // nothing; most callers assume that the failure passes
	Again                 // the failure may pass
	Never                 // repeating does not help
)

// After returns what err says about repeating what failed, and the longest wait in it.
//
// The outermost [Error] speaks for all that it wraps, as it has judged its cause. Where an error wraps several, a
// refusal for good wins over a wait, and the longest wait over none; their order does not matter. [ErrNotReady] means
// [Again].
func After(err error) (wait time.Duration, advice Advice) {
	switch e := err.(type) { // this node of the tree
	case Error:
		after, again := e.Retryable()
		if !again {
			return max(after, 0), Never
		}
		return max(after, 0), Again
	case interface{ Unwrap() error }:
		return After(e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, part := range e.Unwrap() {
			after, says := After(part)
			wait, advice = max(wait, after), max(advice, says)
		}
		return wait, advice
	}
	if err == ErrNotReady { // this node of the tree
		return 0, Again
	}
	return 0, Unknown
}
