package caclient

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/certchain"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Options are the choices of [New]. Zero means the default that is named here.
type Options struct {
	Attempts int           // calls to the CA in total, the first included; 0 means 5
	Timeout  time.Duration // of each attempt; 0 means 10 seconds
	Logger   *slog.Logger  // told of each attempt that failed and is repeated; nil means silence
}

const (
	firstWait   = 100 * time.Millisecond // doubles with each attempt: 100, 200, 400, 800 ms
	longestWait = 10 * time.Second       // that the CA can ask of a call
	refreshHint = 5 * time.Minute        // of a bundle without one (FED-8)
	longestHint = 24 * time.Hour         // a root that was withdrawn must not live on for the length of a typing error
)

// Client is a [CA] and a [BundleWatcher] around another CA, with deadlines, a bounded number of
// attempts and a test of every answer. [New] makes one. It is safe for concurrent use.
type Client struct {
	ca      CA
	opts    Options
	bundles atomic.Pointer[spiffe.BundleSet] // the last ones seen, to check answers with; nil at first
}

// New returns a [Client] of ca. It calls nothing yet. opts may be nil and is copied.
//
// A call that failed is repeated when [Retryable] says so, at most Attempts times in all. The waits
// are 100, 200, 400 and 800 ms, each multiplied by a random number from 0.5 to 1.5, so that clients
// that failed together do not return together. If the CA said how long to wait, the wait is that
// and up to a tenth more; if that is over 10 seconds, or more than the context has left, the error
// is returned at once, for the caller to plan with.
func New(ca CA, opts *Options) (*Client, error) {
	if ca == nil {
		return nil, errors.New("caclient: New needs a CA")
	}
	c := &Client{ca: ca}
	if opts != nil {
		c.opts = *opts
	}
	if c.opts.Attempts < 0 || c.opts.Timeout < 0 {
		return nil, fmt.Errorf("caclient: invalid Options: Attempts is %d and Timeout %v, neither may be negative", c.opts.Attempts, c.opts.Timeout)
	}
	c.opts.Attempts = cmp.Or(c.opts.Attempts, 5)
	c.opts.Timeout = cmp.Or(c.opts.Timeout, 10*time.Second)
	c.opts.Logger = cmp.Or(c.opts.Logger, slog.New(slog.DiscardHandler))
	return c, nil
}

// Sign implements [CA]. csr must name exactly one SPIFFE ID, and the answer has to be for that ID:
// see [Check]. The chain is put in order first, and freed of roots and repetitions.
//
// The answer is checked against the bundles that this Client saw last; if they do not vouch for it,
// they are fetched anew, as the CA may have a new root. A bad answer is not asked for again: the
// error is an [*Error] with the code [BadAnswer].
func (c *Client) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	id, err := requestedID(csr)
	if err != nil {
		return nil, &Error{Op: "sign", Code: Invalid, Err: err}
	}
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
	err = Check(chain, csr, id, bundles, time.Now())
	if newBundlesMayHelp(err) {
		if bundles, err = c.FetchBundles(ctx); err != nil {
			return nil, err
		}
		err = Check(chain, csr, id, bundles, time.Now())
	}
	if err != nil {
		return nil, err
	}
	return chain, nil
}

// newBundlesMayHelp reports whether err says that the bundles do not vouch for a chain.
func newBundlesMayHelp(err error) bool {
	e, ok := errors.AsType[*spiffe.VerifyError](err)
	return ok && (e.Stage == spiffe.StageBundle || e.Stage == spiffe.StageChain)
}

// requestedID returns the one SPIFFE ID that csr names.
func requestedID(csr *pki.CSR) (spiffe.ID, error) {
	if csr == nil {
		return spiffe.ID{}, errors.New("there is no signing request; pki.NewCSR makes one")
	}
	var id spiffe.ID
	for _, san := range csr.SANs() {
		if san.Type != pki.URI {
			continue
		}
		if !id.IsZero() {
			return spiffe.ID{}, errors.New("the signing request names more than one URI (X5-1)")
		}
		var err error
		if id, err = spiffe.ParseID(san.Value); err != nil {
			return spiffe.ID{}, err
		}
	}
	if id.IsZero() {
		return spiffe.ID{}, errors.New("the signing request names no SPIFFE ID, so the answer could not be checked")
	}
	return id, nil
}

// FetchBundles implements [CA].
func (c *Client) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	return call(ctx, c, "fetch bundles", c.fetch)
}

