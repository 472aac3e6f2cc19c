package xdsproxy_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/sds/xdsproxy"
)

// debugPlane answers requests for clusters, and those for debug information with one response of the type before, and
// then with what it was asked for.
func debugPlane(t *testing.T, asked chan<- *envoysds.DiscoveryRequest, answer ...*anypb.Any) http.Handler {
	return control(func(ctx context.Context, c *grpchttp.Call, isDelta bool) error {
		for {
			msg, err := c.Receive()
			if err != nil {
				return err
			}
			var r envoysds.DiscoveryRequest
			if isDelta {
				err = c.Send(encode(t, &envoysds.DiscoveryResponse{TypeUrl: clusters}))
			} else if err = proto.Unmarshal(msg, &r); err == nil && strings.HasPrefix(r.GetTypeUrl(), "istio.io/debug") {
				assert.Equal(t, "Bearer sesame-sesame-sesame", c.Header().Get("Authorization"))
				asked <- &r
				err = errors.Join(
					c.Send(encode(t, &envoysds.DiscoveryResponse{TypeUrl: clusters, Nonce: "not this"})),
					c.Send(encode(t, &envoysds.DiscoveryResponse{TypeUrl: r.GetTypeUrl(), Nonce: "n", VersionInfo: "v", Resources: answer})))
			} else if err == nil {
				err = c.Send(encode(t, &envoysds.DiscoveryResponse{TypeUrl: r.GetTypeUrl(), Nonce: "envoy's"}))
			}
			if err != nil {
				return err
			}
		}
	})
}

func withToken(c *xdsproxy.Config) {
	c.Token = func(context.Context) (string, error) { return "sesame-sesame-sesame", nil }
}

// getDebug makes a debug request in this process.
func getDebug(h *xdsproxy.Handler, target string, edit ...func(*http.Request)) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodGet, "http://localhost:15004/", nil)
	r.RemoteAddr = "127.0.0.1:1234"
	u, err := url.Parse(target)
	if err != nil {
		panic(err)
	}
	r.URL = u
	for _, f := range edit {
		f(r)
	}
	w := httptest.NewRecorder()
	h.ServeDebug(w, r)
	return w
}

// Debug requests of an operator go to the control plane as those of the Envoy, and its answer comes back as JSON and
// never reaches Envoy.
func TestDebug(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-9.5-1", "IST-9.5-2", "IST-9.5-3")
	for _, method := range []string{stream, delta} {
		t.Run(method, func(t *testing.T) {
			t.Parallel()
			n := sockets(t)
			asked := make(chan *envoysds.DiscoveryRequest, 10)
			n.serve(t, "control", debugPlane(t, asked,
				&anypb.Any{TypeUrl: "istio.io/debug", Value: []byte(`{"b": ["<1>"], "a": null}`)},
				&anypb.Any{TypeUrl: "istio.io/debug", Value: []byte("plain <text>\n")},
				&anypb.Any{TypeUrl: "istio.io/debug", Value: []byte{0xff, 0}},
				&anypb.Any{TypeUrl: "type.googleapis.com/envoy.service.status.v3.ClientConfig", Value: []byte("[]")},
			))
			h := newProxy(t, n, withToken)
			server := httptest.NewServer(http.HandlerFunc(h.ServeDebug)) // on loopback, as the agent's
			defer server.Close()

			s := onSocket(t, h).Open(t.Context(), method, nil)
			defer s.Close()
			node := &envoysds.Node{Id: "sidecar~10.0.0.1~web.default~default.svc.cluster.local", Cluster: "web"}
			want := encode(t, &envoysds.DiscoveryRequest{Node: node, TypeUrl: clusters})
			if method == delta {
				want = encode(t, &envoysds.DeltaDiscoveryRequest{Node: node, TypeUrl: clusters})
			}
			require.NoError(t, s.Send(want))
			receive(t, s)

			for path, typeURL := range map[string]string{
				"/debug": "istio.io/debug", "/debug/": "istio.io/debug", "/debug/syncz": "istio.io/debug/syncz",
				"/debug/config_dump?resourceName=web.default%26x": "istio.io/debug/config_dump",
			} {
				resp := must.Get(http.Get(server.URL + path))(t)
				body := must.Get(io.ReadAll(resp.Body))(t)
				require.NoError(t, resp.Body.Close())
				require.Equal(t, http.StatusOK, resp.StatusCode, "%s", body)
				assert.Equal(t, "application/json", resp.Header.Get("Content-Type"))
				assert.Equal(t, "nosniff", resp.Header.Get("X-Content-Type-Options"))
				assert.JSONEq(t, `{"versionInfo": "v", "nonce": "n", "typeUrl": "`+typeURL+`", "resources": [
					{"@type": "istio.io/debug", "json": {"a": null, "b": ["<1>"]}},
					{"@type": "istio.io/debug", "text": "plain <text>\n"},
					{"@type": "istio.io/debug", "value": "/wA="},
					{"@type": "type.googleapis.com/envoy.service.status.v3.ClientConfig", "value": "W10="}
				]}`, string(body))
				assert.Contains(t, string(body), "\n  \"", "indented")
				r := <-asked
				assert.Equal(t, typeURL, r.GetTypeUrl())
				assert.True(t, proto.Equal(node, r.GetNode()), "%v", r.GetNode())
				if strings.Contains(path, "?") {
					assert.Equal(t, []string{"web.default&x"}, r.GetResourceNames())
				} else {
					assert.Empty(t, r.GetResourceNames())
				}
			}
			require.NoError(t, s.Send(want))
			assert.NotContains(t, receive(t, s).GetTypeUrl(), "debug", "Envoy gets the answer to its own request")
		})
	}
}

