package broker_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
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
	"github.com/svidkit/svidkit/spiffe/exp/broker"
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

// A reference has one known type and is whole: what is malformed, or names nothing for certain, is refused before the
// server looks for it.
func TestReferences(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-12", "BRK-14", "BRK-15", "BRK-16", "BRK-17", "BRK-20")
	h := newHub(t)
	h.serve(memconn.Listen())
	c := h.raw("/broker")
	const uid = "0fa1b2c3-4d5e-6f70-8192-a3b4c5d6e7f8"
	const pods = `type { plural: "pods" group: "core" } `
	object := func(fields string) string { return reference("KubernetesObjectReference", fields) }
	packed := func(url, value string) string {
		return fmt.Sprintf("reference { reference { type_url: %q value: %q } }", url, value)
	}
	const ours = "type.googleapis.com/spiffe.broker."
	for name, text := range map[string]string{
		"none":                      "",
		"empty":                     "reference {}",
		"an empty Any":              "reference { reference {} }",
		"a value without a type":    packed("", "\x08\x01"),
		"another type":              packed(ours+"VendorReference", "\x08\x01"),
		"a type in lower case":      packed(ours+"workloadpidreference", "\x08\x01"),
		"another prefix":            packed("example.com/spiffe.broker.WorkloadPIDReference", "\x08\x01"),
		"no prefix":                 packed("spiffe.broker.WorkloadPIDReference", "\x08\x01"),
		"no PID":                    process(0),
		"a negative PID":            process(-1),
		"a PID of 2^31":             packed(ours+"WorkloadPIDReference", "\x08\x80\x80\x80\x80\x08"),
		"a PID of 2^32":             packed(ours+"WorkloadPIDReference", "\x08\x80\x80\x80\x80\x10"),
		"a PID as text":             packed(ours+"WorkloadPIDReference", "\x0a\x011"),
		"a malformed PID":           packed(ours+"WorkloadPIDReference", "\x08"),
		"a malformed object":        packed(ours+"KubernetesObjectReference", "\x0a\x09\x0a"),
		"an object that is empty":   object(""),
		"no type":                   object(`key { namespace: "shop" name: "web" }`),
		"no plural":                 object(`type { group: "core" } key { name: "web" }`),
		"no group":                  object(`type { plural: "pods" } key { name: "web" }`),
		"neither key nor UID":       object(pods),
		"a key without a name":      object(pods + `key { namespace: "shop" }`),
		"the same beside a UID":     object(pods + `key { namespace: "shop" } uid: "` + uid + `"`),
		"an empty key beside a UID": object(pods + `key {} uid: "` + uid + `"`),
		"a UID in upper case":       object(pods + `uid: "` + strings.ToUpper(uid) + `"`),
		"a UID that is none":        object(pods + `uid: "web"`),
		"a long UID":                object(pods + `uid: "` + uid + `0"`),
		"a path as name":            object(pods + `key { namespace: "shop" name: "../../secrets/ca" }`),
		"a path as namespace":       object(pods + `key { namespace: "../kube-system" name: "web" }`),
		"a path as plural":          object(`type { plural: "pods/exec" group: "core" } key { name: "web" }`),
		"a path as group":           object(`type { plural: "pods" group: "../core" } key { name: "web" }`),
		"a query as name":           object(pods + `key { name: "web?watch=1" }`),
		"a name in upper case":      object(pods + `key { name: "Web" }`),
		"a long name":               object(pods + `key { name: "` + strings.Repeat("a", 254) + `" }`),
		"a name with a zero byte":   object(pods + `key { name: "web\x00" }`),
		"a name that ends in a dot": object(pods + `key { name: "web." }`),
	} {
		for _, method := range methods {
			_, code, reason := h.first(c, method, text)
			assert.Equal(t, workloadtest.InvalidArgument, code, "%s: %s", name, method)
			assert.Equal(t, invalid, reason, "%s: %s", name, method)
		}
	}
	for _, body := range []string{"\x0a", "\x0a\x02\x0a", "\x08\x01", "\x0a\x03\x0a\x01\xff", "\xff"} {
		r := workloadtest.Post(t.Context(), t, c, service+svids, workloadtest.Framed([]byte(body)), header, "true")
		code, reason := refused(r)
		assert.Equal(t, workloadtest.InvalidArgument, code, "%x", body)
		assert.Equal(t, invalid, reason, "%x", body)
	}
	assert.Empty(t, h.taken())

	for text, want := range map[string]broker.Reference{
		process(4711): {PID: 4711},
		// what is newer is ignored, and the upper bits of a number, as generated code does
		packed(ours+"WorkloadPIDReference", "\x12\x01x\x08\x85\x80\x80\x80\x10"): {PID: 5},
		named("web"):                        pod("web"),
		object(pods + `uid: "` + uid + `"`): {Object: broker.Object{Plural: "pods", Group: "core", UID: uid}},
		object(`type { plural: "deployments" group: "apps" } key { namespace: "shop" name: "web" } uid: "` + uid + `"`): {
			Object: broker.Object{Plural: "deployments", Group: "apps", Namespace: "shop", Name: "web", UID: uid}},
		object(`type { plural: "nodes" group: "core" } key { name: "ip-10-0-1-42.ec2.internal" }`): {
			Object: broker.Object{Plural: "nodes", Group: "core", Name: "ip-10-0-1-42.ec2.internal"}},
	} {
		h.taken()
		_, code, reason := h.first(c, svids, text)
		if want.PID == 0 {
			assert.Equal(t, notFound, code, text)
			assert.Equal(t, unknown, reason, text)
		} else { // in memory there are no processes
			assert.Equal(t, workloadtest.InvalidArgument, code, text)
			assert.Equal(t, invalid, reason, text)
		}
		assert.Equal(t, []broker.Reference{want}, h.taken(), text)
	}
}

