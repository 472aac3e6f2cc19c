package redact

import "unicode/utf8"

// Clip cuts s, which another side sent, to at most n bytes for an error or a log: between two characters, and with an
// ellipsis that shows it.
func Clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}
