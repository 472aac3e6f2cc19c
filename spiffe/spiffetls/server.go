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

// Listener returns a listener that accepts connections of inner whose handshake is done. Each is a [*tls.Conn], and
// [PeerFromConn] returns its client:
//
//	l, err := endpoint.Listener(inner)
//	…
//	conn, err := l.Accept()
//	…
//	peer, err := spiffetls.PeerFromConn(conn)
//
// Handshakes run concurrently, so a slow or silent client delays no other. Each must end within HandshakeTimeout. At
// most MaxHandshakes may be unfinished, or finished and not yet accepted; beyond that, connections are closed at once,
// first from addresses that have many. So is a connection that would take one of the last file descriptors of the
// process, a quarter of them and at most 1,024. Accept returns errors of inner only; closed connections and refused
// clients go to the Logger and the Metrics.
//
// A goroutine accepts until Close. Close closes inner and the connections that were not accepted yet, and waits
// until their handshakes have ended. For net/http use [Endpoint.ConfigureServer].
func (e *Endpoint) Listener(inner net.Listener) (net.Listener, error) {
	if err := e.meets(spiffe.ClientRole); err != nil {
		return nil, fmt.Errorf("spiffetls: listener: %w", err)
	}
	l := &listener{e: e, ready: make(chan result)}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.unfinished = conns.Listen(inner, conns.Options{
		Total: cmp.Or(e.config.MaxHandshakes, maxHandshakes),
		Refused: func(c net.Conn, _ string, err *limit.Error) {
			_ = e.failed(true, remote(c), fmt.Errorf("%w: %s", errTooMany, err.Reason))
		},
	})
	l.running.Go(l.run)
	return l, nil
}

const (
	handshakeTime = 10 * time.Second // by default
	maxHandshakes = 1024             // by default
)

var errTooMany = errors.New("the connection was closed before its handshake")

type listener struct {
	e          *Endpoint
	unfinished *conns.Listener // counts connections until they are accepted
	ready      chan result

	ctx     context.Context // until it is closed
	cancel  context.CancelFunc
	running sync.WaitGroup
}

// result is the result of one Accept.
type result struct {
	conn net.Conn
	err  error
}

// Accept implements [net.Listener].
func (l *listener) Accept() (net.Conn, error) {
	select {
	case r := <-l.ready:
		return r.conn, r.err
	case <-l.ctx.Done():
		return nil, fmt.Errorf("spiffetls: accept: %w", net.ErrClosed)
	}
}

// Close implements [net.Listener].
func (l *listener) Close() error {
	l.cancel()
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
		case l.ready <- result{nil, err}: // so that the caller decides how long to wait
		case <-l.ctx.Done():
			return
		}
		if errors.Is(err, net.ErrClosed) { // not by our Close
			l.cancel()
			return
		}
	}
}

func (l *listener) handshake(c net.Conn) {
	defer l.unfinished.Closed(c)
	conn, err := l.e.Server(l.ctx, c)
	if err != nil { // the handshake has recorded it
		return
	}
	select {
	case l.ready <- result{conn, nil}:
	case <-l.ctx.Done():
		_ = conn.NetConn().Close()
	}
}

// Server does the handshake of a server on a connection that the caller has accepted, and returns when the client is
// verified, within HandshakeTimeout. [PeerFromConn] returns the client. Server owns below from now on, and closes it
// on an error.
func (e *Endpoint) Server(ctx context.Context, below net.Conn) (*tls.Conn, error) {
	if err := e.meets(spiffe.ClientRole); err != nil {
		_ = below.Close()
		return nil, fmt.Errorf("spiffetls: server: %w", err)
	}
	raw := &rawConn{Conn: below, e: e}
	raw.tls = tls.Server(raw, e.server())
	ctx, cancel := context.WithTimeout(ctx, e.config.HandshakeTimeout)
	defer cancel()
	if err := raw.tls.HandshakeContext(ctx); err != nil { // configFor has recorded it, if there was a hello
		_ = below.Close()
		return nil, err
	}
	e.govern(raw, spiffe.ClientRole, remote(below), raw.proof)
	return raw.tls, nil
}
