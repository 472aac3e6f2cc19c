package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/peerkey"
)

// stream is an inbound connection after TLS, if it had any.
type stream struct {
	net.Conn
	client string // its verified identity, or ""
}

// CloseWrite ends the writing side.
func (s *stream) CloseWrite() error { return closeWrite(s.Conn) }

// accept handles an inbound connection.
func (p *proxy) accept(ctx context.Context, c net.Conn, ready *queue) {
	_ = c.SetReadDeadline(time.Now().Add(detectTime))
	// Shutdown does not wait for first bytes.
	defer context.AfterFunc(ready.ctx, func() { _ = c.SetReadDeadline(time.Now()) })()
	first := make([]byte, 1)
	n, err := c.Read(first)
	silent := errors.Is(err, os.ErrDeadlineExceeded) && ready.ctx.Err() == nil
	if err != nil && !silent {
		_ = c.Close()
		return
	}
	seen := &replayed{Conn: c, before: first[:n]}
	if n == 0 || first[0] != recordHandshake {
		p.plain(ctx, seen, ready)
		return
	}
	name, all, ok := serverName(seen)
	if !ok && ready.ctx.Err() != nil {
		_ = c.Close()
		return
	}
	seen = &replayed{Conn: c, before: all}
	if !ok || p.cfg.identity == nil || !strings.EqualFold(name, p.cfg.name) {
		p.passThrough(ctx, seen)
		return
	}
	s, err := p.terminate(ready.ctx, seen)
	if err != nil {
		p.refuse(c, "the TLS handshake has failed", err)
		return
	}
	p.inbound["tls"].Inc()
	p.hand(ctx, s, ready)
}

// recordHandshake is the first byte of a TLS connection.
const recordHandshake = 22

// plain handles a connection without TLS.
func (p *proxy) plain(ctx context.Context, c *replayed, ready *queue) {
	if p.cfg.requireTLS || p.cfg.requireIdentity {
		p.refuse(c, "it is without TLS", nil)
		return
	}
	_ = c.SetReadDeadline(time.Time{})
	p.inbound["plaintext"].Inc()
	p.hand(ctx, &stream{Conn: c}, ready)
}

// passThrough handles a connection whose TLS is not for this proxy.
func (p *proxy) passThrough(ctx context.Context, c *replayed) {
	if p.cfg.requireTLS || p.cfg.requireIdentity || p.cfg.clientID {
		p.refuse(c, "its TLS is not for the name of the proxy", nil)
		return
	}
	_ = c.SetReadDeadline(time.Time{})
	p.inbound["passthrough"].Inc()
	p.tunnel(ctx, c)
}

// terminate does the handshake of a connection.
func (p *proxy) terminate(ctx context.Context, c net.Conn) (*stream, error) {
	if _, err := p.cfg.identity.Credential(); err != nil { // before decoding anything
		return nil, err
	}
	tc := tls.Server(c, p.cfg.identity.ServerConfig())
	_ = tc.SetDeadline(time.Now().Add(detectTime))
	if err := tc.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	_ = tc.SetDeadline(time.Time{})
	client, ok := linkerdproxy.PeerName(tc.ConnectionState())
	if !ok && p.cfg.requireIdentity {
		_ = tc.Close()
		return nil, errors.New("the client has no identity, and one is required")
	}
	return &stream{Conn: tc, client: client}, nil
}

// hand passes a connection to net/http, or forwards it as it is.
func (p *proxy) hand(ctx context.Context, s *stream, ready *queue) {
	if p.cfg.opaque {
		p.tunnel(ctx, s)
		return
	}
	ready.put(s)
}

func (p *proxy) refuse(c net.Conn, reason string, err error) {
	p.inbound["refused"].Inc()
	at, _ := peerkey.Address(c)
	p.log.LogOf(slog.LevelWarn, at.String(), "inbound connection refused", reason,
		slog.String("peer", c.RemoteAddr().String()), slog.Any("err", err))
	_ = c.Close()
}

