package workloadserver_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
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

// remote returns a client whose requests come from this address.
func remote(t testing.TB, h http.Handler, address string) *http.Client {
	return http2(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.RemoteAddr = address
		h.ServeHTTP(w, r)
	}))
}

// One peer takes all that it can get, by streams of all kinds, by reflection, by calls that take long and by
// requests that never come; another one is served.
func TestPeerStreams(t *testing.T) {
	t.Parallel()
	home := workloadtest.NewDomain(t, "example.org")
	issue := make(chan struct{})
	h := handler(t, fixed(snapshot(t, home.SVID("/web"), home)), &workloadserver.Options{
		MaxStreams: 20, MaxPeerStreams: 8,
		IssueJWTSVID: func(_ context.Context, id spiffe.ID, _ []string) (string, error) { <-issue; return id.String(), nil },
	})
	greedy, good := remote(t, h, "127.0.0.1:1"), remote(t, h, "127.0.0.1:2")
	svids := func(c *http.Client) *rpc {
		return post(t, c, service+"FetchX509SVID", frame(&wire.X509SVIDRequest{}), header, "true")
	}
	begun := func(path, body string) { // a request of which no more comes
		in, out := net.Pipe()
		t.Cleanup(func() { _ = out.Close() })
		req := must.Get(http.NewRequestWithContext(t.Context(), http.MethodPost, "http://localhost"+path, in))(t)
		req.Header.Set("Content-Type", "application/grpc")
		req.Header.Set("workload.spiffe.io", "true")
		go func() {
			if resp, err := greedy.Do(req); err == nil {
				_ = resp.Body.Close()
			}
		}()
		go func() { _, _ = out.Write([]byte(body)) }()
	}
	for _, method := range []string{"FetchX509SVID", "FetchX509Bundles", "FetchJWTBundles"} {
		require.NotEmpty(t, post(t, greedy, service+method, frame(&wire.X509SVIDRequest{}), header, "true").Receive())
	}
	begun("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "")
	begun("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "")
	begun(service+"FetchX509SVID", "\x00\x00")
	token := make(chan error, 2)
	for range 2 {
		go func() {
			c, err := workloadapi.NewClient("", greedy)
			if err == nil {
				_, err = c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "a")
			}
			token <- err
		}()
	}
	require.Eventually(t, func() bool { return streams(h) == 8 }, patient, time.Millisecond)
	for _, path := range []string{service + "FetchX509SVID", service + "FetchJWTBundles", service + "FetchJWTSVID", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"} {
		refused := post(t, greedy, path, frame(&wire.JWTSVIDRequest{Audience: []string{"a"}}), header, "true")
		code, _ := refused.Status()
		assert.Equal(t, workloadtest.ResourceExhausted, code, path)
		ms := must.Get(strconv.Atoi(refused.Pushback()))(t)
		assert.GreaterOrEqual(t, ms, 10_000, "when to come back")
	}
	require.NotEmpty(t, svids(good).Receive(), "of another connection")

	// What has ended makes room.
	close(issue)
	require.NoError(t, <-token)
	require.NoError(t, <-token)
	require.Eventually(t, func() bool { return streams(h) == 7 }, patient, time.Millisecond)
	require.NotEmpty(t, svids(greedy).Receive())

	// Many peers fill the total.
	for i := 0; streams(h) < 20 && i < 40; i++ {
		require.NotEmpty(t, svids(remote(t, h, fmt.Sprint("127.0.0.1:", 10+i))).Receive())
	}
	code, _ := svids(good).Status()
	assert.Equal(t, workloadtest.ResourceExhausted, code)
	require.NoError(t, h.Close())
	require.Eventually(t, func() bool { return streams(h) <= 3 }, patient, time.Millisecond, "but for requests that have not come")
}

// One peer begins requests of the largest size and does not end them: what it sends is bounded before its number of
// requests is, and another peer is served.
func TestUnfinishedRequests(t *testing.T) {
	t.Parallel()
	home := workloadtest.NewDomain(t, "example.org")
	h := handler(t, fixed(snapshot(t, home.SVID("/web"), home)), nil)
	greedy, good := remote(t, h, "127.0.0.1:1"), remote(t, h, "127.0.0.1:2")
	const size, most = 256 << 10, 16 << 20
	begun := append([]byte{0, 0, size >> 16, 0, 0}, make([]byte, size/2+1)...) // so that there is room for all of it
	refused := make(chan string, most/size+20)
	for range cap(refused) {
		in, out := net.Pipe()
		t.Cleanup(func() { _ = out.Close() })
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://localhost"+service+"FetchX509SVID", in)
		require.NoError(t, err)
		req.Header.Set("Content-Type", "application/grpc")
		req.Header.Set("workload.spiffe.io", "true")
		go func() {
			if resp, err := greedy.Do(req); err == nil {
				refused <- resp.Header.Get("Grpc-Status") + " " + resp.Header.Get("Grpc-Message")
				_ = resp.Body.Close()
			}
		}()
		go func() { _, _ = out.Write(begun) }()
	}
	for range cap(refused) - most/size - 2 { // the first 4 KiB of each are not counted
		assert.Contains(t, <-refused, "8 workloadserver: this peer has too many requests")
	}
	require.NotEmpty(t, post(t, good, service+"FetchX509SVID", frame(&wire.X509SVIDRequest{}), header, "true").Receive())
}

// A user cannot take all streams, however many connections it opens, and without an option.
func TestStreamsOfUser(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("peers are known on Linux")
	}
	home := workloadtest.NewDomain(t, "example.org")
	most := min(rounds.Of(250), 1000)
	provider := fixed(snapshot(t, home.SVID("/web"), home))
	h := handler(t, provider, &workloadserver.Options{MaxPeerStreams: most % 1000}) // in CI the default
	path := strings.TrimPrefix(listen(t, &unixsocket.Server{Handler: h, SocketMode: 0o666}), "unix://")
	client := func(dial func() (net.Conn, error)) *http.Client {
		transport := &http.Transport{Protocols: new(http.Protocols), DialContext: func(context.Context, string, string) (net.Conn, error) { return dial() }}
		transport.Protocols.SetUnencryptedHTTP2(true)
		t.Cleanup(transport.CloseIdleConnections)
		return &http.Client{Transport: transport}
	}
	self := func() (net.Conn, error) { return net.Dial("unix", path) }
	two := []*http.Client{client(self), client(self)}
	open := func(c *http.Client) *rpc {
		return post(t, c, service+"FetchX509SVID", frame(&wire.X509SVIDRequest{}), header, "true")
	}
	first := open(two[0])
	for i := range most - 1 {
		open(two[i%2])
	}
	require.Equal(t, most, streams(h))
	for _, c := range two {
		code, _ := open(c).Status()
		assert.Equal(t, workloadtest.ResourceExhausted, code)
	}
	require.NotEmpty(t, open(http2(t, h)).Receive(), "of another peer")
	if os.Geteuid() == 0 {
		require.NoError(t, os.Chmod(path[:strings.LastIndexByte(path, '/')], 0o755))
		other := open(client(func() (net.Conn, error) { return dialAs(12345, path) }))
		require.NotEmpty(t, other.Receive(), "of another user")
		require.NoError(t, other.Response.Body.Close())
	}
	require.NoError(t, first.Response.Body.Close())
	require.Eventually(t, func() bool { return streams(h) == most }, patient, 5*time.Millisecond)
	require.NotEmpty(t, open(two[1]).Receive(), "there is room for one")
	require.NoError(t, h.Close())
	require.Eventually(t, func() bool { return streams(h) == 0 }, patient, 5*time.Millisecond)
}