// Debug requests have the node of the Envoy that joined last.
func TestDebugNode(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := memory()
		asked := make(chan *envoysds.DiscoveryRequest, 1)
		n.serve(t, "control", debugPlane(t, asked))
		h := newProxy(t, n, withToken)
		c := n.through(t, h)
		open := func(id string) *grpchttp.Stream {
			s := c.Open(t.Context(), stream, nil)
			require.NoError(t, s.Send(encode(t, &envoysds.DiscoveryRequest{Node: &envoysds.Node{Id: id, Cluster: "c"}, TypeUrl: clusters})))
			receive(t, s)
			return s
		}
		asks := func(id string) {
			t.Helper()
			synctest.Wait()
			w := getDebug(h, "/debug")
			require.Equal(t, 200, w.Code, "%s", w.Body)
			assert.Equal(t, id, (<-asked).GetNode().GetId())
		}
		first := open("first")
		asks("first")
		second, third := open("second"), open("third")
		asks("third")
		require.NoError(t, third.Close())
		require.NoError(t, first.Close())
		asks("third")
		require.NoError(t, second.Close())
		synctest.Wait()
		assert.Equal(t, 503, getDebug(h, "/debug").Code)
		assert.Zero(t, h.NodeBytes())
	})
}

// Clients that speak ADS ask for debug information on the socket of Envoy.
func TestDebugByADS(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-9.4-14")
	n := sockets(t)
	asked := make(chan *envoysds.DiscoveryRequest, 1)
	n.serve(t, "control", debugPlane(t, asked))
	s := onSocket(t, newProxy(t, n, withToken, secrets(t, new(secretSource), nil))).Open(t.Context(), stream, nil)
	defer s.Close()
	require.NoError(t, s.Send(ask(t, "istio.io/debug", "syncz")))
	assert.Equal(t, []string{"syncz"}, (<-asked).GetResourceNames())
	receive(t, s)
	assert.Equal(t, "istio.io/debug", receive(t, s).GetTypeUrl())
}

