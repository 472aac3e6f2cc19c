package broker_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto"
	"crypto/x509"
	"encoding/base64"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// The codes that package workloadtest does not have.
const (
	notFound        = 5
	unauthenticated = 16
)

// The reasons in errors about references.
const (
	invalid     = "WORKLOAD_REFERENCE_INVALID"
	unknown     = "WORKLOAD_NOT_FOUND"
	notEntitled = "WORKLOAD_NOT_ENTITLED"
)

var methods = []string{svids, "SubscribeToX509Bundles", "FetchJWTSVID", "SubscribeToJWTBundles"}

// first is the first response of a call, or its code and the reason in its details.
func (h *hub) first(c *http.Client, method, text string) (response []byte, code int, reason string) {
	h.t.Helper()
	ctx, end := context.WithCancel(h.t.Context())
	defer end()
	r := workloadtest.Post(ctx, h.t, c, service+method, h.request(method, text), header, "true")
	if response = r.Receive(); response != nil {
		return response, workloadtest.OK, ""
	}
	code, reason = refused(r)
	return nil, code, reason
}

// A request has the header, once and exactly, and comes from a broker that the server knows. These errors have no
// reason, as those about references have.
func TestAdmission(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-2", "BRK-3", "BRK-6", "BRK-9", "BRK-10")
	h := newHub(t)
	h.anyone = true
	h.serve(memconn.Listen())
	h.add("shop", "web", "/web")
	good := []string{header, "true"}
	const reflection = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
	for name, test := range map[string]struct {
		broker, path string // of each method if path is ""
		headers      []string
		code         int
	}{
		"good":                     {"/broker", "", good, workloadtest.OK},
		"no header":                {"/broker", "", nil, workloadtest.InvalidArgument},
		"twice":                    {"/broker", "", append(good, good...), workloadtest.InvalidArgument},
		"in upper case":            {"/broker", "", []string{header, "TRUE"}, workloadtest.InvalidArgument},
		"of the Workload API":      {"/broker", "", []string{"Workload.spiffe.io", "true"}, workloadtest.InvalidArgument},
		"neither header nor ID":    {"", "", nil, workloadtest.InvalidArgument},
		"no certificate":           {"", "", good, unauthenticated},
		"no broker":                {"/web", "", good, workloadtest.PermissionDenied},
		"the Workload API":         {"/broker", workloadtest.Service + "FetchX509SVID", good, workloadtest.Unimplemented},
		"WIT in the Workload API":  {"/broker", workloadtest.Service + "FetchWITSVID", good, workloadtest.Unimplemented},
		"a name of the other API":  {"/broker", "/spiffe.broker.API/FetchX509SVID", good, workloadtest.Unimplemented},
		"validation":               {"/broker", "/spiffe.broker.API/ValidateJWTSVID", good, workloadtest.Unimplemented},
		"WIT":                      {"/broker", "/spiffe.broker.API/SubscribeToWITSVID", good, workloadtest.Unimplemented},
		"reflection without an ID": {"", reflection, good, unauthenticated},
		"reflection for no broker": {"/web", reflection, good, workloadtest.PermissionDenied},
	} {
		for _, method := range methods {
			ctx, end := context.WithCancel(t.Context())
			path := cmp.Or(test.path, "/spiffe.broker.API/"+method)
			text := named("web")
			if method == "FetchJWTSVID" {
				text += ` audience: "db"`
			}
			request := h.request(method, text)
			r := workloadtest.Post(ctx, t, h.raw(test.broker), "https://broker"+path, request, test.headers...)
			response := r.Receive()
			if test.code == workloadtest.OK {
				assert.NotNil(t, response, "%s: %s", name, path)
			} else if assert.Nil(t, response, "%s: %s", name, path) {
				code, reason := refused(r)
				assert.Equal(t, test.code, code, "%s: %s", name, path)
				assert.Empty(t, reason, "%s: %s", name, path)
			}
			end()
		}
	}
	assert.Len(t, h.taken(), len(methods), "what is not admitted is not looked up")
}

// The server speaks mutual TLS on Unix sockets and TCP. A client without a certificate, or one that the policy for TLS
// does not allow, does not get through the handshake.
func TestMutualTLS(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-1", "BRK-3")
	for _, l := range []net.Listener{nil, must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)} {
		h := newHub(t)
		h.allow = spiffe.AllowIDs(h.ca.SVID("/broker").ID())
		h.serve(l)
		h.add("shop", "web", "/web")
		assert.Equal(t, "/web", pathOf(ready(t, h.client(h.ca.Source("/broker")), pod("web"))))
		for _, path := range []string{"", "/other"} {
			r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodPost, service+svids, nil))(t)
			resp, err := h.raw(path).Do(r)
			if err == nil {
				_ = resp.Body.Close()
			}
			require.Error(t, err, path)
		}
		plain := must.Get(h.dial(t.Context(), "", ""))(t)
		must.Get(io.WriteString(plain, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))(t)
		answer, _ := io.ReadAll(plain)
		assert.NotContains(t, string(answer), "grpc", "without TLS")
		assert.Len(t, h.taken(), 1)
	}
}

