// Package federation fetches the trust bundles of other trust domains from their bundle endpoints, keeps
// them fresh, and serves bundles to others.
//
// Most programs need [Start], which waits for the bundles. The [Manager] is a [spiffe.BundleSource]:
//
//	m, err := federation.Start(ctx, federation.Config{Relationships: []federation.Relationship{
//		{TrustDomain: partner, URL: "https://bundles.partner.test/", Profile: federation.Web{}},
//	}})
//	…
//	defer m.Close()
//	v, err := spiffe.NewVerifier(m, allow, nil)
//
// [Fetch] gets one bundle once. A bundle endpoint is the handler of [NewHandler] on a server with the TLS
// configuration of [ServerConfig]. For verifiers of JWT-SVIDs that know OpenID Connect but not SPIFFE, use package
// jwtsvid.
//
// # Relationships
//
// For each relationship an operator configures the name of the trust domain, the URL of its endpoint, and the profile
// by which the endpoint authenticates; none follows from another. [Web] is https_web: a certificate
// for the URL's host from an authority that the host trusts. [SPIFFE] is https_spiffe: an X.509-SVID with one exact
// ID.
//
// A relationship has one direction: it lets this side verify the other, and not the other way round.
//
// # Guarantees
//
// Readers load pointers: they never wait for a lock, for an endpoint or for each other.
//
// A failed fetch replaces nothing. The last good bundle stays in force, however old it is; [Manager.Status] has its
// age.
//
// An empty bundle is an answer: everything in that trust domain is revoked.
//
// Sequence numbers do not go down. A bundle with a lower number than the bundle in force is refused and reported; an
// operator can accept it with [Manager.Set].
//
// A single implausible answer changes nothing. An answer is implausible if the sequence number rises by more than
// 10,000, unless both numbers are times; if the number is lost; or if authorities disappear without a higher number.
// Such a bundle is held as [Status].Refused until an operator gives it to [Manager.Set], or until the endpoint has
// repeated it at least 3 times in at least 30 minutes, with no other answer between. Meanwhile the Manager fetches
// at least every five minutes, unless MinInterval is longer. So a publisher that changes from counting to a clock is
// held for half an hour too.
//
// An endpoint cannot take more than its share. A document may have 1 MiB. A fetch has a deadline. Redirects lead only
// to further https URLs whose servers authenticate in the same way. Proxies of the environment are not used: a
// program that needs one sets [Config].DialContext. Sixteen fetches run at the same time. A fetch that lasts for more
// than a second gives its slot to the next, and endpoints that failed last time come last.
//
// There is one request per interval: the bundle's refresh hint within bounds, give or take a tenth, or five minutes
// without a hint. A failure waits for the next interval too.
//
// [Manager.Remove] takes effect at once: when it returns, a verifier that asks the Manager accepts no peer of that
// trust domain.
//
// # Self-serving endpoints
//
// An endpoint whose SVID is in the trust domain that it serves is verified by the newest known bundle of that domain:
// at first the configured one, then the fetched one. So a consumer that was away for longer than the roots
// overlap, or that has received an empty bundle, needs an operator: configure a newer bundle, or call [Manager.Set].
// [Config].Dir keeps the last good bundles over a restart, which makes that rarer.
//
// # Limits
//
// Bundles are never merged: the bundle of one domain never speaks for another. A Manager does not hold the bundle of
// the program's own trust domain, which comes from a CA or the Workload API. It does not decide which trust domains
// to trust: relationships come from the operator, by a channel that others cannot write to.
package federation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/files/store"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
)

