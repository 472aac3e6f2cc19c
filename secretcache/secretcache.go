// Package secretcache is the SecretManager: it obtains workload identities from a CA, keeps them and the trust
// bundles fresh, and hands them out without blocking.
//
// Most programs need [Start], which waits for the first certificate, and the [Manager] itself, which is a
// [spiffe.SVIDSource] and a [spiffe.BundleSource]:
//
//	m, err := secretcache.Start(ctx, secretcache.Config{ID: web, CA: ca})
//	if err != nil {
//		return err // says why: the CA does not answer, or has refused
//	}
//	defer m.Close()
//	endpoint, err := spiffetls.New(spiffetls.Config{Self: m, Peers: m, Allow: spiffe.AllowIDs(frontend)})
//
// A program that serves before it has an identity, or that has a group for its goroutines, uses [New], [Manager.Run]
// and [Manager.Ready] instead. To serve identities to Envoy, give the Manager to package sds. [Manager.Add] adds
// further identities for the same process.
//
// # Certificates without a SPIFFE ID
//
// A workload of Linkerd has a DNS name, and a service of Athenz a principal. With an expectation instead of an ID the
// default identity is a [*pki.Credential], which is obtained, checked, renewed and published by the same rules:
//
//	m, err := secretcache.Start(ctx, secretcache.Config{Expect: pki.ExpectDNSName(td, name), CA: ca})
//	…
//	credential, err := m.Credential()
//
// [Manager.GenerateSecret] serves it as "default". It never passes for an SVID: [Manager.SVID] and [Manager.Snapshot]
// return errors. An identity added with [Manager.Add] is always an SVID.
//
// # What it promises
//
// Readers load a pointer. They never wait for a lock, for the CA or for each other, and a value that they got never
// changes under them: a [spiffe.Snapshot] is a key, its chain and the trust bundles that go with them.
//
// A failure changes only the time of the next attempt. Before an answer of the CA replaces a working certificate, the
// Manager verifies its key, ID, validity, form, size, extended key usages, and path to the current trust bundle.
//
// The bundle comes before the leaf. A leaf under a new root is published after the bundle with that root was
// published and all subscribers were told of it.
//
// A CA can lower lifetimes; this takes effect at the next renewal. A certificate that ends sooner than its
// predecessor is accepted only if it leaves time for its own renewal, a third of [Config].Timeout. Otherwise it is
// refused, and the Manager asks again when a quarter of the remaining life has passed.
//
// # When it renews
//
// An identity is renewed when half of its life is over, or earlier by a random part of it, so that a fleet does not
// renew at the same time: in no hundredth of a life does the CA see more than three times the average number of
// renewals (see testdata/fleet.svg). Two kinds of urgent renewals are exceptions: the backlog of an outage, which
// each client renews within another 5 % of its remaining life, and renewals forced because a root was withdrawn.
//
// After a failure the Manager waits at random for at most 4 % of the remaining life, and for at least a second, or a
// five-hundredth of the life if that is less. It respects a wait that an error of the CA asks for: see
// [spiffe.ErrNotReady]. If a CA is down from the first renewal to the end of a certificate, the Manager asks about
// 110 times for lives of up to 500 seconds, 210 times for an hour, and 370 times for a day. If the CA's errors say
// that it refuses for good, it asks about a third less often.
//
// The number of goroutines does not depend on the number of identities.
//
// # The empty bundle
//
// A trust bundle without authorities is a statement: everything of that trust domain is revoked (SPIFFE Trust Domain
// and Bundle section 4.1.3). Such a bundle replaces the previous one, with a warning in the log, and [Manager.Bundle]
// returns it, so that no peer is trusted any more. An answer without the bundle of the Manager's own trust domain, or
// with a lower sequence number, is a fault, and replaces nothing.
//
// A CA that is wrong for a moment changes nothing. A bundle is not plausible if its sequence number rises by more
// than 10,000 (unless both numbers are times), if it loses its sequence number, or if authorities disappear without a
// higher number. Such a bundle is held: the one in force stays, each such answer is a failure in the log and in
// [Manager.Report], and the CA is asked again, at most five minutes later. The bundle takes effect when the CA has
// repeated it at least 3 times in at least 30 minutes, with no other answer between. To accept it at once, an
// operator restarts the program, which takes any first bundle.
//
// # What it does not do
//
// It writes nothing to disk, and does not verify peers: see package spiffe. The CA in [Config] authenticates the
// workload to the authority.
package secretcache

