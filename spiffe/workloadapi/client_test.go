package workloadapi_test

import (
	"context"
	"crypto/ecdsa"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// onSocket serves h on a Unix socket and returns its address.
func onSocket(t testing.TB, h http.Handler) string {
	t.Helper()
	path := filepath.Join(workloadtest.SocketDir(t), "s")
	t.Cleanup(workloadtest.ServeOn(must.Get(net.Listen("unix", path))(t), h, nil))
	return "unix://" + path
}

// dial returns a client of the server at address.
func dial(t testing.TB, address string) *workloadapi.Client {
	t.Helper()
	c := must.Get(workloadapi.NewClient(address, nil))(t)
	t.Cleanup(c.CloseIdleConnections)
	return c
}

// Every request carries the header, once and as it is spelt; streams and other calls alike.
func TestSecurityHeader(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WEP-5", "GO-14")
	var seen []string
	c := dial(t, onSocket(t, fake(t, func(c *call) {
		assert.Equal(t, []string{"true"}, c.header.Values("workload.spiffe.io"), c.rpc)
		assert.Equal(t, "application/grpc", c.header.Get("Content-Type"))
		assert.Equal(t, "identity", c.header.Get("Grpc-Accept-Encoding"), "no compression")
		seen = append(seen, c.rpc)
		c.end(workloadtest.Unimplemented, "")
	})))
	calls := map[string]func() error{
		"FetchX509SVID":    func() error { return last2(c.WatchX509SVIDs(t.Context())) },
		"FetchX509Bundles": func() error { return last2(c.WatchX509Bundles(t.Context())) },
		"FetchJWTBundles":  func() error { return last2(c.WatchJWTBundles(t.Context())) },
		"FetchWITSVID":     func() error { return last2(c.WatchWITSVIDs(t.Context(), spiffe.ID{})) },
		"FetchWITBundles":  func() error { return last2(c.WatchWITBundles(t.Context())) },
		"FetchJWTSVID":     func() error { _, err := c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "a"); return err },
		"ValidateJWTSVID":  func() error { _, _, err := c.ValidateJWTSVID(t.Context(), "a", "b"); return err },
	}
	for name, call := range calls {
		err := call()
		require.ErrorIs(t, err, errors.ErrUnsupported, name)
		assert.ErrorContains(t, err, "workloadapi: "+name+" at unix:///")
		assert.True(t, err.(*workloadapi.Error).Final)
	}
	assert.Len(t, seen, len(calls), "one attempt each")
}

// last2 returns the last error of a watch that ends by itself.
func last2[T any](seq func(func(T, error) bool)) (last error) {
	for _, err := range seq {
		last = err
	}
	return last
}

