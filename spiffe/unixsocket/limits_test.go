package unixsocket_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// lines collects what a logger writes.
type lines struct{ logtest.Buffer }

func (l *lines) with(text string) []string {
	return slices.DeleteFunc(slices.Collect(strings.Lines(l.String())), func(s string) bool { return !strings.Contains(s, text) })
}

func (l *lines) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// preface begins a connection of HTTP/2 and opens no stream.
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"

// cut reports whether the server has closed a connection, or does so within a time.
func cut(c net.Conn, within time.Duration) bool {
	_ = c.SetReadDeadline(time.Now().Add(within))
	for b := make([]byte, 512); ; {
		if _, err := c.Read(b); err != nil {
			e, ok := err.(net.Error)
			return !ok || !e.Timeout()
		}
	}
}

// isKept reports whether the server answers on a connection and does not close it then, as it does at once with one that is
// beyond a limit.
func isKept(c net.Conn) bool {
	_ = c.SetReadDeadline(time.Now().Add(2 * patient))
	_, err := c.Read(make([]byte, 1))
	return err == nil && !cut(c, 300*time.Millisecond)
}

// A connection without a request ends, one with a stream does not.
func TestIdle(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		first string
		ends  time.Duration
	}{
		"nothing":                {"", 10 * time.Second},
		"half a header":          {"GET / HTTP/1.1\r\n", 10 * time.Second},
		"a preface alone":        {preface[:24], 2 * time.Second}, // for the settings, by net/http
		"HTTP/2 without stream":  {preface, 5*time.Minute + time.Second},
		"after a request":        {"GET /short HTTP/1.1\r\nHost: x\r\n\r\n", 5 * time.Minute},
		"a body never sent":      {"POST /short HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n", 10 * time.Second},
		"a body of PRI":          {"PRI * HTTP/2.0\r\nHost: x\r\nContent-Length: 9999\r\n\r\nx", 10 * time.Second},
		"a body half sent":       {"POST /short HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n", 10 * time.Second},
		"a body that is awaited": {"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\nx", 20 * time.Second}, // 10 of the handler, and 10 for the rest
		"a request that lasts":   {"GET /long HTTP/1.1\r\nHost: x\r\n\r\n", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				l := memconn.Listen()
				release := make(chan struct{})
				stop := serve(t, &unixsocket.Server{Listener: l, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					switch r.URL.Path {
					case "/long":
						<-release
					case "/read":
						assert.ErrorIs(t, must.Err(conns.ReadBody(w, r, 1<<20)), os.ErrDeadlineExceeded)
					}
				})})
				c := must.Get(l.DialContext(t.Context(), "", ""))(t)
				defer c.Close()
				begin := time.Now()
				must.Get(io.WriteString(c, test.first))(t)
				if test.ends == 0 {
					assert.False(t, cut(c, 24*time.Hour), "it has a request")
				} else {
					assert.True(t, cut(c, test.ends+time.Second))
					assert.InDelta(t, test.ends, time.Since(begin), float64(time.Second))
				}
				close(release)
				require.NoError(t, stop())
			})
		})
	}
}

// The streams of HTTP/2 keep their connection, however long they are silent, and it ends after the last of them.
func TestIdleStream(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := memconn.Listen()
		stop := serve(t, &unixsocket.Server{Listener: l, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		})})
		var protocols http.Protocols
		protocols.SetUnencryptedHTTP2(true)
		conns := 0
		transport := &http.Transport{Protocols: &protocols, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			conns++
			return l.DialContext(ctx, "", "")
		}}
		defer transport.CloseIdleConnections()
		open := func() (end context.CancelFunc) {
			ctx, cancel := context.WithCancel(t.Context())
			r := must.Get(http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost/", nil))(t)
			resp := must.Get(transport.RoundTrip(r))(t)
			t.Cleanup(func() { resp.Body.Close() })
			return cancel
		}
		first := open()
		time.Sleep(24 * time.Hour)
		second := open()
		assert.Equal(t, 1, conns, "the connection of the first stream was kept")
		first()
		second()
		time.Sleep(5*time.Minute + 10*time.Second)
		open()()
		assert.Equal(t, 2, conns, "a connection without streams was kept")
		require.NoError(t, stop())
	})
}

