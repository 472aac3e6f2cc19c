package internal_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/internal/test/must"
)

// tree reads a value as encoding/json would with UseNumber.
func tree(r *strictjson.Reader) any {
	switch r.Kind() {
	case strictjson.Object:
		m := map[string]any{}
		for name := range r.Members() {
			name := string(name)
			m[name] = tree(r)
		}
		return m
	case strictjson.Array:
		a := []any{}
		for range r.Elements() {
			a = append(a, tree(r))
		}
		return a
	case strictjson.String:
		s, _ := r.Text()
		return string(s)
	case strictjson.Number:
		n, _ := r.Number()
		return json.Number(n)
	case strictjson.Bool:
		at := r.Offset()
		r.Skip()
		return at
	}
	r.Skip()
	return nil
}

func readJSON(doc string) (any, error) {
	r := strictjson.NewReader([]byte(doc))
	v := tree(r)
	return v, r.End()
}

func TestStrictJSONValues(t *testing.T) {
	t.Parallel()
	for doc, want := range map[string]any{
		`null`:                             nil,
		`""`:                               "",
		` "a b" `:                          "a b",
		`"é€🔑"`:                            "é€🔑",
		`"\"\\\/\b\f\n\r\t"`:               "\"\\/\b\f\n\r\t",
		`"\u00e9\u20AC\ud83d\udD11\u0000"`: "é€🔑\x00",
		`"before \u0041 after, and \\ on"`: `before A after, and \ on`,
		`"\uFFFD\n\\ufffd"`:                "\ufffd\n\\ufffd",
		"\"\x7f\"":                         "\x7f",
		`0`:                                json.Number("0"),
		`-0`:                               json.Number("-0"),
		`123456789012345678901234567890`:   json.Number("123456789012345678901234567890"),
		`-1.50e+10`:                        json.Number("-1.50e+10"),
		`1E-7`:                             json.Number("1E-7"),
		`[]`:                               []any{},
		"[\r\n\t ]":                        []any{},
		`[1,"a",[null],{}]`:                []any{json.Number("1"), "a", []any{nil}, map[string]any{}},
		`{}`:                               map[string]any{},
		`{"a":1,"A":2,"":3}`:               map[string]any{"a": json.Number("1"), "A": json.Number("2"), "": json.Number("3")},
		`{"\u0061\n":{"b":[]}}`:            map[string]any{"a\n": map[string]any{"b": []any{}}},
		`[true, false]`:                    []any{1, 7}, // where they are
	} {
		got, err := readJSON(doc)
		require.NoError(t, err, doc)
		assert.Equal(t, want, got, doc)
	}
}

