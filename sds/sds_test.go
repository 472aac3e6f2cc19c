package sds_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe/report"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

func TestStatus(t *testing.T) {
	t.Parallel()
	m, src := newMint(t), newFakeSource()
	web, trust := m.pair("default"), m.roots("ROOTCA")
	src.put("default", web)
	src.put("ROOTCA", trust)
	h, c := serving(t, src, nil)

	leaf, root := openSotW(t, c), openSotW(t, c)
	leaf.ask("default")
	root.ask("ROOTCA")
	first := leaf.recv()
	want(t, first, web)
	leaf.ack(first, "default")
	r := root.recv()
	want(t, r, trust)
	root.ack(r, "ROOTCA")
	assert.Equal(t, map[string]string{"default": first.GetVersionInfo(), "ROOTCA": r.GetVersionInfo()}, h.Status().Names)
	assert.Equal(t, 2, h.Status().Streams)

	// A stream that ends well.
	require.NoError(t, root.in.Close())
	root.ends(codeOK)
}

// What comes after a reconnect is the same whatever the client brings, and has the same version,
// also from another server.
func TestReconnect(t *testing.T) {
	t.Parallel()
	_, src, web := withPair(t, "default")
	versions := make(map[string]bool)
	for range 2 {
		socket, stop := serve(t, handler(t, src, nil))
		c := dial(t, socket)
		for _, req := range []*envoysds.DiscoveryRequest{
			{},
			{VersionInfo: "2006-01-02T15:04:05Z/17", ResponseNonce: "1"},
			{ResponseNonce: "1", ErrorDetail: &envoysds.Status{Message: "of the last stream"}},
		} {
			s := openSotW(t, c)
			req.ResourceNames = []string{"default"}
			s.send(req)
			r := s.recv()
			want(t, r, web)
			versions[r.GetVersionInfo()] = true
			req.VersionInfo = r.GetVersionInfo() // the client has it, and gets it again all the same
		}
		d := openDelta(t, c)
		d.subscribe("default")
		r := d.recv()
		wantDelta(t, r, nil, web)
		versions[r.GetResources()[0].GetVersion()] = true
		stop()
	}
	assert.Len(t, versions, 1)
}

// A look-up that fails, as when the CA is down at the first start, leaves the stream and the other
// names alone, and the secret comes when the source says so.
func TestSourceDown(t *testing.T) {
	t.Parallel()
	m, src := newMint(t), newFakeSource()
	trust := m.roots("ROOTCA")
	src.put("ROOTCA", trust)
	src.fail("default", errors.New("CA down"))
	var log syncBuffer
	h, c := serving(t, src, &sds.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	s, d := openSotW(t, c), openDelta(t, c)
	s.ask("default", "ROOTCA")
	s.takes(trust)
	d.subscribe("default")
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "CA down") }, patient, time.Millisecond)
	assert.Empty(t, h.Status().Names["default"])

	web := m.pair("default")
	src.put("default", web)
	want(t, s.recv(), web)
	wantDelta(t, d.recv(), nil, web)

	// Once served, a failure takes it from no stream, not even from new ones.
	src.fail("default", errors.New("CA down again"))
	late := asking(t, c, "default")
	want(t, late.recv(), web)
}

