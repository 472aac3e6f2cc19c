// Package provenpeer carries the proven client of a request in a context without a TLS connection. Package spiffetest
// uses it to hand a peer to handlers of package spiffetls. Programs cannot import it: outside of tests the peer of a
// request is that of its connection.
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
