package tokens_test

import (
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/tokens/bearer"
)

func TestBearerRedactSeveral(t *testing.T) {
	t.Parallel()
	a, b := "abcdefghijklmnopqrst", "zyxwvutsrqponmlkjihg"
	assert.Equal(t, "[redacted] and [redacted], but not abcdefg", bearer.Redact(a+" and "+b[2:]+", but not abcdefg", a, b, ""))
	assert.Equal(t, "[redacted] is short", bearer.Redact("sesame is short", "sesame"))
}

// A text for a log is one short line, and has no sixteen bytes of the token.
func FuzzBearerRedact(f *testing.F) {
	f.Add("token has expired", "sesame")
	f.Add("bad: abcdefghijklmnopqrstuvwxyz!", "0abcdefghijklmnopqrstuvwxyz0")
	f.Add("\xff\x00\r\n", "\xff")
	f.Add(strings.Repeat("é", 300), "x")
	f.Add("aaaa", "")
	f.Fuzz(func(t *testing.T, text, tok string) {
		out := bearer.Redact(text, tok)
		if len(out) > 520 || !utf8.ValidString(out) || strings.ContainsFunc(out, func(c rune) bool { return !unicode.IsPrint(c) && c != ' ' }) {
			t.Fatalf("%q", out)
		}
		if len(tok) < 16 || !printableASCII(tok) {
			return
		}
		for i := range len(tok) - 15 {
			// with a bracket it may come about where something was taken out
			if piece := tok[i : i+16]; strings.Contains(out, piece) && !strings.ContainsAny(piece, "[]") {
				t.Fatalf("%q has %q of the token", out, piece)
			}
		}
	})
}

func printableASCII(s string) bool {
	return !strings.ContainsFunc(s, func(c rune) bool { return c <= ' ' || c > '~' })
}
