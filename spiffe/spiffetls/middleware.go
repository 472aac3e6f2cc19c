package spiffetls

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/svidkit/svidkit/spiffe"
)

// RequirePeer returns a handler that calls next for requests with a proven client, as [PeerFromRequest] finds it, that
// allow allows and whose proof has not expired. The server's own policy decides about connections; allow can only
// narrow it:
//
//	admin, err := spiffetls.RequirePeer(spiffe.AllowIDs(operator), adminHandler)
//	…
//	mux.Handle("/admin/", admin)
//
// [spiffe.AllowAnyPeer] requires a proof and nothing more, and [Paths] has a policy for each path. What [spiffe.CheckPolicySource] refuses is an error.
//
// Other requests are answered with 403 and the word "forbidden", without the policy or the reason. If the proof has
// expired, the answer has "Connection: close", so that the client connects anew. The FailureLog and the Logger of the
// server get the reason, at the stage "request".
func RequirePeer(allow spiffe.PolicySource, next http.Handler) (http.Handler, error) {
	if next == nil {
		return nil, errors.New("spiffetls: require peer: no handler")
	}
	if _, hosts := allow.(interface{ byHost() }); hosts {
		return nil, fmt.Errorf("spiffetls: require peer: %w", errHosts)
	}
	paths, ok := allow.(pathPolicies)
	if !ok {
		if err := spiffe.CheckPolicySource(allow); err != nil {
			return nil, fmt.Errorf("spiffetls: require peer: %w", err)
		}
		return requirePeer{func(*http.Request) (spiffe.PolicySource, error) { return allow, nil }, next}, nil
	}
	return requirePeer{paths.of, next}, nil
}

var (
	errHosts        = errors.New("Hosts and HostsFunc are for clients")
	errNoProof      = errors.New("the client presented no certificate")
	errProofExpired = errors.New("the proof has expired, and the connection was kept open")
)

type requirePeer struct {
	allow func(*http.Request) (spiffe.PolicySource, error)
	next  http.Handler
}

// ServeHTTP implements [http.Handler].
func (h requirePeer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e, peer, cause := provenBy(r)
	var id spiffe.ID
	if cause == nil {
		id = peer.ID()
		if e.now().After(peer.NotAfter()) {
			w.Header().Set("Connection", "close")
			cause = errProofExpired
		} else if cause = h.check(r, id); cause == nil {
			h.next.ServeHTTP(w, r)
			return
		}
	} else if ve, ok := errors.AsType[*spiffe.VerifyError](cause); ok {
		id = ve.ID                            // the handshake proved it, and it no longer verifies
		w.Header().Set("Connection", "close") // so that the client proves itself anew
	}
	if e != nil && e.notes() {
		e.opts.Metrics.denied(causeOf("request", cause))
		e.note(Failure{
			Side: "server", Remote: r.RemoteAddr, Stage: "request",
			ID: id, TrustDomain: id.TrustDomain(), Reason: cause.Error(), OtherSees: "403 Forbidden",
		}, cause)
	}
	forbid(w)
}

// check says why the client may not make the request.
func (h requirePeer) check(r *http.Request, id spiffe.ID) error {
	allow, err := h.allow(r)
	if err != nil {
		return err
	}
	p := allow.Policy()
	if none, ok := allow.(interface{ NoPolicy() error }); ok && p.IsZero() { // of spiffegrpc
		return none.NoPolicy()
	}
	return p.Check(id)
}

func forbid(w http.ResponseWriter) {
	w.Header().Set("Cache-Control", "no-store")
	http.Error(w, "forbidden", http.StatusForbidden)
}
