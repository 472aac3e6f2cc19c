package sds_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// serveTCP serves a handler on a loopback port, and returns a function that makes clients with a connection
// each, which are peers of their own.
func serveTCP(t testing.TB, h http.Handler) (connect func() *http.Client) {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	serve(t, h, func(s *unixsocket.Server) { s.Listener = l })
	return func() *http.Client {
		var protocols http.Protocols
		protocols.SetUnencryptedHTTP2(true)
		tr := &http.Transport{Protocols: &protocols, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", l.Addr().String())
		}}
		t.Cleanup(tr.CloseIdleConnections)
		return &http.Client{Transport: tr}
	}
}

// refusal is the end of a stream over a limit that leaves room later.
func refusal(t testing.TB, s *raw, text string) {
	t.Helper()
	code, messages := s.status()
	assert.Equal(t, codeResourceExhausted, code)
	assert.Zero(t, messages)
	header := s.resp.Trailer
	if header.Get("Grpc-Status") == "" {
		header = s.resp.Header
	}
	assert.Contains(t, header.Get("Grpc-Message"), text)
	assert.Equal(t, "10001", header.Get("Grpc-Retry-Pushback-Ms"), "10 s, rounded up")
}

// fetchOf begins a fetch in gRPC.
func fetchOf(t testing.TB, c *http.Client, names ...string) *raw {
	return open(t, c, "FetchSecrets", func(r *http.Request) {
		r.Body = io.NopCloser(bytes.NewReader(frame(0, mustMarshal(t, &envoysds.DiscoveryRequest{ResourceNames: names}))))
	})
}

// A peer has its share of the streams, and what it cannot have is told with a time to come back. Streams of
// both kinds and fetches count. Where the peer's user is not known, each connection is a peer.
func TestStreamShares(t *testing.T) {
	t.Parallel()
	_, src, web := withPair(t, "default")
	h := handler(t, src, &sds.Options{MaxStreams: 3, MaxPeerStreams: 2})
	connect := serveTCP(t, h)
	greedy, other := connect(), connect()
	first, second := openSotW(t, greedy), openDelta(t, greedy)
	first.ask("default")
	want(t, first.recv(), web)
	second.subscribe("default")
	wantDelta(t, second.recv(), nil, web)
	for range 3 {
		refusal(t, open(t, greedy, "StreamSecrets"), "this peer")
		refusal(t, open(t, greedy, "DeltaSecrets"), "this peer")
		refusal(t, fetchOf(t, greedy, "default"), "this peer")
	}
	_, answer := fetch(t, other, "default")
	assert.Equal(t, codeOK, answer)
	third := asking(t, other, "default")
	want(t, third.recv(), web)
	refusal(t, open(t, other, "StreamSecrets"), "sds: all clients together have too many streams")
	refusal(t, open(t, connect(), "StreamSecrets"), "sds: all clients together have too many streams")

	// A client that is refused holds nothing, and what ends leaves room.
	require.NoError(t, first.in.Close())
	first.ends(codeOK)
	again := asking(t, greedy, "default")
	want(t, again.recv(), web)
	for _, s := range []*raw{second.raw, third.raw, again.raw} {
		s.cancel()
	}
	require.Eventually(t, func() bool { open, names := h.Held(); return open == 0 && names == 0 }, patient, time.Millisecond)
}

// All connections of a user are one peer on a Unix socket, and the log says which user it is: once, however
// often that asks.
func TestStreamSharesOfUser(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("peers are known on Linux")
	}
	_, src, _ := withPair(t, "default")
	var log syncBuffer
	socket, _ := serve(t, handler(t, src, &sds.Options{MaxPeerStreams: 2, Logger: textLogger(&log)}))
	for range 2 {
		s := asking(t, dial(t, socket), "default")
		s.recv()
	}
	for range 50 {
		c := sds.UnixClient(socket)
		refusal(t, open(t, c, "StreamSecrets"), "this peer")
		c.CloseIdleConnections()
	}
	assert.Equal(t, 1, strings.Count(log.String(), "\n"), log.String())
	assert.Contains(t, log.String(), fmt.Sprintf("uid=%d pid=%d", os.Geteuid(), os.Getpid()))
}