func TestFetchJWTSVID(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-24", "WAPI-43", "WAPI-14", "WEP-14")
	web, db := spiffe.MustParseID("spiffe://example.org/web"), spiffe.MustParseID("spiffe://example.org/db")
	token := func(id spiffe.ID, hint string) *wire.JWTSVID {
		return &wire.JWTSVID{SpiffeId: id.String(), Svid: "token of " + id.Path(), Hint: hint}
	}
	var answer *wire.JWTSVIDResponse
	code, calls := workloadtest.OK, 0
	synctest.Test(t, func(t *testing.T) {
		c := inMemory(t, fake(t, func(c *call) {
			calls++
			assert.NotEmpty(t, c.header.Get("Grpc-Timeout"))
			var req wire.JWTSVIDRequest
			require.NoError(t, proto.Unmarshal(c.request, &req))
			if code != workloadtest.OK {
				c.end(code, fmt.Sprint(req.GetAudience(), req.GetSpiffeId()))
				return
			}
			c.send(answer)
		}))
		answer = &wire.JWTSVIDResponse{Svids: []*wire.JWTSVID{token(web, "a"), token(db, "a"), token(db, ""), token(web, "")}}
		all := must.Get(c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "x", "y"))(t)
		require.Len(t, all, 3)
		assert.Equal(t, web, all[0].ID)
		assert.Equal(t, "token of /web", all[0].Token())
		assert.Nil(t, all[0].KeyJWK())
		assert.Equal(t, "a", all[0].Hint)
		assert.Equal(t, "token of /db", all[1].Token())

		// What the server must not answer.
		for want, m := range map[string]*wire.JWTSVIDResponse{
			"no SVIDs":        {},
			"must begin with": {Svids: []*wire.JWTSVID{{Svid: "x"}}},
			"svid is empty":   {Svids: []*wire.JWTSVID{token(web, ""), {SpiffeId: web.String()}}},
			"\"x\"":           {Svids: []*wire.JWTSVID{{SpiffeId: "x", Svid: "x"}}},
			"more than 512":   {Svids: slices.Repeat([]*wire.JWTSVID{token(web, "")}, 513)},
		} {
			answer = m
			_, err := c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "x")
			require.ErrorIs(t, err, workloadapi.ErrBadResponse, want)
			assert.ErrorContains(t, err, want)
			assert.NotContains(t, err.Error(), "token of")
		}
		answer = &wire.JWTSVIDResponse{Svids: []*wire.JWTSVID{token(db, "a"), token(web, "b")}} // each, and not only the first
		for _, id := range []spiffe.ID{web, db} {
			must.Fail(t, must.Err(c.FetchJWTSVIDs(t.Context(), id, "x")), workloadapi.ErrBadResponse, "it is that of")
		}
		answer = &wire.JWTSVIDResponse{Svids: []*wire.JWTSVID{token(db, "a"), token(db, "b")}}
		_, err := c.FetchJWTSVIDs(t.Context(), web, "x")
		assert.ErrorContains(t, err, `it is that of "spiffe://example.org/db"`)
		must.Get(c.FetchJWTSVIDs(t.Context(), db, "x"))(t)

		// The request as it is sent, and the codes.
		for c2, want := range map[int]error{
			workloadtest.PermissionDenied: workloadapi.ErrDenied, workloadtest.InvalidArgument: workloadapi.ErrRefused, workloadtest.Unimplemented: errors.ErrUnsupported,
		} {
			code = c2
			calls = 0
			_, err = c.FetchJWTSVIDs(t.Context(), db, "x", "y")
			must.Fail(t, err, want, `"[x y]spiffe://example.org/db"`)
			_, again := err.(*workloadapi.Error).Retryable()
			assert.Equal(t, c2 == workloadtest.PermissionDenied, again)
			assert.Equal(t, 1, calls)
		}
		code = workloadtest.Unavailable
		_, err = c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "x")
		assert.ErrorContains(t, err, `status unavailable: "[x]"`)
		_, again := err.(*workloadapi.Error).Retryable()
		assert.True(t, again)

		// What would be refused is not sent (WAPI-13).
		calls = 0
		for _, audience := range [][]string{nil, {""}, {"a", ""}, {"\xff"}} {
			_, err = c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, audience...)
			require.ErrorIs(t, err, workloadapi.ErrRefused, "%q", audience)
		}
		assert.Zero(t, calls)
	})
}

