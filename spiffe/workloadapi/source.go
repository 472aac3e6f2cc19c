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
	"time"

	"github.com/svidkit/svidkit/internal/certs/secretset"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
)

// Config configures a [Source]. Address or Client is required; every other zero means what is said
// here. [New] copies it.
type Config struct {
	// Address is where the Workload API is served:
	//
	//	unix:///run/spire/agent/public/api.sock    an absolute path; no host, no query, no fragment
	//	tcp://127.0.0.1:8081                       an IP address and a port; nothing after it
	//
	// It is usually the value of the environment variable [SocketEnv]. The error for another form has
	// the corrected address where that is clear. For Windows' named pipes, which are not in the
	// standard, set [ClientOptions].HTTPClient.
	Address string

	// Client, if set, is used instead of a new one for Address. The program may share it with other Sources and make
	// calls of its own with it.
	Client *Client

	// Hint selects the identity with that label among several. Empty means the default identity, the first one. If the
	// server has no identity with the hint, the source has bundles and no identity. See [Source.Pick] for programs with
	// several identities.
	Hint string

	// JWTBundles makes the source watch the bundles for JWT-SVIDs too. Without it the bundles have no JWT authorities.
	JWTBundles bool

	// BundlesOnly is for programs that verify peers and present no identity: the source watches the bundles alone, and
	// SVID and Snapshot return errors that wrap [spiffe.ErrNotReady].
	BundlesOnly bool

	// Logger gets each change (Info), and failures and what was skipped or withdrawn (Warn), with the attributes rpc,
	// server, id, not_after, err and retry_in. The first discarded response is logged at once, and then their number
	// each minute. Nil means no logs.
	Logger *slog.Logger
}

// Source has the current identity and trust bundles of this workload. [Start] or [New] makes one. It is a
// [spiffe.SVIDSource], a [spiffe.BundleSource], a jwtsvid.Source and an sds.Source. Its methods are safe for concurrent
// use, and those that read work before, during and after [Source.Run].
type Source struct {
	redacted
	*feed
	choice      Choice
	from        *Source               // that it was picked from; nil if it follows the feed itself
	cur         atomic.Pointer[state] // what readers read; writers hold mu, unless it was picked: see now
	subscribers secretset.Subscribers
}

type redacted = redact.Text

// feed is the stream that a Source shares with the Sources that were picked from it.
type feed struct {
	cfg    Config
	client *Client
	log    *slog.Logger
	bad    *ratelog.Log // of responses
	news   renew.Signal
	life   lifecycle.Life

	early renew.Signal // of a response that is not in force yet

	mu       sync.Mutex
	isReady  bool // when it was published last
	x509     track
	jwt      track
	unmerged []error   // why some bundles have authorities of one kind only
	told     []*Source // were picked, and have had subscribers
}

// state is what was published together. It never changes.
type state struct {
	snap    *spiffe.Snapshot  // nil if there is no identity to hand out
	bundles *spiffe.BundleSet // nil if there are none
	update  *Update           // of the X.509 stream, nil if there is none
	denied  bool              // the server has said that there is none

	of       *state // that of the Source which it was picked from, or nil
	fallback bool   // snap has the default identity in the place of the one that was picked
}

// Start returns a Source that is ready, and runs it until [Source.Close]. The end of ctx ends a start that is not done
// yet, and nothing after that. If Start fails, nothing is left running, and the error is that of [New] or
// [Source.Ready]: it says why there is no identity.
func Start(ctx context.Context, cfg Config) (*Source, error) {
	s, err := New(cfg)
	if err != nil {
		return nil, err
	}
	return lifecycle.Started(ctx, s, &s.life, s.run)
}

// New checks cfg and returns a Source. It does nothing else: no goroutine, no connection. The caller calls
// [Source.Run].
func New(cfg Config) (*Source, error) {
	s := &Source{
		feed:   &feed{cfg: cfg, client: cfg.Client, log: ratelog.Patient(cfg.Logger)},
		choice: Choice{Hint: cfg.Hint},
	}
	switch {
	case cfg.Client != nil && cfg.Client.http == nil:
		return nil, errors.New("workloadapi: new source: Config.Client is the zero one; NewClient makes one")
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
	s.redacted = redact.New("workloadapi.Source(" + s.client.server + ")")
	s.bad = ratelog.New(s.log, 0)
	s.cur.Store(&state{})
	return s, nil
}

// SVID returns the current X.509-SVID with its key: the identity with the wanted hint, or the default one. It neither
// blocks nor checks the clock: while the server cannot be reached the identity stays, even after it has expired. Before
// the first identity, and after the server has withdrawn it, the error wraps [spiffe.ErrNotReady].
func (s *Source) SVID() (*spiffe.SVID, error) {
	snap, err := s.Snapshot()
	if err != nil {
		return nil, err
	}
	return snap.SVID()
}

// Bundle returns the current trust bundle of td. It does not block. Before the first bundles, and
// after the server has withdrawn them, the error wraps [spiffe.ErrNotReady]; for a trust domain that is not
// among them it wraps [spiffe.ErrUnknownTrustDomain].
func (s *Source) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if set := s.now().bundles; set != nil {
		return set.Bundle(td)
	}
	return nil, s.notReady()
}

