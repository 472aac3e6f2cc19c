// Package workloadserver serves the SPIFFE Workload API, the local endpoint that gives a workload its identity.
// Package workloadapi is the client.
//
// [NewHandler] serves the identities of any [Provider], such as a *secretcache.Manager, or a *workloadapi.Source to
// relay another server. A unixsocket.Server puts the handler on a Unix socket:
//
//	handler, err := workloadserver.NewHandler(manager, nil)
//	…
//	server := &unixsocket.Server{Path: "/run/identity/api.sock", Handler: handler}
//	err = server.Run(ctx)
//
// An agent for several workloads decides in [Options].Identities what each caller gets. Each [Identity] names the
// provider that renews it, such as one *secretcache.Manager for each workload:
//
//	opts := &workloadserver.Options{
//		Identities: func(ctx context.Context) ([]workloadserver.Identity, error) {
//			peer, ok := unixsocket.PeerFromContext(ctx)
//			if !ok || managers[peer.UID] == nil {
//				return nil, nil // no identity
//			}
//			return []workloadserver.Identity{{Provider: managers[peer.UID]}}, nil
//		},
//		IssueJWTSVID:    authority.IssueJWTSVID,    // of a *ca.Authority whose Config has JWT
//		ValidateJWTSVID: validator.ValidateJWTSVID, // of a *jwtsvid.Validator
//	}
//
// # What it promises
//
// A stream gets its first response at once, and another one after each change; a slow reader gets the newest state,
// not the history. Each response is encoded once, however many callers receive it. Before each push the handler asks
// again which identities the caller may have. A request without the header "workload.spiffe.io: true" is refused
// before anything else.
//
// A missed notification never lets a caller's identity expire. A stream checks the provider when half of an identity's
// life is over. Then it checks again until there is a new identity, after waits of at most 4 % of the remaining life
// and at most half a minute. It also checks every five minutes, give or take a tenth, for changed bundles and
// registrations.
//
// A caller without an identity gets PermissionDenied, even while the provider is not ready. If the provider,
// Identities or an issuer fails, streams end with code Unavailable, so that callers keep their identities and retry. A
// failure in a scheduled check ends no stream. The log has the reason; the caller learns only which part failed.
//
// # What it does not do
//
// It knows only what the kernel says about a process, and attests nothing else. Callers over TCP are unknown, so they
// need a loopback or link-local address unless [Options].AnyNetwork is set. It does not parse certificate revocation
// lists. The WIT profile is Incubating, and off unless [Options].IssueWITSVID is set.
//
// # In a server of your own
//
// A [Handler] works on any http.Server that speaks HTTP/2 without TLS. Set the server's ConnContext to
// unixsocket.ConnContext, so that hooks can identify callers, and leave ReadTimeout and WriteTimeout at zero: they
// would end streams.
//
// # Limits
//
// A request has at most 256 KiB, with 64 audiences of 8 KiB together, and must arrive within 30 seconds. The handler
// answers at most 10,000 requests at a time ([Options].MaxStreams), and 1,000 for each peer
// ([Options].MaxPeerStreams); a stream counts as long as it lasts. Requests that are still arriving take at most 32
// MiB together, and 4 MiB for each peer. Compressed messages are refused. The context of a hook ends after 30 seconds.
package workloadserver

import (
	"context"
	"crypto"
	"log/slog"
	"time"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
)

const (
	maxRequest = 256 << 10 // bytes of a request

	maxIncoming     = 32 << 20 // bytes of requests being received
	maxPeerIncoming = 4 << 20  // bytes of them from one peer

	requestTimeout = 30 * time.Second // for a request to arrive, from its header to its end
	sendTimeout    = time.Minute      // for a client to take a response
	maxAudiences   = 64               // of a token
	maxAudience    = 8 << 10          // bytes of all audiences; validators refuse tokens of more than 16 KiB
	maxHint        = 1024             // bytes
	maxStreams     = 10_000           // answered at the same time, by default
	maxPeerStreams = 1000             // of them for one peer, by default
	retryFull      = 10 * time.Second // after which a caller beyond the limits may retry
	maxEncodings   = 4 << 10          // identities in cached responses
	maxText        = 512              // bytes of an error text for a caller
	hookTimeout    = 30 * time.Second // for a hook to return
)

// ErrDenied says that the caller has no identity, or not the requested one. If a hook or provider returns an error
// that wraps it, streams end with code PermissionDenied, which withdraws the caller's identities. It is the same error
// as workloadapi.ErrDenied, so that a relay passes it on.
var ErrDenied = workloadwire.ErrDenied

// Provider supplies the identity and bundles that a [Handler] serves, like a *secretcache.Manager or a
// *workloadapi.Source. Its methods are called from many goroutines and must not block.
//
// If a Provider also has the method CRLs() [][]byte, as a *workloadapi.Source does, the Handler serves these
// certificate revocation lists, which are in DER.
type Provider interface {
	// Snapshot returns the identity of the server or its only workload, and the trust bundles. While it returns an
	// error, the Handler tells callers to retry later or, if the error wraps [ErrDenied], that they have no identity.
	Snapshot() (*spiffe.Snapshot, error)

	// Changed returns a channel that is closed when the result of Snapshot changes; nil means that it never does.
	Changed() <-chan struct{}
}