func TestValidateJWTSVID(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-52", "WAPI-54")
	claims, err := structpb.NewStruct(map[string]any{"sub": "spiffe://example.org/web", "aud": []any{"a"}, "exp": 1767225600, "x": map[string]any{"y": nil}})
	require.NoError(t, err)
	var answer proto.Message
	synctest.Test(t, func(t *testing.T) {
		c := inMemory(t, fake(t, func(c *call) {
			var req wire.ValidateJWTSVIDRequest
			require.NoError(t, proto.Unmarshal(c.request, &req))
			if req.GetAudience() != "a" || req.GetSvid() != "t" {
				c.end(workloadtest.InvalidArgument, "no")
				return
			}
			c.send(answer)
		}))
		answer = &wire.ValidateJWTSVIDResponse{SpiffeId: "spiffe://example.org/web", Claims: claims}
		id, got := must.Get2(c.ValidateJWTSVID(t.Context(), "a", "t"))(t)
		assert.Equal(t, "spiffe://example.org/web", id.String())
		assert.Equal(t, map[string]any{"sub": "spiffe://example.org/web", "aud": []any{"a"}, "exp": 1767225600.0, "x": map[string]any{"y": nil}}, got)
		_, _, err := c.ValidateJWTSVID(t.Context(), "a", "bad")
		require.ErrorIs(t, err, workloadapi.ErrRefused)
		for _, args := range [][2]string{{"", "t"}, {"a", ""}, {"\xff", "t"}} {
			_, _, err = c.ValidateJWTSVID(t.Context(), args[0], args[1])
			require.ErrorIs(t, err, workloadapi.ErrRefused)
		}
		for want, m := range map[string]*wire.ValidateJWTSVIDResponse{
			"must begin with": {Claims: claims}, "claims are empty": {SpiffeId: "spiffe://example.org/web"}, "\"x\"": {SpiffeId: "x", Claims: claims},
		} {
			answer = m
			id, got, err = c.ValidateJWTSVID(t.Context(), "a", "t")
			must.Fail(t, err, workloadapi.ErrBadResponse, want)
			assert.True(t, id.IsZero())
			assert.Nil(t, got)
		}
	})
}

// A call that is not answered ends.
func TestCallTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := inMemory(t, fake(t, func(c *call) { c.wait() }))
		start := time.Now()
		require.ErrorIs(t, must.Err(c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "a")), context.DeadlineExceeded)
		assert.Equal(t, 30*time.Second, time.Since(start))
	})
}

func TestWIT(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "STAB-2", "STAB-3", "WAPI-3", "WAPI-12", "WAPI-14", "WAPI-16", "WAPI-24", "WAPI-60",
		"WAPI-62", "WAPI-63", "AMB-8", "AMB-21")
	synctest.Test(t, func(t *testing.T) {
		web := spiffe.MustParseID("spiffe://example.org/web")
		svid := &wire.WITSVID{SpiffeId: web.String(), WitSvid: "t", WitSvidKey: "{}", Hint: "h"}
		var answers []proto.Message
		c := inMemory(t, fake(t, func(c *call) {
			if c.rpc == "FetchWITSVID" {
				var req wire.WITSVIDRequest
				require.NoError(t, proto.Unmarshal(c.request, &req))
				assert.Equal(t, web.String(), req.GetSpiffeId())
			}
			for _, m := range answers {
				c.send(m)
			}
			c.end(workloadtest.Unimplemented, "")
		}))
		answers = []proto.Message{
			&wire.WITSVIDResponse{Svids: []*wire.WITSVID{svid, svid}},
			&wire.WITSVIDResponse{},
			&wire.WITSVIDResponse{Svids: []*wire.WITSVID{{SpiffeId: web.String(), WitSvid: "t"}}},
			&wire.WITSVIDResponse{Svids: []*wire.WITSVID{{SpiffeId: "spiffe://example.org/db", WitSvid: "t", WitSvidKey: "{}"}}},
			&wire.WITSVIDResponse{Svids: []*wire.WITSVID{{WitSvid: "t", WitSvidKey: "{}"}}},
		}
		var got []string
		for all, err := range c.WatchWITSVIDs(t.Context(), web) {
			if err != nil {
				got = append(got, "error")
				continue
			}
			require.Len(t, all, 1)
			got = append(got, all[0].ID.String()+" "+all[0].Token()+" "+string(all[0].KeyJWK())+" "+all[0].Hint)
		}
		assert.Equal(t, []string{"spiffe://example.org/web t {} h", "error", "error", "error", "error", "error"}, got)

		key := workloadtest.NewKey(t).Public().(*ecdsa.PublicKey)
		keys := func(ids ...string) string {
			named := func(i int, jwk map[string]any) { jwk["kid"] = ids[i] }
			return string(jwks(t, named, slices.Repeat([]*ecdsa.PublicKey{key}, len(ids))...))
		}
		answers = []proto.Message{
			&wire.WITBundlesResponse{Bundles: map[string]string{
				"spiffe://example.org": keys("1", "2"), "spiffe://other.test": keys("3"), "spiffe://third.test": "",
				"x": keys("4"), "spiffe://example.org/web": keys("5"),
			}},
			&wire.WITBundlesResponse{},
			&wire.WITBundlesResponse{Bundles: map[string]string{
				"spiffe://example.org": "{", "spiffe://fourth.test": keys("6"),
			}},
			&wire.WITBundlesResponse{Bundles: map[string]string{"spiffe://example.org": `{"keys":[]}`}},
		}
		got = nil
		for u, err := range c.WatchWITBundles(t.Context()) {
			if err != nil {
				got = append(got, "error")
				continue
			}
			var text strings.Builder
			for b := range u.Bundles.All() {
				contents := b.Contents()
				assert.Empty(t, contents.JWTAuthorities, "they are for WIT-SVIDs alone")
				fmt.Fprint(&text, b.TrustDomain(), slices.Sorted(maps.Keys(contents.WITAuthorities)), " ")
			}
			got = append(got, fmt.Sprint(text.String(), len(u.Skipped), " skipped"))
		}
		assert.Equal(t, []string{
			"example.org [1 2] other.test [3] third.test [] 2 skipped",
			"error",
			"example.org [1 2] fourth.test [6] 1 skipped", // the previous one stays, and what is absent is gone
			"example.org [] 0 skipped",
			"error", // Unimplemented, which ends the watch
		}, got)
	})
}

