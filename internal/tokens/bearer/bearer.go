// Package bearer has the rules for bearer tokens in HTTP. [Token] reads a token from a header, and [Confidential]
// reports whether others on the network could have read the request. [Redact] and [RedactError] make a server's texts
// fit for a log: they may quote a token that the server received.
package bearer

import (
	"net"
	"net/http"
	"strings"
)

// Confidential reports whether only the sender and this server could read a token in r: r came over TLS or a Unix
// socket. Any other reader could use the token.
func Confidential(r *http.Request) bool {
	if r.TLS != nil {
		return true
	}
	a, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	return ok && (a.Network() == "unix" || a.Network() == "unixpacket")
}

// Token returns the token in the first authorization field that begins with "Bearer ". It is not checked.
func Token(h http.Header) (token string, ok bool) {
	for _, f := range h["Authorization"] {
		if token, ok = strings.CutPrefix(f, "Bearer "); ok {
			return token, true
		}
	}
	return "", false
}
