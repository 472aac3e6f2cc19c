// Package workloadserver serves the SPIFFE Workload API, the local endpoint from which a workload gets its identity.
// Package workloadapi is the client.
//
// [NewHandler] serves the API over any [Provider], such as a *secretcache.Manager, or a *workloadapi.Source (an
// agent's agent). A unixsocket.Server puts it on a Unix socket:
//
//	handler, err := workloadserver.NewHandler(manager, nil)
//	…
//	server := &unixsocket.Server{Path: "/run/identity/api.sock", Handler: handler}
//	err = server.Run(ctx)
//
// An agent of several workloads decides in [Options].Identities what each caller gets. Each [Identity] names the
// provider that renews it, such as a *secretcache.Manager for each workload:
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
// A stream gets its first response at once, and another one whenever something has changed; a slow reader gets the
// newest state and not the history. Each response is made once, however many callers it is for. Before each push the
// handler asks again which identities the caller may have. A request without the header "workload.spiffe.io: true"
// is refused first.
//
// No identity expires at a caller because the handler was not told of its successor. A stream looks again when half
// of the life of an identity is over, and then, until there is another one, after waits of at most 4 % of the life
// that is left and at most half a minute. Every five minutes, give or take a tenth, it looks in any case, for
// changed bundles and registrations.
//
// A caller that may have nothing is told so, even while the provider has nothing either. If the provider, Identities
// or an issuer fails, streams end with code Unavailable, so that callers keep what they have and come back. A
// failure found by a scheduled look, without a change, ends no stream. The log has the reason; the caller is told
// which part has failed.
//
// # What it does not do
//
// It knows of a process what the kernel says, and attests nothing else. Over TCP it does not know its callers, so it
// serves those with a loopback or link-local address only, unless [Options].AnyNetwork is set. It does not parse
// certificate revocation lists. The WIT profile is Incubating, and off unless [Options].IssueWITSVID is set.
//
// # In a server of your own
//
// A [Handler] works on any http.Server that speaks HTTP/2 without TLS. Set the server's ConnContext to
// unixsocket.ConnContext, so that callers are known, and leave ReadTimeout and WriteTimeout at zero: they would end
// streams.
//
// # Limits
//
// A request has at most 256 KiB, and 64 audiences with 8 KiB, and must arrive within 30 seconds. At most 10,000
// requests ([Options].MaxStreams), of one peer 1,000 ([Options].MaxPeerStreams), are answered at the same time: a
// stream counts for as long as it lasts. Requests that are still arriving take at most 32 MiB together, those of one
// peer 4 MiB. Compressed messages are refused. A hook gets 30 seconds, by its context.
package workloadserver

import (
	"context"
	"crypto"
	"log/slog"
	"time"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
)

const (
	maxRequest = 256 << 10 // bytes of a request

	maxIncoming     = 32 << 20 // bytes of requests that are being received
	maxPeerIncoming = 4 << 20  // of one peer

	requestTimeout = 30 * time.Second // for a request to come, from its header to its end
	sendTimeout    = time.Minute      // in which a client has to take a response
	maxAudiences   = 64               // of a token
	maxAudience    = 8 << 10          // bytes of all of them; validators refuse tokens of more than 16 KiB
	maxHint        = 1024             // bytes
	maxStreams     = 10_000           // answered at the same time, by default
	maxPeerStreams = 1000             // of them for one peer, by default
	retryFull      = 10 * time.Second // after which a caller that found no room is to come back
	maxEncodings   = 4 << 10          // identities in responses that are kept for their next callers
	maxText        = 512              // bytes of a reason that a caller is told
	hookTimeout    = 30 * time.Second // for a hook to answer
	clockTick      = time.Minute      // between looks at the clock of a stream that waits
)

// patience bounds the waits after an issuer of WIT-SVIDs has failed.
var patience = renew.Patience{Impatient: 30 * time.Second, Longest: 30 * time.Second, Wish: time.Minute}

// ErrDenied says that the caller has no identity, or not the one that it asks for. A hook or provider that returns an
// error wrapping it ends streams with code PermissionDenied, which withdraws what the caller has. It is the same error
// as workloadapi.ErrDenied, so that an agent's agent hands it on.
var ErrDenied = workloadwire.ErrDenied

// Provider has what a [Handler] serves; a *secretcache.Manager is one, and so is a *workloadapi.Source. Its methods
// are called from many goroutines and must not block.
//
// If a Provider also has the method CRLs() [][]byte, as a *workloadapi.Source does, the Handler serves these
// certificate revocation lists, in DER.
type Provider interface {
	// Snapshot returns the identity of the server or its one workload, and the trust bundles. While it
	// returns an error, callers are told to come back later, or, if the error wraps [ErrDenied], that
	// they have no identity.
	Snapshot() (*spiffe.Snapshot, error)

	// Changed returns a channel that is closed when Snapshot would answer differently; nil means
	// never.
	Changed() <-chan struct{}
}

