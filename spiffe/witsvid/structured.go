package witsvid

import (
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
)

// Structured field values (RFC 8941), as far as message signatures have them: dictionaries of byte
// sequences, and dictionaries of inner lists of strings, with parameters. What is read strictly has one
// spelling, so that the signature base can be written anew from it.

// Bounds on what is read.
const (
	maxStructured = 8 << 10 // bytes of a field, all its lines together
	maxMembers    = 16      // of a dictionary
	maxItems      = 64      // of an inner list
	maxParams     = 16
)

// item is a bare item: a string, token, byte sequence (all in text), integer or boolean.
type item struct {
	kind byte // '"', 'a', ':', '0' or '?'
	text string
	n    int64
	yes  bool
}

type param struct {
	key   string
	value item
}

// component is what an inner list of a Signature-Input holds: the name of a message component with its
// parameters.
type component struct {
	name   string
	params []param
}

// member is a member of a dictionary.
type member struct {
	key    string
	isList bool
	list   []component // if it is an inner list, of strings
	value  item        // if it is not
	params []param
}

// fieldReader reads the value of one field. The first fault stays.
type fieldReader struct {
	s     string
	pos   int
	fault string
}

// parseDictionary reads a dictionary in which no key occurs twice. The text of the error names the place.
func parseDictionary(s string) ([]member, error) {
	if len(s) > maxStructured {
		return nil, fmt.Errorf("longer than %d bytes", maxStructured)
	}
	r := &fieldReader{s: strings.Trim(s, " ")}
	var members []member
	for r.fault == "" {
		m := member{key: r.key()}
		for _, other := range members {
			if other.key == m.key {
				r.fail("a key occurs twice")
			}
		}
		switch {
		case r.fault != "":
		case len(members) == maxMembers:
			r.fail("too many members")
		case !r.eat('='): // true
			m.value = item{kind: '?', yes: true}
		case r.peek() == '(':
			m.isList, m.list = true, r.innerList()
		default:
			m.value = r.item()
		}
		m.params = r.params()
		members = append(members, m)
		r.space()
		if r.pos == len(r.s) {
			break
		}
		if !r.eat(',') {
			r.fail("a comma is missing here")
		}
		r.space()
	}
	if r.fault != "" {
		return nil, fmt.Errorf("at byte %d: %s", r.pos, r.fault)
	}
	return members, nil
}

func (r *fieldReader) fail(why string) {
	if r.fault == "" {
		r.fault = why
	}
}

// peek returns the next byte, or 0 at the end and after a fault.
func (r *fieldReader) peek() byte {
	if r.fault != "" || r.pos >= len(r.s) {
		return 0
	}
	return r.s[r.pos]
}

func (r *fieldReader) eat(c byte) bool {
	if c != 0 && r.peek() == c {
		r.pos++
		return true
	}
	return false
}

func (r *fieldReader) space() {
	for r.eat(' ') || r.eat('\t') {
	}
}

// while reads the bytes that are in the set.
func (r *fieldReader) while(in func(byte) bool) string {
	start := r.pos
	for r.peek() != 0 && in(r.s[r.pos]) {
		r.pos++
	}
	return r.s[start:r.pos]
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }
func isLower(c byte) bool { return 'a' <= c && c <= 'z' }
func isAlpha(c byte) bool { return isLower(c | 0x20) }

func (r *fieldReader) key() string {
	if c := r.peek(); !isLower(c) && c != '*' {
		r.fail("a key is missing here")
		return ""
	}
	return r.while(func(c byte) bool { return isLower(c) || isDigit(c) || strings.IndexByte("_-.*", c) >= 0 })
}

func (r *fieldReader) params() []param {
	var list []param
	for r.eat(';') {
		for r.eat(' ') {
		}
		p := param{key: r.key(), value: item{kind: '?', yes: true}}
		for _, other := range list {
			if other.key == p.key {
				r.fail("a parameter occurs twice")
			}
		}
		if r.eat('=') {
			p.value = r.item()
		}
		if list = append(list, p); len(list) > maxParams {
			r.fail("too many parameters")
		}
	}
	return list
}

