package workloadapi

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// The messages of the Workload API, by hand: there are few, and generated ones bring reflection along,
// which is larger than the rest of a small program. Fields have the order and the names of the
// standard. Tests compare every message with the generated one, in both directions.

type x509SVIDResponse struct {
	svids            []x509SVID
	crl              [][]byte
	federatedBundles map[string][]byte
}

type x509SVID struct {
	spiffeID                      string
	x509SVID, x509SVIDKey, bundle []byte
	hint                          string
}

type x509BundlesResponse struct {
	crl     [][]byte
	bundles map[string][]byte
}

type jwtSVIDRequest struct {
	audience []string
	spiffeID string
}

type jwtSVIDResponse struct{ svids []jwtSVID }

type jwtSVID struct{ spiffeID, svid, hint string }

type jwtBundlesResponse struct{ bundles map[string][]byte }

type validateJWTSVIDRequest struct{ audience, svid string }

// validateJWTSVIDResponse has claims as encoding/json has them.
type validateJWTSVIDResponse struct {
	spiffeID string
	claims   map[string]any
}

type witSVIDRequest struct{ spiffeID string }

type witSVIDResponse struct{ svids []witSVID }

type witSVID struct{ spiffeID, witSVID, witSVIDKey, hint string }

type witBundlesResponse struct{ bundles map[string]string }

// message is a message that can be encoded and decoded.
type message interface {
	put(e *encoder)

	// take takes over one field that is length-delimited, as all of ours are. What it does not know it
	// ignores. It keeps nothing of v.
	take(n protowire.Number, v []byte) error
}

func (m *x509SVIDResponse) put(e *encoder) {
	for i := range m.svids {
		e.message(1, m.svids[i].put)
	}
	for _, v := range m.crl {
		e.element(2, v)
	}
	for _, k := range sortedKeys(m.federatedBundles) {
		e.entry(3, k, m.federatedBundles[k])
	}
}

func (m *x509SVIDResponse) take(n protowire.Number, v []byte) error {
	switch n {
	case 1:
		m.svids = append(m.svids, x509SVID{})
		return fields(v, m.svids[len(m.svids)-1].take)
	case 2:
		m.crl = append(m.crl, bytes.Clone(v))
	case 3:
		return takeEntry(&m.federatedBundles, v)
	}
	return nil
}

func (m *x509SVID) put(e *encoder) {
	e.text(1, m.spiffeID)
	e.bytes(2, m.x509SVID)
	e.bytes(3, m.x509SVIDKey)
	e.bytes(4, m.bundle)
	e.text(5, m.hint)
}

func (m *x509SVID) take(n protowire.Number, v []byte) error {
	switch n {
	case 1:
		return takeText(&m.spiffeID, v)
	case 2:
		m.x509SVID = bytes.Clone(v)
	case 3:
		m.x509SVIDKey = bytes.Clone(v)
	case 4:
		m.bundle = bytes.Clone(v)
	case 5:
		return takeText(&m.hint, v)
	}
	return nil
}

func (m *x509BundlesResponse) put(e *encoder) {
	for _, v := range m.crl {
		e.element(1, v)
	}
	for _, k := range sortedKeys(m.bundles) {
		e.entry(2, k, m.bundles[k])
	}
}

func (m *x509BundlesResponse) take(n protowire.Number, v []byte) error {
	switch n {
	case 1:
		m.crl = append(m.crl, bytes.Clone(v))
	case 2:
		return takeEntry(&m.bundles, v)
	}
	return nil
}

func (m *jwtSVIDRequest) put(e *encoder) {
	for _, v := range m.audience {
		e.textElement(1, v)
	}
	e.text(2, m.spiffeID)
}

func (m *jwtSVIDRequest) take(n protowire.Number, v []byte) error {
	switch n {
	case 1:
		m.audience = append(m.audience, "")
		return takeText(&m.audience[len(m.audience)-1], v)
	case 2:
		return takeText(&m.spiffeID, v)
	}
	return nil
}

func (m *jwtSVIDResponse) put(e *encoder) {
	for i := range m.svids {
		e.message(1, m.svids[i].put)
	}
}

func (m *jwtSVIDResponse) take(n protowire.Number, v []byte) error {
	if n != 1 {
		return nil
	}
	m.svids = append(m.svids, jwtSVID{})
	return fields(v, m.svids[len(m.svids)-1].take)
}

func (m *jwtSVID) put(e *encoder) {
	e.text(1, m.spiffeID)
	e.text(2, m.svid)
	e.text(3, m.hint)
}

