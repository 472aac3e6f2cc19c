package workloadserver_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"net"
	"net/http"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

var long = flag.Bool("long", false, "the flood lasts for 10 minutes")

// A peer floods the server, over real sockets, with all that it can think of: streams that it keeps, requests
// that never end, calls that are refused, reflection, connections that it cuts. Workloads beside it get each
// rotation and each token, and nothing is left when the flood is over.
func TestFlood(t *testing.T) {
	rounds.NotShort(t)
	duration := time.Duration(rounds.Of(1)) * time.Second / 4
	if *long {
		duration = 10 * time.Minute
	}
	goroutines := runtime.NumGoroutine()
	home := workloadtest.NewDomain(t, "example.org")
	src := &provider{}
	src.set(snapshot(t, home.SVID("/web"), home), nil)
	const each = 50
	h := handler(t, src, &workloadserver.Options{
		MaxStreams: 3 * each, MaxPeerStreams: each,
		Identities: func(context.Context) ([]workloadserver.Identity, error) {
			snap, _ := src.Snapshot()
			svid, err := snap.SVID()
			return []workloadserver.Identity{{SVID: svid}}, err
		},
		IssueJWTSVID: func(_ context.Context, id spiffe.ID, audience []string) (string, error) {
			if audience[0] == "no" {
				return "", errors.New("no")
			}
			return id.String(), nil
		},
	})
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	stop := workloadtest.ServeOn(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("flood") != "" { // all of its connections are one peer, as those of a user on a Unix socket are
			r.RemoteAddr = "127.0.0.1:1"
		}
		h.ServeHTTP(w, r)
	}), unixsocket.ConnContext)
	client := func() *http.Client {
		transport := &http.Transport{Protocols: new(http.Protocols), DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
		}}
		transport.Protocols.SetUnencryptedHTTP2(true)
		return &http.Client{Transport: transport}
	}

	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	var floods atomic.Int64
	request := func(ctx context.Context, c *http.Client, path string, body io.Reader, keep bool) {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://localhost"+path, body)
		if !assert.NoError(t, err) {
			return
		}
		req.Header = http.Header{"Content-Type": {"application/grpc"}, "Te": {"trailers"}, "Flood": {"1"}, header: {"true"}}
		resp, err := c.Do(req)
		floods.Add(1)
		if err != nil {
			return
		}
		if keep {
			_, _ = io.Copy(io.Discard, resp.Body)
		}
		_ = resp.Body.Close()
	}
	for i := range 6 {
		all.Go(func() {
			c := client()
			defer c.CloseIdleConnections()
			var kept sync.WaitGroup
			defer kept.Wait()
			for n := 0; ctx.Err() == nil; n++ {
				switch (i + n) % 6 {
				case 0, 1: // streams that are kept, as many as can be had
					for range 10 {
						kept.Go(func() {
							brief, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
							defer cancel()
							request(brief, c, service+"FetchX509SVID", bytes.NewReader(frame(&wire.X509SVIDRequest{})), true)
						})
					}
					time.Sleep(time.Millisecond)
				case 2: // a request of which no more comes
					kept.Go(func() {
						brief, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
						defer cancel()
						in, out := io.Pipe()
						defer context.AfterFunc(brief, func() { _ = out.Close() })()
						request(brief, c, service+"FetchJWTBundles", in, false)
					})
				case 3:
					request(ctx, c, service+"FetchJWTSVID", bytes.NewReader(frame(&wire.JWTSVIDRequest{Audience: []string{"no"}})), false)
				case 4:
					request(ctx, c, "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", bytes.NewReader(bytes.Repeat([]byte{0, 0, 0, 0, 0}, 100)), true)
				case 5:
					request(ctx, c, service+"FetchX509SVID", bytes.NewReader([]byte("\x00\xff\xff\xff\xff")), false)
					if n%30 == 0 {
						c.CloseIdleConnections()
					}
				}
			}
		})
	}

	// The workloads.
	var sources []*workloadapi.Source
	var clients []*workloadapi.Client
	for range 3 {
		c := must.Get(workloadapi.NewClient("", client()))(t)
		clients = append(clients, c)
		s := must.Get(workloadapi.New(workloadapi.Config{Client: c, JWTBundles: true}))(t)
		sources = append(sources, s)
		all.Go(func() { assert.NoError(t, s.Run(ctx)) })
		ready, done := context.WithTimeout(ctx, patient)
		require.NoError(t, s.Ready(ready))
		done()
	}
	var mu sync.Mutex
	var waits, calls []time.Duration
	for _, s := range sources {
		all.Go(func() {
			for ctx.Err() == nil {
				start := time.Now()
				token, err := s.Fetch(ctx, "db")
				if ctx.Err() != nil {
					return
				}
				if assert.NoError(t, err) {
					assert.Equal(t, "spiffe://example.org/web", token)
				}
				mu.Lock()
				calls = append(calls, time.Since(start))
				mu.Unlock()
				time.Sleep(5 * time.Millisecond)
			}
		})
	}
	rotations, most := 0, 0
	for end := time.Now().Add(duration); time.Now().Before(end); rotations++ {
		next := home.SVID("/web")
		start := time.Now()
		src.set(snapshot(t, next, home), nil)
		for _, s := range sources {
			require.Eventually(t, func() bool {
				svid, err := s.SVID()
				return err == nil && bytes.Equal(svid.Leaf().Raw, next.Leaf().Raw)
			}, patient, time.Millisecond)
		}
		waits = append(waits, time.Since(start))
		most = max(most, h.Streams())
		time.Sleep(20 * time.Millisecond)
	}
	for _, s := range sources {
		assert.Equal(t, rotations+1, updatesOf(s, "x509"), "each by the one stream")
		for _, up := range s.Report().Upstreams {
			assert.Zero(t, up.Failures)
		}
	}
	cancel()
	all.Wait()
	p99 := func(d []time.Duration) time.Duration {
		slices.Sort(d)
		return d[len(d)*99/100]
	}
	t.Logf("%d requests of the flood; %d rotations, p99 %v; %d tokens, p99 %v", floods.Load(), rotations, p99(waits), len(calls), p99(calls))
	assert.Greater(t, floods.Load(), int64(50))
	assert.GreaterOrEqual(t, most, each, "the flood takes what it may have")
	assert.Less(t, p99(waits), 5*time.Second)

	require.Eventually(t, func() bool { return h.Streams() == 0 }, patient, time.Millisecond)
	stop()
	for _, c := range clients {
		c.CloseIdleConnections()
	}
	assert.Eventually(t, func() bool { return runtime.NumGoroutine() <= goroutines+3 }, patient, 10*time.Millisecond, "%s", lazyStacks{})
}

// lazyStacks prints the stacks of all goroutines.
type lazyStacks struct{}

func (lazyStacks) String() string {
	b := make([]byte, 1<<20)
	return string(b[:runtime.Stack(b, true)])
}
