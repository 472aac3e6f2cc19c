package spiffe

import (
	"cmp"
	"crypto"
	"crypto/x509"
	"fmt"
	"iter"
	"maps"
	"slices"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/tokens/jws"
)

// BundleContents are the parts of a [Bundle].
type BundleContents struct {
	// X509Authorities are the CA certificates that chains of X.509-SVIDs end in. Their order is kept,
	// and a duplicate counts once.
	X509Authorities []*x509.Certificate

	// JWTAuthorities are the keys that sign JWT-SVIDs, by key ID, which must not be empty:
	// *ecdsa.PublicKey on P-256, P-384 or P-521, or *rsa.PublicKey of 2048 to 8192 bits.
	JWTAuthorities map[string]crypto.PublicKey

	// WITAuthorities are the keys that sign WIT-SVIDs, of the same kinds: none in a bundle unless they came from
	// [NewBundle], [ParseBundleWIT] or [ParseJWKSWIT]. A key ID must not belong to a JWT authority as well. The
	// standard is Incubating, and older consumers may refuse a document with these keys; see [Bundle.Marshal].
	WITAuthorities map[string]crypto.PublicKey

	// Sequence is nil for none. A publisher should set it, and must increase it with every change of
	// the contents and only then (Trust Domain and Bundle section 4.1.1).
	Sequence *uint64

	// RefreshHint is how often consumers should fetch the bundle, in whole seconds; 0 means no hint, and
	// consumers usually take five minutes.
	RefreshHint time.Duration
}

// Bundle is the trust bundle of one trust domain: its name, which the published document lacks (Trust Domain
// and Bundle section 4), and the authorities that may speak for it. A Bundle without authorities is valid and
// means that no peer of the domain is trusted.
//
// A Bundle never changes and is safe for concurrent use. The certificates and keys that its methods
// return are shared and must not be changed. It is a [BundleSource] of itself.
type Bundle struct {
	td      TrustDomain
	x509    []*x509.Certificate         // without duplicates
	jwt     map[string]crypto.PublicKey // *ecdsa.PublicKey or *rsa.PublicKey, by key ID
	wit     map[string]crypto.PublicKey // likewise
	seq     sequence
	hint    time.Duration
	skipped []error

	// Made when first needed: a process may hold the bundles of many domains and see few of their peers.
	poolOnce sync.Once
	roots    *x509.CertPool
}

// sequence is a sequence number, if there is one.
type sequence struct {
	n  uint64
	ok bool
}

// NewBundle returns the bundle of td with a copy of the contents c. It refuses a certificate that is not a CA
// certificate or has an RSA key of more than 8192 bits, a JWT or WIT key that no algorithm of JWT-SVID
// can use, a key ID that is empty or belongs to both a JWT and a WIT key, and a refresh hint that is
// negative or not in whole seconds. More than 1,000 authorities give an error that wraps [ErrTooLarge], the zero
// trust domain one that wraps [ErrZero].
func NewBundle(td TrustDomain, c BundleContents) (*Bundle, error) {
	if td.IsZero() {
		return nil, errZero("trust domain")
	}
	b := &Bundle{td: td, hint: c.RefreshHint}
	if n := len(c.X509Authorities) + len(c.JWTAuthorities) + len(c.WITAuthorities); n > maxBundleKeys {
		return nil, b.errorf("%d authorities, the limit is %d: %w", n, maxBundleKeys, ErrTooLarge)
	}
	if c.RefreshHint < 0 || c.RefreshHint%time.Second != 0 {
		return nil, b.errorf("the refresh hint %v is not a number of whole seconds", c.RefreshHint)
	}
	if c.Sequence != nil {
		b.seq = sequence{*c.Sequence, true}
	}
	for i, cert := range c.X509Authorities {
		if cert == nil || len(cert.Raw) == 0 {
			return nil, b.errorf("X.509 authority %d is not a parsed certificate", i+1)
		}
		if reason := certchain.UnfitAnchor(cert); reason != "" {
			return nil, b.errorf("X.509 authority %d, %s: %s", i+1, short(cert.Subject.String()), reason)
		}
	}
	b.x509 = distinct(slices.Clone(c.X509Authorities))
	b.jwt, b.wit = maps.Clone(c.JWTAuthorities), maps.Clone(c.WITAuthorities)
	if err := cmp.Or(b.checkKeys("JWT", b.jwt), b.checkKeys("WIT", b.wit)); err != nil {
		return nil, err
	}
	for id := range sorted(b.wit) {
		if _, ok := b.jwt[id]; ok {
			return nil, b.errorf("the key ID %s is that of a JWT and of a WIT authority; give each key its own",
				short(id))
		}
	}
	return b, nil
}