// Snapshot returns the identity and the trust bundles as they were published together. It does not
// block. The error is that of [Source.SVID].
func (s *Source) Snapshot() (*spiffe.Snapshot, error) {
	if snap := s.now().snap; snap != nil {
		return snap, nil
	}
	return nil, s.notReady()
}

// X509 returns all identities of the workload that are in force, with their bundles, for programs that choose among them
// themselves. It does not block. Before the first response, after the server has withdrawn them, and
// with BundlesOnly the error wraps [spiffe.ErrNotReady].
func (s *Source) X509() (*Update, error) {
	if u := s.now().update; u != nil && len(u.Identities) > 0 {
		return u, nil
	}
	return nil, s.notReady()
}

// CRLs returns the certificate revocation lists that came with the bundles, in DER as they were received; nil if there
// are none. The caller must not change them.
func (s *Source) CRLs() [][]byte { return s.now().crls() }

func (st *state) crls() [][]byte {
	if st.update == nil {
		return nil
	}
	return st.update.CRLs
}

// Fetch asks the server for a JWT-SVID of the identity of the source, or of the default identity while there is none,
// for one or more audiences. It works without Run. Each call makes a new token: put a *jwtsvid.Cache, of which this is
// the Source, in front for many requests.
//
// The error is an [*Error], or wraps [spiffe.ErrNotReady] if no identity has the wanted hint.
func (s *Source) Fetch(ctx context.Context, audience ...string) (token string, err error) {
	var id spiffe.ID
	if snap := s.now().snap; snap != nil {
		svid, _ := snap.SVID() // of a snapshot: never an error
		id = svid.ID()
	}
	all, err := s.client.FetchJWTSVIDs(ctx, id, audience...)
	if err != nil {
		return "", err
	}
	i, _, ok := s.choice.index(len(all), func(i int) (string, spiffe.ID) { return all[i].Hint, all[i].ID })
	if !ok {
		return "", s.choice.missing(s.now().update)
	}
	return all[i].Token(), nil
}

// Changed returns a channel that is closed when what the source hands out changes, and when
// something happens that [Source.Ready] or [Source.GenerateSecret] waits for. Take it before reading, so that no change is
// missed:
//
//	for {
//		changed := s.Changed()
//		use(s.Snapshot())
//		<-changed
//	}
func (s *Source) Changed() <-chan struct{} { return s.news.Changed() }

// Ready waits until the source has what it is configured for: the identity with the wanted hint and its bundles, the
// JWT bundles with JWTBundles, and the bundles alone with BundlesOnly. The error wraps [spiffe.ErrNotReady], the cause
// of ctx and the last failure. It comes before ctx is done if the server refuses for good, and after [Source.Close]. If
// Run was never called, it says so.
func (s *Source) Ready(ctx context.Context) error {
	return s.await(ctx, s.notReady, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.ready(s.now().snap)
	})
}

// await waits until have, which is called after each change, reports true. If it never does, await returns the error of
// why.
func (s *Source) await(ctx context.Context, why func() error, have func() bool) error {
	there := false
	ended := s.life.Await(ctx, s.Changed, func() bool {
		there = have()
		return there || s.final()
	})
	if there {
		return nil
	}
	err := why()
	if ended == nil || errors.Is(err, ended) {
		return err
	}
	return fmt.Errorf("%w; waited for it: %w", err, ended)
}

// final reports whether the server has refused for good.
func (s *Source) final() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.x509.final || s.jwt.final
}