// Config configures a [Manager]. [Fetch] uses its Timeout, DialContext and Logger. Each zero field means the default
// named here. [New] copies the Config.
type Config struct {
	// Relationships are the initial ones, at most one for each trust domain. See [Manager.Add].
	Relationships []Relationship

	// MinInterval and MaxInterval bound the time between two fetches of one bundle, whatever its refresh hint. 0
	// means one minute and 24 hours, and more than 100 years means 100 years. While there is no bundle at all, the
	// interval is MinInterval. If both are equal, the interval is longer by a random part of up to a tenth.
	MinInterval, MaxInterval time.Duration

	// Dir is a directory for the last good bundles, one file for each trust domain. [Manager.Run] makes it if it is
	// missing, and reads it when it starts. It belongs to one Manager. It and the directories above it must belong
	// to the user of this process or to root. If other users can write to it, as to an emptyDir of Kubernetes, the
	// Manager keeps the files in a directory svidkit-bundles, which it makes. A file that cannot be used, that
	// belongs to another user or that others can write to is ignored, with a warning. "" means no directory.
	Dir string

	// Timeout bounds a fetch from the first dial to the last byte, redirects included. 0 or less means 30 seconds.
	Timeout time.Duration

	// DialContext makes the connections. It must be safe for concurrent use and must return when its context is
	// done. Nil means a [net.Dialer].
	DialContext func(ctx context.Context, network, addr string) (net.Conn, error)

	// Logger gets a record of every fetch, at Info if it succeeded and at Warn if it failed or
	// needs attention, with the attributes trust_domain, url, redirected_to, peer, sequence, outcome,
	// authorities, skipped, next and err. URLs are without their query. Nil means no logs.
	Logger *slog.Logger
}

// withDefaults sets the fields that a fetch needs.
func (c *Config) withDefaults() {
	if c.Timeout <= 0 {
		c.Timeout = 30 * time.Second
	}
	if c.DialContext == nil {
		c.DialContext = new(net.Dialer).DialContext
	}
	c.Logger = ratelog.Patient(c.Logger)
}

// Manager keeps the bundles of other trust domains. [Start] or [New] makes one. Its methods are safe for concurrent
// use, and the methods that read work before, during and after [Manager.Run].
type Manager struct {
	cfg Config

	// For readers. Writers hold mu.
	relations atomic.Pointer[map[spiffe.TrustDomain]*relation] // replaced, never changed
	set       atomic.Pointer[spiffe.BundleSet]                 // all bundles; nil if it must be made again
	changed   renew.Signal

	life lifecycle.Life

	mu       sync.Mutex
	loop     renew.Loop[*relation]
	waiting  map[*relation]spiffe.TrustDomain // for the bundle of this trust domain, which verifies their endpoints
	outcomes map[outcome]uint64

	store *store.Store // never used while mu is held; nil without a Config.Dir
}

// Start returns a Manager that has a bundle of every relationship, and runs until [Manager.Close]. It combines
// [New], [Manager.Run] in a goroutine, and [Manager.Ready]. ctx bounds the start only. If Start fails, nothing is
// left running, and the error comes from New or from Ready: it names each bundle that is missing, and says why.
//
// A program that must start even when a partner's endpoint is down calls New and Run: peers of a trust domain whose
// bundle is missing are refused until it arrives.
func Start(ctx context.Context, cfg Config) (*Manager, error) {
	m, err := New(cfg)
	if err != nil {
		return nil, err
	}
	return lifecycle.Started(ctx, m, &m.life, m.run)
}

// New checks cfg and returns a Manager. It does nothing else: no goroutine, no file, no request. The caller calls
// [Manager.Run].
func New(cfg Config) (*Manager, error) {
	m := &Manager{cfg: cfg, outcomes: map[outcome]uint64{}, waiting: map[*relation]spiffe.TrustDomain{}}
	m.cfg.MinInterval = cmp.Or(cfg.MinInterval, time.Minute)
	m.cfg.MaxInterval = cmp.Or(cfg.MaxInterval, max(24*time.Hour, m.cfg.MinInterval))
	m.cfg.MinInterval, m.cfg.MaxInterval = min(m.cfg.MinInterval, renew.Longest), min(m.cfg.MaxInterval, renew.Longest)
	m.cfg.Relationships = nil
	m.cfg.withDefaults()
	if m.cfg.MinInterval < 0 || m.cfg.MinInterval > m.cfg.MaxInterval {
		return nil, fmt.Errorf("federation: new: Config.MinInterval is %v and MaxInterval %v: "+
			"neither may be negative, nor the first the longer one", m.cfg.MinInterval, m.cfg.MaxInterval)
	}
	m.store = newStore(&m.cfg)
	m.loop = renew.Loop[*relation]{
		Mu: &m.mu, Attempt: m.attempt, Slots: concurrency, Slow: slow, FailingLast: true,
	}

	all := make(map[spiffe.TrustDomain]*relation, len(cfg.Relationships))
	for _, r := range cfg.Relationships {
		e, err := r.check()
		switch {
		case err != nil:
			return nil, fmt.Errorf("federation: new: %w", err)
		case all[r.TrustDomain] != nil:
			err := relationshipError(r.TrustDomain, "two relationships with one trust domain")
			return nil, fmt.Errorf("federation: new: %w", err)
		}
		all[r.TrustDomain] = m.newRelation(e)
	}
	for _, r := range all {
		if err := r.e.anchorsIn(all); err != nil {
			return nil, fmt.Errorf("federation: new: %w", err)
		}
		m.loop.Put(r, 0)
	}
	m.relations.Store(&all)
	return m, nil
}

