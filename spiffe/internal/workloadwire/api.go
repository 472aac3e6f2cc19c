package workloadwire

import (
	"context"
	"net/http"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/spiffe"
)

// API is an API with the responses of the Workload API, as a client sees it. A client of the Workload API becomes one
// of the Broker API if its transport is an API.
type API interface {
	String() string // names the server, for errors and logs

	// Request returns the URL, the metadata and the message of a call, made from the name and the message that it
	// has in the Workload API. An error that is a [*grpchttp.Error] counts as an answer of the server.
	Request(name string, message []byte) (url string, metadata http.Header, request []byte, err error)

	// Failed gets the status with which a call ended. It may set RetryAfter, and returns the error for a code that
	// the Workload API does not have, or nil.
	Failed(status *grpchttp.Error) error
}

// Front stands in a server between the callers of another API and a handler of the Workload API, which gets their
// requests under its own paths, in a context of [WithFront]. Its errors are the answers.
type Front interface {
	// Admit judges the caller, before anything of the request is read.
	Admit() *grpchttp.Error

	// Workload returns the context for everything that is done for a request, and its message in the Workload API.
	Workload(ctx context.Context, request []byte) (context.Context, []byte, *grpchttp.Error)

	// Permits reports whether the caller may have an identity.
	Permits(spiffe.ID) bool

	// Descriptors describes the other API for server reflection.
	Descriptors() []byte

	// Tell changes an answer of the handler to one of the other API.
	Tell(*grpchttp.Error)
}

type frontKey struct{}

// WithFront returns a copy of ctx with f.
func WithFront(ctx context.Context, f Front) context.Context {
	return context.WithValue(ctx, frontKey{}, f)
}

// FrontOf returns the Front in ctx, or nil.
func FrontOf(ctx context.Context) Front {
	f, _ := ctx.Value(frontKey{}).(Front)
	return f
}
