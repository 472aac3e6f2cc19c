package grpchttp

import (
	"errors"
	"net/http"
	"time"

	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/peerkey"
)

// Incoming limits the memory for requests that are being received, in total and for each peer, so that clients that
// never finish their requests cannot use all of it. NewIncoming creates one. It is safe for concurrent use.
type Incoming struct {
	name   string
	shares *limit.Shares[peerkey.Holder]
}

const (
	incomingTime = 30 * time.Second // in which a request that takes memory must arrive
	retryFull    = 10 * time.Second // after which a client refused by a limit should retry
)

// NewIncoming returns an Incoming of total bytes, of which one peer may take each. Its errors begin with name.
func NewIncoming(name string, total, each int) *Incoming {
	return &Incoming{name, limit.NewShares[peerkey.Holder](total, each)}
}

// Take takes n bytes for a request. The error is an [*Error] that tells the client to retry later.
func (i *Incoming) Take(r *http.Request, n int) error {
	if err := i.shares.Take(peerkey.HolderOf(r), n); err != nil {
		return Full(err, i.name, "requests that are being received")
	}
	return nil
}

// Full returns the Error for err, an error of [limit.Shares]: a client has too many of something. Its text begins with
// name.
func Full(err error, name, what string) *Error {
	who := ": all clients together have too many "
	if e, ok := errors.AsType[*limit.Error](err); ok && e.Reason == limit.CallerShare {
		who = ": this peer has too many "
	}
	return &Error{Code: ResourceExhausted, Message: name + who + what + "; try again later", RetryAfter: retryFull}
}

// Give returns n bytes that were taken for the same request.
func (i *Incoming) Give(r *http.Request, n int) { i.shares.Give(peerkey.HolderOf(r), n) }

// Held returns how many bytes are taken.
func (i *Incoming) Held() int { return i.shares.Held() }
