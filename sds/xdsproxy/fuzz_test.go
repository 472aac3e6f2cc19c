package xdsproxy_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/sds/xdsproxy"
)

// What is read of a request is what generated code reads: so no request for secrets passes for another, or the reverse.
func FuzzRequest(f *testing.F) {
	for _, isDelta := range []bool{false, true} {
		f.Add([]byte(nil), isDelta)
		f.Add([]byte("\xff"), isDelta)
		f.Add(ask(f, secretType, "a"), isDelta)
		f.Add(append(askDelta(f, secretType, "a"), askDelta(f, clusters)...), isDelta)
		f.Add(encode(f, &envoysds.DiscoveryRequest{Node: &envoysds.Node{Id: "a", Cluster: "b"}, TypeUrl: secretType}), isDelta)
		f.Add([]byte("\x12\x03\x0a\x01a\x0a\x03\x0a\x01a\x22\x01\xff"), isDelta)
	}
	type request interface {
		proto.Message
		GetTypeUrl() string
		GetNode() *envoysds.Node
	}
	f.Fuzz(func(t *testing.T, msg []byte, isDelta bool) {
		secret, node, err := xdsproxy.Read(msg, isDelta)
		of := func() request {
			if isDelta {
				return new(envoysds.DeltaDiscoveryRequest)
			}
			return new(envoysds.DiscoveryRequest)
		}
		want, introduced := of(), of()
		if proto.Unmarshal(msg, want) != nil {
			return // we need not refuse all that a server does
		}
		require.NoError(t, err)
		require.Equal(t, want.GetTypeUrl() == secretType, secret)
		require.NoError(t, proto.Unmarshal(node, introduced))
		require.True(t, proto.Equal(want.GetNode(), introduced.GetNode()))
	})
}
