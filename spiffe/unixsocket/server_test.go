package unixsocket_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/files/flock"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

const patient = time.Minute // for what takes no time unless something is broken

var errStop = errors.New("stop")

// socketDir returns a directory with a path that is short enough for sockets.
func socketDir(t testing.TB) string {
	t.Helper()
	dir := must.Get(os.MkdirTemp("", "us"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// says returns a handler that answers every request with a text.
func says(text string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) })
}

// hears returns what the server on a socket says.
func hears(t testing.TB, socket string, http2 bool) string {
	t.Helper()
	var protocols http.Protocols
	protocols.SetHTTP1(!http2)
	protocols.SetUnencryptedHTTP2(http2)
	transport := &http.Transport{Protocols: &protocols, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}
	defer transport.CloseIdleConnections()
	resp := must.Get((&http.Client{Transport: transport, Timeout: patient}).Get("http://localhost/"))(t)
	defer resp.Body.Close()
	return string(must.Get(io.ReadAll(resp.Body))(t))
}

// serve runs s until the test ends or stop is called, which returns what Run returned.
func serve(t testing.TB, s *unixsocket.Server) (stop func() error) {
	t.Helper()
	require.NoError(t, s.Listen())
	ctx, cancel := context.WithCancelCause(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stop = sync.OnceValue(func() error {
		cancel(errStop)
		select {
		case err := <-done:
			return err
		case <-time.After(patient):
			return errors.New("the server did not stop")
		}
	})
	t.Cleanup(func() { _ = stop() })
	return stop
}

// deadSocket leaves a socket behind that no process listens on, as a killed server does.
func deadSocket(t testing.TB, path string) {
	t.Helper()
	l := must.Get(net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"}))(t)
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
	require.Eventually(t, func() bool { // a process that another test starts has the socket, too, until it begins its program
		c, err := net.Dial("unix", path)
		if err == nil {
			_ = c.Close()
		}
		return err != nil
	}, patient, time.Millisecond)
}

func mode(t testing.TB, path string) fs.FileMode {
	t.Helper()
	return must.Get(os.Lstat(path))(t).Mode()
}

func TestServer(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-8.1-4", "IST-8.1-5", "IST-8.2-2")
	path := filepath.Join(socketDir(t), "new", "er", "s")
	s := &unixsocket.Server{Path: path, Handler: says("one")}
	stop := serve(t, s)
	require.NoError(t, s.Listen(), "again")
	assert.Equal(t, fs.ModeSocket|0o600, mode(t, path))
	assert.Equal(t, fs.ModeDir|0o700, mode(t, filepath.Dir(path)))
	assert.Equal(t, "one", hears(t, path, false))
	assert.Equal(t, "one", hears(t, path, true))
	must.Fail(t, (&unixsocket.Server{Path: path, Handler: says("two")}).Run(t.Context()), unixsocket.ErrInUse, path)
	assert.Equal(t, "one", hears(t, path, true))
	require.NoError(t, stop())
	assert.ErrorIs(t, must.Err(os.Lstat(path)), fs.ErrNotExist)

	// A dead socket is replaced, an existing directory keeps its mode, and the socket can have another mode.
	deadSocket(t, path)
	require.NoError(t, os.Chmod(filepath.Dir(path), 0o750))
	stop = serve(t, &unixsocket.Server{Path: path, Handler: says("two"), DirMode: 0o711, SocketMode: 0o666})
	assert.Equal(t, "two", hears(t, path, false))
	assert.Equal(t, fs.ModeSocket|0o666, mode(t, path))
	assert.Equal(t, fs.ModeDir|0o750, mode(t, filepath.Dir(path)))

	// A server that stops leaves the socket of another server at its path.
	require.NoError(t, os.Remove(path))
	serve(t, &unixsocket.Server{Path: path, Handler: says("three")})
	require.NoError(t, stop())
	assert.Equal(t, "three", hears(t, path, true))

	// A new directory has the mode that was asked for, whatever the umask.
	wide := filepath.Join(socketDir(t), "wide", "s")
	serve(t, &unixsocket.Server{Path: wide, Handler: says("four"), DirMode: 0o777})
	assert.Equal(t, fs.ModeDir|0o777, mode(t, filepath.Dir(wide)))
}

// A relative path names the same socket at the end, wherever the process is by then.
func TestRelativePath(t *testing.T) {
	dir := socketDir(t)
	t.Chdir(dir)
	s := &unixsocket.Server{Path: "s", Handler: says("here")}
	stop := serve(t, s)
	t.Chdir("/")
	assert.Equal(t, "here", hears(t, filepath.Join(dir, "s"), true))
	require.NoError(t, stop())
	assert.ErrorIs(t, must.Err(os.Lstat(filepath.Join(dir, "s"))), fs.ErrNotExist)
}

func TestListenRefuses(t *testing.T) {
	t.Parallel()
	dir := socketDir(t)
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, []byte("precious"), 0o600))
	link := filepath.Join(dir, "link")
	require.NoError(t, os.Symlink("nowhere", link))
	h := says("hello")
	for name, test := range map[string]*struct {
		s    unixsocket.Server
		want string
	}{
		"no handler":    {unixsocket.Server{Path: filepath.Join(dir, "s")}, "Handler is nil"},
		"no path":       {unixsocket.Server{Handler: h}, "path is empty"},
		"abstract":      {unixsocket.Server{Path: "@x", Handler: h}, "abstract"},
		"abstract too":  {unixsocket.Server{Path: "\x00x", Handler: h}, "abstract"},
		"long path":     {unixsocket.Server{Path: filepath.Join(dir, strings.Repeat("x", 200)), Handler: h}, "use a shorter one"},
		"file":          {unixsocket.Server{Path: file, Handler: h}, "not a socket"},
		"link":          {unixsocket.Server{Path: link, Handler: h}, "not a socket"},
		"folder":        {unixsocket.Server{Path: dir, Handler: h}, "not a socket"},
		"below a file":  {unixsocket.Server{Path: filepath.Join(file, "s"), Handler: h}, "not a directory"},
		"mode of files": {unixsocket.Server{Path: filepath.Join(dir, "s"), SocketMode: fs.ModeSetuid | 0o600, Handler: h}, "permissions only"},
	} {
		err := test.s.Listen()
		require.ErrorContains(t, err, test.want, name)
		assert.ErrorContains(t, err, "unixsocket: listen on ", name)
		assert.NotErrorIs(t, err, unixsocket.ErrInUse, name)
	}
	assert.Equal(t, "precious", string(must.Get(os.ReadFile(file))(t)))
	assert.NoError(t, must.Err(os.Lstat(link)))
	assert.ErrorIs(t, must.Err(os.Lstat(filepath.Join(dir, "s"))), fs.ErrNotExist)
}

