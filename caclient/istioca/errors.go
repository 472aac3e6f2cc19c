package istioca

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strings"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/grpchttp"
)

// callError returns the error for a call that failed with err. missing is why it had no token.
func (c *CA) callError(ctx context.Context, err error, token string, missing error) error {
	status, ok := errors.AsType[*grpchttp.Error](err)
	if ctx.Err() != nil || !ok { // other errors than a status do not occur
		return fmt.Errorf("istioca: sign: %w", cmp.Or(context.Cause(ctx), err))
	}
	e := signError(kindOf(status), status)
	if status.Remote {
		// A server may repeat what it was sent.
		e = signError(e.Kind, fmt.Errorf("the CA says %v: %.256q", status.Code, conceal(status.Message, token)))
		e.RetryAfter = status.RetryAfter
	}
	if e.Kind == caclient.ErrUnauthenticated && missing != nil {
		e.Err = fmt.Errorf("%w (there was no token to send: %w)", e.Err, missing)
	}
	if status.Code == grpchttp.Unauthenticated || status.Code == grpchttp.Unavailable || untrusted(status) {
		c.stale.Store(true)
	}
	return e
}

func conceal(text, token string) string {
	if token == "" {
		return text
	}
	return strings.ReplaceAll(text, token, "[token]")
}

// untrusted reports whether the CA's certificate did not verify: the roots may be older than it, and are
// read again.
func untrusted(e *grpchttp.Error) bool {
	_, ok := errors.AsType[*tls.CertificateVerificationError](e)
	return ok
}

// kindOf translates the status of a call.
func kindOf(e *grpchttp.Error) error {
	switch e.Code {
	case grpchttp.ResourceExhausted:
		if !e.Remote {
			return caclient.ErrBadAnswer // the answer is too large
		}
		return caclient.ErrUnavailable
	case grpchttp.Unavailable, grpchttp.Aborted, grpchttp.Canceled /* by the CA */, grpchttp.Internal, grpchttp.DataLoss, grpchttp.DeadlineExceeded:
		return caclient.ErrUnavailable
	case grpchttp.InvalidArgument, grpchttp.FailedPrecondition, grpchttp.OutOfRange, grpchttp.Unimplemented,
		grpchttp.NotFound, grpchttp.AlreadyExists:
		return caclient.ErrInvalid
	case grpchttp.Unauthenticated:
		return caclient.ErrUnauthenticated
	case grpchttp.PermissionDenied:
		return caclient.ErrDenied
	}
	if untrusted(e) {
		return caclient.ErrUnavailable
	}
	return nil
}