// What is not a debug request of this host goes nowhere.
func TestDebugRefused(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-9.5-7")
	n := memory()
	n.listen("control").Close()
	h := newProxy(t, n)
	host := func(host string) func(*http.Request) { return func(r *http.Request) { r.Host = host } }
	from := func(addr string) func(*http.Request) { return func(r *http.Request) { r.RemoteAddr = addr } }
	at := func(ip net.IP) func(*http.Request) { // the address of the server
		return func(r *http.Request) {
			*r = *r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: ip, Port: 15004}))
		}
	}
	site := func(site, mode string) func(*http.Request) { // as browsers say
		return func(r *http.Request) {
			r.Header.Set("Sec-Fetch-Site", site)
			r.Header.Set("Sec-Fetch-Mode", mode)
		}
	}
	for name, test := range map[string]struct {
		target string
		edit   func(*http.Request)
		status int
	}{
		"not connected":        {"/debug/syncz", nil, 503},
		"IPv6":                 {"/debug", func(r *http.Request) { r.Host, r.RemoteAddr = "[::1]:15004", "[::1]:1" }, 503},
		"mapped":               {"/debug", from("[::ffff:127.0.0.1]:1"), 503},
		"Unix socket":          {"/debug", from("@"), 503},
		"another host's name":  {"/debug", host("evil.test:15004"), 403},
		"a name below":         {"/debug", host("localhost.evil.test"), 403},
		"no name":              {"/debug", host(""), 403},
		"from another host":    {"/debug", from("10.0.0.9:1234"), 403},
		"from nowhere":         {"/debug", from("somewhere:1234"), 403},
		"on loopback":          {"/debug", at(net.IPv4(127, 0, 0, 1)), 503},
		"on another address":   {"/debug", at(net.IPv4(10, 0, 0, 1)), 403}, // where a proxy of the pod passes on what comes from outside
		"typed into a browser": {"/debug", site("none", "navigate"), 503},
		"of the same page":     {"/debug", site("same-origin", "cors"), 503},
		"by another site":      {"/debug", site("cross-site", "no-cors"), 403},
		"by another port":      {"/debug", site("same-site", "no-cors"), 403},
		"by a link":            {"/debug", site("cross-site", "navigate"), 403},
		"by an old browser":    {"/debug", func(r *http.Request) { r.Header.Set("Origin", "http://evil.test") }, 403},
		"other path":           {"/metrics", nil, 404},
		"longer word":          {"/debugger", nil, 404},
		"POST":                 {"/debug/syncz", func(r *http.Request) { r.Method = http.MethodPost }, 405},
		"malformed query":      {"/debug?resourceName=%zz", nil, 400},
		"semicolon":            {"/debug?resourceName=a;b", nil, 400},
		"two names":            {"/debug?resourceName=a&resourceName=b", nil, 400},
		"another parameter":    {"/debug?resource=a", nil, 400},
		"one more parameter":   {"/debug?resourceName=a&b=c", nil, 400},
		"name is not UTF-8":    {"/debug?resourceName=%ff", nil, 400},
		"path is not UTF-8":    {"/debug/%ff", nil, 400},
		"long name":            {"/debug?resourceName=" + strings.Repeat("a", 5000), nil, 400},
		"long path":            {"/debug/" + strings.Repeat("a", 5000), nil, 400},
		"parameter twice as 0": {"/debug?resourceName=&resourceName=", nil, 400},
	} {
		if test.edit == nil {
			test.edit = func(*http.Request) {}
		}
		w := getDebug(h, test.target, test.edit)
		assert.Equal(t, test.status, w.Code, "%s: %s", name, w.Body)
		assert.NotEmpty(t, w.Body.String(), name)
		assert.Equal(t, test.status == 405, w.Header().Get("Allow") == "GET", name)
	}
}

