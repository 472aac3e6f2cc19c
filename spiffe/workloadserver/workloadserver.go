// Package workloadserver serves the SPIFFE Workload API: the local endpoint at which a workload gets its
// identity. It is the agent's side; package workloadapi is the workload's.
//
// [NewHandler] serves the API over any [Provider]: a *secretcache.Manager, or a *workloadapi.Source (an
// agent's agent). A unixsocket.Server puts it on a Unix socket:
//
//	handler, err := workloadserver.NewHandler(manager, nil)
//	…
//	server := &unixsocket.Server{Path: "/run/identity/api.sock", Handler: handler}
//	err = server.Run(ctx)
//
// An agent that has several workloads decides with [Options].Identities which of them gets what. An
// [Identity] names what renews it, for instance a *secretcache.Manager for each workload:
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
// A stream gets its first response at once, and others when something has changed. Each response is made
// once, however many callers it is for. Before each push the handler asks again which identities
// the caller may have. A caller that reads slowly gets the newest state and not the history. A request
// without the header "workload.spiffe.io: true" is refused before anything else is looked at.
//
// No identity expires at a caller because the handler was not told that there is another. A stream looks
// again when half of the life of an identity that it serves is over, and from then on after waits of at most
// 4 % of the life that is left, and of half a minute, until the identity is another one. Every five minutes,
// give or take a tenth, it looks in any case: for bundles, and for registrations that have changed.
//
// A failure of the provider, of Identities or of an issuer ends streams with code Unavailable, so that
// callers keep what they have and come back. One that is found without a change, because it was time to look,
// ends none. The reason goes to the log and not to the caller.
//
// # What it does not do
//
// It does not attest processes beyond what the kernel says of a peer. Over TCP callers are not known at all,
// so only those with a loopback or link-local address are served, unless [Options].AnyNetwork is set. It
// parses no certificate revocation list. The WIT profile is Incubating, and off unless
// [Options].IssueWITSVID is set.
//
// # In a server of your own
//
// A [Handler] can be mounted on any http.Server that speaks HTTP/2 without TLS. Set the server's
// ConnContext to unixsocket.ConnContext, so that peers are known, and leave its ReadTimeout and WriteTimeout
// at zero, as they would end the streams.
//
// # Limits
//
// Requests have at most 256 KiB and 64 audiences with 8 KiB, and must arrive within 30 seconds. At most 10,000 are
// answered at the same time ([Options].MaxStreams), of one peer at most 1,000 ([Options].MaxPeerStreams): a
// stream counts for as long as it lasts, and calls and reflection count too. Requests that are being received take
// at most 128 MiB together, those of one peer 16 MiB. Compressed messages are refused.
// A hook gets 30 seconds, by its context.
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

	maxIncoming     = 128 << 20 // bytes of requests that are being received
	maxPeerIncoming = 16 << 20  // of one peer

	requestTimeout = 30 * time.Second // for a request to come, from its header to its end
	maxAudiences   = 64               // of a token
	maxAudience    = 8 << 10          // bytes of all of them; validators refuse tokens of more than 16 KiB
	maxHint        = 1024             // bytes (WAPI-25)
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

// ErrDenied says that there is no identity for the caller, or not the one that was asked for. A hook or
// provider returns an error that wraps it to end streams with code PermissionDenied, which withdraws what
// the caller has. It is the same error as workloadapi.ErrDenied, so that an agent's agent hands it on.
var ErrDenied = workloadwire.ErrDenied

// Provider has what a [Handler] serves; a *secretcache.Manager is one, and so is a *workloadapi.Source. Its
// methods are called from many goroutines and must not block.
//
// A Provider that also has the method CRLs() [][]byte, as a Source has, serves certificate revocation
// lists in DER.
type Provider interface {
	// Snapshot returns the identity of the server or its one workload, and the trust bundles. While it
	// returns an error, callers are told to come back later, or, if the error wraps [ErrDenied], that
	// they have no identity.
	Snapshot() (*spiffe.Snapshot, error)

	// Changed returns a channel that is closed when Snapshot would answer differently; nil means
	// never.
	Changed() <-chan struct{}
}

// Identity is what has an X.509-SVID, with a label. It has a Provider or an SVID.
type Identity struct {
	// Provider has the X.509-SVID in its snapshot, and renews it: each new one is pushed at once. While its
	// Snapshot returns an error, callers are told to come back later, or, if the error wraps [ErrDenied],
	// this identity is left out. Its bundles are not used.
	Provider Provider

	// SVID is the X.509-SVID itself. The handler asks Identities for the next one when half of the life of
	// this one is over.
	SVID *spiffe.SVID

	// Hint says what the identity is for, where a workload has several: a word that the operator and
	// the workload have agreed upon, at most 1,024 bytes, or "". The identities of a caller have
	// distinct hints, except for "".
	Hint string
}