// A loop that is left closes its stream, and a context that is done ends the loop.
func TestWatchEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		m := response(t, home, home.SVID("/web"))
		var open atomic.Int32
		c := inMemory(t, fake(t, func(c *call) {
			open.Add(1)
			defer open.Add(-1)
			c.send(&wire.X509SVIDResponse{})
			c.send(m)
			c.wait()
		}))
		for want := range 2 { // leave at the error, or at the update
			n := 0
			for _, err := range c.WatchX509SVIDs(t.Context()) {
				assert.Equal(t, n == 0, err != nil)
				if n == want {
					break
				}
				n++
			}
			synctest.Wait()
			assert.Zero(t, open.Load())
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		n := 0
		for range c.WatchX509SVIDs(ctx) {
			if n++; n == 2 {
				assert.Equal(t, int32(1), open.Load())
				cancel()
			}
		}
		assert.Equal(t, 2, n, "that ctx is done is not yielded")
		synctest.Wait()
		assert.Zero(t, open.Load())
		for range c.WatchX509SVIDs(ctx) {
			t.Error("the context is done")
		}
	})
}

// A server that starts late is found, on both networks.
func TestLateServer(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "WEP-15", "WEP-3", "WEP-11")
	home := workloadtest.NewDomain(t, "example.org")
	m := response(t, home, home.SVID("/web"))
	h := fake(t, func(c *call) { c.send(m); c.wait() })
	free := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	tcp := free.Addr().String()
	require.NoError(t, free.Close())
	for network, target := range map[string]string{"unix": filepath.Join(workloadtest.SocketDir(t), "s"), "tcp": tcp} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			s := must.Get(workloadapi.New(workloadapi.Config{Address: network + "://" + target}))(t)
			workloadtest.Run(t, s)
			require.Eventually(t, func() bool { return s.Status().X509.Failures > 0 }, patient, time.Millisecond)
			must.Fail(t, must.Err(s.SVID()), spiffe.ErrNotReady, target)
			t.Cleanup(workloadtest.ServeOn(must.Get(net.Listen(network, target))(t), h, nil))
			ctx, cancel := context.WithTimeout(t.Context(), patient)
			defer cancel()
			require.NoError(t, s.Ready(ctx))
		})
	}
}

