package caconn

import (
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
	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// roots are the known roots. Its methods are safe for concurrent use.
type roots struct {
	td spiffe.TrustDomain

	mu       sync.Mutex
	source   *spiffe.Bundle      // of Options.Roots or Options.RootsFile; nil before it was read
	newest   []*x509.Certificate // from the newest certificate's answer
	older    []olderRoot         // from earlier answers, in the order in which they were replaced
	lifetime time.Duration       // the longest of our own certificates
	last     *spiffe.Bundle      // nil if nothing was ever learned
	changed  renew.Signal        // of last
}

// olderRoot is a root under which peers may have certificates until a moment.
type olderRoot struct {
	*x509.Certificate
	until time.Time
}

// LearnRoots records the roots that came with leaf. [Conn.FetchBundles] then returns them for as long as a
// certificate issued under them may live. An error changes nothing.
func (c *Conn) LearnRoots(certs []*x509.Certificate, leaf *x509.Certificate) error {
	r := &c.roots
	if _, err := spiffe.NewBundle(r.td, spiffe.BundleContents{X509Authorities: certs}); err != nil {
		return fmt.Errorf("roots: %w", err)
	}
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lifetime = max(r.lifetime, leaf.NotAfter.Sub(now))
	r.older = slices.DeleteFunc(r.older, func(o olderRoot) bool { return slices.ContainsFunc(certs, o.Equal) })
	for _, c := range r.newest {
		if !slices.ContainsFunc(certs, c.Equal) {
			r.older = append(r.older, olderRoot{c, now.Add(r.lifetime)})
		}
	}
	r.newest = certs
	_, err := r.update(now)
	return err
}

// Sort moves certificates that came as roots, but are not roots, to the chain, which answers csr. A root is
// self-signed or among the Endpoint's roots. Without both kinds, all certificates that came as roots count as roots.
func (c *Conn) Sort(ctx context.Context, csr *pki.CSR, chain, roots []*x509.Certificate,
) (_, _ []*x509.Certificate, err error) {
	notSigned := func(c *x509.Certificate) bool { return !certchain.SelfSigned(c) }
	if !slices.ContainsFunc(roots, notSigned) {
		return chain, roots, nil
	}
	source, err := c.Source(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("the roots that tell an intermediate certificate from a root: %w", err)
	}
	var known []*x509.Certificate
	if source != nil {
		known = source.Contents().X509Authorities
	} else if !slices.ContainsFunc(roots, certchain.SelfSigned) {
		return chain, roots, nil
	}
	var real []*x509.Certificate
	for i, r := range roots {
		switch {
		case !notSigned(r) || slices.ContainsFunc(known, r.Equal):
			real = append(real, r)
		case !r.IsCA:
			return nil, nil, fmt.Errorf("root %d is not a CA certificate", i+1)
		default:
			chain = append(chain, r)
		}
	}
	chain, err = Tidy(csr, chain)
	return chain, real, err
}

// Known returns the bundle of the known roots; nil before there are any.
func (c *Conn) Known() *spiffe.Bundle {
	c.roots.mu.Lock()
	defer c.roots.mu.Unlock()
	return c.roots.last
}

// take records the bundle of the source, and returns the resulting bundle. A root that the source dropped is
// withdrawn. A nil bundle changes nothing.
func (r *roots) take(b *spiffe.Bundle) (*spiffe.Bundle, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if b != nil {
		if r.source != nil {
			before, after := slices.Collect(r.source.X509Authorities()), slices.Collect(b.X509Authorities())
			withdrawn := func(c *x509.Certificate) bool {
				return slices.ContainsFunc(before, c.Equal) && !slices.ContainsFunc(after, c.Equal)
			}
			r.newest = slices.DeleteFunc(r.newest, withdrawn)
			r.older = slices.DeleteFunc(r.older, func(o olderRoot) bool { return withdrawn(o.Certificate) })
		}
		r.source = b
	}
	return r.update(time.Now())
}

// update returns the bundle at now, or the last one if nothing has changed. The caller holds mu.
func (r *roots) update(now time.Time) (*spiffe.Bundle, error) {
	var contents spiffe.BundleContents
	if r.source != nil {
		contents = r.source.Contents() // with its keys for tokens and its hint
		contents.Sequence = nil        // it counts other contents
	}
	certs := slices.Concat(contents.X509Authorities, r.newest)
	r.older = slices.DeleteFunc(r.older, func(o olderRoot) bool { return !now.Before(o.until) })
	// A CA that has new roots each time must not fill the memory.
	if room := max(0, MaxRoots-len(certs)); len(r.older) > room {
		r.older = slices.Delete(r.older, 0, len(r.older)-room)
	}
	for _, o := range r.older {
		certs = append(certs, o.Certificate)
	}
	contents.X509Authorities = certs
	b, err := spiffe.NewBundle(r.td, contents) // removes duplicates
	if err != nil {
		return nil, err
	}
	if r.last == nil || !b.Equal(r.last) {
		r.last = b
		r.changed.Notify()
	}
	return r.last, nil
}

// poll returns how long to wait before reading the source again.
func (r *roots) poll() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.source != nil {
		if hint, ok := r.source.RefreshHint(); ok {
			return min(max(hint, time.Second), renew.UsualPoll)
		}
	}
	return renew.UsualPoll
}

