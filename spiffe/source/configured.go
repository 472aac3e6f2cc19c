package source

import (
	"bytes"
	"crypto/x509"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
)

// Roots are X.509 authorities of trust domains, as the configuration of a mesh lists them.
type Roots struct {
	// PEM has the certificates. If it is empty, this entry gives the trust domains an empty bundle.
	PEM []byte

	// TrustDomains are those that the roots vouch for; at least one.
	TrustDomains []spiffe.TrustDomain
}

// Configured is a [Federated] source of roots that the program sets, such as those in the configuration of a mesh. The
// zero Configured has no bundle and is ready to use. It must not be copied. Its methods are safe for concurrent use.
type Configured struct {
	mu   sync.Mutex // of Set
	set  atomic.Pointer[spiffe.BundleSet]
	news renew.Signal
}

// Set replaces all roots by those in list. A trust domain of several entries has the roots of all of them, each once.
// If an entry is bad, nothing changes, and the error says which. An empty list takes all bundles away. list is not
// kept.
func (c *Configured) Set(list []Roots) error {
	roots := map[spiffe.TrustDomain][]*x509.Certificate{}
	for i, entry := range list {
		if len(entry.TrustDomains) == 0 {
			return fmt.Errorf("source: configured: entry %d names no trust domain; it must say for which its roots vouch", i+1)
		}
		for _, td := range entry.TrustDomains {
			all := roots[td]
			if len(bytes.TrimSpace(entry.PEM)) > 0 {
				b, err := spiffe.ParseBundlePEM(td, entry.PEM)
				if err != nil {
					return fmt.Errorf("source: configured: entry %d: %w", i+1, err)
				}
				all = slices.AppendSeq(all, b.X509Authorities())
			}
			roots[td] = all
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.Bundles()
	var bundles []*spiffe.Bundle
	for td, certs := range roots {
		b, err := spiffe.NewBundle(td, spiffe.BundleContents{X509Authorities: certchain.Set(certs)})
		if err != nil {
			return fmt.Errorf("source: configured: %w", err)
		}
		bundles = append(bundles, known(before, b))
	}
	set, _ := spiffe.NewBundleSet(bundles...) // fails for a nil or a second bundle only
	if !set.Equal(before) {
		c.set.Store(set)
		c.news.Notify()
	}
	return nil
}

// known returns the bundle in set that is equal to b, or b.
func known(set *spiffe.BundleSet, b *spiffe.Bundle) *spiffe.Bundle {
	if old, err := set.Bundle(b.TrustDomain()); err == nil && old.Equal(b) {
		return old
	}
	return b
}

// Bundles returns what was set last. It is the same until it changes.
func (c *Configured) Bundles() *spiffe.BundleSet {
	if set := c.set.Load(); set != nil {
		return set
	}
	none, _ := spiffe.NewBundleSet()
	c.set.CompareAndSwap(nil, none)
	return c.set.Load()
}

// Bundle returns the bundle of td. The error for an unknown one wraps [spiffe.ErrUnknownTrustDomain].
func (c *Configured) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return c.Bundles().Bundle(td)
}

// Changed returns a channel that is closed when a bundle changes.
func (c *Configured) Changed() <-chan struct{} { return c.news.Changed() }
