package spiffetls

import (
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/svidkit/svidkit/internal/guard"
	"github.com/svidkit/svidkit/spiffe"
)

// RequirePeer returns a handler that calls next for a request if its client is proven, as [PeerFromRequest] finds
// it, the policy allow permits the client, and the proof has not expired. The server's own policy decides about
// connections; allow can only narrow it:
//
//	admin, err := spiffetls.RequirePeer(spiffe.AllowIDs(operator), adminHandler)
//	…
//	mux.Handle("/admin/", admin)
//
// [spiffe.AllowAnyPeer] requires a proof and nothing more. An allow that [spiffe.CheckPolicySource] refuses is an
// error. Patterns of [http.ServeMux], such as "POST /orders/", say which policy is for which path and method.
//
// Other requests are answered with 403 and the word "forbidden", without the policy or the reason. If the proof has
// expired, the answer has "Connection: close", so that the client connects anew. The Logger and the Metrics of the
// server get the reason. A request whose path can be read in two ways is answered with 400 before any policy: a
// CONNECT with a path, a path that [path.Clean] changes, and a path with an escaped slash ("%2F") below a pattern
// that ends with a slash, which a ServeMux reads as part of an element and [http.FileServer] as a separator.
func RequirePeer(allow spiffe.PolicySource, next http.Handler) (http.Handler, error) {
	if next == nil {
		return nil, errors.New("spiffetls: require peer: no handler")
	}
	if err := spiffe.CheckPolicySource(allow); err != nil {
		return nil, fmt.Errorf("spiffetls: require peer: %w", err)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { serve(allow, next, w, r) }), nil
}

var (
	errNoProof      = errors.New("the client presented no certificate")
	errProofExpired = errors.New("the proof has expired, and the connection was kept open")
)

// serve calls next for a request that allow permits, and answers any other.
func serve(allow spiffe.PolicySource, next http.Handler, w http.ResponseWriter, r *http.Request) {
	e, peer, cause := provenBy(r)
	var id spiffe.ID
	if cause == nil {
		id = peer.ID()
	} else if ve, ok := errors.AsType[*spiffe.VerifyError](cause); ok {
		id = ve.ID                            // the handshake proved it, and it no longer verifies
		w.Header().Set("Connection", "close") // so that the client proves itself anew
	}
	status := http.StatusForbidden
	if err := guard.Path(r); err != nil {
		cause, status = err, http.StatusBadRequest
	} else if cause == nil && e.now().After(peer.NotAfter()) {
		w.Header().Set("Connection", "close")
		cause = errProofExpired
	} else if cause == nil {
		if cause = allow.Policy().Check(id); cause == nil {
			next.ServeHTTP(w, r)
			return
		}
	}
	if e != nil {
		reason := reasonOf(cause, "denied", []known{
			{errProofExpired, "proof_expired"}, {errNoProof, "no_certificate"}, {guard.ErrPath, "unclear_path"},
		})
		e.record(failure{count: count{"server", "denied", reason}, remote: r.RemoteAddr, id: id, err: cause})
	}
	w.Header().Set("Cache-Control", "no-store")
	http.Error(w, strings.ToLower(http.StatusText(status)), status)
}
