package spiffetls

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/tlsalert"
	"github.com/svidkit/svidkit/spiffe"
)

// ConfigureServer makes s serve HTTP/2 and HTTP/1.1 over TLS as [ServerConfig] describes, and makes the proven client
// of each request available through [PeerFromContext]. Call it once, before s serves, then call s.ServeTLS or
// s.ListenAndServeTLS with empty file names.
//
// It sets s.TLSConfig, and it is an error if s has one. It wraps s.ConnContext, so set your own ConnContext before;
// with a Governor or Metrics also s.ConnState, and with a Governor s.Handler. s.Protocols decides which versions of
// HTTP are offered, unless the options name protocols.
//
// If s.ErrorLog is nil, it is set, so that clients cannot fill the log: the lines of net/http about failed handshakes
// go, at most once a minute, to the Logger in the options at Debug, as that gets the reason at Warn already, or without
// a Logger to [slog.Default] at Warn. Other lines go to the standard logger.
func ConfigureServer(s *http.Server, self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *Options) error {
	e, err := newEndpoint(true, self, peers, allow, opts)
	switch {
	case err != nil:
		return fmt.Errorf("spiffetls: configure server: %w", err)
	case s == nil:
		return errors.New("spiffetls: configure server: no server")
	case s.TLSConfig != nil:
		return errors.New("spiffetls: configure server: the server has a TLSConfig; leave it nil and use the options")
	}
	base := e.serverConfig()
	if base.NextProtos == nil {
		base.NextProtos = []string{"h2", "http/1.1"}
	}
	base.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		conn, ok := hello.Context().Value(connKey{}).(*connection)
		if ok {
			conn.e.opts.Metrics.heard(conn.tls.Value())
		}
		switch {
		case ok && conn.e == e: // else it was accepted by a server with another configuration
		case e.opts.Governor != nil:
			return nil, e.failed(true, remote(hello.Conn), errForeign)
		default: // not accepted by s: checked too, but without a request
			if e.web == nil && e.opts.Metrics == nil {
				return nil, nil
			}
			conn = &connection{e: e}
		}
		c := e.configFor(base, hello, conn.finished, func(p proof, cs tls.ConnectionState) {
			conn.peer.Store(p.peer) // requests are read only after a successful handshake
			conn.govern(p, cs)
		})
		c.NextProtos = e.opts.NextProtos
		if c.NextProtos == nil {
			c.NextProtos = protocols(s)
		}
		return c, nil
	}
	s.TLSConfig = base
	if s.ErrorLog == nil && e.log != nil {
		s.ErrorLog = ratelog.ErrorLog(e.log, slog.LevelDebug)
	} else if s.ErrorLog == nil {
		s.ErrorLog = ratelog.ErrorLog(ratelog.New(slog.Default(), 0), slog.LevelWarn)
	}
	e.hook(s)
	return nil
}

// hook wraps the hooks of s that tell of connections, for requests and the Governor.
func (e *endpoint) hook(s *http.Server) {
	inner, state := s.ConnContext, s.ConnState
	s.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		if inner != nil {
			if ctx = inner(ctx, c); ctx == nil {
				return nil // net/http reports that
			}
		}
		conn := &connection{e: e}
		if tc, ok := c.(*tls.Conn); ok {
			conn.tls = weak.Make(tc)
		}
		return context.WithValue(ctx, connKey{}, conn)
	}
	g, m := e.opts.Governor, e.opts.Metrics
	if g == nil && m == nil {
		return
	}
	s.ConnState = func(c net.Conn, to http.ConnState) {
		g.connState(c, to)
		m.connState(c, to)
		if state != nil {
			state(c, to)
		}
	}
	if g != nil {
		s.Handler = leaving{s.Handler}
	}
}

var errForeign = errors.New("the connection was not accepted by the configured server, so the Governor cannot end it")

