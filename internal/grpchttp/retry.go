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

const retryInfo = "type.googleapis.com/google.rpc.RetryInfo"

// maxRetryAfter is the longest wait that a server asks for. A client that cannot represent a longer wait, or reads it
// as negative, would never come back.
const maxRetryAfter = 24 * time.Hour

// setRetryAfter sets the trailers that say when the client should come back, if e.RetryAfter is set.
func setRetryAfter(h http.Header, prefix string, e *Error) {
	if e.RetryAfter <= 0 {
		return
	}
	// Rounded up, so that the client does not come too early, and the wait is never 0.
	after := min(e.RetryAfter, maxRetryAfter-1).Truncate(time.Millisecond) + time.Millisecond
	details, err := protofield.Write(func(w *protofield.Writer) { // google.rpc.Status
		w.Varint(1, uint64(e.Code))
		w.Text(2, strings.ToValidUTF8(e.Message, "\uFFFD"))
		w.Message(3, func(w *protofield.Writer) { // google.protobuf.Any
			w.Text(1, retryInfo)
			w.Message(2, func(w *protofield.Writer) {
				w.Message(1, func(w *protofield.Writer) { // google.protobuf.Duration
					w.Varint(1, uint64(after/time.Second))
					w.Varint(2, uint64(after%time.Second))
				})
			})
		})
	})
	if err == nil { // never fails: its texts are UTF-8
		h.Set(prefix+headerDetails, base64.RawStdEncoding.EncodeToString(details))
	}
	h.Set(prefix+headerPushback, strconv.FormatInt(after.Milliseconds(), 10))
}

// retryAfter returns how long the server wants the client to wait, or 0. A malformed or unbounded time is ignored.
func retryAfter(h http.Header) (after time.Duration) {
	details, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(h.Get(headerDetails), "="))
	if err == nil {
		_ = protofield.Read(details, func(f *protofield.Field) {
			if f.Number == 3 && after == 0 {
				if url, info := f.Any(); url == retryInfo {
					after = readRetryInfo(info)
				}
			}
		})
	}
	if ms, err := strconv.ParseInt(h.Get(headerPushback), 10, 32); err == nil && ms > 0 && after == 0 {
		return time.Duration(ms) * time.Millisecond
	}
	return after
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
