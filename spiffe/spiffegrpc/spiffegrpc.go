// Package spiffegrpc gives servers and clients of grpc-go SPIFFE identities, by package spiffetls. It is a module of
// its own, so that svidkit itself requires no gRPC.
//
// A server needs an identity, the trust bundles of its peers, and a policy:
//
//	config := spiffetls.Config{Self: source, Peers: source, Allow: spiffe.AllowIDs(web)}
//	creds, err := spiffegrpc.ServerCredentials(config)
//	…
//	server := grpc.NewServer(grpc.Creds(creds))
//
// In a handler, [PeerFromContext] returns the proven client. A client needs the same three:
//
//	config := spiffetls.Config{Self: source, Peers: source, Allow: spiffe.AllowIDs(db)}
//	creds, err := spiffegrpc.ClientCredentials(config)
//	…
//	conn, err := grpc.NewClient("dns:///db.example:8443", grpc.WithTransportCredentials(creds))
//
// A client of several services uses the Hosts of its configuration to say which server it expects at which address.
// The address is the authority of the channel: by default the host and port of its target.
//
// The promises of package spiffetls hold here, too: identities, bundles and policies are read at every handshake,
// the default is no, and both sides prove an ID unless a field with a long name says otherwise. The refused side
// gets the status Unavailable without a reason; the side that refuses has it in the Logger and the Metrics of its
// configuration.
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
// With a [spiffetls.Governor] in the configuration, a connection is ended when the proof of the other side no longer
// holds, or when the server's certificate is about to expire. It ends by GOAWAY, as in the graceful shutdown of
// HTTP/2. A server sends that frame, and serves every call that the client began before it reads the frame. The
// credentials of a client pass it to their own side, as if the server had sent it. Either way, the client makes its
// next calls on a new connection, on which both sides prove themselves anew, and closes the old one after the last
// call on it.
//
// No call fails by this, unless it lasts longer than the Grace of the Governor. Then the connection is cut, and the
// call ends with Unavailable, so a program must be able to resume longer streams.
package spiffegrpc

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// ServerCredentials returns the credentials of a server, which work as an Endpoint of package spiffetls with this
// configuration.
//
// A handshake must end within HandshakeTimeout. The protocol is h2, so NextProtos is an error. MaxHandshakes is an
// error too: grpc-go accepts the connections, and bounds handshakes only by their time. To bound connections, pass
// Serve a listener that does.
func ServerCredentials(config spiffetls.Config) (credentials.TransportCredentials, error) {
	if config.MaxHandshakes != 0 {
		return nil, errors.New("spiffegrpc: server credentials: MaxHandshakes has no effect on a server of grpc-go, " +
			"which accepts all connections; HandshakeTimeout has")
	}
	c, err := newCredentials("server", config)
	if err == nil {
		err = c.endpoint.ConfigureServer(new(http.Server)) // whether it can be a server
	}
	if err != nil {
		return nil, fmt.Errorf("spiffegrpc: server credentials: %w", err)
	}
	return &server{c}, nil
}

// ClientCredentials returns the credentials of a client, which work as an Endpoint of package spiffetls with this
// configuration. The authority of the channel selects the policy in Hosts. The protocol is h2, so NextProtos is an
// error.
//
// A call cannot have another authority than its channel (grpc.CallAuthority), because the server was verified for
// the channel's.
func ClientCredentials(config spiffetls.Config) (credentials.TransportCredentials, error) {
	c, err := newCredentials("client", config)
	if err == nil {
		_, err = c.endpoint.Transport() // whether it can be a client
	}
	if err != nil {
		return nil, fmt.Errorf("spiffegrpc: client credentials: %w", err)
	}
	return &client{c}, nil
}

func newCredentials(side string, config spiffetls.Config) (credentialsOf, error) {
	if config.NextProtos != nil {
		return credentialsOf{}, errors.New("NextProtos must be nil: gRPC is spoken over h2 alone")
	}
	config.NextProtos = []string{h2}
	e, err := spiffetls.New(config)
	return credentialsOf{side, e, config.Governor != nil}, err
}

const h2 = "h2"

