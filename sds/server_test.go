package sds_test

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/sds"
)

// says returns a handler that answers every request with a text.
func says(text string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) })
}

// hears returns what the server on a socket says.
func hears(t testing.TB, socket string) string {
	t.Helper()
	c := http1(t, socket)
	resp, err := c.Get("http://localhost/")
	require.NoError(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(b)
}

// deadSocket leaves a socket behind that nobody listens on, as a killed process does.
func deadSocket(t testing.TB, path string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
}

func run(t testing.TB, s *sds.Server) (stop func() error) {
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

var errStop = errors.New("stop")

func TestServerSocket(t *testing.T) {
	t.Parallel()
	dir := socketDir(t)
	path := filepath.Join(dir, "new", "er", "s")
	s := &sds.Server{Path: path, Handler: says("one")}
	stop := run(t, s)
	require.NoError(t, s.Listen(), "again")
	mode := func(path string) fs.FileMode {
		fi, err := os.Lstat(path)
		require.NoError(t, err)
		return fi.Mode()
	}
	assert.Equal(t, fs.ModeSocket|0o600, mode(path))
	assert.Equal(t, fs.ModeDir|0o700, mode(filepath.Dir(path)))
	assert.Equal(t, "one", hears(t, path))

	_, err := sds.NewHandler(newFakeSource(), nil)
	require.NoError(t, err)
	other := &sds.Server{Path: path, Handler: says("two")}
	err = other.Run(t.Context())
	require.ErrorIs(t, err, sds.ErrSocketInUse)
	assert.ErrorContains(t, err, path)
	assert.Equal(t, "one", hears(t, path))

	assert.Equal(t, errStop, stop())
	_, err = os.Lstat(path)
	assert.ErrorIs(t, err, fs.ErrNotExist)

	// A dead socket is replaced, an existing folder left as it is, and other modes can be had.
	deadSocket(t, path)
	require.NoError(t, os.Chmod(filepath.Dir(path), 0o750))
	stop = run(t, &sds.Server{Path: path, Handler: says("three"), DirMode: 0o711, SocketMode: 0o666})
	assert.Equal(t, "three", hears(t, path))
	assert.Equal(t, fs.ModeSocket|0o666, mode(path))
	assert.Equal(t, fs.ModeDir|0o750, mode(filepath.Dir(path)))
	require.Equal(t, errStop, stop())

	wide := filepath.Join(dir, "wide", "s")
	run(t, &sds.Server{Path: wide, Handler: says("four"), DirMode: 0o777})
	assert.Equal(t, fs.ModeDir|0o777, mode(filepath.Dir(wide)), "whatever the umask")
}

func TestServerRefuses(t *testing.T) {
	t.Parallel()
	dir := socketDir(t)
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, []byte("precious"), 0o600))
	link := filepath.Join(dir, "link")
	require.NoError(t, os.Symlink("nowhere", link))
	h := says("hello")
	for name, test := range map[string]struct {
		server *sds.Server
		want   string
	}{
		"no handler":    {&sds.Server{Path: filepath.Join(dir, "s")}, "Handler is nil"},
		"no path":       {&sds.Server{Handler: h}, "the path is empty"},
		"abstract":      {&sds.Server{Path: "@sds", Handler: h}, "abstract"},
		"long path":     {&sds.Server{Path: filepath.Join(dir, strings.Repeat("x", 200)), Handler: h}, "use a shorter one"},
		"file":          {&sds.Server{Path: file, Handler: h}, "not a socket"},
		"link":          {&sds.Server{Path: link, Handler: h}, "not a socket"},
		"folder":        {&sds.Server{Path: dir, Handler: h}, "not a socket"},
		"below a file":  {&sds.Server{Path: filepath.Join(file, "s"), Handler: h}, "not a folder"},
		"mode of files": {&sds.Server{Path: filepath.Join(dir, "s"), Handler: h, SocketMode: fs.ModeSetuid | 0o600}, "permissions only"},
	} {
		err := test.server.Listen()
		require.ErrorContains(t, err, test.want, name)
		assert.ErrorContains(t, err, "unixsocket: listen on ", name)
		assert.NotErrorIs(t, err, sds.ErrSocketInUse, name)
	}
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	assert.Equal(t, "precious", string(b))
	_, err = os.Lstat(link)
	assert.NoError(t, err)
	_, err = os.Lstat(filepath.Join(dir, "s"))
	assert.ErrorIs(t, err, fs.ErrNotExist)
}