// The longest path that the system takes works.
func TestLongestPath(t *testing.T) {
	t.Parallel()
	dir := socketDir(t)
	path := filepath.Join(dir, strings.Repeat("x", unixsocket.MaxPath-len(dir)-1))
	serve(t, &unixsocket.Server{Path: path, Handler: says("hello")})
	assert.Equal(t, "hello", hears(t, path, true))
	assert.ErrorContains(t, (&unixsocket.Server{Path: path + "x", Handler: says("")}).Listen(), "use a shorter one")
}

// Of many servers that start at one dead socket one gets it, and the others fail with ErrInUse.
func TestRace(t *testing.T) {
	t.Parallel()
	for range rounds.Of(3) {
		path := filepath.Join(socketDir(t), "s")
		deadSocket(t, path)
		const n = 8
		servers := make([]*unixsocket.Server, n)
		errs := make([]error, n)
		var wg sync.WaitGroup
		for i := range n {
			servers[i] = &unixsocket.Server{Path: path, Handler: says("winner")}
			wg.Go(func() { errs[i] = servers[i].Listen() })
		}
		wg.Wait()
		won := 0
		for i, err := range errs {
			if err != nil {
				require.ErrorIs(t, err, unixsocket.ErrInUse)
				continue
			}
			won++
			serve(t, servers[i])
		}
		require.Equal(t, 1, won)
		require.Equal(t, "winner", hears(t, path, true))
	}
}

// A process that may read the directory can hold its lock. That delays a start and does not prevent it.
func TestLockedFolder(t *testing.T) {
	t.Parallel()
	if !flock.Supported {
		t.Skip("no flock on this system")
	}
	dir := socketDir(t)
	path := filepath.Join(dir, "s")
	deadSocket(t, path)
	f := must.Get(os.Open(dir))(t)
	defer f.Close()
	require.NoError(t, flock.Lock(f))
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		s := &unixsocket.Server{Path: path, Handler: says("")}
		require.NoError(t, s.Listen())
		assert.Equal(t, 10*time.Second, time.Since(start))
		require.NoError(t, s.CloseListener())

		time.AfterFunc(time.Second, func() { f.Close() })
		start = time.Now()
		s = &unixsocket.Server{Path: path, Handler: says("")}
		require.NoError(t, s.Listen())
		assert.Equal(t, time.Second, time.Since(start).Round(100*time.Millisecond), "no longer than it is held")
		require.NoError(t, s.CloseListener())
	})
}

