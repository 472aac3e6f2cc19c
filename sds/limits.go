package sds

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"net/http"
	"time"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// Limits on what clients hold.
const (
	maxStreams     = 20_000 // open at the same time, by default
	maxPeerStreams = 5_000  // of one peer, by default: 20 Envoys of one user, with 250 secrets each

	maxNamesBytes = 128 << 20 // of all names that clients ask for, as cost counts them
	maxPeerBytes  = 32 << 20  // of one peer
	streamBytes   = 2 << 10   // of a stream on average, where the streams times that are more
	maxNameBytes  = 256 << 10 // of the names of one stream, without what is kept beside them
	nameBytes     = 256       // of a name on average, where MaxNames times that is more than maxNameBytes
	besideName    = 1 << 10   // bytes that are kept for a name beside it

	maxIncoming     = 64 << 20 // bytes of requests that are being received
	maxPeerIncoming = 16 << 20 // of one peer

	sendTime = time.Minute // in which a client has to take a response

	retryFull = 10 * time.Second // after which a client that found no room is to come back
)

// attrs returns the attributes of a caller for the log. ctx is that of its request.
func attrs(ctx context.Context, p peerkey.Holder) []slog.Attr {
	if p, ok := unixsocket.PeerFromContext(ctx); ok {
		return []slog.Attr{slog.Uint64("uid", uint64(p.UID)), slog.Int64("pid", int64(p.PID))}
	}
	if remote := p.Remote(); remote != "" {
		return []slog.Attr{slog.String("remote", remote)}
	}
	return nil
}

// enter counts a stream or a fetch of p, which h.open.Give ends.
func (h *Handler) enter(r *http.Request, p peerkey.Holder) error {
	if err := h.open.Take(p, 1); err != nil {
		what := "too many streams are open"
		if isOfPeer(err) {
			what = "this peer has too many streams open"
		}
		e := full("sds: " + what + "; try again later")
		h.refused(r.Context(), p, what, e)
		return e
	}
	return nil
}

func isOfPeer(err error) bool {
	e, ok := errors.AsType[*limit.Error](err)
	return ok && e.Reason == limit.CallerShare
}

// full refuses a request because a limit is reached.
func full(text string) *grpchttp.Error {
	return &grpchttp.Error{Code: grpchttp.ResourceExhausted, Message: text, RetryAfter: retryFull}
}

// holdings are the names that one stream or fetch holds for its peer.
type holdings struct {
	h    *Handler
	peer peerkey.Holder
	cost int
}

// hold makes the names of a session those that are counted. The error is for the client.
func (c *holdings) hold(s *session) error {
	switch more := s.cost() - c.cost; {
	case more < 0:
		c.h.names.Give(c.peer, -more)
	case more > 0:
		if err := c.h.names.Take(c.peer, more); err != nil {
			what := "sds: clients ask for too many names"
			if isOfPeer(err) {
				what = "sds: this peer asks for too many names"
			}
			return full(what + "; ask for less, or try again later")
		}
	}
	c.cost = s.cost()
	return nil
}

// release gives everything back.
func (c *holdings) release() {
	c.h.names.Give(c.peer, c.cost)
	c.cost = 0
}

// bytesOf returns the bytes of the names of so many streams.
func bytesOf(streams int) int { return min(streams, math.MaxInt/streamBytes) * streamBytes }

// cost is what the names of a session take, roughly, in bytes.
func (s *session) cost() int { return s.bytes + len(s.items)*besideName }

// refused logs that a request was refused. Reasons are few.
func (h *Handler) refused(ctx context.Context, p peerkey.Holder, reason string, err *grpchttp.Error) {
	label := "request"
	if err.Code == grpchttp.ResourceExhausted {
		label = "limit"
	}
	h.counts.refused[label].Inc()
	h.log.LogOf(slog.LevelWarn, p.Name(), "sds: request refused", reason,
		append(attrs(ctx, p), slog.String("err", clip(err.Message)))...)
}

// badRequest logs an error of a request, if it is one that the client has made.
func (h *Handler) badRequest(ctx context.Context, p peerkey.Holder, err error) {
	if e, ok := errors.AsType[*grpchttp.Error](err); ok {
		switch e.Code {
		case grpchttp.InvalidArgument, grpchttp.ResourceExhausted, grpchttp.Internal:
			h.refused(ctx, p, e.Code.String(), e)
		}
	}
}