// What the server says of a reference is up to it, and a failure of its own is for trying again.
func TestResolve(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-16", "BRK-19", "BRK-20")
	h := newHub(t)
	h.serve(memconn.Listen())
	h.add("shop", "web") // which has no identity
	c := h.raw("/broker")
	for _, test := range []struct {
		err    error
		code   int
		reason string
	}{
		{nil, workloadtest.PermissionDenied, notEntitled},
		{fs.ErrNotExist, notFound, unknown},
		{fmt.Errorf("another UID: %w", fs.ErrNotExist), notFound, unknown},
		{workloadserver.ErrDenied, workloadtest.PermissionDenied, notEntitled},
		{fmt.Errorf("no pods here: %w", fs.ErrInvalid), workloadtest.InvalidArgument, invalid},
		{errors.New("the API server is away"), workloadtest.Unavailable, ""},
	} {
		h.set(func() { h.failing = test.err })
		for _, method := range methods {
			text := named("web")
			if method == "FetchJWTSVID" {
				text += ` audience: "db"`
			}
			_, code, reason := h.first(c, method, text)
			assert.Equal(t, test.code, code, "%v: %s", test.err, method)
			assert.Equal(t, test.reason, reason, "%v: %s", test.err, method)
		}
	}
}

// Without a Resolve a handler knows processes only; a handler without a Grant, or without one to ask, is a mistake.
func TestNewHandler(t *testing.T) {
	t.Parallel()
	h := newHub(t)
	opts := broker.Options{Grant: h.grant}
	require.Error(t, must.Err(broker.NewHandler(h.workload, broker.Options{})))
	require.Error(t, must.Err(broker.NewHandler(nil, opts)))
	h.handler = must.Get(broker.NewHandler(h.workload, opts))(t)
	h.serve(memconn.Listen())
	h.add("shop", "web", "/web")
	_, code, reason := h.first(h.raw("/broker"), svids, named("web"))
	assert.Equal(t, workloadtest.InvalidArgument, code)
	assert.Equal(t, invalid, reason)
}