func (r *fieldReader) innerList() []component {
	list := []component{}
	r.eat('(')
	for {
		spaced := false
		for r.eat(' ') {
			spaced = true
		}
		switch {
		case r.fault != "" || r.eat(')'):
			return list
		case len(list) > 0 && !spaced:
			r.fail("a space is missing here")
		case len(list) == maxItems:
			r.fail("too many components")
		case r.peek() != '"':
			r.fail("a component is missing here")
		default:
			name := r.item().text
			list = append(list, component{name, r.params()})
		}
	}
}

func (r *fieldReader) item() item {
	switch c := r.peek(); {
	case c == '"':
		return r.quoted()
	case c == ':':
		return r.bytes()
	case c == '?':
		r.pos++
		if r.eat('0') {
			return item{kind: '?'}
		}
		if !r.eat('1') {
			r.fail("not a boolean")
		}
		return item{kind: '?', yes: true}
	case c == '-' || isDigit(c):
		return r.integer()
	case c == '*' || isAlpha(c):
		return item{kind: 'a', text: r.while(func(c byte) bool {
			return isAlpha(c) || isDigit(c) || strings.IndexByte("!#$%&'*+-.^_`|~:/", c) >= 0
		})}
	}
	r.fail("a value is missing here, or is of a kind that signatures do not have")
	return item{}
}

// integer reads an integer in its only spelling. Decimals are not for signatures.
func (r *fieldReader) integer() item {
	start := r.pos
	r.eat('-')
	digits := r.while(isDigit)
	n, err := strconv.ParseInt(r.s[start:r.pos], 10, 64)
	if err != nil || len(digits) > 15 || strconv.FormatInt(n, 10) != r.s[start:r.pos] || r.peek() == '.' {
		r.fail("not an integer")
	}
	return item{kind: '0', n: n}
}

func (r *fieldReader) quoted() item {
	r.pos++
	var b strings.Builder
	for {
		switch c := r.peek(); {
		case c == '"':
			r.pos++
			return item{kind: '"', text: b.String()}
		case c == '\\':
			r.pos++
			if c = r.peek(); c != '"' && c != '\\' {
				r.fail("not an escape")
				return item{}
			}
			b.WriteByte(c)
			r.pos++
		case c < ' ' || c > '~':
			r.fail("a string does not end, or holds what is not printable ASCII")
			return item{}
		default:
			b.WriteByte(c)
			r.pos++
		}
	}
}

func (r *fieldReader) bytes() item {
	r.pos++
	text := r.while(func(c byte) bool { return c != ':' })
	if !r.eat(':') {
		r.fail("a byte sequence does not end")
	}
	data, err := base64.StdEncoding.Strict().DecodeString(text)
	if err != nil || base64.StdEncoding.EncodedLen(len(data)) != len(text) { // the decoder ignores line breaks
		r.fail("not base64 with padding")
	}
	return item{kind: ':', text: string(data)}
}

func (i item) append(b []byte) []byte {
	switch i.kind {
	case '"':
		b = append(b, '"')
		for _, c := range []byte(i.text) {
			if c == '"' || c == '\\' {
				b = append(b, '\\')
			}
			b = append(b, c)
		}
		return append(b, '"')
	case ':':
		return append(base64.StdEncoding.AppendEncode(append(b, ':'), []byte(i.text)), ':')
	case '0':
		return strconv.AppendInt(b, i.n, 10)
	case 'a':
		return append(b, i.text...)
	}
	return append(b, "?0"...) // true is written as nothing
}

func appendParams(b []byte, params []param) []byte {
	for _, p := range params {
		b = append(append(b, ';'), p.key...)
		if p.value.kind != '?' || !p.value.yes {
			b = p.value.append(append(b, '='))
		}
	}
	return b
}

// append writes the name of a component as it stands in a signature base and in an inner list.
func (c component) append(b []byte) []byte {
	return appendParams(item{kind: '"', text: c.name}.append(b), c.params)
}

// appendList writes an inner list with its parameters.
func appendList(b []byte, list []component, params []param) []byte {
	b = append(b, '(')
	for i, c := range list {
		if i > 0 {
			b = append(b, ' ')
		}
		b = c.append(b)
	}
	return appendParams(append(b, ')'), params)
}

func (m member) append(b []byte) []byte {
	b = append(b, m.key...)
	switch {
	case m.isList:
		return appendList(append(b, '='), m.list, m.params)
	case m.value.kind != '?' || !m.value.yes:
		b = m.value.append(append(b, '='))
	}
	return appendParams(b, m.params)
}

// A string that is not printable ASCII has no form in a structured field.
func printable(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}
