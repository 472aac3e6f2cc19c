package secretcache

import (
	"context"
	"fmt"
	"io/fs"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// The resource names that have no trust domain in them.
const (
	defaultName = "default"
	rootName    = "ROOTCA"
)

// GenerateSecret returns the secret with the given resource name. The names are:
//
//	default                    the key pair of the default identity
//	spiffe://TRUST-DOMAIN/PATH the key pair of the identity with that ID: the default one, or one that was added
//	ROOTCA                     the X.509 authorities of the own trust domain
//	spiffe://TRUST-DOMAIN      the X.509 authorities of any trust domain that the CA gave a bundle of
//
// Any other name gives an error that wraps [fs.ErrNotExist]. The authorities of a bundle that is
// empty are an error that wraps [spiffe.ErrNoAuthority].
//
// What is there is returned without blocking. A certificate that has expired is not returned.
//
// What is not there is waited for, until ctx is done: that ends the wait and not the work, which is
// shared by all who wait. Only if the CA refuses for good, or the trust bundle is empty, or Run ends,
// is the wait over before, with an error. The error wraps [ErrNotReady] and the last cause.
//
// Run does the work. While it is not running, those who wait have it done, one attempt at a time
// for each identity and with the same waits after failures. Such an attempt has a goroutine of its
// own, which ends with the attempt, after Config.Timeout at the latest, even if nobody waits any
// more.
func (m *Manager) GenerateSecret(ctx context.Context, resourceName string) (*pki.Secret, error) {
	switch resourceName {
	case defaultName:
		h, err := m.current(ctx, m.first)
		if err != nil {
			return nil, err
		}
		return h.alias, h.noSecret
	case rootName:
		return m.rootSecret(ctx, rootName)
	}
	if v, ok := m.names.Load(resourceName); ok {
		h, err := m.current(ctx, v.(*entry))
		if err != nil {
			return nil, err
		}
		return h.secret, h.noSecret
	}
	if id, err := spiffe.ParseID(resourceName); err == nil && id.Path() == "" {
		return m.rootSecret(ctx, resourceName)
	}
	return nil, unknown(resourceName)
}

func unknown(name string) error {
	const most = 256 // of a name that may come from the network
	cut := ""
	if len(name) > most {
		name, cut = name[:most], "…"
	}
	return fmt.Errorf(`secretcache: no secret %q%s: the names are "default", "ROOTCA", the IDs of identities that were added, and "spiffe://" with a trust domain that has a bundle: %w`, name, cut, fs.ErrNotExist)
}

// current returns what is held for e, once it is there and has not expired.
func (m *Manager) current(ctx context.Context, e *entry) (*held, error) {
	for {
		if h := e.held.Load(); m.good(h) {
			return h, nil
		}
		if m.trust.Load() == nil {
			if err := m.obtain(ctx, m.roots); err != nil {
				return nil, err
			}
		}
		if err := m.obtain(ctx, e); err != nil {
			return nil, err
		}
	}
}

func (m *Manager) rootSecret(ctx context.Context, name string) (*pki.Secret, error) {
	t := m.trust.Load()
	if t == nil {
		if err := m.obtain(ctx, m.roots); err != nil {
			return nil, err
		}
		t = m.trust.Load()
	}
	s, ok := t.lookup(name)
	if !ok {
		return nil, unknown(name)
	}
	return s.secret, s.err
}

// obtain waits until there is something to hand out for e, and has somebody work on it.
func (m *Manager) obtain(ctx context.Context, e *entry) error {
	for {
		m.mu.Lock()
		r := m.run
		wait := longestSleep // to look again at the latest
		inBackOff := e.failures > 0 && !e.busy
		if inBackOff {
			wait = e.due - m.ticks.advance(time.Now())
		}
		switch {
		case e.removed:
			m.mu.Unlock()
			return unknown(e.id.String())
		case m.ready(e):
			m.mu.Unlock()
			return nil
		case ctx.Err() != nil:
			m.mu.Unlock()
			return m.notReady(e, context.Cause(ctx))
		case e != m.roots && !m.trust.Load().usable():
			m.mu.Unlock()
			return m.notReady(e, fmt.Errorf("the trust bundle is empty: %w", spiffe.ErrNoAuthority))
		case inBackOff && wait > 0:
			if e.final {
				m.mu.Unlock()
				return m.notReady(e, nil)
			}
		case e.busy: // join
		case r == nil:
			attempt := m.begin(context.WithoutCancel(ctx), e)
			go m.attemptAlone(attempt, e)
		default:
			m.queue.hasten(e, urgent) // in front of those that nobody waits for
			m.kick()
		}
		done := e.wait()
		m.mu.Unlock()
		if err := await(ctx, r, done, max(min(wait, longestSleep), shortestWait)); err != nil {
			return m.notReady(e, err)
		}
	}
}

// await returns when done is closed or d is over, and with an error when r is: whoever waits then
// does not begin to do the work.
func await(ctx context.Context, r *run, done <-chan struct{}, d time.Duration) error {
	var ended <-chan struct{}
	if r != nil {
		ended = r.ctx.Done()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	case <-ctx.Done(): // said by obtain, unless it is ready by now
	case <-ended:
		return fmt.Errorf("the run has ended: %w", context.Cause(r.ctx))
	}
	return nil
}

// ready reports whether there is something to hand out for e. The caller holds mu.
func (m *Manager) ready(e *entry) bool {
	if e == m.roots {
		return m.trust.Load() != nil
	}
	return m.good(e.held.Load())
}

// good reports whether h is there and has not expired.
func (m *Manager) good(h *held) bool { return h != nil && m.wall.unixNano() < h.expires }
