package grpchttp

import (
	"encoding/base64"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/protofield"
)

// The types of the details of an error.
const (
	retryInfo = "type.googleapis.com/google.rpc.RetryInfo"
	errorInfo = "type.googleapis.com/google.rpc.ErrorInfo"
)

// errorDomain is the domain of the reasons in errors (SPIFFE Broker API section 4.8).
const errorDomain = "spiffe.io"

// maxRetryAfter is the longest wait that a server asks for. A client that cannot represent a longer wait, or reads it
// as negative, would never come back.
const maxRetryAfter = 24 * time.Hour

// setDetails sets the trailers that say when the client should come back, if e.RetryAfter is set, and the reason.
func setDetails(h http.Header, prefix string, e *Error) {
	if e.RetryAfter <= 0 && e.Reason == "" {
		return
	}
	// Rounded up, so that the client does not come too early, and the wait is never 0.
	after := min(e.RetryAfter, maxRetryAfter-1).Truncate(time.Millisecond) + time.Millisecond
	details, err := protofield.Write(func(w *protofield.Writer) { // google.rpc.Status
		w.Varint(1, uint64(e.Code))
		w.Text(2, strings.ToValidUTF8(e.Message, "\uFFFD"))
		if e.RetryAfter > 0 {
			w.Any(3, retryInfo, func(w *protofield.Writer) {
				w.Message(1, func(w *protofield.Writer) { // google.protobuf.Duration
					w.Varint(1, uint64(after/time.Second))
					w.Varint(2, uint64(after%time.Second))
				})
			})
		}
		if e.Reason != "" {
			w.Any(3, errorInfo, func(w *protofield.Writer) { w.Texts(e.Reason, errorDomain) })
		}
	})
	if err == nil { // never fails: its texts are UTF-8
		h.Set(prefix+headerDetails, base64.RawStdEncoding.EncodeToString(details))
	}
	if e.RetryAfter > 0 {
		h.Set(prefix+headerPushback, strconv.FormatInt(after.Milliseconds(), 10))
	}
}

// readDetails reads how long the server wants the client to wait, and the reason. A malformed or unbounded time, and a
// reason of another domain, are ignored.
func (e *Error) readDetails(h http.Header) {
	details, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(h.Get(headerDetails), "="))
	if err == nil {
		_ = protofield.Read(details, func(f *protofield.Field) {
			if f.Number != 3 {
				return
			}
			switch url, info := f.Any(); {
			case url == retryInfo && e.RetryAfter == 0:
				e.RetryAfter = readRetryInfo(info)
			case url == errorInfo && e.Reason == "":
				e.Reason = readErrorInfo(info)
			}
		})
	}
	ms, err := strconv.ParseInt(h.Get(headerPushback), 10, 32)
	if err == nil && ms > 0 && e.RetryAfter == 0 {
		e.RetryAfter = time.Duration(ms) * time.Millisecond
	}
}

// readErrorInfo returns the reason in a google.rpc.ErrorInfo, or "" if it is malformed or of another domain.
func readErrorInfo(info []byte) string {
	var reason, domain string
	if protofield.Read(info, protofield.Texts(&reason, &domain)) != nil || domain != errorDomain {
		return ""
	}
	return reason
}

// readRetryInfo reads a google.rpc.RetryInfo, which has a google.protobuf.Duration.
func readRetryInfo(info []byte) time.Duration {
	var seconds int64
	var nanos int32
	err := protofield.Read(info, func(f *protofield.Field) {
		if f.Number == 1 {
			seconds, nanos = f.Seconds()
		}
	})
	if err != nil || seconds < 0 || seconds > math.MaxInt32 || nanos < 0 || time.Duration(nanos) >= time.Second {
		return 0
	}
	return time.Duration(seconds)*time.Second + time.Duration(nanos)
}
