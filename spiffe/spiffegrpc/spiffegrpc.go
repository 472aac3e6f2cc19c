// Package spiffegrpc gives servers and clients of grpc-go SPIFFE identities, by package spiffetls. It is a module of
// its own, so that svidkit itself requires no gRPC.
//
// A server needs an identity, the trust bundles of its peers, and a policy:
//
//	creds, err := spiffegrpc.ServerCredentials(self, bundles, spiffe.AllowIDs(web), nil)
//	…
//	server := grpc.NewServer(grpc.Creds(creds))
//
// In a handler, [PeerFromContext] returns the proven client. A client needs the same three:
//
//	creds, err := spiffegrpc.ClientCredentials(self, bundles, spiffe.AllowIDs(db), nil)
//	…
//	conn, err := grpc.NewClient("dns:///db.example:8443", grpc.WithTransportCredentials(creds))
//
// A client that calls several services says with [spiffetls.Hosts] which of them it expects where. The address is the
// authority of the channel: by default the host and port of its target.
//
// What package spiffetls promises holds here, too: identities, bundles and policies are read at every handshake, the
// default is no, and both sides prove an ID unless an argument with a long name says otherwise. The refused side gets
// the status Unavailable without a reason; the side that refuses has it in the Logger or the FailureLog of its options.
//
// # Calls
//
// The policy of the credentials decides about connections. Interceptors decide about calls, by the client
// ([RequirePeer]) or by a token ([RequireCaller]):
//
//	unary, stream, err := spiffegrpc.RequirePeer(spiffegrpc.Methods{
//		"/billing.Invoices/":       spiffe.AllowIDs(web, ops), // all methods of the service
//		"/billing.Invoices/Delete": spiffe.AllowIDs(ops),
//	})
//	…
//	server := grpc.NewServer(grpc.Creds(creds),
//		grpc.ChainUnaryInterceptor(unary), grpc.ChainStreamInterceptor(stream))
//
// Clients send tokens by [TokenCredentials]. [Health] answers health checks.
//
// # Open connections
//
// With a [spiffetls.Governor] in the options, a connection is ended when the proof of the other side no longer holds, or
// the certificate that the server has presented is about to expire. It ends by GOAWAY, as in the graceful shutdown of
// HTTP/2. A server sends that frame, and serves every call that the client has begun before it reads it. The credentials
// of a client hand it to their own side, as if the server had sent it. Either way, the client makes its next calls on a
// new connection, for which both sides prove themselves anew, and closes the old one with the last call on it.
//
// No call fails by this, unless it lasts longer than the Grace of the Governor. Then the connection is cut, and the call
// ends with Unavailable, so that a program must be able to resume a stream that lasts longer.
package spiffegrpc

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// ServerCredentials returns the credentials of a server that presents the identity of self and verifies its clients, as
// [spiffetls.ServerConfig] does. The options may be nil.
//
// A handshake must end within HandshakeTimeout. A Governor needs no listener of its own. NextProtos, which is h2, is an
// error. So is MaxHandshakes: grpc-go accepts the connections and bounds the handshakes by their time alone; a listener
// that bounds connections can be passed to Serve.
func ServerCredentials(self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *spiffetls.Options) (credentials.TransportCredentials, error) {
	o, err := optionsOf(opts)
	if err == nil && o.MaxHandshakes != 0 {
		err = errors.New("MaxHandshakes has no effect on a server of grpc-go, which accepts all connections; HandshakeTimeout has")
	}
	var config *tls.Config
	if err == nil {
		config, err = spiffetls.ServerConfig(self, peers, allow, o)
	}
	if err != nil {
		return nil, fmt.Errorf("spiffegrpc: server credentials: %w", err)
	}
	return &server{credentialsOf{"server", o.Governor}, &http.Server{TLSConfig: config}, cmp.Or(o.HandshakeTimeout, handshakeTime)}, nil
}

const handshakeTime = 10 * time.Second // as in package spiffetls

// ClientCredentials returns the credentials of a client that presents the identity of self and verifies its servers, as
// a [spiffetls.Dialer] does: [spiffetls.Hosts] finds the policy by the authority of the channel, and a Governor ends
// its connections. The options may be nil; NextProtos, which is h2, is an error.
//
// A call cannot have another authority than its channel (grpc.CallAuthority), as the server was verified for that one.
func ClientCredentials(self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *spiffetls.Options) (credentials.TransportCredentials, error) {
	o, err := optionsOf(opts)
	var dialer *spiffetls.Dialer
	if err == nil {
		dialer, err = spiffetls.NewDialer(self, peers, allow, o)
	}
	if err != nil {
		return nil, fmt.Errorf("spiffegrpc: client credentials: %w", err)
	}
	return &client{credentialsOf{"client", o.Governor}, dialer}, nil
}

// optionsOf returns the options for package spiffetls.
func optionsOf(opts *spiffetls.Options) (*spiffetls.Options, error) {
	o := *cmp.Or(opts, &spiffetls.Options{})
	if o.NextProtos != nil {
		return nil, errors.New("NextProtos must be nil: gRPC is spoken over h2 alone")
	}
	o.NextProtos = []string{h2}
	return &o, nil
}

const h2 = "h2"

// AuthInfo is what a connection with these credentials has proved. Handlers find it in the [peer.Peer] of their
// context, and clients in that of grpc.Peer.
type AuthInfo struct {
	credentials.CommonAuthInfo // PrivacyAndIntegrity

	// Peer is the proven other side, as it was at the handshake. It is nil if the other side proved no ID, which the
	// credentials must permit: see AllowAnonymousClients in [spiffetls.Options], and [spiffetls.WebRoots].
	Peer *spiffe.Peer

	State tls.ConnectionState

	server *http.Server // has the configuration of the server; nil on a client
}