// Many clients connect at once, as when an agent has restarted, and wait until they are served.
func TestBacklog(t *testing.T) {
	t.Parallel()
	const n = 600
	if b, err := os.ReadFile("/proc/sys/net/core/somaxconn"); err == nil {
		if most, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && most < n {
			t.Skip("the system lets only ", most, " wait")
		}
	} else {
		t.Skip("it is not known how many the system lets wait")
	}
	path := filepath.Join(socketDir(t), "s")
	s := &unixsocket.Server{Path: path, Handler: says("")}
	require.NoError(t, s.Listen())
	defer s.CloseListener()
	for i := range n {
		c := must.Get(net.Dial("unix", path))(t, "connection %d", i)
		defer c.Close()
	}
}

// Requests get 2 seconds to end when the server stops, and are cut after that.
func TestRunEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		entered, release := make(chan struct{}), make(chan struct{})
		mux := http.NewServeMux()
		mux.HandleFunc("/short", func(w http.ResponseWriter, r *http.Request) {
			entered <- struct{}{}
			<-r.Context().Done()
			time.Sleep(1900 * time.Millisecond)
			_, _ = io.WriteString(w, "done")
		})
		mux.HandleFunc("/hangs", func(http.ResponseWriter, *http.Request) {
			entered <- struct{}{}
			<-release
		})
		l := memconn.Listen()
		stop := serve(t, &unixsocket.Server{Listener: l, Handler: mux})
		get := func(url string) chan string {
			c := make(chan string, 1)
			go func() {
				client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: l.DialContext}}
				resp, err := client.Get("http://localhost" + url)
				if err != nil {
					c <- "cut"
					return
				}
				b, _ := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				c <- string(b)
			}()
			<-entered
			return c
		}
		short, hangs := get("/short"), get("/hangs")
		start := time.Now()
		require.NoError(t, stop())
		assert.Equal(t, "done", <-short)
		assert.Equal(t, "cut", <-hangs)
		assert.Equal(t, 2*time.Second, time.Since(start))
		close(release)
	})
}

// A listener that fails is an error, and its socket is removed.
func TestRunFails(t *testing.T) {
	t.Parallel()
	path := filepath.Join(socketDir(t), "s")
	s := &unixsocket.Server{Path: path, Handler: says("nothing")}
	require.NoError(t, s.Listen())
	require.NoError(t, s.CloseListener())
	must.Fail(t, s.Run(t.Context()), net.ErrClosed, path)
	assert.ErrorIs(t, must.Err(os.Lstat(path)), fs.ErrNotExist)
}

// Clients that connect between Listen and Run are served.
func TestListenFirst(t *testing.T) {
	t.Parallel()
	path := filepath.Join(socketDir(t), "s")
	s := &unixsocket.Server{Path: path, Handler: says("hello")}
	require.NoError(t, s.Listen())
	c := must.Get(net.Dial("unix", path))(t)
	defer c.Close()
	must.Get(io.WriteString(c, "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))(t)
	serve(t, s)
	require.NoError(t, c.SetDeadline(time.Now().Add(patient)))
	assert.Contains(t, string(must.Get(io.ReadAll(c))(t)), "hello")
}

// A directory in which other users could replace the socket is worth a warning.
func TestWarning(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		mode fs.FileMode
		want bool
	}{{0o777, true}, {0o770, true}, {0o777 | fs.ModeSticky, false}, {0o755, false}} {
		dir := socketDir(t)
		require.NoError(t, os.Chmod(dir, test.mode))
		var log bytes.Buffer
		s := &unixsocket.Server{Path: filepath.Join(dir, "s"), Handler: says(""), Logger: slog.New(slog.NewTextHandler(&log, nil))}
		require.NoError(t, s.Listen())
		require.NoError(t, s.CloseListener())
		assert.Equal(t, test.want, strings.Contains(log.String(), "may replace the socket") && strings.Contains(log.String(), dir), test.mode)
	}
}

// A handler finds the process that is calling, and what the caller's own ConnContext has added.
func TestPeer(t *testing.T) {
	t.Parallel()
	type key struct{}
	got := make(chan unixsocket.Peer, 1)
	h := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		p, ok := unixsocket.PeerFromContext(r.Context())
		assert.Equal(t, runtime.GOOS == "linux", ok)
		assert.Equal(t, p, r.Context().Value(key{}), "ConnContext knows the peer already")
		got <- p
	})
	path := filepath.Join(socketDir(t), "s")
	serve(t, &unixsocket.Server{Path: path, Handler: h, ConnContext: func(ctx context.Context, _ net.Conn) context.Context {
		p, _ := unixsocket.PeerFromContext(ctx)
		return context.WithValue(ctx, key{}, p)
	}})
	for _, http2 := range []bool{false, true} {
		hears(t, path, http2)
		if p := <-got; runtime.GOOS == "linux" {
			assert.Equal(t, unixsocket.Peer{UID: uint32(os.Geteuid()), GID: uint32(os.Getegid()), PID: int32(os.Getpid())}, p)
		}
	}

	_, ok := unixsocket.PeerFromContext(t.Context())
	assert.False(t, ok)
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	_, ok = unixsocket.PeerFromContext(unixsocket.ConnContext(t.Context(), a))
	assert.False(t, ok, "not a Unix socket")
}