// dialAll opens n connections.
func dialAll(t testing.TB, path string, n int) []net.Conn {
	t.Helper()
	conns := make([]net.Conn, n)
	for i := range conns {
		conns[i] = must.Get(net.Dial("unix", path))(t)
		t.Cleanup(func() { _ = conns[i].Close() })
	}
	return conns
}

// What is beyond a limit is closed at once, and what is closed makes room.
func TestMaxConns(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		total, each int
		reason      string
	}{
		"in total": {7, 100, "few connections are left"}, // two thirds, as there is one user
		"per user": {100, 5, "MaxConnsPerUser is reached"},
		"default":  {8, 0, "MaxConnsPerUser is reached"}, // two thirds
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if runtime.GOOS != "linux" && name != "in total" {
				t.Skip("peers are not known")
			}
			var log lines
			s := &unixsocket.Server{
				Path: filepath.Join(socketDir(t), "s"), Handler: says("hello"), Logger: log.logger(),
				MaxConns: test.total, MaxConnsPerUser: test.each,
			}
			serve(t, s)
			conns := dialAll(t, s.Path, 5)
			for range 20 {
				require.True(t, cut(dialAll(t, s.Path, 1)[0], 5*time.Second), "beyond the limit, long before a silent one ends")
			}
			for _, c := range conns {
				must.Get(io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"))(t)
				must.Get(bufio.NewReader(c).ReadString('\n'))(t, "within the limit")
			}
			refused := log.with("closed at once")
			require.Len(t, refused, 1, "the others are counted")
			assert.Contains(t, refused[0], test.reason)
			assert.Contains(t, refused[0], s.Path)
			if runtime.GOOS == "linux" {
				assert.Contains(t, refused[0], fmt.Sprintf("uid=%d pid=%d", os.Geteuid(), os.Getpid()))
			}
			require.NoError(t, conns[0].Close())
			assert.Eventually(t, func() bool {
				c, err := net.Dial("unix", s.Path)
				if err != nil {
					return false
				}
				defer c.Close()
				_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
				_ = c.SetReadDeadline(time.Now().Add(patient))
				answer, err := bufio.NewReader(c).ReadString('\n')
				return err == nil && strings.Contains(answer, "200")
			}, patient, time.Millisecond)
		})
	}

	for _, s := range []*unixsocket.Server{{MaxConns: -1}, {MaxConnsPerUser: -1}} {
		s.Path, s.Handler = filepath.Join(socketDir(t), "s"), says("")
		assert.ErrorContains(t, s.Listen(), "negative")
	}
}

// A pod or a container is a peer where its control group names it, and a user cannot make itself one.
func TestContainerOf(t *testing.T) {
	t.Parallel()
	const id, other = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", "fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210"
	for groups, want := range map[string]string{
		"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod6f9c7a34_2a49_4a8e_8f6c_2d7b6f0a1c22.slice/cri-containerd-" + id + ".scope\n": "pod6f9c7a34_2a49_4a8e_8f6c_2d7b6f0a1c22",
		"11:memory:/kubepods/besteffort/pod6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c22/" + id + "\n1:name=systemd:/x\n":                                         "pod6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c22",
		"0::/../kubepods-pod6f9c7a34_2a49_4a8e_8f6c_2d7b6f0a1c22.slice/cri-containerd-" + id + ".scope\n":                                                "pod6f9c7a34_2a49_4a8e_8f6c_2d7b6f0a1c22",
		"0::/system.slice/docker-" + id + ".scope\n":                                 id,
		"0::/system.slice/docker-" + id + ".scope/" + other + "\n":                   id, // made inside
		"0::/user.slice/user-1000.slice/user@1000.service/docker-" + id + ".scope\n": "",
		// A user makes any group below a unit with Delegate=yes.
		"0::/system.slice/web.service/docker-" + id + ".scope\n":                                                           "",
		"0::/system.slice/web.service/kubepods/pod6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c22/" + id + "\n":                       "",
		"0::/../../user@1000.service/docker/" + id + "\n":                                                                  "",
		"0::/machine.slice/vm.scope/" + id + "\n":                                                                          "",
		"4:memory:/system.slice/web.service/" + other + "\n1:name=systemd:/system.slice/docker-" + id + ".scope/a\n0::/\n": id,
		"0::/docker/" + id + "/web.service/" + other + "\n":                                                                id,
		"0::/system.slice/sshd.service\n":                                                                                  "", "0::/\n": "", "": "", "::\n": "", "x\n": "",
	} {
		assert.Equal(t, want, unixsocket.ContainerOf(groups), groups)
	}
}