// The longest path that the system takes works.
func TestServerLongestPath(t *testing.T) {
	t.Parallel()
	dir := socketDir(t)
	path := filepath.Join(dir, strings.Repeat("x", sds.MaxPath-len(dir)-1))
	require.Len(t, path, sds.MaxPath)
	run(t, &sds.Server{Path: path, Handler: says("hello")})
	assert.Equal(t, "hello", hears(t, path))
	err := (&sds.Server{Path: path + "x", Handler: says("")}).Listen()
	assert.ErrorContains(t, err, "use a shorter one")
}

// Of many servers that start at one dead socket one wins, and the others know that they have not.
func TestServerRace(t *testing.T) {
	t.Parallel()
	for range 10 {
		path := filepath.Join(socketDir(t), "s")
		deadSocket(t, path)
		const n = 8
		servers := make([]*sds.Server, n)
		errs := make([]error, n)
		var wg sync.WaitGroup
		for i := range n {
			servers[i] = &sds.Server{Path: path, Handler: says("winner")}
			wg.Go(func() { errs[i] = servers[i].Listen() })
		}
		wg.Wait()
		won := 0
		for i, err := range errs {
			if err != nil {
				require.ErrorIs(t, err, sds.ErrSocketInUse)
				continue
			}
			won++
			run(t, servers[i])
		}
		require.Equal(t, 1, won)
		require.Equal(t, "winner", hears(t, path))
	}
}

// A server that stops leaves what another has put at its path.
func TestServerRemovesItsOwn(t *testing.T) {
	t.Parallel()
	path := filepath.Join(socketDir(t), "s")
	stop := run(t, &sds.Server{Path: path, Handler: says("one")})
	require.NoError(t, os.Remove(path))
	run(t, &sds.Server{Path: path, Handler: says("two")})
	require.Equal(t, errStop, stop())
	assert.Equal(t, "two", hears(t, path))
}

// Streams end with a reason when the server stops; requests under way get time, but not for ever.
func TestServerDrain(t *testing.T) {
	t.Parallel()
	m, src := newMint(t), newFakeSource()
	src.put("default", m.pair("default"))
	h := handler(t, src, nil)
	entered, release := make(chan struct{}), make(chan struct{})
	defer close(release)
	mux := http.NewServeMux()
	mux.Handle("/", h)
	mux.HandleFunc("/short", func(w http.ResponseWriter, r *http.Request) {
		entered <- struct{}{}
		<-r.Context().Done()
		_, _ = io.WriteString(w, "done")
	})
	mux.HandleFunc("/hangs", func(http.ResponseWriter, *http.Request) {
		entered <- struct{}{}
		<-release
	})
	path := filepath.Join(socketDir(t), "s")
	stop := run(t, &sds.Server{Path: path, Handler: mux})
	s := openSotW(t, dial(t, path))
	s.ask("default")
	s.recv()
	get := func(path2 string) chan string {
		c := make(chan string, 1)
		client := http1(t, path)
		go func() {
			resp, err := client.Get("http://localhost" + path2)
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
	stopped := make(chan error, 1)
	go func() { stopped <- stop() }()
	code, _ := s.status()
	assert.Equal(t, codeUnavailable, code)
	assert.Equal(t, "done", <-short)
	assert.Equal(t, "cut", <-hangs)
	assert.Equal(t, errStop, <-stopped)
	assert.Less(t, time.Since(start), 30*time.Second)
	assert.GreaterOrEqual(t, time.Since(start), 2*time.Second)
}

// Clients that connect between Listen and Run are served.
func TestServerListenFirst(t *testing.T) {
	t.Parallel()
	path := filepath.Join(socketDir(t), "s")
	s := &sds.Server{Path: path, Handler: says("hello")}
	require.NoError(t, s.Listen())
	c, err := net.Dial("unix", path)
	require.NoError(t, err)
	defer c.Close()
	_, err = io.WriteString(c, "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
	require.NoError(t, err)
	run(t, s)
	require.NoError(t, c.SetDeadline(time.Now().Add(patient)))
	b, err := io.ReadAll(c)
	require.NoError(t, err)
	assert.Contains(t, string(b), "hello")
}

// What other users could replace is worth a warning.
func TestServerWarns(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		mode fs.FileMode
		want bool
	}{{0o777, true}, {0o770, true}, {0o777 | fs.ModeSticky, false}, {0o755, false}} {
		dir := socketDir(t)
		require.NoError(t, os.Chmod(dir, test.mode))
		var log syncBuffer
		run(t, &sds.Server{Path: filepath.Join(dir, "s"), Handler: says(""), Logger: textLogger(&log)})
		assert.Equal(t, test.want, strings.Contains(log.String(), "may replace the socket"), test.mode)
	}
}
