package spiffetls

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"

	"github.com/svidkit/svidkit/internal/tlsalert"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/internal/provenpeer"
)

// PeerFromContext returns the proven client of the request that ctx comes from, if a server of
// [Endpoint.ConfigureServer] received it, or a test made it with package spiffetest. For other contexts, and for a
// client without a certificate, it reports false.
func PeerFromContext(ctx context.Context) (*spiffe.Peer, bool) {
	if conn, ok := ctx.Value(connKey{}).(*connection); ok {
		peer := conn.peer.Load()
		return peer, peer != nil
	}
	peer := provenpeer.From[*spiffe.Peer](ctx)
	return peer, peer != nil
}

// PeerFromRequest is like [PeerFromContext], with an error that says why there is no proven client. The peer is nil
// if and only if there is an error.
func PeerFromRequest(r *http.Request) (*spiffe.Peer, error) {
	_, peer, err := provenBy(r)
	if err != nil {
		return nil, fmt.Errorf("spiffetls: no proven client: %w", err)
	}
	return peer, nil
}

// PeerFromConn returns the other side of a connection, as the handshake proved it. The connection is from Listener,
// Server, DialContext or Client of an [Endpoint], or from its Transport with a DialTLSContext. The peer is nil if
// and only if there is an error: for other connections, before the end of the handshake, and if the other side
// proved no ID.
func PeerFromConn(c net.Conn) (*spiffe.Peer, error) {
	raw, err := rawConnOf(c)
	switch {
	case err != nil:
	case !c.(*tls.Conn).ConnectionState().HandshakeComplete:
		err = errIncomplete
	case raw.proof.peer == nil:
		err = errNoID
	default:
		return raw.proof.peer, nil
	}
	return nil, fmt.Errorf("spiffetls: no proven peer: %w", err)
}

// rawConnOf returns the connection below a connection of this package.
func rawConnOf(c net.Conn) (*rawConn, error) {
	tc, ok := c.(*tls.Conn)
	if !ok {
		return nil, fmt.Errorf("the connection is a %T, not a *tls.Conn of an Endpoint", c)
	}
	raw, ok := tlsalert.Below(tc).(*rawConn)
	if !ok {
		return nil, errors.New("the connection was not made by an Endpoint; see PeerFromState")
	}
	return raw, nil
}

// PeerFromState returns the proven other side of a connection: a client or a server, as role says. It is for
// packages that take a [*tls.Config] and return the [tls.ConnectionState], such as net/smtp and database drivers.
//
// The state must come from crypto/tls, which has checked that the other side holds its key. PeerFromState verifies it
// again, so the peer that it returns holds now; this takes about a microsecond, as verified chains are remembered.
// The error is a [*HandshakeError], or says that there is nothing to verify: the handshake is not complete, a client
// presented no certificate, or a server was verified by its host name. The policies of Hosts depend on the address,
// which the state does not have: see [PeerFromConn].
func (e *Endpoint) PeerFromState(role spiffe.Role, cs tls.ConnectionState) (*spiffe.Peer, error) {
	err := e.meets(role)
	if err == nil && !cs.HandshakeComplete {
		err = errIncomplete
	}
	var p proof
	if err == nil {
		p, err = e.verify(cs, role, hostport{})
	}
	if err == nil && p.peer == nil {
		err = errNoID
	}
	if err != nil {
		return nil, fmt.Errorf("spiffetls: no proven peer: %w", err)
	}
	return p.peer, nil
}

var (
	errIncomplete = errors.New("the handshake is not complete")
	errNoID       = errors.New("the other side proved no SPIFFE ID, and the configuration requires none")
	errUnprepared = errors.New("the request came without TLS, or to a server without ConfigureServer; " +
		"serve with ServeTLS or ListenAndServeTLS, see PeerFromState for servers of other packages, " +
		"and make requests for tests by RequestFrom of package spiffetest")
)

// provenBy returns the client of r and the endpoint that verified it, which is nil in a test. With an error it
// returns the endpoint that requires a proof, if any.
func provenBy(r *http.Request) (*Endpoint, *spiffe.Peer, error) {
	if conn, ok := r.Context().Value(connKey{}).(*connection); ok {
		peer := conn.peer.Load()
		switch {
		case peer != nil:
			return conn.e, peer, nil
		case r.TLS == nil:
			return conn.e, nil, errUnprepared
		}
		return conn.e, nil, errNoProof
	}
	if conn := provenpeer.From[*tls.Conn](r.Context()); conn != nil { // of package spiffegrpc
		raw, err := rawConnOf(conn)
		if err != nil {
			return nil, nil, err
		}
		peer, err := raw.e.PeerFromState(spiffe.ClientRole, conn.ConnectionState())
		if errors.Is(err, errNoID) {
			err = errNoProof
		}
		return raw.e, peer, err
	}
	if peer := provenpeer.From[*spiffe.Peer](r.Context()); peer != nil {
		return nil, peer, nil
	}
	return nil, nil, errUnprepared
}
