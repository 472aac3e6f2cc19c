// Package strictjson reads small JSON documents that may be hostile: trust bundles and the parts of
// tokens. A [Reader] reads one value after the other, without reflection and without building a tree (the decoder of
// encoding/json would add 90 kB to a program). It refuses documents that two readers could understand differently:
//
//   - duplicate members in one object, at any depth, also if escapes spell the names differently;
//   - text that is not UTF-8, and escapes that are half of a surrogate pair;
//   - anything after the value.
//
// Member names are case-sensitive. Numbers are returned as they were written, without conversion to floating point.
// Depth and size are limited; time and memory are proportional to the input.
package strictjson

import (
	"bytes"
	"encoding/json"
	"fmt"
	"iter"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// Limits on the input. Callers with smaller limits check them before.
const (
	MaxSize    = 16 << 20 // bytes of input
	MaxDepth   = 64       // objects and arrays inside each other
	MaxMembers = 1 << 13  // members read so far, of all open objects
)

// Code is the kind of an [Error].
type Code int

const (
	Syntax    Code = iota + 1 // not JSON
	Duplicate                 // a member occurs twice
	Encoding                  // not UTF-8, or half of a surrogate pair
	Trailing                  // something follows the value
	TooLarge                  // over MaxSize, MaxDepth or MaxMembers
)

// Error says why a document is refused. It contains at most one character of the input.
type Error struct {
	Code   Code
	Offset int // where the rule is broken, or the value begins that breaks it
	Reason string
}

func (e *Error) Error() string { return fmt.Sprintf("at byte %d: %s", e.Offset, e.Reason) }

// Kind is the kind of a value, determined by its first byte.
type Kind byte

const (
	None   Kind = 0 // no value begins here
	Object Kind = '{'
	Array  Kind = '['
	String Kind = '"'
	Number Kind = '0'
	Bool   Kind = 't'
	Null   Kind = 'n'
)

// Reader reads one document. Every method reads the next value, or leaves it unread if it is of another kind;
// [Reader.Members] and [Reader.Elements] skip values that their loop body left unread. After the first error the
// Reader reads nothing, loops end, and [Reader.End] returns the error. Callers read without checking errors, and call
// End before they use the results.
//
// Byte slices that a Reader returns may share memory with the input and must not be changed.
type Reader struct {
	data  []byte // valid UTF-8, or there is an error
	pos   int
	depth int
	names int // of all open objects
	err   *Error
}

// NewReader returns a Reader of data, which must not change while it is read.
func NewReader(data []byte) *Reader {
	r := &Reader{data: data}
	switch {
	case len(data) > MaxSize:
		r.fail(TooLarge, MaxSize, "the document is too large")
	case !utf8.Valid(data):
		at := 0
		for utf8.FullRune(data[at:]) {
			c, size := utf8.DecodeRune(data[at:])
			if c == utf8.RuneError && size == 1 {
				break
			}
			at += size
		}
		r.fail(Encoding, at, "not UTF-8")
	}
	return r
}

// ReadObject reads a document that is an object. It calls member for each member, which reads the value or leaves it
// unread. The error is an [*Error].
func ReadObject(data []byte, member func(name string, r *Reader)) error {
	r := NewReader(data)
	if r.err == nil && r.Kind() != Object {
		r.fail(Syntax, 0, "not a JSON object")
	}
	for name := range r.Members() {
		member(string(name), r)
	}
	return r.End()
}

// Kind returns the kind of the next value, and None after an error.
func (r *Reader) Kind() Kind {
	switch c := r.next(); c {
	case '{', '[', '"', 't', 'n':
		return Kind(c)
	case 'f':
		return Bool
	case '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9':
		return Number
	}
	return None
}

// Offset returns where the next value begins.
func (r *Reader) Offset() int {
	r.next()
	return r.pos
}

// Members loops over the members of an object by name. The loop has no iterations if the next value is of another
// kind. A loop that ends early leaves the document unread: End then returns an error.
func (r *Reader) Members() iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		before, seen := r.names, map[string]bool{}
		r.items('{', '}', func(int) {
			at := r.Offset()
			name, ok := r.Text()
			if !ok {
				r.fail(Syntax, at, "not JSON: a member name is missing here")
			}
			if r.names++; r.names > MaxMembers {
				r.fail(TooLarge, at, "too many members")
			}
			r.expect(':', "not JSON: a colon is missing here")
			r.item(func() bool { return yield(name) })
			if seen[string(name)] {
				r.fail(Duplicate, at, "a member occurs twice in one object")
			}
			seen[string(name)] = true
		})
		r.names = before
	}
}

// Elements loops over the elements of an array by index, as [Reader.Members] does over members.
func (r *Reader) Elements() iter.Seq[int] {
	return func(yield func(int) bool) {
		r.items('[', ']', func(n int) { r.item(func() bool { return yield(n) }) })
	}
}

// Text reads a string and returns it unescaped.
func (r *Reader) Text() ([]byte, bool) {
	if r.next() != '"' {
		return nil, false
	}
	s := r.quoted()
	return s, r.err == nil
}

