// Package athenz knows pods of a Kubernetes cluster, and other callers, by what Athenz says of them.
//
// An identity document says which pod asks for a certificate. [NewSigner] and the handler of
// [NewSigningHandler] make the signing service, which has the private keys, so that no node has one;
// [NewSigningClient] asks it. ZTS, Athenz's certificate authority, shows the document to the callback of
// [NewProvider], which verifies it with a [Verifier] and compares it with the live pod:
//
//	zts, err := athenz.ClientCertificate(td, roots, "zts.example.cloud")
//	…
//	provider, err := athenz.NewProvider(athenz.ProviderConfig{
//		Service: service, ZTS: zts, Verifier: verifier, Pods: pods, Suffix: "svc.cluster.local",
//	})
//
// Callers are proven by a service token, with [ServiceTokenAuthenticator], or by a certificate, with
// [ClientCertificate].
//
// The agent of a node is package examples/athenz-agent/nodeagent, and the client in a pod examples/athenz-sia/sidecar.
//
// # What it promises
//
// Documents, tokens and keys are in memory only, and never in a log or an error. A document is used once, and
// is worth nothing once the pod has ended, is about to be deleted, or has another account or address than the
// document says.
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
// It is no ZTS: which provider may vouch for whom, and what is issued, is for ZTS to say. It is not the
// provider for Kubernetes inside ZTS either, which believes a token of a service account and looks at no pod.
// Its answer sets the lifetime of certificates alone: their use and the unit of their subject stay as ZTS has
// them, and the accounts of clouds in a question are not looked at, as the pod decides.
//
// It asks ZTS for public keys and for nothing else: package caclient/athenz obtains certificates, for an agent,
// for a program that registers itself, and for one that owns a key, as the provider's own program may.
//
// The provider compares a document with the pod and its service account, and not with a Service of Kubernetes,
// though the first design speaks of pod and service information: a Service selects pods by labels, which a user
// that may make a pod chooses, and has an address of its own, which no pod has. It needs no right to read
// Services.
package athenz

import "errors"

var (
	// ErrDocument says that an identity document, or the subject of one, is not valid.
	ErrDocument = errors.New("invalid identity document")

	// ErrNoPod says that there is no pod with this name.
	ErrNoPod = errors.New("there is no such pod")

	// ErrServiceToken says that a service token is not valid.
	ErrServiceToken = errors.New("invalid service token")
)
