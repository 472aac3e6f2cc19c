// Package athenz authenticates pods of a Kubernetes cluster, and other callers, by their Athenz credentials.
//
// An identity document names the pod that asks for a certificate. The signing service, [NewSigner] with
// [NewSigningHandler], holds the private keys, so that no node has one; [NewSigningClient] is its client. ZTS,
// Athenz's certificate authority, sends the document to the callback of [NewProvider], which verifies it with a
// [Verifier] and compares it with the live pod:
//
//	zts, err := athenz.ClientCertificate(td, roots, "zts.example.cloud")
//	…
//	provider, err := athenz.NewProvider(athenz.ProviderConfig{
//		Service: service, ZTS: zts, Verifier: verifier, Pods: pods, Suffix: "svc.cluster.local",
//	})
//
// [ServiceTokenAuthenticator] proves a caller by a service token, [ClientCertificate] by a certificate.
//
// The agent of a node is package examples/athenz-agent/nodeagent, the client in a pod examples/athenz-sia/sidecar.
//
// # What it promises
//
// Documents, tokens and keys stay in memory, and out of logs and errors. A document can be used once. It is worthless
// when the pod has ended, is about to be deleted, or has another account or address than the document says.
//
// # Rights in Kubernetes
//
// The provider needs the right to get pods, in all namespaces:
//
//	rules:
//	- {apiGroups: [""], resources: [pods], verbs: [get]}
//
// # What it does not do
//
// It is not a ZTS: ZTS decides which provider may vouch for whom, and what it issues. It does not replace the
// Kubernetes provider inside ZTS, which trusts a service account token without looking at a pod. Its answer sets only
// the lifetime of certificates; ZTS sets their use and the unit of their subject. It ignores cloud accounts in a
// request, because the pod decides.
//
// It fetches only public keys from ZTS. Package caclient/athenz obtains certificates: for an agent, for a program
// that registers itself, and for a program with a key of its own, such as the provider's.
//
// The provider compares a document with the pod and its service account, not with a Kubernetes Service. The first
// design mentions both, but a Service selects pods by labels, which the creator of a pod chooses, and its address
// belongs to no pod. So the provider needs no right to read Services.
package athenz

import "errors"

var (
	// ErrDocument means that an identity document, or the subject of one, is not valid.
	ErrDocument = errors.New("invalid identity document")

	// ErrNoPod means that there is no pod with this name.
	ErrNoPod = errors.New("there is no such pod")

	// ErrServiceToken means that a service token is not valid.
	ErrServiceToken = errors.New("invalid service token")
)
