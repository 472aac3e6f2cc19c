package ca

import (
	"cmp"
	"fmt"
	"time"

	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
)

// Health says whether an [Authority], or a registration authority, can sign, and which parts fail. It holds no
// secret.
type Health struct {
	// Signing is why a certificate of the default lifetime would not be signed now: the active root is not valid, its
	// custodian does not sign, the store has not answered for too long, or audit records cannot be made. Nil means that
	// it would be signed, within [Config.Limits].
	Signing error

	// The failures of the parts, whether or not they prevent signing yet; nil for none.
	Store error // since Synced: it does not answer, its record is unfit, or Run does not read it
	Audit error // records cannot be made, or records of key events are missing
	Root  error // the active root should have been replaced by now, or is tainted
	Keys  error // the custodian of a private key does not answer, does not have it, or gives a wrong signature

	// Synced is as in [Status]. Until is when signing ends if nothing changes: when the active root ends or, while
	// the store does not answer, when no lifetime may be granted any more.
	Synced, Until time.Time
}

// Health returns the health of the authority, for a program's readiness and metrics.
func (a *Authority) Health() Health {
	s, now := a.current(), time.Now()
	h := Health{Audit: a.auditError()}
	st := a.Status()
	h.Synced, h.Store = st.Synced, st.SyncError
	if wait := 4 * a.syncInterval; h.Store == nil && a.store != nil && now.Sub(h.Synced) > wait {
		h.Store = fmt.Errorf("ca: the store of %s was last read at %s; see that the authority is running",
			a.cfg.TrustDomain, h.Synced.UTC().Format(time.RFC3339))
	}
	key := s.active()
	kind := key.Kind()
	_, h.Until = s.validity(key)
	rootKey := a.keyError(s, kind)
	h.Keys = cmp.Or(rootKey, a.keyError(s, rotation.Quantum), a.keyError(s, rotation.Token))
	recordable := cmp.Or(h.Audit, rootKey)
	h.Audit = cmp.Or(h.Audit, a.unrecorded())
	h.Root = a.rootError(s, key, h.Until, now)
	if second := s.In(rotation.Quantum, rotation.Active); second != nil {
		h.Root = cmp.Or(h.Root, a.rootError(s, second, second.Cert.NotAfter, now))
	}
	a.mu.Lock()
	if bound := a.bound(s, kind, key); !bound.IsZero() {
		h.Until = rotation.Earlier(h.Until, bound)
	}
	_, h.Signing = a.grant(s, kind, a.cfg.DefaultTTL, now)
	a.mu.Unlock()
	h.Signing = cmp.Or(h.Signing, recordable)
	return h
}

// keyError returns why the custodian of the active key of a kind does not sign with it.
func (a *Authority) keyError(s *state, kind rotation.Kind) error {
	k := cmp.Or(s.In(kind, rotation.Active), new(rotation.Key))
	if failed, ok := a.failed.Load(k.Name); ok {
		return fmt.Errorf("ca: the custodian of the keys of %s: %w", a.cfg.TrustDomain, failed.(error))
	}
	return nil
}

// auditError returns why records cannot be made.
func (a *Authority) auditError() error {
	if err := a.audited.Ask(a.cfg.Auditor); err != nil {
		return fmt.Errorf("ca: audit record of %s: %w", a.cfg.TrustDomain, within(err))
	}
	return nil
}

// rootError returns a fault of an active root, which is valid until end.
func (a *Authority) rootError(s *state, key *rotation.Key, end, now time.Time) error {
	if key.Tainted {
		return fmt.Errorf("ca: root %s of %s is tainted, and signs until its successor does", key.ID,
			a.cfg.TrustDomain)
	}
	// Half of the time left for the replacement is gone.
	due := a.cfg.Rotation.replaceAt(key.Cert, a.cfg.MaxTTL)
	late := due.Add(key.Cert.NotAfter.Sub(due) / 2)
	if s.In(key.Kind(), rotation.Distributing) == nil &&
		(now.After(late) || end.Sub(now.Round(0)) < a.cfg.DefaultTTL) {
		return fmt.Errorf("ca: root %s of %s ends at %s, and has no successor: rotate it, or replace its files",
			key.ID, a.cfg.TrustDomain, end.UTC().Format(time.RFC3339))
	}
	return nil
}