// A broker gets what its grant says, and the reason when it does not.
func TestGrants(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-6", "BRK-19", "BRK-20")
	h := newHub(t)
	h.serve(memconn.Listen())
	web := spiffe.AllowIDs(h.ca.SVID("/web").ID())
	h.add("shop", "web", "/web", "/admin")
	h.add("", "node", "/web")
	c := h.raw("/broker")
	byUID := reference("KubernetesObjectReference", `type { plural: "pods" group: "core" }
		uid: "0fa1b2c3-4d5e-6f70-8192-a3b4c5d6e7f8"`)
	h.objects["0fa1b2c3-4d5e-6f70-8192-a3b4c5d6e7f8"] = h.objects["web"]
	node := reference("KubernetesObjectReference", `type { plural: "nodes" group: "core" } key { name: "node" }`)
	set := reference("KubernetesObjectReference",
		`type { plural: "replicasets" group: "apps" } key { namespace: "shop" name: "web" }`)
	all := broker.Grant{
		References: []string{"pods", "nodes", "replicasets.apps"}, Namespaces: []string{"shop"}, Identities: web,
	}
	with := func(edit func(*broker.Grant)) broker.Grant {
		g := all
		edit(&g)
		return g
	}
	kinds := func(k ...string) broker.Grant { return with(func(g *broker.Grant) { g.References = k }) }
	namespaces := func(n ...string) broker.Grant { return with(func(g *broker.Grant) { g.Namespaces = n }) }
	identities := func(p spiffe.Policy) broker.Grant { return with(func(g *broker.Grant) { g.Identities = p }) }
	for name, test := range map[string]struct {
		grant     broker.Grant
		reference string
		want      string // "" for a refusal
		asked     bool   // whether the server looks for the workload
	}{
		"permitted":              {all, named("web"), "/web", true},
		"by UID":                 {all, byUID, "/web", true},
		"another kind":           {all, set, "/web", true},
		"the zero Grant":         {broker.Grant{}, named("web"), "", false},
		"kind":                   {kinds("pid", "pods.apps"), named("web"), "", false},
		"kind without its group": {kinds("replicasets"), set, "", false},
		"a PID":                  {all, process(1), "", false},
		"namespace":              {namespaces("bank"), named("web"), "", false},
		"namespace behind a UID": {namespaces("bank"), byUID, "", true},
		"no namespace":           {all, node, "", true},
		"no namespace, and *":    {namespaces("*"), node, "/web", true},
		"no identity":            {identities(spiffe.Policy{}), named("web"), "", true},
		"another identity":       {identities(spiffe.AllowIDs(h.ca.SVID("/db").ID())), named("web"), "", true},
	} {
		h.set(func() { h.grants["/broker"] = test.grant })
		h.taken()
		for _, method := range []string{svids, "SubscribeToX509Bundles", "SubscribeToJWTBundles"} {
			response, code, reason := h.first(c, method, test.reference)
			if test.want == "" {
				assert.Equal(t, workloadtest.PermissionDenied, code, "%s: %s", name, method)
				assert.Equal(t, notEntitled, reason, "%s: %s", name, method)
			} else if method == svids {
				var m wire.X509SVIDResponse
				require.NoError(t, proto.Unmarshal(response, &m), name)
				require.Len(t, m.GetSvids(), 1, name)
				assert.Equal(t, "spiffe://example.org"+test.want, m.GetSvids()[0].GetSpiffeId(), name)
			} else {
				assert.NotNil(t, response, "%s: %s", name, method)
			}
		}
		assert.Equal(t, test.asked, len(h.taken()) > 0, name)
	}
	h.set(func() { h.grants["/broker"] = with(func(g *broker.Grant) { g.Audiences = []string{"db", "queue"} }) })
	for audiences, ok := range map[string]bool{
		`"db"`: true, `"db", "queue"`: true, `"bank"`: false, `"db", "bank"`: false,
	} {
		for _, id := range []string{"", "/web", "/admin"} {
			text := fmt.Sprintf("%s audience: [%s]", named("web"), audiences)
			if id != "" {
				text += fmt.Sprintf(" spiffe_id: %q", "spiffe://example.org"+id)
			}
			response, code, reason := h.first(c, "FetchJWTSVID", text)
			if !ok || id == "/admin" {
				assert.Equal(t, workloadtest.PermissionDenied, code, text)
				assert.Equal(t, notEntitled, reason, text)
				continue
			}
			var m wire.JWTSVIDResponse
			require.NoError(t, proto.Unmarshal(response, &m), text)
			require.Len(t, m.GetSvids(), 1, text)
			assert.Equal(t, "spiffe://example.org/web", m.GetSvids()[0].GetSpiffeId(), text)
		}
	}
}

