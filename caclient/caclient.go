// Package caclient says what a certificate authority is to a program that needs certificates: the
// interface [CA], the rules of when to ask again ([Retryable]), and the test that an answer has to
// pass before anything uses it ([Check]).
//
// The packages below this one are the CAs; caclient/local is the one in this process, and caclient/caclienttest has CAs for
// tests, with faults. Package
// secretcache takes any of them as it is, and repeats and checks by itself. A program that asks a CA
// without it puts [New] around the CA.
//
// # What it promises
//
// A chain that comes out of [New] has the public key of the request and the ID that the request names, or
// what Options.Expect says, is valid now, leads to a root of that trust domain, and carries no root and no certificate
// twice. A call ends when its context does.
//
// # What it does not do
//
// It keeps no identity and renews nothing: see package secretcache. It does not authenticate
// the caller to the CA: the package of each CA does.
package caclient

import (
	"context"
	"crypto/x509"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// CA is a certificate authority as its client sees it. Implementations are safe for concurrent use,
// return soon after ctx is done, and report what they know about a failure with an [*Error].
type CA interface {
	// Sign asks for a certificate for the public key of csr, valid for lifetime from now; 0 means
	// the CA's default, and the CA may have a limit. It returns the chain to present: leaf first,
	// then intermediates, no roots. Which ID is certified is the CA's decision, from what it knows about
	// the caller; what csr asks for may be compared with that.
	Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error)

	// FetchBundles returns the current trust bundles: that of the CA's own trust domain, and those
	// of the domains that it federates with. It never returns a nil set without an error.
	FetchBundles(ctx context.Context) (*spiffe.BundleSet, error)
}