func TestNewClient(t *testing.T) {
	t.Parallel()
	_, err := workloadapi.NewClient("/run/a.sock", http.DefaultClient)
	assert.ErrorContains(t, err, "write unix:///run/a.sock")
	s := must.Get(workloadapi.New(workloadapi.Config{Address: "UNIX:/run/a.sock"}))(t)
	assert.Equal(t, "unix:///run/a.sock", s.Server())
	limits := workloadapi.HTTPClient(nil).Transport.(*http.Transport).HTTP2
	assert.Equal(t, 30*time.Second, limits.WriteByteTimeout, "a server that talks and does not listen")
	assert.Equal(t, 6*time.Minute, limits.SendPingTimeout, "servers made with grpc-go end connections with more than a ping in five minutes")
}

// heapGrowth returns how much more memory is in use after f, at its highest.
func heapGrowth(f func()) uint64 {
	sample := func() uint64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	runtime.GC()
	before := sample()
	var most atomic.Uint64
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for tick := time.Tick(5 * time.Millisecond); ; {
			most.Store(max(most.Load(), sample()))
			select {
			case <-stop:
				return
			case <-tick:
			}
		}
	}()
	f()
	close(stop)
	<-done
	return most.Load() - min(before, most.Load())
}

// A server that wants to do harm: what was good stays, and neither memory nor time run away. It runs
// alone, as it measures.
func TestHostileServer(t *testing.T) {
	rounds.Slow(t)
	conformance.Covers(t, "GO-14", "WAPI-14")
	if rounds.Race {
		t.Skip("the race detector is slow, and has memory of its own")
	}
	const mb = 1 << 20
	ca := spiffetest.NewCA(t, "example.org")
	home := domain{CA: ca}
	web := home.SVID("/web")
	good := marshal(t, response(t, home, web))
	elements := func(n int, one []byte) []byte { return slices.Repeat(one, n) }
	empty := func(field protowire.Number) []byte { return []byte{byte(field<<3 | 2), 0} }
	text := func(field protowire.Number, b []byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, field, protowire.BytesType), b)
	}
	prefix := func(flags byte, n uint32) []byte { return binary.BigEndian.AppendUint32([]byte{flags}, n) }
	federated := func(td string, roots []byte) []byte {
		return text(3, append(text(1, []byte("spiffe://"+td)), text(2, roots)...))
	}
	message := func(b []byte) func(*call) { return func(c *call) { c.sendRaw(b) } }

	// 24 domains, each with a megabyte of certificates that are read and cannot be used.
	leaf := home.SVID("/leaf").Leaf().Raw
	leaves := slices.Repeat(leaf, min(jws.MaxSetKeys, mb/len(leaf)))
	var manyBundles []byte
	for i := 0; len(manyBundles)+len(leaves) < 24*mb; i++ {
		manyBundles = append(manyBundles, federated(fmt.Sprintf("d%d.test", i), leaves)...)
	}
	manyBundles = append(slices.Clone(good), manyBundles...)

	for name, test := range map[string]struct {
		answer func(c *call)
		want   string // of the error; "" for a good response
	}{
		"junk of 64 MiB":             {message(elements(64*mb, []byte{0xff})), "malformed protobuf message"},
		"zeros of 64 MiB":            {message(make([]byte, 64*mb)), "malformed protobuf message"},
		"32 million SVIDs":           {message(elements(32*mb, empty(1))), "more than 4096 SVIDs"},
		"8 million CRLs":             {message(elements(8*mb, empty(2))), "more than 10000 elements"},
		"8 million bundles":          {message(elements(8*mb, empty(3))), "more than 10000 elements"},
		"many unknown fields":        {message(elements(8*mb, []byte{0x98, 0x06, 0x01})), "more than 10000 elements"},
		"one field again and again":  {message(text(1, elements(8*mb, empty(2)))), "must begin with"},
		"a huge unknown field":       {message(append(text(99, make([]byte, 20*mb)), good...)), ""},
		"a huge CRL":                 {message(append(text(2, make([]byte, 20*mb)), good...)), ""},
		"a huge bundle":              {message(append(federated("other.test", make([]byte, 20*mb)), good...)), ""},
		"24,000 certificates":        {message(manyBundles), ""},
		"a huge chain":               {message(text(1, append(text(1, []byte("spiffe://example.org/web")), append(text(2, slices.Repeat(leaf, 20*mb/len(leaf))), append(text(3, []byte{1}), text(4, home.Roots())...)...)...))), "too large"},
		"65 MiB are promised":        {func(c *call) { c.write(prefix(0, 65*mb)); c.flush(); c.end(workloadtest.OK, "") }, "larger than the limit"},
		"4 GiB are promised":         {func(c *call) { c.write(prefix(0, 1<<32-1)); c.write(make([]byte, mb)); c.flush() }, "larger than the limit"},
		"a message is cut":           {func(c *call) { c.write(prefix(0, 64*mb)); c.write(make([]byte, mb)); c.flush() }, "that was it"},
		"not even a prefix":          {func(c *call) { c.write([]byte{0, 0}) }, "that was it"},
		"compressed":                 {func(c *call) { c.write(prefix(1, uint32(len(good)))); c.write(good); c.flush() }, "flag of a compressed one"},
		"unknown flags":              {func(c *call) { c.write(prefix(0x40, uint32(len(good)))); c.write(good); c.flush() }, ""},
		"a status that is no number": {func(c *call) { c.w.Header().Set(http.TrailerPrefix+"Grpc-Status", "x"); c.ended = true }, "is not a number"},
		"a long status": {func(c *call) {
			for i := range 10 {
				c.w.Header().Set(fmt.Sprintf("X-%d", i), strings.Repeat("x", 10<<10))
			}
			c.end(workloadtest.Unavailable, strings.Repeat("y", 30<<10))
		}, ""},
		"denied halfway": {func(c *call) { c.write(prefix(0, 1000)); c.flush(); c.end(workloadtest.PermissionDenied, "no") }, "no identity for this caller"},
	} {
		t.Run(name, func(t *testing.T) {
			var first atomic.Bool
			var log syncBuffer
			ready := make(chan struct{})
			s, err := workloadapi.New(workloadapi.Config{Logger: workloadtest.Logger(&log), Address: onSocket(t, fake(t, func(c *call) {
				if first.CompareAndSwap(false, true) {
					c.sendRaw(good)
					<-ready
					return
				}
				test.answer(c)
				c.end(workloadtest.Unavailable, "that was it")
			}))})
			require.NoError(t, err)
			workloadtest.Run(t, s)
			ctx, cancel := context.WithTimeout(t.Context(), patient)
			defer cancel()
			require.NoError(t, s.Ready(ctx))
			snap := must.Get(s.Snapshot())(t)
			close(ready)
			start := time.Now()
			grown := heapGrowth(func() {
				require.Eventually(t, func() bool {
					st := s.Status().X509
					return st.Updates > 1 && test.want == "" || st.Err != nil && st.Err.Error() != "" && first.Load() && st.Failures > 1
				}, patient, time.Millisecond)
			})
			t.Logf("%v, %d MB", time.Since(start).Round(time.Millisecond), grown/mb)
			assert.Less(t, grown, uint64(600*mb))
			assert.Less(t, time.Since(start), 10*time.Second)
			assert.Eventually(t, func() bool { return strings.Contains(log.String(), test.want) }, patient, time.Millisecond,
				"the log, which is written after the status, lacks %q", test.want)
			svid, err := s.SVID()
			if name == "denied halfway" { // a denial is a denial
				require.ErrorIs(t, err, workloadapi.ErrDenied)
				return
			}
			require.NoError(t, err)
			want, _ := snap.SVID()
			assert.Same(t, want, svid)
			assert.Less(t, len(fmt.Sprint(s.Status().X509.Err)), 2048)
			assert.LessOrEqual(t, len(s.Status().X509.Skipped), 101)
		})
	}
}

