package workloadapi

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/unixsocket"
)

// Server serves a handler where programs look for the Workload API, with HTTP/2 and no TLS. Set the
// fields before the first call; they are not changed after.
//
// A Unix socket appears with its final permissions, whatever the umask, and a socket that nobody
// answers on is replaced. On Windows sockets have no modes: who may connect is up to the folder's
// access list.
type Server struct {
	// Address is where to listen; see [ParseAddress]. The path of a Unix socket may have 107 bytes (103
	// on systems other than Linux and Windows). On tcp nobody can tell who is calling: whoever reaches
	// the port gets what the handler gives to a caller without a name, so only a loopback or
	// link-local address is accepted (WEP-4).
	Address string

	// AnyNetwork accepts other IP addresses too, where the network itself lets in none but those who
	// may have the identities.
	AnyNetwork bool

	// DirMode is the mode of the socket's folder if Server makes it; 0 means 0700. A folder that
	// exists is left as it is.
	DirMode fs.FileMode

	// SocketMode is the mode of the socket; 0 means 0600. To connect takes write permission.
	SocketMode fs.FileMode

	// Handler serves the requests; required. A [*Handler], alone or in middleware.
	Handler http.Handler

	// Logger gets what net/http has to say, at level Debug, and a warning if others than the
	// owner may replace the socket. Nil means silence.
	Logger *slog.Logger

	mu       sync.Mutex
	listener net.Listener
}

// Listen makes the socket. When it returns, clients can connect, and wait for [Server.Run] to serve
// them. After Listen, Run must be called, as it is Run that removes the socket. A second Listen does
// nothing. A socket that another server answers on is an error that wraps [ErrSocketInUse].
func (s *Server) Listen() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listener != nil {
		return nil
	}
	l, err := s.listen()
	if err != nil {
		return fmt.Errorf("workloadapi: listen on %q: %w", clip(s.Address, 256), err)
	}
	s.listener = l
	return nil
}

func (s *Server) listen() (net.Listener, error) {
	if s.Handler == nil {
		return nil, errors.New("the Handler is nil")
	}
	a, err := ParseAddress(s.Address)
	if err != nil {
		return nil, err
	}
	if a.network == "unix" {
		return unixsocket.Listen(unixsocket.Options{
			Path: a.target, DirMode: s.DirMode, SocketMode: s.SocketMode,
			Warn: func(folder string, mode fs.FileMode) {
				s.log().Warn("workloadapi: others than its owner may replace the socket; take away write permission of its folder",
					slog.String("folder", folder), slog.String("mode", mode.String()))
			},
		})
	}
	ip := netip.MustParseAddrPort(a.target).Addr().Unmap() // it was parsed before
	if !s.AnyNetwork && !ip.IsLoopback() && !ip.IsLinkLocalUnicast() {
		return nil, errors.New("not a loopback or link-local address, so callers are not known to be local (WEP-4); use a Unix socket, or set AnyNetwork")
	}
	return net.Listen(a.network, a.target)
}

func (s *Server) log() *slog.Logger {
	if s.Logger == nil {
		return slog.New(slog.DiscardHandler)
	}
	return s.Logger
}

// Run calls [Server.Listen] if nobody has, and serves until ctx is done or serving fails. Then it
// removes the socket, ends the streams with code Unavailable, gives requests 2 seconds to end, and
// cuts the connections that are left. It returns the cause of ctx, or what failed. A Server runs once.
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
			MaxConcurrentStreams: maxPerConnection,
			MaxReadFrameSize:     16 << 10, // clients written in Go set aside that much for each stream
		},
		ReadHeaderTimeout: 10 * time.Second,
		MaxHeaderBytes:    64 << 10,
		ConnContext:       ConnContext,
		ErrorLog:          slog.NewLogLogger(s.log().Handler(), slog.LevelDebug),
	})
	if ctx.Err() == nil {
		return fmt.Errorf("workloadapi: serve on %q: %w", clip(s.Address, 256), err)
	}
	return err
}

// Caller is the process that opened a connection, as the kernel saw it at that moment. The process
// may have handed the connection on, or be gone, and its PID may be another's by now: a server that
// looks further into it makes sure that the process has started before the connection.
type Caller struct {
	PID      int // as the server's PID namespace has it; 0 if it is not in there
	UID, GID int // effective
}

type callerKey struct{}

// ConnContext is for the field of that name of an [http.Server] that a [Handler] is mounted on: it
// finds out who opened a connection, for [CallerFromContext]. A [Server] has it already.
func ConnContext(ctx context.Context, c net.Conn) context.Context {
	if caller, ok := peer(c); ok {
		return context.WithValue(ctx, callerKey{}, caller)
	}
	return ctx
}

// CallerFromContext returns who opened the connection of the request that ctx belongs to. It reports
// false if that is not known: on connections that are not Unix sockets, and on systems other than
// Linux, where package syscall does not tell.
func CallerFromContext(ctx context.Context) (Caller, bool) {
	c, ok := ctx.Value(callerKey{}).(Caller)
	return c, ok
}
