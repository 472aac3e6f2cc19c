package istioca

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/svidkit/svidkit/caclient"
)

// callError translates what a call failed with. missing is why it had no token.
func (c *CA) callError(ctx context.Context, err error, token string, missing error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("istioca: sign: %w", context.Cause(ctx))
	}
	code := codeOf(err)
	switch code {
	case caclient.Unauthenticated, caclient.Unavailable:
		// The next call makes a new connection, with the certificate and the roots that there are by
		// then. Calls that run on the old one go on.
		c.http.CloseIdleConnections()
	}
	e := &caclient.Error{Op: "sign", Code: code}
	wire, ok := errors.AsType[*connect.Error](err)
	if ok && connect.IsWireError(err) { // a text from the other side
		e.RetryAfter = retryAfter(wire)
		err = fmt.Errorf("istioca: the CA says %v: %.256q", wire.Code(), redact(wire.Message(), token))
	} else {
		err = fmt.Errorf("istioca: %w", err)
	}
	if code == caclient.Unauthenticated && missing != nil {
		err = fmt.Errorf("%w (there was no token to send: %w)", err, missing)
	}
	e.Err = err
	return e
}

// redact takes a token out of a text: a server may repeat what it was sent.
func redact(text, token string) string {
	if token == "" {
		return text
	}
	return strings.ReplaceAll(text, token, "[token]")
}

// codeOf translates a code of gRPC, or of what stands between here and the CA.
func codeOf(err error) caclient.Code {
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return caclient.Unavailable // our roots may be older than its certificate, and are read again
	}
	switch connect.CodeOf(err) {
	case connect.CodeUnavailable:
		return caclient.Unavailable
	case connect.CodeResourceExhausted:
		if !connect.IsWireError(err) {
			return caclient.BadAnswer // it is the answer that is too large
		}
		return caclient.Exhausted
	case connect.CodeAborted, connect.CodeCanceled: // by the other side
		return caclient.Aborted
	case connect.CodeInternal, connect.CodeDataLoss:
		return caclient.Internal
	case connect.CodeDeadlineExceeded:
		return caclient.Timeout
	case connect.CodeInvalidArgument, connect.CodeFailedPrecondition, connect.CodeOutOfRange, connect.CodeUnimplemented,
		connect.CodeNotFound, connect.CodeAlreadyExists:
		return caclient.Invalid
	case connect.CodeUnauthenticated:
		return caclient.Unauthenticated
	case connect.CodePermissionDenied:
		return caclient.Denied
	}
	if _, ok := caclient.Retryable(errors.Unwrap(err)); ok { // the network
		return caclient.Unavailable
	}
	return caclient.Unknown
}

// retryAfter returns when the CA wants to be asked again: as google.rpc.RetryInfo says, or the
// metadata grpc-retry-pushback-ms; 0 if neither does.
func retryAfter(e *connect.Error) time.Duration {
	for _, d := range e.Details() {
		if d.Type() == "google.rpc.RetryInfo" {
			if after := retryInfo(d.Bytes()); after > 0 {
				return after
			}
		}
	}
	if ms, err := strconv.ParseInt(e.Meta().Get("Grpc-Retry-Pushback-Ms"), 10, 32); err == nil && ms > 0 {
		return time.Duration(ms) * time.Millisecond
	}
	return 0
}

// retryInfo reads a google.rpc.RetryInfo: retry_delay = 1, a Duration with seconds = 1 and nanos = 2.
func retryInfo(b []byte) time.Duration {
	delay, ok := lengthDelimited(b, 1)
	if !ok {
		return 0
	}
	var seconds int64
	var nanos int32
	for len(delay) > 0 {
		num, typ, n := protowire.ConsumeTag(delay)
		if n < 0 || num > protowire.MaxValidNumber {
			return 0
		}
		delay = delay[n:]
		m := protowire.ConsumeFieldValue(num, typ, delay)
		if m < 0 {
			return 0
		}
		if typ == protowire.VarintType {
			switch v, _ := protowire.ConsumeVarint(delay); num {
			case 1:
				seconds = int64(v) //nolint:gosec // the encoding of negative numbers
			case 2:
				nanos = int32(v) //nolint:gosec // what is beyond 32 bits does not count
			}
		}
		delay = delay[m:]
	}
	if seconds < 0 || seconds > math.MaxInt32 || nanos < 0 || time.Duration(nanos) >= time.Second {
		return 0
	}
	return time.Duration(seconds)*time.Second + time.Duration(nanos)
}

// lengthDelimited returns the last field num of a message.
func lengthDelimited(b []byte, num protowire.Number) (field []byte, ok bool) {
	for len(b) > 0 {
		got, typ, n := protowire.ConsumeField(b)
		if n < 0 {
			return nil, false
		}
		if got == num && typ == protowire.BytesType {
			_, _, tag := protowire.ConsumeTag(b)
			field, _ = protowire.ConsumeBytes(b[tag:])
			ok = true
		}
		b = b[n:]
	}
	return field, ok
}