// What is taken from a grant ends the streams that need it, and no others; a broker that is none any more gets
// nothing.
func TestGrantTakenAway(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-6")
	for name, test := range map[string]struct {
		take func(*hub, *broker.Grant)
		next string // the reason of the next call
	}{
		"all":        {func(h *hub, _ *broker.Grant) { delete(h.grants, "/broker") }, ""},
		"references": {func(_ *hub, g *broker.Grant) { g.References = []string{"pid"} }, notEntitled},
		"namespaces": {func(_ *hub, g *broker.Grant) { g.Namespaces = []string{"bank"} }, notEntitled},
		"identities": {func(_ *hub, g *broker.Grant) { g.Identities = spiffe.Policy{} }, notEntitled},
	} {
		h := newHub(t)
		h.serve(memconn.Listen())
		h.add("shop", "web", "/web")
		c, other := h.raw("/broker"), h.call(h.raw("/other"), svids, named("web"))
		require.NotNil(t, other.Receive())
		var open []*workloadtest.RPC
		for _, method := range methods {
			if method != "FetchJWTSVID" {
				open = append(open, h.call(c, method, named("web")))
				require.NotNil(t, open[len(open)-1].Receive())
			}
		}
		h.set(func() {
			g := everything
			h.grants["/broker"] = g
			test.take(h, &g)
			if _, still := h.grants["/broker"]; still {
				h.grants["/broker"] = g
			}
		})
		for _, r := range open {
			require.Nil(t, r.Receive(), name)
			code, reason := refused(r)
			assert.Equal(t, workloadtest.PermissionDenied, code, name)
			assert.Equal(t, notEntitled, reason, name)
		}
		_, code, reason := h.first(c, svids, named("web"))
		assert.Equal(t, workloadtest.PermissionDenied, code, name)
		assert.Equal(t, test.next, reason, name)
		h.objects["web"].ids[0].Provider.(*spiffetest.Source).Renew()
		require.NotNil(t, other.Receive(), "the stream of another broker goes on")
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

// FuzzRequest sends messages as requests of a broker that may have everything, and reads what is answered.
func FuzzRequest(f *testing.F) {
	h := newHub(f)
	h.add("shop", "web", "/web")
	for _, text := range []string{"", process(1), process(-1), named("web"), named("db"), named("../web")} {
		for _, method := range methods {
			f.Add(h.request(method, text)[5:])
		}
	}
	f.Add(h.request("FetchJWTSVID", named("web")+` audience: "db" spiffe_id: "spiffe://example.org/web"`)[5:])
	f.Add([]byte("\x0a\x04\x0a\x02\x0a\xff"))
	base := h.ca.RequestFrom("/broker", httptest.NewRequestWithContext(f.Context(), http.MethodPost, "/", nil)).Context()
	f.Fuzz(func(t *testing.T, message []byte) {
		h.taken()
		for _, method := range methods {
			ctx, cancel := context.WithCancel(base)
			cancel() // the first response is all
			body := bytes.NewReader(workloadtest.Framed(message))
			r := httptest.NewRequestWithContext(ctx, http.MethodPost, "/spiffe.broker.API/"+method, body)
			r.ProtoMajor = 2
			r.Header = http.Header{"Content-Type": {"application/grpc"}, header: {"true"}}
			w := httptest.NewRecorder()
			h.handler.ServeHTTP(w, r)
			require.Less(t, w.Body.Len(), 64<<10)
		}
		for _, r := range h.taken() {
			require.Positive(t, len(r.Kind()))
			require.True(t, r.PID > 0 && r.Object == broker.Object{} || r.PID == 0)
			require.NotContains(t, r.Object.Plural+r.Object.Group+r.Object.Namespace+r.Object.Name+r.Object.UID, "/")
		}
	})
}