// exhausted is a listener whose first n calls find no free descriptor.
type exhausted struct {
	net.Listener
	left  int
	calls int
}

func (e *exhausted) Accept() (net.Conn, error) {
	e.calls++
	if e.left > 0 {
		e.left--
		return nil, &net.OpError{Op: "accept", Net: "unix", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
	}
	return e.Listener.Accept()
}

// Without free descriptors the server waits, a second at most at a time, and goes on.
func TestNoDescriptors(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := memconn.Listen()
		e := &exhausted{Listener: l, left: 60}
		begin := time.Now()
		stop := serve(t, &unixsocket.Server{Listener: e, Handler: says("hello")})
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: l.DialContext}}
		require.NoError(t, must.Get(client.Get("http://localhost/"))(t).Body.Close())
		assert.Greater(t, time.Since(begin), 50*time.Second, "60 tries that did not wait")
		require.NoError(t, stop())
	})
}

// helper is what a process of this test binary does instead of tests; see [TestMain].
const helper = "UNIXSOCKET_TEST_HELPER"

// task is what a helper is to do.
type task struct {
	Serve string // path to serve at
	Files uint64 // descriptors that the server may have
	Most  int    // connections that the server may have
	Flood string // path to connect to
	Conns int    // how many connections
	First string // what to send on each
}

func TestMain(m *testing.M) {
	text := os.Getenv(helper)
	if text == "" {
		os.Exit(m.Run())
	}
	var do task
	err := json.Unmarshal([]byte(text), &do)
	switch {
	case err != nil:
	case do.Serve != "":
		err = do.serve()
	default:
		err = do.flood()
	}
	if err != nil {
		fmt.Println("failed:", err)
		os.Exit(1)
	}
}

// serve serves until its input ends. A request opens 60 files, as a program does to reach its authority; if that
// fails, so does the helper.
func (do task) serve() error {
	if err := limitFiles(do.Files); err != nil {
		return err
	}
	var one sync.Mutex
	h := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		one.Lock()
		defer one.Unlock()
		for range 60 {
			f, err := os.Open(os.DevNull)
			if err != nil {
				fmt.Println(err)
				os.Exit(1)
			}
			defer f.Close()
		}
		_, _ = io.WriteString(w, "hello")
	})
	s := &unixsocket.Server{Path: do.Serve, SocketMode: 0o666, Handler: h, MaxConns: do.Most, Logger: slog.New(slog.NewTextHandler(os.Stdout, nil))}
	if err := s.Listen(); err != nil {
		return err
	}
	fmt.Println("ready")
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	_ = s.Run(ctx)
	return nil
}

// flood opens connections, says how many of them were kept, and keeps those until its input ends.
func (do task) flood() error {
	kept := make(chan bool)
	for range do.Conns {
		c, err := net.Dial("unix", do.Flood)
		if err != nil {
			return err
		}
		_, _ = io.WriteString(c, do.First)
		go func() { kept <- isKept(c) }()
	}
	n := 0
	for range do.Conns {
		if <-kept {
			n++
		}
	}
	fmt.Println("kept", n)
	_, _ = io.Copy(io.Discard, os.Stdin)
	return nil
}

