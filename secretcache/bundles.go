package secretcache

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// bundleWatcher is a CA that tells of new bundles by itself.
type bundleWatcher interface {
	WatchBundles(ctx context.Context) iter.Seq2[*spiffe.BundleSet, error]
}

// trust is the current bundles, and the secrets made of them. It never changes.
type trust struct {
	set     *spiffe.BundleSet
	own     *spiffe.Bundle
	secrets map[string]rootSecret // by resource name
}

// rootSecret is a secret, or why there is none: the bundle is empty.
type rootSecret struct {
	secret *pki.Secret
	err    error
}

// newTrust returns the trust of set, in which td has a bundle. Secrets that are those of old, which
// may be nil, are taken over.
func newTrust(set *spiffe.BundleSet, td spiffe.TrustDomain, old *trust) *trust {
	own, _ := set.Bundle(td)
	t := &trust{set: set, own: own, secrets: map[string]rootSecret{}}
	add := func(name string, b *spiffe.Bundle) {
		s, err := pki.NewTrustSecret(name, b)
		if before, ok := old.lookup(name); ok && before.secret != nil && s != nil && bytes.Equal(pemOf(before.secret), pemOf(s)) {
			s = before.secret
		}
		t.secrets[name] = rootSecret{s, err}
	}
	add(rootName, own)
	for b := range set.All() {
		add(b.TrustDomain().ID().String(), b)
	}
	return t
}

func pemOf(s *pki.Secret) []byte {
	roots, _ := s.Roots()
	return roots
}

// usable reports whether any certificate of the own trust domain can be good. Without trust none
// can.
func (t *trust) usable() bool {
	if t == nil {
		return false
	}
	for range t.own.X509Authorities() {
		return true
	}
	return false
}

// anchors reports whether root is an authority of the own trust domain. A root that was issued
// anew for the same name and key vouches for the same leaves.
func (t *trust) anchors(root *x509.Certificate) bool {
	for c := range t.own.X509Authorities() {
		if c == root || bytes.Equal(c.RawSubject, root.RawSubject) && bytes.Equal(c.RawSubjectPublicKeyInfo, root.RawSubjectPublicKeyInfo) {
			return true
		}
	}
	return false
}

// changedNames returns the resource names that have another secret in t than in old, which may be
// nil: the own ones first.
func (t *trust) changedNames(old *trust) []string {
	own := t.own.TrustDomain().ID().String()
	names := []string{rootName, own}
	for b := range t.set.All() {
		if b != t.own {
			names = append(names, b.TrustDomain().ID().String())
		}
	}
	if old != nil {
		for b := range old.set.All() {
			if name := b.TrustDomain().ID().String(); !t.has(name) {
				names = append(names, name)
			}
		}
	}
	return slices.DeleteFunc(names, func(name string) bool {
		before, was := old.lookup(name)
		after, is := t.lookup(name)
		return was == is && before.secret == after.secret
	})
}

func (t *trust) lookup(name string) (rootSecret, bool) {
	if t == nil {
		return rootSecret{}, false
	}
	s, ok := t.secrets[name]
	return s, ok
}

func (t *trust) has(name string) bool {
	_, ok := t.lookup(name)
	return ok
}

// fetch asks the CA for the bundles and publishes them.
func (m *Manager) fetch(base context.Context) error {
	ctx, cancel := context.WithTimeout(base, m.cfg.Timeout)
	defer cancel()
	seen := m.trust.Load()
	set, err := m.cfg.CA.FetchBundles(ctx)
	if err != nil {
		return fmt.Errorf("fetch bundles: %w", err)
	}
	// What a watch brought while we asked is newer.
	return m.apply(ctx, set, func(now *trust) bool { return now == seen })
}

// apply makes set current, as far as it is not older than what we have, and if the present bundles
// are still good to be replaced.
func (m *Manager) apply(ctx context.Context, set *spiffe.BundleSet, replace func(now *trust) bool) error {
	m.mu.Lock()
	old := m.trust.Load()
	if !replace(old) {
		m.mu.Unlock()
		return nil
	}
	set, older, err := merge(old, set, m.cfg.ID.TrustDomain())
	if err != nil || old != nil && set.Equal(old.set) {
		m.mu.Unlock()
		return errors.Join(older, err)
	}
	t := newTrust(set, m.cfg.ID.TrustDomain(), old)
	m.trust.Store(t)
	if h := m.first.held.Load(); h != nil {
		m.snap.Store(spiffe.NewSnapshot(h.svid, set))
	}
	m.signalChange()
	for _, name := range t.changedNames(old) {
		m.tell(name)
	}
	m.findOrphans(t)
	m.mu.Unlock()
	m.logBundle(ctx, t)
	return older
}

