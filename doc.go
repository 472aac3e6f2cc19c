// Package svidkit is the map of a library for SPIFFE workload identity; there is no code in it.
//
// # Where to start
//
// A service takes its identity from an agent on its machine with [workloadapi], from files with [filesource], or from
// a CA with [caclient] and [secretcache], and gives it to [spiffetls] to serve and to dial, or to grpc-go with
// spiffegrpc. An agent or a certificate authority embeds [secretcache], [sds], [workloadserver] and [pki/ca]. A test
// takes [spiffetest]. The types that all of them share are in [spiffe].
//
// To read in this order: [spiffe] for the words, [workloadapi] and [spiffetls] for a service; then [secretcache],
// [caclient] and [sds] for an agent; [istioagent] is a complete one; then [pki/ca] for a CA. To see them at work:
//
//	go run ./examples/quickstart
//
// # The packages
//
// The core, whose names are stable:
//
//	spiffe                  IDs, trust domains, bundles, X.509-SVIDs, policies, and the Verifier
//	spiffe/spiffetls        tls.Configs that read their source at every handshake
//	spiffe/workloadapi      the Workload API for a workload: a client that is a source
//	pki                     keys, CSRs, the SAN extension, PEM, certificates, key-cert bundles
//	caclient                one interface to any CA
//	secretcache             the SecretManager: obtain identities, keep them fresh, notify
//	sds                     Envoy's Secret Discovery Service, v3
//
// For services:
//
//	spiffe/jwtsvid          JWT-SVIDs: issue, validate, keep fresh, send and receive
//	spiffe/federation       bundle endpoints: fetch, watch, cache and serve
//	spiffe/filesource       identities and bundles from files that another program renews
//	spiffe/filesink         an identity and bundles written to files, and kept current
//	spiffe/source           sources made of others: the last good one, several merged
//	spiffe/health           readiness, liveness and metrics of a service
//	spiffe/report           what a part says of its state, for health and for status pages
//	spiffe/spiffegrpc       credentials and interceptors for grpc-go; a module of its own
//	spiffe/gospiffe         adapters to and from go-spiffe; a module of its own
//	spiffe/exp/broker       client and server of the SPIFFE Broker API (experimental)
//	spiffe/exp/witsvid      WIT-SVIDs and their proofs of possession (experimental)
//	spiffe/exp/broker       the Broker API, for a proxy or agent that speaks for workloads (experimental)
//
// For agents and Envoy:
//
//	spiffe/workloadserver   the Workload API for an agent: a handler over any source
//	sds/workloadagent       an agent for the processes of a machine, by one file
//	sds/sdssource           what sds serves: from any source, from files, by name from several
//	sds/xdsproxy            Envoy's Aggregated Discovery Service, forwarded to a control plane
//	sds/kubesecrets         Secrets of a Kubernetes API server for gateways
//	sds/istioagent          Istio's agent for identity, configured by its variables
//
// For CAs and their clients:
//
//	pki/ca                  a certificate authority: stores, rotation, JWT-SVIDs, audit, limits
//	pki/ca/auditlog         a durable record of what it signed
//	pki/ca/kubesecret       its store in a Kubernetes Secret
//	pki/ca/sqlstore         its store in a database
//	pki/ra                  a registration authority over the signers of Kubernetes
//	pki/caserver            a server for a CA
//	pki/caserver/istioca    Istio's certificate API
//	pki/caserver/linkerd    Linkerd's certificate API
//	pki/caserver/podcert    a signer of Kubernetes for volumes of pods
//	caclient/local          a CA in the same process
//	caclient/istioca        a CA with Istio's API
//	caclient/stepca         step-ca
//	caclient/vault          the PKI engine of Vault and OpenBao
//	caclient/googlecas      Google's Certificate Authority Service
//
// For callers, and for what proves a program:
//
//	authn                   callers and authenticators, by client certificates and by all that follows
//	authn/kube              by tokens of Kubernetes; the workloads of a node
//	authn/jwt               by tokens of OpenID Connect issuers, and by JWT-SVIDs; clients of OAuth
//	authn/athenz            by identity documents, service tokens and certificates of Athenz
//	spiffe/unixsocket       by the user of a Unix socket: a server that knows its peers
//	authn/tokensource       tokens by which a program proves itself
//
// For Linkerd and Athenz:
//
//	caclient/linkerd        Linkerd's identity service
//	pki/linkerdname         the names of Linkerd's identities
//	caclient/athenz         ZTS, the CA of Athenz
//	authn/athenz/athenzname the names of Athenz
//
// For tests:
//
//	spiffe/spiffetest                  a CA and identities, good and broken
//	spiffe/spiffetest/workloadapitest  a Workload API with faults
//	spiffe/spiffetest/federationtest   a bundle endpoint with faults
//	caclient/caclienttest              Istio's and Linkerd's CA with faults, and the suite that every client passes
//	caclient/caclienttest/custodiantest  the suites that every custodian of keys and every sealer passes
//	sds/sdstest                        a conformance suite and a model test for SDS servers
//
// Packages are independent: each can be imported alone, siblings do not import each other, and no two of the
// directories spiffe, pki, caclient, secretcache, sds and authn import each other. Packages meet in the types of
// spiffe and pki, and in interfaces of one to three methods that the importing package declares. Three put others
// together for one system: istioagent, workloadagent and podcert. These and the kits for tests are best effort, and
// none enters without a real peer in CI, or a stated reason why there is none; RELEASING.md says what each tier
// promises. examples/PACKAGES.md says what each package links and weighs.
//
// # The programs
//
// The directory examples has programs. quickstart, service and grpc are there to be copied: they are short and import
// public packages alone. ca, agent, workload-agent, linkerd-proxy, athenz-agent, athenz-provider, athenz-sia and svid
// are products for operators, with packages of their own and of internal; their flags, variables and files are what
// stays.
//
// # The security model
//
// Proof is a type. An ID that was parsed and a peer that was verified are different types, and only a Verifier makes
// the second. Policies are required arguments, and the default is no.
//
// One immutable snapshot. An identity, its key and the trust bundles that go with it are published together as one
// value that never changes. Readers never lock, never block, and never see a key with another certificate's chain.
//
// Old before new. A credential that is still valid is never dropped because a renewal failed. What comes from a CA is
// verified before it replaces what works. A failure changes the time of the next attempt and nothing else.
//
// A CA signs what its caller may have. It takes the public key from a CSR, and nothing else.
//
// A trust domain is verified with its own authorities and no others. Roots of several domains are never put into one
// pool, except where a program asks for it with sdssource.FromIdentityWithAllRoots.
//
// Keys do not print: every type that holds one has String, GoString and LogValue.
//
// # One of each mechanism
//
// Every server is an [net/http.Handler] and every client takes an [net/http.Client]. The gRPC wire protocol is spoken
// over net/http (internal/grpchttp), and its messages are read and written field by field (internal/protofield), so
// that nothing here links grpc-go, generated code, Envoy's control plane types, or a Kubernetes or cloud SDK. What
// has to stay fresh is kept so by internal/renew, files are followed by internal/files/follow, kept over restarts by
// internal/files/store, sets of files that belong together are written by internal/files/fileset, sources start and
// stop by internal/lifecycle, metrics are written by internal/metrics, tokens share internal/tokens/token, and Unix
// sockets are served by spiffe/unixsocket. What clients hold is bounded by internal/limit, what they can cause at
// will is logged by internal/ratelog, and directories and files that other users must not change are opened by
// internal/files/private. A package that needs a second one extends the first.
//
// # Dependencies
//
//   - github.com/go-jose/go-jose/v4: signs tokens, for jwtsvid, witsvid and authn/athenz, and for
//     pki/ca, which issues JWT-SVIDs.
//   - google.golang.org/protobuf: how fields are encoded (protowire), for sds, workloadapi, workloadserver,
//     the certificate APIs and caclient/istioca. Tests have generated messages as judges.
//   - golang.org/x/crypto: cryptobyte, which builds and reads ASN.1 strictly, for pki and pki/ra.
//   - github.com/fsnotify/fsnotify: notifications about files, for pki/ca, filesource and sds/sdssource; a slow
//     poll stands behind them.
//   - go.yaml.in/yaml/v3: reads YAML, for sds/istioagent, as annotations have the configuration of a proxy in it.
//     testify required it before.
//   - github.com/stretchr/testify: assertions; only tests reach it.
//   - github.com/rogpeppe/go-internal: testscript, which runs the scripts of an operator's day for examples/ca and
//     examples/svid; only tests reach it.
//
// Packages spiffe, spiffetls, federation, health and authn take the standard library alone.
//
// [secretcache]: https://pkg.go.dev/github.com/svidkit/svidkit/secretcache
// [caclient]: https://pkg.go.dev/github.com/svidkit/svidkit/caclient
// [workloadapi]: https://pkg.go.dev/github.com/svidkit/svidkit/spiffe/workloadapi
// [filesource]: https://pkg.go.dev/github.com/svidkit/svidkit/spiffe/filesource
// [workloadserver]: https://pkg.go.dev/github.com/svidkit/svidkit/spiffe/workloadserver
// [spiffetls]: https://pkg.go.dev/github.com/svidkit/svidkit/spiffe/spiffetls
// [spiffetest]: https://pkg.go.dev/github.com/svidkit/svidkit/spiffe/spiffetest
// [sds]: https://pkg.go.dev/github.com/svidkit/svidkit/sds
// [istioagent]: https://pkg.go.dev/github.com/svidkit/svidkit/sds/istioagent
// [pki/ca]: https://pkg.go.dev/github.com/svidkit/svidkit/pki/ca
// [spiffe]: https://pkg.go.dev/github.com/svidkit/svidkit/spiffe
package svidkit