// Responses are those of the Workload API: the whole state at once, and again after each change.
func TestStreams(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-11", "BRK-13", "BRK-22", "AMB-26")
	h := newHub(t)
	h.serve(memconn.Listen())
	bank := workloadtest.NewDomain(t, "bank.example")
	h.ca.Federate(bank.Bundle())
	h.agent.Renew()
	h.agent.crls = [][]byte{{0x30, 0x00}}
	web := h.add("shop", "web", "/web", "/admin")
	c := h.raw("/broker")
	other := h.call(h.raw("/other"), svids, named("web"))
	require.NotNil(t, other.Receive())

	open := h.call(c, svids, named("web"))
	check := func() {
		t.Helper()
		var m wire.X509SVIDResponse
		require.NoError(t, proto.Unmarshal(open.Receive(), &m))
		require.Len(t, m.GetSvids(), 2)
		for i, path := range []string{"/web", "/admin"} { // in order, as the first is the default one
			one, want := m.GetSvids()[i], must.Get(web.ids[i].Provider.(*spiffetest.Source).SVID())(t)
			assert.Equal(t, want.ID().String(), one.GetSpiffeId())
			assert.Equal(t, path, one.GetHint())
			assert.Equal(t, want.Leaf().Raw, must.Get(x509.ParseCertificates(one.GetX509Svid()))(t)[0].Raw)
			key := must.Get(x509.ParsePKCS8PrivateKey(one.GetX509SvidKey()))(t).(crypto.Signer)
			assert.Equal(t, want.Leaf().PublicKey, key.Public())
			assert.Equal(t, h.ca.Roots(), one.GetBundle())
		}
		assert.Equal(t, h.agent.crls, m.GetCrl())
		assert.Equal(t, map[string][]byte{bank.Key(): bank.Roots()}, m.GetFederatedBundles())
	}
	check()
	web.ids[1].Provider.(*spiffetest.Source).Renew()
	check()
	x509s, jwts := h.call(c, "SubscribeToX509Bundles", named("web")), h.call(c, "SubscribeToJWTBundles", named("web"))
	bundles := func() {
		t.Helper()
		var m wire.X509BundlesResponse
		require.NoError(t, proto.Unmarshal(x509s.Receive(), &m))
		assert.Equal(t, h.agent.crls, m.GetCrl())
		assert.Equal(t, map[string][]byte{bank.Key(): bank.Roots(), h.ca.Key(): h.ca.Roots()}, m.GetBundles())
	}
	bundles()
	var keys wire.JWTBundlesResponse
	require.NoError(t, proto.Unmarshal(jwts.Receive(), &keys))
	assert.Contains(t, string(keys.GetBundles()[h.ca.Key()]), `"kid"`)
	h.ca.Rotate()
	h.agent.Renew()
	check()
	bundles()

	const admin = ` audience: ["db", "queue"] spiffe_id: "spiffe://example.org/admin"`
	response, _, _ := h.first(c, "FetchJWTSVID", named("web")+admin)
	var tokens wire.JWTSVIDResponse
	require.NoError(t, proto.Unmarshal(response, &tokens))
	require.Len(t, tokens.GetSvids(), 1)
	assert.Equal(t, "/admin", tokens.GetSvids()[0].GetHint())
	claims := must.Get(base64.RawURLEncoding.DecodeString(strings.Split(tokens.GetSvids()[0].GetSvid(), ".")[1]))(t)
	assert.Contains(t, string(claims), `"aud":["db","queue"]`)
	response, _, _ = h.first(c, "FetchJWTSVID", named("web")+` audience: "db"`)
	require.NoError(t, proto.Unmarshal(response, &tokens))
	assert.Len(t, tokens.GetSvids(), 2, "of all identities")
	for _, none := range []string{"", ` spiffe_id: "spiffe://example.org/web"`, ` audience: "db" spiffe_id: "web"`} {
		_, code, _ := h.first(c, "FetchJWTSVID", named("web")+none)
		assert.Equal(t, workloadtest.InvalidArgument, code, none)
	}

	h.remove("web") // the object ends, and with it all its streams, of all brokers
	for _, r := range []*workloadtest.RPC{open, x509s, jwts, other} {
		code, reason := refused(r)
		assert.Equal(t, notFound, code)
		assert.Equal(t, unknown, reason)
	}
}