// The default limits are far from what a node has: here 8 Envoys of one user, with 256 secrets each, or an eighth of them.
func TestDefaultLimits(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	_, src, web := withPair(t, "default")
	h, each := handler(t, src, nil), rounds.Of(32)*min(2, rounds.Of(1))
	socket, _ := serve(t, h)
	for range 8 {
		c := dial(t, socket)
		for range each {
			s := asking(t, c, "default")
			want(t, s.recv(), web)
		}
	}
	open, names := h.Held()
	assert.Equal(t, 8*each, open)
	assert.Less(t, names, 32<<20/8)
}

// longNames returns n names of 4,000 bytes.
func longNames(stream, n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("%04000d", stream*n+i)
	}
	return names
}

// The names of a stream have a limit together, also over the requests of a delta stream. Names that are
// dropped do not count.
func TestNamesOfStream(t *testing.T) {
	t.Parallel()
	h := handler(t, newFakeSource(), nil)
	socket, _ := serve(t, h)
	c := dial(t, socket)
	s := asking(t, c, longNames(0, 66)...)
	s.ends(codeResourceExhausted)
	s = openSotW(t, c)
	for i := range 10 {
		s.ask(longNames(i, 65)...)
	}
	d := openDelta(t, c)
	d.subscribe(longNames(0, 60)...)
	d.recv()
	d.send(&envoysds.DeltaDiscoveryRequest{ResourceNamesSubscribe: longNames(1, 60), ResourceNamesUnsubscribe: longNames(0, 60)})
	d.subscribe(longNames(1, 66)...)
	d.ends(codeResourceExhausted)
	require.NoError(t, s.in.Close())
	s.ends(codeOK)
	_, code := fetch(t, c, longNames(0, 60)...)
	assert.Equal(t, codeNotFound, code)
	require.Eventually(t, func() bool { open, names := h.Held(); return open == 0 && names == 0 }, patient, time.Millisecond)
}

// A delta stream on which there is no room for a name goes on, and the name is told not to exist, once in the log, and until
// there is room.
func TestNameTooMany(t *testing.T) {
	t.Parallel()
	m, src := newMint(t), newFakeSource()
	for _, name := range []string{"a", "b", "c"} {
		src.put(name, m.pair(name))
	}
	var log syncBuffer
	h := handler(t, src, &sds.Options{MaxNames: 2, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	socket, _ := serve(t, h)
	d := openDelta(t, dial(t, socket))
	ask := func(r *envoysds.DeltaDiscoveryRequest, names ...string) (got, removed []string) {
		r.ResourceNamesSubscribe = names
		d.send(r)
		for len(got)+len(removed) < len(names) {
			r := d.recv()
			for _, s := range r.GetResources() {
				got = append(got, s.GetName())
			}
			removed = append(removed, r.GetRemovedResources()...)
			d.ack(r)
		}
		return got, removed
	}
	_, removed := ask(&envoysds.DeltaDiscoveryRequest{}, "a", "b", "c")
	assert.Equal(t, []string{"c"}, removed)
	_, held := h.Held()
	assert.Equal(t, 2*(1+1024), held)
	got, _ := ask(&envoysds.DeltaDiscoveryRequest{ResourceNamesUnsubscribe: []string{"a"}}, "c")
	assert.Equal(t, []string{"c"}, got)
	_, removed = ask(&envoysds.DeltaDiscoveryRequest{}, "a")
	assert.Equal(t, []string{"a"}, removed)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "more than 2 resource names") }, patient, time.Millisecond)
	assert.Equal(t, 1, strings.Count(log.String(), "more than 2 resource names"), log.String())
	assert.Equal(t, 1, h.Status().Streams)
}

