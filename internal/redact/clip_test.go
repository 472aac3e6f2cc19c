package redact_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/redact"
)

func TestClip(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		s    string
		n    int
		want string
	}{
		{"", 0, ""},
		{"abc", 3, "abc"},
		{"abcd", 3, "abc…"},
		{"aé", 2, "a…"}, // not inside a character
		{"é", 1, "…"},
		{"\xa9\xa9", 1, "…"}, // no character begins here
	} {
		assert.Equal(t, c.want, redact.Clip(c.s, c.n), "%q, %d", c.s, c.n)
	}
}