// Bundle returns the bundle of td that is in force. It does not block. If td has no relationship, or its bundle was
// not fetched yet, the error wraps [spiffe.ErrUnknownTrustDomain].
func (m *Manager) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	r := m.all()[td]
	if r == nil {
		return nil, fmt.Errorf("federation: there is no relationship with trust domain %q: %w",
			td, spiffe.ErrUnknownTrustDomain)
	}
	if b := r.bundle.Load(); b != nil {
		return b, nil
	}
	return nil, errNotFetched(td)
}

func errNotFetched(td spiffe.TrustDomain) error {
	return fmt.Errorf("federation: no bundle was fetched yet for trust domain %q: %w",
		td, spiffe.ErrUnknownTrustDomain)
}

// Bundles returns all bundles that are in force, in the same set until something changes.
func (m *Manager) Bundles() *spiffe.BundleSet {
	if s := m.set.Load(); s != nil {
		return s
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if s := m.set.Load(); s != nil {
		return s
	}
	var bundles []*spiffe.Bundle
	for _, r := range m.all() {
		if b := r.bundle.Load(); b != nil {
			bundles = append(bundles, b)
		}
	}
	s, _ := spiffe.NewBundleSet(bundles...) // fails for a nil or a second bundle only
	m.set.Store(s)
	return s
}

// Changed returns a channel that is closed when a bundle is replaced, appears, or ends. Take it
// before reading, so that no change is missed:
//
//	for {
//		changed := m.Changed()
//		use(m.Bundles())
//		<-changed
//	}
func (m *Manager) Changed() <-chan struct{} { return m.changed.Changed() }

// Add adds a relationship, and fetches its bundle at once while Run runs. If its trust domain has a relationship
// already, the parameters change and the bundle in force stays. The endpoint of a [SPIFFE] profile without Bundles
// must be in a trust domain that has a relationship. An error leaves everything as it was.
func (m *Manager) Add(r Relationship) error {
	e, err := r.check()
	if err != nil {
		return fmt.Errorf("federation: add: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	all := maps.Clone(m.all())
	if err := e.anchorsIn(all); err != nil {
		return fmt.Errorf("federation: add: %w", err)
	}
	next := m.newRelation(e)
	if old := all[e.td]; old != nil {
		m.drop(old)
		next.bundle.Store(old.bundle.Load())
	}
	all[e.td] = next
	m.relations.Store(&all)
	m.loop.Put(next, 0)
	return nil
}

// all returns the relations, which callers must not change. The zero Manager has none.
func (m *Manager) all() map[spiffe.TrustDomain]*relation {
	if p := m.relations.Load(); p != nil {
		return *p
	}
	return nil
}

// Remove ends the relationship with td. When it returns, the bundle is gone, so that no peer of the domain is
// accepted any more; the channel of [Manager.Changed] is closed; a fetch that is under way is canceled; and the
// stored copy is deleted. Without such a relationship it does nothing. Only the deletion of the stored copy can
// fail.
//
// If the endpoint of another relationship is in td, it can no longer be verified, and its fetches fail.
func (m *Manager) Remove(td spiffe.TrustDomain) error {
	m.mu.Lock()
	old := m.all()[td]
	if old == nil {
		m.mu.Unlock()
		return nil
	}
	all := maps.Clone(m.all())
	delete(all, td)
	m.relations.Store(&all)
	m.drop(old)
	m.signalChange()
	m.mu.Unlock()
	m.cfg.Logger.Info("federation: relationship ended", slog.String("trust_domain", td.String()))
	if err := m.unsave(td); err != nil {
		return fmt.Errorf("federation: remove: the stored bundle of %q: %w", td, err)
	}
	return nil
}

// Set replaces the bundle of a trust domain, which must have a relationship. It does not compare sequence numbers:
// an operator uses it to accept a bundle with a lower or implausible number, such as [Status].Refused, or to verify
// a self-serving endpoint again after a missed rotation. The bundle stays until a later fetch brings a plausible
// bundle that supersedes it. After a restart a [SPIFFE.Initial] with a higher number counts as newer again, so
// update that as well.
//
// If the last fetch failed because the endpoint could not be authenticated, the next one is due at once.
func (m *Manager) Set(b *spiffe.Bundle) error {
	if b == nil {
		return errors.New("federation: set: there is no bundle")
	}
	m.mu.Lock()
	r := m.all()[b.TrustDomain()]
	if r == nil {
		m.mu.Unlock()
		return fmt.Errorf("federation: set: there is no relationship with trust domain %q: %w",
			b.TrustDomain(), spiffe.ErrUnknownTrustDomain)
	}
	r.refused = nil
	r.offers.Forget()
	r.decree.Store(true)
	m.publish(r, b)
	if errors.Is(r.err, errNotAuthenticated) {
		m.loop.Hasten(r, 0)
	}
	m.mu.Unlock()
	attrs := append(describe(b), slog.String("trust_domain", b.TrustDomain().String()), slog.String("outcome", "set"))
	const set = "federation: bundle was set by an operator"
	m.cfg.Logger.LogAttrs(context.Background(), slog.LevelWarn, set, attrs...)
	m.save(context.Background(), r)
	return nil
}

// publish puts b in force. The caller holds mu.
func (m *Manager) publish(r *relation, b *spiffe.Bundle) {
	if r.bundle.Swap(b) == b {
		return
	}
	m.signalChange()
	for other, td := range m.waiting { // they made no request, so they need not wait longer
		if td == b.TrustDomain() {
			delete(m.waiting, other)
			m.loop.Hasten(other, 0)
		}
	}
}

func (m *Manager) signalChange() {
	m.set.Store(nil)
	m.changed.Notify()
}

// drop takes a relation out of service. The caller holds mu and has removed the relation from the map.
func (m *Manager) drop(r *relation) {
	delete(m.waiting, r)
	m.loop.Remove(r)
	r.Cancel()
}

// Status is the state of one relationship at one moment.
type Status struct {
	TrustDomain spiffe.TrustDomain
	URL         string // of the endpoint, without its query

	// Bundle is the bundle in force, with its sequence number; nil before the first.
	Bundle *spiffe.Bundle

	// Fresh says that the last attempt confirmed Bundle, at most twice the interval ago. A bundle that is not fresh
	// stays in force.
	Fresh bool

	// LastSuccess is the time of the endpoint's last good answer, even if nothing had changed; zero if there is none
	// since the relationship was added. NextAttempt is when Run will try again; zero while an attempt is under way.
	LastSuccess, NextAttempt time.Time

	// Failures counts the failed attempts since the last good one. Err is the last failure, as from [Fetch], or nil.
	Failures int
	Err      error

	// Refused is the bundle that the endpoint offered and the Manager refused for a lower or implausible sequence
	// number, or nil; Err has the reason. It is an alarm for an operator, who can accept the bundle with
	// [Manager.Set].
	Refused *spiffe.Bundle
}

// Status returns the state of all relationships, for health checks and diagnosis, sorted by trust
// domain.
func (m *Manager) Status() []Status {
	m.mu.Lock()
	relations := m.all()
	all := make([]Status, 0, len(relations))
	for td, r := range relations {
		b := r.bundle.Load()
		fresh := b != nil && r.Failures() == 0 && r.confirmed == b && time.Since(r.success) <= 2*r.interval
		all = append(all, Status{
			TrustDomain: td, URL: r.e.where, Bundle: b, Fresh: fresh, LastSuccess: r.success,
			NextAttempt: m.loop.Next(r), Failures: r.Failures(), Err: r.err, Refused: r.refused,
		})
	}
	m.mu.Unlock()
	slices.SortFunc(all, func(a, b Status) int {
		return strings.Compare(a.TrustDomain.String(), b.TrustDomain.String())
	})
	return all
}
