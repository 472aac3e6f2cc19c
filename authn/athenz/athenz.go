// Package athenz gives the pods of a Kubernetes cluster the identities of Athenz, and knows callers by them.
//
// The kubelet is the source of truth: an [Agent] on each node looks up the pod that asks, has an identity document signed
// for it, and registers it with ZTS, Athenz's certificate authority. ZTS asks the [Provider], which verifies the document and
// compares it with the live pod at the API server. No node has a key that signs documents: a [Signer] with its handler
// ([NewSigningHandler]) has them, and the agent asks it with a [SigningClient].
//
//	agent, err := athenz.NewAgent(athenz.AgentConfig{
//		Pods: kubelet, Signer: signing, CA: zts, Volumes: volumes,
//		Provider: provider, Suffix: "svc.cluster.local", TrustDomain: td,
//	})
//	…
//	server := &unixsocket.Server{Path: "/var/athenz/agent/agent.sock", SocketMode: 0o666, Handler: agent}
//
// A pod takes its identity with an [AgentClient]. A [Sidecar] keeps it fresh, and [IdentityFiles] keep it in files.
//
// # What it promises
//
// Documents and keys are in memory only, and never in a log or an error. A document is used once, and is worth nothing
// when the pod has ended, is about to be deleted, or has another account or address than it says.
//
// A certificate that was superseded is not shown to ZTS again, which would revoke the instance for good.
//
// # Rights in Kubernetes
//
// The Provider needs the right to get pods, in all namespaces:
//
//	rules:
//	- {apiGroups: [""], resources: [pods], verbs: [get]}
//
// # What it does not do
//
// It does not speak to ZTS: package caclient/athenz does, for an agent as for a program that registers itself. It does not
// mount what pods see: [Volumes] has the files that a driver of FlexVolumes keeps.
package athenz

import (
	"crypto/sha256"
	"errors"
	"strings"
)

var (
	// ErrDocument says that an identity document, or what one is to be made of, is not valid.
	ErrDocument = errors.New("invalid identity document")

	// ErrNoPod says that there is no pod of this name.
	ErrNoPod = errors.New("there is no such pod")

	// ErrServiceToken says that a service token is not valid.
	ErrServiceToken = errors.New("invalid service token")
)

// useOf returns what a document is known by that was used. The signature is no part of it, as ECDSA has two for each.
func useOf(text string) [32]byte {
	return sha256.Sum256([]byte(text[:max(strings.LastIndexByte(text, '.'), 0)]))
}
