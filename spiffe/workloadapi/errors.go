package workloadapi

import (
	"errors"
	"fmt"
	"time"

	"github.com/svidkit/svidkit/authn/unixsocket"
	"github.com/svidkit/svidkit/internal/grpchttp"
)

// Errors to test for with [errors.Is].
var (
	// ErrNotReady says that a [Source] has nothing to hand out: nothing was received yet, or the
	// server has withdrawn it, or there is no identity with the wanted hint. The error around it has
	// the cause of the last failure.
	ErrNotReady = errors.New("not ready")

	// ErrDenied says that the server has no identity for this caller, or not this one (gRPC's
	// PermissionDenied). It may have one later, when the workload is registered. On a stream it
	// withdraws what was received before (WAPI-17). A hook or source of a [Handler] returns an error
	// that wraps it to say the same.
	ErrDenied = errors.New("no identity for this caller")

	// ErrRefused says that the server takes the request for a mistake of the client's (gRPC's
	// InvalidArgument). To repeat it does not help.
	ErrRefused = errors.New("the server refuses the request")

	// ErrUnimplemented says that the server does not implement this RPC, or its operator has
	// switched it off (gRPC's Unimplemented). To repeat it does not help.
	ErrUnimplemented = errors.New("the server does not implement this")

	// ErrBadResponse says that a response broke the rules and was discarded as a whole (WAPI-14).
	// What was received before it stays in force.
	ErrBadResponse = errors.New("response discarded")

	// ErrSocketInUse says that another server answers on the socket that a [Server] should take.
	ErrSocketInUse = unixsocket.ErrInUse
)

// Error says what went wrong with an RPC. What the server wrote is quoted in it, and cut to a length
// that is fit for a log. If the server itself has ended the RPC, there is a [*StatusError] in it.
type Error struct {
	RPC     string        // such as "FetchX509SVID"
	Server  string        // its address
	Err     error         // the cause, which wraps one of the errors above where one fits
	Final   bool          // to repeat does not help, and a watch has ended
	RetryIn time.Duration // when a watch tries again; 0 means at once, or that the stream goes on
}

// Error names the RPC, the server and the cause.
func (e *Error) Error() string {
	return fmt.Sprintf("workloadapi: %s at %s: %v", e.RPC, e.Server, e.Err)
}

// Unwrap returns e.Err.
func (e *Error) Unwrap() error { return e.Err }

// Retryable reports whether to repeat may help, and how long the server wishes us to wait, which is
// always 0 as the protocol cannot say it.
func (e *Error) Retryable() (after time.Duration, ok bool) { return 0, !e.Final }

// maxText is how much of a text of the server's goes into an error, in bytes.
const maxText = 512

// StatusError is the status that the server itself has ended an RPC with, in an [Error]. A broken
// connection has none.
type StatusError struct {
	Code    int    // of gRPC, such as 14 for Unavailable
	Message string // as the server sent it: not cut, and of any bytes

	kind error // one of the errors above, or nil
}

// Error says what the code means to us, and quotes the message.
func (e *StatusError) Error() string {
	what := "status " + grpchttp.Code(e.Code).String()
	if e.kind != nil {
		what = e.kind.Error()
	}
	if e.Message != "" {
		return fmt.Sprintf("%s: %q", what, clip(e.Message, maxText))
	}
	return what
}

// Unwrap returns the error of this package that the code stands for, or nil.
func (e *StatusError) Unwrap() error { return e.kind }

// localError is an error of the transport. Its text may quote what the server sent.
type localError struct{ err error }

func (e *localError) Error() string { return clip(e.err.Error(), maxText) }
func (e *localError) Unwrap() error { return e.err }

// failure makes an Error of what an RPC failed with. Only what the server itself has said is taken
// for its word: a proxy's 403 must not withdraw an identity.
func (c *Client) failure(rpc string, err error) *Error {
	e := &Error{RPC: rpc, Server: c.server, Err: &localError{err}}
	status, ok := errors.AsType[*grpchttp.Error](err)
	if !ok || !status.Remote {
		return e
	}
	s := &StatusError{Code: int(status.Code), Message: status.Message}
	switch status.Code {
	case grpchttp.PermissionDenied:
		s.kind = ErrDenied
	case grpchttp.InvalidArgument:
		s.kind, e.Final = ErrRefused, true
	case grpchttp.Unimplemented:
		s.kind, e.Final = ErrUnimplemented, true
	}
	e.Err = s
	return e
}

// badResponse makes an Error of what is wrong with a response.
func (c *Client) badResponse(rpc string, err error) *Error {
	return &Error{RPC: rpc, Server: c.server, Err: fmt.Errorf("%w: %w", ErrBadResponse, &localError{err})}
}
