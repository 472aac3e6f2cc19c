package sds_test

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
)

// pushed is a server whose streams all get what push has.
type pushed struct {
	http.Handler
	push func(n int)
}

// ours is the server of this package.
func ours(b testing.TB) pushed {
	m, src := newMint(b), newFakeSource()
	pairs := []*pki.Secret{m.pair("default"), m.pair("default")}
	src.put("default", pairs[0])
	return pushed{handler(b, src, &sds.Options{MaxPeerStreams: 20_000}), func(n int) { src.put("default", pairs[n%2]) }}
}

// bare is as little as a server with net/http can do: it answers each stream with a ready frame, waits, and
// writes another one.
func bare(b testing.TB) pushed {
	m := newMint(b)
	var frames [2][]byte
	for i := range frames {
		chain, key, _ := m.pair("default").KeyPair()
		secret := mustMarshal(b, &envoysds.Secret{Name: "default", Type: &envoysds.Secret_TlsCertificate{TlsCertificate: &envoysds.TlsCertificate{
			CertificateChain: &envoysds.DataSource{Specifier: &envoysds.DataSource_InlineBytes{InlineBytes: chain}},
			PrivateKey:       &envoysds.DataSource{Specifier: &envoysds.DataSource_InlineBytes{InlineBytes: key}},
		}}})
		frames[i] = frame(0, mustMarshal(b, &envoysds.DiscoveryResponse{
			VersionInfo: strings.Repeat("0", 32), TypeUrl: typeURL, Nonce: "0123456-7", Resources: []*anypb.Any{{TypeUrl: typeURL, Value: secret}},
		}))
	}
	var mu sync.Mutex
	newest, changed := 0, make(chan struct{})
	current := func() (int, chan struct{}) {
		mu.Lock()
		defer mu.Unlock()
		return newest, changed
	}
	serve := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/grpc")
		ctl := http.NewResponseController(w)
		_ = ctl.Flush()
		for sent := -1; r.Context().Err() == nil; {
			var head [5]byte
			if _, err := io.ReadFull(r.Body, head[:]); err != nil {
				return
			}
			_, _ = io.CopyN(io.Discard, r.Body, int64(binary.BigEndian.Uint32(head[1:])))
			n, changed := current()
			for n == sent {
				select {
				case <-changed:
				case <-r.Context().Done():
					return
				}
				n, changed = current()
			}
			_, _ = w.Write(frames[n%2])
			_ = ctl.Flush()
			conns.Known(r.Context())
			sent = n
		}
	}
	return pushed{http.HandlerFunc(serve), func(n int) {
		mu.Lock()
		defer mu.Unlock()
		newest = n
		close(changed)
		changed = make(chan struct{})
	}}
}

// servers are compared in one run.
var servers = map[string]func(testing.TB) pushed{"ours": ours, "bare": bare}

// BenchmarkPush is the time from a rotation until all streams have the new secret; the clients run
// on the same cores, and acknowledge.
func BenchmarkPush(b *testing.B) {
	for _, bench := range []struct{ streams, conns int }{{1, 1}, {100, 1}, {1000, 1}, {500, 500}} {
		for name, newServer := range servers {
			b.Run(fmt.Sprintf("streams=%d/conns=%d/%s", bench.streams, bench.conns, name), func(b *testing.B) {
				h := newServer(b)
				socket, _ := serve(b, h)
				clients := make([]*http.Client, bench.conns)
				for i := range clients {
					clients[i] = dial(b, socket)
				}
				received := make(chan struct{}, bench.streams)
				var readers sync.WaitGroup
				b.Cleanup(readers.Wait)
				for i := range bench.streams {
					s := openSotW(b, clients[i%bench.conns])
					s.ask("default")
					b.Cleanup(s.cancel)
					readers.Go(func() { acknowledge(s.raw, received) })
				}
				for range bench.streams {
					<-received
				}
				n := 0
				b.ReportAllocs()
				for b.Loop() {
					n++
					h.push(n)
					for range bench.streams {
						<-received
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n*bench.streams), "ns/stream")
			})
		}
	}
}

