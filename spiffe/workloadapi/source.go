package workloadapi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/svidkit/svidkit/spiffe"
)

// Config configures a [Source]. Address or Client is required; every other zero means what is said
// here. [New] copies it.
type Config struct {
	// Address is where the Workload API is; see [ParseAddress].
	Address string

	// Client, if set, is used in the place of one that is made for Address.
	Client *Client

	// Hint picks the identity with that label among several (WAPI-22). Empty means the default
	// identity, which is the first. If the server has no identity with the hint there is none to hand
	// out, and the bundles are there all the same.
	Hint string

	// JWTBundles makes the source watch the bundles for JWT-SVIDs too, so that those it hands out have
	// JWT authorities. Without it they have none.
	JWTBundles bool

	// BundlesOnly is for programs that verify others and have no identity to present: the source
	// watches the bundles alone, and SVID and Snapshot return errors that wrap [ErrNotReady].
	BundlesOnly bool

	// Logger is told of each change (Info), and of what failed, was skipped or was withdrawn (Warn),
	// with the attributes rpc, server, id, not_after, err and retry_in. Nil means silence.
	Logger *slog.Logger
}

// Source keeps the identity and the trust bundles that the Workload API has for this workload. [New]
// makes one. It is a [spiffe.SVIDSource] and a [spiffe.BundleSource], and has the methods for
// readers that a *secretcache.Manager has. Its methods are safe for concurrent use, and those that
// read work before, during and after [Source.Run].
type Source struct {
	cfg    Config
	client *Client
	log    *slog.Logger

	// What readers read. Writers hold mu.
	cur     atomic.Pointer[state]
	changed atomic.Pointer[signal]

	mu      sync.Mutex
	running bool
	isReady bool // when it was published last
	x509    track
	jwt     track
	merged  map[spiffe.TrustDomain]merged // the bundles with authorities of both kinds
	clash   []error                       // why some of them have one kind only
}

// signal is a channel that is closed once.
type signal struct{ ch chan struct{} }

// state is what was published together. It never changes.
type state struct {
	snap    *spiffe.Snapshot  // nil if there is no identity to hand out
	bundles *spiffe.BundleSet // nil if there are none
	update  *X509Update       // nil if there is none, and with BundlesOnly
	crls    [][]byte
}

// merged is a bundle with what it was made of.
type merged struct{ x509, jwt, both *spiffe.Bundle }

// New checks cfg and returns a Source. It does nothing else: no goroutine, no connection.
func New(cfg Config) (*Source, error) {
	s := &Source{cfg: cfg, client: cfg.Client, log: cfg.Logger}
	switch {
	case cfg.Client != nil && cfg.Address != "":
		return nil, errors.New("workloadapi: new source: Config has an Address and a Client, which has an address of its own")
	case cfg.BundlesOnly && cfg.Hint != "":
		return nil, errors.New("workloadapi: new source: Config has BundlesOnly, and a Hint that picks an identity")
	}
	if s.client == nil {
		var err error
		if s.client, err = NewClient(cfg.Address, nil); err != nil {
			return nil, err
		}
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.cur.Store(&state{})
	s.changed.Store(&signal{make(chan struct{})})
	return s, nil
}

// Client returns the client that the source uses, to ask for tokens.
func (s *Source) Client() *Client { return s.client }

// SVID returns the current X.509-SVID with its key: the identity with the wanted hint, or the default
// one. It does not block, and it does not look at the clock: while the server cannot be reached the
// identity stays, in the end as an expired one. Before the first, and after the server has
// withdrawn it, the error wraps [ErrNotReady].
func (s *Source) SVID() (*spiffe.SVID, error) {
	if snap := s.cur.Load().snap; snap != nil {
		return snap.SVID()
	}
	return nil, s.notReady()
}

// Bundle returns the current trust bundle of td. It does not block. Before the first bundles, and
// after the server has withdrawn them, the error wraps [ErrNotReady]; for a trust domain that is not
// among them it wraps [spiffe.ErrUnknownTrustDomain].
func (s *Source) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if set := s.cur.Load().bundles; set != nil {
		return set.Bundle(td)
	}
	return nil, s.notReady()
}

