package workloadwire

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/svidkit/svidkit/internal/protofield"
)

// maxDepth is how deep the claims of a token may be nested, deeper than we read JSON.
const maxDepth = 100

var errTooDeep = fmt.Errorf("its claims are nested more than %d deep", maxDepth)

// ReadClaims reads the response of ValidateJWTSVID: an ID, and claims in the types of encoding/json, or nil without
// claims.
func ReadClaims(data []byte) (id string, claims map[string]any, err error) {
	err = read(data, 16, func(f *protofield.Field) {
		switch f.Number {
		case 1:
			f.Text(&id)
		case 2: // a second one adds to the first
			if claims == nil {
				claims = make(map[string]any)
			}
			readStruct(f, claims, 0)
		}
	})
	return id, claims, err
}

// readStruct reads a google.protobuf.Struct into m.
func readStruct(f *protofield.Field, m map[string]any, depth int) {
	f.Message(func(f *protofield.Field) {
		switch {
		case f.Number != 1 || f.Type != protowire.BytesType:
		case depth == maxDepth:
			f.Fail(errTooDeep)
		default:
			var v any
			m[f.Entry(func(f *protofield.Field) { readValue(f, &v, depth+1) })] = v
		}
	})
}

// readValue reads a google.protobuf.Value into to, which may have a value already: of several kinds the last counts,
// and two messages of the same kind become one. Without any kind it is nil.
func readValue(f *protofield.Field, to *any, depth int) {
	if depth > maxDepth {
		f.Fail(errTooDeep)
		return
	}
	f.Message(func(f *protofield.Field) {
		switch kind := f.Type; {
		case f.Number == 1 && kind == protowire.VarintType:
			*to = nil
		case f.Number == 2 && kind == protowire.Fixed64Type:
			*to = number(math.Float64frombits(f.Value))
		case f.Number == 3 && kind == protowire.BytesType:
			var s string
			f.Text(&s)
			*to = s
		case f.Number == 4 && kind == protowire.VarintType:
			*to = f.Value != 0
		case f.Number == 5 && kind == protowire.BytesType:
			m, ok := (*to).(map[string]any)
			if !ok {
				m = make(map[string]any)
			}
			readStruct(f, m, depth)
			*to = m
		case f.Number == 6 && kind == protowire.BytesType:
			list, ok := (*to).([]any)
			if !ok {
				list = []any{}
			}
			f.Message(func(f *protofield.Field) {
				if f.Number == 1 && f.Type == protowire.BytesType {
					var v any
					readValue(f, &v, depth+1)
					list = append(list, v)
				}
			})
			*to = list
		}
	})
}

// number returns f, or a string if JSON has no such number.
func number(f float64) any {
	switch {
	case math.IsNaN(f):
		return "NaN"
	case math.IsInf(f, 1):
		return "Infinity"
	case math.IsInf(f, -1):
		return "-Infinity"
	}
	return f
}

// WriteClaims returns the response of ValidateJWTSVID. A claim may be of any type that encoding/json encodes.
func WriteClaims(id string, claims map[string]any) ([]byte, error) {
	doc, err := json.Marshal(claims)
	var plain map[string]any // of the types that writeValue knows
	if err == nil {
		err = json.Unmarshal(doc, &plain)
	}
	if err != nil {
		return nil, fmt.Errorf("the message cannot be encoded: %w", err)
	}
	return protofield.Write(func(w *protofield.Writer) {
		w.Text(1, id)
		if plain != nil {
			w.Message(2, func(w *protofield.Writer) { writeStruct(w, plain, 0) })
		}
	})
}

// writeStruct writes a google.protobuf.Struct.
func writeStruct(w *protofield.Writer, m map[string]any, depth int) {
	if depth == maxDepth {
		w.Fail(errTooDeep)
		return
	}
	for _, key := range slices.Sorted(maps.Keys(m)) {
		w.Message(1, func(w *protofield.Writer) {
			w.AddText(1, key)
			w.Message(2, func(w *protofield.Writer) { writeValue(w, m[key], depth+1) })
		})
	}
}

// writeValue writes a google.protobuf.Value.
func writeValue(w *protofield.Writer, v any, depth int) {
	if depth > maxDepth {
		w.Fail(errTooDeep)
		return
	}
	switch v := v.(type) {
	case nil:
		w.AddVarint(1, 0)
	case float64:
		w.AddFixed64(2, math.Float64bits(v))
	case string:
		w.AddText(3, v)
	case bool:
		w.AddVarint(4, protowire.EncodeBool(v))
	case map[string]any:
		w.Message(5, func(w *protofield.Writer) { writeStruct(w, v, depth) })
	case []any:
		w.Message(6, func(w *protofield.Writer) {
			for _, element := range v {
				w.Message(1, func(w *protofield.Writer) { writeValue(w, element, depth+1) })
			}
		})
	}
}