// acknowledge reads responses, with as little work as can be, and acknowledges each.
func acknowledge(s *raw, received chan<- struct{}) {
	r := bufio.NewReader(s.resp.Body)
	var buf []byte
	var resp envoysds.DiscoveryResponse
	for {
		head, err := r.Peek(5)
		if err != nil {
			return
		}
		n := int(binary.BigEndian.Uint32(head[1:])) + 5
		if cap(buf) < n {
			buf = make([]byte, n)
		}
		if _, err := io.ReadFull(r, buf[:n]); err != nil {
			return
		}
		if err := proto.Unmarshal(buf[5:n], &resp); err != nil {
			panic(err)
		}
		ack, err := proto.Marshal(&envoysds.DiscoveryRequest{
			VersionInfo: resp.GetVersionInfo(), ResponseNonce: resp.GetNonce(), ResourceNames: []string{"default"}, TypeUrl: typeURL,
		})
		if err != nil {
			panic(err)
		}
		if _, err := s.in.Write(frame(0, ack)); err != nil {
			return
		}
		received <- struct{}{}
	}
}

// BenchmarkIdleStream is what one more stream costs that has its secret and waits: memory of both
// ends, and goroutines. Its first request is as large as that of a real Envoy with a few or with very many
// extensions. TestScaleIdleStreams has the limits.
func BenchmarkIdleStream(b *testing.B) {
	for _, size := range []int{60_000, 870_000} {
		for name, newServer := range servers {
			b.Run(fmt.Sprintf("request=%dkB/%s", size/1000, name), func(b *testing.B) {
				memory, goroutines := idleStreams(b, newServer, 1000, size)
				for b.Loop() { // nothing happens to an idle stream
					continue
				}
				b.ReportMetric(memory, "B/stream")
				b.ReportMetric(goroutines, "goroutines/stream")
			})
		}
	}
}

// idleStreams opens n streams, 1,000 on a connection, with a first request of that size, and returns what each costs.
func idleStreams(tb testing.TB, newServer func(testing.TB) pushed, n, size int) (memory, goroutines float64) {
	h := newServer(tb)
	socket, _ := serve(tb, h)
	clients := make([]*http.Client, (n+999)/1000)
	node := protowire.AppendBytes(protowire.AppendTag(nil, 3, protowire.BytesType), make([]byte, size)) // metadata
	node = protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), node)
	request := frame(0, append(node, mustMarshal(tb, &envoysds.DiscoveryRequest{ResourceNames: []string{"default"}, TypeUrl: typeURL})...))
	var streams []sotw
	start := func(c *http.Client) {
		s := openSotW(tb, c)
		must.Get(s.in.Write(request))(tb)
		s.ack(s.recv(), "default")
		streams = append(streams, s)
	}
	for i := range clients {
		clients[i] = dial(tb, socket)
		start(clients[i])
	}
	measure := func() uint64 {
		used := uint64(math.MaxUint64)
		for i := range 50 { // sync.Pool, finalizers, and streams of other tests that are ending need more than one round
			runtime.GC()
			time.Sleep(10 * time.Millisecond)
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			before := used
			if used = m.HeapAlloc + m.StackInuse; i >= 2 && used > before-before/200 {
				break
			}
		}
		return used
	}
	before, beforeGoroutines := measure(), runtime.NumGoroutine()
	for i := range n {
		start(clients[i%len(clients)])
	}
	after, afterGoroutines := measure(), runtime.NumGoroutine()
	for _, s := range streams {
		s.cancel()
	}
	runtime.KeepAlive(h)
	return (float64(after) - float64(before)) / float64(n), float64(afterGoroutines-beforeGoroutines) / float64(n)
}
