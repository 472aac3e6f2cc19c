// Package strictjson reads small JSON documents that may be hostile: trust bundles and the parts of
// tokens. It reads one value after the other, without reflection and without building a tree, and
// refuses documents that two readers could understand differently:
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
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// Limits on the input. Callers with smaller limits check them before.
const (
	MaxSize    = 16 << 20 // bytes of input
	MaxDepth   = 64       // objects and arrays inside each other
	MaxMembers = 1 << 14  // members read so far, of all open objects
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

// Error says why a document is refused. It does not contain the input.
type Error struct {
	Code   Code
	Offset int // the first byte that breaks the rule
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
	data  []byte
	pos   int
	depth int
	err   *Error
	names []member // of all open objects
}

// member is a member name and its offset.
type member struct {
	name []byte
	at   int
}

// NewReader returns a Reader of data, which must not change while it is read.
func NewReader(data []byte) *Reader {
	r := &Reader{data: data}
	if len(data) > MaxSize {
		r.fail(TooLarge, MaxSize, "the document is too large")
	}
	return r
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
		first := len(r.names)
		r.items('{', '}', func(int) {
			if name := r.memberName(); r.err == nil {
				r.item(func() bool { return yield(name) })
			}
		})
		if r.err == nil {
			r.unique(r.names[first:])
			r.names = r.names[:first]
		}
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
	n := r.number()
	return n, r.err == nil
}

// Skip reads a value of any kind and checks it like any other.
func (r *Reader) Skip() {
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
	case Number:
		r.number()
	case Bool, Null:
		r.word()
	default:
		r.syntax("a value is missing here")
	}
}

// End returns the first error, or an error if more than white space follows the last value; both are an [*Error].
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
	for n := 0; r.separator(n, end); n++ {
		read(n)
	}
	r.depth--
}

// item passes the next value to a loop, and skips it if the loop leaves it unread.
func (r *Reader) item(loop func() bool) {
	before := r.Offset()
	if !loop() {
		r.syntax("the rest was not read")
	} else if r.pos == before {
		r.Skip()
	}
}

// memberName reads a member name and the colon after it.
func (r *Reader) memberName() []byte {
	if r.next() != '"' {
		r.syntax("a member name is missing here")
		return nil
	}
	at := r.pos
	name := r.quoted()
	if len(r.names) == MaxMembers {
		r.fail(TooLarge, at, "too many members")
	}
	r.names = append(r.names, member{name, at})
	if r.next() != ':' {
		r.syntax("a colon is missing here")
	}
	r.pos++
	return name
}