// AuthInfo is the proof of a connection with these credentials. Handlers find it in the [peer.Peer] of their
// context, and clients in the peer that grpc.Peer returns.
type AuthInfo struct {
	credentials.CommonAuthInfo // PrivacyAndIntegrity

	// Peer is the proven other side, as it was at the handshake. It is nil if the other side proved no ID, which the
	// credentials must permit: see AllowAnonymousClients and WebRoots in [spiffetls.Config].
	Peer *spiffe.Peer

	State tls.ConnectionState

	conn *tls.Conn // on a server; nil on a client
}

// AuthType implements [credentials.AuthInfo].
func (AuthInfo) AuthType() string { return "tls" }

// GetSecurityValue implements [credentials.ChannelzSecurityInfo].
func (i AuthInfo) GetSecurityValue() credentials.ChannelzSecurityValue {
	return credentials.TLSInfo{State: i.State}.GetSecurityValue()
}

// PeerFromContext returns the proven other side of the call that ctx belongs to: the client in a handler of a server
// with [ServerCredentials], and the server in the context of a client's stream with [ClientCredentials]. For every
// other context, and if the other side proved no ID, it reports false.
func PeerFromContext(ctx context.Context) (*spiffe.Peer, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, false
	}
	info, ok := p.AuthInfo.(AuthInfo)
	return info.Peer, ok && info.Peer != nil
}

// credentialsOf is the common part of the credentials of both sides. They never change.
type credentialsOf struct {
	side     string
	endpoint *spiffetls.Endpoint
	governed bool // by a Governor
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

type client struct{ credentialsOf }

// Clone implements [credentials.TransportCredentials].
func (c *client) Clone() credentials.TransportCredentials { return c }

// ServerHandshake implements [credentials.TransportCredentials].
func (c *client) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return c.wrongSide()
}

// ClientHandshake implements [credentials.TransportCredentials].
func (c *client) ClientHandshake(
	ctx context.Context, authority string, below net.Conn,
) (net.Conn, credentials.AuthInfo, error) {
	var told *drained
	if c.governed {
		told = newDrained(below)
		below = told
	}
	conn, err := c.endpoint.Client(ctx, below, authority)
	if err != nil {
		return nil, nil, err
	}
	info, err := infoOf(conn)
	if err != nil {
		_ = conn.Close()
		return nil, nil, err
	}
	if told == nil {
		return conn, info, nil
	}
	return newClientConn(conn, told), info, nil
}

type server struct{ credentialsOf }

// Clone implements [credentials.TransportCredentials].
func (s *server) Clone() credentials.TransportCredentials { return s }

// ClientHandshake implements [credentials.TransportCredentials].
func (s *server) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return s.wrongSide()
}

// ServerHandshake implements [credentials.TransportCredentials].
func (s *server) ServerHandshake(below net.Conn) (net.Conn, credentials.AuthInfo, error) {
	var told *drained
	if s.governed {
		told = newDrained(below)
		below = told
	}
	conn, err := s.endpoint.Server(context.Background(), below)
	if err != nil {
		return nil, nil, fmt.Errorf("spiffegrpc: handshake: %w", err)
	}
	info, err := infoOf(conn)
	if err != nil {
		_ = conn.NetConn().Close() // the Governor may know it
		return nil, nil, err
	}
	info.conn = conn
	if told == nil {
		return conn, info, nil
	}
	return newServerConn(conn, told), info, nil
}

// infoOf returns the AuthInfo of a connection. Without h2 it fails: crypto/tls also accepts clients that offer no
// protocol, or http/1.1.
func infoOf(conn *tls.Conn) (AuthInfo, error) {
	state := conn.ConnectionState()
	if state.NegotiatedProtocol != h2 {
		return AuthInfo{}, errNotHTTP2
	}
	peer, _ := spiffetls.PeerFromConn(conn) // an error means that the other side has proved no ID
	common := credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}
	return AuthInfo{CommonAuthInfo: common, Peer: peer, State: state}, nil
}

var errNotHTTP2 = errors.New("spiffegrpc: the other side did not negotiate h2 (ALPN), so it does not speak gRPC")
