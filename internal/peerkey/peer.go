// Package peerkey identifies the peer that sends a request, for limits by peer. Servers put it into the request's
// context.
//
// A peer is a user of this machine on a Unix socket, and an IP address, with all of its ports, on a TLS connection.
// An address behind a NAT or a gateway stands for many clients, so limits by peer are wide, and count failures rather
// than requests. Where a proxy ends TLS there is no peer, because the address is the proxy's.
package peerkey

import (
	"cmp"
	"context"
	"net"
	"net/http"
	"net/netip"
	"strconv"
)

type key struct{}

// NewContext returns a copy of ctx with the name of its peer.
func NewContext(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, key{}, name)
}

// FromContext returns the name in ctx, or "" if the peer is not known.
func FromContext(ctx context.Context) string {
	name, _ := ctx.Value(key{}).(string)
	return name
}

type userKey struct{}

// WithUser returns a copy of ctx with the user of this machine who owns a TCP connection. Limits that count each
// connection as a separate peer, as for streams, still do so.
func WithUser(ctx context.Context, user string) context.Context {
	return context.WithValue(ctx, userKey{}, user)
}

// UserFromContext returns the peer or the user in ctx, or "".
func UserFromContext(ctx context.Context) string {
	user, _ := ctx.Value(userKey{}).(string)
	return cmp.Or(FromContext(ctx), user)
}

// WithRequest returns ctx, which must be r's context or derived from it, with the peer of r: the peer already in ctx,
// or the address that r came from by TLS.
func WithRequest(ctx context.Context, r *http.Request) context.Context {
	if r.TLS == nil || FromContext(ctx) != "" {
		return ctx
	}
	at, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return ctx
	}
	return NewContext(ctx, at.Addr().Unmap().String())
}

// User returns the name of a user of this machine.
func User(uid uint32) string { return "uid " + strconv.FormatUint(uint64(uid), 10) }

// Address returns the IP address of the other side of c, and false if it has none.
func Address(c net.Conn) (netip.Addr, bool) {
	a, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}, false
	}
	return a.AddrPort().Addr().Unmap(), true
}

// Holder identifies the owner of a share of long-lived resources, such as streams: a user of this machine on a Unix
// socket, and otherwise one connection.
type Holder struct {
	user string
	conn any // nil if there is a user
}

// HolderOf returns the holder that sent r.
func HolderOf(r *http.Request) Holder {
	if user := FromContext(r.Context()); user != "" {
		return Holder{user: user}
	}
	if a, ok := r.Context().Value(http.LocalAddrContextKey).(*net.UnixAddr); ok {
		return Holder{conn: a} // each connection has its own pointer, even if clients have no address
	}
	return Holder{conn: r.RemoteAddr}
}

// Name returns the name of the user, or the client's IP address, for a log; "" if there is neither.
func (h Holder) Name() string {
	host, _, _ := net.SplitHostPort(h.Remote())
	return cmp.Or(h.user, host)
}

// Remote returns the client's address, or "" for a user and on a Unix socket.
func (h Holder) Remote() string {
	remote, _ := h.conn.(string)
	return remote
}
