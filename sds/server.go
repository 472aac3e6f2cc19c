package sds

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/unixsocket"
)

const maxConcurrentStreams = 100_000 // on one connection: each is one secret of one Envoy

// ErrSocketInUse says that another server answers on the socket; test for it with errors.Is. Two
// servers at one path would take each other's clients: stop the other one, or choose another path.
var ErrSocketInUse = unixsocket.ErrInUse

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
	listener *unixsocket.Listener
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
	l, err := s.listen()
	if err != nil {
		return fmt.Errorf("sds: listen on %q: %w", s.Path, err)
	}
	s.listener = l
	return nil
}

func (s *Server) listen() (*unixsocket.Listener, error) {
	if s.Handler == nil {
		return nil, errors.New("the Handler is nil")
	}
	return unixsocket.Listen(unixsocket.Options{
		Path: s.Path, DirMode: s.DirMode, SocketMode: s.SocketMode,
		Warn: func(folder string, mode fs.FileMode) {
			s.log().Warn("sds: others than its owner may replace the socket; take away write permission of its folder",
				slog.String("folder", folder), slog.String("mode", mode.String()))
		},
	})
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

	err := unixsocket.Serve(ctx, l, &http.Server{
		Handler: s.Handler,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: maxConcurrentStreams,
			MaxReadFrameSize:     16 << 10, // clients written in Go set aside that much for each stream
		},
		ReadHeaderTimeout: 10 * time.Second,
		MaxHeaderBytes:    64 << 10,
		ConnContext:       s.ConnContext,
		ErrorLog:          slog.NewLogLogger(s.log().Handler(), slog.LevelDebug),
	})
	if ctx.Err() == nil {
		return fmt.Errorf("sds: serve on %q: %w", s.Path, err)
	}
	return err
}