// notReady is the error while something is missing.
func (s *Source) notReady() error {
	idle := s.life.Idle()
	s.mu.Lock()
	defer s.mu.Unlock()
	t, missing := &s.x509, ""
	switch {
	case s.x509.update == nil:
	case !s.cfg.BundlesOnly && !s.choice.meets(s.x509.update):
		return s.choice.missing(s.x509.update)
	case s.cfg.JWTBundles && s.jwt.update == nil:
		t, missing = &s.jwt, "no bundles for JWT-SVIDs: "
	case s.cfg.BundlesOnly:
		return fmt.Errorf("workloadapi: source: %w: it is configured for bundles only", spiffe.ErrNotReady)
	}
	cause := t.Err
	if cause == nil && t == &s.x509 {
		cause = s.jwt.Err
	}
	if cause == nil && (idle == nil || !t.began.IsZero()) {
		cause = t.silence(s.client.server)
	}
	switch {
	case idle == nil:
	case cause == nil || errors.Is(idle, cause):
		cause = idle
	default:
		cause = fmt.Errorf("%w; %w", cause, idle)
	}
	return fmt.Errorf("workloadapi: source: %w: %s%w", spiffe.ErrNotReady, missing, cause)
}

// Run keeps the source current. It blocks until ctx is done or [Source.Close] is called, waits for what it has started,
// and returns nil; or until the server refuses for good, and returns that [*Error], which is Final. What was received
// stays readable. It is an error to call Run while it runs, or after Close; else it may be called again.
//
// It uses one stream, and another one with JWTBundles. If the server does not implement the latter, Run goes on without
// it.
func (s *Source) Run(ctx context.Context) error {
	if s.from != nil {
		return errors.New("workloadapi: run: this source was picked from another; run that one")
	}
	err := s.life.Run(ctx, s.run)
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	return fmt.Errorf("workloadapi: run: %w", err)
}

// Close ends [Source.Run], or what [Start] has started, for good, and waits for it. Unless [Config] has a Client, which
// stays the caller's, it closes all connections, and calls such as [Source.Fetch] fail from then on. What was received
// stays readable. Do not call Close from a function of [Source.Subscribe]. The error is always nil.
func (s *Source) Close() error {
	if s.from != nil {
		return nil
	}
	err := s.life.Close()
	if s.cfg.Client == nil {
		s.client.conns.End(lifecycle.ErrClosed)
	}
	return err
}

func (s *Source) run(ctx context.Context) error {
	s.mu.Lock()
	s.x509.begin()
	s.jwt.begin()
	s.mu.Unlock()

	inner, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { s.settle(inner) })
	if s.cfg.JWTBundles {
		wg.Go(func() { _ = s.follow(inner, &s.jwt, s.client.WatchJWTBundles(inner)) })
	}
	watch := s.client.WatchX509SVIDs
	if s.cfg.BundlesOnly {
		watch = s.client.WatchX509Bundles
	}
	err := s.follow(inner, &s.x509, watch(inner))
	cancel()
	wg.Wait()
	if s.cfg.Client == nil {
		s.client.CloseIdleConnections()
		time.AfterFunc(time.Second, s.client.CloseIdleConnections) // net/http may not have noticed yet that a stream has ended
	}
	s.mu.Lock()
	s.x509.end()
	s.jwt.end()
	s.mu.Unlock()
	return err
}

// follow adopts what a watch yields, and returns its last failure.
func (s *Source) follow(ctx context.Context, t *track, updates iter.Seq2[*Update, error]) (last error) {
	for u, err := range updates {
		if last = err; err == nil {
			s.took(ctx, t, u)
		} else if e, ok := errors.AsType[*Error](err); ok { // a watch yields nothing else
			s.failed(ctx, t, e)
		}
	}
	return last
}

// settle takes over identities that came before their time once that has come.
func (s *Source) settle(ctx context.Context) {
	for ctx.Err() == nil {
		changed := s.early.Changed()
		s.mu.Lock()
		at := s.x509.again
		s.mu.Unlock()
		switch wait := time.Until(at); {
		case at.IsZero():
			select {
			case <-changed:
			case <-ctx.Done():
			}
		case wait > 0:
			renew.Wait(ctx, wait, changed)
		default:
			s.took(ctx, &s.x509, nil)
		}
	}
}

// took adopts a good response, or what has become valid of the last one if u is nil, and publishes the new state.
func (s *Source) took(ctx context.Context, t *track, u *Update) {
	t.turn.Lock()
	defer t.turn.Unlock()
	s.mu.Lock()
	before, old := t.Skipped, s.cur.Load()
	if u != nil {
		t.good(u)
	}
	t.settle(time.Now())
	published := s.publish()
	st, after := s.cur.Load(), t.Skipped
	s.mu.Unlock()
	s.early.Notify()
	if t == &s.x509 {
		s.tell(old)
	}

	server := slog.String("server", s.client.server)
	if published {
		attrs := []slog.Attr{server}
		if st.snap != nil {
			svid, _ := st.snap.SVID() // of a snapshot: never an error
			attrs = append(attrs, slog.String("id", svid.ID().String()), slog.Time("not_after", svid.NotAfter()))
		}
		s.log.LogAttrs(ctx, slog.LevelInfo, "workloadapi: update", attrs...)
	}
	if !slices.EqualFunc(before, after, func(a, b error) bool { return a.Error() == b.Error() }) {
		for _, err := range after {
			s.log.LogAttrs(ctx, slog.LevelWarn, "workloadapi: part of a response skipped", server, slog.Any("err", err))
		}
	}
}