// fetch asks once.
func (c *Client) fetch(ctx context.Context) (*spiffe.BundleSet, error) {
	set, err := c.ca.FetchBundles(ctx)
	if err != nil {
		return nil, err
	}
	if set == nil {
		return nil, &Error{Op: "fetch bundles", Code: BadAnswer, Err: errors.New("there is no bundle set")}
	}
	c.bundles.Store(set)
	return set, nil
}

// WatchBundles implements [BundleWatcher]. If the CA is a BundleWatcher, this is its sequence. If
// not, the bundles are fetched once in the shortest refresh hint among them (5 minutes without a
// hint, FED-7 and FED-8) and once a day at least, up to a tenth sooner so that a fleet spreads out,
// and yielded when they differ from the last ones. If the first fetch fails, as [Client.FetchBundles]
// would, the sequence ends with its error. A later one that fails is yielded as its error, and not
// repeated before its next turn (FED-9).
func (c *Client) WatchBundles(ctx context.Context) iter.Seq2[*spiffe.BundleSet, error] {
	if w, ok := c.ca.(BundleWatcher); ok {
		return func(yield func(*spiffe.BundleSet, error) bool) {
			for set, err := range w.WatchBundles(ctx) {
				if err == nil && set == nil {
					err = &Error{Op: "watch bundles", Code: BadAnswer, Err: errors.New("there is no bundle set")}
				}
				if err == nil {
					c.bundles.Store(set)
				}
				if !yield(set, err) {
					return
				}
			}
		}
	}
	return func(yield func(*spiffe.BundleSet, error) bool) {
		last, err := c.FetchBundles(ctx)
		if ctx.Err() != nil || !yield(last, err) || err != nil {
			return
		}
		for wait(ctx, pollAfter(shortestHint(last), rand.Float64())) == nil {
			set, err := attempt(ctx, c, c.fetch)
			if ctx.Err() != nil {
				return
			}
			if err == nil {
				if set.Equal(last) {
					continue
				}
				last = set
			}
			if !yield(set, err) {
				return
			}
		}
	}
}

// pollAfter returns how long to wait for the next poll. random is in [0, 1).
func pollAfter(hint time.Duration, random float64) time.Duration {
	return hint - time.Duration(random*float64(hint)/10)
}

func shortestHint(set *spiffe.BundleSet) time.Duration {
	shortest := time.Duration(0)
	for b := range set.All() {
		if d, ok := b.RefreshHint(); ok && (shortest == 0 || d < shortest) {
			shortest = d
		}
	}
	return min(cmp.Or(shortest, refreshHint), longestHint)
}

// attempt calls f once, with the deadline of one attempt.
func attempt[T any](ctx context.Context, c *Client, f func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, c.opts.Timeout)
	defer cancel()
	return f(ctx)
}

// call calls f until it succeeds, fails for good, or has had its attempts.
func call[T any](ctx context.Context, c *Client, op string, f func(context.Context) (T, error)) (T, error) {
	var zero T
	for n := 1; ; n++ {
		if ctx.Err() != nil {
			return zero, fmt.Errorf("caclient: %s: %w", op, context.Cause(ctx))
		}
		v, err := attempt(ctx, c, f)
		if err == nil {
			return v, nil
		}
		after, ok := Retryable(err)
		pause := pauseAfter(n, after, rand.Float64())
		deadline, bounded := ctx.Deadline()
		switch {
		case ctx.Err() != nil:
			return zero, fmt.Errorf("caclient: %s: %w (the last attempt: %v)", op, context.Cause(ctx), err)
		case !ok, n >= c.opts.Attempts, after > longestWait, bounded && time.Until(deadline) <= pause:
			return zero, fmt.Errorf("caclient: %s: attempt %d of %d: %w", op, n, c.opts.Attempts, err)
		}
		c.opts.Logger.LogAttrs(ctx, slog.LevelWarn, "CA call failed", slog.String("op", op), slog.Int("attempt", n), slog.Any("err", err), slog.Duration("retry_in", pause))
		if cause := wait(ctx, pause); cause != nil {
			return zero, fmt.Errorf("caclient: %s: %w (the last attempt: %v)", op, cause, err)
		}
	}
}

// pauseAfter returns how long to wait after attempt n failed, if the CA asked for after (0: it did
// not). random is in [0, 1).
func pauseAfter(n int, after time.Duration, random float64) time.Duration {
	if after > 0 {
		return after + time.Duration(random*float64(after)/10)
	}
	const most = 8 * firstWait // whatever Options.Attempts is
	base := min(firstWait<<min(n-1, 3), most)
	return time.Duration((0.5 + random) * float64(base))
}

// wait returns nil after d, or the cause of ctx's end if that comes first.
func wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}
