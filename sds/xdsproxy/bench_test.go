package xdsproxy_test

import (
	"context"
	"maps"
	"math/rand/v2"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/sds/xdsproxy"
)

// bare forwards requests with net/http and nothing else.
type bare struct{ http *http.Client }

func (b *bare) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	out, err := http.NewRequestWithContext(r.Context(), r.Method, "http://localhost"+r.URL.Path, r.Body)
	if err != nil {
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	out.Header = r.Header.Clone()
	resp, err := b.http.Do(out)
	if err != nil {
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	defer resp.Body.Close()
	maps.Copy(w.Header(), resp.Header)
	buf := make([]byte, 4<<10)
	flush := http.NewResponseController(w).Flush
	for err = flush(); err == nil; {
		var n int
		n, err = resp.Body.Read(buf)
		if n > 0 {
			if _, err := w.Write(buf[:n]); err != nil {
				return
			}
			_ = flush()
		}
	}
	for name, values := range resp.Trailer {
		w.Header()[http.TrailerPrefix+name] = values
	}
}

// BenchmarkStreams measures what a stream costs beyond one without a proxy, and how long a request and its response
// take, with 1,000 streams open whose first requests have 50 kB: through a Handler, and through the least that net/http
// can do.
func BenchmarkStreams(b *testing.B) {
	const count = 1000
	var none used
	for _, kind := range []string{"none", "bare", "xdsproxy"} {
		b.Run(kind, func(b *testing.B) {
			n := sockets(b)
			n.serve(b, "control", control(func(_ context.Context, c *grpchttp.Call, _ bool) error {
				for {
					msg, err := c.Receive()
					if err == nil {
						err = c.Send(msg[:min(len(msg), 1000)])
					}
					if err != nil {
						return err
					}
				}
			}))
			at := "proxy"
			switch kind {
			case "none":
				at = "control"
			case "bare":
				n.serve(b, at, &bare{n.client(b, "control")})
			case "xdsproxy":
				n.serve(b, at, newProxy(b, n, func(c *xdsproxy.Config) { c.SetLimits(0, 0, count, count) }))
			}
			client := grpchttp.NewClient(n.client(b, at), "http://localhost", maxMessage)
			first := encode(b, &envoysds.DiscoveryRequest{Node: &envoysds.Node{Id: "a", Cluster: strings.Repeat("c", 50_000)}, TypeUrl: clusters})
			request := encode(b, &envoysds.DiscoveryRequest{TypeUrl: clusters, VersionInfo: strings.Repeat("v", 500)})
			before := usage()
			var open []*grpchttp.Stream
			pass := func(s *grpchttp.Stream, msg []byte) {
				require.NoError(b, s.Send(msg))
				must.Get(s.Receive())(b)
			}
			for range count {
				s := client.Open(b.Context(), stream, nil)
				defer s.Close()
				pass(s, first)
				open = append(open, s)
			}
			after := usage()
			each := used{(after.memory - before.memory) / count / 1024, (after.goroutines - before.goroutines) / count}
			if kind == "none" {
				none = each
			}
			var took []time.Duration
			r := rand.New(rand.NewPCG(1, 2))
			for b.Loop() {
				start := time.Now()
				pass(open[r.IntN(count)], request)
				took = append(took, time.Since(start))
			}
			slices.Sort(took)
			b.ReportMetric(each.memory-none.memory, "KiB/stream")
			b.ReportMetric(each.goroutines-none.goroutines, "goroutines/stream")
			b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
		})
	}
}

// used is what the process holds: bytes of heap and stacks, and goroutines.
type used struct{ memory, goroutines float64 }

func usage() used {
	time.Sleep(100 * time.Millisecond)
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return used{float64(m.HeapAlloc + m.StackInuse), float64(runtime.NumGoroutine())}
}
