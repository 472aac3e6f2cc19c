package authn

import (
	"fmt"
	"net/http"

	"github.com/svidkit/svidkit/internal/tokens/bearer"
)

// maxToken is the longest bearer token in bytes. Kubernetes tokens have one to two thousand.
const maxToken = 16 << 10

// Bearer returns the bearer token of a request, for authenticators that judge tokens. The token follows "Bearer " in
// a header field "authorization". The scheme must be written exactly so, with one blank after it. If several fields
// begin with it, the first counts.
//
// Without such a field the error wraps [ErrNoCredential], and says whether there is no field or another scheme. It
// wraps [ErrRefused] for a token that is empty, longer than 16 KiB, or not one word of printable ASCII. It also wraps
// ErrRefused for any token on a connection that others can read: not TLS and not a Unix socket. Errors never contain
// the token. Bearer does not judge the token: a token with the claim "cnf" is bound to a key and is not a bearer
// token.
func Bearer(r *http.Request) (token string, err error) {
	token, err = BearerOverPlaintext(r)
	if err == nil && !bearer.Confidential(r) {
		return "", fmt.Errorf("authn: bearer token: %w: the connection is not encrypted, so that others can "+
			"read the token; use TLS or a Unix socket", ErrRefused)
	}
	return token, err
}

// BearerOverPlaintext is like [Bearer], but accepts tokens over any connection. It is for connections with other
// protection, such as a proxy beside this process that terminates TLS.
func BearerOverPlaintext(r *http.Request) (token string, err error) {
	token, ok := bearer.Token(r.Header)
	switch {
	case len(r.Header["Authorization"]) == 0:
		return "", fmt.Errorf("authn: bearer token: there is no authorization header: %w", ErrNoCredential)
	case !ok:
		return "", fmt.Errorf(`authn: bearer token: the authorization header does not begin with "Bearer ": %w`,
			ErrNoCredential)
	case token == "":
		return "", fmt.Errorf("authn: bearer token: %w: it is empty", ErrRefused)
	case len(token) > maxToken:
		return "", fmt.Errorf("authn: bearer token: %w: it has %d bytes, the limit is %d", ErrRefused,
			len(token), maxToken)
	case !bearer.Printable(token):
		return "", fmt.Errorf("authn: bearer token: %w: it is not one word of printable ASCII", ErrRefused)
	}
	return token, nil
}
