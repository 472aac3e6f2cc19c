package tlsalert

import (
	"cmp"
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"time"
)

const handshake = 10 * time.Second

// NewTransport returns a transport that calls newConfig for the configuration of each new connection. A nil newConfig
// is for a URL without TLS, or trusts the roots of the host. With priorKnowledge, connections begin with HTTP/2 and
// have no ALPN, as gRPC needs it. dial opens the connections; nil means a [net.Dialer]'s.
func NewTransport(newConfig func(context.Context) (*tls.Config, error), priorKnowledge bool,
	dial func(ctx context.Context, network, addr string) (net.Conn, error)) *http.Transport {
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}
	t := &http.Transport{
		Proxy:                  http.ProxyFromEnvironment,
		DialContext:            dial,
		Protocols:              new(http.Protocols),
		TLSClientConfig:        &tls.Config{MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:    handshake,
		MaxResponseHeaderBytes: 64 << 10,
		IdleConnTimeout:        90 * time.Second,
		HTTP2:                  &http.HTTP2Config{SendPingTimeout: 30 * time.Second, PingTimeout: 10 * time.Second},
	}
	t.Protocols.SetHTTP1(!priorKnowledge)
	t.Protocols.SetHTTP2(!priorKnowledge)
	t.Protocols.SetUnencryptedHTTP2(priorKnowledge)
	if newConfig != nil {
		t.Proxy = nil
	}
	t.DialTLSContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, handshake)
		defer cancel()
		config, err := t.TLSClientConfig.Clone(), error(nil)
		if newConfig != nil {
			if config, err = newConfig(ctx); err != nil {
				return nil, err
			}
		}
		config.NextProtos = nil
		if t.Protocols.HTTP2() {
			config.NextProtos = append(config.NextProtos, "h2")
		}
		if t.Protocols.HTTP1() {
			config.NextProtos = append(config.NextProtos, "http/1.1")
		}
		return dialTLS(ctx, dial, network, addr, config, priorKnowledge)
	}
	return t
}

// dialTLS opens a connection for a transport. If config has no ServerName, it sets addr's host.
func dialTLS(
	ctx context.Context, dial func(ctx context.Context, network, addr string) (net.Conn, error),
	network, addr string, config *tls.Config, priorKnowledge bool,
) (net.Conn, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	config.ServerName = cmp.Or(config.ServerName, host)
	raw, err := dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	first := int32(1)
	if priorKnowledge {
		first = 2
	}
	c, err := Client(ctx, raw, config, first)
	switch {
	case err != nil:
		return nil, err
	case priorKnowledge: // net/http asks only a *tls.Conn for its protocol, and begins with HTTP/2 otherwise
		return struct{ net.Conn }{c}, nil
	}
	return c, nil
}
