package secretcache

import (
	"cmp"
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/certs/secretset"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

var errRemoved = errors.New("the identity was removed")

func (m *Manager) issue(ctx context.Context, e *entry) error {
	h := e.held.Load()
	ctx, cancel := context.WithTimeout(ctx, renew.AttemptTime(m.cfg.Timeout, h.left()))
	defer cancel()
	// The alternative comes first, as its failure then costs the CA no other signature, until the rest is urgent.
	urgent := !h.good() || h.left() <= h.notAfter.Sub(h.received)/4 || !m.trust.Load().anchors(h.roots)
	var other material
	var failed error
	if !urgent {
		if other, failed = m.alternative(ctx, e); failed != nil {
			return failed
		}
	}
	got, err := m.certify(ctx, e, m.cfg.NewKey)
	if err != nil {
		return err
	}
	if urgent {
		other, failed = m.alternative(ctx, e)
	}
	if other != nil {
		if got, err = got.(*spiffe.SVID).WithAlternative(other.(*spiffe.SVID)); err != nil {
			return err
		}
	}
	return cmp.Or(m.install(ctx, e, got), failed)
}

// alternative is certify for the alternative, if there is to be one, in half of the time that is left.
func (m *Manager) alternative(ctx context.Context, e *entry) (got material, err error) {
	if m.cfg.NewAlternative != nil {
		end, _ := ctx.Deadline()
		half, cancel := context.WithTimeout(ctx, time.Until(end)/2)
		defer cancel()
		if got, err = m.certify(half, e, m.cfg.NewAlternative); err != nil {
			err = fmt.Errorf("the alternative: %w", err)
		}
	}
	return got, err
}

// certify obtains a certificate for a new key, and verifies it with the newest bundles.
func (m *Manager) certify(ctx context.Context, e *entry, newKey func() (crypto.Signer, error)) (material, error) {
	t := m.trust.Load()
	if !t.usable() { // a new certificate could not be verified
		return nil, fmt.Errorf("trust bundle of %q: %w", m.domain(), spiffe.ErrNoAuthority)
	}
	want := m.want(e)
	key, chain, err := m.ask(ctx, e, want, newKey)
	if err != nil {
		return nil, err
	}
	got, err := form(want, certchain.Tidy(chain, key.Public()), key)
	if err != nil {
		return nil, fmt.Errorf("the CA's answer is refused: %w", err)
	}
	_, err = m.verify(t, want, got)
	if e, ok := errors.AsType[*spiffe.VerifyError](err); ok && e.Unvouched() { // the CA may have a new root
		if fetchErr := m.refresh(ctx, t); fetchErr != nil {
			return nil, fmt.Errorf("the CA's answer is refused: %w; no newer bundles: %w", err, fetchErr)
		}
		_, err = m.verify(m.trust.Load(), want, got)
	}
	if err != nil {
		return nil, fmt.Errorf("the CA's answer is refused: %w", err)
	}
	return got, nil
}

// ask requests a certificate for a new key, and returns the CA's answer, with its size checked.
func (m *Manager) ask(ctx context.Context, e *entry, want pki.Expectation, newKey func() (crypto.Signer, error)) (
	crypto.Signer, []*x509.Certificate, error) {
	key, err := newKey()
	if err != nil {
		return nil, nil, fmt.Errorf("new key: %w", err)
	}
	asked := pki.CSROptions{SANs: want.Names()}
	if e == m.first {
		asked.SANs = append(asked.SANs, m.cfg.Names...)
		asked.CommonName = m.cfg.CommonName
	}
	csr, err := pki.NewCSR(key, asked)
	if err != nil {
		return nil, nil, err
	}
	chain, err := m.cfg.CA.Sign(ctx, csr, m.cfg.Lifetime)
	if err != nil {
		return nil, nil, fmt.Errorf("sign: %w", err)
	}
	if err := certchain.CheckSize(chain); err != nil {
		return nil, nil, fmt.Errorf("the CA's answer is refused: %w", err)
	}
	return key, chain, nil
}

// material is a certificate with its key: a [*spiffe.SVID] or a [*pki.Credential].
type material interface {
	Leaf() *x509.Certificate
	Chain() []*x509.Certificate
	NotAfter() time.Time
	MarshalPEM() (certs, key []byte, err error)
}

// form returns the chain and its key as an SVID if want has an ID, and as a credential otherwise, and checks their
// form.
func form(want pki.Expectation, chain []*x509.Certificate, key crypto.Signer) (material, error) {
	if want.ID().IsZero() {
		return pki.NewCredential(chain, key)
	}
	svid, err := spiffe.NewSVID(chain, key)
	if err == nil && svid.ID() != want.ID() {
		err = fmt.Errorf("it is for %q, as which the CA knows the caller, and not for %q: "+
			"the token is that of another account, or the identity is", svid.ID(), want.ID())
	}
	return svid, err
}

// proof says why a certificate, and its alternative, are good: the roots that vouch for them, and the earliest end on
// the way there.
type proof struct {
	roots []*x509.Certificate
	end   time.Time
}

// verify proves, with the bundles in t, that got and its alternative meet want and are valid now.
func (m *Manager) verify(t *trust, want pki.Expectation, got material) (p proof, err error) {
	leaf, now := got.Leaf(), time.Now()
	if now.Before(leaf.NotBefore) || !now.Before(got.NotAfter()) {
		return p, fmt.Errorf("it is valid from %s to %s, and now is %s: compare the clocks", text(leaf.NotBefore),
			text(leaf.NotAfter), text(now))
	}
	path, err := want.Verify(got.Chain(), t.set, m.cfg.Role, now)
	if err == nil && !now.Before(certchain.End(path)) { // crypto/x509 accepts the very last moment, readers do not
		err = fmt.Errorf("a certificate in its chain expired at %s", text(now))
	}
	if err != nil {
		return p, err
	}
	if svid, ok := got.(*spiffe.SVID); ok && svid.Alternative() != nil {
		p, err = m.verify(t, want, svid.Alternative())
	}
	return proof{slices.Concat(path[len(path)-1:], p.roots), earlier(certchain.End(path), p.end)}, err
}

// install publishes got, once it is verified with the newest bundles. Before any reader sees it, all subscribers have
// been told of the bundle that vouches for it.
func (m *Manager) install(ctx context.Context, e *entry, got material) error {
	received := time.Now()
	for {
		t := m.trust.Load()
		p, err := m.verify(t, m.want(e), got)
		if err != nil {
			return fmt.Errorf("the CA's answer is refused: %w", err)
		}
		h := m.hold(e, got, received, p)
		if err := m.awaitNews(ctx, e, h.roots); err != nil {
			return err
		}
		m.mu.Lock()
		if m.trust.Load() != t { // the bundle that vouched for got may be gone
			m.mu.Unlock()
			continue
		}
		err = m.publish(e, h, t)
		m.mu.Unlock()
		return err
	}
}

// publish makes h current. The caller holds mu.
func (m *Manager) publish(e *entry, h *held, t *trust) error {
	if e.Removed() {
		return errRemoved
	}
	if old := e.held.Load(); old != nil && !e.orphan && h.notAfter.Before(old.notAfter) && old.left() > 0 &&
		!m.outlastsRenewal(h) {
		return &tooShort{end: h.notAfter, old: old.notAfter}
	}
	e.held.Store(h)
	e.orphan = false
	if e == m.first {
		m.storeSnapshot(h, t)
		m.changed.Notify()
		m.tell(secretset.Default)
	}
	m.tell(e.name())
	return nil
}

// storeSnapshot makes h, if it is an SVID, the default identity of readers. The caller holds mu.
func (m *Manager) storeSnapshot(h *held, t *trust) {
	if svid, ok := h.own.(*spiffe.SVID); ok {
		m.snap.Store(spiffe.NewSnapshot(svid, t.set))
	}
}

// outlastsRenewal reports whether h leaves time for two attempts after its own renewal begins. If so, a certificate
// that ends sooner than its predecessor is the CA's decision to shorten lifetimes; otherwise it is a fault.
func (m *Manager) outlastsRenewal(h *held) bool {
	begin := renew.RenewAt(h.received, h.notBefore, h.notAfter, m.cfg.GraceRatio, 0, 0)
	if m.cfg.RenewIn != nil {
		begin = time.Now().Add(m.cfg.RenewIn(h.left(), 0))
	}
	return h.notAfter.Sub(begin) >= 2*renew.AttemptTime(m.cfg.Timeout, 1)
}

// tooShort is the error for a certificate refused because of its end.
type tooShort struct{ end, old time.Time }

func (t *tooShort) Error() string {
	return fmt.Sprintf("the CA's answer is refused: it ends at %s, before it could be renewed again, "+
		"and the certificate that it is to replace at %s", text(t.end), text(t.old))
}

// hold returns the readers' view of a certificate for e.
func (m *Manager) hold(e *entry, got material, received time.Time, p proof) *held {
	h := &held{roots: p.roots, received: received.Round(0), notBefore: got.Leaf().NotBefore, notAfter: p.end}
	h.secret, h.noSecret = pki.NewKeyPairSecret(e.name(), got)
	if e != m.first {
		return h
	}
	h.own, h.alias = got, h.secret
	if h.noSecret == nil && e.name() != secretset.Default {
		h.alias, h.noSecret = pki.NewKeyPairSecret(secretset.Default, got)
	}
	return h
}

func text(t time.Time) string { return t.UTC().Format(time.RFC3339) }
