package workloadserver_test

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// BenchmarkUpdate is the time from a change at the server to the new snapshot in a program, over a
// Unix socket.
func BenchmarkUpdate(b *testing.B) {
	home := workloadtest.NewDomain(b, "example.org")
	snaps := []*spiffe.Snapshot{snapshot(b, home.SVID("/web"), home), snapshot(b, home.SVID("/web"), home)}
	src := &provider{}
	src.set(snaps[0], nil)
	address := listen(b, &unixsocket.Server{Handler: handler(b, src, nil)})
	s := must.Get(workloadapi.New(workloadapi.Config{Address: address}))(b)
	workloadtest.Run(b, s)
	require.NoError(b, s.Ready(b.Context()))
	b.ReportAllocs()
	for i := 1; b.Loop(); i++ {
		changed := s.Changed()
		src.set(snaps[i%2], nil)
		<-changed
	}
}

// BenchmarkPush is the time from a change until all streams have the new response; the clients run on
// the same cores.
func BenchmarkPush(b *testing.B) {
	for _, bench := range []struct{ streams, conns int }{{1, 1}, {100, 1}, {100, 100}} {
		b.Run(fmt.Sprintf("streams=%d/conns=%d", bench.streams, bench.conns), func(b *testing.B) {
			home := workloadtest.NewDomain(b, "example.org")
			snaps := []*spiffe.Snapshot{snapshot(b, home.SVID("/web"), home), snapshot(b, home.SVID("/web"), home)}
			src := &provider{}
			src.set(snaps[0], nil)
			h := handler(b, src, nil)
			received := make(chan struct{}, bench.streams)
			for range bench.conns {
				c := http2(b, h)
				for range bench.streams / bench.conns {
					r := post(b, c, service+"FetchX509SVID", frame(&wire.X509SVIDRequest{}), header, "true")
					go func() {
						in := bufio.NewReader(r.resp.Body)
						var prefix [5]byte
						for {
							if _, err := io.ReadFull(in, prefix[:]); err != nil {
								return
							}
							if _, err := in.Discard(int(binary.BigEndian.Uint32(prefix[1:]))); err != nil {
								return
							}
							received <- struct{}{}
						}
					}()
				}
			}
			for range bench.streams {
				<-received
			}
			n := 0
			b.ReportAllocs()
			for b.Loop() {
				n++
				src.set(snaps[n%2], nil)
				for range bench.streams {
					<-received
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n*bench.streams), "ns/stream")
		})
	}
}
