package sds

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
)

// version is a hash of content. The version of a set of secrets is the XOR of theirs, which needs
// no order and follows a change in one step; that of a set of one is that secret's.
type version [16]byte

func (v version) String() string { return hex.EncodeToString(v[:]) }

func (v version) xor(w version) version {
	for i := range v {
		v[i] ^= w[i]
	}
	return v
}

// entry is what is served for a name at one moment. It never changes, and all streams share it.
type entry struct {
	name    string
	version version
	any     []byte // the encoded google.protobuf.Any with the Secret: the one serialisation

	notAfter time.Time // zero for what has no end
}

// expired reports whether e has an end that has come.
func (e *entry) expired(now time.Time) bool { return !e.notAfter.IsZero() && !now.Before(e.notAfter) }

func (e *entry) String() string       { return e.name + "@" + e.version.String() }
func (e *entry) GoString() string     { return "sds.entry(" + e.String() + ")" }
func (e *entry) LogValue() slog.Value { return slog.StringValue(e.String()) }

// newEntry encodes s under the name that was asked for, which is the only one Envoy accepts.
func newEntry(name string, s *pki.Secret) (*entry, error) {
	if s == nil {
		return nil, errors.New("the source returned no secret and no error")
	}
	msg := &envoysds.Secret{Name: name}
	var kind string
	var content []byte
	if chain, key, ok := s.KeyPair(); ok {
		// The key is not part of the hash: the leaf names it, and versions are shown to people.
		kind, content = "tls_certificate", chain
		msg.Type = &envoysds.Secret_TlsCertificate{TlsCertificate: &envoysds.TlsCertificate{
			CertificateChain: inline(chain), PrivateKey: inline(key),
		}}
	} else if roots, ok := s.Roots(); ok {
		kind, content = "validation_context", roots
		msg.Type = &envoysds.Secret_ValidationContext{ValidationContext: &envoysds.CertificateValidationContext{
			TrustedCa: inline(roots),
		}}
	} else {
		return nil, errors.New("the secret has neither a key pair nor roots")
	}

	size := proto.Size(msg)
	b := make([]byte, 0, size+len(typeURL)+16)
	b = appendString(b, 1, typeURL)
	b = protowire.AppendTag(b, 2, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(size))
	b, err := proto.MarshalOptions{Deterministic: true, UseCachedSize: true}.MarshalAppend(b, msg)
	if err != nil { // a name that is not UTF-8
		return nil, errors.New("the secret cannot be encoded")
	}
	e := &entry{name: name, any: b, notAfter: s.NotAfter()}
	h := sha256.New()
	for _, part := range [][]byte{[]byte(name), []byte(kind), content} {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		h.Write(part)
	}
	copy(e.version[:], h.Sum(nil))
	return e, nil
}

func inline(pem []byte) *envoysds.DataSource {
	return &envoysds.DataSource{Specifier: &envoysds.DataSource_InlineBytes{InlineBytes: pem}}
}

// response is a DiscoveryResponse, or a DeltaDiscoveryResponse, put together from encoded entries.
type response struct {
	delta   bool
	version version // of all that the client has of us when it has taken this
	nonce   string
	entries []*entry
	removed []string // delta only
}

// append adds the encoded message to b.
func (r *response) append(b []byte) []byte {
	b = appendVersion(b, 1, r.version)
	for _, e := range r.entries {
		b = protowire.AppendTag(b, 2, protowire.BytesType)
		if !r.delta {
			b = protowire.AppendBytes(b, e.any)
			continue
		}
		size := protowire.SizeTag(1) + protowire.SizeBytes(hex.EncodedLen(len(e.version))) +
			protowire.SizeTag(2) + protowire.SizeBytes(len(e.any)) +
			protowire.SizeTag(3) + protowire.SizeBytes(len(e.name))
		b = protowire.AppendVarint(b, uint64(size))
		b = appendVersion(b, 1, e.version)
		b = protowire.AppendTag(b, 2, protowire.BytesType)
		b = protowire.AppendBytes(b, e.any)
		b = appendString(b, 3, e.name)
	}
	b = appendString(b, 4, typeURL)
	if r.nonce != "" {
		b = appendString(b, 5, r.nonce)
	}
	for _, name := range r.removed {
		b = appendString(b, 6, name)
	}
	return b
}

func appendString(b []byte, field protowire.Number, s string) []byte {
	b = protowire.AppendTag(b, field, protowire.BytesType)
	return protowire.AppendString(b, s)
}

func appendVersion(b []byte, field protowire.Number, v version) []byte {
	b = protowire.AppendTag(b, field, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(hex.EncodedLen(len(v))))
	return hex.AppendEncode(b, v[:])
}

// request is what we use of a DiscoveryRequest or a DeltaDiscoveryRequest. It shares no memory with
// the message, whose node can be large.
type request struct {
	node     string // its ID
	typeURL  string
	nonce    string
	version  string   // SotW: what the client has
	names    []string // SotW: all that it wants from now on; delta: what it wants in addition
	drop     []string // delta: what it no longer wants
	have     map[string]string
	rejected bool   // error_detail is present
	reason   string // its message
	tooLarge error  // a limit was passed; what came after was not read
}