import (
	"cmp"
	"context"
	"crypto"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/certs/bundleorder"
	"github.com/svidkit/svidkit/internal/certs/secretset"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Config configures a [Manager]. CA is required, and either ID or Expect; every other zero field means its documented
// default. [New] copies it.
type Config struct {
	// ID is the default identity, served as "default" and under its own name. Its trust domain is the Manager's.
	ID spiffe.ID

	// Expect, instead of ID, makes the default identity a [*pki.Credential]: the CA's answers must meet it, signing
	// requests ask for its names, and its trust domain is the Manager's. [pki.ExpectID] is the same as ID.
	Expect pki.Expectation

	// TrustDomain, instead of ID and Expect, makes a Manager without a default identity, such as for an agent whose
	// workloads come and go with [Manager.Add] and [Manager.Remove]. It is ready when it has trust bundles. There is
	// no secret "default", and [Manager.SVID] and [Manager.Snapshot] return errors that wrap [errors.ErrUnsupported].
	TrustDomain spiffe.TrustDomain

	// CA issues the certificates. Each call has a deadline. If it is a [caclient.BundleWatcher], the Manager watches
	// its bundles instead of polling, and watches again when a watch ends. If an error of the CA says that repeating
	// does not help, the Manager still asks again, after long waits.
	CA caclient.CA

	// CAName is the CA's name in reports, such as its URL; it is not a secret.
	CAName string

	// Names are further DNS names and IP addresses in the signing requests for the default identity, for a CA that
	// certifies requested names. The CA decides which of them it grants.
	Names []pki.SAN

	// CommonName is the common name in these requests, at most 64 bytes, for a CA that uses it as the principal, as
	// Athenz's does. Empty means none.
	CommonName string

	// Role is the role that the extended key usages of a certificate must permit; otherwise the CA's answer is
	// refused. Use [spiffe.ServerRole] or [spiffe.ClientRole] with a CA that certifies only one role. 0 means
	// [spiffe.BothRoles]. A certificate without extended key usages serves in every role.
	Role spiffe.Role

	// Federated has the bundles of other trust domains, such as a *federation.Manager. They are handed out with the
	// CA's bundles, and replace the CA's bundle for the same trust domain. A bundle of the Manager's own trust domain
	// is ignored. Run follows each change. Nil means none.
	Federated interface {
		// Bundles returns the present bundles; nil means none. It does not block.
		Bundles() *spiffe.BundleSet

		// Changed returns a channel that is closed when Bundles changes.
		Changed() <-chan struct{}
	}

	// NewKey returns the private key of the next certificate, and should make a new one for each. It must be safe for
	// concurrent use. Nil means a new ECDSA P-256 key. Keys that cannot be exported work for [Manager.SVID], not for
	// [Manager.GenerateSecret].
	NewKey func() (crypto.Signer, error)

	// NewAlternative is like NewKey, for keys of ML-DSA: each identity also has a second certificate, with such a key,
	// as the alternative ([spiffe.SVID.WithAlternative]) of its SVID. Both are renewed together. If the CA refuses
	// only the second one, the attempt has failed, and the present pair stays; without a pair, and in the last
	// quarter of its life, the first certificate is published alone. A CA that limits its callers must permit two
	// requests at a time. Nil means no alternatives.
	NewAlternative func() (crypto.Signer, error)

	// Lifetime is the lifetime requested from the CA; 0 means the CA's default. The dates in the certificate decide.
	Lifetime time.Duration

	// GraceRatio is the fraction of the lifetime that is left when renewal starts; 0 means 0.5. The lifetime counts
	// from the moment when the Manager received the certificate, not from a NotBefore that the CA may have backdated,
	// to the earliest end in its verified chain.
	GraceRatio float64

	// Jitter is a fraction of the lifetime too: renewal starts earlier by a random part of it, never later. 0 means
	// 0.2, or half of 1-GraceRatio if that is less. With 0.2 a fleet started at one moment calls the CA
	// at no more than three times the mean rate, from the first renewal on; with 0.01, which some agents use, at
	// fifty times. GraceRatio and Jitter together must be less than 1.
	Jitter float64

	// RenewIn is for a protocol with its own rules for renewal. It replaces GraceRatio, Jitter and the waits after
	// failures: it returns how long after an attempt the next one comes. left is the remaining life of the present
	// certificate, 0 if there is none or it has expired; failures counts the failed attempts since the last success.
	// If the CA asks for a longer wait, the Manager respects it, up to half of left, or an hour if left is 0. RenewIn
	// must be safe for concurrent use, return at once, and call no method of the Manager, which waits for it. Nil
	// means the rules above.
	RenewIn func(left time.Duration, failures int) time.Duration

	// Timeout bounds each attempt to get a certificate or bundles. An identity with little life left gets less, down
	// to a sixth, so that an attempt that hangs leaves time for the next. 0 means 30 seconds. If certificates live
	// for less than ten minutes and the CA may hang, use a twentieth of their life, because each attempt that hangs
	// uses up remaining life.
	Timeout time.Duration

	// Logger gets each attempt (Debug), each change of an identity or a bundle (Info), and each failure
	// that is followed by another attempt (Warn), with the attributes id, attempt, err, retry_in,
	// not_after, renew_in, trust_domain, authorities and sequence. Nil means no logs.
	Logger *slog.Logger
}

// Manager is a SecretManager. [Start] or [New] makes one. Its methods are safe for concurrent use; those that read
// also work before and after [Manager.Run]. It never prints a key.
type Manager struct {
	redacted
	cfg   Config
	roots *entry // the trust bundles; its ID is the trust domain's
	first *entry // the default identity

	// Readers read these without a lock. Writers hold mu.
	names   sync.Map // string: *entry, all identities by ID
	trust   atomic.Pointer[trust]
	snap    atomic.Pointer[spiffe.Snapshot]
	changed renew.Signal

	life        lifecycle.Life
	subscribers secretset.Subscribers

	mu         sync.Mutex
	watching   bool                                       // the CA's watch keeps the bundles fresh
	offers     map[spiffe.TrustDomain]*bundleorder.Offers // held bundles that the CA offers
	bundles    renew.Loop[*entry]
	identities renew.Loop[*entry]
	announced  []announcement // the newest bundle that all subscribers know, and newer ones; oldest first
	counts     counts
	tried      []report.Attempt // the last few
}

type redacted = redact.Text // an alias, so that the embedded field is not exported

// Start returns a Manager that is ready, and runs until [Manager.Close]. It combines [New], [Manager.Run] in a
// goroutine, and [Manager.Ready]. The end of ctx ends an unfinished start, and nothing later. If Start fails, nothing
// is left running, and the error of New or Ready says why there is no certificate.
func Start(ctx context.Context, cfg Config) (*Manager, error) {
	m, err := New(cfg)
	if err != nil {
		return nil, err
	}
	return lifecycle.Started(ctx, m, &m.life, m.run)
}

// New checks cfg and returns a Manager. It starts no goroutine and does not call the CA. The caller calls
// [Manager.Run].
func New(cfg Config) (*Manager, error) {
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("secretcache: new: %w", err)
	}
	if !cfg.ID.IsZero() {
		cfg.Expect = pki.ExpectID(cfg.ID)
	}
	cfg.ID = cfg.Expect.ID() // zero for a credential, and without a default identity
	if cfg.NewKey == nil {
		cfg.NewKey = func() (crypto.Signer, error) { return pki.NewKey("ecdsa-p256") }
	}
	cfg.GraceRatio, cfg.Jitter = cfg.timing()
	cfg.Timeout = cmp.Or(cfg.Timeout, 30*time.Second)
	cfg.Role = cmp.Or(cfg.Role, spiffe.BothRoles)
	cfg.Logger = ratelog.Patient(cfg.Logger)

	m := &Manager{cfg: cfg, offers: map[spiffe.TrustDomain]*bundleorder.Offers{}}
	m.roots = &entry{id: cmp.Or(cfg.TrustDomain, cfg.Expect.TrustDomain()).ID()}
	m.first = &entry{id: cfg.ID}
	m.redacted = redact.New("secretcache.Manager(" + cmp.Or(cfg.Expect.String(), m.roots.id.String()) + ")")
	m.bundles = renew.Loop[*entry]{Mu: &m.mu, Attempt: m.attempt}
	m.identities = renew.Loop[*entry]{Mu: &m.mu, Attempt: m.attempt, Slots: concurrency, Hold: true,
		SetBack: m.setBack}
	m.bundles.Put(m.roots, 0)
	if m.hasFirst() {
		m.names.Store(m.first.name(), m.first)
		m.identities.Put(m.first, 0)
	}
	return m, nil
}

