// Package strictjson reads small JSON documents that may be hostile: trust bundles and the parts of
// tokens. Package encoding/json checks the syntax. A [Reader] then reads one value after the other, without reflection
// and without building a tree, and refuses documents that two readers could understand differently:
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
	"errors"
	"fmt"
	"iter"
	"strings"
	"unicode/utf8"
)

// Limits on the input. Callers with smaller limits check them before.
const (
	MaxSize    = 16 << 20 // bytes of input
	MaxDepth   = 64       // objects and arrays inside each other
	MaxMembers = 1 << 13  // members read so far, of all open objects
)

const tooDeep = "too many objects and arrays inside each other"

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
	Offset int // where the rule is broken
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
	data  []byte // its syntax is valid, or there is an error
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
	case !json.Valid(data):
		r.err = syntaxError(data)
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

// syntaxError returns the error of a document that is not JSON.
func syntaxError(data []byte) *Error {
	err := json.Unmarshal(data, new(any))
	e := &Error{Code: Syntax, Reason: "not JSON: " + err.Error()}
	switch {
	case strings.HasSuffix(e.Reason, "after top-level value"):
		e.Code, e.Reason = Trailing, "something follows the document"
	case strings.HasSuffix(e.Reason, "exceeded max depth"):
		e.Code, e.Reason = TooLarge, tooDeep
	}
	if at, ok := errors.AsType[*json.SyntaxError](err); ok {
		e.Offset = max(0, int(at.Offset)-1)
	}
	return e
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
			at := r.pos
			name := r.quoted()
			if r.names++; r.names > MaxMembers {
				r.fail(TooLarge, at, "too many members")
			}
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
	return r.word(), true
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
	}
	if r.err != nil {
		return nil
	}
	return r.data[from:r.pos]
}

// End returns the first error, or an error if the value was not read; both are an [*Error].
func (r *Reader) End() error {
	if r.next(); r.err == nil && r.pos < len(r.data) {
		r.fail(Trailing, r.pos, "the rest was not read")
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
		r.fail(TooLarge, r.pos, tooDeep)
		return
	}
	r.depth++
	r.pos++
	for n := 0; r.next() != end && r.err == nil; n++ {
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

// next skips white space and separators, and returns the byte that follows, or 0 at the end and after an error.
func (r *Reader) next() byte {
	if r.err != nil {
		return 0
	}
	for ; r.pos < len(r.data); r.pos++ {
		switch c := r.data[r.pos]; c {
		case ' ', '\t', '\n', '\r', ',', ':':
		default:
			return c
		}
	}
	return 0
}

// word reads a number, true, false or null.
func (r *Reader) word() []byte {
	rest := r.data[r.pos:]
	n := bytes.IndexAny(rest, " \t\n\r,]}")
	if n < 0 {
		n = len(rest)
	}
	r.pos += n
	return rest[:n:n]
}

// quoted reads a string and returns it unescaped.
func (r *Reader) quoted() []byte {
	start := r.pos
	end := start + 1 + bytes.IndexByte(r.data[start+1:], '"')
	escaped := bytes.IndexByte(r.data[start:end], '\\') >= 0
	if escaped { // the quote may be, too
		for end = start + 1; r.data[end] != '"'; end++ {
			if r.data[end] == '\\' {
				end++
			}
		}
	}
	r.pos = end + 1
	if !escaped {
		return r.data[start+1 : end : end]
	}
	return r.unescape(start, r.data[start:r.pos])
}

// unescape returns the text of a string with escapes, which begins at start. For half of a surrogate pair
// encoding/json returns U+FFFD.
func (r *Reader) unescape(start int, quoted []byte) []byte {
	var text string
	_ = json.Unmarshal(quoted, &text) // the syntax is valid
	if n := strings.Count(text, "\ufffd"); n > 0 {
		as := bytes.ToLower(bytes.ReplaceAll(quoted, []byte(`\\`), nil))
		if n != bytes.Count(as, []byte("\ufffd"))+bytes.Count(as, []byte(`\ufffd`)) {
			r.fail(Encoding, start, "half of a surrogate pair")
		}
	}
	return []byte(text)
}

func (r *Reader) fail(code Code, offset int, reason string) {
	if r.err == nil {
		r.err = &Error{Code: code, Offset: offset, Reason: reason}
	}
}
