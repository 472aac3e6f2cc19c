package internal_test

import (
	"bytes"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/internal/test/wire/linkerd"
	"github.com/svidkit/svidkit/internal/test/wire/workloadapi"
)

// message is one that is read and written by hand here, and by generated code.
type message interface {
	read(f *protofield.Field)
	write(w *protofield.Writer)
	from(m proto.Message) message // what the generated message has
}

// delta has nested messages, lists of texts, a map of texts and an int32.
type delta struct {
	node                   [2]string
	typeURL, nonce, reason string
	add, drop              []string
	have                   map[string]string
	withNode, rejected     bool
	code                   int32
}

func (m *delta) read(f *protofield.Field) {
	switch f.Number {
	case 1:
		f.Message(func(f *protofield.Field) {
			if f.Number == 1 || f.Number == 2 {
				f.Text(&m.node[f.Number-1])
			}
		})
		m.withNode = m.withNode || f.Type == protowire.BytesType
	case 2:
		f.Text(&m.typeURL)
	case 3, 4:
		if f.Type != protowire.BytesType {
			return
		}
		var name string
		if f.Text(&name); f.Number == 3 {
			m.add = append(m.add, name)
		} else {
			m.drop = append(m.drop, name)
		}
	case 5:
		if f.Type != protowire.BytesType {
			return
		}
		var v string
		name := f.Entry(func(f *protofield.Field) { f.Text(&v) })
		if m.have == nil {
			m.have = make(map[string]string)
		}
		m.have[name] = v
	case 6:
		f.Text(&m.nonce)
	case 7:
		f.Message(func(f *protofield.Field) {
			switch f.Number {
			case 1:
				f.Int32(&m.code)
			case 2:
				f.Text(&m.reason)
			}
		})
		m.rejected = m.rejected || f.Type == protowire.BytesType
	}
}

func (m *delta) write(w *protofield.Writer) {
	if m.withNode {
		w.Message(1, func(w *protofield.Writer) {
			w.Text(1, m.node[0])
			w.Text(2, m.node[1])
		})
	}
	w.Text(2, m.typeURL)
	for _, name := range m.add {
		w.AddText(3, name)
	}
	for _, name := range m.drop {
		w.AddText(4, name)
	}
	for name, v := range m.have {
		w.Entry(5, name, []byte(v))
	}
	w.Text(6, m.nonce)
	if m.rejected {
		w.Message(7, func(w *protofield.Writer) {
			w.Varint(1, uint64(int64(m.code)))
			w.Text(2, m.reason)
		})
	}
}

func (*delta) from(p proto.Message) message {
	m := p.(*envoysds.DeltaDiscoveryRequest)
	return &delta{
		node: [2]string{m.GetNode().GetId(), m.GetNode().GetCluster()}, withNode: m.GetNode() != nil,
		typeURL: m.GetTypeUrl(), nonce: m.GetResponseNonce(), add: m.GetResourceNamesSubscribe(), drop: m.GetResourceNamesUnsubscribe(),
		have: notEmpty(m.GetInitialResourceVersions()), rejected: m.GetErrorDetail() != nil, code: m.GetErrorDetail().GetCode(), reason: m.GetErrorDetail().GetMessage(),
	}
}

// notEmpty returns m, or nil: generated code makes a map for an entry that it then skips.
func notEmpty[V any](m map[string]V) map[string]V {
	if len(m) == 0 {
		return nil
	}
	return m
}

// certificate has bytes and a Timestamp.
type certificate struct {
	leaf    []byte
	above   [][]byte
	end     bool
	seconds int64
	nanos   int32
}

func (m *certificate) read(f *protofield.Field) {
	switch f.Number {
	case 1:
		f.Bytes(&m.leaf)
	case 2:
		if f.Type == protowire.BytesType {
			m.above = append(m.above, bytes.Clone(f.Data))
		}
	case 3:
		m.end = m.end || f.Type == protowire.BytesType
		f.Message(func(f *protofield.Field) {
			switch f.Number {
			case 1:
				f.Int64(&m.seconds)
			case 2:
				f.Int32(&m.nanos)
			}
		})
	}
}

func (m *certificate) write(w *protofield.Writer) {
	w.Bytes(1, m.leaf)
	for _, v := range m.above {
		w.AddBytes(2, v)
	}
	if m.end {
		w.Message(3, func(w *protofield.Writer) {
			w.Varint(1, uint64(m.seconds))
			w.Varint(2, uint64(int64(m.nanos)))
		})
	}
}

func (*certificate) from(p proto.Message) message {
	m := p.(*linkerd.CertifyResponse)
	c := &certificate{leaf: m.GetLeafCertificate(), above: m.GetIntermediateCertificates(), end: m.GetValidUntil() != nil}
	c.seconds, c.nanos = m.GetValidUntil().GetSeconds(), m.GetValidUntil().GetNanos()
	return c
}

// bundles has a map of bytes.
type bundles struct {
	crl  [][]byte
	ders map[string][]byte
}