func (m *jwtSVID) take(n protowire.Number, v []byte) error {
	switch n {
	case 1:
		return takeText(&m.spiffeID, v)
	case 2:
		return takeText(&m.svid, v)
	case 3:
		return takeText(&m.hint, v)
	}
	return nil
}

func (m *jwtBundlesResponse) put(e *encoder) {
	for _, k := range sortedKeys(m.bundles) {
		e.entry(1, k, m.bundles[k])
	}
}

func (m *jwtBundlesResponse) take(n protowire.Number, v []byte) error {
	if n != 1 {
		return nil
	}
	return takeEntry(&m.bundles, v)
}

func (m *validateJWTSVIDRequest) put(e *encoder) {
	e.text(1, m.audience)
	e.text(2, m.svid)
}

func (m *validateJWTSVIDRequest) take(n protowire.Number, v []byte) error {
	switch n {
	case 1:
		return takeText(&m.audience, v)
	case 2:
		return takeText(&m.svid, v)
	}
	return nil
}

func (m *validateJWTSVIDResponse) put(e *encoder) {
	e.text(1, m.spiffeID)
	if m.claims != nil {
		e.message(2, func(e *encoder) { e.structure(m.claims, 0) })
	}
}

func (m *validateJWTSVIDResponse) take(n protowire.Number, v []byte) error {
	switch n {
	case 1:
		return takeText(&m.spiffeID, v)
	case 2: // once more is more of the same
		if m.claims == nil {
			m.claims = make(map[string]any)
		}
		return takeStruct(m.claims, v, 0)
	}
	return nil
}

func (m *witSVIDRequest) put(e *encoder) { e.text(1, m.spiffeID) }

func (m *witSVIDRequest) take(n protowire.Number, v []byte) error {
	if n != 1 {
		return nil
	}
	return takeText(&m.spiffeID, v)
}

func (m *witSVIDResponse) put(e *encoder) {
	for i := range m.svids {
		e.message(1, m.svids[i].put)
	}
}

func (m *witSVIDResponse) take(n protowire.Number, v []byte) error {
	if n != 1 {
		return nil
	}
	m.svids = append(m.svids, witSVID{})
	return fields(v, m.svids[len(m.svids)-1].take)
}

func (m *witSVID) put(e *encoder) {
	e.text(1, m.spiffeID)
	e.text(2, m.witSVID)
	e.text(3, m.witSVIDKey)
	e.text(4, m.hint)
}

func (m *witSVID) take(n protowire.Number, v []byte) error {
	switch n {
	case 1:
		return takeText(&m.spiffeID, v)
	case 2:
		return takeText(&m.witSVID, v)
	case 3:
		return takeText(&m.witSVIDKey, v)
	case 4:
		return takeText(&m.hint, v)
	}
	return nil
}

func (m *witBundlesResponse) put(e *encoder) {
	for _, k := range sortedKeys(m.bundles) {
		e.message(1, func(e *encoder) {
			e.textElement(1, k)
			e.textElement(2, m.bundles[k])
		})
	}
}

func (m *witBundlesResponse) take(n protowire.Number, v []byte) error {
	if n != 1 {
		return nil
	}
	var key, value string
	if err := fields(v, func(n protowire.Number, v []byte) error {
		switch n {
		case 1:
			return takeText(&key, v)
		case 2:
			return takeText(&value, v)
		}
		return nil
	}); err != nil {
		return err
	}
	if m.bundles == nil {
		m.bundles = make(map[string]string)
	}
	m.bundles[key] = value
	return nil
}

var errMalformed = errors.New("it is not the message that it should be")

// fields calls take for the length-delimited fields of a message, in order, and checks the form of the
// others. A field that has another type than it should is an unknown one.
func fields(data []byte, take func(n protowire.Number, v []byte) error) error {
	for len(data) > 0 {
		n, kind, size := protowire.ConsumeTag(data)
		if size < 0 || n > protowire.MaxValidNumber {
			return errMalformed
		}
		data = data[size:]
		if kind == protowire.BytesType {
			v, size := protowire.ConsumeBytes(data)
			if size < 0 {
				return errMalformed
			}
			if err := take(n, v); err != nil {
				return err
			}
			data = data[size:]
			continue
		}
		if size = protowire.ConsumeFieldValue(n, kind, data); size < 0 {
			return errMalformed
		}
		data = data[size:]
	}
	return nil
}

// takeText takes a string, which is UTF-8.
func takeText(to *string, v []byte) error {
	if !utf8.Valid(v) {
		return errMalformed
	}
	*to = string(v)
	return nil
}

