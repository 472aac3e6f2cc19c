// Package strictjson reads small JSON documents that may be hostile: trust bundles and the parts of
// tokens. It reads one value after the other, without reflection and without building a tree, and
// refuses documents that two readers could understand differently:
//
//   - duplicate members in one object, at any depth, also if escapes spell the names differently;
//   - text that is not UTF-8, and escapes that are half of a surrogate pair;
//   - anything after the value.
//
// Member names are case-sensitive. Numbers are returned as they were written, without conversion to
// floating point. Depth and size are limited, and time and memory are proportional to the size of the
// input.
package strictjson

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"iter"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// Limits on the input. Callers with smaller limits check them before.
const (
	MaxSize  = 16 << 20 // bytes of input
	MaxDepth = 64       // objects and arrays inside each other
)

// Code is the kind of an [Error].
type Code int

const (
	Syntax    Code = iota + 1 // not JSON
	Duplicate                 // a member occurs twice
	Encoding                  // not UTF-8, or half of a surrogate pair
	Trailing                  // something follows the value
	TooLarge                  // over MaxSize or MaxDepth
)

// Error says why a document is refused. It does not carry the input.
type Error struct {
	Code   Code
	Offset int // the first byte that breaks the rule
	Reason string
}

func (e *Error) Error() string { return fmt.Sprintf("at byte %d: %s", e.Offset, e.Reason) }

// Kind is the kind of a value, told by its first byte.
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
// [Reader.Members] and [Reader.Elements] skip values that their loop body left unread. After the first error nothing is
// read, loops end, and [Reader.End] returns the error. Callers read without checking errors, and call End before they
// use the results.
//
// Byte slices that a Reader returns may share memory with the input and must not be changed.
type Reader struct {
	data  []byte
	pos   int
	depth int
	err   *Error
	own   bool     // data is our copy: unescaped in place
	names []span   // the member names of all objects that are open
	few   [16]span // where names begins
	table []uint32 // for unique
	seed  maphash.Seed
}

// span is the place of a member name in data. It has offsets, because data may move, in 32 bits, because
// a hostile document can have very many.
type span struct{ from, to uint32 }