// connKey is the key of a *connection in the context of a connection. net/http passes that context to the handshake,
// which stores the peer, and to every request.
type connKey struct{}

type connection struct {
	e     *endpoint
	tls   weak.Pointer[tls.Conn]
	peer  atomic.Pointer[spiffe.Peer] // nil until the handshake is done, and for a client without a certificate
	entry atomic.Pointer[governed]    // nil without a Governor
}

func (c *connection) finished() bool {
	tc := c.tls.Value()
	return tc == nil || tc.ConnectionState().HandshakeComplete
}

// govern puts the connection under the Governor, if there is one.
func (c *connection) govern(p proof, cs tls.ConnectionState) {
	g, tc := c.e.opts.Governor, c.tls.Value()
	if g == nil || tc == nil {
		return
	}
	link := &served{conn: c.tls, addr: remote(tc), h2: cs.NegotiatedProtocol == "h2", born: time.Now()}
	link.active.Store(true) // until net/http says otherwise
	entry := c.e.govern(link, spiffe.ClientRole, p, cs)
	c.entry.Store(entry)
	g.hooked.Store(c.tls, entry)
	g.add(entry)
}

// leaving tells the clients of draining connections to connect anew.
type leaving struct{ http.Handler }

// ServeHTTP implements [http.Handler].
func (h leaving) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if conn, ok := r.Context().Value(connKey{}).(*connection); ok {
		if entry := conn.entry.Load(); entry != nil && entry.leave.Load() {
			w.Header().Set("Connection", "close") // in HTTP/2 this sends GOAWAY
		}
	}
	if h.Handler == nil {
		http.DefaultServeMux.ServeHTTP(w, r)
		return
	}
	h.Handler.ServeHTTP(w, r)
}

// protocols returns the protocols that s negotiates. net/http sets them when it starts to serve, in a
// configuration that GetConfigForClient replaces.
func protocols(s *http.Server) []string {
	protos := make([]string, 0, 2)
	if _, ok := s.TLSNextProto["h2"]; ok && (s.Protocols == nil || s.Protocols.HTTP2()) {
		protos = append(protos, "h2")
	}
	if s.Protocols == nil || s.Protocols.HTTP1() {
		protos = append(protos, "http/1.1")
	}
	return protos
}

// Transport returns a new HTTP transport, for HTTP/2 and HTTP/1.1, that connects as [ClientConfig] describes. The host
// in a URL is where to connect; allow decides which servers are accepted, or with [Hosts] which of them at that host.
// The transport uses no proxy, not even from the environment, and refuses URLs that are not https, in redirects too, as
// they would prove no peer. The caller may change it before it is used.
//
// An open connection keeps the identity with which it was made; it is closed after 90 idle seconds.
//
// The transport has a DialTLSContext, which uses the DialContext, TLSClientConfig and TLSHandshakeTimeout that the transport
// has then; a clone continues to use those of the original. A client that is refused gets the server's alert.
func Transport(self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *Options) (*http.Transport, error) {
	e, err := newEndpoint(false, self, peers, allow, opts)
	if err != nil {
		return nil, fmt.Errorf("spiffetls: transport: %w", err)
	}
	c := e.clientConfig()
	t := &http.Transport{
		TLSClientConfig:       c,
		ForceAttemptHTTP2:     c.NextProtos == nil || slices.Contains(c.NextProtos, "h2"),
		DialContext:           newNetDialer().DialContext,
		TLSHandshakeTimeout:   e.opts.HandshakeTimeout,
		MaxIdleConns:          100,
		IdleConnTimeout:       90 * time.Second,
		ExpectContinueTimeout: time.Second,
	}
	t.Proxy = noProxy                         // a clone has it too
	t.RegisterProtocol("http", noPlainHTTP{}) // for callers that set another Proxy
	t.DialTLSContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		return e.dial(ctx, t, network, addr)
	}
	return t, nil
}

