package workloadapi

import (
	"errors"
	"fmt"
	"time"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/retry"
	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
)

// Errors to test for with [errors.Is]. If a server does not implement a method, or its operator has switched it off
// (gRPC's Unimplemented), the error wraps [errors.ErrUnsupported]: do not retry.
var (
	// ErrDenied says that the server has no identity for this caller, not the requested one, or no token for the
	// audience (gRPC's PermissionDenied). A later call may succeed, once the workload is registered. On a stream it
	// withdraws everything received before.
	ErrDenied = workloadwire.ErrDenied

	// ErrRefused says that the server rejected the request as invalid (gRPC's InvalidArgument), for instance because a
	// token is not valid. Do not retry.
	ErrRefused = workloadwire.ErrRefused

	// ErrBadResponse says that a response broke the rules of the API and was discarded entirely. Earlier responses
	// stay in force.
	ErrBadResponse = errors.New("response discarded")
)

// Error describes why a call or a stream failed. Quoted server messages are cut to a length that fits a log.
type Error struct {
	RPC     string        // the method, such as "FetchX509SVID"
	Server  string        // its address
	Code    int           // the gRPC status that the server sent, such as 14 for Unavailable; 0 if it sent none
	Err     error         // the cause, which wraps one of the errors above where one fits
	Final   bool          // do not retry; a watch has ended
	RetryIn time.Duration // when a watch retries at the latest; 0 means at once, or that the stream continues

	after time.Duration // how long the server asked its clients to wait
}

// Error names the method, the server and the cause.
func (e *Error) Error() string {
	return fmt.Sprintf("workloadapi: %s at %s: %v", e.RPC, e.Server, e.Err)
}

// Unwrap returns e.Err.
func (e *Error) Unwrap() error { return e.Err }

var _ retry.Error = (*Error)(nil)

// Retryable reports whether a retry may help, and how long the server asked its clients to wait.
func (e *Error) Retryable() (after time.Duration, ok bool) { return e.after, !e.Final }

// maxText is how many bytes of a server's message an error quotes.
const maxText = 512

// cutError is an error whose text may quote the server at any length.
type cutError struct{ error }

func (e cutError) Error() string { return redact.Clip(e.error.Error(), maxText) }
func (e cutError) Unwrap() error { return e.error }

// failure returns the Error for a call that failed with err. Only a status sent by the server itself counts: a proxy's
// 403 must not withdraw an identity.
func (c *Client) failure(rpc string, err error) *Error {
	e := &Error{RPC: rpc, Server: c.server, Err: cutError{err}}
	status, ok := errors.AsType[*grpchttp.Error](err)
	if !ok || !status.Remote {
		return e
	}
	if e.Err = nil; c.api != nil {
		e.Err = c.api.Failed(status)
	}
	switch status.Code {
	case grpchttp.PermissionDenied:
		e.Err = ErrDenied
		if rpc == workloadwire.FetchJWTSVID {
			e.Err = workloadwire.ErrNoToken
		}
	case grpchttp.InvalidArgument:
		e.Err, e.Final = ErrRefused, true
	case grpchttp.Unimplemented:
		e.Err, e.Final = fmt.Errorf("the server does not implement this: %w", errors.ErrUnsupported), true
	}
	if e.Err == nil {
		e.Err = errors.New("status " + status.Code.String())
	}
	if status.Message != "" {
		e.Err = fmt.Errorf("%w: %q", e.Err, redact.Clip(status.Message, maxText))
	}
	e.Code, e.after = int(status.Code), status.RetryAfter
	return e
}

// badResponse returns the Error for a response that breaks the rules of the API.
func (c *Client) badResponse(rpc string, err error) *Error {
	return &Error{RPC: rpc, Server: c.server, Err: fmt.Errorf("%w: %w", ErrBadResponse, cutError{err})}
}

// mistake returns the Error for a request that the server would refuse.
func (c *Client) mistake(rpc, reason string) *Error {
	return &Error{RPC: rpc, Server: c.server, Final: true,
		Err: fmt.Errorf("%w, and was not sent it: %s", ErrRefused, reason)}
}