func TestNACK(t *testing.T) {
	t.Parallel()
	m, src := newMint(t), newFakeSource()
	web, other := m.pair("default"), m.pair("other")
	src.put("default", web)
	src.put("other", other)
	var log syncBuffer
	h, c := serving(t, src, &sds.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	s := asking(t, c, "default")
	r := s.recv()
	before := time.Now()
	s.nack(r, "KEY_VALUES_MISMATCH", "default")
	s.send(&envoysds.DiscoveryRequest{ResponseNonce: r.GetNonce(), ResourceNames: []string{"default", "other"}})
	r2 := s.recv()
	want(t, r2, other) // and not default again
	s.ack(r2, "default", "other")
	src.put("default", web) // the same content again
	fresh := m.pair("default")
	src.put("default", fresh)
	want(t, s.recv(), fresh)

	reported := h.Report().Servers[0]
	st := h.Status()
	assert.Equal(t, uint64(1), st.NACKs)
	require.NotNil(t, st.LastNACK)
	assert.WithinRange(t, st.LastNACK.Time, before, time.Now())
	st.LastNACK.Time = time.Time{}
	assert.Equal(t, &report.Push{
		NACK: true, Names: []string{"default"}, Version: r.GetVersionInfo(), Streams: 1, Client: "raw", Message: "KEY_VALUES_MISMATCH",
	}, st.LastNACK)
	assert.Equal(t, 1, strings.Count(log.String(), "KEY_VALUES_MISMATCH"))

	require.Len(t, st.Pushes, 3)
	newest, oldest := st.Pushes[0], st.Pushes[2]
	assert.Equal(t, []string{"default"}, newest.Names)
	assert.Equal(t, []string{"other"}, st.Pushes[1].Names)
	assert.Equal(t, report.Push{Time: oldest.Time, Names: []string{"default"}, Version: r.GetVersionInfo(), Streams: 1}, oldest)
	_, key, _ := web.KeyPair()
	assert.NotContains(t, log.String(), string(key[30:60]))

	assert.Equal(t, "SDS", reported.Protocol)
	assert.Equal(t, 1, reported.Streams)
	assert.Len(t, reported.Pushes, 4)
}

// The same response on several streams is one push, and the last 16 are kept.
func TestPushes(t *testing.T) {
	t.Parallel()
	m, src := newMint(t), newFakeSource()
	h, c := serving(t, src, nil)
	src.put("default", m.pair("default"))
	for range 3 {
		s := asking(t, c, "default")
		s.recv()
	}
	st := h.Status()
	require.Len(t, st.Pushes, 1)
	assert.Equal(t, 3, st.Pushes[0].Streams)
	first := st.Pushes[0].Version

	s := asking(t, c, "other")
	for i := range 20 {
		src.put("other", m.pair("other"))
		r := s.recv()
		s.ack(r, "other")
		st := h.Status()
		require.Len(t, st.Pushes, min(i+2, 16))
		assert.Equal(t, r.GetVersionInfo(), st.Pushes[0].Version)
		assert.Equal(t, i < 15, slices.ContainsFunc(st.Pushes, func(p report.Push) bool { return p.Version == first }))
		assert.True(t, slices.IsSortedFunc(st.Pushes, func(a, b report.Push) int { return b.Time.Compare(a.Time) }))
	}

	// A push of very many names has some of them.
	var names []string
	for i := range 40 {
		name := fmt.Sprintf("name-%d", i)
		names = append(names, name)
		src.put(name, m.pair(name))
	}
	many := asking(t, c, names...)
	many.recv()
	for _, p := range h.Status().Pushes {
		assert.LessOrEqual(t, len(p.Names), 16)
	}
}

func TestOptionsRefused(t *testing.T) {
	t.Parallel()
	src := newFakeSource()
	assert.Error(t, must.Err(sds.NewHandler(src, &sds.Options{MaxNames: -1})))
	assert.Error(t, must.Err(sds.NewHandler(nil, nil)))
}

type callerKey struct{}

// Each caller gets its own names only. Who it is, the connection says.
func TestResolve(t *testing.T) {
	t.Parallel()
	m, src := newMint(t), newFakeSource()
	web, db := m.pair("web"), m.pair("db")
	src.put("web", web)
	src.put("db", db)
	var mu sync.Mutex
	allowed := map[string]string{"web": "web", "db": "db"} // name to caller
	var log syncBuffer
	h := handler(t, src, &sds.Options{
		Resolve: sds.Allow(func(ctx context.Context, name string) error {
			mu.Lock()
			defer mu.Unlock()
			if caller := ctx.Value(callerKey{}); allowed[name] != caller {
				return fmt.Errorf("%v may not have %s", caller, name)
			}
			return nil
		}),
		Logger: slog.New(slog.NewTextHandler(&log, nil)),
	})
	as := func(caller string) *http.Client {
		socket, _ := serve(t, h, func(s *unixsocket.Server) {
			s.ConnContext = func(ctx context.Context, _ net.Conn) context.Context {
				return context.WithValue(ctx, callerKey{}, caller)
			}
		})
		return dial(t, socket)
	}
	asWeb, asDB := as("web"), as("db")
	s, d, other := openSotW(t, asWeb), openDelta(t, asWeb), openSotW(t, asDB)
	s.ask("db", "web")
	r := s.recv()
	want(t, r, web)
	s.ack(r, "db", "web")
	s.ack(r, "db", "web")
	d.subscribe("db", "web")
	d.takes([]string{"db"}, web)
	other.ask("db")
	other.takes(db)
	assert.Equal(t, 1, strings.Count(log.String(), "web may not have db"), "at once, and from then on counted")

	// What is taken away is not renewed, and delta says so.
	mu.Lock()
	allowed["web"] = "nobody"
	mu.Unlock()
	src.put("web", m.pair("web"))
	wantDelta(t, d.recv(), []string{"web"})
	newDB := m.pair("db")
	src.put("db", newDB)
	want(t, other.recv(), newDB)
	_, code := fetch(t, asWeb, "db")
	assert.Equal(t, codeNotFound, code)
	quiet(t, s.raw)
}

// What a client was allowed to have when it appeared is not sent to it when it is ready to take it, if it
// may not have it any more by then.
func TestResolveBeforeSending(t *testing.T) {
	t.Parallel()
	m, src := newMint(t), newFakeSource()
	web, db := m.pair("web"), m.pair("db")
	src.put("web", web)
	src.put("db", db)
	var denied atomic.Bool
	asked := make(chan string, 100)
	_, c := serving(t, src, &sds.Options{Resolve: sds.Allow(func(_ context.Context, name string) error {
		asked <- name
		if name == "db" && denied.Load() {
			return errors.New("no longer")
		}
		return nil
	})})
	s, d := openSotW(t, c), openDelta(t, c)
	s.ask("web")
	r := s.recv()
	want(t, r, web)
	d.subscribe("web")
	rd := d.recv()
	wantDelta(t, rd, nil, web)
	s.ask("web", "db") // no answer to the first response yet, so that the second waits
	d.subscribe("db")
	for n := 0; n < 2; {
		if <-asked == "db" {
			n++
		}
	}
	denied.Store(true)
	s.ack(r, "web", "db")
	d.ack(rd)
	d.takes([]string{"db"})
	web = m.pair("web")
	src.put("web", web)
	want(t, s.recv(), web)
}

func TestRequireHeader(t *testing.T) {
	t.Parallel()
	_, src, web := withPair(t, "default")
	_, c := serving(t, src, &sds.Options{RequireHeader: true})
	for _, value := range []string{"", "false", "True"} {
		for _, method := range []string{"StreamSecrets", "DeltaSecrets", "FetchSecrets"} {
			s := open(t, c, method, func(r *http.Request) { r.Header.Set("Workload.Spiffe.Io", value) })
			code, _ := s.status()
			assert.Equal(t, codeInvalidArgument, code, "%s with %q", method, value)
		}
	}
	assert.Zero(t, src.count("default"))
	s := openSotW(t, c, func(r *http.Request) { r.Header.Set("workload.spiffe.io", "true") })
	s.ask("default")
	want(t, s.recv(), web)
}

// One stream of ADS has all secrets of a client, and nothing else.
func TestAggregated(t *testing.T) {
	t.Parallel()
	m, src := newMint(t), newFakeSource()
	web, trust := m.pair("default"), m.roots("ROOTCA")
	src.put("default", web)
	src.put("ROOTCA", trust)
	h, c := serving(t, src, nil)
	ads := func(method string) func(*http.Request) {
		return func(r *http.Request) {
			r.URL.Path = "/envoy.service.discovery.v3.AggregatedDiscoveryService/" + method + "AggregatedResources"
		}
	}
	s, d := openSotW(t, c, ads("Stream")), openDelta(t, c, ads("Delta"))
	s.ask("ROOTCA")
	first := s.recv()
	want(t, first, trust)
	s.ack(first, "ROOTCA", "default")
	want(t, s.recv(), web)
	d.send(&envoysds.DeltaDiscoveryRequest{TypeUrl: typeURL, ResourceNamesSubscribe: []string{"ROOTCA", "default", "none"}})
	r := d.recv()
	for len(r.GetResources())+len(r.GetRemovedResources()) < 3 {
		d.ack(r)
		more := d.recv()
		r.Resources, r.RemovedResources = append(r.Resources, more.GetResources()...), append(r.RemovedResources, more.GetRemovedResources()...)
	}
	assert.Equal(t, []string{"none"}, r.GetRemovedResources())
	assert.Equal(t, 2, h.Status().Streams)

	cluster := "type.googleapis.com/envoy.config.cluster.v3.Cluster"
	s.send(&envoysds.DiscoveryRequest{TypeUrl: cluster})
	s.ends(codeInvalidArgument)
	d.send(&envoysds.DeltaDiscoveryRequest{TypeUrl: cluster})
	d.ends(codeInvalidArgument)
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	_, src, _ := withPair(t, "default")
	socket, _ := serve(t, handler(t, src, &sds.Options{MaxNames: 3}))
	c := dial(t, socket)
	many := []string{"1", "2", "3", "4"}
	twice := []string{"1", "2", "3", "4", "5", "6", "7"} // a delta stream refuses what is less one by one
	long := []string{strings.Repeat("x", 4097)}
	other := "type.googleapis.com/envoy.config.cluster.v3.Cluster"
	encode := func(r *envoysds.DiscoveryRequest) []byte { return frame(0, mustMarshal(t, r)) }
	encodeDelta := func(r *envoysds.DeltaDiscoveryRequest) []byte { return frame(0, mustMarshal(t, r)) }
	for name, test := range map[string]struct {
		method string
		in     []byte
		want   string
	}{
		"other type":             {"StreamSecrets", encode(&envoysds.DiscoveryRequest{TypeUrl: other}), codeInvalidArgument},
		"other type, delta":      {"DeltaSecrets", encodeDelta(&envoysds.DeltaDiscoveryRequest{TypeUrl: other}), codeInvalidArgument},
		"other type, fetch":      {"FetchSecrets", encode(&envoysds.DiscoveryRequest{TypeUrl: other}), codeInvalidArgument},
		"too many names":         {"StreamSecrets", encode(&envoysds.DiscoveryRequest{ResourceNames: many}), codeResourceExhausted},
		"too many names, delta":  {"DeltaSecrets", encodeDelta(&envoysds.DeltaDiscoveryRequest{ResourceNamesSubscribe: twice}), codeResourceExhausted},
		"too many names, fetch":  {"FetchSecrets", encode(&envoysds.DiscoveryRequest{ResourceNames: many}), codeResourceExhausted},
		"long name":              {"StreamSecrets", encode(&envoysds.DiscoveryRequest{ResourceNames: long}), codeResourceExhausted},
		"long name, delta":       {"DeltaSecrets", encodeDelta(&envoysds.DeltaDiscoveryRequest{ResourceNamesUnsubscribe: long}), codeResourceExhausted},
		"large message":          {"StreamSecrets", frame(0, make([]byte, 1<<20+1)), codeResourceExhausted},
		"large message, delta":   {"DeltaSecrets", frame(0, make([]byte, 1<<20+1)), codeResourceExhausted},
		"large message, fetch":   {"FetchSecrets", frame(0, make([]byte, 1<<20+1)), codeResourceExhausted},
		"garbage":                {"StreamSecrets", frame(0, []byte("garbage")), codeInvalidArgument},
		"garbage, delta":         {"DeltaSecrets", frame(0, []byte("garbage")), codeInvalidArgument},
		"compressed":             {"StreamSecrets", frame(1, []byte("garbage")), codeInternal},
		"end of stream in frame": {"StreamSecrets", frame(0x80, nil), codeInternal},
		"half a message":         {"StreamSecrets", frame(0, make([]byte, 10))[:9], codeInternal},
		"nothing":                {"StreamSecrets", nil, codeOK},
		"fetch nothing":          {"FetchSecrets", encode(&envoysds.DiscoveryRequest{}), codeInvalidArgument},
		"fetch what is not":      {"FetchSecrets", encode(&envoysds.DiscoveryRequest{ResourceNames: []string{"x"}}), codeNotFound},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			body := &slowCloser{Reader: bytes.NewReader(test.in), stop: make(chan struct{})}
			defer close(body.stop)
			s := open(t, c, test.method, func(r *http.Request) {
				if r.Body = body; test.method == "FetchSecrets" || test.want == codeOK || test.want == codeInternal {
					r.Body = io.NopCloser(body.Reader)
				}
			})
			code, messages := s.status()
			assert.Equal(t, test.want, code, s.resp.Trailer)
			assert.Zero(t, messages)
		})
	}
	t.Run("unknown compression", func(t *testing.T) {
		t.Parallel()
		s := open(t, c, "StreamSecrets", func(r *http.Request) { r.Header.Set("Grpc-Encoding", "gzip") })
		s.ends(codeUnimplemented)
	})
	t.Run("HTTP", func(t *testing.T) {
		t.Parallel()
		for path, test := range map[string]struct {
			contentType string
			want        int
		}{
			service + "StreamSecrets":                  {"application/json", http.StatusUnsupportedMediaType},
			service + "DeltaSecrets":                   {"application/grpc-web+proto", http.StatusUnsupportedMediaType},
			service + "FetchSecrets":                   {"application/grpc+json", http.StatusUnsupportedMediaType},
			service + "ListSecrets":                    {"application/grpc", http.StatusNotFound},
			"/envoy.service.discovery.v3.AggregatedDi": {"application/grpc", http.StatusNotFound},
			"/v3/discovery:secrets":                    {"application/json", http.StatusNotFound},
			"/":                                        {"", http.StatusNotFound},
		} {
			resp := must.Get(c.Post("http://localhost"+path, test.contentType, strings.NewReader("{}")))(t)
			assert.NoError(t, resp.Body.Close())
			assert.Equal(t, test.want, resp.StatusCode, path)
		}
	})
	t.Run("HTTP/1.1", func(t *testing.T) {
		t.Parallel()
		resp := must.Get(http1(t, socket).Post("http://localhost"+service+"StreamSecrets", "application/grpc", nil))(t)
		assert.NoError(t, resp.Body.Close())
		assert.Equal(t, http.StatusHTTPVersionNotSupported, resp.StatusCode)
	})
}