// Answers about tokens are small, and claims that are there and empty are none (WAPI-52).
func TestAnswerLimits(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-52")
	const id = "spiffe://example.org/web"
	size := 0
	c := inMemory(t, fake(t, func(c *call) {
		if c.rpc == "FetchJWTSVID" {
			c.send(&wire.JWTSVIDResponse{Svids: []*wire.JWTSVID{{SpiffeId: id, Svid: strings.Repeat("x", size)}}})
			return
		}
		claims := map[string]any{}
		if size > 0 {
			claims["x"] = strings.Repeat("x", size)
		}
		s, err := structpb.NewStruct(claims)
		assert.NoError(t, err)
		c.send(&wire.ValidateJWTSVIDResponse{SpiffeId: id, Claims: s})
	}))
	size = 2<<20 - 100
	must.Get(c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "a"))(t)
	size = 2 << 20
	require.ErrorContains(t, must.Err(c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "a")), "larger than the limit")
	size = 128<<10 - 100
	must.Get2(c.ValidateJWTSVID(t.Context(), "a", "token"))(t)
	size = 128 << 10
	_, _, err := c.ValidateJWTSVID(t.Context(), "a", "token")
	require.ErrorContains(t, err, "larger than the limit")
	size = 0
	_, _, err = c.ValidateJWTSVID(t.Context(), "a", "token")
	must.Fail(t, err, workloadapi.ErrBadResponse, "claims are empty")
}

