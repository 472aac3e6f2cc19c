package pki

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/spiffe"
)

// Limits on the contents of a secret beside certificates.
const (
	ticketKeySize = 80 // of Envoy: a name of 16 bytes, and keys of 32 for HMAC and for AES
	maxTicketKeys = 16
	maxGeneric    = 100      // values
	maxGenericKey = 256      // bytes of a name
	maxOpaque     = 64 << 10 // bytes of a key provider
	maxSecret     = 1 << 20  // bytes of all values
)

// Secret is the material of one SDS resource name, in one of the kinds that Envoy knows:
//
//   - a key pair, [NewKeyPairSecret] and [NewSecretPEM]; or a certificate chain whose key Envoy uses through a
//     provider, [NewKeyProviderSecret]
//   - roots that vouch for any peer, [NewTrustSecret] and [NewSecretPEM]
//   - the roots of several trust domains, each vouching only for its own, [NewTrustDomainsSecret]
//   - session ticket keys, [NewTicketKeysSecret]
//   - values for filters, [NewGenericSecret]
//
// Certificates, keys and revocation lists are in PEM, encoded once. A Secret never changes; the slices and maps that
// it returns are shared and must not be changed. It does not print its keys and values.
//
// The zero Secret is not valid and is empty.
type Secret struct {
	redacted
	name     string
	notAfter time.Time
	contents func() *contents // see seal; nil in the zero Secret
	other    *Secret          // of the alternative
}

type contents struct {
	kind                 string
	chain, key, provider []byte
	roots, crls          []byte
	leafOnly             bool
	domains              map[spiffe.TrustDomain][]byte
	tickets              [][]byte
	values               map[string][]byte
}

// The kinds of secrets, as printed.
const (
	kindPair     = "key pair"
	kindProvider = "certificates with a key provider"
	kindRoots    = "roots"
	kindDomains  = "trust domains"
	kindTickets  = "ticket keys"
	kindGeneric  = "generic"
)

// newSecret returns a Secret that prints its name, kind and end.
func newSecret(name string, notAfter time.Time, c *contents) *Secret {
	text := fmt.Sprintf("pki.Secret(%q, %s)", name, c.kind)
	if !notAfter.IsZero() {
		text = fmt.Sprintf("pki.Secret(%q, %s until %s)", name, c.kind, notAfter.UTC().Format(time.RFC3339))
	}
	return &Secret{redacted: redact.New(text), name: name, notAfter: notAfter, contents: redact.Seal(c)}
}

// NewKeyPairSecret returns the certificate chain and private key of pair, a [*spiffe.SVID] or a [*Credential], under
// the given resource name, such as "default". The key is exported unencrypted, so a key in hardware gives an error.
func NewKeyPairSecret(name string, pair interface {
	MarshalPEM() (certs, key []byte, err error)
	NotAfter() time.Time
}) (*Secret, error) {
	switch {
	case name == "", pair == nil, any(pair) == (*spiffe.SVID)(nil), any(pair) == (*Credential)(nil):
		return nil, errors.New("pki: secret: a name and an SVID or a Credential are required")
	}
	chain, key, err := pair.MarshalPEM()
	if err != nil {
		return nil, fmt.Errorf("pki: secret %q: %w", name, err)
	}
	s := newSecret(name, pair.NotAfter(), &contents{kind: kindPair, chain: chain, key: key})
	if svid, is := any(pair).(*spiffe.SVID); is && svid.Alternative() != nil {
		s.other, err = NewKeyPairSecret(name, svid.Alternative())
	}
	return s, err
}

// Alternative returns the key pair of the alternative ([spiffe.SVID.WithAlternative]) of an SVID that this secret was
// made of, or nil.
func (s *Secret) Alternative() *Secret { return s.other }

// NewTrustSecret returns the X.509 authorities of bundle under the given resource name, such as "ROOTCA". A bundle
// without authorities gives an error that wraps [spiffe.ErrNoAuthority]: Envoy would verify nothing.
func NewTrustSecret(name string, bundle *spiffe.Bundle) (*Secret, error) {
	if name == "" || bundle == nil {
		return nil, errors.New("pki: secret: a name and a bundle are required")
	}
	roots := bundle.MarshalPEM()
	if len(roots) == 0 {
		return nil, fmt.Errorf("pki: secret %q: %w", name, spiffe.ErrNoAuthority)
	}
	return newSecret(name, time.Time{}, &contents{kind: kindRoots, roots: roots}), nil
}

