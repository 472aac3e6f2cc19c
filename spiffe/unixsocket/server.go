// Package unixsocket serves HTTP on a Unix socket and tells handlers which process is calling. It serves local APIs
// for secrets: SDS for Envoy (package sds) and the SPIFFE Workload API (package workloadserver).
//
//	handler, err := sds.NewHandler(manager, nil)
//	…
//	server := &unixsocket.Server{Path: "/run/identity/sds.sock", Handler: handler}
//	err = server.Run(ctx)
//
// Both APIs can share one socket, as their paths differ:
//
//	mux := http.NewServeMux()
//	mux.Handle("/SpiffeWorkloadAPI/", workloadHandler)
//	mux.Handle("/", sdsHandler)
//	server := &unixsocket.Server{Path: "/run/identity/agent.sock", SocketMode: 0o666, Handler: mux}
//
// # The peer
//
// [PeerFromContext] returns the user, group and process of the peer from the context of a request, in a
// handler, in middleware, or in a hook that gets the request's context:
//
//	opts := &sds.Options{Resolve: func(ctx context.Context, name string) (string, error) {
//		if peer, ok := unixsocket.PeerFromContext(ctx); !ok || peer.UID != envoyUID {
//			return "", errors.New("only Envoy may have secrets")
//		}
//		return name, nil
//	}}
//
// Peers are known only on Linux. [ConnContext] makes them known to any other [http.Server]. An
// authn.Func makes a caller of a peer.
//
// # Limits
//
// Any local process that may connect can open connections and keep them. So the server closes a connection after 5
// minutes without a request in progress, and after 10 seconds if its first request, or the rest of a body, does not
// arrive. A connection with a request in progress, such as a stream of secrets, is not closed for its age.
//
// [Server.MaxConns] bounds the connections of the server, and [Server.MaxConnsPerUser] the connections of each user. A
// user may also have no more than twice as many as are free, at this server and, together, at all servers of this
// library in the process, so that several users leave room for one more; and a process no more than 32 times as many
// as are free for its user. A connection beyond a limit is closed at once, which delays no other client. Accepted
// connections never take the last quarter of the process's file descriptors, from 64 to 1,024 of them, so that the
// program can always reach its certificate authority and open its files.
//
// Requests under way are bounded, too: 1,664 in the process. A user has no more than twice as many as are free, and a
// connection no more than 32 times as many as are free for its user. A request counts from before the handler runs
// until the end of the response is written. A gRPC stream counts until the handler has received a message; from then
// on the handler's own limits apply. A request beyond a limit is refused with 503, or ResourceExhausted, and delays no
// other client. A response that its client does not read within 30 seconds ends, unless the handler sets another time.
// The server does not read from a client that does not read. On a Listener that is no Unix socket a connection has 250
// streams at a time, and by TCP a request counts twice.
//
// A pod, or a container outside of a pod, counts as a user of its own if the control group of the process names it,
// because without user namespaces all pods may run as root. A server in a pod needs hostPID for this.
//
// [Limit] puts another listener of the program, such as a proxy's, under the same limits.
//
// # How a socket appears
//
// A socket listens and has its final permissions before it appears: it is made in a directory beside its place that
// only this user may enter, and then linked to its name. So the umask has no effect, no other process can trick the
// server into changing the mode of another file, and tools that list sockets show the path in that directory, such as
// /run/identity/.sds.sock.X7ZQ2A/sds.sock.
//
// The directory of the socket, and the directories above it, must belong to this user or to root. If others may
// write to one without sticky bit, such as an emptyDir volume of Kubernetes, they may replace the socket; the
// log warns of that.
//
// A dead socket, on which no server answers, is replaced. A socket in use, and anything that is not a socket, is
// left alone. A socket that is removed while the server runs does not appear again. Starting servers lock the
// directory, so that two of them do not both replace the same dead socket; a process that holds that lock for long
// delays a start by 10 seconds and does not prevent it. On Windows there are neither modes nor locks: the directory's
// access list decides which processes may connect.
package unixsocket