// slowCloser is a body that stays open after its content.
type slowCloser struct {
	io.Reader
	stop chan struct{}
}

func (s *slowCloser) Read(b []byte) (int, error) {
	n, err := s.Reader.Read(b)
	if err == io.EOF {
		<-s.stop
	}
	return n, err
}

func (s *slowCloser) Close() error { return nil }

func TestClose(t *testing.T) {
	t.Parallel()
	_, src, _ := withPair(t, "default")
	h := must.Get(sds.NewHandler(src, nil))(t)
	require.Equal(t, 1, src.subscribers())
	socket, _ := serve(t, h)
	c := dial(t, socket)
	s, d := openSotW(t, c), openDelta(t, c)
	s.ask("default")
	s.recv()
	require.NoError(t, h.Close())
	require.NoError(t, h.Close())
	assert.Zero(t, src.subscribers())
	for _, s := range []*raw{s.raw, d.raw, open(t, c, "StreamSecrets"), open(t, c, "FetchSecrets")} {
		s.ends(codeUnavailable)
	}
	require.Eventually(t, func() bool { return h.Status().Streams == 0 }, patient, time.Millisecond)
	assert.Empty(t, h.Status().Names)
}

// A hook that panics ends its stream and nothing else.
func TestResolvePanics(t *testing.T) {
	t.Parallel()
	_, src, web := withPair(t, "web")
	h, c := serving(t, src, &sds.Options{Resolve: sds.Allow(func(_ context.Context, name string) error {
		if name == "panic" {
			panic("hook")
		}
		return nil
	})})
	s, bad := openSotW(t, c), openSotW(t, c)
	bad.ask("panic")
	assert.ErrorContains(t, must.Err(bad.next()), "INTERNAL_ERROR")
	s.ask("web")
	want(t, s.recv(), web)
	require.Eventually(t, func() bool { return h.Status().Streams == 1 }, patient, time.Millisecond)
}

