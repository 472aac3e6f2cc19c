package bearer

import (
	"strings"
	"unicode"
)

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
