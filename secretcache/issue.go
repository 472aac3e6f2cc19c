package secretcache

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"github.com/svidkit/svidkit/internal/certchain"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

var errRemoved = errors.New("the identity was removed")

// issue gets a certificate for e and publishes it.
func (m *Manager) issue(ctx context.Context, e *entry) error {
	ctx, cancel := context.WithTimeout(ctx, renew.AttemptTime(m.cfg.Timeout, e.held.Load().left()))
	defer cancel()
	t := m.trust.Load()
	if !t.usable() { // a certificate would be made for nothing
		return fmt.Errorf("trust bundle of %q: %w", e.id.TrustDomain(), spiffe.ErrNoAuthority)
	}
	key, err := m.cfg.NewKey()
	if err != nil {
		return fmt.Errorf("new key: %w", err)
	}
	names := []pki.SAN{pki.IDSAN(e.id)}
	if e == m.first {
		names = append(names, m.cfg.Names...)
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: names})
	if err != nil {
		return err
	}
	chain, err := m.cfg.CA.Sign(ctx, csr, m.cfg.Lifetime)
	if err != nil {
		return fmt.Errorf("sign: %w", err)
	}
	received := time.Now()
	if err := certchain.CheckSize(chain); err != nil {
		return fmt.Errorf("the CA's answer is refused: %w", err)
	}
	svid, err := spiffe.NewSVID(certchain.Tidy(chain, key.Public()), key)
	if err != nil {
		return fmt.Errorf("the CA's answer is refused: %w", err)
	}
	peer, err := m.verify(t, e, svid)
	if unvouched(err) { // the CA may have a new root
		if fetchErr := m.refresh(ctx, t); fetchErr != nil {
			return fmt.Errorf("the CA's answer is refused: %w; no newer bundles: %w", err, fetchErr)
		}
		t = m.trust.Load()
		peer, err = m.verify(t, e, svid)
	}
	if err != nil {
		return fmt.Errorf("the CA's answer is refused: %w", err)
	}
	return m.install(ctx, e, svid, received, t, peer)
}

// verify proves that svid is what e asked for and good now, by the bundles in t. The form and the
// key were checked when svid was made.
func (m *Manager) verify(t *trust, e *entry, svid *spiffe.SVID) (*spiffe.Peer, error) {
	if svid.ID() != e.id {
		return nil, fmt.Errorf("it is for %q", svid.ID())
	}
	if now := time.Now(); now.Before(svid.NotBefore()) || !now.Before(svid.NotAfter()) {
		return nil, fmt.Errorf("it is valid from %s to %s, and now is %s: compare the clocks", text(svid.NotBefore()), text(svid.NotAfter()), text(now))
	}
	v, err := spiffe.NewVerifier(t.set, spiffe.AllowIDs(e.id), nil)
	if err != nil {
		return nil, err
	}
	return v.VerifyChain(svid.Chain(), m.cfg.Role)
}

// unvouched reports whether err says that the bundles do not vouch for a chain. What a certificate may be used for is not
// for bundles to say.
func unvouched(err error) bool {
	v, ok := errors.AsType[*spiffe.VerifyError](err)
	return ok && (v.Stage == "bundle" || v.Stage == "chain") && v.Rule != "X5-39"
}

// install publishes svid, which peer proves by the bundles in t. No reader sees it before
// all subscribers were told of the bundle that vouches for it.
func (m *Manager) install(ctx context.Context, e *entry, svid *spiffe.SVID, received time.Time, t *trust, peer *spiffe.Peer) error {
	for {
		path := peer.Chain()
		h := m.hold(e, svid, received, path[len(path)-1], peer.NotAfter())
		if err := m.awaitNews(ctx, e, h.anchor); err != nil {
			return err
		}
		m.mu.Lock()
		if now := m.trust.Load(); now != t { // the bundle that vouched for it may be gone
			m.mu.Unlock()
			t = now
			var err error
			if peer, err = m.verify(t, e, svid); err != nil {
				return fmt.Errorf("the CA's answer is refused: %w", err)
			}
			continue
		}
		err := m.publish(e, h, t)
		m.mu.Unlock()
		return err
	}
}

// publish makes h current. The caller holds mu.
func (m *Manager) publish(e *entry, h *held, t *trust) error {
	if e.Removed() {
		return errRemoved
	}
	if old := e.held.Load(); old != nil && !e.orphan && h.notAfter.Before(old.notAfter) && old.left() > 0 && !m.outlastsRenewal(h) {
		return &tooShort{end: h.notAfter, old: old.notAfter}
	}
	e.held.Store(h)
	e.orphan = false
	if e == m.first {
		m.snap.Store(spiffe.NewSnapshot(h.svid, t.set))
		m.changed.Notify()
		m.tell(defaultName)
	}
	m.tell(e.id.String())
	return nil
}

// outlastsRenewal reports whether h leaves time for two attempts after its own renewal has begun. One that ends
// sooner than the certificate that it replaces is a CA's decision to shorten lives if it does, and else a fault.
func (m *Manager) outlastsRenewal(h *held) bool {
	begin := renew.RenewAt(h.received, h.notBefore, h.notAfter, m.cfg.GraceRatio, 0, 0)
	return h.notAfter.Sub(begin) >= 2*renew.AttemptTime(m.cfg.Timeout, 1)
}

// tooShort is the error for a certificate that is refused for its end.
type tooShort struct{ end, old time.Time }

func (t *tooShort) Error() string {
	return fmt.Sprintf("the CA's answer is refused: it ends at %s, before it could be renewed again, and the certificate that it is to replace at %s", text(t.end), text(t.old))
}

// hold makes what readers get of svid.
func (m *Manager) hold(e *entry, svid *spiffe.SVID, received time.Time, anchor *x509.Certificate, notAfter time.Time) *held {
	h := &held{anchor: anchor, received: received.Round(0), notBefore: svid.NotBefore(), notAfter: notAfter}
	h.secret, h.noSecret = pki.NewKeyPairSecret(e.id.String(), svid)
	if e == m.first {
		h.svid = svid
		if h.noSecret == nil {
			h.alias, h.noSecret = pki.NewKeyPairSecret(defaultName, svid)
		}
	}
	return h
}

func text(t time.Time) string { return t.UTC().Format(time.RFC3339) }