func TestStrictJSONErrors(t *testing.T) {
	t.Parallel()
	names := func(n int, last string) string {
		var s strings.Builder
		for i := range n {
			s.WriteString(`"` + strings.Repeat("a", i) + `":1,`)
		}
		return "{" + s.String() + last + ":1}"
	}
	for _, c := range []struct {
		doc    string
		code   strictjson.Code
		offset int
	}{
		{``, strictjson.Syntax, 0},
		{` `, strictjson.Syntax, 1},
		{`nul`, strictjson.Syntax, 0},
		{`tru`, strictjson.Syntax, 0},
		{`fals`, strictjson.Syntax, 0},
		{`True`, strictjson.Syntax, 0},
		{`NaN`, strictjson.Syntax, 0},
		{`'a'`, strictjson.Syntax, 0},
		{`/**/1`, strictjson.Syntax, 0},
		{"\ufeff1", strictjson.Syntax, 0},
		{"\x001", strictjson.Syntax, 0},
		{`-`, strictjson.Syntax, 0},
		{`+1`, strictjson.Syntax, 0},
		{`.5`, strictjson.Syntax, 0},
		{`1.`, strictjson.Syntax, 0},
		{`1.e5`, strictjson.Syntax, 0},
		{`1e`, strictjson.Syntax, 0},
		{`1e+`, strictjson.Syntax, 0},
		{`-a`, strictjson.Syntax, 0},
		{`"`, strictjson.Syntax, 0},
		{`"abc`, strictjson.Syntax, 0},
		{`"abcdefghijk`, strictjson.Syntax, 0},
		{"\"a\nb\"", strictjson.Syntax, 0},
		{"\"abcdefgh\x1f\"", strictjson.Syntax, 0},
		{"\"abc\x1fdefghijkl\"", strictjson.Syntax, 0},
		{"\"abc\x00defghijkl\"", strictjson.Syntax, 0},
		{`{"\x":1}`, strictjson.Syntax, 1},
		{`"\a"`, strictjson.Syntax, 0},
		{`"\`, strictjson.Syntax, 0},
		{`"ab\u12"`, strictjson.Syntax, 0},
		{`"ab\u12g4"`, strictjson.Syntax, 0},
		{`"\u12@4"`, strictjson.Syntax, 0},
		{`[`, strictjson.Syntax, 1},
		{`[1`, strictjson.Syntax, 2},
		{`[1,`, strictjson.Syntax, 3},
		{`[1,]`, strictjson.Syntax, 3},
		{`[,1]`, strictjson.Syntax, 1},
		{`[1 2]`, strictjson.Syntax, 3},
		{`[1}`, strictjson.Syntax, 2},
		{`{`, strictjson.Syntax, 1},
		{`{]`, strictjson.Syntax, 1},
		{`{1:2}`, strictjson.Syntax, 1},
		{`{"a" 1}`, strictjson.Syntax, 5},
		{`{"a":}`, strictjson.Syntax, 5},
		{`{"a":1`, strictjson.Syntax, 6},
		{`{"a":1,}`, strictjson.Syntax, 7},
		{`{"a":1;"b":2}`, strictjson.Syntax, 5},
		{`{"a":1 "b":2}`, strictjson.Syntax, 7},
		{`01`, strictjson.Syntax, 0},
		{`0x1`, strictjson.Syntax, 0},
		{"1\v", strictjson.Syntax, 0},
		{"[1\f]", strictjson.Syntax, 1},
		{"[\u00a01]", strictjson.Syntax, 1},
		{`{"a"}`, strictjson.Syntax, 4},
		{`{"a",1}`, strictjson.Syntax, 4},
		{`{"a"::1}`, strictjson.Syntax, 5},
		{`[:1]`, strictjson.Syntax, 1},
		{`[1:2]`, strictjson.Syntax, 1},
		{`[1,,2]`, strictjson.Syntax, 3},
		{`[1"a"]`, strictjson.Syntax, 1},
		{`["a"1]`, strictjson.Syntax, 4},
		{`["a" "b"]`, strictjson.Syntax, 5},
		{`[[][]]`, strictjson.Syntax, 3},
		{`[{}{}]`, strictjson.Syntax, 3},
		{`{"a":1,,"b":2}`, strictjson.Syntax, 7},
		{`{,"a":1}`, strictjson.Syntax, 1},
		{`{"a":1]`, strictjson.Syntax, 6},
		{`]`, strictjson.Syntax, 0},
		{`:1`, strictjson.Syntax, 0},
		{`,1`, strictjson.Syntax, 0},
		{`1,`, strictjson.Trailing, 1},
		{`[1],`, strictjson.Trailing, 3},
		{`[1]]`, strictjson.Trailing, 3},
		{`{}:1`, strictjson.Trailing, 2},
		{`1 2`, strictjson.Trailing, 2},
		{`{} x`, strictjson.Trailing, 3},
		{"null\x00", strictjson.Syntax, 0},
		{`truer`, strictjson.Syntax, 0},
		{"\"a\xff\"", strictjson.Encoding, 2},
		{"\"\xc0\xaf\"", strictjson.Encoding, 1},
		{"\"\xed\xa0\x80\"", strictjson.Encoding, 1},
		{"\"ok: \ufffd, not: \xe2\x82\"", strictjson.Encoding, 15},
		{`"\ud800"`, strictjson.Encoding, 0},
		{`"a\ud800b"`, strictjson.Encoding, 0},
		{`"\udc00\ud800"`, strictjson.Encoding, 0},
		{`"\ud800\n"`, strictjson.Encoding, 0},
		{`"\ufffd \ud800"`, strictjson.Encoding, 0},
		{`"\ud800\u0041"`, strictjson.Encoding, 0},
		{`"\ud800\\udc00"`, strictjson.Encoding, 0},
		{`"\ud800 \udc00"`, strictjson.Encoding, 0},
		{`"\udc00"`, strictjson.Encoding, 0},
		{`"\ud800\ud800"`, strictjson.Encoding, 0},
		{`"\/\udbff"`, strictjson.Encoding, 0},
		{`{"\ud800":1}`, strictjson.Encoding, 1},
		{`{"a":1,"a":1}`, strictjson.Duplicate, 7},
		{`{"a":1,"b":2,"\u0061":3}`, strictjson.Duplicate, 13},
		{`[{"x":{"é":1,"é":1}}]`, strictjson.Duplicate, 14},
		{names(16, `"aaa"`), strictjson.Duplicate, 16*15/2 + 16*5 + 1},
		{names(50, `"\u0061aa"`), strictjson.Duplicate, 50*49/2 + 50*5 + 1},
		{names(1100, `"aaa"`), strictjson.Duplicate, 1100*1099/2 + 1100*5 + 1},
		{strings.Repeat("[", 65) + strings.Repeat("]", 65), strictjson.TooLarge, 64},
		{strings.Repeat(`{"a":`, 65) + "1" + strings.Repeat("}", 65), strictjson.TooLarge, 64 * 5},
		{strings.Repeat(" ", strictjson.MaxSize) + "1", strictjson.TooLarge, strictjson.MaxSize},
	} {
		_, err := readJSON(c.doc)
		name := c.doc[:min(len(c.doc), 40)]
		e := must.As[*strictjson.Error](err)(t, name)
		assert.Equal(t, c.code, e.Code, "%q: %v", name, err)
		assert.Equal(t, c.offset, e.Offset, "%q: %v", name, err)
		assert.NotEmpty(t, e.Reason)
	}
	_, err := readJSON(`{"a":1,"a":1}`)
	require.EqualError(t, err, "at byte 7: a member occurs twice in one object")
	_, err = readJSON(`[1}`)
	require.EqualError(t, err, "at byte 2: not JSON: a comma or the end is missing here")
}

// Many members in one object are told apart, and the deepest allowed document is read.
func TestStrictJSONLimitsAreReached(t *testing.T) {
	t.Parallel()
	var wide strings.Builder
	for i := range 3000 {
		wide.WriteString(`,"` + strings.Repeat("x", i%50) + string(rune('a'+i%26)) + strings.Repeat("y", i/50) + `":{"a":[],"b":1}`)
	}
	got := must.Get(readJSON("{" + wide.String()[1:] + "}"))(t)
	assert.Len(t, got, 3000)
	must.Get(readJSON(strings.Repeat("[", 64) + strings.Repeat("]", 64)))(t)
}

// A reader asks for the kind it wants; anything else stays, and loops skip it.
func TestStrictJSONOtherKindsAreLeft(t *testing.T) {
	t.Parallel()
	const doc = `{"a":"text","b":[1,{"c":"d"}],"e":{"f":null},"g":-1,"h":true}`
	r := strictjson.NewReader([]byte(doc))
	var seen []string
	for name := range r.Members() {
		seen = append(seen, string(name))
		if r.Kind() != strictjson.String {
			_, ok := r.Text()
			assert.False(t, ok)
		}
		if r.Kind() != strictjson.Number {
			_, ok := r.Number()
			assert.False(t, ok)
		}
		if r.Kind() != strictjson.Array {
			for range r.Elements() {
				t.Error("not an array")
			}
		}
		if r.Kind() != strictjson.Object {
			for range r.Members() {
				t.Error("not an object")
			}
		}
		assert.Equal(t, strings.Index(doc, string(name)+`":`)+3, r.Offset())
	}
	require.NoError(t, r.End())
	assert.Equal(t, []string{"a", "b", "e", "g", "h"}, seen)
}

// What is left early has not been checked, so it must not pass for good.
func TestStrictJSONLoopsLeftEarly(t *testing.T) {
	t.Parallel()
	r := strictjson.NewReader([]byte(`{"a":[1,2],"b":1}`))
	for range r.Members() {
		break
	}
	require.Error(t, r.End())
	assert.Equal(t, strictjson.None, r.Kind())

	r = strictjson.NewReader([]byte(`[1,2]`))
	for range r.Elements() {
		r.Skip()
		break
	}
	require.Error(t, r.End())

	require.Error(t, strictjson.NewReader([]byte(`1`)).End(), "nothing was read")
}

func TestStrictJSONErrorStays(t *testing.T) {
	t.Parallel()
	r := strictjson.NewReader([]byte(`[1,{"a":1,"a":2},"a",{"b":2}]`))
	n := 0
	for range r.Elements() {
		n++
	}
	assert.Equal(t, 2, n)
	_, ok := r.Text()
	assert.False(t, ok)
	r.Skip()
	for range r.Members() {
		t.Error("read on")
	}
	e := must.As[*strictjson.Error](r.End())(t)
	assert.Equal(t, 10, e.Offset)
}

// Unescaping happens in a copy.
func TestStrictJSONInputIsNotChanged(t *testing.T) {
	t.Parallel()
	doc := []byte(`{"\u0061":"\u00e9\n","b":"plain"}`)
	before := bytes.Clone(doc)
	r := strictjson.NewReader(doc)
	r.Skip()
	require.NoError(t, r.End())
	assert.Equal(t, before, doc)
}

// strict is what the package adds to JSON, said with the tokens of encoding/json: slow and obvious.
func strict(doc []byte) bool {
	if !json.Valid(doc) || !utf8.Valid(doc) || halfPair(doc) {
		return false
	}
	d := json.NewDecoder(bytes.NewReader(doc))
	d.UseNumber()
	var open []map[string]bool // the names of each object, nil for an array
	name := false              // a name comes next
	for {
		tok, err := d.Token()
		if errors.Is(err, io.EOF) {
			return true
		}
		if err != nil {
			return false
		}
		switch tok {
		case json.Delim('{'):
			open, name = append(open, map[string]bool{}), true
		case json.Delim('['):
			open, name = append(open, nil), false
		case json.Delim('}'), json.Delim(']'):
			open = open[:len(open)-1]
			name = len(open) > 0 && open[len(open)-1] != nil
		default:
			if !name {
				name = len(open) > 0 && open[len(open)-1] != nil
				continue
			}
			seen := open[len(open)-1]
			if seen[tok.(string)] {
				return false
			}
			seen[tok.(string)], name = true, false
		}
		if len(open) > strictjson.MaxDepth {
			return false
		}
	}
}

// halfPair finds escapes that encoding/json replaces, in a valid document.
func halfPair(doc []byte) bool {
	doc = bytes.ReplaceAll(doc, []byte(`\\`), []byte("xx"))
	surrogate := func(s []byte, low bool) bool {
		if len(s) < 6 || s[0] != '\\' || s[1] != 'u' || s[2]|0x20 != 'd' {
			return false
		}
		c := s[3] | 0x20
		if low {
			return c >= 'c' && c <= 'f'
		}
		return c == '8'|0x20 || c == '9'|0x20 || c == 'a' || c == 'b'
	}
	for i := 0; i < len(doc); i++ {
		switch {
		case surrogate(doc[i:], false) && surrogate(doc[i+6:], true):
			i += 11
		case surrogate(doc[i:], false), surrogate(doc[i:], true):
			return true
		}
	}
	return false
}

func FuzzStrictJSON(f *testing.F) {
	for _, doc := range []string{
		`{"keys":[{"use":"jwt-svid","kid":"a","x5c":["AA\/="]}],"n":-1.5e+3}`,
		`{"a":1,"\u0061":2}`, `[true,false,null,"\ud83d\udd11"]`, `"\ud800"`, `"\\ud800"`, `"\ud83d\\\udd11"`, "\"\xff\"", `{} {}`, `[[[]]]`, `01`,
		`{"a":{"a":{"a":1,"b":2}},"b":[{"a":1},{"a":1}]}`,
		`{"a":0,"b":0,"c":0,"d":0,"e":0,"f":0,"g":0,"h":0,"i":0,"j":0,"k":0,"l":0,"m":0,"n":0,"o":0,"p":0,"q":0,"r":0,"a":0}`,
	} {
		f.Add([]byte(doc))
	}
	f.Fuzz(func(t *testing.T, doc []byte) {
		before := bytes.Clone(doc)
		got, err := readJSON(string(doc))
		if (err == nil) != strict(doc) {
			t.Fatalf("%q: %v; the reference disagrees", doc, err)
		}
		r := strictjson.NewReader(doc)
		r.Skip()
		if skip := r.End(); (skip == nil) != (err == nil) {
			t.Fatalf("%q: read: %v, skipped: %v", doc, err, skip)
		}
		if !bytes.Equal(before, doc) {
			t.Fatalf("%q was changed to %q", before, doc)
		}
		if err != nil {
			if e, ok := errors.AsType[*strictjson.Error](err); !ok || e.Offset < 0 || e.Offset > len(doc) {
				t.Fatalf("%q: %v", doc, err)
			}
			return
		}
		d := json.NewDecoder(bytes.NewReader(doc))
		d.UseNumber()
		var want any
		if err := d.Decode(&want); err != nil {
			t.Fatal(err)
		}
		if !sameJSON(want, got) {
			t.Fatalf("%q: %#v, want %#v", doc, got, want)
		}
	})
}

// sameJSON compares a tree of encoding/json with one of ours, in which a bool is its offset.
func sameJSON(want, got any) bool {
	switch w := want.(type) {
	case bool:
		_, ok := got.(int)
		return ok
	case []any:
		g, ok := got.([]any)
		if !ok || len(g) != len(w) {
			return false
		}
		for i := range w {
			if !sameJSON(w[i], g[i]) {
				return false
			}
		}
		return true
	case map[string]any:
		g, ok := got.(map[string]any)
		if !ok || len(g) != len(w) {
			return false
		}
		for name := range w {
			v, ok := g[name]
			if !ok || !sameJSON(w[name], v) {
				return false
			}
		}
		return true
	}
	return want == got
}

func TestStrictJSONReadObject(t *testing.T) {
	t.Parallel()
	var names []string
	require.NoError(t, strictjson.ReadObject([]byte(`{"a": [1], "b": 2}`), func(name string, _ *strictjson.Reader) { names = append(names, name) }))
	assert.Equal(t, []string{"a", "b"}, names)
	wide, deep := []byte("{"), strings.Repeat("[", 20_000)+strings.Repeat("]", 20_000)
	for i := range strictjson.MaxMembers + 1 {
		wide = fmt.Appendf(wide, `"%d":1,`, i)
	}
	for doc, code := range map[string]strictjson.Code{
		`[1]`: strictjson.Syntax, `1`: strictjson.Syntax, ``: strictjson.Syntax, `{"a":1,"a":2}`: strictjson.Duplicate,
		`{"a":[{"b":1,"b":2},3]}`: strictjson.Duplicate, string(wide) + `"x":1}`: strictjson.TooLarge, `{"a":` + deep + `}`: strictjson.TooLarge,
	} {
		err := strictjson.ReadObject([]byte(doc), func(string, *strictjson.Reader) {})
		assert.Equal(t, code, must.As[*strictjson.Error](err)(t).Code, "%.40q", doc)
	}
}
