package caclient

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

// Code is the kind of a failure, and decides whether asking again may help. The zero Code is
// Unknown.
type Code int

// The codes, with whether [Retryable] is true for them: the choice is Istio's.
const (
	Unknown         Code = iota // no: nothing says that it would pass
	Unavailable                 // yes: the CA cannot be reached or is not ready
	Exhausted                   // yes: over a quota or a rate limit
	Aborted                     // yes: the CA gave up for a reason that passes, such as a conflict
	Internal                    // yes: the CA failed
	Timeout                     // yes: no answer in time
	Invalid                     // no: the CA refuses the request as it stands
	Unauthenticated             // no: the CA does not know who is asking
	Denied                      // no: the CA knows who is asking, and refuses
	BadAnswer                   // no: what the CA sent failed [Check]
)

// String returns the code in words, such as "bad answer".
func (c Code) String() string {
	switch c {
	case Unknown:
		return "unknown failure"
	case Unavailable:
		return "unavailable"
	case Exhausted:
		return "limit reached"
	case Aborted:
		return "aborted"
	case Internal:
		return "internal failure"
	case Timeout:
		return "timed out"
	case Invalid:
		return "invalid request"
	case Unauthenticated:
		return "not authenticated"
	case Denied:
		return "denied"
	case BadAnswer:
		return "bad answer"
	}
	return fmt.Sprintf("Code(%d)", int(c))
}

// Error is a failure of a CA or of the way to it.
type Error struct {
	Op         string        // what was tried: "sign", "fetch bundles"
	Code       Code          // what kind of failure
	RetryAfter time.Duration // how long the CA asked us to wait; 0 means that it said nothing
	Err        error         // the cause
}

func (e *Error) Error() string { return fmt.Sprintf("caclient: %s: %v: %v", e.Op, e.Code, e.Err) }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Retryable reports whether the failure may go away by itself, and how long the CA asked us to
// wait; see the function [Retryable].
func (e *Error) Retryable() (after time.Duration, ok bool) {
	switch e.Code {
	case Unavailable, Exhausted, Aborted, Internal, Timeout:
		return e.RetryAfter, true
	}
	return 0, false
}

// Retryable reports whether err may go away by itself, so that the same call is worth repeating,
// and how long the CA asked us to wait first; 0 means that it did not say.
//
// An error that says so itself, by a method Retryable like that of [*Error], is believed; the
// outermost one counts. Otherwise failures of the network and deadlines may pass. A cancelled
// context may not, as nobody waits for the answer; neither may a certificate that failed to verify,
// nor an error of which nothing is known. A caller that has run out of time sees that from its own
// context, not from this function.
func Retryable(err error) (after time.Duration, ok bool) {
	if e, ok := errors.AsType[interface {
		error
		Retryable() (time.Duration, bool)
	}](err); ok {
		return e.Retryable()
	}
	return 0, mayPass(err)
}

func mayPass(err error) bool {
	if errors.Is(err, context.Canceled) {
		return false
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return false
	}
	// Not every net.Error: *url.Error is one around whatever went wrong.
	if _, ok := errors.AsType[*net.OpError](err); ok {
		return true
	}
	if _, ok := errors.AsType[*net.DNSError](err); ok {
		return true
	}
	if e, ok := errors.AsType[net.Error](err); ok && e.Timeout() { // context.DeadlineExceeded is one
		return true
	}
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed)
}
