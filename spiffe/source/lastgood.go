package source

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/files/store"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/sourcereport"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

// LastGoodConfig configures a [LastGood]. Source, Dir and MaxAge are required.
type LastGoodConfig struct {
	// Source is the live source, not yet running: the LastGood runs and closes it.
	Source interface {
		Source
		Run(ctx context.Context) error
	}

	// Dir is the directory of the files, for one source of one program. Run makes it if it is missing. It and the
	// directories above it must belong to the user of this process or to root. In a directory that other users can
	// write to, such as an emptyDir of Kubernetes, Run makes and uses a directory svidkit-last-good.
	Dir string

	// MaxAge is how long the stored state may be used after a running program last confirmed it with the live source.
	// A bundle revoked since then stays trusted for that long, so make it only a little more than the longest outage
	// that matters. It must be positive.
	MaxAge time.Duration

	// Identity also stores the identity, with its unencrypted private key, in a file that only this user can read.
	// Otherwise only bundles are stored, and a previously stored identity is deleted.
	Identity bool

	// BundlesOnly says that the live source has no identity, so that stored bundles are enough to be ready. The source
	// must have a method Bundles, as that of a *workloadapi.Source.
	BundlesOnly bool

	// Logger gets what was loaded and when the live source takes over (Info), and refusals and failed writes (Warn).
	// Nil means no logs.
	Logger *slog.Logger
}

// LastGood is a [Source] that stores the last good bundles of another one, and on request its identity, so that a
// program that restarts while the agent or CA is away works from its start.
//
// Until the live source is ready, a LastGood returns the stored state if it is still good; from then on it returns
// only the state of the live source. Stored state is good if it is not older than MaxAge, no other user can have
// written it, and it is not damaged; an identity must also not have expired, and must verify with the stored bundle of
// its trust domain. Otherwise the program goes on without it, and the log and [LastGood.Report] say why.
//
// If the server of the live source denies or withdraws the identity, the stored state is deleted: that is an answer,
// not an outage.
//
// A LastGood stores each change at once, atomically and durably, and updates the stored time regularly. The methods
// are safe for concurrent use, and those that read never wait for a file.
type LastGood struct {
	cfg   LastGoodConfig
	log   *slog.Logger
	store *store.Store
	life  lifecycle.Life
	news  renew.Signal

	stored atomic.Pointer[stored] // the stored state in use; nil if there is none, and once the live source is ready
	live   atomic.Bool            // the live source has been ready

	mu      sync.Mutex // guards what follows
	saved   time.Time
	refused error // why the stored state is not used
	failed  error // why the last attempt to store has failed
	ended   error // the error of the live source's Run
	deleted bool  // the stored state was deleted, and nothing was stored since
}

// NewLastGood checks cfg and returns a LastGood. It starts no goroutine and opens no file.
func NewLastGood(cfg LastGoodConfig) (*LastGood, error) {
	_, enumerates := cfg.Source.(interface{ Bundles() *spiffe.BundleSet })
	switch {
	case cfg.Source == nil:
		return nil, errors.New("source: last good: Source is required")
	case cfg.Dir == "":
		return nil, errors.New("source: last good: Dir is required")
	case cfg.MaxAge <= 0:
		return nil, errors.New("source: last good: MaxAge is required: it is how long a revoked authority may be " +
			"trusted after a restart")
	case cfg.Identity && cfg.BundlesOnly:
		return nil, errors.New("source: last good: Identity and BundlesOnly are both set")
	case cfg.BundlesOnly && !enumerates:
		return nil, fmt.Errorf("source: last good: BundlesOnly is set, and a %T has no method Bundles that lists "+
			"them", cfg.Source)
	}
	l := &LastGood{cfg: cfg, log: ratelog.Patient(cfg.Logger)}
	l.store = store.New(cfg.Dir, ownDir, func(err error) {
		l.log.Warn("source: Dir is in a directory that other users can write to, and can lose what is stored",
			slog.Any("err", err))
	})
	return l, nil
}

