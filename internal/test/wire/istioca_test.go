package wire_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/svidkit/svidkit/internal/test/wire/istioca"
)

// times eight, plus 2 for what has a length and 0 for a number.
func TestIstioCABytes(t *testing.T) {
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
