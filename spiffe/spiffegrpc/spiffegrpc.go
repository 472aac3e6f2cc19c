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
// The policy of the credentials decides about connections. An [Interceptor] decides about calls, by the client
// ([RequirePeer]) or by a token ([RequireCaller]):
//
//	guard, err := spiffegrpc.RequirePeer(spiffegrpc.Methods{
//		"/billing.Invoices/":       spiffe.AllowIDs(web, ops), // all methods of the service
//		"/billing.Invoices/Delete": spiffe.AllowIDs(ops),
//	})
//	…
//	server := grpc.NewServer(grpc.Creds(creds),
//		grpc.ChainUnaryInterceptor(guard.Unary), grpc.ChainStreamInterceptor(guard.Stream))
//
// A server needs both methods, as one of them is for unary calls and the other one for streams. Clients send tokens by
// [TokenCredentials].
//
// # Open connections
//
// With a [spiffetls.Governor] in the options, a connection ends when the proof of the other side no longer holds, or
// the certificate that a server has presented is about to expire. The client learns it by a GOAWAY frame for which the
// server has nothing to forget: a server sends one, and the credentials of a client that has to leave put one in front
// of what it reads. The client then makes its new calls on a new connection, at once, and closes the old one with the
// last call on it. No call fails, unless it lasts longer than the Grace of the Governor: then the connection is cut,
// and the call ends with Unavailable. A stream that is to last for longer must be resumable by its program.
package spiffegrpc

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
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
// A handshake must end within HandshakeTimeout. A Governor needs no listener of its own. NextProtos, which is h2, and
// MaxHandshakes, as grpc-go accepts the connections, are errors.
func ServerCredentials(self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *spiffetls.Options) (credentials.TransportCredentials, error)

// ClientCredentials returns the credentials of a client that presents the identity of self and verifies its servers, as
// a [spiffetls.Dialer] does: [spiffetls.Hosts] finds the policy by the authority of the channel, and a Governor ends
// its connections. The options may be nil; NextProtos, which is h2, is an error.
//
// A call cannot have another authority than its channel (grpc.CallAuthority), as the server was verified for that one.
func ClientCredentials(self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *spiffetls.Options) (credentials.TransportCredentials, error)

// AuthInfo is what a connection with these credentials has proved. Handlers find it in the [peer.Peer] of their
// context, and clients in that of grpc.Peer.
type AuthInfo struct {
	credentials.CommonAuthInfo // PrivacyAndIntegrity

	// Peer is the proven other side, as it was at the handshake. It is nil if the other side proved no ID, which must be
	// allowed: see AllowAnonymousClients and [spiffetls.WebRoots].
	Peer *spiffe.Peer

	State tls.ConnectionState

	server *http.Server // has the configuration of a server; nil for a client
}

// PeerFromContext returns the proven other side of the call that ctx belongs to: the client in a handler of a server
// with [ServerCredentials], and the server in the context of a stream of a client with [ClientCredentials]. For every
// other context, and if the other side proved no ID, it reports false.
func PeerFromContext(ctx context.Context) (*spiffe.Peer, bool)
