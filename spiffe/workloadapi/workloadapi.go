// Package workloadapi is a client of the SPIFFE Workload API, the local endpoint from which a workload gets its
// identity without having a secret first. Package workloadserver is the server.
//
// Most programs need [Start], which waits for the identity:
//
//	src, err := workloadapi.Start(ctx, workloadapi.Config{Address: os.Getenv(workloadapi.SocketEnv)})
//	if err != nil {
//		return err // says why: no server answers, or the workload is not registered
//	}
//	defer src.Close()
//	endpoint, err := spiffetls.New(spiffetls.Config{Self: src, Peers: src, Allow: spiffe.AllowIDs(frontend)})
//
// Until [Source.Close], the [Source] has the current X.509-SVID and the current trust bundles. A program that serves
// before it has an identity uses [New], [Source.Run] and [Source.Ready] instead. A Source is also the source of a
// jwtsvid.Cache and, by sdssource.FromIdentity, of package sds for Envoy. With [Config].JWTBundles the bundles
// verify JWT-SVIDs of peers. A [Client] makes single calls and watches single streams.
//
// # What it promises
//
// Readers load a pointer: they wait neither for a lock nor for the server, and what they get never changes. Each
// response replaces all that was there before, in one step.
//
// Old before new, with one exception. While a server is gone, hangs or breaks the rules of the API, what was
// received stays until it expires. So does an identity that is valid while the server sends one that has expired or
// is not valid yet, which replaces none, and is taken over once it is valid; the log and the Report say so. A faulty
// response is discarded as a whole. It is also a fault if the extended key usages of a new certificate permit
// neither side of a connection, or one side where the certificate in force permits both. The exception is
// PermissionDenied, by which the server takes back what it sent: readers get errors from then on.
//
// Trust domains are independent. If the bundle of a foreign trust domain is damaged, it is skipped and reported, the
// previous one stays, and the other bundles are used. A federated bundle of the workload's own trust domain is
// ignored, because that bundle comes with the identity. An empty bundle means that nothing of that trust domain is
// trusted.
//
// When a stream that brought something ends, the next one starts at once. After that the waits between attempts
// grow, with jitter, up to 4 % of the life that the identities have left, and at most half a minute; 5 seconds
// before the first answer, after the identities have expired, and on a Unix socket. When a server answers one stream
// of a [Client], the others that wait try again at once, unless the server has named a time. So an outage of 45 % of
// a lifetime costs no identity, whenever it begins. InvalidArgument and Unimplemented are final: Run returns the
// error.
//
// # What it does not do
//
// It reads no environment variable and no file. It hands on certificate revocation lists in DER, unparsed. It
// verifies no token (see packages jwtsvid and witsvid) and no peer (see package spiffe).
//
// # Limits
//
// A client takes messages of at most 64 MiB, with 256 SVIDs, 10,000 elements, and 1 MiB and
// 1,000 authorities for each bundle. It refuses compressed messages.
package workloadapi

import "time"

// SocketEnv is the name of the environment variable in which an operator tells programs the address
// of the Workload API. This package reads no environment: a program uses the address that it was given
// explicitly, or else os.Getenv(workloadapi.SocketEnv).
const SocketEnv = "SPIFFE_ENDPOINT_SOCKET"

// Limits on what is received.
const (
	maxMessage     = 64 << 20         // bytes of a message
	maxTokens      = 1 << 20          // bytes of a response with tokens
	maxClaims      = 128 << 10        // bytes of a response with claims, which grow in memory
	maxElements    = 10_000           // elements of a message: SVIDs, bundles and CRLs together
	maxIdentities  = 256              // SVIDs of a message
	maxNotes       = 100              // of what was skipped of a message
	maxBundleNotes = 10               // of what was skipped of a bundle
	callTimeout    = 30 * time.Second // for a call that is not a stream
)
