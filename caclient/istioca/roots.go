package istioca

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

const (
	maxFile = 1 << 20 // bytes
	poll    = 5 * time.Minute
)

// roots is what is known of the roots. Its methods may be called at the same time.
type roots struct {
	td spiffe.TrustDomain

	mu       sync.Mutex
	known    []known // in the order in which they were first seen
	source   *spiffe.Bundle
	lifetime time.Duration // the longest of our own certificates
	last     *spiffe.Bundle
	changed  chan struct{} // closed when last is replaced
}

// known is one root. It is in the bundle for as long as one of the reasons holds.
type known struct {
	cert   *x509.Certificate
	source bool      // Options.Roots or Options.RootsFile have it
	newest bool      // it came with the newest certificate
	until  time.Time // it came with an older one, and peers may have certificates of it until then
}

func contains(certs []*x509.Certificate, c *x509.Certificate) bool {
	return slices.ContainsFunc(certs, func(o *x509.Certificate) bool { return bytes.Equal(o.Raw, c.Raw) })
}

// find returns the index of c in known, after adding it if it is not there.
func (r *roots) find(c *x509.Certificate) int {
	i := slices.IndexFunc(r.known, func(k known) bool { return bytes.Equal(k.cert.Raw, c.Raw) })
	if i < 0 {
		i = len(r.known)
		r.known = append(r.known, known{cert: c})
	}
	return i
}

// learn takes notice of the roots that came with leaf.
func (r *roots) learn(certs []*x509.Certificate, leaf *x509.Certificate) error {
	// What is wrong with them is found before anything is changed.
	if _, err := spiffe.NewBundle(r.td, spiffe.BundleContents{X509Authorities: certs}); err != nil {
		return fmt.Errorf("roots: %w", err)
	}
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lifetime = max(r.lifetime, leaf.NotAfter.Sub(now))
	for _, c := range certs {
		r.known[r.find(c)].newest = true
	}
	for i := range r.known {
		if k := &r.known[i]; k.newest && !contains(certs, k.cert) {
			k.newest = false
			k.until = now.Add(r.lifetime)
		}
	}
	_, err := r.update(now)
	return err
}

// take takes notice of what the source has.
func (r *roots) take(b *spiffe.Bundle) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.source = b
	certs := slices.Collect(b.X509Authorities())
	r.known = slices.DeleteFunc(r.known, func(k known) bool { return k.source && !contains(certs, k.cert) })
	for _, c := range certs {
		r.known[r.find(c)].source = true
	}
}

// empty reports whether nothing was ever learned.
func (r *roots) empty() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last == nil && r.source == nil
}

// bundle returns the bundle of the moment.
func (r *roots) bundle() (*spiffe.Bundle, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.update(time.Now())
}

// update returns the bundle at now, which is the last one if nothing has changed; mu is held.
func (r *roots) update(now time.Time) (*spiffe.Bundle, error) {
	r.known = slices.DeleteFunc(r.known, func(k known) bool {
		return !k.source && !k.newest && !now.Before(k.until)
	})
	if extra := len(r.known) - maxRoots; extra > 0 { // by a CA that has new ones each time: the oldest go
		r.known = slices.DeleteFunc(r.known, func(k known) bool {
			old := extra > 0 && !k.source && !k.newest
			if old {
				extra--
			}
			return old
		})
	}
	var contents spiffe.BundleContents
	if r.source != nil {
		contents = r.source.Contents() // with its keys for tokens and its hint
		contents.Sequence = nil        // which counts other contents
		contents.X509Authorities = nil
	}
	for _, k := range r.known {
		contents.X509Authorities = append(contents.X509Authorities, k.cert)
	}
	b, err := spiffe.NewBundle(r.td, contents)
	if err != nil {
		return nil, err
	}
	if r.last != nil && b.Equal(r.last) {
		return r.last, nil
	}
	r.last = b
	close(r.changed)
	r.changed = make(chan struct{})
	return b, nil
}

func (r *roots) waitFor() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.changed
}

