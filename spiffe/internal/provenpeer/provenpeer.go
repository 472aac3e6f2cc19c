// Package provenpeer carries the proven client of a request in a context: package spiffetest passes a peer to
// handlers of package spiffetls without a TLS connection, and package spiffegrpc passes a connection. Programs
// cannot import it, so they cannot give a request another peer than its connection has.
package provenpeer

import (
	"context"
	"crypto/tls"

	"github.com/svidkit/svidkit/spiffe"
)

type (
	key     struct{}
	connKey struct{}
)

// With returns a copy of ctx with peer.
func With(ctx context.Context, peer *spiffe.Peer) context.Context {
	return context.WithValue(ctx, key{}, peer)
}

// From returns the peer that [With] put into ctx, or nil.
func From(ctx context.Context) *spiffe.Peer {
	peer, _ := ctx.Value(key{}).(*spiffe.Peer)
	return peer
}

// WithConn returns a copy of ctx with a connection of a spiffetls.Endpoint, which verifies its client again.
func WithConn(ctx context.Context, conn *tls.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, conn)
}

// ConnFrom returns the connection that [WithConn] put into ctx, or nil.
func ConnFrom(ctx context.Context) *tls.Conn {
	conn, _ := ctx.Value(connKey{}).(*tls.Conn)
	return conn
}
