// Package lastresult remembers briefly why the last attempt failed. A server that reports the failure as its health
// is taken out of service and gets no further attempts, so it must forget, or it would never learn that attempts
// succeed again.
package lastresult

import (
	"sync/atomic"
	"time"
)

// Memory is how long a failure counts.
const Memory = 10 * time.Second

// Result is the last result. The zero value is a success. It is safe for concurrent use.
type Result struct{ failed atomic.Pointer[failure] }

type failure struct {
	err error
	at  time.Time
}

// Note records the result of an attempt.
func (r *Result) Note(err error) {
	if err != nil {
		r.failed.Store(&failure{err, time.Now()})
	} else if r.failed.Load() != nil { // so that successes do not all write to one cache line
		r.failed.Store(nil)
	}
}

// Err returns the failure of the last attempt; nil if it succeeded or was longer ago than [Memory].
func (r *Result) Err() error {
	if f := r.failed.Load(); f != nil && time.Since(f.at) < Memory {
		return f.err
	}
	return nil
}

// Ask returns o.Err(), if o has such a method, and r.Err() otherwise.
func (r *Result) Ask(o any) error {
	if o, ok := o.(interface{ Err() error }); ok {
		return o.Err()
	}
	return r.Err()
}
