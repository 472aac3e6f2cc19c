package workloadapi

import (
	"bytes"
	"errors"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// raw is an encoded message. What arrives is decoded by us and not by connect, which would report
// what is wrong with it by the code of a refused request; and what is sent to many callers is
// encoded once.
type raw struct{ b []byte }

// codec replaces connect's own under the same name.
type codec struct{}

func (codec) Name() string { return "proto" }

func (c codec) Marshal(m any) ([]byte, error) { return c.MarshalAppend(nil, m) }

func (codec) MarshalAppend(b []byte, m any) ([]byte, error) {
	switch m := m.(type) {
	case *raw:
		return append(b, m.b...), nil
	case proto.Message: // the details of an error
		return proto.MarshalOptions{}.MarshalAppend(b, m)
	}
	return nil, fmt.Errorf("workloadapi: encode: unexpected %T", m)
}

func (codec) Unmarshal(data []byte, m any) error {
	switch m := m.(type) {
	case *raw:
		m.b = bytes.Clone(data)
		return nil
	case proto.Message:
		return proto.Unmarshal(data, m)
	}
	return fmt.Errorf("workloadapi: decode: unexpected %T", m)
}

// encode encodes a message so that equal ones have equal bytes.
func encode(m proto.Message) (*raw, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil { // a text that is not UTF-8
		return nil, errors.New("the message cannot be encoded: a text is not UTF-8")
	}
	return &raw{b}, nil
}

var errMalformed = errors.New("it is not the message that it should be")

// decode decodes data into m. A message with more than limit fields at its top is refused before
// anything is made of it: an element takes two bytes on the wire and a hundred in memory.
func decode(data []byte, m proto.Message, limit int) error {
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
	if (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(data, m) != nil {
		return errMalformed
	}
	return nil
}
