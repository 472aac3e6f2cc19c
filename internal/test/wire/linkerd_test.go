package wire_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/svidkit/svidkit/internal/test/wire/linkerd"
)

// times eight, plus 2 for what has a length and 0 for a number.
func TestLinkerdBytes(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		msg  proto.Message
		want string
	}{
		"request": {
			&linkerd.CertifyRequest{Identity: "a", Token: []byte("t"), CertificateSigningRequest: []byte{0x30}},
			"\x0a\x01\x61" + "\x12\x01\x74" + "\x1a\x01\x30",
		},
		"response with valid_until only": {
			&linkerd.CertifyResponse{ValidUntil: &timestamppb.Timestamp{Seconds: 1}},
			"\x1a\x02\x08\x01",
		},
		"response": {
			&linkerd.CertifyResponse{
				LeafCertificate: []byte("leaf"), IntermediateCertificates: [][]byte{[]byte("issuer"), []byte("parent")},
				ValidUntil: &timestamppb.Timestamp{Seconds: 300},
			},
			"\x0a\x04leaf" + "\x12\x06issuer" + "\x12\x06parent" + "\x1a\x03\x08\xac\x02",
		},
		"response before 1970": {
			&linkerd.CertifyResponse{ValidUntil: &timestamppb.Timestamp{Seconds: -1}},
			"\x1a\x0b\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
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
