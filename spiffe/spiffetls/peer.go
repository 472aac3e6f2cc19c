package spiffetls

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"

	"github.com/svidkit/svidkit/internal/tlsalert"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/internal/provenpeer"
)

// PeerFromContext returns the proven client of the request that ctx comes from, if a server of [ConfigureServer]
// received it, or a test made it with package spiffetest. For other contexts, and for a client without a certificate,
// it reports false.
func PeerFromContext(ctx context.Context) (*spiffe.Peer, bool) {
	conn, ok := ctx.Value(connKey{}).(*connection)
	if !ok {
		peer := provenpeer.From(ctx)
		return peer, peer != nil
	}
	peer := conn.peer.Load()
	return peer, peer != nil
}

// PeerFromRequest returns the proven client of a request. It works for the servers of [PeerFromContext], and for those
// whose TLSConfig is from [ServerConfig] or a clone of such; there it verifies the client again, as [PeerFromState]
// does. The peer is nil if and only if there is an error, which says why; a client without a certificate is an error,
// too.
func PeerFromRequest(r *http.Request) (*spiffe.Peer, error) {
	_, peer, err := provenBy(r)
	if err != nil {
		return nil, fmt.Errorf("spiffetls: no proven client: %w", err)
	}
	return peer, nil
}

// PeerFromState returns the proven other side of a connection made with config, which is from this package, a clone of
// such, or wraps its VerifyConnection. It is for packages that take a [*tls.Config] and return the
// [tls.ConnectionState], such as net/smtp, database drivers and grpc-go.
//
// The state must come from crypto/tls, which has checked that the other side holds its key. PeerFromState verifies it
// again, so the peer that it returns holds now; this takes about a microsecond if the verifier remembers the chain, as
// it does by default. The error is that of the verification, a [*HandshakeError], or says that there is nothing to
// verify: the handshake is not complete, config is not of this kind, a client presented no certificate, or a server was
// verified by its host name.
//
// The policies of [Hosts] depend on the address, which the state does not have: see [PeerFromConn].
func PeerFromState(config *tls.Config, cs tls.ConnectionState) (*spiffe.Peer, error) {
	_, peer, err := ask(config, cs)
	if err != nil {
		return nil, fmt.Errorf("spiffetls: no proven peer: %w", err)
	}
	return peer, nil
}

// PeerFromConn returns the proven other side of a connection from [NewListener], from [Governor.Listener], from a
// [Dialer], or from a [Transport] with a DialTLSContext, as the handshake proved it. The peer is nil if and only if
// there is an error: for other connections, before the end of the handshake, and if the other side proved no ID.
func PeerFromConn(c net.Conn) (*spiffe.Peer, error) {
	tc, ok := c.(*tls.Conn)
	if !ok {
		return nil, fmt.Errorf("spiffetls: no proven peer: the connection is a %T, not a *tls.Conn of NewListener or a Dialer", c)
	}
	raw, ok := tlsalert.Below(tc).(*rawConn)
	switch {
	case !ok:
		return nil, errors.New("spiffetls: no proven peer: the connection was not made by a listener or dialer of this package; see PeerFromState")
	case !tc.ConnectionState().HandshakeComplete:
		return nil, fmt.Errorf("spiffetls: no proven peer: %w", errIncomplete)
	case raw.peer.Load() == nil:
		return nil, fmt.Errorf("spiffetls: no proven peer: %w", errNoID)
	}
	return raw.peer.Load(), nil
}

var (
	errPlain      = errors.New("the request came without TLS; serve with ServeTLS or ListenAndServeTLS")
	errIncomplete = errors.New("the handshake is not complete")
	errNoID       = errors.New("the other side proved no SPIFFE ID, and the configuration requires none")
)

// provenBy returns the client of r and the endpoint that verified it, which is nil in a test. With an error the
// endpoint is the one that requires a proof, if any.
func provenBy(r *http.Request) (*endpoint, *spiffe.Peer, error) {
	server, served := r.Context().Value(http.ServerContextKey).(*http.Server)
	if conn, ok := r.Context().Value(connKey{}).(*connection); ok {
		if peer := conn.peer.Load(); peer != nil {
			return conn.e, peer, nil
		}
		if r.TLS == nil {
			return conn.e, nil, errPlain
		}
		return conn.e, nil, errNoProof
	}
	if peer := provenpeer.From(r.Context()); peer != nil {
		return nil, peer, nil
	}
	switch {
	case r.TLS == nil && served:
		return nil, nil, errPlain
	case r.TLS == nil:
		return nil, nil, errors.New("the request came without TLS, and from no http.Server; a test makes one that has a client by RequestFrom of package spiffetest")
	}
	var config *tls.Config
	if served {
		config = server.TLSConfig
	}
	e, peer, err := ask(config, *r.TLS)
	switch {
	case errors.Is(err, errForeignConfig):
		err = errors.New("the TLSConfig of the server is not from package spiffetls; prepare the server with ConfigureServer, set the TLSConfig that it uses, or see PeerFromState")
	case errors.Is(err, errNoID):
		err = errNoProof
	}
	return e, peer, err
}

// question is passed to VerifyConnection of a configuration, as clones and wrappers keep that alone. It is in the place
// of the chains that crypto/tls would have verified; these configurations have none. Only this package can make one.
type question struct {
	addr hostport // that was dialled, if that is known
	cert x509.Certificate

	e     *endpoint // behind the configuration; nil if it did not answer
	proof proof     // if it has verified the state
}

// in returns cs with the question.
func (q *question) in(cs tls.ConnectionState) tls.ConnectionState {
	q.cert.PublicKey = q
	cs.VerifiedChains = [][]*x509.Certificate{{&q.cert}}
	return cs
}

// questionIn returns the question that is in cs, or nil.
func questionIn(cs tls.ConnectionState) *question {
	if len(cs.VerifiedChains) != 1 || len(cs.VerifiedChains[0]) != 1 {
		return nil
	}
	q, _ := cs.VerifiedChains[0][0].PublicKey.(*question)
	return q
}

// ask makes config verify a state again.
func ask(config *tls.Config, cs tls.ConnectionState) (*endpoint, *spiffe.Peer, error) {
	switch {
	case config == nil || config.VerifyConnection == nil:
		return nil, nil, errForeignConfig
	case !cs.HandshakeComplete:
		return nil, nil, errIncomplete
	}
	var q question
	err := config.VerifyConnection(q.in(cs))
	switch {
	case err != nil:
		return q.e, nil, err
	case q.e == nil:
		return nil, nil, errForeignConfig
	case q.proof.peer == nil:
		return q.e, nil, errNoID
	}
	return q.e, q.proof.peer, nil
}

var errForeignConfig = errors.New("the configuration is not from package spiffetls, or its VerifyConnection was replaced")