func (c *Config) check() error {
	id := cmp.Or(c.ID, c.Expect.ID())
	switch {
	case c.ID.IsZero() && c.Expect.IsZero() && c.TrustDomain.IsZero():
		return fmt.Errorf("Config.ID is required, or Config.Expect for a certificate that is no X.509-SVID, "+
			"or Config.TrustDomain: %w", spiffe.ErrZero)
	case !c.TrustDomain.IsZero() && !(c.ID.IsZero() && c.Expect.IsZero()):
		return fmt.Errorf("Config.TrustDomain is %q, and there is a default identity, which has its own",
			c.TrustDomain)
	case !c.ID.IsZero() && !c.Expect.IsZero():
		return fmt.Errorf("Config.ID is %q and Config.Expect %q: want one of them", c.ID, c.Expect)
	case c.ID.IsZero() && c.TrustDomain.IsZero() && c.Expect.TrustDomain().IsZero():
		return fmt.Errorf("Config.Expect, %q, names no trust domain, whose roots it needs: %w", c.Expect,
			spiffe.ErrZero)
	case !id.IsZero() && id.Path() == "":
		return fmt.Errorf("Config.ID is %q, which names a trust domain and not a workload", id)
	case len(c.CommonName) > 64:
		return fmt.Errorf("Config.CommonName has %d bytes, the limit is 64", len(c.CommonName))
	case c.NewAlternative != nil && !c.Expect.IsZero() && c.Expect.ID().IsZero():
		return fmt.Errorf("Config.NewAlternative is for X.509-SVIDs, and Config.Expect is %q", c.Expect)
	case c.CA == nil:
		return errors.New("Config.CA is required")
	case c.Role < 0 || c.Role > spiffe.BothRoles:
		return fmt.Errorf("Config.Role is %d, want ServerRole, ClientRole or BothRoles", c.Role)
	case c.Lifetime < 0 || c.Timeout < 0:
		return fmt.Errorf("Config.Lifetime is %v and Timeout %v: neither may be negative", c.Lifetime, c.Timeout)
	}
	if c.RenewIn != nil && (c.GraceRatio != 0 || c.Jitter != 0) {
		return errors.New("Config.RenewIn is set, and GraceRatio or Jitter too: want one way to say when to renew")
	}
	grace, jitter := c.timing()
	if !(grace > 0 && jitter > 0 && grace+jitter < 1) { // written so that NaN fails
		return fmt.Errorf("Config.GraceRatio is %v and Jitter %v: both must be positive, and less than 1 together",
			grace, jitter)
	}
	return nil
}