// responses are seeds for the fuzz targets.
func responses(t testing.TB) (x509s, x509Bundles, jwtBundles, tokens, claims []byte) {
	home, other := workloadtest.NewDomain(t, "example.org"), workloadtest.NewDomain(t, "other.test")
	m := response(t, home, home.SVID("/web"), other)
	m.Svids = append(m.Svids, message(t, home, home.SVID("/db"), "hint"))
	m.Crl = [][]byte{{1}}
	s, err := structpb.NewStruct(map[string]any{"sub": "spiffe://example.org/web", "aud": []any{"a"}, "exp": 1.5, "x": map[string]any{"y": true}})
	require.NoError(t, err)
	set := jwks(t, nil, &workloadtest.NewKey(t).PublicKey)
	return marshal(t, m),
		marshal(t, &wire.X509BundlesResponse{Crl: [][]byte{{1}}, Bundles: map[string][]byte{home.Key(): home.Roots(), other.Key(): nil}}),
		marshal(t, &wire.JWTBundlesResponse{Bundles: map[string][]byte{home.Key(): set, other.Key(): []byte(`{"keys":[]}`)}}),
		marshal(t, &wire.JWTSVIDResponse{Svids: []*wire.JWTSVID{{SpiffeId: "spiffe://example.org/web", Svid: "a.b.c", Hint: "h"}}}),
		marshal(t, &wire.ValidateJWTSVIDResponse{SpiffeId: "spiffe://example.org/web", Claims: s})
}