// merge returns set, with the bundles of old in place of those whose sequence number went down
// (FED-11), which older reports. A set without the bundle of td is an error, and so is nil.
func merge(old *trust, set *spiffe.BundleSet, td spiffe.TrustDomain) (merged *spiffe.BundleSet, older, err error) {
	if set == nil {
		return nil, nil, errors.New("the CA's answer is refused: it has no bundles")
	}
	if _, err := set.Bundle(td); err != nil {
		return nil, nil, fmt.Errorf("the CA's answer is refused: %w", err)
	}
	if old == nil {
		return set, nil, nil
	}
	for b := range set.All() {
		have, err := old.set.Bundle(b.TrustDomain())
		if err != nil {
			continue
		}
		if !b.Supersedes(have) {
			set = set.With(have)
			n, _ := b.Sequence()
			last, _ := have.Sequence()
			older = errors.Join(older, fmt.Errorf("the CA's answer is refused: the bundle of %q has sequence number %d, and %d was seen before", b.TrustDomain(), n, last))
		}
	}
	return set, older, nil
}

// findOrphans has those identities renewed at once whose root has left the bundle. The caller
// holds mu.
func (m *Manager) findOrphans(t *trust) {
	now := m.ticks.advance(time.Now())
	for _, v := range m.names.Range {
		e := v.(*entry)
		h := e.held.Load()
		if e.orphan = h != nil && !t.anchors(h.anchor); e.orphan {
			m.queue.hasten(e, now)
		}
	}
	m.kick()
}

// refresh gets bundles other than seen, if there are any: those that arrived since, those of a
// fetch that is under way, or those of a fetch of its own.
func (m *Manager) refresh(ctx, base context.Context, seen *trust) error {
	for joined := 0; ; joined++ {
		m.mu.Lock()
		switch {
		case m.trust.Load() != seen:
			m.mu.Unlock()
			return nil
		case joined == 2 || joined == 1 && m.roots.failures > 0:
			m.mu.Unlock()
			return m.roots.err()
		case !m.roots.busy:
			attempt := m.begin(base, m.roots)
			m.mu.Unlock()
			_, err := m.attempt(attempt, m.roots)
			return err
		}
		done := m.roots.wait() // of a fetch that may have begun too early to know; the one after it has not
		m.mu.Unlock()
		select {
		case <-done:
		case <-ctx.Done():
			return fmt.Errorf("fetch bundles: %w", context.Cause(ctx))
		}
	}
}

// watchBundles takes the bundles from the CA's watch while Run runs, after the first were fetched.
// While the watch has nothing good to say, the scheduler polls.
func (m *Manager) watchBundles(r *run, w bundleWatcher, fetched <-chan struct{}) {
	select {
	case <-fetched:
	case <-r.ctx.Done():
	}
	for n := 1; r.ctx.Err() == nil; n++ {
		for set, err := range w.WatchBundles(r.ctx) {
			if err == nil {
				n = 0
				err = m.apply(r.ctx, set, func(*trust) bool { return true })
			}
			m.setWatching(r, err == nil)
			if r.ctx.Err() != nil {
				return
			}
			if err != nil { // wait, so that a CA that yields errors without end is no tight loop
				m.pause(r, refusal{times: 1}, err)
			}
		}
		m.setWatching(r, false)
		if r.ctx.Err() == nil {
			m.pause(r, refusal{times: n + 1}, errors.New("the watch ended"))
		}
	}
}

func (m *Manager) setWatching(r *run, ok bool) {
	m.mu.Lock()
	r.watching = ok
	m.mu.Unlock()
}

// pause reports a failure of the watch and waits.
func (m *Manager) pause(r *run, f refusal, err error) {
	wait := f.wait(usualWait, impatientWait, longestWish, rand.Float64())
	m.logRetry(r.ctx, "secretcache: bundle watch failed", m.roots.id, f.times, err, wait)
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
	case <-r.ctx.Done():
	}
}

func (m *Manager) logBundle(ctx context.Context, t *trust) {
	n := 0
	for range t.own.X509Authorities() {
		n++
	}
	attrs := []slog.Attr{slog.String("trust_domain", t.own.TrustDomain().String()), slog.Int("authorities", n)}
	if seq, ok := t.own.Sequence(); ok {
		attrs = append(attrs, slog.Uint64("sequence", seq))
	}
	if n == 0 {
		m.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "secretcache: the trust bundle is empty: every identity of the trust domain is revoked", attrs...)
		return
	}
	m.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "secretcache: new trust bundle", attrs...)
}
