package caclienttest

import (
	"context"
	"net/http"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
)

func anyRequest(*http.Request) bool { return true }

// refuseGRPC reports a failure as gRPC servers do.
func refuseGRPC(w http.ResponseWriter, r *http.Request, e *caclient.Error) {
	code := grpchttp.Unknown
	switch e.Kind {
	case caclient.ErrUnavailable:
		code = grpchttp.Unavailable
	case caclient.ErrInvalid:
		code = grpchttp.FailedPrecondition
	case caclient.ErrUnauthenticated:
		code = grpchttp.Unauthenticated
	case caclient.ErrDenied:
		code = grpchttp.PermissionDenied
	}
	answerGRPC(w, r, nil, &grpchttp.Error{Code: code, Message: e.Err.Error(), RetryAfter: e.RetryAfter})
}

func garbledGRPC(w http.ResponseWriter, r *http.Request) {
	answerGRPC(w, r, []byte("\x0a\xff\xff this is no message"), nil)
}

func answerGRPC(w http.ResponseWriter, r *http.Request, message []byte, e *grpchttp.Error) {
	method := grpchttp.Unary(func(context.Context, []byte) ([]byte, error) {
		if e != nil {
			return nil, e
		}
		return message, nil
	})
	(&grpchttp.Handler{Methods: map[string]grpchttp.Method{r.URL.Path: method}, MaxMessage: 1 << 20}).ServeHTTP(w, r)
}

// mustWrite returns the message that write makes; its texts must be UTF-8.
func mustWrite(write func(*protofield.Writer)) []byte {
	b, err := protofield.Write(write)
	if err != nil {
		panic(err)
	}
	return b
}