// A peer that asks for as many names as it can, each another one, gets its share of memory and leaves the
// others theirs. It does not matter whether the names are unknown or refused.
func TestNamesOfPeer(t *testing.T) {
	rounds.Slow(t)
	for _, kind := range []string{"unknown", "refused"} {
		t.Run(kind, func(t *testing.T) {
			_, src, web := withPair(t, "default")
			h := handler(t, src, &sds.Options{Resolve: sds.Allow(func(_ context.Context, name string) error {
				if kind == "refused" && name != "default" {
					return os.ErrPermission
				}
				return nil
			})})
			connect := serveTCP(t, h)
			heap := func() uint64 {
				for range 3 {
					runtime.GC()
				}
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				return m.HeapAlloc
			}
			before := heap()
			greedy := connect()
			var streams []sotw
			for i := range 150 {
				s := openSotW(t, greedy)
				streams = append(streams, s)
				s.ask(longNames(i, 60)...)
				s.asked = nil // what the test keeps is no part of the heap that is measured
			}
			polite := asking(t, connect(), "default")
			want(t, polite.recv(), web)
			const most = 32 << 20
			require.Eventually(t, func() bool { open, _ := h.Held(); return open <= most/(60*(4000+1024))+1 }, patient, time.Millisecond)
			refusal(t, streams[len(streams)-1].raw, "this peer has too many names")
			open, names := h.Held()
			assert.Greater(t, names, most*9/10)
			assert.Less(t, names, most+2<<10)
			assert.InDelta(t, most/(60*(4000+1024))+1, open, 1)
			grown := heap() - before
			t.Logf("%d MiB of names counted, heap +%d MiB with both ends", names>>20, grown>>20)
			assert.Less(t, grown, uint64(2*most))
			if kind == "refused" {
				assert.Len(t, h.Status().Names, 1, "what is refused is not shown")
			}
			for _, s := range streams {
				s.cancel()
			}
			require.Eventually(t, func() bool { open, _ := h.Held(); return open == 1 }, patient, time.Millisecond)
			assert.Len(t, h.Status().Names, 1)
			assert.Zero(t, h.Waits())
		})
	}
}

// A peer that begins large requests and does not end them gets its share of memory, and leaves the others
// theirs.
func TestUnfinishedRequests(t *testing.T) {
	rounds.NotShort(t)
	_, src, web := withPair(t, "default")
	h := handler(t, src, nil)
	connect := serveTCP(t, h)
	const most, each = 16 << 20, 1<<20 - 4<<10
	t.Run("gRPC", func(t *testing.T) {
		greedy := connect()
		begun := append([]byte{0, 0, 0x10, 0, 0}, make([]byte, 600<<10)...) // of 1 MiB
		var all []*raw
		var last *raw
		for i := range most/each + 20 {
			s := open(t, greedy, []string{"StreamSecrets", "DeltaSecrets"}[i%2])
			all, last = append(all, s), s
			go func() { _, _ = s.in.Write(begun) }()
			require.Eventually(t, func() bool { return h.Incoming() >= min(i+1, most/each)*each }, patient, 10*time.Microsecond)
		}
		refusal(t, last, "this peer has too many requests")
		assert.LessOrEqual(t, h.Incoming(), most)

		// The first request of a real Envoy is larger than what is not counted.
		polite := openSotW(t, connect())
		polite.send(&envoysds.DiscoveryRequest{Node: &envoysds.Node{Id: "n", Cluster: strings.Repeat("x", 60_000)}, ResourceNames: []string{"default"}})
		want(t, polite.recv(), web)
		for _, s := range all {
			s.cancel()
		}
		require.Eventually(t, func() bool { return h.Incoming() == 0 }, patient, time.Millisecond, "a stream that waits keeps no request")
	})
	require.Eventually(t, func() bool { return h.Incoming() == 0 }, patient, time.Millisecond)
}

// An operator that allows more streams allows their names as well.
func TestNamesOfManyStreams(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	names := make([]string, 1000)
	for i := range names {
		names[i] = fmt.Sprint(i)
	}
	for _, test := range []struct {
		streams int
		want    string
	}{{0, codeResourceExhausted}, {math.MaxInt, codeOK}, {100_000, codeOK}}[:min(3, rounds.Of(2))] {
		h := handler(t, newFakeSource(), &sds.Options{MaxStreams: test.streams, MaxPeerStreams: test.streams})
		socket, _ := serve(t, h)
		c := dial(t, socket)
		for range 32 { // about 1 MiB each
			openSotW(t, c).ask(names...)
		}
		require.Eventually(t, func() bool { _, bytes := h.Held(); return bytes > 32*1000<<10 }, patient, time.Millisecond)
		last := asking(t, c, names...)
		require.NoError(t, last.in.Close())
		code, _ := last.status()
		assert.Equal(t, test.want, code, test.streams)
	}
}
