package workloadwire

import (
	"encoding"
	"encoding/base64"
	"errors"
	"reflect"
	"strconv"
	"strings"

	"github.com/svidkit/svidkit/internal/strictjson"
)

var (
	errNoJSON    = errors.New("JSON cannot hold it")
	errBadNumber = errors.New("the number is malformed, or too large")
)

// plain returns v as one of the types that claims have after encoding/json has decoded them, as if it had
// encoded them before. What is in a list, a map or a struct is left as it is. Package encoding/json itself
// would add 90 kB to every program with a client or a server of the Workload API.
func plain(v any) (any, error) {
	r := reflect.ValueOf(v)
	if r.Kind() == reflect.Pointer && r.IsNil() {
		return nil, nil
	}
	switch m := v.(type) {
	case interface{ Float64() (float64, error) }: // a json.Number
		f, err := m.Float64()
		if err != nil {
			return nil, errBadNumber
		}
		return f, nil
	case interface{ MarshalJSON() ([]byte, error) }:
		doc, err := m.MarshalJSON()
		if err != nil {
			return nil, err
		}
		return decode(doc)
	case encoding.TextMarshaler:
		text, err := m.MarshalText()
		return string(text), err
	}
	switch kind := r.Kind(); {
	case kind == reflect.Pointer:
		return r.Elem().Interface(), nil
	case kind == reflect.Bool:
		return r.Bool(), nil
	case kind == reflect.String:
		return r.String(), nil
	case r.CanInt():
		return float64(r.Int()), nil
	case r.CanUint():
		return float64(r.Uint()), nil
	case r.CanFloat():
		return r.Float(), nil
	case kind == reflect.Slice && r.IsNil(), kind == reflect.Map && r.IsNil():
		return nil, nil
	case kind == reflect.Slice && r.Type().Elem().Kind() == reflect.Uint8:
		return base64.StdEncoding.EncodeToString(r.Bytes()), nil
	case kind == reflect.Slice, kind == reflect.Array:
		list := make([]any, r.Len())
		for i := range list {
			list[i] = r.Index(i).Interface()
		}
		return list, nil
	case kind == reflect.Map && r.Type().Key().Kind() == reflect.String:
		m := make(map[string]any, r.Len())
		for entries := r.MapRange(); entries.Next(); {
			m[entries.Key().String()] = entries.Value().Interface()
		}
		return m, nil
	case kind == reflect.Struct:
		return fields(r)
	}
	return nil, errNoJSON
}

// fields returns the exported fields of a struct by their names in JSON.
func fields(r reflect.Value) (map[string]any, error) {
	m := make(map[string]any)
	for i := range r.NumField() {
		f := r.Type().Field(i)
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case f.Anonymous || options != "":
			return nil, errNoJSON
		case !f.IsExported() || name == "-":
			continue
		case name == "":
			name = f.Name
		}
		m[name] = r.Field(i).Interface()
	}
	return m, nil
}

// decode decodes a JSON document.
func decode(doc []byte) (any, error) {
	var failure error
	r := strictjson.NewReader(doc)
	var value func() any
	value = func() any {
		switch r.Kind() {
		case strictjson.Object:
			m := make(map[string]any)
			for name := range r.Members() {
				name := string(name)
				m[name] = value()
			}
			return m
		case strictjson.Array:
			list := []any{}
			for range r.Elements() {
				list = append(list, value())
			}
			return list
		case strictjson.String:
			text, _ := r.Text()
			return string(text)
		case strictjson.Number:
			text, _ := r.Number()
			f, err := strconv.ParseFloat(string(text), 64)
			if err != nil {
				failure = errBadNumber
			}
			return f
		case strictjson.Bool:
			is := doc[r.Offset()] == 't'
			r.Skip()
			return is
		}
		r.Skip()
		return nil
	}
	v := value()
	if err := r.End(); err != nil {
		return nil, err
	}
	return v, failure
}
