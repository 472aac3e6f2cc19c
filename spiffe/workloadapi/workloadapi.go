// Package workloadapi is a client of the SPIFFE Workload API: the local endpoint at which a workload gets
// its identity, without a secret of its own to ask with. Package workloadserver is the other side.
//
// Most programs need [Start], which waits for the identity:
//
//	src, err := workloadapi.Start(ctx, workloadapi.Config{Address: os.Getenv(workloadapi.SocketEnv)})
//	if err != nil {
//		return err // says why: no server answers, or the workload is not registered
//	}
//	defer src.Close()
//	srv := &http.Server{Addr: ":8443", Handler: handler}
//	err = spiffetls.ConfigureServer(srv, src, src, spiffe.AllowIDs(frontend), nil)
//
// From then on the [Source] has the current X.509-SVID and the current trust bundles, until [Source.Close]. A program that
// serves before it has an identity, or that has a group for what it runs, takes [New], [Source.Run] and [Source.Ready]
// instead. A Source has the methods for readers of a *secretcache.Manager, so a program can take its
// identity from an agent or from a CA of its own without another change. It is also a source of JWT-SVIDs:
//
//	tokens, err := jwtsvid.NewCache(src, nil)
//
// A workload that has several identities gets the others with [Source.Pick]. To serve the identities of an agent to Envoy, give the Source to package sds.
//
// With [Config].JWTBundles its bundles verify the JWT-SVIDs of peers. A [Client] alone makes single calls and
// watches single streams.
//
// # What it promises
//
// Readers load a pointer. They never wait for a lock or for the server, and what they get never
// changes. Each response replaces all that was there before, in one step.
//
// Old before new, with one exception. A server that is gone, hangs, or breaks the rules of the API costs
// nothing: what was received stays until it expires, and a response with a fault is discarded as a
// whole. A fault is also a certificate whose extended key usages permit neither side of a connection, or one
// side while the one in force permits both. The exception is PermissionDenied, on a stream or on the one that follows it: the server takes back
// what it has sent, and readers get errors from that moment on (WAPI-17).
//
// Trust domains are independent. The bundle of a foreign trust domain that is damaged is skipped and
// reported, and the one from before stays; all others are taken over. A federated bundle of the workload's
// own trust domain is ignored, because that bundle comes with the identity. A bundle that is empty is a
// statement: nothing of that trust domain is trusted.
//
// A stream that brought something is followed by the next at once, and then by attempts whose waits grow, with
// jitter, up to 4 % of the life that the identities have left. They never grow beyond half a minute, nor beyond 5
// seconds before the first answer, after the identities have ended and on a Unix socket. When one stream of a
// [Client] is answered, the others that wait for another attempt do not wait on, unless the server has named a
// time. So an outage of 45 % of a lifetime costs no identity, whenever it begins.
// InvalidArgument and Unimplemented are not repeated: Run ends with the error. The number of
// goroutines does not depend on how much there is to keep.
//
// # What it does not do
//
// It reads no environment variable and no file. It parses no certificate revocation list: CRLs are
// handed on in DER. It verifies no token (see packages jwtsvid and witsvid) and no peer (see package
// spiffe).
//
// # Limits
//
// A client takes messages of at most 64 MiB ([ClientOptions].MaxMessage), with 256 SVIDs, 10,000
// elements, and 1 MiB and 1,000 authorities for each bundle. Compressed messages are refused.
package workloadapi

import "time"

// SocketEnv is the name of the environment variable in which an operator tells programs the address
// of the Workload API. This package reads no environment: a program uses the address that it was given
// explicitly, or else os.Getenv(workloadapi.SocketEnv).
const SocketEnv = "SPIFFE_ENDPOINT_SOCKET"

// Limits on what is received.
const (
	defaultMaxMessage = 64 << 20         // bytes of a message
	maxTokens         = 1 << 20          // bytes of a response with tokens
	maxClaims         = 128 << 10        // bytes of a response with claims, which grow in memory
	maxElements       = 10_000           // elements of a message: SVIDs, bundles and CRLs together
	maxIdentities     = 256              // SVIDs of a message
	maxNotes          = 100              // of what was skipped of a message
	maxBundleNotes    = 10               // of what was skipped of a bundle
	callTimeout       = 30 * time.Second // for a call that is not a stream
)
