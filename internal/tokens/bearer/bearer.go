// Package bearer is the one rule for where a server takes bearer tokens from.
package bearer

import (
	"net"
	"net/http"
	"strings"
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

// Token returns what follows "Bearer " in the first authorization field that begins so. It is not checked.
func Token(h http.Header) (token string, ok bool) {
	for _, f := range h["Authorization"] {
		if token, ok = strings.CutPrefix(f, "Bearer "); ok {
			return token, true
		}
	}
	return "", false
}