// FetchBundles implements [caclient.CA]: see the package comment for where the roots come from. It makes
// a call only if there is no other way to know any. The error is a [*caclient.Error], unless ctx is
// done; while the source has none to give, and roots are known from certificates, it is logged.
func (c *CA) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("istioca: fetch bundles: %w", context.Cause(ctx))
	}
	b, err := c.source()
	switch {
	case err != nil && c.roots.empty():
		return nil, fetchError(caclient.ErrUnavailable, err)
	case err != nil:
		c.opts.Logger.WarnContext(ctx, "istioca: the roots cannot be read; those that are known stay", "err", err)
	case b != nil:
		c.roots.take(b)
	case c.roots.empty():
		if err := c.ask(ctx); err != nil {
			return nil, err
		}
	}
	return c.bundles()
}

func (c *CA) bundles() (*spiffe.BundleSet, error) {
	b, err := c.roots.bundle()
	if err != nil {
		return nil, fetchError(caclient.ErrUnavailable, err)
	}
	set, err := spiffe.NewBundleSet(b)
	if err != nil {
		return nil, fetchError(caclient.ErrUnavailable, err)
	}
	return set, nil
}

func fetchError(kind, err error) *caclient.Error {
	return &caclient.Error{Op: "fetch bundles", Kind: kind, Err: fmt.Errorf("istioca: %w", err)}
}

// source asks Options.Roots or reads Options.RootsFile; nil without an error means that there is neither.
func (c *CA) source() (*spiffe.Bundle, error) {
	switch {
	case c.opts.Roots != nil:
		b, err := c.opts.Roots.Bundle(c.opts.TrustDomain)
		if err == nil && (b == nil || b.TrustDomain() != c.opts.TrustDomain) {
			err = errors.New("the source did not give the bundle of the trust domain")
		}
		return b, err
	case c.opts.RootsFile != "":
		data, err := readFile(c.opts.RootsFile, maxFile+1)
		if err != nil {
			return nil, err
		}
		b, err := spiffe.ParseBundlePEM(c.opts.TrustDomain, data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c.opts.RootsFile, err)
		}
		return b, nil
	}
	return nil, nil //nolint:nilnil // there is no source
}

// ask has a key certified that nobody keeps, for the roots that come with the certificate.
func (c *CA) ask(ctx context.Context) error {
	key, err := pki.NewKey(pki.ECDSAP256)
	if err != nil {
		return fetchError(caclient.ErrUnavailable, err)
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{})
	if err != nil {
		return fetchError(caclient.ErrUnavailable, err)
	}
	_, err = c.Sign(ctx, csr, 0)
	return err
}

// WatchBundles is what package secretcache uses in the place of polling: it yields the bundles when a certificate brought new
// roots, and looks at the source every five minutes, or as often as its bundle hints at.
func (c *CA) WatchBundles(ctx context.Context) iter.Seq2[*spiffe.BundleSet, error] {
	return func(yield func(*spiffe.BundleSet, error) bool) {
		var last *spiffe.BundleSet
		for ctx.Err() == nil {
			changed := c.roots.waitFor() // before reading, so that nothing is missed
			set, err := c.FetchBundles(ctx)
			if ctx.Err() != nil {
				return
			}
			if err != nil || last == nil || !set.Equal(last) {
				if !yield(set, err) || err != nil {
					return
				}
				last = set
				continue // our own reading may have been the change
			}
			t := time.NewTimer(c.roots.pollAfter(rand.Float64()))
			select {
			case <-ctx.Done():
			case <-changed:
			case <-t.C:
			}
			t.Stop()
		}
	}
}

// pollAfter returns when to look at the source again, up to a tenth sooner so that a fleet spreads
// out. random is in [0, 1).
func (r *roots) pollAfter(random float64) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	wait := poll
	if r.source != nil {
		if hint, ok := r.source.RefreshHint(); ok {
			wait = min(max(hint, time.Second), poll)
		}
	}
	return wait - time.Duration(random*float64(wait)/10)
}