// NewReader returns a Reader of data, which must not change while it is read.
func NewReader(data []byte) *Reader {
	r := &Reader{data: data}
	r.names = r.few[:0]
	switch {
	case len(data) > MaxSize:
		r.fail(TooLarge, MaxSize, "the document is too large")
	case !utf8.Valid(data):
		r.fail(Encoding, validPrefix(data), "not UTF-8")
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

// Members loops over the members of an object by name. The loop has no rounds if the next value is
// of another kind. A loop that is left early leaves the document unread: End then returns an error.
func (r *Reader) Members() iter.Seq[[]byte] {
	return func(yield func([]byte) bool) { r.members(yield) }
}

// Elements loops over the elements of an array by index, as [Reader.Members] does over members.
func (r *Reader) Elements() iter.Seq[int] {
	return func(yield func(int) bool) { r.elements(yield) }
}

// Text reads a string and returns it unescaped.
func (r *Reader) Text() ([]byte, bool) {
	if r.next() != '"' {
		return nil, false
	}
	s := r.quoted()
	return s, r.err == nil
}

// Number reads a number and returns it as it was written.
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
		r.members(func([]byte) bool { return true })
	case Array:
		r.elements(func(int) bool { return true })
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

// End returns the first error, or an error if anything but white space follows what was read. The
// error is an [*Error].
func (r *Reader) End() error {
	if r.next(); r.err == nil && r.pos < len(r.data) {
		r.fail(Trailing, r.pos, "something follows the document")
	}
	if r.err != nil {
		return r.err
	}
	return nil
}

func (r *Reader) members(yield func([]byte) bool) {
	if r.next() != '{' || !r.open() {
		return
	}
	first := len(r.names)
	for n := 0; ; n++ {
		if more := r.separator(n, '}'); !more {
			break
		}
		if r.next() != '"' {
			r.syntax("a member name is missing here")
			return
		}
		from := r.pos + 1
		name := r.quoted()
		if r.err != nil {
			return
		}
		if len(r.names) == cap(r.names) {
			r.names = slices.Grow(r.names, len(r.names)) // twice: append alone leaves more garbage behind
		}
		r.names = append(r.names, span{uint32(from), uint32(from + len(name))})
		if n == 1<<8 || n == 1<<12 || n == 1<<16 { // an object of names that repeat does not get large
			if r.unique(r.names[first:]); r.err != nil {
				return
			}
		}
		if r.next() != ':' {
			r.syntax("a colon is missing here")
			return
		}
		r.pos++
		before := r.Offset()
		if !yield(name) {
			r.syntax("the rest was not read")
			return
		}
		if r.err == nil && r.pos == before {
			r.Skip()
		}
	}
	if r.err == nil {
		r.unique(r.names[first:])
		r.names = r.names[:first]
		r.depth--
	}
}

func (r *Reader) elements(yield func(int) bool) {
	if r.next() != '[' || !r.open() {
		return
	}
	for n := 0; r.separator(n, ']'); n++ {
		before := r.Offset()
		if !yield(n) {
			r.syntax("the rest was not read")
			return
		}
		if r.err == nil && r.pos == before {
			r.Skip()
		}
	}
	r.depth--
}

// open enters an object or array.
func (r *Reader) open() bool {
	if r.depth == MaxDepth {
		r.fail(TooLarge, r.pos, "too many objects and arrays inside each other")
		return false
	}
	r.depth++
	r.pos++
	return true
}

// separator reads what comes before item n of an object or array, and reports whether there is one.
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
	if r.at('-') {
		r.pos++
	}
	if r.at('0') {
		r.pos++
	} else {
		r.digits()
	}
	if r.at('.') {
		r.pos++
		r.digits()
	}
	if r.at('e') || r.at('E') {
		r.pos++
		if r.at('+') || r.at('-') {
			r.pos++
		}
		r.digits()
	}
	return r.data[start:r.pos:r.pos]
}

// digits reads one digit or more.
func (r *Reader) digits() {
	start := r.pos
	for r.pos < len(r.data) && r.data[r.pos]-'0' <= 9 {
		r.pos++
	}
	if r.pos == start {
		r.syntax("a digit is missing here")
	}
}

func (r *Reader) at(c byte) bool { return r.pos < len(r.data) && r.data[r.pos] == c }

// quoted reads the string whose opening quote is the next byte.
func (r *Reader) quoted() []byte {
	start := r.pos + 1
	end := start + plain(r.data[start:])
	if end < len(r.data) && r.data[end] == '"' {
		r.pos = end + 1
		return r.data[start:end:end]
	}
	return r.escaped(start, end)
}

// escaped reads the rest of a string from its first byte that is not plain. Unescaped text is shorter, so
// that it fits in place, in a copy.
func (r *Reader) escaped(start, in int) []byte {
	if !r.own {
		r.data, r.own = bytes.Clone(r.data), true
	}
	for out := in; ; {
		n := plain(r.data[in:])
		out += copy(r.data[out:], r.data[in:in+n])
		in += n
		switch {
		case in == len(r.data):
			r.fail(Syntax, in, "a string does not end")
			return nil
		case r.data[in] == '"':
			r.pos = in + 1
			return r.data[start:out:out]
		case r.data[in] != '\\':
			r.fail(Syntax, in, "a control character in a string is not escaped")
			return nil
		}
		c, size := r.escape(in)
		if size == 0 {
			return nil
		}
		in += size
		out += utf8.EncodeRune(r.data[out:in], c)
	}
}

// escape returns the character that the escape at i stands for, and its size; 0 after an error.
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

// hex4 returns the number that four hexadecimal digits at the start of s stand for, or -1.
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

// plain returns how many bytes of s come before the first quote, backslash or control character.
func plain(s []byte) int {
	i := 0
	// Eight bytes at a time, as certificates are long: a byte of x that is less than n sets its high bit in (x - n) &^ x.
	const each, high = 0x0101010101010101, 0x8080808080808080
	for ; i+8 <= len(s); i += 8 {
		x := binary.LittleEndian.Uint64(s[i:])
		quote, backslash := x^each*'"', x^each*'\\'
		if ((x-each*0x20)&^x|(quote-each)&^quote|(backslash-each)&^backslash)&high != 0 {
			break
		}
	}
	for ; i < len(s); i++ {
		if c := s[i]; c < 0x20 || c == '"' || c == '\\' {
			break
		}
	}
	return i
}

// unique fails if two of the names, which are one object's, are equal.
func (r *Reader) unique(names []span) {
	if len(names) <= 16 {
		for i, a := range names {
			for _, b := range names[:i] {
				if a.to-a.from == b.to-b.from && bytes.Equal(r.name(a), r.name(b)) {
					r.duplicate(a)
					return
				}
			}
		}
		return
	}
	if r.table == nil {
		r.seed = maphash.MakeSeed()
	}
	size := 1 << bits.Len(uint(2*len(names))) // at most half full
	if cap(r.table) < size {
		r.table = make([]uint32, size)
	}
	table := r.table[:size]
	clear(table)
	for i, a := range names {
		slot := int(maphash.Bytes(r.seed, r.name(a))) & (size - 1)
		for ; table[slot] != 0; slot = (slot + 1) & (size - 1) {
			if bytes.Equal(r.name(a), r.name(names[table[slot]-1])) {
				r.duplicate(a)
				return
			}
		}
		table[slot] = uint32(i + 1)
	}
}

func (r *Reader) name(s span) []byte { return r.data[s.from:s.to] }

func (r *Reader) duplicate(s span) {
	r.fail(Duplicate, int(s.from)-1, "a member occurs twice in one object")
}

func (r *Reader) syntax(reason string) { r.fail(Syntax, r.pos, reason) }

func (r *Reader) fail(code Code, offset int, reason string) {
	if r.err == nil {
		r.err = &Error{Code: code, Offset: offset, Reason: reason}
	}
}

// validPrefix returns the offset of the first byte of data that is not UTF-8.
func validPrefix(data []byte) int {
	for i := 0; ; {
		c, size := utf8.DecodeRune(data[i:])
		if c == utf8.RuneError && size <= 1 {
			return i
		}
		i += size
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
