package spiffetls

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/tlsalert"
	"github.com/svidkit/svidkit/spiffe"
)

// DialContext connects to an address, such as "db.example:5432", and returns a [*tls.Conn] whose handshake is done and
// whose server is verified; see [PeerFromConn]. Connecting takes at most 30 seconds, and the handshake at most
// HandshakeTimeout. An address without a policy in Hosts is not dialled. Sessions are not resumed.
func (e *Endpoint) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	if err := e.meets(spiffe.ServerRole); err != nil {
		return nil, fmt.Errorf("spiffetls: dial: %w", err)
	}
	d := dialing{newNetDialer().DialContext, e.clientConfig(), e.config.HandshakeTimeout, 0}
	return e.dial(ctx, d, network, addr)
}

// Client does the handshake of a client on a connection that the caller has made, for example through a proxy or
// with STARTTLS, and returns when the server is verified, within HandshakeTimeout. addr is the dialled address,
// whose port may be missing: its host is sent to the server and verified with WebRoots, and selects the policy in
// Hosts. Client owns below from now on, and closes it on an error.
func (e *Endpoint) Client(ctx context.Context, below net.Conn, addr string) (*tls.Conn, error) {
	err := e.meets(spiffe.ServerRole)
	if err == nil {
		err = e.hosts.known(addr)
	}
	if err != nil {
		_ = below.Close()
		return nil, fmt.Errorf("spiffetls: client: %w", err)
	}
	return e.handshake(ctx, below, dialing{config: e.clientConfig(), timeout: e.config.HandshakeTimeout}, addr)
}

// Transport returns a new HTTP transport, for HTTP/2 and HTTP/1.1. The host in a URL is the address to connect to;
// Allow decides which servers are accepted, or Hosts which servers at that host. The transport uses no proxy, not
// even from the environment, and refuses URLs that are not https, in redirects too, as they would prove no peer. The
// caller may change it before it is used; the VerifyConnection of its TLSClientConfig is called for servers that are
// accepted.
//
// An open connection keeps the identity with which it was made; it is closed after 90 idle seconds.
//
// The transport has a DialTLSContext, which reads the transport's DialContext, TLSClientConfig and
// TLSHandshakeTimeout at each call; a clone continues to use the original's. Without DialTLSContext no server is
// accepted. A client that is refused gets the server's alert.
func (e *Endpoint) Transport() (*http.Transport, error) {
	if err := e.meets(spiffe.ServerRole); err != nil {
		return nil, fmt.Errorf("spiffetls: transport: %w", err)
	}
	c := e.clientConfig()
	c.RootCAs = x509.NewCertPool()                                      // accepts no server without DialTLSContext
	c.VerifyConnection = func(tls.ConnectionState) error { return nil } // for callers that wrap it
	t := &http.Transport{
		TLSClientConfig:       c,
		ForceAttemptHTTP2:     c.NextProtos == nil || slices.Contains(c.NextProtos, "h2"),
		DialContext:           newNetDialer().DialContext,
		TLSHandshakeTimeout:   e.config.HandshakeTimeout,
		MaxIdleConns:          100,
		IdleConnTimeout:       90 * time.Second,
		ExpectContinueTimeout: time.Second,
	}
	t.Proxy = noProxy                         // a clone has it too
	t.RegisterProtocol("http", noPlainHTTP{}) // for callers that set another Proxy
	t.DialTLSContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		dial := t.DialContext
		if dial == nil {
			dial = new(net.Dialer).DialContext // as net/http does
		}
		return e.dial(ctx, dialing{dial, t.TLSClientConfig, t.TLSHandshakeTimeout, 1}, network, addr)
	}
	return t, nil
}

// newNetDialer returns the dialer that connects by default.
func newNetDialer() *net.Dialer { return &net.Dialer{Timeout: 30 * time.Second} }

// dialing is how to make a connection.
type dialing struct {
	dial    func(ctx context.Context, network, addr string) (net.Conn, error)
	config  *tls.Config
	timeout time.Duration // of the handshake; 0 means none
	first   int32         // writes, as package tlsalert counts them
}

func (e *Endpoint) dial(ctx context.Context, d dialing, network, addr string) (net.Conn, error) {
	if err := e.hosts.known(addr); err != nil {
		return nil, fmt.Errorf("spiffetls: dial: %w", err)
	}
	below, err := d.dial(ctx, network, addr)
	if err != nil {
		return nil, err // before any handshake
	}
	conn, err := e.handshake(ctx, below, d, addr)
	if err != nil {
		return nil, err // and not a nil *tls.Conn
	}
	return conn, nil
}

// handshake makes a client connection over below, which it owns.
func (e *Endpoint) handshake(ctx context.Context, below net.Conn, d dialing, addr string) (*tls.Conn, error) {
	raw := &rawConn{Conn: below, e: e, client: true, born: time.Now()}
	hctx, cancel := ctx, context.CancelFunc(func() {})
	if d.timeout > 0 {
		hctx, cancel = context.WithTimeout(ctx, d.timeout)
	}
	defer cancel()
	conn, err := tlsalert.Client(hctx, raw, e.configAt(d.config, addressOf(addr), raw), d.first)
	if err != nil {
		return nil, e.failed(false, addr, err)
	}
	_ = e.ended(false, addr, conn.ConnectionState(), nil)
	e.govern(raw, spiffe.ServerRole, remote(below), raw.proof)
	return conn, nil
}

// configAt returns base for one connection to an address. Its handshake stores the proof in raw.
func (e *Endpoint) configAt(base *tls.Config, at hostport, raw *rawConn) *tls.Config {
	c := base.Clone()
	c.ServerName = cmp.Or(c.ServerName, at.host)
	c.InsecureSkipVerify = true // see ClientConfig
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		cs.ServerName = c.ServerName // crypto/tls leaves out an IP address
		p, err := e.verify(cs, spiffe.ServerRole, at)
		if err == nil && base.VerifyConnection != nil {
			err = base.VerifyConnection(cs)
		}
		raw.proof = p
		return err
	}
	return c
}

var errPlainHTTP = errors.New("spiffetls: refusing to send a request without TLS; use an https URL")

// noProxy is called before a connection is dialled, and before an open HTTP/1.1 connection is used.
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
