package caclient

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Options are the choices of [New]. Zero means the default that is named here.
type Options struct {
	// Timeout bounds each call to the CA; 0 means 10 seconds.
	Timeout time.Duration

	// Expect describes the certificate. Zero means the one SPIFFE ID that the request names; a CA whose certificates
	// have no SPIFFE ID needs an expectation of another form, such as [pki.ExpectDNSName].
	Expect pki.Expectation

	// Role is the role that the extended key usages of a certificate must permit: [spiffe.ServerRole] or
	// [spiffe.ClientRole] with a CA that certifies only one role. 0 means [spiffe.BothRoles].
	Role spiffe.Role
}

// client is a CA around another CA.
type client struct {
	ca      CA
	opts    Options
	bundles atomic.Pointer[spiffe.BundleSet] // the last bundles seen, to check answers with; nil at first
}

// New returns a CA that calls ca, bounds each call and checks every answer. New itself calls nothing. opts may be nil
// and is copied. The result is safe for concurrent use.
//
// Failures are returned unchanged: the method Retryable of [*Error] says whether and when to repeat the call.
//
// Unless Expect is set, Sign needs a request that names exactly one SPIFFE ID. The answer must match it: see the
// package comment. Before the check, the chain is put in order, without roots and duplicates. It has at most 16
// certificates and 64 KiB. It is checked against the bundles seen last; if they do not vouch for it, they are fetched
// anew, because the CA may have a new root. The error for a bad answer wraps [ErrBadAnswer], and the
// [*spiffe.VerifyError] if there is one.
func New(ca CA, opts *Options) (CA, error) {
	if ca == nil {
		return nil, errors.New("caclient: New needs a CA")
	}
	c := &client{ca: ca, opts: *cmp.Or(opts, new(Options))}
	if c.opts.Role < 0 || c.opts.Role > spiffe.BothRoles {
		return nil, fmt.Errorf("caclient: invalid Options: Role is %d, want ServerRole, ClientRole or BothRoles",
			c.opts.Role)
	}
	if c.opts.Timeout < 0 {
		return nil, fmt.Errorf("caclient: invalid Options: Timeout is %v, and may not be negative", c.opts.Timeout)
	}
	c.opts.Timeout = cmp.Or(c.opts.Timeout, 10*time.Second)
	c.opts.Role = cmp.Or(c.opts.Role, spiffe.BothRoles)
	return c, nil
}

func (c *client) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	if csr == nil {
		return nil, &Error{Op: "sign", Kind: ErrInvalid,
			Err: errors.New("there is no signing request; pki.NewCSR makes one")}
	}
	want := c.opts.Expect
	if want.IsZero() {
		id, err := csr.ID()
		if err != nil {
			return nil, &Error{Op: "sign", Kind: ErrInvalid, Err: err}
		}
		want = pki.ExpectID(id)
	}
	var err error
	bundles := c.bundles.Load()
	if bundles == nil { // before the CA does its work, so that nothing is signed in vain
		if bundles, err = c.FetchBundles(ctx); err != nil {
			return nil, err
		}
	}
	chain, err := call(ctx, c, "sign", func(ctx context.Context) ([]*x509.Certificate, error) {
		return c.ca.Sign(ctx, csr, lifetime)
	})
	if err != nil {
		return nil, err
	}
	if certchain.CheckSize(chain) == nil { // if not, check says why
		chain = certchain.Tidy(chain, csr.PublicKey())
	}
	err = c.check(chain, csr, want, bundles)
	if e, ok := errors.AsType[*spiffe.VerifyError](err); ok && e.Unvouched() {
		if bundles, err = c.FetchBundles(ctx); err != nil {
			return nil, err
		}
		err = c.check(chain, csr, want, bundles)
	}
	if err != nil {
		return nil, err
	}
	return chain, nil
}

func (c *client) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	set, err := call(ctx, c, "fetch bundles", c.ca.FetchBundles)
	if err == nil && set == nil {
		err = &Error{Op: "fetch bundles", Kind: ErrBadAnswer, Err: errors.New("there is no bundle set")}
	}
	if err != nil {
		return nil, err
	}
	c.bundles.Store(set)
	return set, nil
}

// call calls f once, within the timeout. If ctx is done, the error wraps its cause.
func call[T any](ctx context.Context, c *client, op string, f func(context.Context) (T, error)) (v T, err error) {
	if ctx.Err() != nil {
		return v, fmt.Errorf("caclient: %s: %w", op, context.Cause(ctx))
	}
	bounded, cancel := context.WithTimeout(ctx, c.opts.Timeout)
	defer cancel()
	v, err = f(bounded)
	if err != nil && ctx.Err() != nil && !errors.Is(err, context.Cause(ctx)) {
		err = fmt.Errorf("caclient: %s: %w: %w", op, context.Cause(ctx), err)
	}
	return v, err
}