// dial makes a connection of t that the Governor knows, and whose server is the one that was dialled.
func (e *endpoint) dial(ctx context.Context, t *http.Transport, network, addr string) (net.Conn, error) {
	if e.hosts != nil {
		if _, err := e.policyAt(addressOf(addr)); err != nil {
			return nil, fmt.Errorf("spiffetls: dial: %w", err)
		}
	}
	dial := t.DialContext
	if dial == nil {
		dial = new(net.Dialer).DialContext // as net/http does
	}
	below, err := dial(ctx, network, addr)
	if err != nil {
		return nil, err // before any handshake
	}
	conn, err := e.handshake(ctx, below, t.TLSClientConfig, addr, t.TLSHandshakeTimeout, 1)
	if err != nil {
		return nil, err // and not a nil *tls.Conn
	}
	return conn, nil
}

// handshake makes a client connection over below, which it owns. A timeout of 0 is none; the first writes are those of package
// tlsalert.
func (e *endpoint) handshake(ctx context.Context, below net.Conn, base *tls.Config, addr string, timeout time.Duration, first int32) (*tls.Conn, error) {
	g := e.opts.Governor
	raw := &rawConn{Conn: below, governor: g, client: true, born: time.Now()}
	c, at := base.Clone(), addressOf(addr)
	if c.ServerName == "" {
		c.ServerName = at.host // net/http made it
	}
	if c.ClientSessionCache != nil {
		c.ClientSessionCache = sessionsAt{c.ClientSessionCache, at.String()}
	}
	q := &question{addr: at}
	var resumed bool
	if verify := c.VerifyConnection; verify != nil {
		c.VerifyConnection = func(cs tls.ConnectionState) error {
			resumed = cs.DidResume
			cs.ServerName = c.ServerName // crypto/tls leaves out an IP address
			return verify(q.in(cs))
		}
	}
	hctx := ctx
	if timeout > 0 {
		var cancel context.CancelFunc
		hctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	conn, err := tlsalert.Client(hctx, raw, c, first)
	if err != nil {
		if ctx.Err() == nil {
			_ = e.failed(false, addr, err)
		} else { // the caller gave up
			e.opts.Metrics.failed(false, causeOf("tls", ctx.Err()))
		}
		return nil, err
	}
	if q.e == e {
		raw.peer.Store(q.proof.peer)
	}
	if g != nil {
		cs := conn.ConnectionState()
		cs.ServerName = c.ServerName
		p, err := e.verify((&question{addr: at}).in(cs), spiffe.ServerRole) // remembered from the handshake
		if err != nil {
			_ = raw.Close()
			return nil, e.failed(false, addr, err)
		}
		raw.governedBy(e.govern(raw, spiffe.ServerRole, p, cs))
	}
	e.opts.Metrics.good(false, resumed)
	if p := raw.peer.Load(); e.hosts != nil && p != nil {
		var once sync.Once
		holds := e.holds(at, p.ID())
		raw.holds = func() error {
			err := holds()
			if err == nil {
				return nil
			}
			once.Do(func() {
				if e.notes() {
					e.note(failureOf(false, addr, err), err) // the handshake was good
				}
			})
			return fmt.Errorf("spiffetls: nothing is sent: %w", err)
		}
	}
	return conn, nil
}

// newNetDialer returns what connects by default.
func newNetDialer() *net.Dialer { return &net.Dialer{Timeout: 30 * time.Second} }

var errPlainHTTP = errors.New("spiffetls: refusing to send a request without TLS; use an https URL")

// noProxy is called before a connection is dialled, or an open one of HTTP/1.1 used.
func noProxy(r *http.Request) (*url.URL, error) {
	if r.URL.Scheme != "https" {
		return nil, errPlainHTTP
	}
	return nil, nil
}

type noPlainHTTP struct{}

func (noPlainHTTP) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		_ = r.Body.Close() // a RoundTripper always closes the body
	}
	return nil, errPlainHTTP
}
