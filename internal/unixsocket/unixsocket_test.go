package unixsocket_test

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/flock"
	"github.com/svidkit/svidkit/internal/memconn"
	"github.com/svidkit/svidkit/internal/unixsocket"
)

const patient = 20 * time.Second // for what takes no time unless something is broken

var errStop = errors.New("stop")

// socketDir returns a folder with a path that is short enough for sockets.
func socketDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "us")
	require.NoError(t, err)
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
	resp, err := (&http.Client{Transport: transport, Timeout: patient}).Get("http://localhost/")
	require.NoError(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(b)
}

func serve(t testing.TB, l net.Listener, h http.Handler) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancelCause(context.Background())
	done := make(chan error, 1)
	go func() { done <- unixsocket.Serve(ctx, l, &http.Server{Handler: h}) }()
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

// deadSocket leaves a socket behind that nobody listens on, as a killed process does.
func deadSocket(t testing.TB, path string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
}

func mode(t testing.TB, path string) fs.FileMode {
	t.Helper()
	fi, err := os.Lstat(path)
	require.NoError(t, err)
	return fi.Mode()
}

func TestListenAndServe(t *testing.T) {
	t.Parallel()
	path := filepath.Join(socketDir(t), "new", "er", "s")
	l, err := unixsocket.Listen(unixsocket.Options{Path: path})
	require.NoError(t, err)
	stop := serve(t, l, says("one"))
	assert.Equal(t, fs.ModeSocket|0o600, mode(t, path))
	assert.Equal(t, fs.ModeDir|0o700, mode(t, filepath.Dir(path)))
	assert.Equal(t, "one", hears(t, path, false))
	assert.Equal(t, "one", hears(t, path, true))
	_, err = unixsocket.Listen(unixsocket.Options{Path: path})
	require.ErrorIs(t, err, unixsocket.ErrInUse)
	assert.Equal(t, "one", hears(t, path, true))
	require.Equal(t, errStop, stop())
	_, err = os.Lstat(path)
	assert.ErrorIs(t, err, fs.ErrNotExist)

	// A dead socket is replaced, an existing folder left as it is, and other modes can be had.
	deadSocket(t, path)
	require.NoError(t, os.Chmod(filepath.Dir(path), 0o750))
	l, err = unixsocket.Listen(unixsocket.Options{Path: path, DirMode: 0o711, SocketMode: 0o666})
	require.NoError(t, err)
	stop = serve(t, l, says("two"))
	assert.Equal(t, "two", hears(t, path, false))
	assert.Equal(t, fs.ModeSocket|0o666, mode(t, path))
	assert.Equal(t, fs.ModeDir|0o750, mode(t, filepath.Dir(path)))

	// A new folder has the mode that was wanted, whatever the umask.
	wide := filepath.Join(socketDir(t), "wide", "s")
	w, err := unixsocket.Listen(unixsocket.Options{Path: wide, DirMode: 0o777})
	require.NoError(t, err)
	assert.Equal(t, fs.ModeDir|0o777, mode(t, filepath.Dir(wide)))
	require.NoError(t, w.Close())

	// A server that stops leaves what another has put at its path.
	require.NoError(t, os.Remove(path))
	other, err := unixsocket.Listen(unixsocket.Options{Path: path})
	require.NoError(t, err)
	serve(t, other, says("three"))
	require.Equal(t, errStop, stop())
	assert.Equal(t, "three", hears(t, path, true))
}

