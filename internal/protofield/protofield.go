// Package protofield reads and writes messages of Protocol Buffers field by field, without generated code or
// reflection, which would be larger than the rest of a small program.
//
// A message is read with a function that stores each field by its number:
//
//	func (v *version) read(f *protofield.Field) {
//		switch f.Number {
//		case 1:
//			f.Text(&v.name)
//		case 2:
//			f.Message(v.read)
//		}
//	}
//
//	err := protofield.Read(data, v.read)
//
// It follows the rules of generated code: the last value of a repeated singular field counts, repeated embedded
// messages are merged, and unknown fields and fields of another wire type are skipped.
package protofield

import (
	"errors"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// ErrMalformed says that bytes are not an encoded message, or that a string in them is not UTF-8.
var ErrMalformed = errors.New("malformed protobuf message")

// Number is the number of a field.
type Number = protowire.Number

// Field is one field of a message that is being read. It is valid until the function passed to [Read] returns.
type Field struct {
	Number Number
	Type   protowire.Type
	Data   []byte // the content, if it is length-delimited; part of the message, not a copy
	Value  uint64 // the number, if it is a varint or of fixed size
	err    error
}

// Read calls read for each field of a message, in order, until one fails. Groups are skipped. The error is
// [ErrMalformed] or the error passed to [Field.Fail].
func Read(message []byte, read func(*Field)) error {
	var f Field
	return f.readAll(message, read)
}

// readAll is Read with f as the argument of read.
func (f *Field) readAll(message []byte, read func(*Field)) error {
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeTag(message)
		if n < 0 || number > protowire.MaxValidNumber {
			return ErrMalformed
		}
		message = message[n:]
		*f = Field{Number: number, Type: kind}
		switch kind {
		case protowire.BytesType:
			f.Data, n = protowire.ConsumeBytes(message)
		case protowire.VarintType:
			f.Value, n = protowire.ConsumeVarint(message)
		case protowire.Fixed64Type:
			f.Value, n = protowire.ConsumeFixed64(message)
		case protowire.Fixed32Type:
			var v uint32
			v, n = protowire.ConsumeFixed32(message)
			f.Value = uint64(v)
		default:
			n = protowire.ConsumeFieldValue(number, kind, message)
		}
		if n < 0 {
			return ErrMalformed
		}
		message = message[n:]
		if kind == protowire.StartGroupType {
			continue
		}
		if read(f); f.err != nil {
			return f.err
		}
	}
	return nil
}

// Text sets to to the value of a string.
func (f *Field) Text(to *string) {
	switch {
	case f.Type != protowire.BytesType:
	case !utf8.Valid(f.Data):
		f.Fail(ErrMalformed)
	default:
		*to = string(f.Data)
	}
}

// Bytes sets to to a copy of the value of a field of type bytes, or to nil if it is empty.
func (f *Field) Bytes(to *[]byte) {
	if f.Type == protowire.BytesType {
		*to = append([]byte(nil), f.Data...)
	}
}

// Int64 sets to to the value of an int64.
func (f *Field) Int64(to *int64) {
	if f.Type == protowire.VarintType {
		*to = int64(f.Value) // also right for negative numbers
	}
}

// Int32 sets to to the value of an int32.
func (f *Field) Int32(to *int32) {
	if f.Type == protowire.VarintType {
		*to = int32(f.Value) // generated code also drops the upper bits
	}
}

// Fixed sets to to the value of a fixed32 or a fixed64.
func (f *Field) Fixed(to *uint64) {
	if f.Type == protowire.Fixed32Type || f.Type == protowire.Fixed64Type {
		*to = f.Value
	}
}

// Bool sets to to the value of a bool.
func (f *Field) Bool(to *bool) {
	if f.Type == protowire.VarintType {
		*to = f.Value != 0
	}
}

// Message reads an embedded message.
func (f *Field) Message(read func(*Field)) {
	if f.Type == protowire.BytesType {
		outer := *f // reuse f, so that embedded messages cost no memory
		err := f.readAll(outer.Data, read)
		*f = outer
		f.Fail(err)
	}
}

// Entry reads an entry of a map whose keys are strings. value reads the value; it is not called if there is no value.
// An entry without a key has the key "".
func (f *Field) Entry(value func(*Field)) (key string) {
	f.Message(func(f *Field) {
		switch f.Number {
		case 1:
			f.Text(&key)
		case 2:
			value(f)
		}
	})
	return key
}

