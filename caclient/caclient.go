// Package caclient declares [CA], a certificate authority as its client sees it, and the checks that an answer must
// pass before a program uses it.
//
// The packages below this one are clients of certificate authorities; caclient/local is for an authority in this
// process. Package secretcache accepts any of them, and itself repeats calls and checks answers. A program that calls
// a CA directly wraps it with [New], and repeats a failed call if the method Retryable of the [*Error] says so.
//
// # What it promises
//
// A chain from a CA wrapped with [New] has the public key of the request, and the ID that the request names or the
// names that Options.Expect requires. It is valid now, leads to a root of that trust domain, permits the role of the
// Options (X509-SVID section 4.4), and contains no root and no duplicate. A call ends when its context does.
//
// # What it does not do
//
// It keeps no identity and renews nothing: see package secretcache. The package of each CA authenticates the caller
// to it.
//
// For tests, caclient/caclienttest has CAs that fail in every way, and a suite for clients.
package caclient

import (
	"context"
	"crypto/x509"
	"iter"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// CA is a certificate authority as its client sees it. Implementations must be safe for concurrent use, return soon
// after ctx is done, and report a failure with an [*Error], or another error that says when to ask again: see
// [spiffe.ErrNotReady]. A failure that does not say is assumed to be temporary.
type CA interface {
	// Sign requests a certificate for the public key of csr, valid for lifetime from now; 0 means the CA's default,
	// and the CA may have a limit. It returns the chain to present: leaf first, then intermediates, no roots. The CA
	// chooses the ID that it certifies from its knowledge of the caller, and may compare it with csr.
	Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error)

	// FetchBundles returns the current trust bundles: the bundle of the CA's own trust domain, and the bundles of the
	// domains that it federates with. It never returns a nil set without an error.
	FetchBundles(ctx context.Context) (*spiffe.BundleSet, error)
}

// BundleWatcher is a [CA] that announces new bundles, as all CAs below this package do. Package secretcache then does
// not poll.
type BundleWatcher interface {
	// WatchBundles yields the current bundles first, then each newer set, until ctx is done. If it ends earlier, or
	// after an error, the caller watches again.
	WatchBundles(ctx context.Context) iter.Seq2[*spiffe.BundleSet, error]
}