// Identity is an X.509-SVID with a label. It has a Provider or an SVID.
type Identity struct {
	// Provider has the X.509-SVID in its snapshot, and renews it: each new one is pushed at once. While its
	// Snapshot returns an error, callers are told to come back later, or, if the error wraps [ErrDenied],
	// this identity is left out. Its bundles are not used.
	Provider Provider

	// SVID is the X.509-SVID itself. The handler asks Identities for the next one when half of its life is over.
	SVID *spiffe.SVID

	// Hint says what the identity is for, where a workload has several: a word that the operator and
	// the workload have agreed upon, at most 1,024 bytes, or "". The identities of a caller have
	// distinct hints, except for "".
	Hint string
}

// Options are the choices of a [Handler]. The zero value serves the provider's identity and bundles to
// every caller that reaches the socket. The functions are called from many goroutines.
type Options struct {
	// Identities decides which X.509-SVIDs the caller of a request may have, the default one first; none means that
	// the caller gets nothing. Their trust domains must be among the provider's bundles. Callers with the same SVIDs
	// share one serialisation, and each new SVID is a push, so return the same one until there is another. Nil means
	// that every caller gets the provider's identity: the permissions of the socket are the guard.
	//
	// It is called when a stream begins; before each push, after a change of the provider or of the Provider of an
	// Identity; after [Handler.Refresh]; when half of the life of an identity is over; and every five minutes. It
	// should not block. Its context is that of the request, which ends after 30 seconds; unixsocket.PeerFromContext
	// tells from it which process is calling.
	//
	// An error that wraps [ErrDenied] is like none; any other says that the decision failed, and the caller is told to
	// come back.
	Identities func(ctx context.Context) ([]Identity, error)

	// IssueJWTSVID answers FetchJWTSVID; a *ca.Authority and a *jwtsvid.Issuer have it. It returns a JWT-SVID in
	// compact form for id, an identity that the caller has, whose "aud" has all of audience. The context
	// ends after 30 seconds. Nil means that the method answers Unimplemented.
	//
	// An error that wraps [ErrDenied] says that this identity gets no token for the audience: a caller that names no
	// identity is given those of its others, and is refused if there are none. One that wraps [io/fs.ErrInvalid]
	// says that the request is a mistake, such as several audiences where an issuer permits one: the caller is told
	// the text, and not to repeat the request. One that wraps [errors.ErrUnsupported], as of an Authority without
	// Config.JWT, is answered with Unimplemented. With any other error, and with one that says that it passes
	// (see [spiffe.ErrNotReady]), the caller is told to come back, after the time in it.
	IssueJWTSVID func(ctx context.Context, id spiffe.ID, audience []string) (token string, err error)

	// ValidateJWTSVID answers the method of that name; a *jwtsvid.Validator has it, and so has a *workloadapi.Client,
	// which asks another server. It returns the ID in a token that is valid for audience, and all claims, as
	// encoding/json decodes them. The audience is a name of the workload that received the token, as that workload
	// says. Nil means that the method answers Unimplemented.
	//
	// An error says that the token is not valid, unless it could not be judged: then the error is one of package
	// context, or says that it passes (see [spiffe.ErrNotReady]), for instance because a bundle source fails. Callers
	// are then told to come back.
	ValidateJWTSVID func(ctx context.Context, audience, token string) (id spiffe.ID, claims map[string]any, err error)

	// IssueWITSVID answers FetchWITSVID; with it FetchWITBundles serves the WIT authorities of the bundles. A
	// *witsvid.Issuer has it. Nil means that both methods answer Unimplemented. The profile is Incubating and may
	// change, and this field with it.
	//
	// It returns a new WIT-SVID in compact form for id, an identity that the caller has under this hint, and the new
	// private key that the token confirms: an *ecdsa.PrivateKey or *rsa.PrivateKey, as it goes to the
	// caller. It is called for each identity of a caller when a stream of WIT-SVIDs begins, and again when half of
	// the life of one is over or the WIT authorities of its trust domain change. The context is that of the request,
	// and ends after 30 seconds. The Handler checks the form, "sub", "exp", and that token and key belong together.
	//
	// An error that wraps [ErrDenied] says that this identity has no WIT-SVID, or none any more. With any other the
	// caller keeps what it has until that expires, and the Handler tries again; a caller without one is told as by
	// IssueJWTSVID.
	IssueWITSVID func(ctx context.Context, id spiffe.ID, hint string) (token string, key crypto.Signer, err error)

	// AnyNetwork serves callers with any IP address. Set it where the network lets in only processes that may have the
	// identities. Without it callers over TCP need a loopback or link-local address.
	AnyNetwork bool

	// MaxStreams is how many requests are answered at the same time; a stream counts for as long as it lasts. 0 means
	// 10,000. Further requests are refused with code ResourceExhausted and a time to come back.
	MaxStreams int

	// MaxPeerStreams is how many of them one peer may have: a user (uid) on a Unix socket, and otherwise a connection.
	// 0 means 1,000. Raise it where all workloads of a large node run as one user.
	MaxPeerStreams int

	// Logger gets warnings: refused requests and why; failures of Identities, the issuers and the provider, whose
	// reasons callers are not told; and identities that are served although they have expired. The attributes are
	// reason, method, uid and pid, or remote, and id and err where there is one. The first of a kind, for each
	// caller of the first 12, is logged at once, and then their number each minute. Nil means no logs.
	Logger *slog.Logger
}