import (
	"cmp"
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

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/files/flock"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/ratelog"
)

const (
	defaultMaxConns        = 16_384
	defaultMaxConnsPerUser = 1024

	drainTime = 2 * time.Second
	dialTime  = time.Second
	lockTime  = 10 * time.Second // other servers hold the lock for a second at most

	maxConcurrentStreams = 100_000 // on one connection: Envoy opens a stream for each secret
	maxStreamsTCP        = 250     // on a connection that is no Unix socket
)

// ErrInUse says that another server answers on the socket. Stop that server, or choose another path.
var ErrInUse = errors.New("the socket is in use by another server")

// Server serves a handler on a Unix socket that it owns, with HTTP/2 without TLS and HTTP/1.1. Set the
// fields before the first call; they must not change after it. A Server runs once.
type Server struct {
	// Path is where the socket appears, at most 107 bytes (103 on systems other than Linux and
	// Windows). A relative path is relative to the working directory at the time of Listen.
	Path string

	// DirMode is the mode of the socket's directory if Server makes it; 0 means 0700. A directory that
	// exists is left as it is, and must belong to this user or to root.
	DirMode fs.FileMode

	// SocketMode is the mode of the socket; 0 means 0600. Connecting takes write permission.
	SocketMode fs.FileMode

	// Listener, if set, is served instead of a socket at Path, and closed at the end: for example a socket passed on
	// by systemd, or a loopback port. Path and the modes have no effect then.
	Listener net.Listener

	// Handler serves the requests; required.
	Handler http.Handler

	// Serve, if set, serves the connections with a server that it may change first, for TLS, on a Unix socket too: it is
	// the method Serve of a spiffetls.Endpoint. The processes of the clients stay known.
	Serve func(*http.Server, net.Listener) error

	// ConnContext, if set, makes the context of each connection's requests, as in [http.Server]. Its ctx
	// has the peer already.
	ConnContext func(ctx context.Context, c net.Conn) context.Context

	// MaxConns is how many connections the server has at a time. 0 means 16,384, or all file descriptors of the
	// process but the reserve if those are fewer: 384 of 512.
	MaxConns int

	// MaxConnsPerUser is the same limit for one user of the machine, or one pod. 0 means 1,024, or two thirds of
	// MaxConns if those are fewer: 256 of 384. On a Listener that is no Unix socket, each IP address counts as a user,
	// and on loopback and Linux each user behind it; all unknown peers are one user.
	MaxConnsPerUser int

	// Logger gets the messages of net/http at level Debug, a warning if users other than the owner may replace
	// the socket, and one for connections beyond a limit, with the user and the process: one line per limit,
	// user (the first 12) and minute, with the number of connections. Nil means no logs.
	Logger *slog.Logger

	mu     sync.Mutex
	l      net.Listener
	remove func() // removes the socket
}

// Listen makes the socket. When it returns, clients can connect, and wait for [Server.Run] to serve
// them: an Envoy that is started in between finds its server. Run must follow, as it removes the
// socket. A second Listen does nothing.
//
// A dead socket is replaced. Anything else at Path is left alone and is an error, one that wraps
// [ErrInUse] if a server answers.
func (s *Server) Listen() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.l != nil {
		return nil
	}
	if err := s.listen(); err != nil {
		return fmt.Errorf("unixsocket: listen on %.256q: %w", s.Path, err)
	}
	return nil
}