// A debug request waits for one thing at a time, and for 5 seconds in total; its failure is none of Envoy's stream.
func TestDebugFails(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-9.5-4", "IST-9.5-5", "IST-9.5-6")
	synctest.Test(t, func(t *testing.T) {
		n := memory()
		var open atomic.Int32 // debug streams
		var most int32
		var mu sync.Mutex
		end := func(ctx context.Context, c *grpchttp.Call, _ string) error { <-ctx.Done(); return nil }
		n.serve(t, "control", control(func(ctx context.Context, c *grpchttp.Call, _ bool) error {
			msg, err := c.Receive()
			if err != nil {
				return err
			}
			var r envoysds.DiscoveryRequest
			if err := proto.Unmarshal(msg, &r); err != nil {
				return err
			}
			if r.GetTypeUrl() == clusters {
				err := c.Send(encode(t, &envoysds.DiscoveryResponse{TypeUrl: clusters}))
				<-ctx.Done()
				return err
			}
			mu.Lock()
			most = max(most, open.Add(1))
			f := end
			mu.Unlock()
			defer open.Add(-1)
			return f(ctx, c, r.GetTypeUrl())
		}))
		h := newProxy(t, n, withToken)
		c := n.through(t, h)
		assert.Equal(t, 503, getDebug(h, "/debug").Code)
		s := c.Open(t.Context(), stream, nil)
		require.NoError(t, s.Send(ask(t, clusters)))
		synctest.Wait()
		receive(t, s)

		start := time.Now()
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				w := getDebug(h, "/debug")
				assert.Equal(t, 504, w.Code, "%s", w.Body)
				assert.Contains(t, []string{"the control plane has not answered within 5s\n", "another debug request is not done; try again later\n"}, w.Body.String())
			})
		}
		wg.Wait()
		assert.Equal(t, 5*time.Second, time.Since(start))
		synctest.Wait()
		assert.Equal(t, int32(1), most, "one at a time")
		assert.Zero(t, open.Load(), "its stream has ended")

		for name, test := range map[string]struct {
			end  func(ctx context.Context, c *grpchttp.Call, typeURL string) error
			text string
		}{
			"refused": {func(context.Context, *grpchttp.Call, string) error {
				return grpchttp.Errorf(grpchttp.PermissionDenied, "not for sesame-sesame-sesame")
			}, "permission_denied: not for [redacted]"},
			"ended":     {func(context.Context, *grpchttp.Call, string) error { return nil }, "without an answer"},
			"malformed": {func(_ context.Context, c *grpchttp.Call, _ string) error { return c.Send([]byte{0xff}) }, "malformed response"},
			"a malformed resource": {func(_ context.Context, c *grpchttp.Call, typeURL string) error {
				return c.Send(append(encode(t, &envoysds.DiscoveryResponse{TypeUrl: typeURL}), 0x12, 1, 0xff))
			}, "malformed response"},
			"another type": {func(_ context.Context, c *grpchttp.Call, typeURL string) error {
				return c.Send(encode(t, &envoysds.DiscoveryResponse{TypeUrl: typeURL + "/x"}))
			}, "without an answer"},
		} {
			mu.Lock()
			end = test.end
			mu.Unlock()
			w := getDebug(h, "/debug")
			assert.Equal(t, 502, w.Code, name)
			assert.Contains(t, w.Body.String(), test.text, name)
			assert.NotContains(t, w.Body.String(), "sesame-sesame", name)
		}
		mu.Lock()
		end = func(context.Context, *grpchttp.Call, string) error {
			return grpchttp.Errorf(grpchttp.DeadlineExceeded, "its clock is faster")
		}
		mu.Unlock()
		assert.Equal(t, 504, getDebug(h, "/debug").Code)
		streams, _ := h.Held()
		assert.Equal(t, 1, streams, "the stream of Envoy goes on")
		require.NoError(t, s.Close())
		synctest.Wait()
		assert.Equal(t, 503, getDebug(h, "/debug").Code, "Envoy has gone")

		s = c.Open(t.Context(), stream, nil) // and returns
		require.NoError(t, s.Send(ask(t, clusters)))
		receive(t, s)
		mu.Lock()
		end = func(ctx context.Context, c *grpchttp.Call, _ string) error { <-ctx.Done(); return nil }
		mu.Unlock()
		go func() { time.Sleep(time.Second); _ = h.Close() }()
		for range 2 { // one of which waits for the other
			wg.Go(func() {
				w := getDebug(h, "/debug")
				assert.Equal(t, 503, w.Code, "%s", w.Body)
				assert.Equal(t, "the server is shutting down\n", w.Body.String())
			})
		}
		wg.Wait()
		_ = s.Close()
	})
}

