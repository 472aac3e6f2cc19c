// Package bearer is the one rule for connections over which a server takes bearer tokens.
package bearer

import (
	"net"
	"net/http"
)

// Confidential reports whether a token in r could be read by its sender and this server only: r came by TLS or over a
// Unix socket. A token that others can read can be used by them.
func Confidential(r *http.Request) bool {
	if r.TLS != nil {
		return true
	}
	a, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	return ok && (a.Network() == "unix" || a.Network() == "unixpacket")
}