func (c *Config) timing() (grace, jitter float64) {
	grace = cmp.Or(c.GraceRatio, 0.5)
	return grace, cmp.Or(c.Jitter, min(0.2, (1-grace)/2))
}

// SVID returns the current certificate of the default identity with its key. It does not block, and ignores the
// clock: after an outage longer than the certificate's life, the certificate is expired. Before the first certificate
// the error wraps [spiffe.ErrNotReady]. If the default identity is a [*pki.Credential], the error wraps
// [errors.ErrUnsupported].
func (m *Manager) SVID() (*spiffe.SVID, error) {
	if s := m.snap.Load(); s != nil {
		return s.SVID()
	}
	return nil, m.noSnapshot()
}

// Credential returns the current certificate of the default identity with its key, if the [Config] has an Expect that
// is not for a SPIFFE ID. Otherwise it behaves like [Manager.SVID]. For an X.509-SVID the error wraps
// [errors.ErrUnsupported].
func (m *Manager) Credential() (*pki.Credential, error) {
	if !m.hasFirst() {
		return nil, m.noSnapshot()
	}
	if !m.first.id.IsZero() {
		return nil, fmt.Errorf("secretcache: %s is an X.509-SVID, which SVID returns: %w", m.title(m.first),
			errors.ErrUnsupported)
	}
	if h := m.first.held.Load(); h != nil {
		return h.own.(*pki.Credential), nil // as form made it
	}
	return nil, m.notReady(m.first, nil)
}