// takeEntry takes an entry of a map. Of two with the same key the last counts.
func takeEntry(to *map[string][]byte, v []byte) error {
	var key string
	value := []byte{}
	if err := fields(v, func(n protowire.Number, v []byte) error {
		switch n {
		case 1:
			return takeText(&key, v)
		case 2:
			value = v
		}
		return nil
	}); err != nil {
		return err
	}
	if *to == nil {
		*to = make(map[string][]byte)
	}
	(*to)[key] = bytes.Clone(value)
	return nil
}

// maxClaimDepth is how deep the claims of a token may be nested, deeper than we read JSON.
const maxClaimDepth = 100

var errTooDeep = fmt.Errorf("its claims are nested more than %d deep", maxClaimDepth)

// takeStruct takes what a google.protobuf.Struct has into m.
func takeStruct(m map[string]any, data []byte, depth int) error {
	if depth == maxClaimDepth {
		return errTooDeep
	}
	return fields(data, func(n protowire.Number, v []byte) error {
		if n != 1 {
			return nil
		}
		var key string
		var value any
		err := fields(v, func(n protowire.Number, v []byte) (err error) {
			switch n {
			case 1:
				err = takeText(&key, v)
			case 2:
				value, err = takeValue(value, v, depth+1)
			}
			return err
		})
		if err != nil {
			return err
		}
		m[key] = value
		return nil
	})
}

// takeValue takes a google.protobuf.Value on top of what there is already: of several kinds the last
// counts, and two messages of the same kind become one, as Protocol Buffers want it. No kind at all is
// nil.
func takeValue(have any, data []byte, depth int) (any, error) {
	if depth > maxClaimDepth {
		return nil, errTooDeep
	}
	for len(data) > 0 {
		n, kind, size := protowire.ConsumeTag(data)
		if size < 0 || n > protowire.MaxValidNumber {
			return nil, errMalformed
		}
		data = data[size:]
		if size = protowire.ConsumeFieldValue(n, kind, data); size < 0 {
			return nil, errMalformed
		}
		field := data[:size]
		data = data[size:]
		var v []byte
		if kind == protowire.BytesType {
			v, _ = protowire.ConsumeBytes(field)
		}
		var err error
		switch {
		case n == 1 && kind == protowire.VarintType:
			have = nil
		case n == 2 && kind == protowire.Fixed64Type:
			bits, _ := protowire.ConsumeFixed64(field)
			have = number(math.Float64frombits(bits))
		case n == 3 && kind == protowire.BytesType:
			var s string
			err = takeText(&s, v)
			have = s
		case n == 4 && kind == protowire.VarintType:
			bits, _ := protowire.ConsumeVarint(field)
			have = bits != 0
		case n == 5 && kind == protowire.BytesType:
			m, ok := have.(map[string]any)
			if !ok {
				m = make(map[string]any)
			}
			err = takeStruct(m, v, depth)
			have = m
		case n == 6 && kind == protowire.BytesType:
			list, ok := have.([]any)
			if !ok {
				list = []any{}
			}
			err = fields(v, func(n protowire.Number, v []byte) error {
				if n != 1 {
					return nil
				}
				element, err := takeValue(nil, v, depth+1)
				list = append(list, element)
				return err
			})
			have = list
		}
		if err != nil {
			return nil, err
		}
	}
	return have, nil
}

// number returns a number as JSON can have it.
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

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// encoder encodes a message so that equal ones have equal bytes: fields and keys in order, and fields
// that have their default left out. It goes over the message twice: to count, and then to write into
// memory of that size.
type encoder struct {
	counting bool
	n        int // bytes, when counting
	b        []byte
	err      error // the first
}

var errNotUTF8 = errors.New("the message cannot be encoded: a text is not UTF-8")

func (e *encoder) fail(err error) {
	if e.err == nil {
		e.err = err
	}
}

func (e *encoder) check(s string) {
	if e.counting && !utf8.ValidString(s) {
		e.fail(errNotUTF8)
	}
}

func (e *encoder) text(n protowire.Number, s string) {
	if s != "" {
		e.textElement(n, s)
	}
}

func (e *encoder) bytes(n protowire.Number, v []byte) {
	if len(v) > 0 {
		e.element(n, v)
	}
}

// element is bytes for an element of a list, which may be empty.
func (e *encoder) element(n protowire.Number, v []byte) {
	if e.length(n, len(v)) {
		e.b = append(e.b, v...)
	}
}

// textElement is text for an element of a list.
func (e *encoder) textElement(n protowire.Number, s string) {
	e.check(s)
	if e.length(n, len(s)) {
		e.b = append(e.b, s...)
	}
}