// FetchBundles implements the client's method, which describes it.
func (c *Conn) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	const op = "fetch bundles"
	known := c.Known() != nil
	source, err := c.Source(ctx)
	switch {
	case ctx.Err() != nil:
		return nil, fmt.Errorf("%s: %s: %w", c.Name, op, context.Cause(ctx))
	case err != nil && known:
		c.Endpoint.Logger.WarnContext(ctx, c.Name+": the roots cannot be read; those that are known stay", "err", err)
	case err != nil:
		if e, told := errors.AsType[*caclient.Error](err); told {
			return nil, e
		}
		return nil, c.Error(op, caclient.ErrUnavailable, err)
	case source == nil && !known:
		if err := c.cfg.Learn(ctx); err != nil {
			return nil, err
		}
	}
	var set *spiffe.BundleSet
	b, err := c.roots.take(source)
	if err == nil {
		set, err = spiffe.NewBundleSet(b)
	}
	if err != nil {
		return nil, c.Error(op, caclient.ErrUnavailable, err)
	}
	return set, nil
}

// Source reads the source of roots. It returns nil if there is no source, or an error.
func (c *Conn) Source(ctx context.Context) (*spiffe.Bundle, error) {
	e := &c.Endpoint
	switch {
	case e.Roots != nil:
		b, err := e.Roots.Bundle(e.TrustDomain)
		if err == nil && (b == nil || b.TrustDomain() != e.TrustDomain) {
			return nil, errors.New("the source did not give the bundle of the trust domain")
		}
		return b, err
	case e.RootsFile != "":
		return ReadBundle(e.TrustDomain, e.RootsFile)
	case c.cfg.Roots != nil:
		certs, err := c.cfg.Roots(ctx)
		if err != nil {
			return nil, err
		}
		b, err := spiffe.NewBundle(e.TrustDomain, spiffe.BundleContents{X509Authorities: certs})
		if err != nil {
			return nil, c.Error("fetch bundles", caclient.ErrBadAnswer, err)
		}
		return b, nil
	}
	return nil, nil // there is no source
}

// ReadBundle returns the bundle of a trust domain from a file of CA certificates.
func ReadBundle(td spiffe.TrustDomain, file string) (*spiffe.Bundle, error) {
	data, err := files.Read(file, maxFile)
	if err != nil {
		return nil, err
	}
	b, err := spiffe.ParseBundlePEM(td, data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return b, nil
}

// WatchBundles implements the client's method, which describes it.
func (c *Conn) WatchBundles(ctx context.Context) iter.Seq2[*spiffe.BundleSet, error] {
	return func(yield func(*spiffe.BundleSet, error) bool) {
		var last *spiffe.BundleSet
		for ctx.Err() == nil {
			changed := c.roots.changed.Changed() // before reading, so that no change is missed
			set, err := c.FetchBundles(ctx)
			if ctx.Err() != nil {
				return
			}
			if err != nil || last == nil || !set.Equal(last) {
				if !yield(set, err) || err != nil {
					return
				}
				last = set
				continue // the reading itself may have been the change
			}
			wait := c.roots.poll()
			early := time.Duration(rand.Float64() * float64(wait) / 10) // so that a fleet spreads out
			renew.Wait(ctx, wait-early, changed)
		}
	}
}
