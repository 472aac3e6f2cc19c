// Package peercontext carries the proven client of a request in a context that no TLS connection belongs to. It is
// how package spiffetest hands a peer to the handlers of package spiffetls. A program cannot import it, so that the
// peer of a request is that of its connection, or that of a test.
package provenpeer

import (
	"context"

	"github.com/svidkit/svidkit/spiffe"
)

type key struct{}

// With returns a copy of ctx with peer.
func With(ctx context.Context, peer *spiffe.Peer) context.Context {
	return context.WithValue(ctx, key{}, peer)
}

// From returns the peer that [With] has put into ctx, or nil.
func From(ctx context.Context) *spiffe.Peer {
	peer, _ := ctx.Value(key{}).(*spiffe.Peer)
	return peer
}