// The same holds for a panic while a change is pushed.
func TestResolvePanicsLater(t *testing.T) {
	t.Parallel()
	m, src, _ := withPair(t, "web")
	var panics atomic.Bool
	_, c := serving(t, src, &sds.Options{Resolve: sds.Allow(func(context.Context, string) error {
		if panics.Load() {
			panic("hook")
		}
		return nil
	})})
	bad := asking(t, c, "web")
	bad.ack(bad.recv(), "web")
	panics.Store(true)
	src.put("web", m.pair("web"))
	assert.ErrorContains(t, must.Err(bad.next()), "INTERNAL_ERROR")
	panics.Store(false)
	s := asking(t, c, "web")
	s.recv()
}

// A deadline that the client sets ends its stream with that reason.
func TestDeadline(t *testing.T) {
	t.Parallel()
	socket, _ := serve(t, handler(t, newFakeSource(), nil))
	s := open(t, dial(t, socket), "StreamSecrets", func(r *http.Request) { r.Header.Set("Grpc-Timeout", "50m") })
	s.ends("4")
}

// 1,100 streams on one connection, as an Envoy with as many secrets opens, or a few more than net/http allows, get each version; the
// source is asked once for each. When the client goes, nothing stays.
func TestManyStreams(t *testing.T) {
	rounds.NotShort(t)
	conformance.Covers(t, "IST-8.7-2", "IST-8.5-1", "IST-8.5-4")
	n := rounds.Of(275)
	m, src, _ := withPair(t, "default")
	before := runtime.NumGoroutine()
	h := must.Get(sds.NewHandler(src, nil))(t)
	var conns int
	socket, stop := serve(t, h, func(s *unixsocket.Server) {
		s.ConnContext = func(ctx context.Context, _ net.Conn) context.Context { conns++; return ctx }
	})
	c := sds.UnixClient(socket)
	c.Transport.(*http.Transport).MaxConnsPerHost = 1 // net/http dials again for a request just after the first
	streams := make([]sotw, n)
	for i := range streams {
		streams[i] = openSotW(t, c)
		streams[i].ask("default")
	}
	for _, s := range streams {
		s.ack(s.recv(), "default")
	}
	assert.Equal(t, 1, src.count("default"))
	assert.Equal(t, n, h.Status().Streams)
	for round := range 3 {
		secret := m.pair("default")
		src.put("default", secret)
		for _, s := range streams {
			r := s.recv()
			want(t, r, secret)
			s.ack(r, "default")
		}
		assert.Equal(t, round+2, src.count("default"))
	}
	assert.Equal(t, 1, conns)
	for _, s := range streams {
		s.cancel()
	}
	require.Eventually(t, func() bool { return h.Status().Streams == 0 }, patient, time.Millisecond)
	assert.Empty(t, h.Status().Names, "a name that no stream wants is forgotten")
	c.CloseIdleConnections()
	stop()
	require.NoError(t, h.Close())
	for _, s := range streams {
		_ = s.resp.Body.Close()
		_ = s.in.Close()
	}
	require.Eventually(t, func() bool { return runtime.NumGoroutine() <= before+2 }, patient, 10*time.Millisecond,
		"goroutines: %d before, %d after", before, runtime.NumGoroutine())
}

