package workloadapi_test

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	wire "github.com/svidkit/svidkit/internal/wire/workloadapi"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// BenchmarkReaders is what a handshake pays.
func BenchmarkReaders(b *testing.B) {
	home := newDomain(b, "example.org")
	m := home.response(b, home.SVID("/web"))
	s, err := workloadapi.New(workloadapi.Config{Client: inMemory(b, fake(b, func(c *call) { c.send(m); c.wait() }))})
	require.NoError(b, err)
	run(b, s)
	require.NoError(b, s.Ready(b.Context()))
	td := home.TrustDomain()
	b.Run("SVID", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, _ = s.SVID()
		}
	})
	b.Run("Bundle", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, _ = s.Bundle(td)
		}
	})
}

// BenchmarkRead is the work for one response: of a renewal, while the bundles stay, and of a first one.
func BenchmarkRead(b *testing.B) {
	for _, federated := range []int{0, 10, 100} {
		home := newDomain(b, "example.org")
		var others []domain
		for i := range federated {
			others = append(others, newDomain(b, fmt.Sprintf("d%d.test", i)))
		}
		two := [][]byte{marshal(b, home.response(b, home.SVID("/web"), others...)), marshal(b, home.response(b, home.SVID("/web"), others...))}
		b.Run(fmt.Sprintf("renewal/federated=%d", federated), func(b *testing.B) {
			var r workloadapi.X509Reader
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if _, err := r.Read(two[i%2]); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprintf("first/federated=%d", federated), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				var r workloadapi.X509Reader
				if _, err := r.Read(two[0]); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkUpdate is the time from a change at the server to the new snapshot in a program, over a
// Unix socket.
func BenchmarkUpdate(b *testing.B) {
	home := newDomain(b, "example.org")
	snaps := []*spiffe.Snapshot{snapshot(b, home.SVID("/web"), home), snapshot(b, home.SVID("/web"), home)}
	src := &provider{}
	src.set(snaps[0], nil)
	address := listen(b, &workloadapi.Server{Address: "unix://" + socketDir(b) + "/s", Handler: handler(b, src, nil)})
	s, err := workloadapi.New(workloadapi.Config{Address: address})
	require.NoError(b, err)
	run(b, s)
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
			home := newDomain(b, "example.org")
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