func TestListenRefuses(t *testing.T) {
	t.Parallel()
	dir := socketDir(t)
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, []byte("precious"), 0o600))
	link := filepath.Join(dir, "link")
	require.NoError(t, os.Symlink("nowhere", link))
	for name, test := range map[string]struct {
		o    unixsocket.Options
		want string
	}{
		"no path":       {unixsocket.Options{}, "path is empty"},
		"abstract":      {unixsocket.Options{Path: "@x"}, "abstract"},
		"abstract too":  {unixsocket.Options{Path: "\x00x"}, "abstract"},
		"long path":     {unixsocket.Options{Path: filepath.Join(dir, strings.Repeat("x", 200))}, "use a shorter one"},
		"file":          {unixsocket.Options{Path: file}, "not a socket"},
		"link":          {unixsocket.Options{Path: link}, "not a socket"},
		"folder":        {unixsocket.Options{Path: dir}, "not a socket"},
		"below a file":  {unixsocket.Options{Path: filepath.Join(file, "s")}, "not a folder"},
		"mode of files": {unixsocket.Options{Path: filepath.Join(dir, "s"), SocketMode: fs.ModeSetuid | 0o600}, "permissions only"},
	} {
		_, err := unixsocket.Listen(test.o)
		require.ErrorContains(t, err, test.want, name)
		assert.NotErrorIs(t, err, unixsocket.ErrInUse, name)
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
func TestLongestPath(t *testing.T) {
	t.Parallel()
	dir := socketDir(t)
	path := filepath.Join(dir, strings.Repeat("x", unixsocket.MaxPath-len(dir)-1))
	l, err := unixsocket.Listen(unixsocket.Options{Path: path})
	require.NoError(t, err)
	serve(t, l, says("hello"))
	assert.Equal(t, "hello", hears(t, path, true))
	_, err = unixsocket.Listen(unixsocket.Options{Path: path + "x"})
	assert.ErrorContains(t, err, "use a shorter one")
}

// Of many that start at one dead socket one wins, and the others know that they have not.
func TestRace(t *testing.T) {
	t.Parallel()
	for range 10 {
		path := filepath.Join(socketDir(t), "s")
		deadSocket(t, path)
		const n = 8
		listeners := make([]*unixsocket.Listener, n)
		errs := make([]error, n)
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() { listeners[i], errs[i] = unixsocket.Listen(unixsocket.Options{Path: path}) })
		}
		wg.Wait()
		won := 0
		for i, err := range errs {
			if err != nil {
				require.ErrorIs(t, err, unixsocket.ErrInUse)
				continue
			}
			won++
			serve(t, listeners[i], says("winner"))
		}
		require.Equal(t, 1, won)
		require.Equal(t, "winner", hears(t, path, true))
	}
}

// Whoever may read the folder can hold its lock: that costs time, and does not keep the server away.
func TestLockedFolder(t *testing.T) {
	t.Parallel()
	if !flock.Supported {
		t.Skip("no flock on this system")
	}
	dir := socketDir(t)
	path := filepath.Join(dir, "s")
	deadSocket(t, path)
	f, err := os.Open(dir)
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, flock.Lock(f))
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		l, err := unixsocket.Listen(unixsocket.Options{Path: path})
		require.NoError(t, err)
		assert.Equal(t, 10*time.Second, time.Since(start))
		require.NoError(t, l.Close())

		time.AfterFunc(time.Second, func() { f.Close() })
		start = time.Now()
		l, err = unixsocket.Listen(unixsocket.Options{Path: path})
		require.NoError(t, err)
		assert.Equal(t, time.Second, time.Since(start).Round(100*time.Millisecond), "no longer than it is held")
		require.NoError(t, l.Close())
	})
}

// Many connect at once, as when an agent comes back, and wait until they are served.
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
	l, err := unixsocket.Listen(unixsocket.Options{Path: path})
	require.NoError(t, err)
	defer l.Close()
	for i := range n {
		c, err := net.Dial("unix", path)
		require.NoError(t, err, "connection %d", i)
		defer c.Close()
	}
}

// Requests under way get time at the end, but not for ever.
func TestServeEnds(t *testing.T) {
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
		stop := serve(t, l, mux)
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
		require.Equal(t, errStop, stop())
		assert.Equal(t, "done", <-short)
		assert.Equal(t, "cut", <-hangs)
		assert.Equal(t, 2*time.Second, time.Since(start))
		close(release)
	})
}

// A listener that fails is an error, and its socket is removed.
func TestServeFails(t *testing.T) {
	t.Parallel()
	path := filepath.Join(socketDir(t), "s")
	l, err := unixsocket.Listen(unixsocket.Options{Path: path})
	require.NoError(t, err)
	require.NoError(t, l.Close())
	err = unixsocket.Serve(t.Context(), l, &http.Server{Handler: says("nothing")})
	require.ErrorIs(t, err, net.ErrClosed)
	_, err = os.Lstat(path)
	assert.ErrorIs(t, err, fs.ErrNotExist)
}

// What other users could replace is worth a warning.
func TestWarn(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		mode fs.FileMode
		want bool
	}{{0o777, true}, {0o770, true}, {0o777 | fs.ModeSticky, false}, {0o755, false}} {
		dir := socketDir(t)
		require.NoError(t, os.Chmod(dir, test.mode))
		warned := false
		l, err := unixsocket.Listen(unixsocket.Options{Path: filepath.Join(dir, "s"), Warn: func(folder string, _ fs.FileMode) {
			warned = folder == dir
		}})
		require.NoError(t, err)
		assert.Equal(t, test.want, warned, test.mode)
		l.Remove()
		require.NoError(t, l.Close())
	}
}