// Number reads a number and returns it in its original form.
func (r *Reader) Number() ([]byte, bool) {
	if r.Kind() != Number {
		return nil, false
	}
	n := r.word()
	return n, r.err == nil
}

// Skip reads a value of any kind, checks it like any other, and returns it as it was written.
func (r *Reader) Skip() []byte {
	from := r.Offset()
	switch r.Kind() {
	case Object:
		for range r.Members() {
			continue
		}
	case Array:
		for range r.Elements() {
			continue
		}
	case String:
		r.quoted()
	case Number, Bool, Null:
		r.word()
	case None:
		r.fail(Syntax, from, "not JSON: a value is missing here")
	}
	if r.err != nil {
		return nil
	}
	return r.data[from:r.pos]
}

// End returns the first error, or an error if there is more than was read; both are an [*Error].
func (r *Reader) End() error {
	if r.next(); r.err == nil && r.pos < len(r.data) {
		r.fail(Trailing, r.pos, "something follows the document")
	}
	if r.err != nil {
		return r.err
	}
	return nil
}

// items calls read for each item of an object or array, if that is the next value.
func (r *Reader) items(begin, end byte, read func(n int)) {
	switch {
	case r.next() != begin:
		return
	case r.depth == MaxDepth:
		r.fail(TooLarge, r.pos, "too many objects and arrays inside each other")
		return
	}
	r.depth++
	r.pos++
	for n := 0; r.next() != end && r.err == nil; n++ {
		if n > 0 {
			r.expect(',', "not JSON: a comma or the end is missing here")
		}
		read(n)
	}
	r.depth--
	r.pos++
}

// item passes the next value to a loop, and skips it if the loop leaves it unread.
func (r *Reader) item(loop func() bool) {
	if r.err != nil {
		return
	}
	before := r.Offset()
	if !loop() {
		r.fail(Syntax, r.pos, "the rest was not read")
	} else if r.pos == before {
		r.Skip()
	}
}

// expect reads a separator.
func (r *Reader) expect(separator byte, missing string) {
	if r.next() != separator {
		r.fail(Syntax, r.pos, missing)
	}
	r.pos++
}

// next skips white space and returns the byte that follows, or 0 at the end and after an error.
func (r *Reader) next() byte {
	if r.err != nil {
		return 0
	}
	for ; r.pos < len(r.data); r.pos++ {
		switch c := r.data[r.pos]; c {
		case ' ', '\t', '\n', '\r':
		default:
			return c
		}
	}
	return 0
}

// word reads a number, true, false or null.
func (r *Reader) word() []byte {
	start, n := r.pos, bytes.IndexAny(r.data[r.pos:], " \t\n\r,]}")
	if n < 0 {
		n = len(r.data) - start
	}
	r.pos += n
	value := r.data[start:r.pos:r.pos]
	if n > 0 && (n == 1 || value[0] != '0') && len(bytes.TrimLeft(value, "0123456789")) == 0 {
		return value // encoding/json needs as long for a digit as for a number of many
	}
	return r.valid(start)
}

// quoted reads a string and returns it unescaped.
func (r *Reader) quoted() []byte {
	start, escaped := r.pos, false
	for r.pos++; r.pos < len(r.data) && r.data[r.pos] != '"' && r.data[r.pos] >= ' '; r.pos++ {
		if r.data[r.pos] == '\\' {
			escaped = true
			r.pos++ // the quote may be, too
		}
	}
	if r.pos >= len(r.data) || r.data[r.pos] != '"' {
		r.fail(Syntax, start, "not JSON: a string does not end, or has a control character")
		return nil
	}
	r.pos++
	text := r.data[start+1 : r.pos-1 : r.pos-1]
	if escaped && r.valid(start) != nil {
		return r.unescape(start, string(text))
	}
	return text
}

// valid returns what was read from start, if that is a value.
func (r *Reader) valid(start int) []byte {
	value := r.data[start:r.pos:r.pos]
	if !json.Valid(value) {
		r.fail(Syntax, start, "not JSON: not a value")
		return nil
	}
	return value
}

// unescape returns s, a string that begins at start, without its escapes.
func (r *Reader) unescape(start int, s string) []byte {
	var text []byte
	for s != "" {
		if s[0] == '\\' && s[1] == '/' { // strconv does not know this one
			s = s[1:]
		}
		c, _, rest, err := strconv.UnquoteChar(s, '"')
		if err != nil { // the syntax is valid, so that this is a surrogate
			high, _ := strconv.ParseUint(s[2:6], 16, 16)
			if rest = s[6:]; len(rest) >= 6 && rest[:2] == `\u` {
				low, _ := strconv.ParseUint(rest[2:6], 16, 16)
				c, rest = utf16.DecodeRune(rune(high), rune(low)), rest[6:]
			}
			if c == 0 || c == utf8.RuneError {
				r.fail(Encoding, start, "half of a surrogate pair")
				return nil
			}
		}
		text, s = utf8.AppendRune(text, c), rest
	}
	return text
}

func (r *Reader) fail(code Code, offset int, reason string) {
	if r.err == nil {
		r.err = &Error{Code: code, Offset: offset, Reason: reason}
	}
}