// AuthType implements [credentials.AuthInfo].
func (AuthInfo) AuthType() string { return "tls" }

// GetSecurityValue implements [credentials.ChannelzSecurityInfo].
func (i AuthInfo) GetSecurityValue() credentials.ChannelzSecurityValue {
	return credentials.TLSInfo{State: i.State}.GetSecurityValue()
}

// PeerFromContext returns the proven other side of the call that ctx belongs to: the client in a handler of a server
// with [ServerCredentials], and the server in the context of a stream of a client with [ClientCredentials]. For every
// other context, and if the other side proved no ID, it reports false.
func PeerFromContext(ctx context.Context) (*spiffe.Peer, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, false
	}
	info, ok := p.AuthInfo.(AuthInfo)
	return info.Peer, ok && info.Peer != nil
}

// credentialsOf is what the credentials of both sides share. They never change.
type credentialsOf struct {
	side     string
	governor *spiffetls.Governor // nil for none
}

// Info implements [credentials.TransportCredentials].
func (credentialsOf) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

// OverrideServerName implements [credentials.TransportCredentials].
func (credentialsOf) OverrideServerName(string) error {
	return errors.New("spiffegrpc: the credentials have no server name to override; use grpc.WithAuthority")
}

// String names the side, and no more: the credentials hold the keys of session tickets.
func (c credentialsOf) String() string { return "spiffegrpc: credentials of a " + c.side }

// GoString returns the same as String.
func (c credentialsOf) GoString() string { return c.String() }

// LogValue implements [slog.LogValuer] with String.
func (c credentialsOf) LogValue() slog.Value { return slog.StringValue(c.String()) }

func (c credentialsOf) wrongSide() (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, fmt.Errorf("spiffegrpc: these are the credentials of a %s; the other side has its own", c.side)
}

type client struct {
	credentialsOf
	dialer *spiffetls.Dialer
}

// Clone implements [credentials.TransportCredentials].
func (c *client) Clone() credentials.TransportCredentials { return c }

// ServerHandshake implements [credentials.TransportCredentials].
func (c *client) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return c.wrongSide()
}

// ClientHandshake implements [credentials.TransportCredentials].
func (c *client) ClientHandshake(ctx context.Context, authority string, below net.Conn) (net.Conn, credentials.AuthInfo, error) {
	var told *drained
	if c.governor != nil {
		told = newDrained(below)
		below = told
	}
	conn, err := c.dialer.Handshake(ctx, below, authority)
	if err != nil {
		return nil, nil, err
	}
	info, err := infoOf(conn)
	if err != nil {
		_ = conn.Close()
		return nil, nil, err
	}
	info.Peer, _ = spiffetls.PeerFromConn(conn) // an error says that the other side has proved no ID
	if told == nil {
		return conn, info, nil
	}
	return newClientConn(conn, told), info, nil
}

type server struct {
	credentialsOf
	http    *http.Server // never serves: it has the configuration
	timeout time.Duration
}

// Clone implements [credentials.TransportCredentials].
func (s *server) Clone() credentials.TransportCredentials { return s }

// ClientHandshake implements [credentials.TransportCredentials].
func (s *server) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return s.wrongSide()
}

// ServerHandshake implements [credentials.TransportCredentials].
func (s *server) ServerHandshake(below net.Conn) (net.Conn, credentials.AuthInfo, error) {
	var told *drained
	if s.governor != nil {
		told = newDrained(below)
		below, _ = s.governor.Listener(accepted{conn: told}).Accept()
	}
	conn, info, err := s.handshake(below)
	if err != nil {
		_ = below.Close() // which the Governor may know
		return nil, nil, err
	}
	if told == nil {
		return conn, info, nil
	}
	return newServerConn(conn, told), info, nil
}

func (s *server) handshake(below net.Conn) (*tls.Conn, AuthInfo, error) {
	conn := tls.Server(below, s.http.TLSConfig)
	ctx, cancel := context.WithTimeout(context.Background(), s.timeout)
	defer cancel()
	if err := conn.HandshakeContext(ctx); err != nil {
		return nil, AuthInfo{}, fmt.Errorf("spiffegrpc: handshake: %w", err)
	}
	info, err := infoOf(conn)
	if err != nil {
		return nil, AuthInfo{}, err
	}
	info.server = s.http
	if info.Peer, err = spiffetls.PeerFromState(s.http.TLSConfig, info.State); err != nil && len(info.State.PeerCertificates) > 0 {
		return nil, AuthInfo{}, err // the proof has ended since
	}
	return conn, info, nil
}

// infoOf returns what is known of a connection without the peer. Without h2 it is an error: package tls lets clients
// connect that offer no protocol, or http/1.1.
func infoOf(conn *tls.Conn) (AuthInfo, error) {
	state := conn.ConnectionState()
	if state.NegotiatedProtocol != h2 {
		return AuthInfo{}, errNotHTTP2
	}
	return AuthInfo{CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, State: state}, nil
}

var errNotHTTP2 = errors.New("spiffegrpc: the other side did not negotiate h2 (ALPN), so it does not speak gRPC")

// accepted is a listener that accepts one connection.
type accepted struct {
	net.Listener
	conn net.Conn
}

// Accept implements [net.Listener].
func (a accepted) Accept() (net.Conn, error) { return a.conn, nil }
