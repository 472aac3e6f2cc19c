package caconn

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
)

// CallError returns the error for a call of gRPC that failed with err: a [*caclient.Error], or one that says that ctx
// is done. token was sent; missing is why there was none, or nil.
func (c *Conn) CallError(ctx context.Context, err error, token string, missing error) error {
	status, ok := errors.AsType[*grpchttp.Error](err)
	// The CA was told the deadline of ctx, and may be faster than our own timer.
	if end, bounded := ctx.Deadline(); ok && bounded && status.Code == grpchttp.DeadlineExceeded &&
		time.Until(end) < 100*time.Millisecond {
		<-ctx.Done()
	}
	if ctx.Err() != nil || !ok { // other errors than a status do not occur
		return fmt.Errorf("%s: sign: %w", c.cfg.Name, cmp.Or(context.Cause(ctx), err))
	}
	e := c.Error("sign", kindOfStatus(status), bearer.RedactError(status, token))
	if status.Remote {
		// A server may repeat what it was sent.
		e = c.Error("sign", e.Kind,
			fmt.Errorf("the CA says %v: %q", status.Code, bearer.Redact(status.Message, token)))
		e.RetryAfter = status.RetryAfter
	}
	ExplainMissing(e, missing)
	if status.Code == grpchttp.Unauthenticated || status.Code == grpchttp.Unavailable || Untrusted(status) {
		c.Reconnect()
	}
	return e
}

// kindOfStatus translates the status of a call.
func kindOfStatus(e *grpchttp.Error) error {
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
	if Untrusted(e) {
		return caclient.ErrUnavailable
	}
	return nil
}
