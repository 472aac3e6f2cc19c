package internal_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/redact"
)

type redacted = redact.Text

type holder struct {
	redacted
	token string
}

type outer struct{ Inner *holder }

// TestRedactText prints a struct that holds a token in every way that prints its fields.
func TestRedactText(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		value holder
		want  string
	}{
		{holder{redacted: redact.New("a holder"), token: "s3cr3t"}, "a holder"},
		{holder{token: "s3cr3t"}, "[redacted]"},
	} {
		for _, v := range []any{c.value, &c.value} {
			for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q"} {
				got := fmt.Sprintf(verb, v)
				assert.Contains(t, got, c.want, verb)
				assert.NotContains(t, got, "s3cr3t", verb)
			}
			var text, json bytes.Buffer
			slog.New(slog.NewTextHandler(&text, nil)).Info("m", "v", v)
			slog.New(slog.NewJSONHandler(&json, nil)).Info("m", "v", v)
			for _, got := range []string{text.String(), json.String()} {
				assert.Contains(t, got, c.want)
				assert.NotContains(t, got, "s3cr3t")
			}
		}
		assert.NotContains(t, fmt.Sprintf("%+v", outer{&c.value}), "s3cr3t")
	}
	var log bytes.Buffer
	slog.New(slog.NewTextHandler(&log, nil)).Info("m", "v", holder{redact.New("a holder", slog.Int("n", 1)), "s3cr3t"})
	assert.Contains(t, log.String(), "v.n=1")
	assert.NotContains(t, log.String(), "s3cr3t")
	var none *holder
	assert.NotPanics(t, func() { _ = fmt.Sprint(none) })
}

func TestRedactClip(t *testing.T) {
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

func TestRedactSeal(t *testing.T) {
	t.Parallel()
	type secret struct{ text string }
	sealed := struct{ in any }{&struct{ key func() secret }{redact.Seal(secret{"xyzzy"})}}
	assert.Equal(t, "xyzzy", sealed.in.(*struct{ key func() secret }).key().text)
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%x", "%d", "%q"} {
		assert.NotContains(t, fmt.Sprintf(verb, sealed), "xyzzy", verb)
		assert.NotContains(t, fmt.Sprintf(verb, sealed), "78797a7a79", verb)
	}
}
