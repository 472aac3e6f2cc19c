package sds_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
)

var long = flag.Bool("long", false, "run at full scale")

// scaled returns full with -long, and else short.
func scaled(full, short int) int {
	if *long {
		return full
	}
	return short
}

// TestScaleIdleStreams holds the memory and the goroutines of a stream that waits after a first request of 60 kB, of both
// ends, against a bare handler in the same run.
func TestScaleIdleStreams(t *testing.T) { // not parallel: it measures
	rounds.Slow(t)
	n := scaled(10_000, 300)
	base, _ := idleStreams(t, bare, n, 60_000)
	each, goroutines := idleStreams(t, ours, n, 60_000)
	t.Logf("%d streams: %.0f bytes and %.2f goroutines each, a bare handler %.0f bytes", n, each, goroutines, base)
	assert.LessOrEqual(t, goroutines, 2.05)
	if !rounds.Race {
		assert.LessOrEqual(t, each, 1.15*base)
	}
}

// client is a stream whose messages are handled as they come, on a goroutine of the test's.
type client struct {
	*raw
}

// receive returns the next response.
func (c client) receive() (*envoysds.DiscoveryResponse, error) {
	var head [5]byte
	if _, err := io.ReadFull(c.resp.Body, head[:]); err != nil {
		return nil, err
	}
	b := make([]byte, binary.BigEndian.Uint32(head[1:]))
	if _, err := io.ReadFull(c.resp.Body, b); err != nil {
		return nil, err
	}
	var r envoysds.DiscoveryResponse
	return &r, proto.Unmarshal(b, &r)
}

// answer acknowledges r, or rejects it.
func (c client) answer(r *envoysds.DiscoveryResponse, reject bool, names ...string) error {
	q := &envoysds.DiscoveryRequest{VersionInfo: r.GetVersionInfo(), ResponseNonce: r.GetNonce(), ResourceNames: names, TypeUrl: typeURL}
	if reject {
		q.VersionInfo, q.ErrorDetail = "", &envoysds.Status{Code: 13, Message: "no"}
	}
	b, err := proto.Marshal(q)
	if err != nil {
		return err
	}
	_, err = c.in.Write(frame(0, b))
	return err
}

// TestScaleBadClient has clients measure how long each push takes them, by turns in quiet and beside one of each kind of bad
// client, as times on a busy machine change from one second to the next. One does not read, one sends garbage and comes back at once, one rejects all that it gets and asks
// again.
func TestScaleBadClient(t *testing.T) { // not parallel: it measures
	rounds.Slow(t)
	streams, turns := scaled(999, 99), scaled(12, 4)
	const conns, pushes = 9, 5
	m, src := newMint(t), newFakeSource()
	pairs := []*pki.Secret{m.pair("default"), m.pair("default")}
	src.put("default", pairs[0])
	socket, _ := serve(t, handler(t, src, nil))
	var begun atomic.Int64
	took := make(chan time.Duration, streams)
	for range conns {
		c := dial(t, socket)
		for range streams / conns {
			s := client{open(t, c, "StreamSecrets")}
			sotw(s).ask("default")
			go func() {
				for {
					r, err := s.receive()
					if err != nil {
						return
					}
					if s.answer(r, false, "default") != nil {
						return
					}
					took <- time.Duration(time.Now().UnixNano() - begun.Load())
				}
			}()
		}
	}
	streams = streams / conns * conns
	for range streams {
		<-took
	}
	version := 0
	p99 := func() (each []time.Duration) { // of each push of a turn, but for the first, as the one after a rest takes longer
		for range 1 + pushes {
			var all []time.Duration
			version++
			begun.Store(time.Now().UnixNano())
			src.put("default", pairs[version%2])
			for range streams {
				select {
				case d := <-took:
					all = append(all, d)
				case <-time.After(patient):
					require.FailNow(t, "a stream got no push")
				}
			}
			slices.Sort(all)
			each = append(each, all[len(all)*99/100])
		}
		return each[1:]
	}
	quantile := func(each []time.Duration, percent int) time.Duration {
		return slices.Sorted(slices.Values(each))[len(each)*percent/100].Round(10 * time.Microsecond)
	}
	good, delayed := 0, 0
	for good < 2 && delayed < 2 { // two of three
		var quiet, beside []time.Duration
		rejections := 0
		for range turns {
			time.Sleep(200 * time.Millisecond) // what the bad clients have caused is over
			quiet = append(quiet, p99()...)
			end := misbehave(t, socket)
			beside = append(beside, p99()...)
			rejections += end()
		}
		t.Logf("%d streams: p99 of a push %v (%v in the fastest tenth) in quiet and %v (%v) beside bad clients, of which one has rejected %d",
			streams, quantile(quiet, 50), quantile(quiet, 10), quantile(beside, 50), quantile(beside, 10), rejections)
		assert.Positive(t, rejections)
		if quantile(beside, 50) <= 2*quantile(quiet, 50)+10*time.Millisecond {
			good++
		} else {
			delayed++
		}
	}
	assert.Less(t, delayed, 2, "bad clients delay the others")
}

