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
	e := signError(codeOf(status), status)
	if status.Remote {
		// A server may repeat what it was sent.
		e = signError(e.Code, fmt.Errorf("the CA says %v: %.256q", status.Code, conceal(status.Message, token)))
		e.RetryAfter = status.RetryAfter
	}
	if e.Code == caclient.Unauthenticated && missing != nil {
		e.Err = fmt.Errorf("%w (there was no token to send: %w)", e.Err, missing)
	}
	if e.Code == caclient.Unauthenticated || e.Code == caclient.Unavailable {
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

// codeOf translates the status of a call.
func codeOf(e *grpchttp.Error) caclient.Code {
	if _, ok := errors.AsType[*tls.CertificateVerificationError](e); ok {
		return caclient.Unavailable // our roots may be older than its certificate, and are read again
	}
	switch e.Code {
	case grpchttp.Unavailable:
		return caclient.Unavailable
	case grpchttp.ResourceExhausted:
		if !e.Remote {
			return caclient.BadAnswer // the answer is too large
		}
		return caclient.Exhausted
	case grpchttp.Aborted, grpchttp.Canceled: // by the CA
		return caclient.Aborted
	case grpchttp.Internal, grpchttp.DataLoss:
		return caclient.Internal
	case grpchttp.DeadlineExceeded:
		return caclient.Timeout
	case grpchttp.InvalidArgument, grpchttp.FailedPrecondition, grpchttp.OutOfRange, grpchttp.Unimplemented,
		grpchttp.NotFound, grpchttp.AlreadyExists:
		return caclient.Invalid
	case grpchttp.Unauthenticated:
		return caclient.Unauthenticated
	case grpchttp.PermissionDenied:
		return caclient.Denied
	}
	return caclient.Unknown
}
