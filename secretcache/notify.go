package secretcache

import (
	"context"
	"crypto/x509"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/svidkit/svidkit/internal/renew"
)

// Subscribe registers f to be called with the resource name of each secret that changes, as
// [Manager.GenerateSecret] takes it. cancel ends that; it may be called from f, and more than once.
// A call of f that is under way goes on after cancel has returned.
//
// A new certificate of the default identity is told as "default" and under its ID, that of another
// identity under its ID, and a credential as "default" only. A change of the X.509 authorities of the own trust domain is told as
// "ROOTCA" and "spiffe://TRUST-DOMAIN", of another trust domain as the latter. Each first
// appearance is told, and so are names that come with [Manager.Add] or go with [Manager.Remove].
//
// The calls come one at a time, after the change, in the order of the changes, from a goroutine that
// holds no lock and ends when all has been told. Changes of one name that were not told yet are told
// once. The bundle goes first: a certificate that only a new bundle vouches for is published when
// every f has returned from the call for that bundle. So f should return soon, and must not wait for
// another name: to call GenerateSecret with the name it was told is fine, and if that waits for a first
// certificate of a new root, the certificate comes before the bundle is told. An f that does not return
// holds back what others are told and the certificates of a new root, nothing else, and the end of Run:
// it returns when all has been told. Later, f is called only for what a call of GenerateSecret, Add or
// Remove brings.
func (m *Manager) Subscribe(f func(resourceName string)) (cancel func()) {
	s := &subscriber{f: f}
	m.mu.Lock()
	m.news.subscribers = append(slices.Clip(m.news.subscribers), s) // a copy, for the teller reads the old one
	m.mu.Unlock()
	return func() {
		s.gone.Store(true)
		m.mu.Lock()
		defer m.mu.Unlock()
		m.news.subscribers = slices.DeleteFunc(slices.Clone(m.news.subscribers), func(o *subscriber) bool { return o == s })
	}
}

type subscriber struct {
	f    func(string)
	gone atomic.Bool
}

// notifier has what subscribers are to be told. The Manager's mu guards it.
type notifier struct {
	subscribers []*subscriber // replaced, never changed
	names       []string      // to be told, in order
	queued      map[string]bool
	telling     chan struct{} // closed when all has been told; nil if no goroutine tells
	now         string        // the name that is being told, or ""
	trust       *trust        // what all subscribers were told of
	told        renew.Signal  // of a change of these two
}

// tell has name told to the subscribers. The caller holds mu and has published.
func (m *Manager) tell(name string) {
	n := &m.news
	if len(n.subscribers) == 0 && n.telling == nil {
		n.trust = m.trust.Load()
		return
	}
	if n.queued[name] {
		return
	}
	if n.queued == nil {
		n.queued = map[string]bool{}
	}
	n.queued[name] = true
	n.names = append(n.names, name)
	if n.telling == nil {
		n.telling = make(chan struct{})
		go m.tellAll()
	}
}

// tellAll tells until there is nothing left to tell.
func (m *Manager) tellAll() {
	n := &m.news
	for {
		m.mu.Lock()
		names, subscribers, t := n.names, n.subscribers, m.trust.Load()
		n.names, n.queued = nil, nil
		if len(names) == 0 {
			close(n.telling)
			n.telling = nil
			m.mu.Unlock()
			return
		}
		m.mu.Unlock()
		for _, name := range names {
			m.mu.Lock()
			n.now = name
			n.told.Notify()
			m.mu.Unlock()
			for _, s := range subscribers {
				if !s.gone.Load() {
					s.f(name)
				}
			}
		}
		m.mu.Lock()
		n.now = ""
		if n.trust != t {
			n.trust = t // what changed from the bundles before it was among names
			n.told.Notify()
		}
		m.mu.Unlock()
	}
}

// awaitNews waits until all subscribers were told of a bundle that has root. If e has nothing to hand out and
// its name is being told, a subscriber may be waiting for it, and what comes after that would never
// be told.
func (m *Manager) awaitNews(ctx context.Context, e *entry, root *x509.Certificate) error {
	for {
		m.mu.Lock()
		n := &m.news
		awaited := n.now != "" && (n.now == e.name() || n.now == defaultName && e == m.first)
		if n.telling == nil || n.trust != nil && n.trust.anchors(root) || awaited && !e.held.Load().good() {
			m.mu.Unlock()
			return nil
		}
		told := n.told.Changed()
		m.mu.Unlock()
		select {
		case <-told:
		case <-ctx.Done():
			return fmt.Errorf("a subscriber that was told of a new bundle has not returned: %w", context.Cause(ctx))
		}
	}
}
