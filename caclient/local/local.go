// Package local is a [caclient.CA] over an authority in this process: an authority of package pki/ca, or a
// registration authority of package pki/ra, which uses the signers of a Kubernetes cluster.
//
// Most programs need [New] with the identities for their workloads. A program whose workloads come and go decides for
// each request with [NewFunc].
//
// The constructor's arguments determine the caller's identity, never the request: the ID in a request is only
// compared. A registration authority passes the request on unchanged, so over one a request must name exactly that ID
// and nothing else.
package local

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// CA is a [caclient.CA]; [New] and [NewFunc] make one. It is safe for concurrent use.
type CA struct {
	authority ca.Signer
	signed    renew.Signal // an authority without Changed may have learned a root
	decide    func(context.Context, *pki.CSR) (spiffe.ID, error)
	server    *ca.Request // the part that all requests share; nil except for NewServer
}

// New returns a CA that certifies requests for the given IDs, which must be workloads in the trust domain of the
// authority, a *ca.Authority or a *ra.RA. If the authority also has a method Changed() <-chan struct{}, whose channel
// is closed when its bundle changes, [CA.WatchBundles] does not poll.
//
// With one ID, every request is for it, and may name it or no ID. With several, as for a secretcache.Manager that
// serves several identities, a request must name its ID; to decide while the program runs, use [NewFunc].
func New(authority ca.Signer, ids ...spiffe.ID) (*CA, error) {
	if authority == nil || len(ids) == 0 {
		return nil, errors.New("local: New needs an authority and an ID")
	}
	allowed := make(map[spiffe.ID]bool, len(ids))
	td := ids[0].TrustDomain()
	if b := authority.Bundle(); b != nil { // else the signer does not know its roots yet, and Sign refuses
		td = b.TrustDomain()
	}
	for _, id := range ids {
		if !id.MemberOf(td) || id.Path() == "" {
			return nil, fmt.Errorf("local: %q is not the ID of a workload in the trust domain %q", id, td)
		}
		allowed[id] = true
	}
	return NewFunc(authority, func(_ context.Context, csr *pki.CSR) (spiffe.ID, error) {
		if len(allowed) == 1 {
			return ids[0], nil
		}
		id, err := csr.ID()
		if err == nil && !allowed[id] {
			err = fmt.Errorf("local: the request is for %q, which is not among the %d IDs", id, len(allowed))
		}
		return id, err
	})
}

// NewFunc returns a CA that certifies each request for the ID that decide returns. decide may use anything in the
// request that helps it to identify the caller, such as a known public key, or the named workload if it started that
// workload. The request is only a wish. An error of decide refuses the request: unchanged if it is a
// [*caclient.Error], and otherwise of the kind [caclient.ErrDenied]. decide must be safe for concurrent use.
func NewFunc(authority ca.Signer, decide func(ctx context.Context, csr *pki.CSR) (spiffe.ID, error)) (*CA, error) {
	if authority == nil || decide == nil {
		return nil, errors.New("local: NewFunc needs an authority and a function")
	}
	return &CA{authority: authority, decide: decide}, nil
}

// Sign implements [caclient.CA]. It refuses a request that names a URI other than the chosen ID with
// [caclient.ErrDenied], and certifies a request that names none. The error is a [*caclient.Error], unless ctx is
// done, and wraps the [*ca.SignError] if there is one.
func (c *CA) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	if csr == nil {
		return nil, &caclient.Error{Op: "sign", Kind: caclient.ErrInvalid,
			Err: errors.New("local: there is no signing request")}
	}
	if lifetime < 0 {
		return nil, &caclient.Error{Op: "sign", Kind: caclient.ErrInvalid,
			Err: fmt.Errorf("local: the lifetime is negative (%v)", lifetime)}
	}
	id, err := c.decide(ctx, csr)
	if err != nil {
		return nil, signError(ctx, err, caclient.ErrDenied)
	}
	for _, san := range csr.SANs() {
		if san.Type == pki.URI && san.Value != id.String() {
			return nil, &caclient.Error{Op: "sign", Kind: caclient.ErrDenied,
				Err: fmt.Errorf("local: the request is for %.256q, the caller is %q", san.Value, id)}
		}
	}
	r := ca.Request{}
	if c.server != nil {
		r = *c.server
	}
	r.CSR, r.ID, r.TTL = csr, id, lifetime
	chain, err := c.authority.Sign(ctx, r)
	if err != nil {
		return nil, signError(ctx, err, kindOf(err))
	}
	c.signed.Notify()
	return chain, nil
}

// signError returns err with a kind, unless it has one already or says that ctx is done.
func signError(ctx context.Context, err, kind error) error {
	if _, ok := errors.AsType[*caclient.Error](err); ok || ctx.Err() != nil {
		return err
	}
	e := &caclient.Error{Op: "sign", Kind: kind, Err: err}
	if refused, ok := errors.AsType[*ca.SignError](err); ok {
		e.RetryAfter = refused.RetryAfter
	}
	return e
}

// kindOf translates the kinds of failure, as Istio's CA does for its clients.
func kindOf(err error) error {
	if errors.Is(err, ca.ErrCSR) || errors.Is(err, ca.ErrTTL) || errors.Is(err, ca.ErrIdentity) {
		return caclient.ErrInvalid
	}
	return caclient.ErrUnavailable
}

// FetchBundles implements [caclient.CA] with the one bundle of the authority.
func (c *CA) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("local: fetch bundles: %w", context.Cause(ctx))
	}
	if c.server != nil {
		if err := c.learn(ctx); err != nil {
			return nil, err
		}
	}
	return c.set(c.authority.Bundle())
}

func (c *CA) set(b *spiffe.Bundle) (*spiffe.BundleSet, error) {
	set, err := spiffe.NewBundleSet(b)
	if err != nil {
		return nil, &caclient.Error{Op: "fetch bundles", Kind: caclient.ErrUnavailable, Err: err}
	}
	return set, nil
}

// WatchBundles yields the authority's bundle, and each newer one, until ctx is done; package secretcache uses it
// instead of polling. Changes over time need the authority's Run. An authority without Changed, such as an RA, is
// polled after each Sign, and every thirty seconds.
func (c *CA) WatchBundles(ctx context.Context) iter.Seq2[*spiffe.BundleSet, error] {
	return func(yield func(*spiffe.BundleSet, error) bool) {
		if a, ok := c.authority.(interface{ Changed() <-chan struct{} }); ok {
			for b := range renew.Follow(ctx, a.Changed, c.authority.Bundle) {
				if !yield(c.set(b)) {
					return
				}
			}
			return
		}
		for last := (*spiffe.Bundle)(nil); ctx.Err() == nil; {
			signed := c.signed.Changed() // before reading, so that nothing is missed
			b := c.authority.Bundle()
			if b == last {
				renew.Wait(ctx, poll, signed)
			} else if last = b; b != nil && !yield(c.set(b)) {
				return
			}
		}
	}
}

const poll = 30 * time.Second // of an authority without Changed; it costs no request