// FuzzX509SVIDs: what is accepted breaks no rule, and what is read twice is the same.
func FuzzX509SVIDs(f *testing.F) {
	seed, _, _, _, _ := responses(f)
	f.Add(seed)
	f.Add([]byte{0x0a, 0x00})
	f.Fuzz(func(t *testing.T, data []byte) {
		var r workloadapi.Reader
		u, err := r.X509SVIDs(data)
		if err != nil {
			return
		}
		require.NotEmpty(t, u.Identities)
		hints := map[string]bool{}
		for _, id := range u.Identities {
			require.NotEmpty(t, id.SVID.ID().Path())
			require.False(t, id.Hint != "" && hints[id.Hint])
			hints[id.Hint] = true
			must.Get(u.Bundles.Bundle(id.SVID.ID().TrustDomain()))(t)
		}
		again := must.Get(r.X509SVIDs(data))(t)
		require.Equal(t, u.Identities, again.Identities)
		require.Same(t, u.Bundles, again.Bundles)
	})
}

// FuzzBundles: bundles for certificates have no keys for tokens, and the other way round.
func FuzzBundles(f *testing.F) {
	_, x509s, jwts, _, _ := responses(f)
	for _, seed := range [][]byte{x509s, jwts, nil, {0x12, 0x00}} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var r workloadapi.Reader
		if u, err := r.X509Bundles(data); err == nil {
			require.NotZero(t, u.Bundles.Len())
			for b := range u.Bundles.All() {
				require.Empty(t, b.Contents().JWTAuthorities)
			}
		}
		r = workloadapi.Reader{}
		if u, err := r.JWTBundles(data); err == nil {
			for b := range u.Bundles.All() {
				require.Empty(t, b.Contents().X509Authorities)
				require.Empty(t, b.Contents().WITAuthorities)
			}
		}
		r = workloadapi.Reader{}
		if u, err := r.WITBundles(data); err == nil {
			require.NotZero(t, u.Bundles.Len())
			for b := range u.Bundles.All() {
				require.Empty(t, b.Contents().X509Authorities)
				require.Empty(t, b.Contents().JWTAuthorities)
			}
		}
	})
}

// FuzzTokens has the decoders of tokens read the same bytes.
func FuzzTokens(f *testing.F) {
	_, _, _, tokens, claims := responses(f)
	wit := marshal(f, &wire.WITSVIDResponse{Svids: []*wire.WITSVID{{SpiffeId: "spiffe://example.org/web", WitSvid: "t", WitSvidKey: "{}", Hint: "h"}}})
	for _, seed := range [][]byte{tokens, claims, wit, nil} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if all, err := workloadapi.ReadJWTSVIDs(data); err == nil {
			require.NotEmpty(t, all)
			require.NotEmpty(t, all[0].Token())
		}
		if all, err := workloadapi.ReadWITSVIDs(data); err == nil {
			require.NotEmpty(t, all)
		}
		if claims, err := workloadapi.ReadClaims(data); err == nil {
			require.NotEmpty(t, claims)
		}
	})
}

// TestWaitForSocket has a client wait for a Unix socket at which nothing listens: for as long as it says, or until
// something does. After a failure of another kind it waits for all of the time.
func TestWaitForSocket(t *testing.T) {
	t.Parallel()
	rounds.NotShort(t)
	path := filepath.Join(workloadtest.SocketDir(t), "api.sock")
	c := must.Get(workloadapi.NewClient("unix://"+path, nil))(t)
	wait := func(d time.Duration, meanwhile func()) time.Duration {
		t.Helper()
		failed := must.As[*workloadapi.Error](must.Err(c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "db")))(t)
		failed.RetryIn = d
		meanwhile()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		begin := time.Now()
		workloadapi.Wait(ctx, failed)
		require.NoError(t, ctx.Err())
		return time.Since(begin)
	}
	assert.GreaterOrEqual(t, wait(50*time.Millisecond, func() {}), 50*time.Millisecond, "nothing listens")
	wait(time.Hour, func() {
		t.Cleanup(workloadtest.ServeOn(must.Get(net.Listen("unix", path))(t), http.NotFoundHandler(), nil))
	})
	assert.GreaterOrEqual(t, wait(50*time.Millisecond, func() {}), 50*time.Millisecond, "what listens is no Workload API")
}
