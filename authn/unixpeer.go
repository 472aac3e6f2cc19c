package authn

import (
	"fmt"
	"net/http"
	"strconv"

	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// UnixPeer proves a caller by its user on this machine, the [unixsocket.Peer] of the connection. The method of
// the Caller is "unix-peer".
//
// If identity is not nil, it maps a peer to a caller: it sets the ID or another name, such as the workload that the
// operator registered for the user. If identity is nil, or returns a nil Caller and a nil error, the caller has no
// SPIFFE ID, and its Name is "uid:" and the number of the user. An error refuses the peer. The PID may belong to
// another process by now; see [unixsocket.Peer].
//
// An unknown peer, as on connections that are not Unix sockets, gives [ErrNoCredential]; a peer that identity refuses
// gives [ErrRefused] with its error.
func UnixPeer(identity func(unixsocket.Peer) (*Caller, error)) Authenticator {
	return Func(func(r *http.Request) (*Caller, error) {
		p, ok := unixsocket.PeerFromContext(r.Context())
		if !ok {
			return nil, fmt.Errorf("authn: the connection is no Unix socket, or this system does not tell the "+
				"peer: %w", ErrNoCredential)
		}
		caller := new(Caller)
		if identity != nil {
			c, err := identity(p)
			if err != nil {
				return nil, fmt.Errorf("authn: user %d, process %d: %w: %w", p.UID, p.PID, ErrRefused, err)
			}
			if c != nil {
				*caller = *c
			}
		}
		if !caller.proven() {
			caller.Name = "uid:" + strconv.FormatUint(uint64(p.UID), 10)
		}
		caller.Method = "unix-peer"
		return caller, nil
	})
}
