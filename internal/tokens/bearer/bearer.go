// Package bearer has the rules for bearer tokens in HTTP. [Token] reads a token from a header, and [Confidential]
// reports whether others on the network could have read the request. [Redact] and [RedactError] make a server's texts
// fit for a log: they may quote a token that the server received.
package bearer

import (
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"strings"
	"unicode"
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

// Printable reports whether s is printable ASCII without spaces, as a token is. It is fast, as tokens come again.
func Printable(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// Redact makes a server's text fit for a log: one line of at most about 500 bytes. It removes every 16-byte part of a
// secret, which servers may quote, and every whole shorter secret.
func Redact(text string, secrets ...string) string {
	const limit = 500
	if most := 4 * limit; len(text) > most { // not inside a word: fewer than 16 bytes of a secret could remain
		end := most
		for end > most-64 && TokenRune(rune(text[end-1])) {
			end--
		}
		text = text[:end]
	}
	secret := quoted(text, secrets)
	var b strings.Builder
	for i, c := range text {
		switch {
		case b.Len() >= limit:
			return b.String() + "…"
		case secret[i] && (i == 0 || !secret[i-1]):
			b.WriteString("[redacted]")
		case secret[i]:
		case unicode.IsPrint(c):
			b.WriteRune(c)
		default:
			b.WriteByte(' ')
		}
	}
	return b.String()
}

// quoted marks the bytes of text that are a part of a secret: 16 bytes of it, or all of a shorter one.
func quoted(text string, secrets []string) []bool {
	secret := make([]bool, len(text)) // by byte
	for _, s := range secrets {
		n := min(16, len(s))
		if n == 0 {
			continue
		}
		at := map[string][]int{} // where text contains n given bytes; a secret may be much longer than text
		for i := range len(text) - n + 1 {
			at[text[i:i+n]] = append(at[text[i:i+n]], i)
		}
		for i := range len(s) - n + 1 {
			for _, j := range at[s[i:i+n]] {
				for k := range n {
					secret[j+k] = true
				}
			}
			delete(at, s[i:i+n])
		}
	}
	return secret
}

// TokenRune reports whether c can be in a bearer token (RFC 6750, section 2.1).
func TokenRune(c rune) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.ContainsRune("-._~+/=", c)
}

// RedactError returns err, or an error with the text of [Redact] if that differs: errors of net/http quote answers
// that are not HTTP. The new error wraps only a *net.OpError or a *tls.CertificateVerificationError in err, whose
// texts predate the sending of the secrets.
func RedactError(err error, secrets ...string) error {
	text := Redact(err.Error(), secrets...)
	if text == err.Error() {
		return err
	}
	e := &redacted{text: text}
	if op, ok := errors.AsType[*net.OpError](err); ok {
		e.cause = op
	} else if v, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		e.cause = v
	}
	return e
}

type redacted struct {
	text  string
	cause error // may be nil
}

func (e *redacted) Error() string { return e.text }
func (e *redacted) Unwrap() error { return e.cause }
