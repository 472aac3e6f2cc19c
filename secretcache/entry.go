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

// entry is something that is obtained again and again: an identity, or the trust bundles. There may be
// 100,000 of them, so it is small.
type entry struct {
	renew.Entry // the Manager's mu guards it

	id    spiffe.ID             // zero for the default identity if that is a credential
	held  atomic.Pointer[held]  // what readers get; nil before the first, and for the bundles
	cause atomic.Pointer[error] // of the last failure; nil after a success
	since time.Time             // of the first failure in a row, if there is a cause; the Manager's mu guards it

	// asked is when the attempt under way began, in nanoseconds since 1970. If Run ended it, asked is less than 0: how
	// long the attempt took.
	asked atomic.Int64

	orphan bool // the root of what is held has left the bundle; the Manager's mu guards it
}

// held is a certificate as it is served. It never changes.
type held struct {
	secret     *pki.Secret       // under the ID's own name
	alias      *pki.Secret       // under "default"; nil for other identities
	noSecret   error             // why there are none, if the key cannot be exported
	svid       *spiffe.SVID      // of the default identity
	credential *pki.Credential   // or this
	anchor     *x509.Certificate // the root that vouches for it
	received   time.Time
	notBefore  time.Time
	notAfter   time.Time // the earliest in the verified chain
}

// chain returns the certificates of the default identity, the leaf first.
func (h *held) chain() []*x509.Certificate {
	if h.svid != nil {
		return h.svid.Chain()
	}
	return h.credential.Chain()
}

// leaf returns the certificate, or nil if there is none that can be read.
func (h *held) leaf() *x509.Certificate {
	switch {
	case h.svid != nil:
		return h.svid.Leaf()
	case h.credential != nil:
		return h.credential.Leaf()
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

// left is how long h has to live; 0 for nothing, and for what no peer accepts yet since the clock was set back.
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
