package secretcache

import (
	"context"
	"crypto/x509"
	"fmt"

	"github.com/svidkit/svidkit/internal/certs/secretset"
)

// Subscribe registers f to be called with the resource name of each secret that changes, in the form that
// [Manager.GenerateSecret] takes, until cancel is called. cancel may be called from f, and more than once. It does
// not wait for a running call of f.
//
// A new certificate of the default identity has the names "default" and its ID; of another identity its ID; of a
// credential only "default". A change of a bundle has the names "spiffe://TRUST-DOMAIN" and "ALL", and for the
// Manager's own trust domain also "ROOTCA". First certificates and bundles, [Manager.Add] and [Manager.Remove]
// are changes too.
//
// The calls come one at a time, after the change, in the order of the changes, from a goroutine that holds no lock
// and ends with the last call. If a name changes several times before its call, there is one call. The bundle goes
// first: if only a new bundle has a certificate's root, the certificate is published when every f has returned from
// the call for that bundle.
//
// So f should return soon, and must not wait for another name. It may call GenerateSecret with its own name: if that
// waits for a first certificate under a new root, the certificate is published before the call for the bundle. An f
// that does not return delays the calls of other functions, certificates under a new root, and the end of Run, which
// waits for all calls. After Run, f is called only for changes by GenerateSecret, Add and Remove.
func (m *Manager) Subscribe(f func(resourceName string)) (cancel func()) { return m.subscribers.Add(f) }

// announcement is a bundle, and a channel that is closed when all subscribers have been told of it.
type announcement struct {
	*trust
	told <-chan struct{}
}

func (a announcement) done() bool {
	select {
	case <-a.told:
		return true
	default:
		return false
	}
}

// tell calls the subscribers with name. The caller has published the change.
func (m *Manager) tell(name string) { m.subscribers.Tell(func() []string { return []string{name} }) }

// announce calls the subscribers with the names whose secrets differ between t and old. The caller holds mu and has
// published t.
func (m *Manager) announce(t, old *trust) {
	m.forgetAnnounced()
	var before *secretset.Set
	if old != nil {
		before = old.secrets
	}
	m.announced = append(m.announced,
		announcement{t, m.subscribers.Tell(func() []string { return t.secrets.Changes(before) })})
}

// forgetAnnounced drops bundles older than the newest one that all subscribers know. The caller holds mu.
func (m *Manager) forgetAnnounced() {
	for len(m.announced) > 1 && m.announced[1].done() {
		m.announced = m.announced[1:]
	}
}

// isKnown reports whether all subscribers know a bundle that has roots, and no later bundle lacks one of them. The
// caller holds mu.
func (m *Manager) isKnown(roots []*x509.Certificate) bool {
	m.forgetAnnounced()
	if n := len(m.announced); n == 0 || m.announced[n-1].done() {
		return true // the present bundle vouches for the certificate
	}
	return m.announced[0].done() && m.announced[0].anchors(roots)
}

// awaitNews waits until all subscribers have been told of a bundle that has roots. It does not wait if e has nothing
// to hand out and its name is being told: a subscriber may be waiting for e, and would block all later calls.
func (m *Manager) awaitNews(ctx context.Context, e *entry, roots []*x509.Certificate) error {
	for {
		name, changed := m.subscribers.Now() // first, so that no change is missed
		awaited := name != "" && (name == e.name() || name == secretset.Default && e == m.first)
		m.mu.Lock()
		known := m.isKnown(roots)
		m.mu.Unlock()
		if known || awaited && !e.held.Load().good() {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("a subscriber that was told of a new bundle has not returned: %w", context.Cause(ctx))
		}
	}
}
