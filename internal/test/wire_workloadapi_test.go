package test_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/wire/workloadapi"
)

func TestWireWorkloadAPI(t *testing.T) {
	t.Parallel()
	claims := must.Get(structpb.NewStruct(map[string]any{"sub": "s"}))(t)
	for name, test := range map[string]struct {
		msg  proto.Message
		want []byte
	}{
		"X509SVIDRequest": {&workloadapi.X509SVIDRequest{}, []byte{}},
		"X509SVIDResponse": {
			&workloadapi.X509SVIDResponse{
				Svids:            []*workloadapi.X509SVID{{SpiffeId: "i", X509Svid: []byte("c"), X509SvidKey: []byte("k"), Bundle: []byte("b"), Hint: "h"}},
				Crl:              [][]byte{[]byte("r")},
				FederatedBundles: map[string][]byte{"t": []byte("f")},
			},
			join(message(1, text(1, "i"), text(2, "c"), text(3, "k"), text(4, "b"), text(5, "h")), text(2, "r"), message(3, text(1, "t"), text(2, "f"))),
		},
		"X509BundlesRequest": {&workloadapi.X509BundlesRequest{}, []byte{}},
		"X509BundlesResponse": {
			&workloadapi.X509BundlesResponse{Crl: [][]byte{[]byte("r")}, Bundles: map[string][]byte{"t": []byte("b")}},
			join(text(1, "r"), message(2, text(1, "t"), text(2, "b"))),
		},
		"JWTSVIDRequest": {&workloadapi.JWTSVIDRequest{Audience: []string{"a", "b"}, SpiffeId: "i"}, join(text(1, "a"), text(1, "b"), text(2, "i"))},
		"JWTSVIDResponse": {
			&workloadapi.JWTSVIDResponse{Svids: []*workloadapi.JWTSVID{{SpiffeId: "i", Svid: "t", Hint: "h"}}},
			message(1, text(1, "i"), text(2, "t"), text(3, "h")),
		},
		"JWTBundlesRequest":      {&workloadapi.JWTBundlesRequest{}, []byte{}},
		"JWTBundlesResponse":     {&workloadapi.JWTBundlesResponse{Bundles: map[string][]byte{"t": []byte("b")}}, message(1, text(1, "t"), text(2, "b"))},
		"ValidateJWTSVIDRequest": {&workloadapi.ValidateJWTSVIDRequest{Audience: "a", Svid: "t"}, join(text(1, "a"), text(2, "t"))},
		"ValidateJWTSVIDResponse": {
			&workloadapi.ValidateJWTSVIDResponse{SpiffeId: "i", Claims: claims},
			join(text(1, "i"), message(2, message(1, text(1, "sub"), message(2, text(3, "s"))))),
		},
		"WITSVIDRequest": {&workloadapi.WITSVIDRequest{SpiffeId: "i"}, text(1, "i")},
		"WITSVIDResponse": {
			&workloadapi.WITSVIDResponse{Svids: []*workloadapi.WITSVID{{SpiffeId: "i", WitSvid: "t", WitSvidKey: "k", Hint: "h"}}},
			message(1, text(1, "i"), text(2, "t"), text(3, "k"), text(4, "h")),
		},
		"WITBundlesRequest":  {&workloadapi.WITBundlesRequest{}, []byte{}},
		"WITBundlesResponse": {&workloadapi.WITBundlesResponse{Bundles: map[string]string{"t": "b"}}, message(1, text(1, "t"), text(2, "b"))},
	} {
		assert.Equal(t, name, string(test.msg.ProtoReflect().Descriptor().Name()))
		check(t, name, test.msg, string(test.want))
	}
}
