// Package provenpeer carries the proven client of a request in a context: package spiffetest passes a [*spiffe.Peer] to
// handlers of package spiffetls without a TLS connection, and package spiffegrpc passes the [*tls.Conn] of a
// spiffetls.Endpoint, which verifies its client again. Programs cannot import it, so they cannot give a request
// another peer than its connection has.
package provenpeer

import (
	"context"
	"crypto/tls"

	"github.com/svidkit/svidkit/spiffe"
)

type key struct{}

// With returns a copy of ctx with the client.
func With[T *spiffe.Peer | *tls.Conn](ctx context.Context, client T) context.Context {
	return context.WithValue(ctx, key{}, client)
}

// From returns the client that [With] put into ctx last, or nil if there is none of this type.
func From[T *spiffe.Peer | *tls.Conn](ctx context.Context) T {
	client, _ := ctx.Value(key{}).(T)
	return client
}
