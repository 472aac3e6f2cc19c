package secretcache

import (
	"crypto/x509"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/certs/secretset"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// entry is an identity, or the trust bundles: something that the Manager obtains repeatedly. There may be 100,000
// entries, so it is small.
type entry struct {
	renew.Entry // the Manager's mu guards it

	id     spiffe.ID             // zero if the default identity is a credential
	held   atomic.Pointer[held]  // for readers; nil before the first certificate, and for the bundles
	cause  atomic.Pointer[error] // of the last failure; nil after a success
	since  time.Time             // first failure in a row; zero after a success; guarded by the Manager's mu
	asked  atomic.Int64          // start of the last unfinished attempt, in nanoseconds since 1970; 0 if there is none
	orphan bool                  // the root of the held certificate has left the bundle; guarded by the Manager's mu
}

// held is a certificate in the form that readers get. It never changes.
type held struct {
	secret    *pki.Secret         // under the ID's own name
	alias     *pki.Secret         // under "default"; nil for other identities
	noSecret  error               // why there are no secrets, if the key cannot be exported
	own       material            // of the default identity; nil for others
	roots     []*x509.Certificate // that vouch for it and for its alternative
	received  time.Time
	notBefore time.Time
	notAfter  time.Time // the earliest in the verified chains
}

// leaf returns the certificate, or nil if there is none.
func (h *held) leaf() *x509.Certificate {
	switch {
	case h.own != nil:
		return h.own.Leaf()
	case h.secret == nil:
		return nil
	}
	pem, _, _ := h.secret.KeyPair()
	chain, err := pki.ParseCertificatesPEM(pem)
	if err != nil {
		return nil
	}
	return chain[0]
}

// good reports whether there is a certificate that has not expired.
func (h *held) good() bool { return h != nil && time.Now().Before(h.notAfter) }

// left is the remaining life of h. It is 0 for a nil h, and if the clock was set back to before the certificate's
// start.
func (h *held) left() time.Duration {
	if h == nil || time.Now().Before(h.notBefore) {
		return 0
	}
	return max(time.Until(h.notAfter), 0)
}

// name is the resource name.
func (e *entry) name() string {
	if e.id.IsZero() {
		return secretset.Default
	}
	return e.id.String()
}

func (e *entry) err() error {
	if p := e.cause.Load(); p != nil {
		return *p
	}
	return nil
}
