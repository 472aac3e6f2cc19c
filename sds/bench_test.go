package sds_test

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
)

// BenchmarkPush is the time from a rotation until all streams have the new secret; the clients run
// on the same cores, and acknowledge.
func BenchmarkPush(b *testing.B) {
	for _, bench := range []struct{ streams, conns int }{{1, 1}, {100, 1}, {1000, 1}, {500, 500}} {
		b.Run(fmt.Sprintf("streams=%d/conns=%d", bench.streams, bench.conns), func(b *testing.B) {
			m, src := newMint(b), newFakeSource()
			pairs := []*pki.Secret{m.pair("default"), m.pair("default")}
			src.put("default", pairs[0])
			socket, _ := serve(b, handler(b, src, nil))
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
				src.put("default", pairs[n%2])
				for range bench.streams {
					<-received
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n*bench.streams), "ns/stream")
		})
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
// ends, and goroutines.
func BenchmarkIdleStream(b *testing.B) {
	m, src := newMint(b), newFakeSource()
	src.put("default", m.pair("default"))
	h := handler(b, src, nil)
	socket, _ := serve(b, h)
	c := dial(b, socket)
	first := openSotW(b, c)
	first.ask("default")
	first.recv()
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	goroutines := runtime.NumGoroutine()
	const n = 5000
	for range n {
		s := openSotW(b, c)
		s.ask("default")
		s.ack(s.recv(), "default")
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	require.Equal(b, n+1, h.Status().Streams)
	for b.Loop() { // nothing happens to an idle stream
		continue
	}
	b.ReportMetric(float64(after.HeapAlloc+after.StackInuse-before.HeapAlloc-before.StackInuse)/n, "B/stream")
	b.ReportMetric(float64(runtime.NumGoroutine()-goroutines)/n, "goroutines/stream")
}

// BenchmarkFetch is one secret by REST, as a poller takes it.
func BenchmarkFetch(b *testing.B) {
	m, src := newMint(b), newFakeSource()
	src.put("default", m.pair("default"))
	socket, _ := serve(b, handler(b, src, &sds.Options{}))
	c := dial(b, socket)
	b.ReportAllocs()
	for b.Loop() {
		require.Equal(b, http.StatusOK, post(b, c, `{"resource_names":["default"]}`, nil).StatusCode)
	}
}
