// Package redact keeps secrets out of logs and errors, and more than a few bytes of text from peers, which [Clip]
// cuts. fmt and log/slog print the unexported fields of a struct, so a type that holds a key or a token, or leads to
// one, embeds a [Text], and is printed as that text instead:
//
//	type redacted = redact.Text // an alias, so that the embedded field is not exported
//
//	// Source is …
//	type Source struct {
//		redacted
//		token string
//	}
//
//	s := &Source{redacted: redact.New("tokensource.Source(file)")}
package redact

import (
	"log/slog"
	"unicode/utf8"
)

// Text is printed in place of a value by every verb of fmt and by log/slog. The zero value prints "[redacted]". It is
// copied with the struct that embeds it, and safe for concurrent use.
type Text struct {
	text  string
	group *slog.Value // nil: log/slog shows text
}

// New returns a Text that prints as text, which names the value and must hold nothing secret. If there are attrs,
// log/slog shows them as a group instead.
func New(text string, attrs ...slog.Attr) Text {
	if len(attrs) == 0 {
		return Text{text: text}
	}
	return Text{text, new(slog.GroupValue(attrs...))}
}

// String implements [fmt.Stringer].
func (t Text) String() string {
	if t.text == "" {
		return "[redacted]"
	}
	return t.text
}

// GoString implements [fmt.GoStringer].
func (t Text) GoString() string { return t.String() }

// LogValue implements [slog.LogValuer].
func (t Text) LogValue() slog.Value {
	if t.group != nil {
		return *t.group
	}
	return slog.StringValue(t.String())
}

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

// Seal hides a secret from package fmt. A [Text] alone does not protect a type in another type's unexported field:
// there fmt calls no String method and, for a verb that does not fit, follows pointers too.
func Seal[T any](secret T) func() T { return func() T { return secret } }
