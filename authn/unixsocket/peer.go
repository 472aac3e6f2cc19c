package unixsocket

import (
	"context"
	"net"
	"strconv"

	"github.com/svidkit/svidkit/internal/peer"
)

// Peer is the process that opened a connection, as the kernel saw it at that moment. That process may
// have handed the connection on, or have ended, and its PID may belong to another process by now. A server
// that inspects the process further must make sure that it started before the connection did.
type Peer struct {
	UID, GID uint32 // effective
	PID      int32  // in the server's PID namespace; 0 if the process is not in it
}

type peerKey struct{}

// PeerFromContext returns the peer of the request that ctx belongs to. It reports false on connections
// that are not Unix sockets, and on systems other than Linux.
func PeerFromContext(ctx context.Context) (Peer, bool) {
	p, ok := ctx.Value(peerKey{}).(Peer)
	return p, ok
}

// ConnContext adds the peer of c to ctx, for [PeerFromContext]. It is the ConnContext of an
// [http.Server] that serves Unix sockets without a [Server].
func ConnContext(ctx context.Context, c net.Conn) context.Context {
	if p, ok := peerOf(c); ok {
		ctx = peer.NewContext(ctx, "uid "+strconv.FormatUint(uint64(p.UID), 10)) // for limits elsewhere
		return context.WithValue(ctx, peerKey{}, p)
	}
	return ctx
}