// NewSecretPEM makes a Secret from PEM, as in files, which need not hold SPIFFE identities. It takes either a chain
// with its key, or roots; leave the other arguments empty. It reads the input by the rules of [ParseCertificatesPEM]
// and [ParsePrivateKeyPEM] and encodes it again, without comments and with the key as PKCS#8.
//
// The key must belong to the first certificate, else the error wraps [ErrKeyMismatch]: programs often read files
// while another replaces them. Each root must be a CA. Expiry, chains and trust are not checked.
//
// The Secret's NotAfter is the end of the first certificate, or notAfter if that is not zero and earlier. For roots,
// notAfter must be zero.
func NewSecretPEM(name string, chainPEM, keyPEM, rootsPEM []byte, notAfter time.Time) (*Secret, error) {
	pair, roots := len(chainPEM) > 0 || len(keyPEM) > 0, len(rootsPEM) > 0
	var s *Secret
	var err error
	switch {
	case name == "":
		err = errors.New("a name is required")
	case pair && roots:
		err = errors.New("a key pair and roots, want one of them")
	case pair:
		s, err = pairFromPEM(name, chainPEM, keyPEM, notAfter)
	case roots && !notAfter.IsZero():
		err = errors.New("roots do not have a NotAfter of their own")
	case roots:
		s, err = rootsFromPEM(name, rootsPEM)
	default:
		err = errors.New("neither a key pair nor roots")
	}
	if err != nil {
		return nil, fmt.Errorf("pki: secret %q: %w", name, err)
	}
	return s, nil
}

func pairFromPEM(name string, chainPEM, keyPEM []byte, notAfter time.Time) (*Secret, error) {
	chain, err := certpem.Certificates(chainPEM)
	if err != nil {
		return nil, err
	}
	key, err := certpem.PrivateKey(keyPEM)
	if err != nil {
		return nil, err
	}
	if !PublicKeysEqual(chain[0].PublicKey, key.Public()) {
		return nil, ErrKeyMismatch
	}
	out, err := certpem.EncodePrivateKey(key)
	if err != nil {
		return nil, err
	}
	if end := chain[0].NotAfter; notAfter.IsZero() || end.Before(notAfter) {
		notAfter = end
	}
	return newSecret(name, notAfter, &contents{kind: kindPair, chain: MarshalCertificatesPEM(chain...), key: out}), nil
}

func rootsFromPEM(name string, rootsPEM []byte) (*Secret, error) {
	roots, err := ParseCertificatesPEM(rootsPEM)
	if err != nil {
		return nil, err
	}
	for n, c := range roots {
		if !isCA(c) {
			return nil, fmt.Errorf("root %d (%.300q) is not a CA certificate", n+1, c.Subject)
		}
	}
	return newSecret(name, time.Time{}, &contents{kind: kindRoots, roots: MarshalCertificatesPEM(roots...)}), nil
}

// isCA reports whether c can be a root. Version 1 certificates have no CA flag and count as roots.
func isCA(c *x509.Certificate) bool {
	return c.Version < 3 || c.BasicConstraintsValid && c.IsCA
}

// NewKeyProviderSecret returns a secret with a certificate chain but no private key; Envoy signs through one of its
// private key providers. chainPEM is read as in [NewSecretPEM]. provider is an encoded
// envoy.extensions.transport_sockets.tls.v3.PrivateKeyProvider of at most 64 KiB, copied and passed on unchanged. It
// is not printed, as its configuration may contain a key.
func NewKeyProviderSecret(name string, chainPEM, provider []byte) (*Secret, error) {
	if name == "" || len(provider) == 0 {
		return nil, errors.New("pki: secret: a name and a key provider are required")
	}
	chain, err := ParseCertificatesPEM(chainPEM)
	if err == nil && len(provider) > maxOpaque {
		err = fmt.Errorf("a key provider of %d bytes, the limit is %d: %w", len(provider), maxOpaque,
			spiffe.ErrTooLarge)
	}
	if err != nil {
		return nil, fmt.Errorf("pki: secret %q: %w", name, err)
	}
	return newSecret(name, chain[0].NotAfter, &contents{
		kind: kindProvider, chain: MarshalCertificatesPEM(chain...), provider: bytes.Clone(provider),
	}), nil
}

// NewTrustDomainsSecret returns the X.509 authorities of several trust domains under the given resource name, such as
// "ALL". Each authority vouches only for IDs of its own trust domain, which requires Envoy's SPIFFE validator
// (envoy.tls.cert_validator.spiffe). Bundles without X.509 authorities are left out; if none has any, the error wraps
// [spiffe.ErrNoAuthority]. JWT authorities are not included.
func NewTrustDomainsSecret(name string, set *spiffe.BundleSet) (*Secret, error) {
	if name == "" || set == nil {
		return nil, errors.New("pki: secret: a name and bundles are required")
	}
	domains, size := make(map[spiffe.TrustDomain][]byte), 0
	for b := range set.All() {
		if roots := b.MarshalPEM(); len(roots) > 0 {
			domains[b.TrustDomain()] = roots
			size += len(roots)
		}
	}
	var err error
	if len(domains) == 0 {
		err = spiffe.ErrNoAuthority
	} else if size > maxSecret {
		err = spiffe.ErrTooLarge
	}
	if err != nil {
		return nil, fmt.Errorf("pki: secret %q: authorities of %d bytes, the limit is %d: %w", name, size, maxSecret,
			err)
	}
	return newSecret(name, time.Time{}, &contents{kind: kindDomains, domains: domains}), nil
}