// check returns an error if a field is not valid.
func (s *Server) check() error {
	switch {
	case s.Handler == nil:
		return errors.New("the Handler is nil")
	case s.MaxConns < 0 || s.MaxConnsPerUser < 0:
		return errors.New("MaxConns or MaxConnsPerUser is negative")
	case s.Listener != nil:
		return nil
	case s.Path == "":
		return errors.New("the path is empty")
	case os.IsPathSeparator(s.Path[len(s.Path)-1]):
		return errors.New("the path ends in a slash; add the name of the socket")
	case s.Path[0] == '@' || s.Path[0] == 0:
		return errors.New("an abstract socket has no permissions; use a path in a directory")
	case len(s.Path) > maxPath:
		return fmt.Errorf("the path has %d bytes, the limit is %d; use a shorter one, or a relative one",
			len(s.Path), maxPath)
	case s.DirMode&^fs.ModePerm != 0 || s.SocketMode&^fs.ModePerm != 0:
		return errors.New("DirMode and SocketMode are permissions only, like 0750")
	}
	return nil
}

func (s *Server) listen() error {
	if err := s.check(); err != nil {
		return err
	}
	if s.Listener != nil {
		s.l, s.remove = s.Listener, func() {}
		return nil
	}
	dir, name := filepath.Split(s.Path) // not cleaned: what is behind a link decides what ".." means
	if dir == "" {
		dir = "." + string(filepath.Separator)
	}
	warned := false
	root, err := private.MakeDir(dir, private.Options{Mode: cmp.Or(s.DirMode, 0o700), Warn: func(err error) {
		warned = true
		s.warn(dir, err)
	}})
	if err != nil {
		return err
	}
	if fi, err := root.Stat("."); err == nil && !warned && fi.Mode().Perm()&0o022 != 0 &&
		fi.Mode()&fs.ModeSticky == 0 && !private.PodVolume(dir) {
		s.warn(dir, fmt.Errorf("it has mode %v", fi.Mode()))
	}
	l, own, err := s.open(root, dir, name)
	if err != nil {
		root.Close()
		return err
	}
	s.l, s.remove = l, func() {
		if fi, err := root.Lstat(name); err == nil && os.SameFile(fi, own) {
			_ = root.Remove(name) // a dead socket is replaced at the next start
		}
		root.Close()
	}
	return nil
}

func (s *Server) warn(dir string, err error) {
	ratelog.Patient(s.Logger).Warn("unixsocket: users other than the owner may replace the socket; take away write "+
		"permission of its directory", slog.String("dir", dir), slog.Any("err", err))
}

// open makes the socket in an open directory, in the place of a dead one.
func (s *Server) open(root *os.Root, dir, name string) (net.Listener, fs.FileInfo, error) {
	if flock.Supported {
		// The lock lasts until the end of open or of the process, and leaves no file behind. Every process that may
		// read the directory can hold it for any time, so after lockTime open goes on without it.
		lock, err := root.Open(".")
		if err == nil {
			defer lock.Close()
			_, err = flock.TryLockFor(lock, lockTime)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("lock the directory: %w", err)
		}
	}
	if err := removeDead(root, s.Path, name); err != nil {
		return nil, nil, err
	}
	return listenUnix(root, dir, name, cmp.Or(s.SocketMode, 0o600))
}

// name says where the server listens.
func (s *Server) name() string {
	if s.Listener != nil {
		return s.l.Addr().String()
	}
	return s.Path
}

