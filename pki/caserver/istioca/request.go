package istioca

import (
	"bytes"
	"errors"
	"fmt"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// request is an IstioCertificateRequest as far as it is read, or what is wrong with it.
type request struct {
	csr         []byte // PEM
	validity    int64  // seconds
	signer      string // metadata CertSigner
	impersonate string // metadata ImpersonatedIdentity
	err         error
}

// response is an encoded IstioCertificateResponse.
type response struct{ b []byte }

// codec replaces connect's own under the same name: a request becomes no more than what we want of
// it, and a response is encoded once for many.
type codec struct{}

func (codec) Name() string { return "proto" }

func (c codec) Marshal(m any) ([]byte, error) { return c.MarshalAppend(nil, m) }

func (codec) MarshalAppend(b []byte, m any) ([]byte, error) {
	switch m := m.(type) {
	case *response:
		return append(b, m.b...), nil
	case proto.Message: // the details of an error
		return proto.MarshalOptions{}.MarshalAppend(b, m)
	}
	return nil, fmt.Errorf("istioca: encode: unexpected %T", m)
}

func (codec) Unmarshal(data []byte, m any) error {
	r, ok := m.(*request)
	if !ok {
		return fmt.Errorf("istioca: decode: unexpected %T", m)
	}
	*r = request{}
	r.err = r.decode(data) // for the handler, which counts and logs it
	return nil
}

var errMalformed = errors.New("the message is not an IstioCertificateRequest")

// decode reads what a generated decoder would, without building the rest of the metadata, which
// takes up thirty times as much in memory as on the wire. data is not kept.
func (r *request) decode(data []byte) error {
	var csr []byte
	for len(data) > 0 {
		num, typ, n := protowire.ConsumeTag(data)
		if n < 0 || num > protowire.MaxValidNumber {
			return errMalformed
		}
		data = data[n:]
		switch {
		case num == 1 && typ == protowire.BytesType:
			csr, n = protowire.ConsumeBytes(data)
			if n >= 0 && !utf8.Valid(csr) {
				return errMalformed
			}
		case num == 3 && typ == protowire.VarintType:
			var v uint64
			v, n = protowire.ConsumeVarint(data)
			r.validity = int64(v) //nolint:gosec // the encoding of negative numbers
		case num == 4 && typ == protowire.BytesType:
			var s []byte
			if s, n = protowire.ConsumeBytes(data); n >= 0 {
				if err := r.metadata(s); err != nil {
					return err
				}
			}
		default:
			n = protowire.ConsumeFieldValue(num, typ, data)
		}
		if n < 0 {
			return errMalformed
		}
		data = data[n:]
	}
	r.csr = bytes.Clone(csr)
	return nil
}

// metadata reads a google.protobuf.Struct: a map of texts to values. The last value of a key counts.
func (r *request) metadata(data []byte) error {
	return fields(data, func(num protowire.Number, typ protowire.Type, entry []byte) error {
		if num != 1 || typ != protowire.BytesType {
			return nil
		}
		var key []byte
		var v value
		err := fields(entry, func(num protowire.Number, typ protowire.Type, b []byte) error {
			switch {
			case num == 1 && typ == protowire.BytesType:
				if key = b; !utf8.Valid(b) {
					return errMalformed
				}
			case num == 2 && typ == protowire.BytesType:
				return fields(b, v.read)
			}
			return nil
		})
		if err != nil {
			return err
		}
		switch string(key) {
		case "CertSigner":
			r.signer = string(v.text)
		case "ImpersonatedIdentity":
			r.impersonate = string(v.text)
		}
		return nil
	})
}

// value is a google.protobuf.Value as far as it is a text: one of several fields, the last of which
// counts. One of another kind is as good as none.
type value struct{ text []byte }

func (v *value) read(num protowire.Number, typ protowire.Type, b []byte) error {
	switch {
	case num == 3 && typ == protowire.BytesType: // string_value
		if v.text = b; !utf8.Valid(b) {
			return errMalformed
		}
	case (num == 1 || num == 4) && typ == protowire.VarintType, // null_value, bool_value
		num == 2 && typ == protowire.Fixed64Type,             // number_value
		(num == 5 || num == 6) && typ == protowire.BytesType: // struct_value, list_value
		v.text = nil
	}
	return nil
}

// fields calls f with each field of a message; b is the content of one that has a length.
func fields(data []byte, f func(num protowire.Number, typ protowire.Type, b []byte) error) error {
	for len(data) > 0 {
		num, typ, n := protowire.ConsumeTag(data)
		if n < 0 || num > protowire.MaxValidNumber {
			return errMalformed
		}
		data = data[n:]
		if n = protowire.ConsumeFieldValue(num, typ, data); n < 0 {
			return errMalformed
		}
		var b []byte
		if typ == protowire.BytesType {
			b, _ = protowire.ConsumeBytes(data)
		}
		if err := f(num, typ, b); err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}
