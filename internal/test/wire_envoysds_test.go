package test_test

import (
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
)

// text and message write length-delimited fields, and number writes a varint, straight from the
// published field numbers.
func text(field protowire.Number, s string) []byte {
	return protowire.AppendString(protowire.AppendTag(nil, field, protowire.BytesType), s)
}

func message(field protowire.Number, parts ...[]byte) []byte {
	var body []byte
	for _, p := range parts {
		body = append(body, p...)
	}
	return protowire.AppendBytes(protowire.AppendTag(nil, field, protowire.BytesType), body)
}

func number(field protowire.Number, n uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(nil, field, protowire.VarintType), n)
}

func join(parts ...[]byte) []byte {
	var b []byte
	for _, p := range parts {
		b = append(b, p...)
	}
	return b
}

func inline(s string) *envoysds.DataSource {
	return &envoysds.DataSource{Specifier: &envoysds.DataSource_InlineBytes{InlineBytes: []byte(s)}}
}

func TestWireEnvoySDS(t *testing.T) {
	t.Parallel()
	node := &envoysds.Node{Id: "n", Cluster: "c"}
	detail := &envoysds.Status{Code: 3, Message: "no"}
	nodeBytes := join(text(1, "n"), text(2, "c"))
	detailBytes := join(number(1, 3), text(2, "no"))
	tests := map[string]struct {
		msg  proto.Message
		want []byte
	}{
		"DiscoveryRequest": {
			&envoysds.DiscoveryRequest{
				VersionInfo: "v", Node: node, ResourceNames: []string{"a", "b"}, TypeUrl: "t", ResponseNonce: "7", ErrorDetail: detail,
			},
			join(text(1, "v"), message(2, nodeBytes), text(3, "a"), text(3, "b"), text(4, "t"), text(5, "7"), message(6, detailBytes)),
		},
		"DiscoveryResponse": {
			&envoysds.DiscoveryResponse{
				VersionInfo: "v", Resources: []*anypb.Any{{TypeUrl: "u", Value: []byte("x")}}, Canary: true, TypeUrl: "t", Nonce: "7",
			},
			join(text(1, "v"), message(2, text(1, "u"), text(2, "x")), number(3, 1), text(4, "t"), text(5, "7")),
		},
		"DeltaDiscoveryRequest": {
			&envoysds.DeltaDiscoveryRequest{
				Node: node, TypeUrl: "t", ResourceNamesSubscribe: []string{"a"}, ResourceNamesUnsubscribe: []string{"b"},
				InitialResourceVersions: map[string]string{"a": "1"}, ResponseNonce: "7", ErrorDetail: detail,
			},
			join(message(1, nodeBytes), text(2, "t"), text(3, "a"), text(4, "b"), message(5, text(1, "a"), text(2, "1")),
				text(6, "7"), message(7, detailBytes)),
		},
		"DeltaDiscoveryResponse": {
			&envoysds.DeltaDiscoveryResponse{
				SystemVersionInfo: "v",
				Resources:         []*envoysds.Resource{{Version: "1", Resource: &anypb.Any{TypeUrl: "u", Value: []byte("x")}, Name: "a"}},
				TypeUrl:           "t", Nonce: "7", RemovedResources: []string{"b"},
			},
			join(text(1, "v"), message(2, text(1, "1"), message(2, text(1, "u"), text(2, "x")), text(3, "a")),
				text(4, "t"), text(5, "7"), text(6, "b")),
		},
		"Secret with a key pair": {
			&envoysds.Secret{Name: "default", Type: &envoysds.Secret_TlsCertificate{
				TlsCertificate: &envoysds.TlsCertificate{CertificateChain: inline("chain"), PrivateKey: inline("key")},
			}},
			join(text(1, "default"), message(2, message(1, text(2, "chain")), message(2, text(2, "key")))),
		},
		"Secret with roots": {
			&envoysds.Secret{Name: "ROOTCA", Type: &envoysds.Secret_ValidationContext{
				ValidationContext: &envoysds.CertificateValidationContext{TrustedCa: inline("roots")},
			}},
			join(text(1, "ROOTCA"), message(4, message(1, text(2, "roots")))),
		},
		"DataSource with a file": {
			&envoysds.DataSource{Specifier: &envoysds.DataSource_Filename{Filename: "f"}}, text(1, "f"),
		},
		"DataSource with a string": {
			&envoysds.DataSource{Specifier: &envoysds.DataSource_InlineString{InlineString: "s"}}, text(3, "s"),
		},
	}
	for name, test := range tests {
		check(t, name, test.msg, string(test.want))
	}
}