// start starts a helper, as a user if this is root, and returns the first line that it writes.
func start(t *testing.T, do task, uid uint32) (first string) {
	t.Helper()
	text, err := json.Marshal(do)
	require.NoError(t, err)
	cmd := exec.Command("/proc/self/exe") // the other user may not be able to read the directory that go test builds in
	cmd.Env = append(os.Environ(), helper+"="+string(text))
	if os.Geteuid() == 0 {
		asUser(cmd, uid)
	}
	in := must.Get(cmd.StdinPipe())(t)
	out := must.Get(cmd.StdoutPipe())(t)
	require.NoError(t, cmd.Start())
	rest := make(chan []string, 1)
	reader := bufio.NewReader(out)
	t.Cleanup(func() {
		_ = in.Close()
		assert.NoError(t, cmd.Wait(), "%s", <-rest)
	})
	first, err = reader.ReadString('\n')
	go func() {
		b, _ := io.ReadAll(reader)
		rest <- strings.Split(string(b), "\n")
	}()
	require.NoError(t, err, first)
	return strings.TrimSpace(first)
}

// A process with 256 descriptors serves its clients, and can open files, while another user of the machine holds as many
// idle connections as it can get.
func TestIdleFlood(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("peers are not known")
	}
	dir := socketDir(t)
	require.NoError(t, os.Chmod(dir, 0o755))
	path := filepath.Join(dir, "s")
	require.Equal(t, "ready", start(t, task{Serve: path, Files: 256}, 0))
	assert.Equal(t, "kept 125", start(t, task{Flood: path, Conns: 300, First: preface}, 65534), "its share")
	assert.Equal(t, "kept 3", start(t, task{Flood: path, Conns: 20, First: preface}, 65534), "another process of that user")
	if os.Geteuid() != 0 { // there is no other user
		return
	}
	assert.Equal(t, "hello", hears(t, path, true), "a well-behaved client, and 60 files")
	var kept int
	must.Get(fmt.Sscanf(start(t, task{Flood: path, Conns: 150, First: preface}, 65533), "kept %d", &kept))(t)
	assert.InDelta(t, 2*(192-128)/3, kept, 4, "two thirds of what is free, of 192")
	assert.Equal(t, "hello", hears(t, path, true), "there is room for one more")
	assert.Equal(t, "kept 10", start(t, task{Flood: path, Conns: 10, First: preface}, 65532))
}

// Connections leave a quarter of the descriptors free, also where the server may have more of them than the process has
// descriptors.
func TestReserve(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("the limit of a process is not changed")
	}
	path := filepath.Join(socketDir(t), "s")
	require.Equal(t, "ready", start(t, task{Serve: path, Files: 384, Most: 4096}, 0))
	var kept int
	require.NoError(t, must.Err(fmt.Sscanf(start(t, task{Flood: path, Conns: 450, First: "GET / HTTP/1.1\r\nHost: x\r\n\r\n"}, 0), "kept %d", &kept)))
	assert.LessOrEqual(t, kept, 288)
	assert.Greater(t, kept, 172, "two thirds, as there is one user")
}

// Another listener of the program has the same limits. This test takes descriptors of the process's budget, and so is not
// parallel.
func TestLimit(t *testing.T) {
	inner := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer inner.Close()
	var log lines
	l := unixsocket.Limit(inner, conns.Max(1<<30)/6, log.logger()) // as if it were a sixth of all
	assert.Equal(t, inner.Addr(), l.Addr())
	accepted := make(chan net.Conn, 10)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	dial := func() net.Conn {
		c := must.Get(net.Dial("tcp", inner.Addr().String()))(t)
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	var held []net.Conn
	for range 4 {
		dial()
		held = append(held, <-accepted)
	}
	require.True(t, cut(dial(), 5*time.Second), "two thirds are one peer's")
	assert.Len(t, log.with("closed at once"), 1)
	assert.Contains(t, log.with("closed at once")[0], "peer=127.0.0.1:")
	require.NoError(t, held[0].Close())
	_ = held[0].Close() // counts once
	c := dial()
	held[0] = <-accepted
	require.NoError(t, held[0].(interface{ CloseWrite() error }).CloseWrite())
	require.NoError(t, c.SetReadDeadline(time.Now().Add(10*time.Second)))
	require.ErrorIs(t, must.Err(c.Read(make([]byte, 1))), io.EOF)
	require.True(t, cut(dial(), 5*time.Second))
	for _, c := range held {
		require.NoError(t, c.Close())
	}
}
