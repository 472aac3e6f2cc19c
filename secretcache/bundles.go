package secretcache

import (
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/certs/bundleorder"
	"github.com/svidkit/svidkit/internal/certs/secretset"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
)

// trust is the current bundles. It never changes.
type trust struct {
	ca      *spiffe.BundleSet // as received from the CA
	set     *spiffe.BundleSet // including the bundles of Config.Federated
	own     *spiffe.Bundle    // the bundle of the Manager's trust domain
	secrets *secretset.Set    // of set
}

// newTrust returns the trust of the CA's bundles and of federated, which may be nil and whose bundle of td is
// ignored.
func newTrust(ca, federated *spiffe.BundleSet, td spiffe.TrustDomain) *trust {
	t := &trust{ca: ca, set: ca}
	t.own, _ = ca.Bundle(td)
	if federated != nil {
		all := map[spiffe.TrustDomain]*spiffe.Bundle{}
		for _, set := range []*spiffe.BundleSet{ca, federated} {
			for b := range set.All() {
				all[b.TrustDomain()] = b
			}
		}
		all[td] = t.own
		t.set = newSet(all)
	}
	t.secrets = &secretset.Set{TrustDomain: td, Bundles: t.set}
	return t
}

// usable reports whether the Manager's own bundle has an authority. Without one, no certificate can be verified.
func (t *trust) usable() bool {
	if t == nil {
		return false
	}
	for range t.own.X509Authorities() {
		return true
	}
	return false
}

// anchors reports whether all roots are authorities of the Manager's own trust domain. A root reissued for the same
// name and key vouches for the same leaves.
func (t *trust) anchors(roots []*x509.Certificate) bool {
	return !slices.ContainsFunc(roots, func(root *x509.Certificate) bool {
		for c := range t.own.X509Authorities() {
			if c == root || bytes.Equal(c.RawSubject, root.RawSubject) &&
				bytes.Equal(c.RawSubjectPublicKeyInfo, root.RawSubjectPublicKeyInfo) {
				return false
			}
		}
		return true
	})
}

// fetch gets the bundles from the CA and publishes them.
func (m *Manager) fetch(ctx context.Context, _ *entry) error {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.Timeout)
	defer cancel()
	seen := m.trust.Load().fromCA()
	set, err := m.cfg.CA.FetchBundles(ctx)
	if err != nil {
		return fmt.Errorf("fetch bundles: %w", err)
	}
	m.mu.Lock()
	if m.trust.Load().fromCA() != seen { // a watch has brought newer bundles meanwhile
		m.mu.Unlock()
		return nil
	}
	return m.apply(ctx, set)
}

// fromCA returns the bundles as received from the CA; nil before the first.
func (t *trust) fromCA() *spiffe.BundleSet {
	if t == nil {
		return nil
	}
	return t.ca
}

// apply publishes the CA's bundles, except bundles that are older than the ones seen or not plausible. The caller
// holds mu, which apply releases.
func (m *Manager) apply(ctx context.Context, set *spiffe.BundleSet) error {
	good, prevailed, err := m.merge(m.trust.Load().fromCA(), set)
	if good == nil {
		m.mu.Unlock()
		return err
	}
	m.publishTrust(ctx, good)
	for _, td := range prevailed {
		const message = "secretcache: bundle with an implausible sequence number accepted, as the CA insists"
		m.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, message, slog.String("trust_domain", td.String()))
	}
	return err
}

// publishTrust publishes ca with the present bundles of Config.Federated. The caller holds mu, which publishTrust
// releases.
func (m *Manager) publishTrust(ctx context.Context, ca *spiffe.BundleSet) {
	var federated *spiffe.BundleSet
	if m.cfg.Federated != nil {
		federated = m.cfg.Federated.Bundles()
	}
	old := m.trust.Load()
	t := newTrust(ca, federated, m.domain())
	if old != nil && t.set.Equal(old.set) && t.ca.Equal(old.ca) {
		m.mu.Unlock()
		return
	}
	m.trust.Store(t)
	if h := m.first.held.Load(); h != nil {
		m.storeSnapshot(h, t)
	}
	m.changed.Notify()
	m.announce(t, old)
	if old == nil || old.own != t.own {
		m.findOrphans(t)
	}
	m.mu.Unlock()
	m.logBundle(ctx, t)
}

// followFederated publishes each change of Config.Federated.
func (m *Manager) followFederated(ctx context.Context) {
	for ctx.Err() == nil {
		changed := m.cfg.Federated.Changed() // before reading, so that no change is missed
		m.mu.Lock()
		if t := m.trust.Load(); t != nil {
			m.publishTrust(ctx, t.ca)
		} else { // they come with the first bundles of the CA
			m.mu.Unlock()
		}
		select {
		case <-ctx.Done():
		case <-changed:
		}
	}
}

// merge returns set without refused bundles: those whose sequence number went down or is not plausible. The bundle of
// old, which may be nil, replaces each of them, if there is one. The error names the refused bundles, with the
// reasons; prevailed names implausible bundles on which the CA has insisted. good is nil, with an error, for a set
// that is nil or has no good bundle of the Manager's own trust domain. The caller holds mu.
func (m *Manager) merge(old, set *spiffe.BundleSet) (good *spiffe.BundleSet, prevailed []spiffe.TrustDomain,
	refused error) {
	own := m.domain()
	if set == nil {
		return nil, nil, errors.New("the CA's answer is refused: it has no bundles")
	}
	if _, err := set.Bundle(own); err != nil {
		return nil, nil, fmt.Errorf("the CA's answer is refused: %w", err)
	}
	bundles := map[spiffe.TrustDomain]*spiffe.Bundle{}
	for b := range set.All() {
		td := b.TrustDomain()
		if old != nil {
			if have, err := old.Bundle(td); err == nil {
				bundles[td] = have
			}
		}
		won, err := m.judge(bundles[td], b)
		if won {
			prevailed = append(prevailed, td)
		}
		if err != nil {
			refused = errors.Join(refused, fmt.Errorf("the CA's answer is refused: %w", err))
		} else if !b.Equal(bundles[td]) { // else the pointer stays, as nothing has changed
			bundles[td] = b
		}
	}
	maps.DeleteFunc(m.offers, func(td spiffe.TrustDomain, _ *bundleorder.Offers) bool {
		_, err := set.Bundle(td)
		return err != nil
	})
	if bundles[own] == nil {
		return nil, nil, refused
	}
	return newSet(bundles), prevailed, refused
}