// tunnel copies bytes both ways between c and the application, until both sides are done or ctx is.
func (p *proxy) tunnel(ctx context.Context, c net.Conn) {
	defer c.Close()
	release, err := within(c)
	if err != nil {
		p.refuse(c, err.Error(), nil)
		return
	}
	defer release()
	app, err := (&net.Dialer{Timeout: dialTime, Control: p.elsewhere}).DialContext(ctx, "tcp", p.cfg.application)
	if err != nil {
		p.failed["inbound"].Inc()
		p.log.Warn("connection not forwarded", "the application does not answer", slog.Any("err", err))
		return
	}
	relay(ctx, c, app)
}

// relay copies bytes both ways until both sides are done, or nothing has come for an hour, or ctx is done. It closes
// both connections.
func relay(ctx context.Context, c, app net.Conn) {
	end := func() {
		_ = c.Close()
		_ = app.Close()
	}
	defer end()
	defer context.AfterFunc(ctx, end)()
	idle := time.AfterFunc(tunnelTime, end)
	defer idle.Stop()
	var wg sync.WaitGroup
	wg.Go(func() { pour(app, c, idle) })
	wg.Go(func() { pour(c, app, idle) })
	wg.Wait()
}

// pour copies from one connection to the other, and passes the end on. A failure ends both directions. Each read
// restarts the timer idle.
func pour(to, from net.Conn, idle *time.Timer) {
	if _, err := io.Copy(to, heard{from, idle}); err != nil || closeWrite(to) != nil {
		_ = to.Close()
		_ = from.Close()
	}
}

// heard is a reader that reports each read.
type heard struct {
	io.Reader
	idle *time.Timer
}

func (h heard) Read(p []byte) (int, error) {
	n, err := h.Reader.Read(p)
	if n > 0 {
		h.idle.Reset(tunnelTime)
	}
	return n, err
}

// switched is the connection to a server that has switched protocols. It ends like a tunnel.
type switched struct {
	io.ReadWriteCloser
	idle *time.Timer
}

func (s *switched) Read(p []byte) (int, error) { return heard{s.ReadWriteCloser, s.idle}.Read(p) }

func (s *switched) Write(p []byte) (int, error) {
	s.idle.Reset(tunnelTime)
	return s.ReadWriteCloser.Write(p)
}

// Close closes the connection.
func (s *switched) Close() error {
	s.idle.Stop()
	return s.ReadWriteCloser.Close()
}

// CloseWrite ends the writing side.
func (s *switched) CloseWrite() error { return closeWrite(s.ReadWriteCloser) }

// replayed is a connection with some bytes already read.
type replayed struct {
	net.Conn
	before []byte
}

func (r *replayed) Read(p []byte) (int, error) {
	if len(r.before) > 0 {
		n := copy(p, r.before)
		r.before = r.before[n:]
		return n, nil
	}
	return r.Conn.Read(p)
}

// CloseWrite ends the writing side.
func (r *replayed) CloseWrite() error { return closeWrite(r.Conn) }

// serverName parses a ClientHello with crypto/tls. It returns the server name and all bytes read; ok is false if
// there was no ClientHello.
func serverName(c net.Conn) (name string, all []byte, ok bool) {
	r := &recorder{Conn: c}
	_ = tls.Server(r, &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			name, ok = hello.ServerName, true
			return nil, errSeen
		},
	}).Handshake()
	return name, r.read.Bytes(), ok
}

var errSeen = errors.New("the server name is known")

// recorder records reads, and discards writes.
type recorder struct {
	net.Conn
	read bytes.Buffer
}

func (r *recorder) Read(p []byte) (int, error) {
	n, err := r.Conn.Read(p)
	r.read.Write(p[:n])
	return n, err
}

func (r *recorder) Write(p []byte) (int, error) { return len(p), nil }
