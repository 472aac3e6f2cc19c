// Package workloadapi speaks the SPIFFE Workload API: the local endpoint at which a workload gets its
// identity, without a secret of its own to ask with. It has both sides.
//
// # A workload
//
// Most programs need [New], [Source.Run] and [Source.Ready]:
//
//	src, err := workloadapi.New(workloadapi.Config{Address: os.Getenv(workloadapi.SocketEnv)})
//	…
//	go src.Run(ctx) // in a group that waits for it
//	if err := src.Ready(ctx); err != nil {
//		return err // says why: nobody listens, or nobody knows this workload
//	}
//	cfg, err := spiffetls.ServerConfig(src, src, spiffe.AllowIDs(frontend), nil)
//
// From then on the [Source] has the current X.509-SVID and the current trust bundles, for as long as
// Run runs. It has the methods for readers of a *secretcache.Manager, so a program can take its
// identity from an agent or from a CA of its own without another change. With [Config].JWTBundles
// the bundles verify JWT-SVIDs too, and [Source.Client] asks for tokens. A [Client] alone makes single
// calls and watches single streams.
//
// # An agent
//
// [NewHandler] serves the API over any [Provider]: a *secretcache.Manager, a Source (an agent's agent),
// or a snapshot of a test, made a provider by [Fixed]. [Server] puts it on a Unix socket:
//
//	handler, err := workloadapi.NewHandler(manager, nil)
//	server := &workloadapi.Server{Address: "unix:///run/identity/api.sock", Handler: handler}
//	err = server.Run(ctx)
//
// Who gets what is up to [Options].Identities, which learns from [unixsocket.PeerFromContext] which process
// is calling, as Linux knows it. Tokens come from [Options].Issuer and are judged by
// [Options].Validator; WIT-SVIDs come from [Options].WITIssuer.
//
// # What it promises
//
// Readers load a pointer. They never wait for a lock or for the server, and what they get never
// changes under them. Each response replaces all that was there before, in one step (WAPI-10 to
// WAPI-12).
//
// Old before new, with one exception. A server that is gone, hangs, or sends what breaks a rule costs
// nothing: what was received stays until it expires, and a response with a fault is discarded as a
// whole (WAPI-14, WAPI-26). The exception is PermissionDenied, on a stream that runs or on the one
// that should follow it: the server takes back what it has sent, and readers get errors from that
// moment on (WAPI-17).
//
// Trust domains do not spoil each other. The bundle of a foreign trust domain that is damaged is
// skipped, and reported, and the one from before stays; all others are taken over. A bundle that
// claims to be a foreign one of our own trust domain is ignored: the own bundle comes with the
// identity. A bundle that is empty is a statement: nothing of that trust domain is trusted.
//
// A stream that had brought something is followed by the next at once (AMB-10), and then attempts come
// after a second at first and half a minute at most, with full jitter. Only a response that was good
// sets that back. InvalidArgument and Unimplemented are not repeated (WEP-14, WEP-17): Run ends with
// the error. The number of goroutines does not depend on how much there is to keep.
//
// A server answers a stream at once and then when something has changed. It makes each response once,
// however many callers it is for, asks again before each push who may have what (WAPI-20), and sends
// a caller that reads slowly the newest and not the history. A request without the header
// "workload.spiffe.io: true" is refused before anything else is looked at (WEP-6).
//
// # What it does not do
//
// It reads no environment variable and no file. It looks into no certificate revocation list: CRLs
// are handed on in DER. It verifies no token: see packages jwtsvid and witsvid. It does not judge peers: see
// package spiffe. The server does not find out what a process is, beyond its IDs: attestation is the
// program's. Named pipes of Windows are not in the standard and not in Go's standard library; a
// client can dial them by [ClientOptions].HTTPClient.
//
// The WIT profile is Incubating, and off on both sides until somebody opts in: a client with
// [NewWITClient], a server with [Options].WITIssuer (WAPI-2).
//
// # In a server of your own
//
// A Handler can be mounted on any http.Server that speaks HTTP/2 without TLS. Set its ConnContext to
// [unixsocket.ConnContext], or the peer is not known, and leave ReadTimeout and WriteTimeout at zero, as
// they would end the streams.
//
// # Limits
//
// A client takes messages of at most 64 MiB ([ClientOptions].MaxMessage), with 256 SVIDs, 10,000
// elements, and 1 MiB and 1,000 authorities for each bundle. A server takes requests of at most
// 256 KiB, with 64 audiences, which have to be there within 30 seconds, and has 10,000 streams
// ([Options].MaxStreams). Compressed messages are refused.
package workloadapi

import "time"

const (
	service        = "/SpiffeWorkloadAPI/" // without a package on the wire (AMB-7)
	securityHeader = "workload.spiffe.io"

	fetchX509SVID    = "FetchX509SVID"
	fetchX509Bundles = "FetchX509Bundles"
	fetchJWTSVID     = "FetchJWTSVID"
	fetchJWTBundles  = "FetchJWTBundles"
	validateJWTSVID  = "ValidateJWTSVID"
	fetchWITSVID     = "FetchWITSVID"
	fetchWITBundles  = "FetchWITBundles"
)

// Limits on what a client receives.
const (
	defaultMaxMessage = 64 << 20         // bytes of a message
	maxTokens         = 1 << 20          // bytes of an answer with tokens
	maxClaims         = 128 << 10        // bytes of an answer with claims, which grow in memory
	maxElements       = 10_000           // elements of a message: SVIDs, bundles and CRLs together
	maxIdentities     = 256              // SVIDs of a message
	maxNotes          = 100              // of what was skipped of a message
	maxBundleNotes    = 10               // of what was skipped of a bundle
	callTimeout       = 30 * time.Second // for a call that is not a stream
)

// Limits on what a server receives and does.
const (
	maxRequest       = 256 << 10        // bytes of a request
	requestTimeout   = 30 * time.Second // for a request to come, from its header to its end
	maxAudiences     = 64               // of a token
	maxHint          = 1024             // bytes (WAPI-25)
	maxStreams       = 10_000           // open at the same time, by default
	maxPerConnection = 1000             // requests at the same time
	maxEncodings     = 4 << 10          // identities in responses that are kept for their next callers
)