// quiet is the log without times.
func quiet(b *syncBuffer) *slog.Logger {
	return slog.New(slog.NewTextHandler(b, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
}

// Each reason to refuse a caller is logged, once a minute however often it happens.
func TestRefusalsAreLogged(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		var log syncBuffer
		var denied atomic.Bool
		h := handler(t, fixed(snapshot(t, home.SVID("/web"), home)), &workloadserver.Options{
			Identities: func(context.Context) ([]workloadserver.Identity, error) {
				if denied.Load() {
					return nil, nil
				}
				return []workloadserver.Identity{{SVID: home.SVID("/web")}}, nil
			},
			MaxPeerStreams: 1,
			IssueJWTSVID:   (&tokens{err: errors.New("kaputt")}).IssueJWTSVID,
			Logger:         quiet(&log),
		})
		near, far := remote(t, h, "127.0.0.1:1"), remote(t, h, "192.0.2.1:1")
		lines := func() []string {
			synctest.Wait()
			return strings.Split(strings.TrimSpace(log.Take()), "\n")
		}
		call := func(c *http.Client, method string, id string, headers ...string) {
			_, _ = post(t, c, method, frame(&wire.JWTSVIDRequest{Audience: []string{"a"}, SpiffeId: id}), headers...).Status()
			synctest.Wait()
		}
		n := rounds.Of(13)
		const other = "spiffe://example.org/other"
		for _, c := range []struct {
			do   func()
			want string
		}{
			{func() { call(near, service+"FetchX509SVID", "") }, `msg="workloadserver: request refused" reason=no_header method=FetchX509SVID remote=127.0.0.1:1`},
			{func() { call(far, service+"FetchX509SVID", "", header, "true") }, `msg="workloadserver: request refused" reason=another_machine method=FetchX509SVID remote=192.0.2.1:1`},
			{func() { call(near, service+"FetchJWTSVID", "web", header, "true") }, `msg="workloadserver: request refused" reason=bad_request method=FetchJWTSVID remote=127.0.0.1:1 err="spiffe_id is not a SPIFFE ID"`},
			{func() { call(near, service+"FetchJWTSVID", other, header, "true") }, `msg="workloadserver: request refused" reason=no_identity method=FetchJWTSVID remote=127.0.0.1:1 id=` + other},
			{func() { call(near, service+"FetchJWTSVID", "", header, "true") }, `msg="workloadserver: request failed" reason=issuer method=FetchJWTSVID remote=127.0.0.1:1 err=kaputt`},
			{func() {
				first := post(t, near, service+"FetchX509SVID", frame(&wire.X509SVIDRequest{}), header, "true")
				call(near, service+"FetchX509SVID", "", header, "true")
				require.NoError(t, first.Response.Body.Close())
				synctest.Wait()
			}, `msg="workloadserver: request refused" reason=too_many_streams_of_peer method=FetchX509SVID remote=127.0.0.1:1`},
		} {
			for range n {
				c.do()
			}
			assert.Equal(t, []string{"level=WARN " + c.want}, lines(), "the first at once, and no other")
			time.Sleep(time.Minute + time.Second)
			assert.Equal(t, []string{"level=WARN " + c.want + fmt.Sprintf(" count=%d interval=1m0s", n-1)}, lines(), "a count")
			time.Sleep(2 * time.Minute)
			assert.Equal(t, []string{""}, lines())
		}

		// A withdrawal is a refusal. What callers do to themselves is none.
		s := must.Get(workloadapi.New(workloadapi.Config{Client: inMemory(t, h)}))(t)
		stop := workloadtest.Run(t, s)
		require.NoError(t, s.Ready(t.Context()))
		denied.Store(true)
		h.Refresh()
		assert.Equal(t, []string{`level=WARN msg="workloadserver: request refused" reason=no_identity method=FetchX509SVID remote=mem`}, lines())
		require.NoError(t, stop())
		time.Sleep(5 * time.Minute)
		lines()
		denied.Store(false)
		post(t, near, service+"FetchX509SVID", frame(&wire.X509SVIDRequest{}), header, "true", "Grpc-Timeout", "200m").Status()
		r := post(t, near, service+"FetchX509SVID", frame(&wire.X509SVIDRequest{}), header, "true")
		require.NoError(t, r.Response.Body.Close())
		call(near, service+"Nothing", "", header, "true")
		assert.Equal(t, []string{""}, lines())
	})
}

// The log says which user and which process was refused.
func TestRefusedProcess(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("peers are known on Linux")
	}
	home := workloadtest.NewDomain(t, "example.org")
	var log syncBuffer
	h := handler(t, fixed(snapshot(t, home.SVID("/web"), home)), &workloadserver.Options{
		Identities: func(context.Context) ([]workloadserver.Identity, error) { return nil, nil }, Logger: quiet(&log),
	})
	c := dial(t, listen(t, &unixsocket.Server{Handler: h}))
	for range 100 {
		for _, err := range c.WatchX509SVIDs(t.Context()) {
			require.ErrorIs(t, err, workloadapi.ErrDenied)
			break
		}
	}
	assert.Equal(t, fmt.Sprintf("level=WARN msg=\"workloadserver: request refused\" reason=no_identity method=FetchX509SVID uid=%d pid=%d\n",
		os.Geteuid(), os.Getpid()), log.String())
}
