// Package workloadapi is a client of the SPIFFE Workload API, the local endpoint that gives a workload its identity
// without a prior secret. Package workloadserver is the server.
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
// Until [Source.Close], the [Source] keeps the X.509-SVID and the trust bundles current. A program that serves before
// it has an identity uses [New], [Source.Run] and [Source.Ready] instead. A Source also feeds a jwtsvid.Cache and,
// through sdssource.FromIdentity, package sds for Envoy. With [Config].JWTBundles the bundles verify JWT-SVIDs of
// peers. A [Client] makes single calls and watches single streams.
//
// # What it promises
//
// Readers load a pointer: they never wait for a lock or for the server, and the values they get never change. Each
// response replaces all earlier state in one step.
//
// A failure never replaces good state, with one exception. While a server is gone, hangs or breaks the rules of the
// API, the last good state stays until it expires. If the server sends an identity that has expired or is not valid
// yet, the valid one stays; a new identity is adopted once it becomes valid. The log and the Report say so. A faulty
// response is discarded entirely. A response is also faulty if the extended key usages of a new certificate permit no
// side of a connection, or less than those of the certificate in force. The exception is
// PermissionDenied, with which the server withdraws everything it sent: readers get errors from then on.
//
// Trust domains are independent. If the bundle of a foreign trust domain is damaged, it is skipped and reported, the
// previous one stays, and the other bundles are used. A federated bundle of the workload's own trust domain is
// ignored, because its bundle comes with the identity. An empty bundle means that nothing from that trust domain is
// trusted.
//
// When a stream that delivered a response ends, the next one starts at once. After that the waits between attempts
// grow, with jitter, up to 5 seconds and up to 4 % of the remaining life of the identities. So an outage of 45 % of a
// lifetime costs no identity, whenever it begins. If nothing listens at a Unix socket, the wait ends within a quarter
// of a second once something does. If the server names a time, the client obeys. InvalidArgument and Unimplemented are
// final: Run returns the error.
//
// # What it does not do
//
// It reads no environment variable and no file. It passes on certificate revocation lists in DER, unparsed. It does
// not verify tokens (see packages jwtsvid and witsvid) or peers (see package spiffe).
//
// # Limits
//
// A client accepts messages of at most 64 MiB, with 512 SVIDs, 10,000 elements, and 1 MiB and 1,000 authorities for
// each bundle. It refuses compressed messages.
package workloadapi

import "time"

// SocketEnv is the name of the environment variable in which an operator tells programs the address of the Workload
// API. This package does not read it: the program passes an explicitly configured address, or else
// os.Getenv(workloadapi.SocketEnv).
const SocketEnv = "SPIFFE_ENDPOINT_SOCKET"

// Limits on received messages.
const (
	maxMessage     = 64 << 20         // bytes of a message
	maxTokens      = 2 << 20          // bytes of a response with tokens: 256 of ML-DSA-65 have 1.2 MB
	maxClaims      = 128 << 10        // bytes of a response with claims, which grow in memory
	maxElements    = 10_000           // elements of a message: SVIDs, bundles and CRLs together
	maxIdentities  = 512              // SVIDs of a message: 256, each with an alternative
	maxNotes       = 100              // about skipped parts of a message
	maxBundleNotes = 10               // about skipped parts of a bundle
	callTimeout    = 30 * time.Second // for a call that is not a stream
)
