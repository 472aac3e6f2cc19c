package test_test

import (
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/svidkit/svidkit/internal/test/wire/linkerd"
)

func TestWireLinkerd(t *testing.T) {
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
		check(t, name, test.msg, test.want)
	}
}