func (m *bundles) read(f *protofield.Field) {
	switch {
	case f.Type != protowire.BytesType:
	case f.Number == 1:
		m.crl = append(m.crl, bytes.Clone(f.Data))
	case f.Number == 2:
		v := []byte{}
		name := f.Entry(func(f *protofield.Field) {
			if f.Type == protowire.BytesType {
				v = append(v[:0], f.Data...)
			}
		})
		if m.ders == nil {
			m.ders = make(map[string][]byte)
		}
		m.ders[name] = v
	}
}

func (m *bundles) write(w *protofield.Writer) {
	for _, v := range m.crl {
		w.AddBytes(1, v)
	}
	for k, v := range m.ders {
		w.Entry(2, k, v)
	}
}

func (*bundles) from(p proto.Message) message {
	m := p.(*workloadapi.X509BundlesResponse)
	for k, v := range m.GetBundles() {
		m.Bundles[k] = append([]byte{}, v...) // generated code has both forms of an empty one
	}
	return &bundles{crl: m.GetCrl(), ders: notEmpty(m.GetBundles())}
}

// pairs are empty messages of both kinds, with examples.
var pairs = []struct {
	ours      func() message
	generated func() proto.Message
	examples  []proto.Message
}{
	{
		func() message { return &delta{} }, func() proto.Message { return &envoysds.DeltaDiscoveryRequest{} },
		[]proto.Message{
			&envoysds.DeltaDiscoveryRequest{},
			&envoysds.DeltaDiscoveryRequest{
				Node: &envoysds.Node{Id: "größer", Cluster: strings.Repeat("c", 200)}, TypeUrl: "t", ResourceNamesSubscribe: []string{"a", "", "b"},
				ResourceNamesUnsubscribe: []string{"c"}, InitialResourceVersions: map[string]string{"a": "1"}, ResponseNonce: "n",
				ErrorDetail: &envoysds.Status{Code: -3, Message: strings.Repeat("m", 20_000)},
			},
			&envoysds.DeltaDiscoveryRequest{Node: &envoysds.Node{}, ErrorDetail: &envoysds.Status{}, InitialResourceVersions: map[string]string{"": ""}},
		},
	},
	{
		func() message { return &certificate{} }, func() proto.Message { return &linkerd.CertifyResponse{} },
		[]proto.Message{
			&linkerd.CertifyResponse{},
			&linkerd.CertifyResponse{
				LeafCertificate: []byte("leaf"), IntermediateCertificates: [][]byte{{}, []byte("i")},
				ValidUntil: &timestamppb.Timestamp{Seconds: math.MaxInt64, Nanos: 999_999_999},
			},
			&linkerd.CertifyResponse{ValidUntil: &timestamppb.Timestamp{Seconds: math.MinInt64, Nanos: math.MinInt32}},
		},
	},
	{
		func() message { return &bundles{} }, func() proto.Message { return &workloadapi.X509BundlesResponse{} },
		[]proto.Message{
			&workloadapi.X509BundlesResponse{},
			&workloadapi.X509BundlesResponse{Crl: [][]byte{[]byte("crl"), {}}, Bundles: map[string][]byte{"spiffe://example.org": make([]byte, 200)}},
			&workloadapi.X509BundlesResponse{Bundles: map[string][]byte{"": {}}},
		},
	},
}

// malformed are not messages.
var malformed = [][]byte{
	{0x08},            // no value
	{0x0a, 0x02, 'x'}, // too short
	{0x00},            // number 0
	{0x0c},            // the end of no group
	{0x0b},            // a group without an end
	{0x0b, 0x14},      // the end of another
	{0x0e}, {0x0f},    // wire types that do not exist
	{0x0d, 0, 0, 0}, {0x09, 0, 0, 0, 0, 0, 0, 0}, // numbers of fixed size that are cut
	append(protowire.AppendVarint(nil, 1<<32), 0),                      // number 2^29
	append(protowire.AppendVarint(nil, math.MaxUint64), 0),             // a larger one
	bytes.Repeat([]byte{0xff}, 11),                                     // a varint of more than 10 bytes
	{0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02}, // of more than 64 bits
	{0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01}, // a length like that
	{0x12, 0x01, 0xff},             // in delta: not UTF-8
	{0x2a, 0x03, 0x0a, 0x01, 0xff}, // in delta: the key of an entry
}

func TestProtoFieldMalformed(t *testing.T) {
	t.Parallel()
	for _, b := range malformed {
		assert.Equal(t, protofield.ErrMalformed, protofield.Read(b, (&delta{}).read), "%x", b)
		assert.Error(t, proto.Unmarshal(b, &envoysds.DeltaDiscoveryRequest{}), "%x", b)
	}
}

// checkFields compares what is read and written by hand with what generated code makes of the same bytes.
func checkFields(t *testing.T, data []byte) {
	for _, p := range pairs {
		ours, generated := p.ours(), p.generated()
		before := bytes.Clone(data)
		err := protofield.Read(data, ours.read)
		require.Equal(t, before, data)
		if proto.Unmarshal(data, generated) != nil {
			require.Equal(t, protofield.ErrMalformed, err)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, ours.from(generated), ours)

		b := must.Get(protofield.Write(ours.write))(t)
		again := p.generated()
		require.NoError(t, proto.Unmarshal(b, again))
		require.Equal(t, ours, ours.from(again))
		require.Equal(t, len(b), cap(b))
	}
}