// Snapshot returns the identity and the trust bundles as they were published together. It does not
// block. The error is that of [Source.SVID].
func (s *Source) Snapshot() (*spiffe.Snapshot, error) {
	if snap := s.cur.Load().snap; snap != nil {
		return snap, nil
	}
	return nil, s.notReady()
}

// X509 returns all identities of the workload, with their bundles, as the server last sent them: for
// programs that have several and choose by themselves (WAPI-22). It does not block. Before the
// first, after the server has withdrawn them, and with BundlesOnly the error wraps [ErrNotReady].
func (s *Source) X509() (*X509Update, error) {
	if u := s.cur.Load().update; u != nil {
		return u, nil
	}
	return nil, s.notReady()
}

// CRLs returns the certificate revocation lists that came with the bundles, in DER and as they were
// received: nil if there are none. They are shared.
func (s *Source) CRLs() [][]byte { return s.cur.Load().crls }

// Changed returns a channel that is closed when what the source hands out changes, and when
// something happens that [Source.Ready] waits for. Take it before reading, so that no change is
// missed:
//
//	for {
//		changed := s.Changed()
//		use(s.Snapshot())
//		<-changed
//	}
func (s *Source) Changed() <-chan struct{} { return s.changed.Load().ch }

// Updates returns the current snapshot first, if there is one, and then each newer one until ctx is
// done. A loop that is slow skips to the newest. That the server has withdrawn the identity is not a
// snapshot: who has to know waits for [Source.Changed]. The sequence may be used more than once.
func (s *Source) Updates(ctx context.Context) iter.Seq[*spiffe.Snapshot] {
	return func(yield func(*spiffe.Snapshot) bool) {
		var last *spiffe.Snapshot
		for ctx.Err() == nil {
			changed := s.Changed()
			if snap := s.cur.Load().snap; snap != last {
				last = snap
				if snap != nil && !yield(snap) {
					return
				}
				continue
			}
			select {
			case <-ctx.Done():
			case <-changed:
			}
		}
	}
}

// Ready waits until the source has what it is configured for: the identity with the wanted hint and
// its bundles, with JWTBundles those too, and with BundlesOnly the bundles alone. It needs Run to
// run. The error wraps [ErrNotReady], the cause of ctx, and what the last attempt failed with; it
// comes before ctx is done if the server has refused for good.
func (s *Source) Ready(ctx context.Context) error {
	for {
		changed := s.Changed()
		s.mu.Lock()
		have, final := s.ready(), s.x509.final || s.jwt.final
		s.mu.Unlock()
		switch {
		case have:
			return nil
		case final:
			return s.notReady()
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%w; waited for it: %w", s.notReady(), context.Cause(ctx))
		}
	}
}

// notReady is the error while something is missing.
func (s *Source) notReady() error {
	s.mu.Lock()
	x509, jwt, running := &s.x509, &s.jwt, s.running
	cause := x509.cause()
	missing := ""
	switch {
	case !x509.has:
		cause = cmp.Or(cause, jwt.cause())
	case s.cfg.JWTBundles && !jwt.has:
		missing, cause = "no bundles for JWT-SVIDs: ", jwt.cause()
	case s.cfg.BundlesOnly:
		missing, cause = "it is configured for bundles only", nil
	default:
		missing, cause = fmt.Sprintf("the server has no identity with the hint %q", clip(s.cfg.Hint, 128)), nil
	}
	waiting := !x509.has || s.cfg.JWTBundles && !jwt.has
	s.mu.Unlock()
	switch {
	case cause != nil:
		return fmt.Errorf("workloadapi: source: %w: %s%w", ErrNotReady, missing, cause)
	case !waiting:
	case !running:
		missing += "nothing was tried yet; is Run running?"
	default:
		missing += s.client.server + " has not answered yet"
	}
	return fmt.Errorf("workloadapi: source: %w: %s", ErrNotReady, missing)
}