// Bundle returns the current trust bundle of td. It does not block. Before the first bundles the error wraps
// [spiffe.ErrNotReady]; for an unknown trust domain it wraps [spiffe.ErrUnknownTrustDomain].
func (m *Manager) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if t := m.trust.Load(); t != nil {
		return t.set.Bundle(td)
	}
	return nil, m.notReady(m.roots, nil)
}

// Bundles returns all trust bundles, as published together; nil before the first. It returns the same set until a
// bundle changes.
func (m *Manager) Bundles() *spiffe.BundleSet {
	if t := m.trust.Load(); t != nil {
		return t.set
	}
	return nil
}

// Snapshot returns the certificate of the default identity and the trust bundles as published together. It does not
// block. The errors are as for [Manager.SVID].
func (m *Manager) Snapshot() (*spiffe.Snapshot, error) {
	if s := m.snap.Load(); s != nil {
		return s, nil
	}
	return nil, m.noSnapshot()
}

func (m *Manager) noSnapshot() error {
	if !m.hasFirst() {
		return fmt.Errorf("secretcache: the Manager of %q has no default identity: %w", m.domain(),
			errors.ErrUnsupported)
	}
	if m.first.id.IsZero() {
		return fmt.Errorf("secretcache: %s is no X.509-SVID, and Credential returns it: %w", m.title(m.first),
			errors.ErrUnsupported)
	}
	return m.notReady(m.first, nil)
}

// Changed returns a channel that is closed when the default identity or the trust bundles change, and at other events
// that [Manager.Ready] waits for. Call it before reading, so that no change is missed:
//
//	for {
//		changed := m.Changed()
//		use(m.Snapshot())
//		<-changed
//	}
func (m *Manager) Changed() <-chan struct{} { return m.changed.Changed() }

func (m *Manager) hasFirst() bool { return !m.cfg.Expect.IsZero() }

func (m *Manager) domain() spiffe.TrustDomain { return m.roots.id.TrustDomain() }

func (m *Manager) want(e *entry) pki.Expectation {
	if e == m.first {
		return m.cfg.Expect
	}
	return pki.ExpectID(e.id)
}

// notReady is the error for e while it has nothing to hand out; cause says why a reader stopped waiting, if one did.
func (m *Manager) notReady(e *entry, cause error) error {
	last := cmp.Or(e.err(), m.roots.err())
	if last != nil {
		last = fmt.Errorf("the last attempt failed: %w", last)
	} else if asked := cmp.Or(e.asked.Load(), m.roots.asked.Load()); asked != 0 {
		silence := time.Since(time.Unix(0, asked)).Round(100 * time.Millisecond)
		last = fmt.Errorf("the CA has not answered for %v", silence)
	}
	idle := m.life.Idle()
	if tried := last != nil; tried && errors.Is(idle, lifecycle.ErrNotStarted) ||
		tried && cause != nil && errors.Is(idle, lifecycle.ErrEnded) {
		idle = nil // GenerateSecret tries without Run
	}
	var why error
	for _, err := range []error{cause, last, idle} {
		switch {
		case err == nil || errors.Is(why, err):
		case why == nil:
			why = err
		default:
			why = fmt.Errorf("%w; %w", why, err)
		}
	}
	if why == nil {
		why = errors.New("the CA is about to be asked")
	}
	return fmt.Errorf("secretcache: %s: %w: %w", m.title(e), spiffe.ErrNotReady, why)
}

func (m *Manager) title(e *entry) string {
	if e == m.roots {
		return fmt.Sprintf("trust bundle of %q", e.id.TrustDomain())
	}
	return fmt.Sprintf("%q", m.want(e))
}