// checkKeys checks keys that sign one kind of token.
func (b *Bundle) checkKeys(kind string, keys map[string]crypto.PublicKey) error {
	for id, key := range sorted(keys) {
		if id == "" || !utf8.ValidString(id) {
			return b.errorf("the key ID %s of a %s authority is empty or not UTF-8", short(id), kind)
		}
		if reason := jws.Unfit(key); reason != "" {
			return b.errorf("%s authority %s: %s", kind, short(id), reason)
		}
	}
	return nil
}

// ParseBundlePEM returns a bundle of td with the CA certificates in roots, which are CERTIFICATE blocks in PEM
// as in [Bundle.MarshalPEM], and with no keys for tokens, sequence or hint. As in a bundle document, a
// certificate that cannot be used is skipped, if others remain: see [Bundle.Skipped]. Input over 1 MiB or 1,000
// certificates is an error that wraps [ErrTooLarge].
func ParseBundlePEM(td TrustDomain, roots []byte) (*Bundle, error) {
	if td.IsZero() {
		return nil, errZero("trust domain")
	}
	var skipped []error
	certs, err := certpem.Roots(roots, func(c *x509.Certificate) error {
		if reason := certchain.UnfitAnchor(c); reason != "" {
			return fmt.Errorf("%s: %s", short(c.Subject.String()), reason)
		}
		return nil
	}, func(err error) {
		skipped = append(skipped, &ParseError{
			What: fmt.Sprintf("bundle of %q", td), Offset: -1, Rule: "X5-41",
			Reason: "a certificate cannot be used", Err: err,
		})
	})
	if err != nil {
		return nil, (&Bundle{td: td}).errorf("%w", err)
	}
	b, err := NewBundle(td, BundleContents{X509Authorities: certs})
	if err == nil {
		b.skipped = skipped
	}
	return b, err
}

// TrustDomain returns the trust domain that b belongs to.
func (b *Bundle) TrustDomain() TrustDomain { return b.td }

// Contents returns the parts of b in a new slice and new maps, which can be changed and given to
// [NewBundle].
func (b *Bundle) Contents() BundleContents {
	c := BundleContents{
		X509Authorities: slices.Clone(b.x509),
		JWTAuthorities:  maps.Collect(b.JWTAuthorities()),
		WITAuthorities:  maps.Collect(sorted(b.wit)),
		RefreshHint:     b.hint,
	}
	if n, ok := b.Sequence(); ok {
		c.Sequence = &n
	}
	return c
}

// X509Authorities loops over the CA certificates, in the order in which they were given.
func (b *Bundle) X509Authorities() iter.Seq[*x509.Certificate] { return slices.Values(b.x509) }

// JWTAuthorities loops over the JWT keys, sorted by key ID.
func (b *Bundle) JWTAuthorities() iter.Seq2[string, crypto.PublicKey] { return sorted(b.jwt) }

// JWTAuthority returns the JWT key with the given ID, an *ecdsa.PublicKey or *rsa.PublicKey.
func (b *Bundle) JWTAuthority(keyID string) (crypto.PublicKey, bool) {
	key, ok := b.jwt[keyID]
	return key, ok
}

func sorted(keys map[string]crypto.PublicKey) iter.Seq2[string, crypto.PublicKey] {
	return func(yield func(string, crypto.PublicKey) bool) {
		for _, id := range slices.Sorted(maps.Keys(keys)) {
			if !yield(id, keys[id]) {
				return
			}
		}
	}
}