// Run keeps the source current. It blocks until ctx is done, then ends what it has started, waits for
// it, and returns the cause of ctx; or until the server says that to go on is useless, and returns
// that error, an [*Error] that is Final. What was received stays readable after that. It returns at
// once, with an error, if it is running already; it may be called again after it has returned.
//
// It uses one stream, and one more with JWTBundles. If the server does not implement the latter, Run
// goes on without it.
func (s *Source) Run(ctx context.Context) error {
	s.mu.Lock()
	if s.running {
		s.mu.Unlock()
		return errors.New("workloadapi: run: already running")
	}
	s.running, s.x509.final, s.jwt.final = true, false, false
	s.mu.Unlock()

	inner, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	if s.cfg.JWTBundles {
		wg.Go(func() {
			for u, err := range s.client.WatchJWTBundles(inner) {
				if err != nil {
					s.failed(inner, &s.jwt, err)
					continue
				}
				s.took(inner, &s.jwt, func() { s.jwt.bundles, s.jwt.skipped = u.Bundles, u.Skipped })
			}
		})
	}
	var err error
	if s.cfg.BundlesOnly {
		err = s.runBundles(inner)
	} else {
		err = s.runX509(inner)
	}
	cancel()
	wg.Wait()
	if s.cfg.Client == nil {
		s.client.Close()
	}
	s.mu.Lock()
	s.running, s.x509.open, s.jwt.open = false, false, false
	s.mu.Unlock()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

func (s *Source) runX509(ctx context.Context) error {
	var last error
	for u, err := range s.client.WatchX509SVIDs(ctx) {
		if last = err; err != nil {
			s.failed(ctx, &s.x509, err)
			continue
		}
		s.took(ctx, &s.x509, func() {
			s.x509.update, s.x509.bundles, s.x509.crls, s.x509.skipped = u, u.Bundles, u.CRLs, u.Skipped
		})
	}
	return last
}

func (s *Source) runBundles(ctx context.Context) error {
	var last error
	for u, err := range s.client.WatchX509Bundles(ctx) {
		if last = err; err != nil {
			s.failed(ctx, &s.x509, err)
			continue
		}
		s.took(ctx, &s.x509, func() {
			s.x509.bundles, s.x509.crls, s.x509.skipped = u.Bundles, u.CRLs, u.Skipped
		})
	}
	return last
}

// took takes a good response over, with set, and publishes what follows from it.
func (s *Source) took(ctx context.Context, t *track, set func()) {
	s.mu.Lock()
	before := t.skipped
	set()
	t.good()
	published := s.publish()
	st := s.cur.Load()
	skipped := t.skipped
	s.mu.Unlock()

	if published {
		attrs := []slog.Attr{slog.String("server", s.client.server)}
		if st.snap != nil {
			svid, _ := st.snap.SVID() // of a snapshot: never an error
			attrs = append(attrs, slog.String("id", svid.ID().String()), slog.Time("not_after", svid.NotAfter()))
		}
		s.log.LogAttrs(ctx, slog.LevelInfo, "workloadapi: update", attrs...)
	}
	if !slices.EqualFunc(before, skipped, func(a, b error) bool { return a.Error() == b.Error() }) {
		for _, err := range skipped {
			s.log.LogAttrs(ctx, slog.LevelWarn, "workloadapi: part of a response skipped", slog.String("server", s.client.server), slog.Any("err", err))
		}
	}
}

// failed takes note of what a watch yields instead of a response.
func (s *Source) failed(ctx context.Context, t *track, err error) {
	e, ok := errors.AsType[*Error](err)
	if !ok {
		return // a watch yields nothing else
	}
	s.mu.Lock()
	t.bad(e)
	withdrawn := t.has && errors.Is(err, ErrDenied)
	if withdrawn {
		t.withdraw()
	}
	if !s.publish() && e.Final {
		s.wake()
	}
	s.mu.Unlock()

	msg := "workloadapi: attempt failed"
	switch {
	case withdrawn:
		msg = "workloadapi: the server has withdrawn what it sent"
	case e.Final:
		msg = "workloadapi: failed for good"
	case errors.Is(err, ErrBadResponse):
		msg = "workloadapi: response discarded"
	}
	s.log.LogAttrs(ctx, slog.LevelWarn, msg, slog.String("rpc", e.RPC), slog.String("server", s.client.server), slog.Any("err", e.Err), slog.Duration("retry_in", e.RetryIn))
}

// publish makes what was taken over visible to readers, and reports whether that is anything new. The
// caller holds mu.
func (s *Source) publish() bool {
	old := s.cur.Load()
	st := &state{update: s.x509.update, crls: s.x509.crls, bundles: s.bundles(old.bundles)}
	if st.update != nil {
		if svid, ok := st.update.byHint(s.cfg.Hint); ok {
			st.snap = old.snap
			if !st.snapshotOf(svid) {
				st.snap = spiffe.NewSnapshot(svid, st.bundles)
			}
		}
	}
	s.cur.Store(st)
	was := s.isReady
	s.isReady = s.ready()
	if s.isReady == was && st.snap == old.snap && st.bundles == old.bundles && sameIdentities(st.update, old.update) && slices.EqualFunc(st.crls, old.crls, slices.Equal) {
		return false // sent again after a reconnect
	}
	s.wake()
	return true
}

// snapshotOf reports whether st.snap is what it would be if it were made anew.
func (st *state) snapshotOf(svid *spiffe.SVID) bool {
	if st.snap == nil || st.snap.Bundles() != st.bundles {
		return false
	}
	have, _ := st.snap.SVID() // of a snapshot: never an error
	return have == svid
}

func sameIdentities(a, b *X509Update) bool {
	if a == nil || b == nil {
		return a == b
	}
	return slices.Equal(a.Identities, b.Identities)
}

// wake tells those who wait on Changed. The caller holds mu and has published.
func (s *Source) wake() { close(s.changed.Swap(&signal{make(chan struct{})}).ch) }

// bundles returns the bundles of both kinds as one set, or nil if there are none. Authorities of one
// kind never verify the other: a bundle keeps them apart (WAPI-16). The caller holds mu.
func (s *Source) bundles(old *spiffe.BundleSet) *spiffe.BundleSet {
	s.clash = nil
	if !s.cfg.JWTBundles || s.jwt.bundles == nil {
		s.merged = nil
		return s.x509.bundles
	}
	all := make(map[spiffe.TrustDomain]merged)
	if s.x509.bundles != nil {
		for b := range s.x509.bundles.All() {
			all[b.TrustDomain()] = merged{x509: b}
		}
	}
	for b := range s.jwt.bundles.All() {
		m := all[b.TrustDomain()]
		m.jwt = b
		all[b.TrustDomain()] = m
	}
	list := make([]*spiffe.Bundle, 0, len(all))
	for td, m := range all {
		switch last := s.merged[td]; {
		case m.jwt == nil:
			m.both = m.x509
		case m.x509 == nil:
			m.both = m.jwt
		case last.x509 == m.x509 && last.jwt == m.jwt:
			m.both = last.both
		default:
			c := m.x509.Contents()
			c.JWTAuthorities = maps.Collect(m.jwt.JWTAuthorities())
			both, err := spiffe.NewBundle(td, c)
			if err != nil { // together they are over the limit on authorities
				both = m.x509
				s.clash = append(s.clash, fmt.Errorf("workloadapi: the keys for JWT-SVIDs skipped: %w", err))
			}
			m.both = both
		}
		all[td] = m
		list = append(list, m.both)
	}
	s.merged = all
	set, err := spiffe.NewBundleSet(list...)
	if err != nil {
		panic(err) // the map has one bundle for each trust domain
	}
	if set.Equal(old) {
		return old
	}
	return set
}

// String names the server. A Source does not print its keys.
func (s *Source) String() string { return "workloadapi.Source(" + s.client.server + ")" }

// GoString is String: the verb %#v must not walk to the keys either.
func (s *Source) GoString() string { return s.String() }

// LogValue is String as a log value.
func (s *Source) LogValue() slog.Value { return slog.StringValue(s.String()) }
