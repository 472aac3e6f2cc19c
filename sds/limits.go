package sds

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"net/http"
	"time"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// Limits on the resources that clients use.
const (
	maxStreams     = 20_000 // open at the same time, by default
	maxPeerStreams = 5_000  // of one peer, by default: 20 Envoys of one user, with 250 secrets each

	maxNamesBytes = 128 << 20 // of all names that clients ask for, see cost
	maxPeerBytes  = 32 << 20  // of one peer
	streamBytes   = 2 << 10   // per stream on average, if that makes a total or peer limit larger
	maxNameBytes  = 256 << 10 // of the names of one stream, without besideName
	nameBytes     = 256       // per name on average, if MaxNames times that exceeds maxNameBytes
	besideName    = 1 << 10   // bytes kept for each name, besides the name

	maxIncoming     = 64 << 20 // bytes of requests that are being received
	maxPeerIncoming = 16 << 20 // of one peer

	sendTime = time.Minute // in which a client must accept a response
)

// attrs returns the log attributes of a caller. ctx is the context of its request.
func attrs(ctx context.Context, p peerkey.Holder) []slog.Attr {
	if p, ok := unixsocket.PeerFromContext(ctx); ok {
		return []slog.Attr{slog.Uint64("uid", uint64(p.UID)), slog.Int64("pid", int64(p.PID))}
	}
	if remote := p.Remote(); remote != "" {
		return []slog.Attr{slog.String("remote", remote)}
	}
	return nil
}

// enter counts a stream or a fetch of p. The caller must call h.open.Give when it ends.
func (h *Handler) enter(r *http.Request, p peerkey.Holder) error {
	if err := h.open.Take(p, 1); err != nil {
		e := grpchttp.Full(err, "sds", "streams")
		h.refused(r.Context(), p, e.Message, e)
		return e
	}
	return nil
}

// holdings counts the names that one stream or fetch holds for its peer.
type holdings struct {
	h    *Handler
	peer peerkey.Holder
	cost int
}

// hold counts the current names of a session in place of the earlier ones. The error is for the client.
func (c *holdings) hold(s *session) error {
	switch more := s.cost() - c.cost; {
	case more < 0:
		c.h.names.Give(c.peer, -more)
	case more > 0:
		if err := c.h.names.Take(c.peer, more); err != nil {
			return grpchttp.Full(err, "sds", "names")
		}
	}
	c.cost = s.cost()
	return nil
}

// release gives back all that is counted. It is the last call.
func (c *holdings) release() { c.h.names.Give(c.peer, c.cost) }

// bytesOf returns the average size, in bytes, of the names of that many streams.
func bytesOf(streams int) int { return min(streams, math.MaxInt/streamBytes) * streamBytes }

// cost returns the approximate size, in bytes, of the names of a session.
func (s *session) cost() int { return s.bytes + len(s.items)*besideName }

// refused logs a refused request. There are few different reasons.
func (h *Handler) refused(ctx context.Context, p peerkey.Holder, reason string, err *grpchttp.Error) {
	label := "request"
	if err.Code == grpchttp.ResourceExhausted {
		label = "limit"
	}
	h.counts.refused[label].Inc()
	h.table.log.LogOf(slog.LevelWarn, p.Name(), "sds: request refused", reason,
		append(attrs(ctx, p), slog.String("err", clip(err.Message)))...)
}

// badRequest logs the error of a request if the client caused it.
func (h *Handler) badRequest(ctx context.Context, p peerkey.Holder, err error) {
	if e, ok := errors.AsType[*grpchttp.Error](err); ok {
		switch e.Code {
		case grpchttp.InvalidArgument, grpchttp.ResourceExhausted, grpchttp.Internal:
			h.refused(ctx, p, e.Code.String(), e)
		}
	}
}
