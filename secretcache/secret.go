package secretcache

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/svidkit/svidkit/internal/certs/secretset"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// GenerateSecret returns the secret with the given resource name. The names are:
//
//	default                    the key pair of the default identity, which may be a credential
//	spiffe://TRUST-DOMAIN/PATH the key pair of the identity with that ID: the default one, or one that was added
//	ROOTCA                     the X.509 authorities of the own trust domain
//	spiffe://TRUST-DOMAIN      the X.509 authorities of any trust domain that the CA gave a bundle of
//	ALL                        those of all of them, each for its own trust domain; see [pki.NewTrustDomainsSecret]
//
// Any other name gives an error that wraps [io/fs.ErrNotExist]. For an empty bundle the error wraps
// [spiffe.ErrNoAuthority].
//
// A secret that exists is returned without blocking. A certificate that has expired is not returned.
//
// GenerateSecret waits for a secret that does not exist yet, until ctx is done. Waiting calls share the work, which
// goes on when one of them leaves. The wait ends sooner, with an error, if the CA refuses for good, if the trust
// bundle is empty, and when Run ends. The error wraps [spiffe.ErrNotReady] and the last cause.
//
// Run does the work. While it is not running, waiting calls start attempts themselves, one at a time for each
// identity and with the same waits after failures. Such an attempt runs on its own goroutine, which ends with the
// attempt, after Config.Timeout at the latest, even if no call waits any more.
func (m *Manager) GenerateSecret(ctx context.Context, resourceName string) (*pki.Secret, error) {
	switch resourceName {
	case secretset.Default:
		if !m.hasFirst() {
			return nil, unknown(secretset.Default)
		}
		h, err := m.current(ctx, m.first)
		if err != nil {
			return nil, err
		}
		return h.alias, h.noSecret
	case secretset.Root, secretset.All:
		return m.rootSecret(ctx, resourceName)
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

func unknown(name string) error { return secretset.Unknown("secretcache", name) }

// current returns the certificate of e, once there is one that has not expired.
func (m *Manager) current(ctx context.Context, e *entry) (*held, error) {
	for {
		if h := e.held.Load(); h.good() {
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
	material, ok := t.secrets.Lookup(name)
	if !ok {
		return nil, unknown(name)
	}
	return material.Secret(name)
}

// obtain demands e, and waits until it can be handed out.
func (m *Manager) obtain(ctx context.Context, e *entry) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.loopOf(e)
	for {
		switch {
		case e.Removed():
			return unknown(e.id.String())
		case m.ready(e):
			return nil
		case ctx.Err() != nil:
			return m.notReady(e, context.Cause(ctx))
		case errors.Is(m.life.Idle(), lifecycle.ErrClosed):
			return m.notReady(e, lifecycle.ErrClosed)
		case e != m.roots && !m.trust.Load().usable():
			return m.notReady(e, errNoAuthority)
		case e.Final() && l.Next(e).After(time.Now()):
			return m.notReady(e, nil)
		}
		if ended := l.Await(ctx, e); ended != nil && !m.ready(e) {
			return m.notReady(e, fmt.Errorf("the run has ended: %w", ended))
		}
	}
}

// ready reports whether e can be handed out.
func (m *Manager) ready(e *entry) bool {
	if e == m.roots {
		return m.trust.Load() != nil
	}
	return e.held.Load().good()
}
