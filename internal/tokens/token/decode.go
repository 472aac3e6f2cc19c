package token

import (
	"bytes"
	"cmp"
	"encoding/json"
	"reflect"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/internal/strictjson"
)

// Decode decodes a payload, which was already parsed strictly, into the value that into points to. Names of claims
// are case-sensitive (RFC 7519 section 10.1.1), unlike in package encoding/json: Decode drops a claim whose name
// differs from a field's name only by case. A number in an interface is a [json.Number].
func Decode(payload []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(exact(payload, into)))
	d.UseNumber()
	return d.Decode(into)
}

// exact drops the members of an object whose names differ from a field of into only by case.
func exact(object []byte, into any) []byte {
	fields := fieldNames(into)
	if len(fields) == 0 {
		return object
	}
	out := append(make([]byte, 0, len(object)), '{')
	r := strictjson.NewReader(object)
	for member := range r.Members() {
		name := string(member)
		from := r.Offset()
		r.Skip()
		value := object[from:r.Offset()]
		if !slices.Contains(fields, name) &&
			slices.ContainsFunc(fields, func(f string) bool { return strings.EqualFold(f, name) }) {
			continue
		}
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(append(strictjson.AppendText(out, name), ':'), value...)
	}
	return append(out, '}')
}

// fieldNames returns the names under which encoding/json knows the fields of the struct that into points to. It may
// also return names of hidden fields. It returns no name that encoding/json never fills: a claim of that name would
// then fill a field whose name differs by case.
func fieldNames(into any) []string {
	if _, ok := into.(json.Unmarshaler); ok {
		return nil
	}
	t := reflect.TypeOf(into)
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t == nil || t.Kind() != reflect.Struct {
		return nil
	}
	return appendFields(nil, t, nil)
}

// appendFields appends the names in t, which is nested in the structs above.
func appendFields(names []string, t reflect.Type, above []reflect.Type) []string {
	if slices.Contains(above, t) {
		return names
	}
	above = append(above, t)
	for f := range t.Fields() {
		tag := f.Tag.Get("json")
		name, _, _ := strings.Cut(tag, ",")
		in := f.Type
		if in.Kind() == reflect.Pointer {
			in = in.Elem()
		}
		embedded := f.Anonymous && in.Kind() == reflect.Struct
		switch {
		case tag == "-", !f.IsExported() && !embedded:
		case embedded && name == "":
			names = appendFields(names, in, above)
		default:
			names = append(names, cmp.Or(name, f.Name))
		}
	}
	return names
}