// Options are the choices of a [Handler]. The zero value serves the provider's identity and bundles to
// every caller that reaches the socket. The functions are called from many goroutines.
type Options struct {
	// Identities decides which X.509-SVIDs the caller of a request may have, the default one first;
	// none means that the caller has no identity and gets nothing. Their trust domains must be among the
	// provider's bundles. It is called with the context of the request, which ends after 30 seconds and from
	// which unixsocket.PeerFromContext tells which process is calling: when a stream begins and again before
	// each push, after the provider or that of an Identity has changed, after [Handler.Refresh], when half
	// of the life of an identity is over, and every five minutes. It should not block, and it returns an SVID
	// that it has until there is another: each new one is a push.
	//
	// An error that wraps [ErrDenied] is like none; any other says that the decision failed, and the caller
	// is told to come back. Callers that are given the same SVIDs share one serialisation. Nil means that
	// every caller gets the provider's identity: the permissions of the socket are the guard.
	Identities func(ctx context.Context) ([]Identity, error)

	// IssueJWTSVID makes the answers of FetchJWTSVID; a *ca.Authority and a *jwtsvid.Issuer have it. It
	// returns a JWT-SVID for id, an identity that the caller has, in compact form. Its "aud" has all of
	// audience (WAPI-40). The context ends after 30 seconds. Nil means that the method answers Unimplemented.
	//
	// An error that wraps [ErrDenied] says that there is no token for this identity, and one that wraps
	// [io/fs.ErrInvalid] that the request is a mistake, such as several audiences where an issuer permits
	// one: the caller is told the text of the latter, and not to repeat it. With any other, and with one whose
	// method Retryable() (after time.Duration, ok bool) reports true, the caller is told to come back, after
	// that time.
	IssueJWTSVID func(ctx context.Context, id spiffe.ID, audience []string) (token string, err error)

	// ValidateJWTSVID makes the answers of the method of that name; a *jwtsvid.Validator has it, and so
	// has a *workloadapi.Client, which asks another server. It returns the ID in a token that is valid for
	// audience, and all claims of the token, as encoding/json decodes them. The audience is the word of the
	// workload that received the token, and is one of the workload's own names. Nil means that the method
	// answers Unimplemented.
	//
	// An error says that the token is not valid, with two exceptions that say that it could not be
	// judged: an error of package context, and one with the method
	// Retryable() (after time.Duration, ok bool) that reports true, such as for a bundle source that
	// fails. Callers are then told to come back.
	ValidateJWTSVID func(ctx context.Context, audience, token string) (id spiffe.ID, claims map[string]any, err error)

	// IssueWITSVID makes the answers of FetchWITSVID, and with it FetchWITBundles serves the WIT
	// authorities of the bundles; a *witsvid.Issuer has it. Nil means that both methods answer
	// Unimplemented. The profile is Incubating, and may change, and this field with it.
	//
	// It returns a new WIT-SVID for id, an identity that the caller has under this hint, in compact form,
	// with the private key that the token confirms: an *ecdsa.PrivateKey or *rsa.PrivateKey, as it goes
	// to the caller. The key is new as well (WIT-52). The context is that of the request, and ends after
	// 30 seconds. It is called for each identity of a caller when a stream of WIT-SVIDs begins, and again
	// when half of the life of one is over, or when the WIT authorities of its trust domain change. The
	// Handler checks the form, "sub", "exp", and that token and key belong together.
	//
	// An error that wraps [ErrDenied] says that this identity has no WIT-SVID, or none any more. With any
	// other the caller keeps what it has until that expires, and the Handler tries again; a caller that has
	// none yet is told as by IssueJWTSVID.
	IssueWITSVID func(ctx context.Context, id spiffe.ID, hint string) (token string, key crypto.Signer, err error)

	// AnyNetwork serves callers with any IP address. Set it where the network itself lets in only
	// processes that may have the identities. Without it callers over TCP need a loopback or link-local
	// address.
	AnyNetwork bool

	// MaxStreams is how many requests are answered at the same time, streams for as long as they last;
	// 0 means 10,000. One more is refused with code ResourceExhausted and a time to come back.
	MaxStreams int

	// MaxPeerStreams is how many of them one peer may have, so that no peer takes them all: a user (uid) on a
	// Unix socket, and a connection otherwise; 0 means 1,000. Raise it where all workloads of a large node
	// run as one user.
	MaxPeerStreams int

	// Logger gets warnings: requests that are refused, and why; the failures of Identities, the issuers and
	// the provider, which callers are not told; and identities that are served although they have expired.
	// Their attributes are reason, method, uid and pid, or remote, and id and err where there is one. The
	// first of a kind is logged at once, and then their number each minute. Nil means no logs.
	Logger *slog.Logger
}
