package sds

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// requestsJSON are bodies of REST requests. With those that begin with "!" we are stricter than protojson,
// or looser in what we do not read.
var requestsJSON = []string{
	`{}`, ` { } `, `{"resource_names":["a","b",""]}`, `{"resourceNames":["a"],"versionInfo":"v","typeUrl":"t","node":{"id":"n","cluster":"c"}}`,
	`{"version_info":"v","type_url":"t"}`, `{"version_info":null,"resource_names":null,"node":null,"type_url":null}`, `{"node":{"id":null}}`,
	`{"node":{"id":"größer\u00e9\n","metadata":{"a":[1,{"b":null}]},"user_agent_build_version":{"version":{}}},"x":[true,{"y":1e400}]}`,
	`{"resource_names":[]}`, `{"RESOURCE_NAMES":["a"]}`, `{"resource_names":["\ud83d\ude00"]}`,
	``, `null`, `[]`, `"x"`, `{`, `{}{}`, `{"resource_names":"a"}`, `{"resource_names":[1]}`, `{"resource_names":[null]}`, `{"resource_names":[["a"]]}`,
	`{"resource_names":{}}`, `{"version_info":1}`, `{"version_info":{}}`, `{"type_url":["t"]}`, `{"node":"n"}`, `{"node":[]}`, `{"node":{"id":1}}`, `{"node":{"id":["n"]}}`,
	`{"resource_names":["a"],"resource_names":["b"]}`, `{"resource_names":["a"],"resourceNames":["b"]}`, `{"type_url":"t","typeUrl":"t"}`,
	`{"node":{"id":"a"},"node":{"id":"b"}}`, `{"node":{"id":"a","id":"b"}}`, "{\"version_info\":\"\xff\"}", `{"version_info":"\ud83d"}`,
	`{"resource_names":["a"],}`, `{'resource_names':["a"]}`, `{"resource_names":["a"]} x`, `{"x":}`,
	`!{"x":1,"x":2}`, `!{"error_detail":"not an object"}`, `!{"node":{"cluster":1}}`,
}

// The JSON of a request is read as protojson does.
func TestDecodeJSON(t *testing.T) {
	t.Parallel()
	for _, in := range requestsJSON {
		body, differs := strings.CutPrefix(in, "!")
		var m envoysds.DiscoveryRequest
		want := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal([]byte(body), &m)
		got, err := decodeJSON([]byte(body), 10)
		if differs {
			assert.NotEqual(t, want == nil, err == nil, in)
			continue
		}
		if want != nil {
			assert.Equal(t, grpchttp.InvalidArgument, codeOf(t, err), "%s: %v", in, want)
			continue
		}
		require.NoError(t, err, in)
		assert.Equal(t, m.GetNode().GetId(), got.node, in)
		assert.Equal(t, m.GetVersionInfo(), got.version, in)
		assert.Equal(t, m.GetTypeUrl(), got.typeURL, in)
		assert.Equal(t, m.GetResourceNames(), got.names, in)
	}
	for _, in := range []string{`{"resource_names":["` + strings.Repeat("x", maxName+1) + `"]}`, `{"resource_names":["1","2","3"]}`} {
		_, err := decodeJSON([]byte(in), 2)
		assert.Equal(t, grpchttp.ResourceExhausted, codeOf(t, err))
		_, err = decodeJSON([]byte(in+"x"), 2)
		assert.Equal(t, grpchttp.InvalidArgument, codeOf(t, err))
	}
}

// FuzzDecodeJSON checks that what we take protojson takes, too, unless it looks at more of it.
func FuzzDecodeJSON(f *testing.F) {
	for _, in := range requestsJSON {
		f.Add([]byte(strings.TrimPrefix(in, "!")))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		got, err := decodeJSON(in, 1000)
		var m envoysds.DiscoveryRequest
		if err != nil || (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(in, &m) != nil {
			return
		}
		require.Equal(t, m.GetNode().GetId(), got.node)
		require.Equal(t, m.GetVersionInfo(), got.version)
		require.Equal(t, m.GetTypeUrl(), got.typeURL)
		require.Equal(t, len(m.GetResourceNames()), len(got.names))
	})
}

// The JSON of a response is what protojson reads as the same message.
func TestEncodeJSON(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	a, err := newEntry("<default> & größer", pair(t, ca, "default"), nil)
	require.NoError(t, err)
	b, err := newEntry("ROOTCA", roots(t, ca, "ROOTCA"), nil)
	require.NoError(t, err)
	r := &response{holding: holding{version: a.version.xor(b.version)}, entries: []*entry{a, b}}
	var want, got envoysds.DiscoveryResponse
	require.NoError(t, proto.Unmarshal(r.encode(""), &want))
	text, err := r.encodeJSON()
	require.NoError(t, err)
	require.NoError(t, protojson.UnmarshalOptions{Resolver: secretResolver{}}.Unmarshal(text, &got))
	assert.True(t, proto.Equal(&want, &got), "%s", text)
}

// secretResolver knows our Secret by the published type URL, and nothing else.
type secretResolver struct{}

func (secretResolver) FindMessageByURL(url string) (protoreflect.MessageType, error) {
	if url == typeURL {
		return (*envoysds.Secret)(nil).ProtoReflect().Type(), nil
	}
	return nil, protoregistry.NotFound
}

func (secretResolver) FindMessageByName(protoreflect.FullName) (protoreflect.MessageType, error) {
	return nil, protoregistry.NotFound
}

func (secretResolver) FindExtensionByName(protoreflect.FullName) (protoreflect.ExtensionType, error) {
	return nil, protoregistry.NotFound
}

func (secretResolver) FindExtensionByNumber(protoreflect.FullName, protoreflect.FieldNumber) (protoreflect.ExtensionType, error) {
	return nil, protoregistry.NotFound
}