// Run calls [Server.Listen] unless it was called before, and serves until ctx is done or serving fails. Then
// it removes the socket, ends the contexts of all requests, gives the requests 2 seconds to end, and cuts
// the connections that are left. It returns nil after the end of ctx, and otherwise the failure.
//
// Run removes only its own socket: if the file of another server is at Path by then, it stays.
func (s *Server) Run(ctx context.Context) error {
	if err := s.Listen(); err != nil {
		return err
	}
	base, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	logger := ratelog.Patient(s.Logger)
	l := s.limited(logger)
	streams := maxConcurrentStreams
	if s.l.Addr().Network() != "unix" {
		streams = maxStreamsTCP
	}
	srv := l.Server(s.Handler, streams, logger.Handler())
	srv.BaseContext = func(net.Listener) context.Context { return base }
	count := srv.ConnContext
	srv.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		ctx, c = count(ctx, c), conns.Raw(c)
		ctx = ConnContext(ctx, c)
		if s.ConnContext != nil {
			ctx = s.ConnContext(ctx, c)
		}
		return ctx
	}
	serve := (*http.Server).Serve
	if s.Serve != nil {
		serve = s.Serve
		srv.Protocols.SetUnencryptedHTTP2(false)
		srv.Protocols.SetHTTP2(true)
	}
	failed := make(chan error, 1)
	go func() { failed <- serve(srv, conns.Patient(l)) }()
	var err error
	select {
	case <-ctx.Done():
	case failure := <-failed:
		err = fmt.Errorf("unixsocket: serve on %.256q: %w", s.name(), failure)
		failed <- failure
	}
	s.remove() // before the listener is closed, as no other server takes the path until then
	end()
	drain, stop := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer stop()
	_ = srv.Shutdown(drain) // what is left after the time is cut
	_ = srv.Close()
	<-failed
	return err
}

// limited returns the listener with the limits applied.
func (s *Server) limited(logger *slog.Logger) *conns.Listener {
	total := cmp.Or(s.MaxConns, conns.Max(defaultMaxConns))
	return conns.Listen(s.l, conns.Options{
		Total:   total,
		Each:    cmp.Or(s.MaxConnsPerUser, min(defaultMaxConnsPerUser, max(total*2/3, 1))),
		Peer:    holder,
		Refused: refusals(logger, s.name()),
	})
}

// refusals returns a function that logs connections beyond a limit.
func refusals(logger *slog.Logger, socket string) func(net.Conn, string, *limit.Error) {
	log := ratelog.New(logger, 0)
	return func(c net.Conn, what string, err *limit.Error) {
		attrs := []slog.Attr{slog.String("socket", socket)}
		if p, known := peerOf(c); known {
			attrs = append(attrs, slog.Uint64("uid", uint64(p.UID)), slog.Int("pid", int(p.PID)))
		} else {
			attrs = append(attrs, slog.String("peer", c.RemoteAddr().String()))
		}
		reason := err.Reason
		switch reason {
		case limit.CallerShare:
			reason = "MaxConnsPerUser is reached: the user has too many connections"
		case limit.TotalShare:
			reason = "MaxConns is reached: there are too many connections"
		}
		user := ""
		if names := holder(c).Names; len(names) > 0 {
			user = names[0]
		}
		log.LogOf(slog.LevelWarn, user, "unixsocket: "+what, reason, attrs...)
	}
}

// Limit applies to l the default connection limits of a [Server], for each user or IP address and for the process.
// descriptors is how many file descriptors each connection takes until it is closed: two if the program opens another
// connection for it. A connection beyond a limit is closed at once. The logger works like Logger of [Server].
func Limit(l net.Listener, descriptors int, logger *slog.Logger) net.Listener {
	descriptors = max(descriptors, 1)
	total := max(conns.Max(defaultMaxConns*descriptors)/descriptors, 1)
	return conns.Listen(l, conns.Options{Total: total, Each: max(total*2/3, 1), Descriptors: descriptors,
		Peer: holder, Refused: refusals(logger, l.Addr().String())}).Closing()
}

// removeDead removes the socket with the path, and the name in root, if no server listens on it.
func removeDead(root *os.Root, path, name string) error {
	fi, err := root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if fi.Mode().Type() != fs.ModeSocket {
		return errors.New("there is a file that is not a socket, which is left alone; remove it, or choose " +
			"another path")
	}
	c, err := net.DialTimeout("unix", path, dialTime)
	if err == nil {
		c.Close()
		return ErrInUse
	}
	if !refused(err) { // such as a server whose queue is full
		return fmt.Errorf("%w, or its state is unknown: %w", ErrInUse, err)
	}
	return root.Remove(name)
}
