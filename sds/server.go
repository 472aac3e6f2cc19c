package sds

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"
)

const (
	maxConcurrentStreams = 100_000 // on one connection: each is one secret of one Envoy
	drainTime            = 2 * time.Second
	dialTime             = time.Second
)

// ErrSocketInUse says that another server answers on the socket; test for it with errors.Is. Two
// servers at one path would take each other's clients: stop the other one, or choose another path.
var ErrSocketInUse = errors.New("the socket is in use by another server")

// Server serves a handler on a Unix socket that it owns: HTTP/2 without TLS for gRPC, and HTTP/1.1
// for REST. Set the fields before the first call; they are not changed after.
//
// The socket appears with its final permissions: it is given its mode between bind and listen, when
// nobody can connect yet, and the umask has no say. Starting servers lock the folder, so that
// two that find the same dead socket do not both replace it. On Windows there are neither modes nor
// that lock: who may connect is up to the folder's access list.
type Server struct {
	// Path is where the socket appears, at most 107 bytes (103 on systems other than Linux and
	// Windows). A relative path is relative to the working directory at the time of Listen.
	Path string

	// DirMode is the mode of the socket's folder if Server makes it; 0 means 0700. A folder that
	// exists is left as it is.
	DirMode fs.FileMode

	// SocketMode is the mode of the socket; 0 means 0600. To connect takes write permission.
	SocketMode fs.FileMode

	// Handler serves the requests; required. A [*Handler], alone or in a mux or middleware.
	Handler http.Handler

	// ConnContext, if set, makes the context of each connection's requests, as in [http.Server];
	// it is the place to find out who is on the other side, for [Options].Authorize.
	ConnContext func(ctx context.Context, c net.Conn) context.Context

	// Logger gets what net/http has to say, at level Debug, and a warning if others than the
	// owner may replace the socket. Nil means silence.
	Logger *slog.Logger

	mu       sync.Mutex
	listener net.Listener
	socket   fs.FileInfo // of the file that is ours
	path     string      // absolute
}

// Listen makes the socket. When it returns, clients can connect, and wait for [Server.Run] to serve
// them: an Envoy that is started in between finds its server. After Listen, Run must be called, as
// it is Run that removes the socket. A second Listen does nothing.
//
// A socket that nobody answers on is replaced. Anything else at Path is left alone and an error:
// one that wraps [ErrSocketInUse] if a server answers.
func (s *Server) Listen() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listener != nil {
		return nil
	}
	if err := s.listen(); err != nil {
		return fmt.Errorf("sds: listen on %q: %w", s.Path, err)
	}
	return nil
}

func (s *Server) listen() error {
	switch {
	case s.Handler == nil:
		return errors.New("the Handler is nil")
	case s.Path == "":
		return errors.New("the Path is empty")
	case s.Path[0] == '@' || s.Path[0] == 0:
		return errors.New("an abstract socket has no permissions; use a path in a folder")
	case len(s.Path) > maxPath:
		return fmt.Errorf("the path has %d bytes and a socket's at most %d; use a shorter one, or a relative one", len(s.Path), maxPath)
	case s.DirMode&^fs.ModePerm != 0 || s.SocketMode&^fs.ModePerm != 0:
		return errors.New("DirMode and SocketMode are permissions only, like 0750")
	}
	path, err := filepath.Abs(s.Path)
	if err != nil {
		return err
	}
	dir := filepath.Dir(s.Path)
	if err := makeDir(dir, orMode(s.DirMode, 0o700)); err != nil {
		return err
	}
	if fi, err := os.Stat(dir); err == nil && fi.Mode().Perm()&0o022 != 0 && fi.Mode()&fs.ModeSticky == 0 {
		s.log().Warn("sds: others than its owner may replace the socket; take away write permission of its folder",
			slog.String("folder", dir), slog.String("mode", fi.Mode().String()))
	}
	unlock, err := lockDir(dir)
	if err != nil {
		return fmt.Errorf("lock the folder: %w", err)
	}
	defer unlock()
	if err := removeDead(s.Path); err != nil {
		return err
	}
	l, err := listenUnix(s.Path, orMode(s.SocketMode, 0o600))
	if err != nil {
		return err
	}
	fi, err := os.Lstat(s.Path)
	if err != nil {
		l.Close()
		return err
	}
	s.listener, s.socket, s.path = l, fi, path
	return nil
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
		return ErrSocketInUse
	}
	if !refused(err) { // for instance a server whose queue is full
		return fmt.Errorf("%w, or cannot be asked: %w", ErrSocketInUse, err)
	}
	return os.Remove(path)
}

func (s *Server) log() *slog.Logger {
	if s.Logger == nil {
		return slog.New(slog.DiscardHandler)
	}
	return s.Logger
}

// Run calls [Server.Listen] if nobody has, and serves until ctx is done or serving fails. Then it
// removes the socket, ends the streams with code Unavailable, gives requests 2 seconds to end, and
// cuts the connections that are left. It returns the cause of ctx, or what failed. A Server runs
// once.
//
// Run removes only its own socket: if another is at Path by then, it stays.
func (s *Server) Run(ctx context.Context) error {
	if err := s.Listen(); err != nil {
		return err
	}
	s.mu.Lock()
	l := s.listener
	s.mu.Unlock()

	base, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	srv := &http.Server{
		Handler:   s.Handler,
		Protocols: &protocols,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: maxConcurrentStreams,
			MaxReadFrameSize:     16 << 10, // clients written in Go set aside that much for each stream
		},
		ReadHeaderTimeout: 10 * time.Second,
		MaxHeaderBytes:    64 << 10,
		BaseContext:       func(net.Listener) context.Context { return base },
		ConnContext:       s.ConnContext,
		ErrorLog:          slog.NewLogLogger(s.log().Handler(), slog.LevelDebug),
	}
	var wg sync.WaitGroup
	failed := make(chan error, 1)
	wg.Go(func() { failed <- srv.Serve(l) })
	var err error
	select {
	case <-ctx.Done():
		err = context.Cause(ctx)
	case err = <-failed:
		err = fmt.Errorf("sds: serve on %q: %w", s.Path, err)
	}
	// As long as we listen nobody takes the path, so what is removed here is ours.
	s.remove()
	end()
	drain, stop := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer stop()
	_ = srv.Shutdown(drain) // late is not an error: what is left is cut
	_ = srv.Close()
	wg.Wait()
	return err
}

func (s *Server) remove() {
	if fi, err := os.Lstat(s.path); err == nil && os.SameFile(fi, s.socket) {
		_ = os.Remove(s.path) // a dead socket is replaced at the next start
	}
}