// One connection can have a thousand requests at the same time, as an Envoy opens a stream for each secret. Those of which it has
// taken a message count no longer.
func TestManyStreams(t *testing.T) {
	t.Parallel()
	n := int32(min(1000, rounds.Of(300))) // net/http has 250 by default
	var entered atomic.Int32
	all := make(chan struct{})
	path := filepath.Join(socketDir(t), "s")
	conns := 0
	serve(t, &unixsocket.Server{
		Path: path,
		Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/first" {
				return
			}
			if entered.Add(1) == n {
				close(all)
			}
			<-all
		}),
		ConnContext: func(ctx context.Context, _ net.Conn) context.Context { conns++; return ctx },
	})
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	transport := &http.Transport{
		Protocols: &protocols, HTTP2: &http.HTTP2Config{StrictMaxConcurrentRequests: true},
		MaxConnsPerHost: 1, // a request just after the first may dial, too
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		},
	}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: 2 * patient}
	get := func(path string) {
		resp, err := client.Get("http://localhost" + path)
		if assert.NoError(t, err) {
			resp.Body.Close()
		}
	}
	var wg sync.WaitGroup
	get("/first") // while there is no connection, each request begins to dial one
	for range n {
		wg.Go(func() { get("/") })
	}
	wg.Wait()
	assert.Equal(t, 1, conns)
}

// A server with TLS speaks nothing else, and knows the processes of its clients; one that cannot be prepared leaves no
// socket.
func TestTLS(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	e := must.Get(spiffetls.New(spiffetls.Config{
		Self: ca.SVID("/web"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer(),
	}))(t)
	peers := make(chan unixsocket.Peer, 1)
	h := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		peer, _ := unixsocket.PeerFromContext(r.Context())
		_, proven := spiffetls.PeerFromContext(r.Context())
		assert.True(t, proven)
		assert.Equal(t, 2, r.ProtoMajor)
		peers <- peer
	})
	s := &unixsocket.Server{
		Path: filepath.Join(socketDir(t), "s"), Handler: h, Serve: e.Serve,
	}
	stop := serve(t, s)
	transport := must.Get(e.Transport())(t)
	transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", s.Path)
	}
	defer transport.CloseIdleConnections()
	require.NoError(t, must.Get((&http.Client{Transport: transport}).Get("https://web/"))(t).Body.Close())
	if peer := <-peers; runtime.GOOS == "linux" {
		assert.EqualValues(t, os.Getpid(), peer.PID)
	}
	plain := must.Get(net.Dial("unix", s.Path))(t)
	must.Get(io.WriteString(plain, preface+"GET / HTTP/1.1\r\nHost: x\r\n\r\n"))(t)
	answer, _ := io.ReadAll(plain)
	assert.NotContains(t, string(answer), "200 OK")
	assert.Empty(t, peers)
	require.NoError(t, stop())

	failure := errors.New("no certificate")
	s = &unixsocket.Server{
		Path: s.Path, Handler: says(""), Serve: func(*http.Server, net.Listener) error { return failure },
	}
	must.Fail(t, s.Run(t.Context()), failure, s.Path)
	require.ErrorIs(t, must.Err(os.Lstat(s.Path)), fs.ErrNotExist)
}
