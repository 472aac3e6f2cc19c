package sds

import (
	"crypto/x509"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func pair(t testing.TB, ca *spiffetest.CA, name string, edits ...func(*x509.Certificate)) *pki.Secret {
	t.Helper()
	return must.Get(pki.NewKeyPairSecret(name, ca.SVID("/"+name, edits...)))(t)
}

func inlined(pem []byte) *envoysds.DataSource {
	return &envoysds.DataSource{Specifier: &envoysds.DataSource_InlineBytes{InlineBytes: pem}}
}

func roots(t testing.TB, ca *spiffetest.CA, name string) *pki.Secret {
	t.Helper()
	return must.Get(pki.NewTrustSecret(name, ca.Bundle()))(t)
}

// What is put together by hand is what the generated code makes of the same messages.
func TestResponseBytes(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-8.6-1", "IST-8.6-2")
	ca := spiffetest.NewCA(t, "example.org")
	web, trust := pair(t, ca, "default"), roots(t, ca, "ROOTCA")
	chain, key, _ := web.KeyPair()
	rootsPEM, _ := trust.Roots()
	a := must.Get(newEntry("default", web, nil))(t)
	b := must.Get(newEntry("ROOTCA", trust, nil))(t)

	pack := func(s *envoysds.Secret) *anypb.Any {
		value := must.Get(proto.Marshal(s))(t)
		return &anypb.Any{TypeUrl: "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret", Value: value}
	}
	packedA := pack(&envoysds.Secret{Name: "default", Type: &envoysds.Secret_TlsCertificate{TlsCertificate: &envoysds.TlsCertificate{
		CertificateChain: inlined(chain), PrivateKey: inlined(key),
	}}})
	packedB := pack(&envoysds.Secret{Name: "ROOTCA", Type: &envoysds.Secret_ValidationContext{
		ValidationContext: &envoysds.CertificateValidationContext{TrustedCa: inlined(rootsPEM)},
	}})
	v := a.version.xor(b.version)

	got := (&response{version: v, nonce: "7", entries: []*entry{a, b}}).encode()
	want := must.Get(proto.Marshal(&envoysds.DiscoveryResponse{
		VersionInfo: v.String(), Resources: []*anypb.Any{packedA, packedB}, TypeUrl: typeURL, Nonce: "7",
	}))(t)
	assert.Equal(t, want, got)

	got = (&response{delta: true, version: v, nonce: "8", entries: []*entry{a, b}, removed: []string{"x", "y"}}).encode()
	want = must.Get(proto.Marshal(&envoysds.DeltaDiscoveryResponse{
		SystemVersionInfo: v.String(),
		Resources: []*envoysds.Resource{
			{Version: a.version.String(), Resource: packedA, Name: "default"},
			{Version: b.version.String(), Resource: packedB, Name: "ROOTCA"},
		},
		TypeUrl: typeURL, Nonce: "8", RemovedResources: []string{"x", "y"},
	}))(t)
	assert.Equal(t, want, got)
}

func TestEntryVersion(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	svid := ca.SVID("/web")
	of := func(name string, s *pki.Secret) string {
		return must.Get(newEntry(name, s, nil))(t).version.String()
	}
	secret := func(name string) *pki.Secret {
		return must.Get(pki.NewKeyPairSecret(name, svid))(t)
	}
	v := of("default", secret("default"))
	assert.Len(t, v, 32)
	assert.Equal(t, v, of("default", secret("default")), "the same content, encoded again")
	assert.NotEqual(t, v, of("other", secret("other")), "another name")
	assert.NotEqual(t, v, of("default", pair(t, ca, "default")), "another certificate")
	before := of("ROOTCA", roots(t, ca, "ROOTCA"))
	ca.Rotate()
	assert.NotEqual(t, before, of("ROOTCA", roots(t, ca, "ROOTCA")))

	assert.Error(t, must.Err(newEntry("x", nil, nil)))
	assert.Error(t, must.Err(newEntry("\xff", secret("default"), nil)))
}

// An entry holds a key, and has no verb that shows it.
func TestEntryDoesNotPrint(t *testing.T) {
	t.Parallel()
	e := must.Get(newEntry("default", pair(t, spiffetest.NewCA(t, "example.org"), "default"), nil))(t)
	want := "default@" + e.version.String()
	for _, verb := range []string{"%v", "%+v", "%#v", "%s"} {
		got := fmt.Sprintf(verb, e)
		assert.Contains(t, got, want)
		assert.Less(t, len(got), 100)
	}
	assert.Equal(t, want, e.LogValue().String())
}

func TestDecode(t *testing.T) {
	t.Parallel()
	marshal := func(m proto.Message) []byte {
		return must.Get(proto.Marshal(m))(t)
	}
	node := protowire.AppendBytes(protowire.AppendTag(marshal(&envoysds.Node{Id: "n", Cluster: "c"}), 3, protowire.BytesType), make([]byte, 5000))
	sotw := marshal(&envoysds.DiscoveryRequest{
		VersionInfo: "v", ResourceNames: []string{"a", "", "a"}, TypeUrl: "t", ResponseNonce: "7", ErrorDetail: &envoysds.Status{Code: 3, Message: "no"},
	})
	sotw = protowire.AppendBytes(protowire.AppendTag(sotw, 2, protowire.BytesType), node)
	sotw = protowire.AppendBytes(protowire.AppendTag(sotw, 7, protowire.BytesType), []byte("resource_locators"))
	got := must.Get(decode(sotw, false, 3))(t)
	assert.Equal(t, &request{node: "n", names: []string{"a", "", "a"}, typeURL: "t", nonce: "7", rejected: true, reason: "no"}, got)

	delta := marshal(&envoysds.DeltaDiscoveryRequest{
		Node: &envoysds.Node{Id: "n"}, TypeUrl: "t", ResourceNamesSubscribe: []string{"a"}, ResourceNamesUnsubscribe: []string{"b"},
		InitialResourceVersions: map[string]string{"a": "1", "c": "2"}, ResponseNonce: "7", ErrorDetail: &envoysds.Status{},
	})
	got = must.Get(decode(delta, true, 3))(t)
	assert.Equal(t, &request{
		node: "n", names: []string{"a"}, drop: []string{"b"}, have: map[string]string{"a": "1", "c": "2"},
		typeURL: "t", nonce: "7", rejected: true,
	}, got)

	long := strings.Repeat("x", maxName+1)
	twice := []string{"1", "2", "3", "4", "5", "6", "7"}
	for name, test := range map[string]struct {
		delta bool
		in    []byte
	}{
		"names":       {false, marshal(&envoysds.DiscoveryRequest{ResourceNames: []string{"1", "2", "3", "4"}})},
		"name":        {false, marshal(&envoysds.DiscoveryRequest{ResourceNames: []string{long}})},
		"delta names": {true, marshal(&envoysds.DeltaDiscoveryRequest{ResourceNamesSubscribe: twice})},
		"delta drops": {true, marshal(&envoysds.DeltaDiscoveryRequest{ResourceNamesUnsubscribe: twice})},
		"versions":    {true, marshal(&envoysds.DeltaDiscoveryRequest{InitialResourceVersions: map[string]string{"1": "", "2": "", "3": "", "4": "", "5": "", "6": "", "7": ""}})},
		"version":     {true, marshal(&envoysds.DeltaDiscoveryRequest{InitialResourceVersions: map[string]string{long: ""}})},
	} {
		_, err := decode(test.in, test.delta, 3)
		assert.Equal(t, grpchttp.ResourceExhausted, codeOf(t, err), name)
	}
	for name, in := range map[string][]byte{
		"cut short": sotw[:len(sotw)-1], "not UTF-8": {3<<3 | 2, 1, 0xff}, "bad tag": {0}, "bad varint": {1 << 3, 0x80}, "bad node": {2<<3 | 2, 1, 0xff},
	} {
		_, err := decode(in, false, 3)
		assert.Equal(t, grpchttp.InvalidArgument, codeOf(t, err), name)
	}
}

// The worst input of 1 MiB costs little memory: names of one byte, up to the limit. For the time see
// BenchmarkDecodeWorst.
func TestDecodeIsBounded(t *testing.T) {
	in := worstRequest()
	const runs = 20
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range runs {
		require.Error(t, must.Err(decode(in, false, maxNames)))
	}
	runtime.ReadMemStats(&after)
	assert.Less(t, (after.TotalAlloc-before.TotalAlloc)/runs, uint64(256<<10))
}

func worstRequest() []byte {
	var in []byte
	for len(in) < maxMessage-3 {
		in = append(in, 3<<3|2, 1, 'x')
	}
	return in
}

// FuzzDecodeRequest compares our reading of both requests with the generated code's.
func FuzzDecodeRequest(f *testing.F) {
	for _, m := range []proto.Message{
		&envoysds.DiscoveryRequest{Node: &envoysds.Node{Id: "n"}, ResourceNames: []string{"a", "b"}, ResponseNonce: "1", TypeUrl: "t"},
		&envoysds.DiscoveryRequest{VersionInfo: "v", ErrorDetail: &envoysds.Status{Code: 3, Message: "m"}},
		&envoysds.DeltaDiscoveryRequest{Node: &envoysds.Node{Id: "n"}, ResourceNamesSubscribe: []string{"a"}, ResourceNamesUnsubscribe: []string{"b"}},
		&envoysds.DeltaDiscoveryRequest{InitialResourceVersions: map[string]string{"a": "1"}, ResponseNonce: "1"},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	const limit = 1 << 20 // out of reach
	tooLarge := func(err error) bool {
		e, ok := errors.AsType[*grpchttp.Error](err)
		return ok && e.Code == grpchttp.ResourceExhausted
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var sotw envoysds.DiscoveryRequest
		a, err := decode(data, false, limit)
		if proto.Unmarshal(data, &sotw) == nil && !tooLarge(err) {
			require.NoError(t, err)
			assert.Equal(t, &request{
				node: sotw.GetNode().GetId(), names: sotw.GetResourceNames(), typeURL: sotw.GetTypeUrl(),
				nonce: sotw.GetResponseNonce(), rejected: sotw.ErrorDetail != nil, reason: sotw.GetErrorDetail().GetMessage(),
			}, a)
		}
		var delta envoysds.DeltaDiscoveryRequest
		b, err := decode(data, true, limit)
		if proto.Unmarshal(data, &delta) == nil && !tooLarge(err) {
			require.NoError(t, err)
			have := delta.GetInitialResourceVersions()
			if len(have) == 0 {
				have = nil
			}
			assert.Equal(t, &request{
				node: delta.GetNode().GetId(), names: delta.GetResourceNamesSubscribe(), drop: delta.GetResourceNamesUnsubscribe(),
				have: have, typeURL: delta.GetTypeUrl(), nonce: delta.GetResponseNonce(),
				rejected: delta.ErrorDetail != nil, reason: delta.GetErrorDetail().GetMessage(),
			}, b)
		}
	})
}