// codec replaces connect's own under the same name: it reads requests without building the messages
// that we do not look at, stops at the limits, and writes responses from encoded entries.
type codec struct {
	delta    bool
	maxNames int
}

func (codec) Name() string { return "proto" }

func (c codec) Marshal(m any) ([]byte, error) { return c.MarshalAppend(nil, m) }

func (codec) MarshalAppend(b []byte, m any) ([]byte, error) {
	switch m := m.(type) {
	case *response:
		return m.append(b), nil
	case proto.Message: // the details of an error
		return proto.MarshalOptions{}.MarshalAppend(b, m)
	}
	return nil, fmt.Errorf("sds: encode: unexpected %T", m)
}

func (c codec) Unmarshal(data []byte, m any) error {
	switch m := m.(type) {
	case *request:
		return c.decode(data, m)
	case proto.Message:
		return proto.Unmarshal(data, m)
	}
	return fmt.Errorf("sds: decode: unexpected %T", m)
}

// Field numbers of the two requests, in the order version_info, node, resource_names(_subscribe),
// resource_names_unsubscribe, initial_resource_versions, type_url, response_nonce, error_detail;
// 0 is a field that the request does not have.
type fieldNumbers struct{ version, node, names, drop, have, typeURL, nonce, detail protowire.Number }

func (c codec) fields() fieldNumbers {
	if c.delta {
		return fieldNumbers{node: 1, typeURL: 2, names: 3, drop: 4, have: 5, nonce: 6, detail: 7}
	}
	return fieldNumbers{version: 1, node: 2, names: 3, typeURL: 4, nonce: 5, detail: 6}
}

func (c codec) decode(data []byte, r *request) error {
	f := c.fields()
	return eachBytes(data, func(field protowire.Number, value []byte) (err error) {
		if r.tooLarge != nil {
			return nil
		}
		switch field {
		case f.version:
			r.version, err = text(value)
		case f.typeURL:
			r.typeURL, err = text(value)
		case f.nonce:
			r.nonce, err = text(value)
		case f.names:
			r.names, err = c.addName(r, r.names, value)
		case f.drop:
			r.drop, err = c.addName(r, r.drop, value)
		case f.node:
			return eachBytes(value, func(field protowire.Number, value []byte) (err error) {
				if field == 1 {
					r.node, err = text(value)
				}
				return err
			})
		case f.detail:
			r.rejected = true
			return eachBytes(value, func(field protowire.Number, value []byte) (err error) {
				if field == 2 {
					r.reason, err = text(value)
				}
				return err
			})
		case f.have:
			return c.addVersion(r, value)
		}
		return err
	})
}

func (c codec) addName(r *request, to []string, value []byte) ([]string, error) {
	if r.tooLarge = c.check(len(to)+1, len(value)); r.tooLarge != nil {
		return to, nil
	}
	s, err := text(value)
	return append(to, s), err
}

func (c codec) addVersion(r *request, entry []byte) error {
	var name, v string
	err := eachBytes(entry, func(field protowire.Number, value []byte) (err error) {
		switch field {
		case 1:
			name, err = text(value)
		case 2:
			v, err = text(value)
		}
		return err
	})
	if err != nil {
		return err
	}
	if r.tooLarge = c.check(len(r.have)+1, len(name)); r.tooLarge != nil {
		return nil
	}
	if r.have == nil {
		r.have = make(map[string]string)
	}
	r.have[name] = v
	return nil
}

func (c codec) check(names, length int) error {
	if length > maxName {
		return fmt.Errorf("sds: a resource name of %d bytes; the limit is %d", length, maxName)
	}
	if names > c.maxNames {
		return fmt.Errorf("sds: more than %d resource names; open another stream, or raise MaxNames of the server", c.maxNames)
	}
	return nil
}

var errMalformed = errors.New("sds: malformed request")

// eachBytes calls f for each length-delimited field of an encoded message and skips all others, as
// all that we read are strings and messages. Of a field that comes twice the last one counts.
func eachBytes(data []byte, f func(field protowire.Number, value []byte) error) error {
	for len(data) > 0 {
		field, kind, n := protowire.ConsumeTag(data)
		if n < 0 {
			return errMalformed
		}
		data = data[n:]
		if kind != protowire.BytesType {
			if n = protowire.ConsumeFieldValue(field, kind, data); n < 0 {
				return errMalformed
			}
			data = data[n:]
			continue
		}
		value, n := protowire.ConsumeBytes(data)
		if n < 0 {
			return errMalformed
		}
		data = data[n:]
		if err := f(field, value); err != nil {
			return err
		}
	}
	return nil
}

// text copies a string, which must be UTF-8.
func text(value []byte) (string, error) {
	if !utf8.Valid(value) {
		return "", errMalformed
	}
	return string(value), nil
}

// clip returns at most maxText bytes of s, in memory of its own.
func clip(s string) string {
	if len(s) > maxText {
		s = strings.ToValidUTF8(s[:maxText], "")
	}
	return strings.Clone(s)
}