// A client that does not read delays no other, and when it reads at last it gets the newest.
func TestSlowReader(t *testing.T) {
	t.Parallel()
	m, src := newMint(t), newFakeSource()
	// Larger than the window of a stream, so that the server has to wait.
	large := func() *pki.Secret {
		var certs []*x509.Certificate
		for range 150 {
			certs = append(certs, m.ca.Root())
		}
		m.ca.Rotate()
		m.ca.DropOldRoots()
		s, err := pki.NewSecretPEM("ROOTCA", nil, nil, pki.MarshalCertificatesPEM(append(certs, m.ca.Root())...), time.Time{})
		require.NoError(t, err)
		return s
	}
	src.put("ROOTCA", large())
	socket, _ := serve(t, handler(t, src, nil))
	small := sds.UnixClient(socket)
	small.Transport.(*http.Transport).HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerStream: 16 << 10}
	t.Cleanup(small.CloseIdleConnections)
	slow := asking(t, small, "ROOTCA")
	fast := []sotw{openSotW(t, small), openSotW(t, dial(t, socket))}
	for _, s := range fast {
		s.ask("ROOTCA")
		s.ack(s.recv(), "ROOTCA")
	}
	var last *pki.Secret
	for range 5 {
		last = large()
		src.put("ROOTCA", last)
		for _, s := range fast {
			s.takes(last)
		}
	}
	r := slow.recv()
	slow.ack(r, "ROOTCA")
	want(t, slow.recv(), last)
}

// 2,000 names that come one by one on one stream.
func TestManyNames(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	const n = 2000
	m, src := newMint(t), newFakeSource()
	var names []string
	svid := m.ca.SVID("/web")
	for i := range n {
		name := fmt.Sprint("name-", i)
		names = append(names, name)
		src.put(name, must.Get(pki.NewKeyPairSecret(name, svid))(t))
	}
	_, c := serving(t, src, &sds.Options{MaxNames: n})
	s := asking(t, c, names[0])
	start := time.Now()
	for i := range names {
		r := s.recv()
		require.Len(t, r.GetResources(), 1)
		if i+1 < n {
			s.ack(r, names[:i+2]...)
		} else {
			s.ack(r, names...)
		}
	}
	t.Logf("%d names in %v", n, time.Since(start))
	fresh := must.Get(pki.NewKeyPairSecret(names[7], m.ca.SVID("/web")))(t)
	src.put(names[7], fresh)
	want(t, s.recv(), fresh)
}

// syncBuffer is a log that tests read while it is written.
type syncBuffer = logtest.Buffer