// NewTicketKeysSecret returns up to 16 keys for TLS session tickets, 80 random bytes each. Envoy encrypts
// with the first and decrypts with all: to rotate, insert a new key in front and drop the last. The keys are copied.
func NewTicketKeysSecret(name string, keys ...[]byte) (*Secret, error) {
	if name == "" || len(keys) == 0 {
		return nil, errors.New("pki: secret: a name and a ticket key are required")
	}
	if len(keys) > maxTicketKeys {
		return nil, fmt.Errorf("pki: secret %q: %d ticket keys, the limit is %d: %w", name, len(keys), maxTicketKeys,
			spiffe.ErrTooLarge)
	}
	tickets := make([][]byte, len(keys))
	for i, key := range keys {
		if len(key) != ticketKeySize {
			return nil, fmt.Errorf("pki: secret %q: ticket key %d has %d bytes, not %d", name, i+1, len(key),
				ticketKeySize)
		}
		tickets[i] = bytes.Clone(key)
	}
	return newSecret(name, time.Time{}, &contents{kind: kindTickets, tickets: tickets}), nil
}

// NewGenericSecret returns values for Envoy's filters, such as passwords and tokens: one value under the key "", or
// up to 100 under keys of 1 to 256 bytes in UTF-8. No value may be empty. Together they may have 1 MiB. They are
// copied.
func NewGenericSecret(name string, values map[string][]byte) (*Secret, error) {
	if name == "" || len(values) == 0 {
		return nil, errors.New("pki: secret: a name and a value are required")
	}
	_, single := values[""]
	copied, size := make(map[string][]byte, len(values)), 0
	for _, key := range slices.Sorted(maps.Keys(values)) {
		value := values[key]
		var err error
		switch size += len(key) + len(value); {
		case single && len(values) > 1:
			err = errors.New(`a value under the key "" beside others; it stands alone`)
		case len(key) > maxGenericKey, len(values) > maxGeneric, size > maxSecret:
			err = fmt.Errorf("more than %d values, %d bytes of a key or %d bytes together: %w", maxGeneric,
				maxGenericKey, maxSecret, spiffe.ErrTooLarge)
		case !utf8.ValidString(key):
			err = fmt.Errorf("the key %q is not UTF-8", key)
		case len(value) == 0:
			err = fmt.Errorf("the value of %q is empty", key)
		}
		if err != nil {
			return nil, fmt.Errorf("pki: secret %q: %w", name, err)
		}
		copied[key] = bytes.Clone(value)
	}
	return newSecret(name, time.Time{}, &contents{kind: kindGeneric, values: copied}), nil
}

// WithCRLs returns s, which must hold roots that vouch for any peer, with crlsPEM in place of its certificate
// revocation lists: at most 100 X509 CRL blocks in PEM, of complete lists that are signed with SHA-256 or better and
// have a next update. Envoy then requires a list for every CA in a chain, so each root must have signed one. With
// leafOnly, Envoy checks only the list of the leaf's issuer, and the lists may be from any CA.
//
// The new Secret's NotAfter is the earliest next update of the lists: once it has passed, peers refuse every
// certificate.
func (s *Secret) WithCRLs(crlsPEM []byte, leafOnly bool) (*Secret, error) {
	c := s.all()
	if c.kind != kindRoots {
		return nil, fmt.Errorf("pki: secret %q: it holds %s; revocation lists go with roots", s.name, c.kind)
	}
	crls, end, err := readCRLs(crlsPEM, c.roots, leafOnly)
	if err != nil {
		return nil, fmt.Errorf("pki: secret %q: %w", s.name, err)
	}
	return newSecret(s.name, end, &contents{kind: kindRoots, roots: c.roots, crls: crls, leafOnly: leafOnly}), nil
}