// misbehave has three bad clients until end is called, which returns how many responses one of them has rejected.
func misbehave(t *testing.T, socket string) (end func() int) {
	ctx, cancel := context.WithCancel(t.Context())
	var bad sync.WaitGroup
	mute := openSotW(t, dial(t, socket))
	mute.ask("default") // and reads nothing
	bad.Go(func() {
		c := dial(t, socket)
		for ctx.Err() == nil {
			req, _ := http.NewRequestWithContext(ctx, http.MethodPost, "http://localhost"+service+"StreamSecrets", bytes.NewReader(frame(0, bytes.Repeat([]byte{0xff}, 64<<10))))
			req.Header.Set("Content-Type", "application/grpc")
			if resp, err := c.Do(req); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
			}
			time.Sleep(time.Millisecond)
		}
	})
	grumpy := client{open(t, dial(t, socket), "StreamSecrets")}
	sotw(grumpy).ask("default")
	rejections := 0
	bad.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			r, err := grumpy.receive()
			if err != nil {
				return
			}
			rejections++
			if grumpy.answer(r, true, "default", fmt.Sprint("other-", n)) != nil {
				return
			}
		}
	})
	return func() int {
		cancel()
		grumpy.cancel()
		mute.cancel()
		bad.Wait()
		return rejections
	}
}

// TestScaleCycles opens and closes streams, of both kinds, with a client that leaves before, while and after it is
// served: goroutines, descriptors and heap are then where they were.
func TestScaleCycles(t *testing.T) { // not parallel: it measures
	rounds.Slow(t)
	cycles := scaled(10_000, 3000)
	_, src, _ := withPair(t, "default")
	h := handler(t, src, nil)
	socket, _ := serve(t, h)
	usage := func() (goroutines, descriptors int, heap uint64) {
		for range 3 {
			runtime.GC()
		}
		var s runtime.MemStats
		runtime.ReadMemStats(&s)
		open, _ := os.ReadDir("/proc/self/fd") // none elsewhere than on Linux
		return runtime.NumGoroutine(), len(open), s.HeapAlloc
	}
	cycle := func(i int, c *http.Client) {
		ctx, cancel := context.WithTimeout(t.Context(), patient)
		defer cancel()
		r, w := io.Pipe()
		defer r.Close()
		defer w.Close()
		method := []string{"StreamSecrets", "DeltaSecrets"}[i%2]
		req := must.Get(http.NewRequestWithContext(ctx, http.MethodPost, "http://localhost"+service+method, r))(t)
		req.Header.Set("Content-Type", "application/grpc")
		resp := must.Get(c.Do(req))(t)
		defer resp.Body.Close()
		names := []string{"default", fmt.Sprint("missing-", i)}
		var ask proto.Message = &envoysds.DiscoveryRequest{ResourceNames: names, TypeUrl: typeURL}
		if i%2 == 1 {
			ask = &envoysds.DeltaDiscoveryRequest{ResourceNamesSubscribe: names, TypeUrl: typeURL}
		}
		if i%3 == 0 {
			return
		}
		must.Get(w.Write(frame(0, mustMarshal(t, ask))))(t)
		if i%3 == 1 {
			return
		}
		var head [5]byte
		must.Get(io.ReadFull(resp.Body, head[:]))(t)
		if i%5 == 0 {
			require.NoError(t, w.Close())
			must.Get(io.Copy(io.Discard, resp.Body))(t)
		}
	}
	c := sds.UnixClient(socket)
	run := func(n int) {
		for i := range n {
			if i%50 == 49 { // and a connection of its own now and then
				c.CloseIdleConnections()
				c = sds.UnixClient(socket)
			}
			cycle(i, c)
		}
		require.Eventually(t, func() bool { return h.Status().Streams == 0 }, patient, time.Millisecond)
		c.CloseIdleConnections()
	}
	run(100) // what is made once
	goroutines, descriptors, heap := usage()
	run(cycles)
	assert.EventuallyWithT(t, func(t *assert.CollectT) {
		g, d, b := usage()
		assert.LessOrEqual(t, g, goroutines+4, "goroutines")
		assert.LessOrEqual(t, d, descriptors+2, "descriptors")
		assert.LessOrEqual(t, b, heap+heap/10+512<<10, "heap")
	}, patient, 50*time.Millisecond)
	open, names := h.Held()
	assert.Zero(t, open)
	assert.Zero(t, names)
	assert.Zero(t, h.Incoming())
	assert.Empty(t, h.Status().Names)
}