func newSet(bundles map[spiffe.TrustDomain]*spiffe.Bundle) *spiffe.BundleSet {
	set, _ := spiffe.NewBundleSet(slices.Collect(maps.Values(bundles))...) // fails for a nil or a second bundle only
	return set
}

// judge returns the reason not to replace have, which may be nil, with b, or whether the CA has insisted on an
// implausible b for long enough. The caller holds mu.
func (m *Manager) judge(have, b *spiffe.Bundle) (won bool, err error) {
	td := b.TrustDomain()
	if !b.Supersedes(have) {
		n, _ := b.Sequence()
		last, _ := have.Sequence()
		delete(m.offers, td)
		return false, fmt.Errorf("the bundle of %q has sequence number %d, and %d was seen before", td, n, last)
	}
	o := m.offers[td]
	if o == nil {
		o = new(bundleorder.Offers)
		m.offers[td] = o
	}
	if won, err = o.Judge(have, b, time.Now()); err != nil {
		return won, fmt.Errorf("%q: %w", td, err)
	}
	delete(m.offers, td)
	return won, nil
}

// findOrphans schedules identities whose root has left the bundle for renewal at once. The caller holds mu.
func (m *Manager) findOrphans(t *trust) {
	for _, v := range m.names.Range {
		e := v.(*entry)
		h := e.held.Load()
		if e.orphan = h != nil && !t.anchors(h.roots); e.orphan {
			m.identities.Hasten(e, 0)
		}
	}
	m.identities.Hold = !t.usable() // no certificate could be verified
	m.identities.Wake()
}

// refresh gets bundles that differ from seen, if there are any: bundles that have arrived since, or the bundles of a
// fetch that is running, or of a fetch of its own.
func (m *Manager) refresh(ctx context.Context, seen *trust) error {
	for attempts := 0; ; attempts++ {
		m.mu.Lock()
		switch {
		case m.trust.Load().fromCA() != seen.fromCA():
			m.mu.Unlock()
			return nil
		case attempts >= 2 || attempts == 1 && m.roots.Failures() > 0:
			m.mu.Unlock()
			return m.roots.err()
		case !m.roots.Busy():
			m.bundles.Start(m.roots)
			attempts++
		}
		ended := m.bundles.Ended(m.roots) // a running fetch may have begun too early; the next one has not
		m.mu.Unlock()
		select {
		case <-ended:
		case <-ctx.Done():
			return fmt.Errorf("fetch bundles: %w", context.Cause(ctx))
		}
	}
}

var errWatchEnded = errors.New("the watch ended")

// watchBundles follows the CA's watch while Run runs, after the first bundles were fetched. While the watch yields no
// good bundles, the Manager polls.
func (m *Manager) watchBundles(ctx context.Context, w caclient.BundleWatcher, fetched <-chan struct{}) {
	select {
	case <-fetched:
	case <-ctx.Done():
	}
	failures := 0
	for ctx.Err() == nil {
		end := errWatchEnded
		for set, err := range w.WatchBundles(ctx) {
			if err == nil {
				m.mu.Lock()
				err = m.apply(ctx, set)
			}
			if err != nil || ctx.Err() != nil {
				end = cmp.Or(err, end)
				break
			}
			m.setWatching(true)
			failures = 0
		}
		if ctx.Err() == nil {
			failures++
			m.watchFailed(ctx, failures, end)
		}
	}
	m.setWatching(false)
}

// watchFailed makes the Manager poll, and waits before the next watch.
func (m *Manager) watchFailed(ctx context.Context, failures int, err error) {
	m.setWatching(false)
	wait := renew.Backoff{Low: time.Second, First: 2 * time.Second, High: impatient, Wish: longestWish}.
		Wait(renew.NewFailure(failures, err), rand.Float64())
	m.mu.Lock()
	known := m.roots.Failures() > 0 // the poll has logged the failure
	m.mu.Unlock()
	if !known {
		m.logRetry(ctx, "secretcache: bundle watch failed", m.roots, failures, err, wait)
	}
	_ = renew.Sleep(ctx, wait)
}

// setWatching records whether the CA's watch keeps the bundles fresh, so that polling can pause.
func (m *Manager) setWatching(yes bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.watching = yes
	if yes {
		m.confirmed()
		m.bundles.Put(m.roots, renew.Longest)
	} else {
		m.bundles.Hasten(m.roots, m.poll())
	}
}

func (m *Manager) logBundle(ctx context.Context, t *trust) {
	n := len(slices.Collect(t.own.X509Authorities()))
	attrs := []slog.Attr{slog.String("trust_domain", t.own.TrustDomain().String()), slog.Int("authorities", n)}
	if seq, ok := t.own.Sequence(); ok {
		attrs = append(attrs, slog.Uint64("sequence", seq))
	}
	if n == 0 {
		m.cfg.Logger.LogAttrs(ctx, slog.LevelWarn,
			"secretcache: the trust bundle is empty: every identity of the trust domain is revoked", attrs...)
		return
	}
	m.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "secretcache: new trust bundle", attrs...)
}
