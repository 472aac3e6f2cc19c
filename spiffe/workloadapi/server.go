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

	"github.com/svidkit/svidkit/authn/unixsocket"
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

	mu     sync.Mutex
	server *unixsocket.Server
}

// Listen makes the socket. When it returns, clients can connect, and wait for [Server.Run] to serve
// them. After Listen, Run must be called, as it is Run that removes the socket. A second Listen does
// nothing. A socket that another server answers on is an error that wraps [ErrSocketInUse].
func (s *Server) Listen() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.server != nil {
		return nil
	}
	server, err := s.make()
	if err == nil {
		err = server.Listen()
	}
	if err != nil {
		return fmt.Errorf("workloadapi: listen on %q: %w", clip(s.Address, 256), err)
	}
	s.server = server
	return nil
}

func (s *Server) make() (*unixsocket.Server, error) {
	if s.Handler == nil {
		return nil, errors.New("the Handler is nil")
	}
	a, err := ParseAddress(s.Address)
	if err != nil {
		return nil, err
	}
	server := &unixsocket.Server{Path: a.target, DirMode: s.DirMode, SocketMode: s.SocketMode, Handler: s.Handler, Logger: s.Logger}
	if a.network == "unix" {
		return server, nil
	}
	ip := netip.MustParseAddrPort(a.target).Addr().Unmap() // it was parsed before
	if !s.AnyNetwork && !ip.IsLoopback() && !ip.IsLinkLocalUnicast() {
		return nil, errors.New("not a loopback or link-local address, so callers are not known to be local (WEP-4); use a Unix socket, or set AnyNetwork")
	}
	server.Listener, err = net.Listen(a.network, a.target)
	return server, err
}

// Run calls [Server.Listen] if nobody has, and serves until ctx is done or serving fails. Then it
// removes the socket, ends the streams with code Unavailable, gives requests 2 seconds to end, and
// cuts the connections that are left. It returns the cause of ctx, or what failed. A Server runs once.
func (s *Server) Run(ctx context.Context) error {
	if err := s.Listen(); err != nil {
		return err
	}
	return s.server.Run(ctx)
}