// length appends what is in front of size bytes, and reports whether they are to follow: if not, they are
// counted.
func (e *encoder) length(n protowire.Number, size int) bool {
	if e.counting {
		e.n += protowire.SizeTag(n) + protowire.SizeBytes(size)
		return false
	}
	e.b = protowire.AppendVarint(protowire.AppendTag(e.b, n, protowire.BytesType), uint64(size))
	return true
}

// message appends what put does as a field. How long that is shows when it is there, so it is moved back.
func (e *encoder) message(n protowire.Number, put func(*encoder)) {
	if e.counting {
		before := e.n
		put(e)
		e.n += protowire.SizeTag(n) + protowire.SizeVarint(uint64(e.n-before))
		return
	}
	from := len(e.b)
	put(e)
	to := len(e.b)
	e.length(n, to-from)
	var room [16]byte
	head := append(room[:0], e.b[to:]...)
	copy(e.b[from+len(head):], e.b[from:to])
	copy(e.b[from:], head)
}

// entry appends an entry of a map.
func (e *encoder) entry(n protowire.Number, key string, value []byte) {
	e.message(n, func(e *encoder) {
		e.textElement(1, key)
		e.element(2, value)
	})
}

// varint appends a field with a number.
func (e *encoder) varint(n protowire.Number, v uint64) {
	if e.counting {
		e.n += protowire.SizeTag(n) + protowire.SizeVarint(v)
		return
	}
	e.b = protowire.AppendVarint(protowire.AppendTag(e.b, n, protowire.VarintType), v)
}

// structure appends a google.protobuf.Struct.
func (e *encoder) structure(m map[string]any, depth int) {
	if depth == maxClaimDepth {
		e.fail(errTooDeep)
		return
	}
	for _, key := range sortedKeys(m) {
		e.message(1, func(e *encoder) {
			e.textElement(1, key)
			e.message(2, func(e *encoder) { e.value(m[key], depth+1) })
		})
	}
}

// value appends a google.protobuf.Value. Of the types that are not those of encoding/json it takes what
// Protocol Buffers' own conversion does: all numbers, and bytes as base64.
func (e *encoder) value(v any, depth int) {
	if depth > maxClaimDepth {
		e.fail(errTooDeep)
		return
	}
	var f float64
	switch v := v.(type) {
	case nil:
		e.varint(1, 0)
		return
	case bool:
		e.varint(4, protowire.EncodeBool(v))
		return
	case string:
		e.textElement(3, v)
		return
	case []byte:
		e.textElement(3, base64.StdEncoding.EncodeToString(v))
		return
	case map[string]any:
		e.message(5, func(e *encoder) { e.structure(v, depth) })
		return
	case []any:
		e.message(6, func(e *encoder) {
			for _, element := range v {
				e.message(1, func(e *encoder) { e.value(element, depth+1) })
			}
		})
		return
	case json.Number:
		var err error
		if f, err = v.Float64(); err != nil {
			e.fail(errors.New("the message cannot be encoded: a number is none, or too large"))
		}
	case float64:
		f = v
	case float32:
		f = float64(v)
	case int:
		f = float64(v)
	case int8:
		f = float64(v)
	case int16:
		f = float64(v)
	case int32:
		f = float64(v)
	case int64:
		f = float64(v)
	case uint:
		f = float64(v)
	case uint8:
		f = float64(v)
	case uint16:
		f = float64(v)
	case uint32:
		f = float64(v)
	case uint64:
		f = float64(v)
	default:
		e.fail(fmt.Errorf("the message cannot be encoded: a claim is a %T", v))
	}
	if e.counting {
		e.n += protowire.SizeTag(2) + protowire.SizeFixed64()
		return
	}
	e.b = protowire.AppendFixed64(protowire.AppendTag(e.b, 2, protowire.Fixed64Type), math.Float64bits(f))
}

// raw is an encoded message. What is sent to many callers is encoded once, and known by its place in
// memory.
type raw struct{ b []byte }

// encode encodes a message so that equal ones have equal bytes.
func encode(m message) (*raw, error) {
	e := encoder{counting: true}
	m.put(&e)
	if e.err != nil {
		return nil, e.err
	}
	e = encoder{b: make([]byte, 0, e.n)}
	m.put(&e)
	return &raw{e.b}, nil
}

// decode decodes data into m. A message with more than limit fields at its top is refused before
// anything is made of it: an element takes two bytes on the wire and a hundred in memory.
func decode(data []byte, m message, limit int) error {
	for n, rest := 0, data; len(rest) > 0; n++ {
		if n == limit {
			return fmt.Errorf("it has more than %d elements", limit)
		}
		_, _, size := protowire.ConsumeField(rest)
		if size < 0 {
			return errMalformed
		}
		rest = rest[size:]
	}
	return fields(data, m.take)
}