// Identity is an X.509-SVID with a label. Set either Provider or SVID.
type Identity struct {
	// Provider has the X.509-SVID in its snapshot and renews it; the Handler pushes each new one at once. While its
	// Snapshot returns an error, the Handler tells callers to retry later or, if the error wraps [ErrDenied], leaves
	// this identity out. It does not use the bundles of this Provider.
	Provider Provider

	// SVID is the X.509-SVID itself. When half of its life is over, the Handler asks Identities for the next one.
	SVID *spiffe.SVID

	// Hint tells a workload with several identities what this one is for: a label that the operator and the workload
	// agree on, of at most 1,024 bytes, or "". The identities of a caller must have distinct hints, except for "".
	Hint string
}

// Options are the choices of a [Handler]. The zero value serves the provider's identity and bundles to
// every caller that reaches the socket. The functions are called from many goroutines.
type Options struct {
	// Identities decides which X.509-SVIDs the caller of a request may have, the default one first; an empty result
	// denies the caller. The provider must have bundles of their trust domains. Return the same SVID until there is a
	// new one: callers with the same SVIDs share one encoded response, and each new SVID causes a push. Nil means that
	// every caller gets the provider's identity, and only the permissions of the socket protect it.
	//
	// The Handler calls it when a stream begins; before each push, after a change of the provider or of the Provider
	// of an Identity; after [Handler.Refresh]; when half of the life of an identity is over; and every five minutes.
	// It should not block. Its context is derived from the request's and ends after 30 seconds; pass it to
	// unixsocket.PeerFromContext to learn which process is calling.
	//
	// An error that wraps [ErrDenied] has the effect of an empty result. After any other error the caller is told to
	// retry.
	Identities func(ctx context.Context) ([]Identity, error)

	// IssueJWTSVID answers FetchJWTSVID; it is a method of *ca.Authority and *jwtsvid.Issuer. It returns a JWT-SVID in
	// compact form for id, one of the caller's identities, with every audience in "aud". The context ends after 30
	// seconds. Nil means that FetchJWTSVID answers Unimplemented.
	//
	// An error that wraps [ErrDenied] says that this identity gets no token for the audience. A caller that names no
	// identity still gets tokens for its other identities, and is refused if there are none. An error that wraps
	// [io/fs.ErrInvalid] says that the request is invalid, for example because it has several audiences and the issuer
	// permits one: the caller gets the text and should not retry. An error that wraps [errors.ErrUnsupported], as from
	// an Authority without Config.JWT, becomes Unimplemented. After any other error, and after a temporary one (see
	// [spiffe.ErrNotReady]), the caller is told to retry, after the time in the error.
	IssueJWTSVID func(ctx context.Context, id spiffe.ID, audience []string) (token string, err error)

	// ValidateJWTSVID answers the API method of that name; it is a method of *jwtsvid.Validator, and of
	// *workloadapi.Client, which asks another server. It returns the ID in a token that is valid for audience, and all
	// claims, as encoding/json decodes them. The audience is a name of the calling workload, which received the token.
	// Nil means that the API method answers Unimplemented.
	//
	// An error says that the token is not valid, unless it is an error of package context or a temporary one (see
	// [spiffe.ErrNotReady]), for instance because a bundle source fails. Then the caller is told to retry.
	ValidateJWTSVID func(ctx context.Context, audience, token string) (id spiffe.ID, claims map[string]any, err error)

	// IssueWITSVID answers FetchWITSVID, and enables FetchWITBundles, which serves the WIT authorities of the bundles.
	// It is a method of *witsvid.Issuer. Nil means that both API methods answer Unimplemented. The profile is
	// Incubating: if it changes, so will this field.
	//
	// It returns a new WIT-SVID in compact form for id, the caller's identity with this hint, and the new private key
	// that the token confirms. The key is sent to the caller, so it must be an *ecdsa.PrivateKey or *rsa.PrivateKey.
	// The Handler calls it for each identity of a caller when a stream of WIT-SVIDs begins, and again when half of a
	// token's life is over or the WIT authorities of its trust domain change. The context is derived from the
	// request's and ends after 30 seconds. The Handler checks "sub" and "exp", not the rest of the token.
	//
	// An error that wraps [ErrDenied] says that this identity has no WIT-SVID, or no longer has one. After any other
	// error the caller keeps its WIT-SVID until that expires, and the Handler retries; a caller without one gets the
	// same answer as for an error of IssueJWTSVID.
	IssueWITSVID func(ctx context.Context, id spiffe.ID, hint string) (token string, key crypto.Signer, err error)

	// AnyNetwork serves callers with any IP address. Set it only where the network admits no process but those that
	// may have the identities. Otherwise callers over TCP need a loopback or link-local address.
	AnyNetwork bool

	// MaxStreams is how many requests are answered at the same time; a stream counts as long as it lasts. 0 means
	// 10,000. Further requests are refused with code ResourceExhausted and a time to retry.
	MaxStreams int

	// MaxPeerStreams is the same limit for one peer: a user (uid) on a Unix socket, otherwise a connection. 0 means
	// 1,000. Raise it where all workloads of a large node run as one user.
	MaxPeerStreams int

	// Logger gets warnings: refused requests; failures of Identities, the issuers and the provider, whose reasons
	// callers do not see; and expired identities that are still served. The attributes are reason, method, uid and
	// pid, or remote, and id and err if known. The first warning of a kind is logged at once for each of the first 12
	// callers, later ones as a count each minute. Nil means no logs.
	Logger *slog.Logger
}