// separator reads the text before item n of an object or array, and reports whether there is such an item.
func (r *Reader) separator(n int, end byte) bool {
	switch c := r.next(); {
	case r.err != nil:
		return false
	case c == end:
		r.pos++
		return false
	case n == 0:
		return true
	case c == ',':
		r.pos++
		return true
	}
	r.syntax("a comma or the end of the object or array is missing here")
	return false
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

func (r *Reader) word() {
	for _, w := range [...]string{"true", "false", "null"} {
		if bytes.HasPrefix(r.data[r.pos:], []byte(w)) {
			r.pos += len(w)
			return
		}
	}
	r.syntax("not a value")
}

func (r *Reader) number() []byte {
	start := r.pos
	r.accept("-")
	if !r.accept("0") {
		r.digits()
	}
	if r.accept(".") {
		r.digits()
	}
	if r.accept("eE") {
		r.accept("+-")
		r.digits()
	}
	return r.data[start:r.pos:r.pos]
}

// digits reads at least one digit.
func (r *Reader) digits() {
	const digits = "0123456789"
	if !r.accept(digits) {
		r.syntax("a digit is missing here")
	}
	for r.accept(digits) {
		continue
	}
}

// accept reads the next byte if it is one of chars.
func (r *Reader) accept(chars string) bool {
	ok := r.pos < len(r.data) && strings.IndexByte(chars, r.data[r.pos]) >= 0
	if ok {
		r.pos++
	}
	return ok
}

// quoted reads the string whose opening quote is the next byte, and returns it unescaped.
func (r *Reader) quoted() []byte {
	start := r.pos + 1
	var text []byte // the unescaped text so far, if there was an escape
	for i := start; i < len(r.data); {
		if c := r.data[i]; text == nil && c >= 0x20 && c < utf8.RuneSelf && c != '"' && c != '\\' {
			i++ // the usual case, as most text is long certificates
			continue
		}
		c, size := utf8.DecodeRune(r.data[i:])
		switch {
		case c == '"':
			r.pos = i + 1
			if text == nil {
				text = r.data[start:i:i]
			}
			return text
		case c < 0x20:
			r.fail(Syntax, i, "a control character in a string is not escaped")
		case c == utf8.RuneError && size == 1:
			r.fail(Encoding, i, "not UTF-8")
		case c == '\\':
			if text == nil {
				text = append(make([]byte, 0, i-start+utf8.UTFMax), r.data[start:i]...)
			}
			c, size = r.escape(i)
		}
		if r.err != nil {
			return nil
		}
		if text != nil {
			text = utf8.AppendRune(text, c)
		}
		i += size
	}
	r.fail(Syntax, len(r.data), "a string does not end")
	return nil
}

// escape returns the character that the escape at i represents, and its size; 0 after an error.
func (r *Reader) escape(i int) (rune, int) {
	var c byte
	if i+1 < len(r.data) {
		c = r.data[i+1]
	}
	if n := strings.IndexByte(`"\/bfnrt`, c); n >= 0 {
		return rune("\"\\/\b\f\n\r\t"[n]), 2
	}
	if c == 'u' {
		hi := hex4(r.data[i+2:])
		if hi >= 0 && !utf16.IsSurrogate(hi) {
			return hi, 6
		}
		if hi >= 0 {
			if rest, ok := bytes.CutPrefix(r.data[i+6:], []byte(`\u`)); ok {
				if c := utf16.DecodeRune(hi, hex4(rest)); c != utf8.RuneError {
					return c, 12
				}
			}
			r.fail(Encoding, i, "half of a surrogate pair")
			return 0, 0
		}
	}
	r.fail(Syntax, i, "not an escape")
	return 0, 0
}

// hex4 returns the number in the first four hexadecimal digits of s, or -1.
func hex4(s []byte) rune {
	if len(s) < 4 {
		return -1
	}
	n, err := strconv.ParseUint(string(s[:4]), 16, 16)
	if err != nil {
		return -1
	}
	return rune(n)
}

// unique fails at the first duplicate in names, which belong to one object. It sorts them.
func (r *Reader) unique(names []member) {
	slices.SortStableFunc(names, func(a, b member) int { return bytes.Compare(a.name, b.name) })
	twice := -1
	for i := 1; i < len(names); i++ {
		if bytes.Equal(names[i].name, names[i-1].name) && (twice < 0 || names[i].at < twice) {
			twice = names[i].at
		}
	}
	if twice >= 0 {
		r.fail(Duplicate, twice, "a member occurs twice in one object")
	}
}

func (r *Reader) syntax(reason string) { r.fail(Syntax, r.pos, reason) }

func (r *Reader) fail(code Code, offset int, reason string) {
	if r.err == nil {
		r.err = &Error{Code: code, Offset: offset, Reason: reason}
	}
}

// AppendText appends s, which must be UTF-8, to b as a JSON string with its quotes.
func AppendText(b []byte, s string) []byte {
	b = append(b, '"')
	for i := range len(s) {
		c := s[i]
		if n := strings.IndexByte("\"\\\n\r\t\b\f", c); n >= 0 {
			b = append(b, '\\', `"\nrtbf`[n])
		} else if c < 0x20 {
			b = fmt.Appendf(b, `\u%04x`, c)
		} else {
			b = append(b, c)
		}
	}
	return append(b, '"')
}
