// Package carpc translates gRPC statuses for the clients of CAs that speak gRPC. It is separate from package caconn
// so that programs with other clients link no gRPC.
package carpc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/internal/caconn"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
)

// Error returns the error for a call that failed with err: a [*caclient.Error], or an error that says that ctx is
// done. token was sent; missing is the reason if there was none, or nil.
func Error(ctx context.Context, c *caconn.Conn, err error, token string, missing error) error {
	status, ok := errors.AsType[*grpchttp.Error](err)
	// The CA knows the deadline of ctx, and may be faster than our own timer.
	if end, bounded := ctx.Deadline(); ok && bounded && status.Code == grpchttp.DeadlineExceeded &&
		time.Until(end) < 100*time.Millisecond {
		<-ctx.Done()
	}
	if ctx.Err() != nil || !ok { // other errors than a status do not occur
		return fmt.Errorf("%s: sign: %w", c.Name, cmp.Or(context.Cause(ctx), err))
	}
	e := c.Error("sign", kindOf(status), bearer.RedactError(status, token))
	if status.Remote {
		// A server may quote the token.
		e = c.Error("sign", e.Kind, fmt.Errorf("the CA says %v: %q", status.Code, bearer.Redact(status.Message,
			token)))
		e.RetryAfter = status.RetryAfter
	}
	caconn.ExplainMissing(e, missing)
	if status.Code == grpchttp.Unauthenticated || status.Code == grpchttp.Unavailable || caconn.Untrusted(status) {
		c.Reconnect()
	}
	return e
}

// kindOf translates the status of a call.
func kindOf(e *grpchttp.Error) error {
	switch e.Code {
	case grpchttp.ResourceExhausted:
		if !e.Remote {
			return caclient.ErrBadAnswer // the answer is too large
		}
		return caclient.ErrUnavailable
	case grpchttp.Unavailable, grpchttp.Aborted, grpchttp.Canceled /* by the CA */, grpchttp.Internal,
		grpchttp.DataLoss, grpchttp.DeadlineExceeded:
		return caclient.ErrUnavailable
	case grpchttp.InvalidArgument, grpchttp.FailedPrecondition, grpchttp.OutOfRange, grpchttp.Unimplemented,
		grpchttp.NotFound, grpchttp.AlreadyExists:
		return caclient.ErrInvalid
	case grpchttp.Unauthenticated:
		return caclient.ErrUnauthenticated
	case grpchttp.PermissionDenied:
		return caclient.ErrDenied
	}
	if caconn.Untrusted(e) {
		return caclient.ErrUnavailable
	}
	return nil
}