func TestProtoFieldGenerated(t *testing.T) {
	t.Parallel()
	for _, p := range pairs {
		for _, example := range p.examples {
			want := must.Get(proto.MarshalOptions{Deterministic: true}.Marshal(example))(t)
			m := p.ours()
			require.NoError(t, protofield.Read(want, m.read))
			require.Equal(t, m.from(example), m)
			assert.Equal(t, string(want), string(must.Get(protofield.Write(m.write))(t)))
			checkFields(t, want)
			checkFields(t, append(want, want...)) // merged
		}
	}
}

func FuzzProtoField(f *testing.F) {
	for _, p := range pairs {
		for _, example := range p.examples {
			b := must.Get(proto.Marshal(example))(f)
			f.Add(b)
		}
	}
	for _, b := range malformed {
		f.Add(b)
	}
	f.Add([]byte{0x0b, 0x10, 0x01, 0x0c, 0x15, 1, 2, 3, 4, 0x11, 1, 2, 3, 4, 5, 6, 7, 8}) // a group, and numbers of fixed size
	f.Add([]byte{0x0a, 0x05, 0xfa, 0xff, 0xff, 0xff, 0x0f})
	f.Fuzz(checkFields)
}

// Fail ends the reading with its first error, wherever in a message it is.
func TestProtoFieldFail(t *testing.T) {
	t.Parallel()
	inner := []byte{0x08, 7, 0x11, 1, 0, 0, 0, 0, 0, 0, 0x80, 0x1d, 1, 0, 0, 0x80}
	data := must.Get(proto.Marshal(&anypb.Any{TypeUrl: "t", Value: inner}))(t)
	stop := errors.New("stop")
	var values []uint64
	read := func(f *protofield.Field) {
		f.Fail(nil)
		if f.Number != 2 {
			return
		}
		f.Message(func(f *protofield.Field) {
			if values = append(values, f.Value); len(values) == 2 {
				f.Fail(stop)
				f.Fail(errors.New("another"))
			}
		})
	}
	assert.Equal(t, stop, protofield.Read(append(data, data...), read))
	assert.Equal(t, []uint64{7, 1<<63 | 1}, values)

	values = make([]uint64, 2)
	require.NoError(t, protofield.Read(data, read))
	assert.Equal(t, []uint64{0, 0, 7, 1<<63 | 1, 1<<31 | 1}, values)
}

// What is kept of a message shares no memory with it.
func TestProtoFieldCopies(t *testing.T) {
	t.Parallel()
	data := must.Get(proto.Marshal(&linkerd.CertifyRequest{Identity: "identity", Token: []byte("token")}))(t)
	var text string
	var token []byte
	require.NoError(t, protofield.Read(data, func(f *protofield.Field) {
		switch f.Number {
		case 1:
			f.Text(&text)
		case 2:
			f.Bytes(&token)
		}
	}))
	clear(data)
	assert.Equal(t, "identity", text)
	assert.Equal(t, "token", string(token))
}

func TestProtoFieldWriteFails(t *testing.T) {
	t.Parallel()
	stop := errors.New("stop")
	_, err := protofield.Write(func(w *protofield.Writer) {
		w.Fail(nil)
		w.Message(1, func(w *protofield.Writer) { w.Fail(stop) })
		w.Text(2, "\xff")
	})
	assert.Equal(t, stop, err)
	assert.ErrorContains(t, must.Err(protofield.Write(func(w *protofield.Writer) { w.Text(2, "\xff") })), "UTF-8")
	_, err = protofield.Write(func(w *protofield.Writer) { w.Entry(2, "\xff", nil) })
	assert.ErrorContains(t, err, "UTF-8")
	b := must.Get(protofield.Write(func(w *protofield.Writer) {
		w.AddVarint(1, 0)
		w.AddFixed64(2, math.Float64bits(1))
		w.Raw([]byte{0x18, 5})
	}))(t)
	assert.Equal(t, []byte{0x08, 0, 0x11, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f, 0x18, 5}, b)
}

// Numbers of fixed size are read from fields of their wire types alone.
func TestProtoFieldFixed(t *testing.T) {
	t.Parallel()
	message := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 7)
	message = protowire.AppendFixed32(protowire.AppendTag(message, 2, protowire.Fixed32Type), 0xfffefdfc)
	message = protowire.AppendFixed64(protowire.AppendTag(message, 3, protowire.Fixed64Type), 0xf1f2f3f4f5f6f7f8)
	message = protowire.AppendString(protowire.AppendTag(message, 4, protowire.BytesType), "text")
	var got []uint64
	require.NoError(t, protofield.Read(message, func(f *protofield.Field) {
		n := uint64(9)
		f.Fixed(&n)
		got = append(got, n)
	}))
	assert.Equal(t, []uint64{9, 0xfffefdfc, 0xf1f2f3f4f5f6f7f8, 9}, got)
}
