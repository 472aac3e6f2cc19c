// Package workloadserver serves the SPIFFE Workload API: the local endpoint at which a workload gets its
// identity. It is the agent's side; package workloadapi is the workload's.
//
// [NewHandler] serves the API over any [Provider]: a *secretcache.Manager, a *workloadapi.Source (an agent's
// agent), or a fixed snapshot, made a Provider by [Fixed]. A unixsocket.Server puts it on a Unix socket:
//
//	handler, err := workloadserver.NewHandler(manager, nil)
//	…
//	server := &unixsocket.Server{Path: "/run/identity/api.sock", Handler: handler}
//	err = server.Run(ctx)
//
// An agent that has several workloads decides with [Options].Identities which of them gets what:
//
//	opts := &workloadserver.Options{
//		Identities: func(ctx context.Context) ([]workloadserver.Identity, error) {
//			peer, ok := unixsocket.PeerFromContext(ctx)
//			if !ok {
//				return nil, nil // no identity
//			}
//			return registrations.of(peer)
//		},
//		IssueJWTSVID:    authority.IssueJWTSVID,    // of a *ca.Authority
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
// A failure of the provider, of Identities or of an issuer ends streams with code Unavailable, so that
// callers keep what they have and come back. The reason goes to the log and not to the caller.
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
// Requests have at most 256 KiB and 64 audiences, and must arrive within 30 seconds. There are 10,000
// streams ([Options].MaxStreams), of one process at most 1,000. Compressed messages are refused.
package workloadserver

import (
	"context"
	"crypto"
	"log/slog"
	"time"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/workloadwire"
	"github.com/svidkit/svidkit/spiffe"
)

const (
	maxRequest     = 256 << 10        // bytes of a request
	requestTimeout = 30 * time.Second // for a request to come, from its header to its end
	maxAudiences   = 64               // of a token
	maxHint        = 1024             // bytes (WAPI-25)
	maxStreams     = 10_000           // open at the same time, by default
	maxOfProcess   = 1000             // streams of one process, so that it does not take all
	maxEncodings   = 4 << 10          // identities in responses that are kept for their next callers
	maxText        = 512              // bytes of a reason that a caller is told
	issueTimeout   = 30 * time.Second // for a WIT-SVID
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

// Fixed returns a Provider that always has the same snapshot, for tests and for identities that are not
// renewed.
func Fixed(s *spiffe.Snapshot) Provider { return fixed{s} }

type fixed struct{ snap *spiffe.Snapshot }

func (f fixed) Snapshot() (*spiffe.Snapshot, error) { return f.snap, nil }
func (f fixed) Changed() <-chan struct{}            { return nil }

// Identity is an X.509-SVID with a label.
type Identity struct {
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
	// provider's bundles. It is called with the context of the request, from which
	// unixsocket.PeerFromContext tells which process is calling, when a stream begins and again before each
	// push: after the provider has changed, and after [Handler.Refresh]. It should not block.
	//
	// An error that wraps [ErrDenied] is like none; any other says that the decision failed, and the caller
	// is told to come back. Callers that are given the same SVIDs share one serialisation. Nil means that
	// every caller gets the provider's identity: the permissions of the socket are the guard.
	Identities func(ctx context.Context) ([]Identity, error)

	// IssueJWTSVID makes the answers of FetchJWTSVID; a *ca.Authority and a *jwtsvid.Issuer have it. It
	// returns a JWT-SVID for id, an identity that the caller has, in compact form. Its "aud" has all of
	// audience (WAPI-40). Nil means that the method answers Unimplemented.
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
	// other the caller keeps what it has until that expires, and the Handler tries again.
	IssueWITSVID func(ctx context.Context, id spiffe.ID, hint string) (token string, key crypto.Signer, err error)

	// AnyNetwork serves callers with any IP address. Set it where the network itself lets in only
	// processes that may have the identities. Without it callers over TCP need a loopback or link-local
	// address.
	AnyNetwork bool

	// MaxStreams is how many streams may be open at the same time; 0 means 10,000. One more is
	// refused with code ResourceExhausted.
	MaxStreams int

	// Logger gets what callers are not told: the failures of Identities, the issuers and the provider, as
	// warnings, and at level Debug when one repeats. Nil means no logs.
	Logger *slog.Logger
}
