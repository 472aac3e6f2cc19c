package spiffetls

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// ConfigureServer makes s serve HTTP/2 and HTTP/1.1 over TLS as [ServerConfig] describes, and makes
// the proof of the client readable from each request with [PeerFromRequest]. Call it once, before s
// serves, then call s.ServeTLS or s.ListenAndServeTLS with empty file names.
//
// It sets s.TLSConfig, and it is an error if s has one: two ideas of who may come in do not mix. It
// wraps s.ConnContext, so a ConnContext of the caller's must be set before. s.Protocols decides which
// versions of HTTP are offered, unless the options name protocols.
func ConfigureServer(s *http.Server, self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.Policy, opts *Options) error {
	e, err := newEndpoint(self, peers, allow, opts)
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
		if !ok {
			return nil, nil // not accepted by s: checked all the same, but there is no request to tell
		}
		c := base.Clone()
		c.NextProtos = e.opts.NextProtos
		if c.NextProtos == nil {
			c.NextProtos = served(s)
		}
		c.VerifyConnection = func(cs tls.ConnectionState) error {
			peer, err := e.verify(cs, spiffe.ClientRole)
			if err != nil {
				return err
			}
			conn.peer.Store(peer) // no request is read unless the handshake succeeds
			return nil
		}
		return c, nil
	}
	s.TLSConfig = base
	inner := s.ConnContext
	s.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		if inner != nil {
			if ctx = inner(ctx, c); ctx == nil {
				return nil // net/http says what is wrong with that
			}
		}
		return context.WithValue(ctx, connKey{}, &connection{})
	}
	return nil
}

// connKey is the key of a *connection in the context of the connection. net/http gives that context
// to the handshake, where the connection learns its peer, and to every request.
type connKey struct{}

type connection struct {
	peer atomic.Pointer[spiffe.Peer] // nil until the handshake is done
}

// served returns the protocols that s negotiates. net/http works them out when it starts to serve,
// for a configuration that GetConfigForClient replaces.
func served(s *http.Server) []string {
	protos := make([]string, 0, 2)
	if _, ok := s.TLSNextProto["h2"]; ok && (s.Protocols == nil || s.Protocols.HTTP2()) {
		protos = append(protos, "h2")
	}
	if s.Protocols == nil || s.Protocols.HTTP1() {
		protos = append(protos, "http/1.1")
	}
	return protos
}

// PeerFromContext returns the proof of the client behind ctx, which comes from a request that was
// received by a server that [ConfigureServer] prepared. For every other context it reports false: it
// never guesses.
func PeerFromContext(ctx context.Context) (*spiffe.Peer, bool) {
	conn, ok := ctx.Value(connKey{}).(*connection)
	if !ok {
		return nil, false
	}
	peer := conn.peer.Load()
	return peer, peer != nil
}

// PeerFromRequest is [PeerFromContext] for a request that a server received.
func PeerFromRequest(r *http.Request) (*spiffe.Peer, bool) { return PeerFromContext(r.Context()) }

// Transport returns a new HTTP transport, for HTTP/2 and HTTP/1.1, that connects as [ClientConfig]
// describes. The host in a URL decides where to connect to; who answers there is decided by allow.
// Proxies are not used, and in particular none from the environment. The transport is the caller's,
// to change before it is used.
//
// Connections that stay open keep the identity that they were made with; they are closed after 90
// idle seconds. A request to an http URL, by a redirect too, is an error: it would prove nobody.
func Transport(self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.Policy, opts *Options) (*http.Transport, error) {
	e, err := newEndpoint(self, peers, allow, opts)
	if err != nil {
		return nil, fmt.Errorf("spiffetls: transport: %w", err)
	}
	c := e.clientConfig()
	t := &http.Transport{
		TLSClientConfig:       c,
		ForceAttemptHTTP2:     c.NextProtos == nil || slices.Contains(c.NextProtos, "h2"),
		DialContext:           (&net.Dialer{Timeout: 30 * time.Second}).DialContext,
		TLSHandshakeTimeout:   10 * time.Second,
		MaxIdleConns:          100,
		IdleConnTimeout:       90 * time.Second,
		ExpectContinueTimeout: time.Second,
	}
	t.RegisterProtocol("http", noPlainHTTP{})
	return t, nil
}

type noPlainHTTP struct{}

func (noPlainHTTP) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		_ = r.Body.Close() // a RoundTripper always closes the body
	}
	return nil, errors.New("spiffetls: refusing to send a request without TLS; use an https URL")
}
