package istioca_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/svidkit/svidkit/internal/test/wire/istioca"
)

// TestBytes compares each message with bytes written by hand: a tag is the published field number
// times eight, plus 2 for what has a length and 0 for a number.
func TestBytes(t *testing.T) {
	t.Parallel()
	signer := &structpb.Struct{Fields: map[string]*structpb.Value{"CertSigner": structpb.NewStringValue("x")}}
	for name, test := range map[string]struct {
		msg  proto.Message
		want string
	}{
		"IstioCertificateRequest": {
			&istioca.IstioCertificateRequest{Csr: "PEM", ValidityDuration: 86400, Metadata: signer},
			"\x0a\x03PEM" + // csr
				"\x18\x80\xa3\x05" + // validity_duration
				"\x22\x13" + "\x0a\x11" + // metadata, an entry of its map
				"\x0a\x0aCertSigner" + "\x12\x03\x1a\x01x", // key; value with string_value
		},
		"IstioCertificateRequest, a negative duration": {
			&istioca.IstioCertificateRequest{ValidityDuration: -1},
			"\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
		},
		"IstioCertificateRequest, empty metadata": {
			&istioca.IstioCertificateRequest{Metadata: &structpb.Struct{}}, "\x22\x00",
		},
		"IstioCertificateResponse": {
			&istioca.IstioCertificateResponse{CertChain: []string{"leaf\n", "", "roots\n"}},
			"\x0a\x05leaf\n" + "\x0a\x00" + "\x0a\x06roots\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := must.Get(proto.MarshalOptions{Deterministic: true}.Marshal(test.msg))(t)
			assert.Equal(t, test.want, string(got))
			back := test.msg.ProtoReflect().New().Interface()
			require.NoError(t, proto.Unmarshal([]byte(test.want), back))
			assert.True(t, proto.Equal(test.msg, back))
		})
	}
}

// A field that an older or a newer release has is kept, and does not become another one.
func TestUnknownFieldsAreKept(t *testing.T) {
	t.Parallel()
	in := "\x0a\x01c" + "\x12\x05token" + "\x2a\x01x"
	var req istioca.IstioCertificateRequest
	require.NoError(t, proto.Unmarshal([]byte(in), &req))
	assert.Equal(t, "c", req.GetCsr())
	assert.Zero(t, req.GetValidityDuration())
	assert.Nil(t, req.GetMetadata())
	out := must.Get(proto.Marshal(&req))(t)
	assert.Equal(t, in, string(out))
}

// The canonical types register under their own names; ours must not take those.
func TestOwnPackageName(t *testing.T) {
	t.Parallel()
	file := (*istioca.IstioCertificateRequest)(nil).ProtoReflect().Descriptor().ParentFile()
	assert.Equal(t, "svidkit.wire.istioca", string(file.Package()))
	assert.Equal(t, "internal/test/wire/istioca/istioca.proto", file.Path())
	assert.Zero(t, file.Services().Len())
	assert.Equal(t, "/istio.v1.auth.IstioCertificateService/CreateCertificate", istioca.CreateCertificate)
}