// WithTrustDomainCRLs returns s, which must hold the roots of trust domains and no lists, with certificate revocation
// lists, as in [Secret.WithCRLs], for the trust domains in crls. Each authority of such a trust domain must have
// signed one, as Envoy requires a list for every CA in a chain; lists of intermediates may be added. NotAfter is as
// for [Secret.WithCRLs].
func (s *Secret) WithTrustDomainCRLs(crls map[spiffe.TrustDomain][]byte) (*Secret, error) {
	c := s.all()
	if c.kind != kindDomains || !s.notAfter.IsZero() {
		return nil, fmt.Errorf("pki: secret %q: it holds %s, or has revocation lists; they go with trust "+
			"domains that have none", s.name, c.kind)
	}
	domains, size := maps.Clone(c.domains), 0
	var first time.Time // the earliest next update
	for td, list := range crls {
		roots := c.domains[td]
		if roots == nil {
			return nil, fmt.Errorf("pki: secret %q: revocation lists of %q, which has no bundle here: %w", s.name, td,
				spiffe.ErrNoAuthority)
		}
		list, end, err := readCRLs(list, roots, false)
		if err != nil {
			return nil, fmt.Errorf("pki: secret %q: trust domain %q: %w", s.name, td, err)
		}
		if first.IsZero() || end.Before(first) {
			first = end
		}
		domains[td] = slices.Concat(roots, list)
	}
	for _, both := range domains {
		size += len(both)
	}
	if size > maxSecret {
		return nil, fmt.Errorf("pki: secret %q: authorities and revocation lists of %d bytes, the limit is %d: %w",
			s.name, size, maxSecret, spiffe.ErrTooLarge)
	}
	return newSecret(s.name, first, &contents{kind: kindDomains, domains: domains}), nil
}

// readCRLs returns the lists, encoded again in PEM, and their earliest next update. Unless leafOnly is set, each root
// must have signed a list.
func readCRLs(crlsPEM, rootsPEM []byte, leafOnly bool) (out []byte, end time.Time, err error) {
	lists, err := parseCRLs(crlsPEM)
	if err != nil {
		return nil, end, fmt.Errorf("%w: %w", errCRL, err)
	}
	roots, err := ParseCertificatesPEM(rootsPEM)
	if err != nil {
		return nil, end, err
	}
	for n, root := range roots {
		if !leafOnly && !slices.ContainsFunc(lists,
			func(l *x509.RevocationList) bool { return checkCRL(l, root) == nil }) {
			return nil, end, fmt.Errorf("%w: root %d (%.300q) has signed none of them, and so every certificate "+
				"under it would be refused", errCRL, n+1, root.Subject)
		}
	}
	for _, l := range lists {
		if end.IsZero() || l.NextUpdate.Before(end) {
			end = l.NextUpdate
		}
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: l.Raw})...)
	}
	return out, end, nil
}

// Name returns the resource name.
func (s Secret) Name() string { return s.name }

// KeyPair returns the certificate chain, leaf first, and the private key (PKCS#8) in PEM, and whether
// this is a key pair.
func (s Secret) KeyPair() (chainPEM, keyPEM []byte, ok bool) {
	c := s.all()
	if c.kind != kindPair {
		return nil, nil, false
	}
	return c.chain, c.key, true
}

// KeyProvider returns the certificate chain, leaf first, in PEM, and the encoded provider of its key, and whether
// this is such a secret; see [NewKeyProviderSecret].
func (s Secret) KeyProvider() (chainPEM, provider []byte, ok bool) {
	c := s.all()
	if c.kind != kindProvider {
		return nil, nil, false
	}
	return c.chain, c.provider, true
}

// Roots returns the roots in PEM that vouch for any peer, and whether these are such roots.
func (s Secret) Roots() (rootsPEM []byte, ok bool) {
	c := s.all()
	return c.roots, c.kind == kindRoots
}

// CRLs returns the certificate revocation lists in PEM that go with [Secret.Roots], or nil, and whether Envoy applies
// them to leaves only; see [Secret.WithCRLs].
func (s Secret) CRLs() (crlsPEM []byte, leafOnly bool) {
	c := s.all()
	return c.crls, c.leafOnly
}

// TrustDomains returns the roots of each trust domain in PEM, followed by its certificate revocation lists, and
// whether this is such a secret; see [NewTrustDomainsSecret] and [Secret.WithTrustDomainCRLs].
func (s Secret) TrustDomains() (trustPEM map[spiffe.TrustDomain][]byte, ok bool) {
	c := s.all()
	return c.domains, c.kind == kindDomains
}

// TicketKeys returns the session ticket keys, the newest first, and whether these are such keys.
func (s Secret) TicketKeys() (keys [][]byte, ok bool) {
	c := s.all()
	return c.tickets, c.kind == kindTickets
}

// Generic returns the values of a generic secret, a single value without a key under "", and whether this is one.
func (s Secret) Generic() (values map[string][]byte, ok bool) {
	c := s.all()
	return c.values, c.kind == kindGeneric
}

// NotAfter returns when peers start to refuse the Secret: the end of a certificate, or the earliest next update of
// its revocation lists. It is zero for other kinds.
func (s Secret) NotAfter() time.Time { return s.notAfter }

// all returns the contents, which must not be changed.
func (s Secret) all() *contents {
	if s.contents == nil {
		return &contents{kind: "empty"}
	}
	return s.contents()
}
