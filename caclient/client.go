package caclient

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Options are the choices of [New]. Zero means the default that is named here.
type Options struct {
	Attempts int           // calls to the CA in total, the first included; 0 means 5
	Timeout  time.Duration // of each attempt; 0 means 10 seconds
	Logger   *slog.Logger  // told of each attempt that failed and is repeated; nil means silence

	// Expect is what a certificate has to be for. Zero means the one SPIFFE ID that the request names; a CA whose
	// certificates have no SPIFFE ID needs one of another form, such as [pki.ExpectDNSName].
	Expect pki.Expectation

	// Role is what the extended key usages of a certificate must permit: [spiffe.ServerRole] or
	// [spiffe.ClientRole] with a CA that certifies one role only. 0 means [spiffe.BothRoles].
	Role spiffe.Role
}

// longestWish is the longest wait that the CA can ask of a call.
const longestWish = 10 * time.Second

var backoff = renew.Backoff{Low: 50 * time.Millisecond, First: 150 * time.Millisecond, High: 1200 * time.Millisecond, Wish: longestWish * 11 / 10}

// client is a CA around another CA.
type client struct {
	ca      CA
	opts    Options
	bundles atomic.Pointer[spiffe.BundleSet] // the last ones seen, to check answers with; nil at first
}

// New returns a CA that asks ca, with a deadline for each attempt, a bounded number of attempts and a
// test of every answer. It calls nothing yet. opts may be nil and is copied. The result is safe for
// concurrent use.
//
// A call that failed is repeated when [Retryable] says so, at most Attempts times in all, after random
// waits of 50 to 150 ms, and then of up to 300, 600 and 1,200 ms. If the CA asked for a longer wait,
// the wait is that and up to a tenth more; if it is over 10 seconds, or more than the context has left,
// the error is returned at once, for the caller to plan with.
//
// Sign needs a request that names exactly one SPIFFE ID, unless Expect says what is wanted, and the answer has to be for that:
// see [Check]. The chain is put in order first, and freed of roots and repetitions. It is checked against
// the bundles that were seen last; if they do not vouch for it, they are fetched anew, as the CA may
// have a new root. A bad answer is not asked for again: the error wraps [ErrBadAnswer].
func New(ca CA, opts *Options) (CA, error) {
	if ca == nil {
		return nil, errors.New("caclient: New needs a CA")
	}
	c := &client{ca: ca}
	if opts != nil {
		c.opts = *opts
	}
	if c.opts.Role < 0 || c.opts.Role > spiffe.BothRoles {
		return nil, fmt.Errorf("caclient: invalid Options: Role is %d, want ServerRole, ClientRole or BothRoles", c.opts.Role)
	}
	if c.opts.Attempts < 0 || c.opts.Timeout < 0 {
		return nil, fmt.Errorf("caclient: invalid Options: Attempts is %d and Timeout %v, neither may be negative", c.opts.Attempts, c.opts.Timeout)
	}
	c.opts.Attempts = cmp.Or(c.opts.Attempts, 5)
	c.opts.Timeout = cmp.Or(c.opts.Timeout, 10*time.Second)
	c.opts.Role = cmp.Or(c.opts.Role, spiffe.BothRoles)
	c.opts.Logger = cmp.Or(c.opts.Logger, slog.New(slog.DiscardHandler))
	return c, nil
}

func (c *client) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	if csr == nil {
		return nil, &Error{Op: "sign", Kind: ErrInvalid, Err: errors.New("there is no signing request; pki.NewCSR makes one")}
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
	if certchain.CheckSize(chain) == nil { // if not, Check says why
		chain = certchain.Tidy(chain, csr.PublicKey())
	}
	err = checkFor(c.opts.Role, chain, csr, want, bundles, time.Now())
	if e, ok := errors.AsType[*spiffe.VerifyError](err); ok && (e.Stage == "bundle" || e.Stage == "chain") && e.Rule != "X5-39" {
		if bundles, err = c.FetchBundles(ctx); err != nil {
			return nil, err
		}
		err = checkFor(c.opts.Role, chain, csr, want, bundles, time.Now())
	}
	if err != nil {
		return nil, err
	}
	return chain, nil
}

func (c *client) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	return call(ctx, c, "fetch bundles", func(ctx context.Context) (*spiffe.BundleSet, error) {
		set, err := c.ca.FetchBundles(ctx)
		if err == nil && set == nil {
			err = &Error{Op: "fetch bundles", Kind: ErrBadAnswer, Err: errors.New("there is no bundle set")}
		}
		if err != nil {
			return nil, err
		}
		c.bundles.Store(set)
		return set, nil
	})
}

// call calls f until it succeeds, fails for good, or has had its attempts.
func call[T any](ctx context.Context, c *client, op string, f func(context.Context) (T, error)) (T, error) {
	var zero T
	if ctx.Err() != nil {
		return zero, fmt.Errorf("caclient: %s: %w", op, context.Cause(ctx))
	}
	for n := 1; ; n++ {
		attempt, cancel := context.WithTimeout(ctx, c.opts.Timeout)
		v, err := f(attempt)
		cancel()
		if err == nil {
			return v, nil
		}
		after, ok := Retryable(err)
		pause := backoff.Wait(renew.Failure{Times: n, Wish: after}, rand.Float64())
		deadline, bounded := ctx.Deadline()
		if ctx.Err() == nil {
			if !ok || n >= c.opts.Attempts || after > longestWish || bounded && time.Until(deadline) <= pause {
				return zero, fmt.Errorf("caclient: %s: attempt %d of %d: %w", op, n, c.opts.Attempts, err)
			}
			c.opts.Logger.LogAttrs(ctx, slog.LevelWarn, "caclient: attempt failed", slog.String("op", op), slog.Int("attempt", n), slog.Any("err", err), slog.Duration("retry_in", pause))
		}
		if cause := renew.Sleep(ctx, pause); cause != nil {
			return zero, fmt.Errorf("caclient: %s: %w (the last attempt: %v)", op, cause, err)
		}
	}
}
