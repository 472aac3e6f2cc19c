// Package grpchttp speaks the gRPC wire protocol over net/http, as a client and as a server: unary and streaming
// methods whose messages are bytes. It has no generated messages and no compression, to keep programs small.
//
// It follows "gRPC over HTTP2" of the gRPC project. Both sides need HTTP/2; the http.Client and the http.Server
// decide whether to use TLS.
//
// # Errors
//
// Every failure of a call is an [*Error] with one of gRPC's codes. Its field Remote is set if the other side sent the
// code in grpc-status, and not set for a broken connection, an answer of a proxy, or a malformed answer.
//
// # Limits
//
// A message that is larger than allowed is refused by its prefix, before memory is allocated. Memory for other
// messages grows with the bytes that have arrived, not with the announced length. Compressed messages are refused. A
// server waits for a request at most for [Handler].ReceiveTimeout and until its context ends, unless a middleware
// hides the methods of net/http's ResponseWriter.
//
// # What it does not do
//
// Callers encode the values of metadata whose names end in "-bin". Only net/http retries, and there is no load
// balancing. Of the details of an error (grpc-status-details-bin) only google.rpc.RetryInfo and the reason of a
// google.rpc.ErrorInfo are understood.
package grpchttp

import (
	"context"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Code is a status code of gRPC.
type Code uint32

// The codes.
const (
	OK Code = iota
	Canceled
	Unknown
	InvalidArgument
	DeadlineExceeded
	NotFound
	AlreadyExists
	PermissionDenied
	ResourceExhausted
	FailedPrecondition
	Aborted
	OutOfRange
	Unimplemented
	Internal
	Unavailable
	DataLoss
	Unauthenticated
)

var codes = [...]string{
	"ok", "canceled", "unknown", "invalid_argument", "deadline_exceeded", "not_found", "already_exists",
	"permission_denied", "resource_exhausted", "failed_precondition", "aborted", "out_of_range", "unimplemented",
	"internal", "unavailable", "data_loss", "unauthenticated",
}

// String returns the name, such as "invalid_argument".
func (c Code) String() string {
	if int(c) < len(codes) {
		return codes[c]
	}
	return "code_" + strconv.FormatUint(uint64(c), 10)
}

// Error is the status of a call that did not end with OK.
type Error struct {
	Code    Code
	Message string // unchanged from the other side if Remote
	Remote  bool   // the other side sent this as the status of the call
	Err     error  // the cause; nil if Remote

	// RetryAfter is when the client should come back; 0 if unknown. It is sent as google.rpc.RetryInfo and, for the
	// retries built into gRPC clients, as the trailer grpc-retry-pushback-ms, at most a day. A client reads either.
	RetryAfter time.Duration

	Reason string // of google.rpc.ErrorInfo, in the domain spiffe.io; "" if there is none
}

// Error returns the name of the code and the message.
func (e *Error) Error() string { return e.Code.String() + ": " + e.Message }

// Unwrap returns e.Err.
func (e *Error) Unwrap() error { return e.Err }

// Errorf returns an Error with a message. Like fmt.Errorf it wraps the error of a verb %w.
func Errorf(code Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Message: err.Error(), Err: errors.Unwrap(err)}
}

// toError returns err as an Error.
func toError(err error) *Error {
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	code := Unknown
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		code = DeadlineExceeded
	case errors.Is(err, context.Canceled):
		code = Canceled
	}
	return &Error{Code: code, Message: err.Error(), Err: err}
}

// fromContext returns the Error for a call whose context is done, or nil. It wraps the error and the cause of ctx.
func fromContext(ctx context.Context) *Error {
	err := ctx.Err()
	if err == nil {
		return nil
	}
	if cause := context.Cause(ctx); cause != err {
		err = fmt.Errorf("%w: %w", err, cause)
	}
	return toError(err)
}

// fromHTTP returns the code for an answer with this HTTP status and no gRPC status. The status of a proxy does not
// come from the server, so the Error is not Remote.
func fromHTTP(status int) Code {
	switch status {
	case http.StatusBadRequest:
		return Internal
	case http.StatusUnauthorized:
		return Unauthenticated
	case http.StatusForbidden:
		return PermissionDenied
	case http.StatusNotFound:
		return Unimplemented
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return Unavailable
	}
	return Unknown
}

// Names of header fields and trailers, as net/http spells them.
const (
	headerStatus         = "Grpc-Status"
	headerMessage        = "Grpc-Message"
	headerTimeout        = "Grpc-Timeout"
	headerEncoding       = "Grpc-Encoding"
	headerAcceptEncoding = "Grpc-Accept-Encoding"
	headerDetails        = "Grpc-Status-Details-Bin"
	headerPushback       = "Grpc-Retry-Pushback-Ms"

	identity = "identity"
)

// isGRPC reports whether a Content-Type means gRPC with Protocol Buffers.
func isGRPC(contentType string) bool {
	media, _, err := mime.ParseMediaType(contentType)
	return err == nil && (media == "application/grpc" || media == "application/grpc+proto")
}

// reserved reports whether a header field belongs to the protocol and is not metadata.
func reserved(name string) bool {
	switch name = http.CanonicalHeaderKey(name); name {
	case "Content-Type", "Content-Length", "Content-Encoding", "Te", "Trailer", "Transfer-Encoding", "Connection",
		"Upgrade", "Accept-Encoding":
		return true
	}
	return strings.HasPrefix(name, "Grpc-")
}

// encodeMessage encodes a text for grpc-message: bytes that are not visible ASCII, and "%", in hexadecimal.
func encodeMessage(s string) string {
	var b strings.Builder
	for i := range len(s) {
		if c := s[i]; c >= ' ' && c <= '~' && c != '%' {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// decodeMessage reverses encodeMessage. Invalid escapes stay unchanged, so that no text is lost.
func decodeMessage(s string) string {
	var b []byte
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c == '%' && i+2 < len(s) {
			if v, err := strconv.ParseUint(s[i+1:i+3], 16, 8); err == nil {
				c = byte(v)
				i += 2
			}
		}
		b = append(b, c)
	}
	return string(b)
}