// failed records what a watch yields instead of a response.
func (s *Source) failed(ctx context.Context, t *track, e *Error) {
	t.turn.Lock()
	defer t.turn.Unlock()
	s.mu.Lock()
	old := s.cur.Load()
	withdrawn := t.bad(e)
	if !s.publish() && e.Final {
		s.news.Notify()
	}
	s.mu.Unlock()
	if t == &s.x509 {
		s.tell(old)
	}

	msg := "workloadapi: attempt failed"
	switch {
	case withdrawn:
		msg = "workloadapi: the server has withdrawn what it sent"
	case e.Final:
		msg = "workloadapi: failed for good"
	case errors.Is(e, ErrBadResponse): // which a server can send at any rate
		s.bad.Warn("workloadapi: response discarded", e.RPC, slog.String("server", s.client.server), slog.Any("err", e.Err))
		return
	}
	s.log.LogAttrs(ctx, slog.LevelWarn, msg, slog.String("rpc", e.RPC), slog.String("server", s.client.server), slog.Any("err", e.Err), slog.Duration("retry_in", e.RetryIn))
}

// publish makes the adopted state visible to readers, and reports whether anything is new. The caller holds mu.
func (s *Source) publish() bool {
	old := s.cur.Load()
	st := &state{update: s.x509.update, bundles: s.bundles(old.bundles), denied: s.x509.denied}
	if st.update != nil {
		if svid, _ := s.choice.pick(st.update); svid != nil {
			if st.snap = old.snap; !snapshotOf(st.snap, svid, st.bundles) {
				st.snap = spiffe.NewSnapshot(svid, st.bundles)
			}
		}
	}
	s.cur.Store(st)
	was := s.isReady
	s.isReady = s.ready(st.snap)
	if s.isReady == was && st.denied == old.denied && st.snap == old.snap && st.bundles == old.bundles &&
		sameIdentities(st.update, old.update) && slices.EqualFunc(st.crls(), old.crls(), slices.Equal) {
		return false // sent again after a reconnect
	}
	s.news.Notify()
	return true
}

// snapshotOf reports whether snap is what it would be if it were made anew.
func snapshotOf(snap *spiffe.Snapshot, svid *spiffe.SVID, bundles *spiffe.BundleSet) bool {
	if snap == nil || snap.Bundles() != bundles {
		return false
	}
	have, _ := snap.SVID() // of a snapshot: never an error
	return have == svid
}

func sameIdentities(a, b *Update) bool {
	if a == nil || b == nil {
		return a == b
	}
	return slices.Equal(a.Identities, b.Identities)
}

// bundles returns the bundles of both kinds as one set, or nil if there are none. Authorities of one
// kind never verify the other: a bundle keeps them apart (WAPI-16). A bundle that is as in old is the same
// value. The caller holds mu.
func (s *Source) bundles(old *spiffe.BundleSet) *spiffe.BundleSet {
	x509, jwt := s.x509.bundles(), s.jwt.bundles()
	s.unmerged = nil
	if jwt == nil || x509 == nil {
		return cmp.Or(x509, jwt)
	}
	all := make(map[spiffe.TrustDomain]*spiffe.Bundle)
	for b := range x509.All() {
		all[b.TrustDomain()] = b
	}
	for b := range jwt.All() {
		td := b.TrustDomain()
		if one := all[td]; one != nil {
			c := one.Contents()
			c.JWTAuthorities = maps.Collect(b.JWTAuthorities())
			var err error
			if b, err = spiffe.NewBundle(td, c); err != nil { // together they are over the limit on authorities
				s.unmerged = append(s.unmerged, fmt.Errorf("workloadapi: the keys for JWT-SVIDs skipped: %w", err))
				b = one
			}
		}
		if old != nil {
			if last, err := old.Bundle(td); err == nil && last.Equal(b) {
				b = last
			}
		}
		all[td] = b
	}
	set := setOf(all)
	if set.Equal(old) {
		return old
	}
	return set
}

// setOf returns bundles as a set.
func setOf(bundles map[spiffe.TrustDomain]*spiffe.Bundle) *spiffe.BundleSet {
	set, err := spiffe.NewBundleSet(slices.Collect(maps.Values(bundles))...)
	if err != nil {
		panic(err) // the map has one bundle for each trust domain
	}
	return set
}