// A broker has so many streams over all its connections, and another one has as many.
func TestLimitOfBroker(t *testing.T) {
	t.Parallel()
	h := newHub(t, func(o *workloadserver.Options) { o.MaxPeerStreams = 5 })
	h.serve(memconn.Listen())
	h.add("shop", "web", "/web")
	for _, path := range []string{"/broker", "/other"} {
		var last *workloadtest.RPC
		clients := []*http.Client{h.raw(path), h.raw(path), h.raw(path)}
		for i := range 5 {
			last = h.call(clients[i%2], svids, named("web"))
			require.NotNil(t, last.Receive())
		}
		for _, c := range clients {
			_, code, reason := h.first(c, svids, named("web"))
			assert.Equal(t, workloadtest.ResourceExhausted, code)
			assert.Empty(t, reason)
		}
		_ = last.Response.Body.Close()
		require.Eventually(t, func() bool {
			_, code, _ := h.first(clients[2], svids, named("web"))
			return code == workloadtest.OK
		}, patient, time.Millisecond, "what ends makes room")
	}
}

// Thousands of references of one broker cost a server what its limit says, and do not harm another broker.
func TestManyReferences(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	h := newHub(t)
	h.serve(memconn.Listen())
	h.add("shop", "web", "/web")
	body := h.request(svids, named("web"))
	each := rounds.Of(125)
	var kept, refusals atomic.Int32
	var wg sync.WaitGroup
	for range 20 {
		c := h.raw("/broker")
		wg.Go(func() {
			for range each {
				r := workloadtest.Post(t.Context(), t, c, service+svids, body, header, "true")
				if r.Receive() != nil {
					kept.Add(1)
				} else if code, _ := refused(r); assert.Equal(t, workloadtest.ResourceExhausted, code) {
					refusals.Add(1)
				}
			}
		})
	}
	wg.Wait()
	assert.EqualValues(t, 1000, kept.Load())
	assert.EqualValues(t, 20*each-1000, refusals.Load())
	assert.Len(t, h.taken(), 1000, "the others are not looked up")
	_, code, _ := h.first(h.raw("/other"), svids, named("web"))
	assert.Equal(t, workloadtest.OK, code)
}

// Tools learn from the server what it serves, if they call as a broker.
func TestReflection(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-27", "BRK-9", "BRK-10")
	h := newHub(t)
	h.serve(memconn.Listen())
	c := h.raw("/broker")
	for _, version := range []string{"v1", "v1alpha"} {
		name := "grpc.reflection." + version + ".ServerReflection"
		var body []byte
		for _, ask := range []struct {
			field protowire.Number
			text  string
		}{
			{7, ""}, {4, "spiffe.broker.API"}, {4, "spiffe.broker.API.FetchJWTSVID"},
			{4, "spiffe.broker.WorkloadPIDReference"}, {4, "google.protobuf.Any"}, {3, "brokerapi.proto"},
			{4, "SpiffeWorkloadAPI"},
		} {
			tag := protowire.AppendTag(nil, ask.field, protowire.BytesType)
			body = append(body, workloadtest.Framed(protowire.AppendString(tag, ask.text))...)
		}
		r := workloadtest.Post(t.Context(), t, c, "https://broker/"+name+"/ServerReflectionInfo", body, header, "true")
		next := func(field protowire.Number) map[protowire.Number][][]byte {
			return workloadtest.Fields(t, bytes.Join(workloadtest.Fields(t, r.Receive())[field], nil))
		}
		var services []string
		for _, s := range next(6)[1] {
			services = append(services, string(workloadtest.Fields(t, s)[1][0]))
		}
		assert.Equal(t, []string{"spiffe.broker.API", name}, services)
		for range 3 {
			files := next(4)[1]
			require.Len(t, files, 2)
			var f descriptorpb.FileDescriptorProto
			require.NoError(t, proto.Unmarshal(files[0], &f))
			assert.Equal(t, "spiffe.broker", f.GetPackage())
			assert.Len(t, f.GetService()[0].GetMethod(), len(methods))
			for _, m := range f.GetService()[0].GetMethod() {
				assert.Contains(t, methods, m.GetName())
				assert.Equal(t, m.GetName() != "FetchJWTSVID", m.GetServerStreaming(), m.GetName())
			}
		}
		assert.Len(t, next(4)[1], 1)
		assert.Len(t, next(4)[1], 2)
		assert.Equal(t, []byte{notFound}, next(7)[1][0], "the Workload API is not served here")
		code, _ := r.Status()
		assert.Equal(t, workloadtest.OK, code)
	}
}

// A client whose certificate ends is not authenticated any more, on open streams too.
func TestExpiredClient(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		conformance.Covers(t, "BRK-3")
		h := newHub(t)
		stop := h.serve(memconn.Listen())
		h.add("shop", "web", "/web")
		c := h.raw("/broker")
		begin := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Hour)
		defer cancel()
		r := workloadtest.Post(ctx, t, c, service+svids, h.request(svids, named("web")), header, "true")
		require.NotNil(t, r.Receive())
		code, reason := refused(r)
		assert.Equal(t, unauthenticated, code)
		assert.Empty(t, reason)
		assert.InDelta(t, time.Hour, time.Since(begin), float64(time.Minute))
		for range 20 { // as a response may get lost
			_, code, _ = h.first(c, svids, named("web"))
			require.Equal(t, unauthenticated, code, "nor for another call on the connection")
		}
		c.CloseIdleConnections()
		require.NoError(t, stop())
	})
}
