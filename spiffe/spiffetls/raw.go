package spiffetls

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/spiffe"
)

// NewListener returns a listener that accepts connections whose handshake is done. It takes the arguments of
// [ServerConfig]. Each connection is a [*tls.Conn], and [PeerFromConn] returns its client:
//
//	l, err := spiffetls.NewListener(inner, self, bundles, spiffe.AllowIDs(web), nil)
//	…
//	conn, err := l.Accept()
//	…
//	peer, err := spiffetls.PeerFromConn(conn)
//
// Handshakes run concurrently, so a slow or silent client delays no other. Each must end within HandshakeTimeout, and
// at most MaxHandshakes may be unfinished, or finished and not yet accepted; beyond that connections are closed at
// once, first those of an address that has many. So is a connection that would take one of the last file descriptors of
// the process, a quarter of them and at most 1,024. Accept returns errors of inner only; closed connections and refused
// clients go to the Logger and the FailureLog.
//
// The first Accept starts a goroutine. Close closes inner and the connections that were not accepted yet, and waits
// until their handshakes have ended. A Governor in the options governs the connections without [Governor.Listener]. For
// net/http use [ConfigureServer].
func NewListener(inner net.Listener, self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *Options) (net.Listener, error) {
	e, err := newEndpoint(true, self, peers, allow, opts)
	switch {
	case err != nil:
		return nil, fmt.Errorf("spiffetls: listener: %w", err)
	case inner == nil:
		return nil, errors.New("spiffetls: listener: no listener to accept from")
	}
	l := &listener{e: e, config: e.serverConfig(), ready: make(chan accepted)}
	e.followHello(l.config)
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.unfinished = conns.Listen(inner, conns.Options{
		Total: cmp.Or(e.opts.MaxHandshakes, maxHandshakes),
		Refused: func(c net.Conn, _ string, err *limit.Error) {
			_ = e.failed(true, remote(c), fmt.Errorf("%w: %s", errTooMany, err.Reason))
		},
	})
	return l, nil
}

const (
	handshakeTime = 10 * time.Second // by default
	maxHandshakes = 1024             // by default
)

var errTooMany = errors.New("the connection was closed before its handshake")

type listener struct {
	e          *endpoint
	config     *tls.Config
	unfinished *conns.Listener // counts connections until they are accepted
	ready      chan accepted

	ctx     context.Context // until it is closed
	cancel  context.CancelFunc
	mu      sync.Mutex
	started bool
	running sync.WaitGroup
}

type accepted struct {
	conn *tls.Conn
	err  error
}

// Accept implements [net.Listener].
func (l *listener) Accept() (net.Conn, error) {
	l.mu.Lock()
	if !l.started && l.ctx.Err() == nil {
		l.started = true
		l.running.Go(l.run)
	}
	l.mu.Unlock()
	select {
	case a := <-l.ready:
		if a.err != nil {
			return nil, a.err
		}
		return a.conn, nil
	case <-l.ctx.Done():
		return nil, fmt.Errorf("spiffetls: accept: %w", net.ErrClosed)
	}
}

// Close implements [net.Listener].
func (l *listener) Close() error {
	l.mu.Lock()
	l.cancel() // no Accept starts run after this
	l.mu.Unlock()
	err := l.unfinished.Close()
	l.running.Wait()
	return err
}

// Addr implements [net.Listener].
func (l *listener) Addr() net.Addr { return l.unfinished.Addr() }

func (l *listener) run() {
	for {
		c, err := l.unfinished.Accept()
		if err == nil {
			l.running.Go(func() { l.handshake(c) })
			continue
		}
		select {
		case l.ready <- accepted{err: err}: // so that the caller decides how long to wait
		case <-l.ctx.Done():
			return
		}
		if errors.Is(err, net.ErrClosed) { // by another than Close
			l.cancel()
			return
		}
	}
}

func (l *listener) handshake(c net.Conn) {
	defer l.unfinished.Closed(c)
	raw := &rawConn{Conn: c, governor: l.e.opts.Governor}
	conn := tls.Server(raw, l.config)
	raw.tls = conn
	ctx, cancel := context.WithTimeout(l.ctx, l.e.opts.HandshakeTimeout)
	err := conn.HandshakeContext(ctx)
	cancel()
	if err != nil { // which followHello's configuration has noted, if there was a hello
		if !raw.heard {
			l.e.opts.Metrics.failed(true, causeOf("tls", err))
		}
		_ = raw.Close()
		return
	}
	select {
	case l.ready <- accepted{conn: conn}:
	case <-l.ctx.Done():
		_ = raw.Close()
	}
}

// Dialer makes client connections whose handshake is done and whose server is verified; see [PeerFromConn]. It is safe
// for concurrent use.
type Dialer struct {
	e      *endpoint
	config *tls.Config
}

// NewDialer returns a Dialer. It takes the arguments of [Transport], including [Hosts], a [Governor] and [WebRoots].
// Sessions are not resumed.
func NewDialer(self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *Options) (*Dialer, error) {
	e, err := newEndpoint(false, self, peers, allow, opts)
	if err != nil {
		return nil, fmt.Errorf("spiffetls: dialer: %w", err)
	}
	return &Dialer{e, e.clientConfig()}, nil
}

// DialContext connects to an address, such as "db.example:5432", and returns a [*tls.Conn]. Connecting takes at most 30
// seconds, and the handshake at most HandshakeTimeout. An address without a policy in [Hosts] is not dialled.
func (d *Dialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	if err := d.known(addr); err != nil {
		return nil, err
	}
	below, err := newNetDialer().DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	conn, err := d.Handshake(ctx, below, addr)
	if err != nil {
		return nil, err // and not a nil *tls.Conn
	}
	return conn, nil
}

// Handshake starts TLS on a connection that the caller has made, through a proxy or with STARTTLS for example, and
// returns when the server is verified, within HandshakeTimeout. addr is the dialled address, whose port may be missing:
// its host is sent to the server and verified with [WebRoots], and [Hosts] finds the policy by it. The Dialer owns
// below from now on, and closes it on an error.
func (d *Dialer) Handshake(ctx context.Context, below net.Conn, addr string) (*tls.Conn, error) {
	if err := d.known(addr); err != nil {
		_ = below.Close()
		return nil, err
	}
	return d.e.handshake(ctx, below, d.config, addr, d.e.opts.HandshakeTimeout, 0)
}

// known returns an error for an address without a policy.
func (d *Dialer) known(addr string) error {
	if d.e.hosts == nil {
		return nil
	}
	if _, err := d.e.policyAt(addressOf(addr)); err != nil {
		return fmt.Errorf("spiffetls: dial: %w", err)
	}
	return nil
}