// StartLastGood makes a LastGood, runs it and its source in the background, and waits until it is ready, possibly with
// stored state. ctx bounds only the wait: the source runs until [LastGood.Close]. On failure it leaves nothing
// running.
func StartLastGood(ctx context.Context, cfg LastGoodConfig) (*LastGood, error) {
	l, err := NewLastGood(cfg)
	if err != nil {
		return nil, err
	}
	return lifecycle.Started(ctx, l, &l.life, l.work)
}

// Run loads the stored state, and runs the live source. It blocks until ctx is done or [LastGood.Close] is called, and
// then returns nil. If the live source's Run returns first, Run returns its error. The last identity and bundles stay
// readable.
func (l *LastGood) Run(ctx context.Context) error {
	return l.life.RunAs(ctx, "source: last good", l.work)
}

func (l *LastGood) work(ctx context.Context) error {
	l.mu.Lock()
	l.ended = nil
	l.mu.Unlock()
	l.load(ctx)
	l.news.Notify()
	inner, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { l.await(inner) })
	wg.Go(func() { l.forward(inner) })
	wg.Go(func() { l.keep(inner) })
	err := l.cfg.Source.Run(inner)
	cancel()
	wg.Wait()
	if err != nil && ctx.Err() == nil {
		l.mu.Lock()
		l.ended = err
		l.mu.Unlock()
		l.log.LogAttrs(ctx, slog.LevelWarn, "source: the live source has ended", slog.Any("err", err))
	}
	return err
}