// A client that does not take its answer is cut off; one that does can go on with its connection.
func TestDebugClients(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := memory()
		big := &anypb.Any{TypeUrl: "istio.io/debug", Value: bytes.Repeat([]byte("x"), 512<<10)}
		n.serve(t, "control", debugPlane(t, make(chan *envoysds.DiscoveryRequest, 10), big))
		h := newProxy(t, n, withToken)
		s := n.through(t, h).Open(t.Context(), stream, nil)
		defer s.Close()
		require.NoError(t, s.Send(ask(t, clusters)))
		receive(t, s)

		l := n.listen("debug")
		server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			h.ServeDebug(w, r.WithContext(peerkey.WithUser(r.Context(), r.Header.Get("User"))))
		})}
		done := make(chan error, 1)
		go func() { done <- server.Serve(l) }()
		tr := &http.Transport{DialContext: n.dial("debug")}
		client := &http.Client{Transport: tr}
		user := "slow"
		get := func(path string) *http.Response {
			r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodGet, "http://localhost"+path, nil))(t)
			r.Header.Set("User", user)
			return must.Get(client.Do(r))(t)
		}
		slow := get("/debug")
		second := get("/debug")
		assert.Equal(t, http.StatusServiceUnavailable, second.StatusCode, "it has not taken the first answer")
		_ = second.Body.Close()
		user = "other"
		again := get("/debug") // a client that is slow holds up no other
		assert.Greater(t, must.Get(io.Copy(io.Discard, again.Body))(t), int64(512<<10))
		_ = again.Body.Close()
		time.Sleep(31 * time.Second)
		require.Error(t, must.Err(io.Copy(io.Discard, slow.Body)))
		_ = slow.Body.Close()

		for range 2 {
			resp := get("/debug")
			assert.Greater(t, must.Get(io.Copy(io.Discard, resp.Body))(t), int64(512<<10))
			_ = resp.Body.Close()
			time.Sleep(time.Minute)
			resp = get("/debug?bad=1")
			assert.Equal(t, http.StatusBadRequest, resp.StatusCode)
			_ = resp.Body.Close()
		}
		tr.CloseIdleConnections()
		require.NoError(t, server.Close())
		<-done
	})
}

// Whatever a control plane sends, what comes of it is JSON, and of the type that was asked for.
func FuzzDebugAnswer(f *testing.F) {
	f.Add([]byte(nil))
	f.Add([]byte("\xff"))
	f.Add(encode(f, &envoysds.DiscoveryResponse{TypeUrl: "istio.io/debug", Resources: []*anypb.Any{
		{TypeUrl: "istio.io/debug", Value: []byte(`{"a":1}`)}, {TypeUrl: "istio.io/debug", Value: []byte("x\u2028")}, {Value: []byte{0xff}},
	}}))
	f.Add(append(encode(f, &envoysds.DiscoveryResponse{TypeUrl: "istio.io/debug"}), 0x32, 2, 0x0a, 0))
	f.Fuzz(func(t *testing.T, msg []byte) {
		answer, err := xdsproxy.DebugAnswer(msg, "istio.io/debug")
		var want envoysds.DiscoveryResponse
		if proto.Unmarshal(msg, &want) != nil {
			return // we need not refuse all that generated code does
		}
		if err != nil {
			require.NotEmpty(t, want.ProtoReflect().GetUnknown(), "the field control_plane is unknown to the judge")
			return
		}
		if want.GetTypeUrl() != "istio.io/debug" {
			require.Nil(t, answer)
			return
		}
		var have struct {
			Nonce     string
			Resources []struct {
				Type  string `json:"@type"`
				JSON  json.RawMessage
				Text  string
				Value []byte
			}
		}
		require.NoError(t, json.Unmarshal(answer, &have))
		require.Equal(t, want.GetNonce(), have.Nonce)
		require.Len(t, have.Resources, len(want.GetResources()))
		for i, a := range want.GetResources() {
			r := have.Resources[i]
			require.Equal(t, a.GetTypeUrl(), r.Type)
			if r.JSON == nil {
				require.Equal(t, string(a.GetValue()), r.Text+string(r.Value))
			}
		}
	})
}
