package redact

import "unicode/utf8"

// Clip cuts s, which the other side sent, to at most n bytes for an error or a log: between two characters, with an
// ellipsis to show the cut.
func Clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}
