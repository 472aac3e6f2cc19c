// Package carpc is what the certificate services of package caserver share of gRPC.
package carpc

import (
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/anypb"
)

// Admit reports whether r is a call of the method at path, and answers it if not. What is not gRPC
// over HTTP/2 gets a status of HTTP; another method gets Unimplemented, in the name of service.
func Admit(w http.ResponseWriter, r *http.Request, service, path string, errs *connect.ErrorWriter) bool {
	switch {
	case r.ProtoMajor < 2:
		w.WriteHeader(http.StatusHTTPVersionNotSupported)
	case r.Method != http.MethodPost:
		w.Header().Set("Allow", http.MethodPost)
		w.WriteHeader(http.StatusMethodNotAllowed)
	case !isGRPC(r.Header.Get("Content-Type")):
		w.Header().Set("Accept-Post", "application/grpc, application/grpc+proto")
		w.WriteHeader(http.StatusUnsupportedMediaType)
	case r.URL.Path != path:
		_ = errs.Write(w, r, connect.NewError(connect.CodeUnimplemented, errors.New(service+": this server does not implement the method")))
	default:
		return true
	}
	return false
}

// isGRPC reports whether a media type is that of gRPC with protobuf, which has no parameters.
func isGRPC(media string) bool {
	return strings.EqualFold(media, "application/grpc") || strings.EqualFold(media, "application/grpc+proto")
}

// maxRetryAfter bounds what is asked of a client: a number that it cannot hold, or a negative one,
// means to clients of gRPC that they shall not come back.
const maxRetryAfter = 24 * time.Hour

// AddRetryInfo adds to e when to come back, as google.rpc.RetryInfo and in the trailer that the
// retries built into gRPC look for; at most a day. 0 or less adds nothing.
func AddRetryInfo(e *connect.Error, after time.Duration) {
	if after <= 0 {
		return
	}
	after = min(after, maxRetryAfter-1).Truncate(time.Millisecond) + time.Millisecond // not too early, and more than 0
	var d []byte                                                                      // google.protobuf.Duration
	d = protowire.AppendVarint(protowire.AppendTag(d, 1, protowire.VarintType), uint64(after/time.Second))
	d = protowire.AppendVarint(protowire.AppendTag(d, 2, protowire.VarintType), uint64(after%time.Second))
	info := &anypb.Any{
		TypeUrl: "type.googleapis.com/google.rpc.RetryInfo",
		Value:   protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), d),
	}
	if detail, err := connect.NewErrorDetail(info); err == nil { // always, for an Any
		e.AddDetail(detail)
	}
	e.Meta().Set("Grpc-Retry-Pushback-Ms", strconv.FormatInt(after.Milliseconds(), 10))
}