// Texts returns a function that reads a message whose fields, from 1 on, are strings.
func Texts(to ...*string) func(*Field) {
	return func(f *Field) {
		if n := int(f.Number); n <= len(to) {
			f.Text(to[n-1])
		}
	}
}

// Any reads an embedded google.protobuf.Any.
func (f *Field) Any() (url string, value []byte) {
	f.Message(func(f *Field) {
		switch f.Number {
		case 1:
			f.Text(&url)
		case 2:
			f.Bytes(&value)
		}
	})
	return url, value
}

// Seconds reads an embedded google.protobuf.Timestamp or Duration.
func (f *Field) Seconds() (seconds int64, nanos int32) {
	f.Message(func(f *Field) {
		switch f.Number {
		case 1:
			f.Int64(&seconds)
		case 2:
			f.Int32(&nanos)
		}
	})
	return seconds, nanos
}

// Fail makes [Read] return err after this field, unless err is nil or there is an earlier error.
func (f *Field) Fail(err error) {
	if f.err == nil {
		f.err = err
	}
}

// Write returns the message with the fields that write adds, in a slice of exactly that size.
func Write(write func(*Writer)) ([]byte, error) {
	var w Writer
	write(&w)
	if w.err != nil {
		return nil, w.err
	}
	return append(make([]byte, 0, len(w.b)), w.b...), nil
}

// Writer collects the fields of a message in the order in which they are encoded. The methods Text, Bytes and Varint
// are for singular fields, and omit zero values. The methods that begin with Add are for elements of lists and
// members of oneofs, which are always written.
type Writer struct {
	b   []byte
	err error
}

var errNotUTF8 = errors.New("the message cannot be encoded: a text is not UTF-8")

// Text adds a string, unless it is empty.
func (w *Writer) Text(n Number, s string) {
	if s != "" {
		w.AddText(n, s)
	}
}

// Bytes adds a field of type bytes, unless it is empty.
func (w *Writer) Bytes(n Number, v []byte) {
	if len(v) > 0 {
		w.AddBytes(n, v)
	}
}

// Varint adds a number, unless it is 0. Convert a negative int64 to uint64.
func (w *Writer) Varint(n Number, v uint64) {
	if v != 0 {
		w.AddVarint(n, v)
	}
}

// AddText adds a string.
func (w *Writer) AddText(n Number, s string) {
	if !utf8.ValidString(s) {
		w.Fail(errNotUTF8)
	}
	w.b = protowire.AppendString(protowire.AppendTag(w.b, n, protowire.BytesType), s)
}

// AddBytes adds a field of type bytes, or an embedded message that is already encoded.
func (w *Writer) AddBytes(n Number, v []byte) {
	w.b = protowire.AppendBytes(protowire.AppendTag(w.b, n, protowire.BytesType), v)
}

// AddVarint adds a number.
func (w *Writer) AddVarint(n Number, v uint64) {
	w.b = protowire.AppendVarint(protowire.AppendTag(w.b, n, protowire.VarintType), v)
}

// AddFixed64 adds a number of fixed size, such as the bits of a double.
func (w *Writer) AddFixed64(n Number, v uint64) {
	w.b = protowire.AppendFixed64(protowire.AppendTag(w.b, n, protowire.Fixed64Type), v)
}

// Message adds an embedded message.
func (w *Writer) Message(n Number, write func(*Writer)) {
	var inner Writer
	write(&inner)
	w.Fail(inner.err)
	w.AddBytes(n, inner.b)
}

// Texts adds strings as the fields from 1 on, unless they are empty.
func (w *Writer) Texts(texts ...string) {
	for i, s := range texts {
		w.Text(Number(i+1), s)
	}
}

// Any adds an embedded google.protobuf.Any with the message that write writes.
func (w *Writer) Any(n Number, url string, write func(*Writer)) {
	w.Message(n, func(w *Writer) {
		w.Text(1, url)
		w.Message(2, write)
	})
}

// Entry adds an entry of a map from strings to bytes.
func (w *Writer) Entry(n Number, key string, value []byte) {
	w.Message(n, func(w *Writer) {
		w.AddText(1, key)
		w.AddBytes(2, value)
	})
}

// Raw adds fields that are already encoded.
func (w *Writer) Raw(fields []byte) { w.b = append(w.b, fields...) }

// Fail makes [Write] return err, unless err is nil or there is an earlier error.
func (w *Writer) Fail(err error) {
	if w.err == nil {
		w.err = err
	}
}
