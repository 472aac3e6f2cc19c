package caclient

import (
	"errors"
	"fmt"
	"time"

	"github.com/svidkit/svidkit/internal/retry"
)

// Kinds of failure in an [Error], for errors.Is.
var (
	// ErrUnavailable means that the failure may be temporary: the CA cannot be reached, is not ready, is over a
	// limit, has failed, or did not answer in time.
	ErrUnavailable = errors.New("unavailable")

	// ErrInvalid means that the CA refuses the request as it stands.
	ErrInvalid = errors.New("invalid request")

	// ErrUnauthenticated means that the CA could not authenticate the caller.
	ErrUnauthenticated = errors.New("not authenticated")

	// ErrDenied means that the CA has authenticated the caller, and refuses.
	ErrDenied = errors.New("denied")

	// ErrBadAnswer means that the answer of the CA failed the check of [New].
	ErrBadAnswer = errors.New("bad answer")
)

// Error is a failure of a CA or of the connection to it.
type Error struct {
	Op         string        // what was tried: "sign", "fetch bundles"
	Kind       error         // one of the kinds above; nil if none fits
	RetryAfter time.Duration // how long the CA asked its clients to wait; 0 means that it did not ask
	Err        error         // the cause

	// MayPass means that the same request is worth repeating although its Kind is not [ErrUnavailable]: Linkerd's
	// service answers "invalid argument" to a token that its cluster does not know yet.
	MayPass bool
}

func (e *Error) Error() string {
	if e.Kind == nil {
		return fmt.Sprintf("caclient: %s: %v", e.Op, e.Err)
	}
	return fmt.Sprintf("caclient: %s: %v: %v", e.Op, e.Kind, e.Err)
}

// Unwrap returns the kind and the cause.
func (e *Error) Unwrap() []error {
	if e.Kind == nil {
		return []error{e.Err}
	}
	return []error{e.Kind, e.Err}
}

var _ retry.Error = (*Error)(nil)

// Retryable reports whether the failure may be temporary, so that the same call is worth repeating, and how long the
// CA asked its clients to wait first; 0 means that it did not ask. It is true for [ErrUnavailable], and if MayPass is
// set. Package secretcache plans by it. Other callers find it in any error of a CA with [errors.AsType].
func (e *Error) Retryable() (after time.Duration, ok bool) {
	if e.Kind == ErrUnavailable || e.MayPass { // the kind itself
		return e.RetryAfter, true
	}
	return 0, false
}
