// Package unixsocket makes Unix sockets with care and serves HTTP on them, for the packages that serve
// secrets there.
//
// A socket appears with its final permissions: it is given its mode between bind and listen, when
// nobody can connect yet, and the umask has no say. Those who listen lock the folder, so that two
// that find the same dead socket do not both replace it; a stranger who holds that lock delays them by
// 10 seconds. A socket that somebody answers on, and
// anything that is not a socket, is left alone. On Windows there are neither modes nor that lock:
// who may connect is up to the folder's access list.
package unixsocket

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"
)

const (
	drainTime = 2 * time.Second
	dialTime  = time.Second
)

// ErrInUse says that another server answers on the socket.
var ErrInUse = errors.New("the socket is in use by another server")

// Options say where the socket is to be.
type Options struct {
	// Path is at most [MaxPath] bytes long. A relative path is relative to the working directory at
	// the time of Listen.
	Path string

	// DirMode is the mode of the socket's folder if it has to be made; 0 means 0700. A folder that
	// exists is left as it is.
	DirMode fs.FileMode

	// SocketMode is the mode of the socket; 0 means 0600. To connect takes write permission.
	SocketMode fs.FileMode

	// Warn, if set, is told if others than its owner may replace what is in the folder.
	Warn func(folder string, mode fs.FileMode)
}

// Listener is a socket that listens. Closing it leaves the file; see [Listener.Remove].
type Listener struct {
	net.Listener
	path   string      // absolute
	socket fs.FileInfo // of the file that is ours
}

// Listen makes the socket. When it returns, clients can connect, and wait to be served. A socket
// that nobody answers on is replaced. Anything else at the path is left alone and an error: one that
// wraps [ErrInUse] if a server answers.
func Listen(o Options) (*Listener, error) {
	switch {
	case o.Path == "":
		return nil, errors.New("the path is empty")
	case o.Path[0] == '@' || o.Path[0] == 0:
		return nil, errors.New("an abstract socket has no permissions; use a path in a folder")
	case len(o.Path) > MaxPath:
		return nil, fmt.Errorf("the path has %d bytes and a socket's at most %d; use a shorter one, or a relative one", len(o.Path), MaxPath)
	case o.DirMode&^fs.ModePerm != 0 || o.SocketMode&^fs.ModePerm != 0:
		return nil, errors.New("DirMode and SocketMode are permissions only, like 0750")
	}
	path, err := filepath.Abs(o.Path)
	if err != nil {
		return nil, err
	}
	dir := filepath.Dir(o.Path)
	if err := makeDir(dir, orMode(o.DirMode, 0o700)); err != nil {
		return nil, err
	}
	if fi, err := os.Stat(dir); err == nil && fi.Mode().Perm()&0o022 != 0 && fi.Mode()&fs.ModeSticky == 0 && o.Warn != nil {
		o.Warn(dir, fi.Mode())
	}
	unlock, err := lockDir(dir)
	if err != nil {
		return nil, fmt.Errorf("lock the folder: %w", err)
	}
	defer unlock()
	if err := removeDead(o.Path); err != nil {
		return nil, err
	}
	l, err := listenUnix(o.Path, orMode(o.SocketMode, 0o600))
	if err != nil {
		return nil, err
	}
	fi, err := os.Lstat(o.Path)
	if err != nil {
		l.Close()
		return nil, err
	}
	return &Listener{Listener: l, path: path, socket: fi}, nil
}

// Remove removes the socket, unless another is in its place by now. As long as the Listener is open
// nobody takes the path, so call it before Close.
func (l *Listener) Remove() {
	if fi, err := os.Lstat(l.path); err == nil && os.SameFile(fi, l.socket) {
		_ = os.Remove(l.path) // a dead socket is replaced at the next start
	}
}

func orMode(mode, zero fs.FileMode) fs.FileMode {
	if mode == 0 {
		return zero
	}
	return mode
}

// makeDir makes a folder, and those above it, with exactly that mode if it is not there.
func makeDir(dir string, mode fs.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(dir), mode); err != nil {
		return err
	}
	err := os.Mkdir(dir, mode)
	if errors.Is(err, fs.ErrExist) {
		if fi, err := os.Stat(dir); err == nil && !fi.IsDir() {
			return fmt.Errorf("%s is not a folder", dir)
		}
		return nil
	}
	if err != nil {
		return err
	}
	return os.Chmod(dir, mode) // what the umask took away
}

// removeDead removes a socket that nobody listens on.
func removeDead(path string) error {
	fi, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if fi.Mode().Type() != fs.ModeSocket {
		return errors.New("there is something that is not a socket, which is left alone; remove it, or choose another path")
	}
	c, err := net.DialTimeout("unix", path, dialTime)
	if err == nil {
		c.Close()
		return ErrInUse
	}
	if !refused(err) { // for instance a server whose queue is full
		return fmt.Errorf("%w, or cannot be asked: %w", ErrInUse, err)
	}
	return os.Remove(path)
}

// Serve serves HTTP/1.1, and HTTP/2 without TLS, on l with srv, until ctx is done or serving fails. It
// sets srv's Protocols and BaseContext. At the end it removes the socket if l is a [*Listener], ends
// the contexts of all requests, gives these 2 seconds to end, and cuts the connections that are
// left. It returns the cause of ctx, or, when ctx is not done, what failed.
func Serve(ctx context.Context, l net.Listener, srv *http.Server) error {
	base, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	srv.Protocols = new(http.Protocols)
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetUnencryptedHTTP2(true)
	srv.BaseContext = func(net.Listener) context.Context { return base }
	var wg sync.WaitGroup
	failed := make(chan error, 1)
	wg.Go(func() { failed <- srv.Serve(l) })
	var err error
	select {
	case <-ctx.Done():
		err = context.Cause(ctx)
	case err = <-failed:
	}
	if u, ok := l.(*Listener); ok {
		u.Remove()
	}
	end()
	drain, stop := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer stop()
	_ = srv.Shutdown(drain) // late is not an error: what is left is cut
	_ = srv.Close()
	wg.Wait()
	return err
}
