package broker_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/broker"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

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

// The operator learns from the log who is refused and why, and the broker no more than it has to.
func TestLog(t *testing.T) {
	t.Parallel()
	var log workloadtest.Log
	h := newHub(t, func(o *workloadserver.Options) { o.Logger = workloadtest.Logger(&log) })
	h.serve(memconn.Listen())
	h.failing = errors.New("the API server is away")
	r := h.call(h.raw("/broker"), svids, named("web"))
	_, message := r.Status()
	assert.Contains(t, message, "try again later")
	assert.NotContains(t, message, "API server")
	line := log.Take()
	for _, text := range []string{"reason=broker", "the API server is away", "spiffe://example.org/broker", "shop"} {
		assert.Contains(t, line, text)
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