// Sequence returns the sequence number and whether there is one; see [Bundle.Supersedes].
func (b *Bundle) Sequence() (n uint64, ok bool) { return b.seq.n, b.seq.ok }

// RefreshHint returns the publisher's suggested interval between fetches, in whole seconds, and whether there is
// one. A hostile publisher may send any positive number: callers must bound it.
func (b *Bundle) RefreshHint() (d time.Duration, ok bool) { return b.hint, b.hint > 0 }

// CertPool returns a new pool of the CA certificates, for use with other packages. Without any it is empty, not nil,
// because crypto/x509 reads nil as the roots of the host. To verify peers use a [Verifier]: a pool does not know its
// trust domain.
func (b *Bundle) CertPool() *x509.CertPool { return b.pool().Clone() }

// pool is CertPool without the copy. The result must not be changed.
func (b *Bundle) pool() *x509.CertPool {
	b.poolOnce.Do(func() {
		b.roots = x509.NewCertPool()
		for _, c := range b.x509 {
			b.roots.AddCert(c)
		}
	})
	return b.roots
}

// Skipped returns one [*ParseError] for each entry of the document that [ParseBundle] could not use, and for
// each certificate that [ParseBundlePEM] could not, in a new slice. Callers should log them.
func (b *Bundle) Skipped() []error { return slices.Clone(b.skipped) }

// Equal reports whether both are bundles of one trust domain with the same authorities in any order,
// the same sequence number and the same refresh hint. Skipped entries do not count.
func (b *Bundle) Equal(other *Bundle) bool {
	if b == other || b == nil || other == nil {
		return b == other
	}
	return b.td == other.td && b.hint == other.hint && b.seq == other.seq &&
		maps.EqualFunc(b.jwt, other.jwt, jws.SameKey) && maps.EqualFunc(b.wit, other.wit, jws.SameKey) &&
		equalCertificates(b.x509, other.x509)
}

// Supersedes reports whether b, fetched after old, replaces it. It does, unless both have sequence numbers and b's
// is lower. A nil old is always superseded, a bundle of another trust domain never.
//
// Callers should raise an alert for a lower number: an attacker replays an old bundle, or the publisher has lost its
// counter, and an operator must decide. An equal number on a bundle that is not Equal is a fault of the publisher.
func (b *Bundle) Supersedes(old *Bundle) bool {
	if old == nil {
		return true
	}
	return b.td == old.td && (!b.seq.ok || !old.seq.ok || b.seq.n >= old.seq.n)
}

// MarshalPEM returns the CA certificates as CERTIFICATE blocks in PEM, in order: empty if there are none.
func (b *Bundle) MarshalPEM() []byte { return certpem.EncodeCertificates(b.x509) }

// Bundle returns b if it is the bundle of td, and otherwise an error that wraps
// [ErrUnknownTrustDomain]; see [BundleSource].
func (b *Bundle) Bundle(td TrustDomain) (*Bundle, error) {
	if b.td != td {
		return nil, fmt.Errorf("%w; the only bundle is that of %q", errUnknownTrustDomain(td), b.td)
	}
	return b, nil
}

func (b *Bundle) errorf(format string, args ...any) error {
	return fmt.Errorf("spiffe: bundle of %q: %w", b.td, fmt.Errorf(format, args...))
}

// equalCertificates compares the slices as sets; neither has duplicates.
func equalCertificates(a, b []*x509.Certificate) bool {
	if len(a) != len(b) {
		return false
	}
	if slices.EqualFunc(a, b, (*x509.Certificate).Equal) {
		return true
	}
	return len(distinct(slices.Concat(a, b))) == len(a)
}

// distinct removes duplicates in place.
func distinct(certs []*x509.Certificate) []*x509.Certificate {
	seen := make(map[string]bool, len(certs))
	return slices.DeleteFunc(certs, func(c *x509.Certificate) bool {
		twice := seen[string(c.Raw)]
		seen[string(c.Raw)] = true
		return twice
	})
}

func errUnknownTrustDomain(td TrustDomain) error {
	return fmt.Errorf("spiffe: trust domain %q: %w", td, ErrUnknownTrustDomain)
}
