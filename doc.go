// Package svidkit is the map of a library for SPIFFE workload identity; there is no code in it.
//
// # Where to start
//
// A service that needs an identity takes it from an agent on its machine with [workloadapi], or keeps
// it fresh itself with [secretcache] and a CA from [caclient], and gives it to [spiffetls] to serve
// and to dial. A platform that builds an agent or a certificate authority
// embeds [secretcache], [sds] and [pki/ca]. A test takes [spiffetest]. Everybody meets in the words
// of [spiffe]. To see all of it at work:
//
//	go run ./examples/quickstart
//
// # The packages
//
//	spiffe              IDs, trust domains, bundles, X.509-SVIDs, policies, and the Verifier
//	spiffe/spiffetls    tls.Configs that read their source at every handshake
//	spiffe/jwtsvid      JWT-SVIDs: issue, validate, keep fresh, send and receive
//	spiffe/witsvid      WIT-SVIDs and their proofs of possession (Incubating, opt-in)
//	spiffe/federation   bundle endpoints: fetch, watch, cache and serve
//	spiffe/workloadapi  the Workload API: a client that is a source, and a server over any source
//	spiffe/spiffetest   a CA and identities for tests, good and broken, and endpoints with faults
//	pki                 keys, CSRs, the SAN extension, PEM, certificate building, CRLs
//	pki/ca              a certificate authority: stores, rotation, JWT-SVIDs, audit, limits
//	pki/ca/auditlog     a durable record of what it signed
//	pki/ca/kubesecret   its store in a Kubernetes Secret
//	pki/ra              a registration authority: Kubernetes' own signers
//	pki/caserver        istioca and linkerd, the certificate services of the two
//	caclient            one interface to any CA; local asks pki/ca, istioca asks Istio's service
//	secretcache         the SecretManager: obtain identities, keep them fresh, notify
//	sds                 Envoy's Secret Discovery Service, v3
//	authn               who is calling; authn/kube knows the tokens of Kubernetes
//	examples            programs that put them together
//
// Packages are independent: siblings do not import each other, and each can be imported alone.
// They meet in the types of spiffe and pki and in interfaces of one to three methods that the
// caller of them declares. A test (internal/deptest) holds what each package may import, and why.
//
// # The security model
//
// Proof is a type. An ID that was parsed and a peer that was verified are different types, and
// only a Verifier makes the second. Policies are required arguments, and the default is no.
//
// One immutable snapshot. An identity, its key and the trust bundles that go with it are published
// together as one value that never changes. Readers never lock, never block, and never see a key
// with another certificate's chain.
//
// Old before new. A credential that is still valid is never dropped because a renewal failed.
// What comes from a CA is verified before it replaces what works. A failure changes the time of
// the next attempt and nothing else.
//
// A CA signs what its caller may have. It takes the public key from a CSR, and nothing else.
//
// A trust domain is verified with its own authorities and no others. Roots of several domains are
// never put into one pool.
//
// Keys do not print: every type that holds one has String, GoString and LogValue.
//
// # One transport
//
// Every server is an [net/http.Handler] and every client takes an [net/http.Client]. The gRPC wire
// protocol is spoken over net/http, so that nothing here links grpc-go, Envoy's control plane
// types, or a Kubernetes or cloud SDK. Wire messages are generated from minimal files of our own
// under names of our own, and do not clash with the canonical ones in one program.
//
// # Dependencies
//
//   - connectrpc.com/connect: the gRPC protocol over net/http, for sds, pki/caserver and caclient/istioca.
//   - google.golang.org/protobuf: the wire messages of the same packages; spiffe/workloadapi takes only the
//     encoding of fields (protowire) from it, and speaks gRPC by itself, to keep workloads small.
//   - golang.org/x/crypto: cryptobyte, which builds and reads ASN.1 strictly, for pki and pki/ra.
//   - github.com/go-jose/go-jose/v4: an independent judge of tokens; only the tests of jwtsvid reach it.
//   - github.com/stretchr/testify: assertions; only tests reach it.
//
// Packages spiffe, spiffetls, jwtsvid, witsvid and federation take the standard library alone.
//
// [secretcache]: https://pkg.go.dev/github.com/svidkit/svidkit/secretcache
// [caclient]: https://pkg.go.dev/github.com/svidkit/svidkit/caclient
// [workloadapi]: https://pkg.go.dev/github.com/svidkit/svidkit/spiffe/workloadapi
// [spiffetls]: https://pkg.go.dev/github.com/svidkit/svidkit/spiffe/spiffetls
// [spiffetest]: https://pkg.go.dev/github.com/svidkit/svidkit/spiffe/spiffetest
// [sds]: https://pkg.go.dev/github.com/svidkit/svidkit/sds
// [pki/ca]: https://pkg.go.dev/github.com/svidkit/svidkit/pki/ca
// [spiffe]: https://pkg.go.dev/github.com/svidkit/svidkit/spiffe
package svidkit