// await waits until the live source is ready and takes over.
func (l *LastGood) await(ctx context.Context) {
	if l.live.Load() { // since an earlier Run
		return
	}
	for {
		changed := l.cfg.Source.Changed()
		if err := l.cfg.Source.Ready(ctx); err == nil {
			break
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
	l.live.Store(true)
	if l.stored.Swap(nil) != nil {
		l.log.LogAttrs(ctx, slog.LevelInfo, "source: the live source is ready, and takes over from what was stored")
	}
	l.news.Notify()
}

// forward notifies readers and keep of changes of the live source.
func (l *LastGood) forward(ctx context.Context) {
	for {
		changed := l.cfg.Source.Changed()
		l.news.Notify()
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// current returns the identity and bundles of the live source. The identity is nil for a source without one.
func (l *LastGood) current() (*spiffe.SVID, *spiffe.BundleSet, error) {
	snap, err := l.cfg.Source.Snapshot()
	if err == nil {
		svid, _ := snap.SVID() // of a snapshot: never an error
		return svid, snap.Bundles(), nil
	}
	if b, ok := l.cfg.Source.(interface{ Bundles() *spiffe.BundleSet }); ok && l.cfg.BundlesOnly &&
		!sourcereport.Withdrawn(err) {
		return nil, b.Bundles(), nil
	}
	return nil, nil, err
}

// Ready waits until the live source is ready, or there is a good stored identity (with BundlesOnly, stored bundles).
// The error wraps [spiffe.ErrNotReady], the cause of ctx, the error of the live source, and why stored state is not
// used.
func (l *LastGood) Ready(ctx context.Context) error {
	return l.life.Ready(ctx, l.Changed, func() bool {
		st := l.past()
		return l.live.Load() || st != nil && (l.cfg.BundlesOnly || st.identity() != nil)
	}, func() error { return l.notReady(l.life.Idle()) })
}

// notReady returns the error while there is no identity. The cause is err or, if err is nil, the error of the live
// source.
func (l *LastGood) notReady(err error) error {
	if err == nil {
		_, _, err = l.current()
	}
	if err == nil {
		err = errors.New("the live source is not ready")
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.refused != nil {
		return fmt.Errorf("source: last good: %w: %w; %w", spiffe.ErrNotReady, err, l.refused)
	}
	return fmt.Errorf("source: last good: %w: %w", spiffe.ErrNotReady, err)
}

// Close stops the source and the live source for good, waits for their goroutines, and returns nil. The last identity
// and bundles stay readable.
func (l *LastGood) Close() error {
	_ = l.life.Close()
	return l.cfg.Source.Close()
}

// past returns the stored state if it is in use, or nil.
func (l *LastGood) past() *stored {
	st := l.stored.Load()
	if st == nil || !time.Now().Before(st.until) {
		return nil
	}
	return st
}

// Snapshot returns the identity and the bundles, as published together. It does not block. It returns no stored
// identity that has expired.
func (l *LastGood) Snapshot() (*spiffe.Snapshot, error) {
	st := l.past() // before the live source is asked, which may take over meanwhile
	snap, err := l.cfg.Source.Snapshot()
	if err == nil {
		return snap, nil
	}
	if st != nil && !sourcereport.Withdrawn(err) {
		if snap := st.identity(); snap != nil {
			return snap, nil
		}
	}
	return nil, l.notReady(err)
}

// SVID returns the identity. It does not block. It fails like [LastGood.Snapshot].
func (l *LastGood) SVID() (*spiffe.SVID, error) {
	snap, err := l.Snapshot()
	if err != nil {
		return nil, err
	}
	return snap.SVID()
}

// Bundle returns the bundle of td. It does not block. Until the live source is ready, stored bundles complement its
// own.
func (l *LastGood) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	st := l.past() // before the live source is asked, which may take over meanwhile
	b, err := l.cfg.Source.Bundle(td)
	if err == nil {
		return b, nil
	}
	if st != nil && !sourcereport.Withdrawn(err) {
		if b, err := st.bundles.Bundle(td); err == nil {
			return b, nil
		}
	}
	return nil, err
}

// Bundles returns all bundles of the live source or, until it is ready, the stored bundles.
func (l *LastGood) Bundles() *spiffe.BundleSet {
	st := l.past() // before the live source is asked, which may take over meanwhile
	_, bundles, err := l.current()
	switch {
	case err == nil && (bundles.Len() > 0 || st == nil):
		return bundles
	case st != nil && !sourcereport.Withdrawn(err):
		return st.bundles
	}
	return noBundles
}

var noBundles = new(spiffe.BundleSet)

// Changed returns a channel that is closed when the identity or the bundles change. Take the channel before reading,
// so that no change is missed.
func (l *LastGood) Changed() <-chan struct{} { return l.news.Changed() }

// Report implements [report.Reporter] with the identity, the trust bundles, and the stored state as the upstream.
// Stored state that is in use, or was refused, is a problem. The names of the metrics begin with svidkit_last_good.
func (l *LastGood) Report() report.Report {
	live := l.live.Load()
	inUse := !live && l.past() != nil
	var identity spiffe.SVIDSource
	if !l.cfg.BundlesOnly {
		identity = l
	}
	r := sourcereport.Of(identity, l, "")
	l.mu.Lock()
	saved, refused, err := l.saved, l.refused, cmp.Or(l.ended, l.failed)
	l.mu.Unlock()
	r.Upstreams = []report.Upstream{{Name: "stored identity", LastSuccess: saved, Err: err}}
	if inUse {
		r.Problems = append(r.Problems, fmt.Errorf("what was stored at %s is in use, as the live source is not ready",
			stamp(saved)))
	}
	if refused != nil {
		r.Problems = append(r.Problems, refused)
	}
	if identity == nil && !live && !inUse {
		r.NotReady = l.notReady(nil)
	}
	m := new(metrics.Set)
	m.Gauge("svidkit_last_good_in_use",
		"Whether something is handed out that was stored before this program started.",
		func() (float64, bool) { return metrics.Bool(inUse), true })
	m.Gauge("svidkit_last_good_in_order", "Whether the last attempt to store has succeeded.",
		func() (float64, bool) { return metrics.Bool(err == nil), true })
	m.Gauge("svidkit_last_good_saved_timestamp_seconds",
		"When what is stored was last had from the live source, in seconds since 1970.",
		func() (float64, bool) { return metrics.Seconds(saved), !saved.IsZero() })
	r.Metrics = m.Write
	return r
}

// fail records and logs a failed write.
func (l *LastGood) fail(ctx context.Context, msg string, err error) {
	l.mu.Lock()
	l.failed = err
	l.mu.Unlock()
	l.log.LogAttrs(ctx, slog.LevelWarn, msg, slog.Any("err", err))
}
