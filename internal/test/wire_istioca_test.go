package test_test

import (
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/svidkit/svidkit/internal/test/wire/istioca"
)

func TestWireIstioCA(t *testing.T) {
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
		check(t, name, test.msg, test.want)
	}
}
