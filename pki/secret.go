package pki

import (
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// Secret is the material that one SDS resource name stands for, in PEM: a key pair (certificate chain
// and private key) or trusted roots, never both. The PEM is made once, when the Secret is. It never
// changes; the byte slices that it returns are shared and must not be changed. It cannot print its key.
//
// The zero Secret is not valid and has nothing in it.
type Secret struct {
	name     string
	notAfter time.Time
	pem      func() secretPEM // see seal; nil in the zero Secret
}

type secretPEM struct{ chain, key, roots []byte }

// NewKeyPairSecret returns the certificate chain and the private key of pair, a [*spiffe.SVID] or a [*Credential],
// under the given resource name, such as "default". The key is exported in the clear, so one in hardware is an error.
func NewKeyPairSecret(name string, pair interface {
	MarshalPEM() (certs, key []byte, err error)
	NotAfter() time.Time
}) (*Secret, error) {
	svid, isSVID := pair.(*spiffe.SVID)
	credential, isCredential := pair.(*Credential)
	if name == "" || pair == nil || isSVID && svid == nil || isCredential && credential == nil {
		return nil, errors.New("pki: secret: a name and an SVID or a Credential are required")
	}
	chain, key, err := pair.MarshalPEM()
	if err != nil {
		return nil, fmt.Errorf("pki: secret %q: %w", name, err)
	}
	return &Secret{name: name, notAfter: pair.NotAfter(), pem: seal(secretPEM{chain: chain, key: key})}, nil
}

// NewTrustSecret returns the X.509 authorities of bundle under the given resource name, such as
// "ROOTCA". A bundle without any gives an error that wraps [spiffe.ErrNoAuthority]: to Envoy, no roots
// would mean no verification.
func NewTrustSecret(name string, bundle *spiffe.Bundle) (*Secret, error) {
	if name == "" || bundle == nil {
		return nil, errors.New("pki: secret: a name and a bundle are required")
	}
	roots := bundle.MarshalPEM()
	if len(roots) == 0 {
		return nil, fmt.Errorf("pki: secret %q: %w", name, spiffe.ErrNoAuthority)
	}
	return &Secret{name: name, pem: seal(secretPEM{roots: roots})}, nil
}

// NewSecretPEM makes a Secret of PEM from elsewhere, such as files, which need not hold SPIFFE
// identities. It takes either a chain with its key, or roots; the others are empty. Input is read by
// the rules of [ParseCertificatesPEM] and [ParsePrivateKeyPEM] and written anew, without comments and
// with the key as PKCS#8.
//
// Of a pair, the key must belong to the first certificate, else the error wraps [ErrKeyMismatch]: files
// that are being replaced are often seen half-way. Whether certificates are expired, chained or trusted
// is not checked. Each root must be a CA.
//
// The Secret's NotAfter is that of the first certificate, or notAfter if that is not zero and earlier.
// For roots, notAfter must be zero.
func NewSecretPEM(name string, chainPEM, keyPEM, rootsPEM []byte, notAfter time.Time) (*Secret, error) {
	if name == "" {
		return nil, errors.New("pki: secret: a name is required")
	}
	pair, roots := len(chainPEM) > 0 || len(keyPEM) > 0, len(rootsPEM) > 0
	var s *Secret
	var err error
	switch {
	case pair && roots:
		err = errors.New("a key pair and roots, want one of them")
	case pair:
		s, err = pairFromPEM(chainPEM, keyPEM, notAfter)
	case roots && !notAfter.IsZero():
		err = errors.New("roots do not have a NotAfter of their own")
	case roots:
		s, err = rootsFromPEM(rootsPEM)
	default:
		err = errors.New("neither a key pair nor roots")
	}
	if err != nil {
		return nil, fmt.Errorf("pki: secret %q: %w", name, err)
	}
	s.name = name
	return s, nil
}

func pairFromPEM(chainPEM, keyPEM []byte, notAfter time.Time) (*Secret, error) {
	chain, err := ParseCertificatesPEM(chainPEM)
	if err != nil {
		return nil, err
	}
	key, err := ParsePrivateKeyPEM(keyPEM)
	if err != nil {
		return nil, err
	}
	if !PublicKeysEqual(chain[0].PublicKey, key.Public()) {
		return nil, ErrKeyMismatch
	}
	out, err := MarshalPrivateKeyPEM(key)
	if err != nil {
		return nil, err
	}
	if end := chain[0].NotAfter; notAfter.IsZero() || end.Before(notAfter) {
		notAfter = end
	}
	return &Secret{notAfter: notAfter, pem: seal(secretPEM{chain: MarshalCertificatesPEM(chain...), key: out})}, nil
}

func rootsFromPEM(rootsPEM []byte) (*Secret, error) {
	roots, err := ParseCertificatesPEM(rootsPEM)
	if err != nil {
		return nil, err
	}
	for n, c := range roots {
		if !isCA(c) {
			return nil, fmt.Errorf("root %d (%.300q) is not a CA certificate", n+1, c.Subject)
		}
	}
	return &Secret{pem: seal(secretPEM{roots: MarshalCertificatesPEM(roots...)})}, nil
}

// isCA reports whether c can be a root; certificates of version 1 have no way to say so.
func isCA(c *x509.Certificate) bool {
	return c.Version < 3 || c.BasicConstraintsValid && c.IsCA
}

// Name returns the resource name.
func (s Secret) Name() string { return s.name }

// KeyPair returns the certificate chain, leaf first, and the private key (PKCS#8) in PEM, and whether
// this is a key pair. The slices are shared and must not be changed.
func (s Secret) KeyPair() (chainPEM, keyPEM []byte, ok bool) {
	p := s.contents()
	return p.chain, p.key, p.key != nil
}

// Roots returns the trusted roots in PEM, and whether these are roots. The slice is shared and must not
// be changed.
func (s Secret) Roots() (rootsPEM []byte, ok bool) {
	p := s.contents()
	return p.roots, p.roots != nil
}

// NotAfter returns the end of a key pair, after which peers refuse it, and the zero time for
// roots.
func (s Secret) NotAfter() time.Time { return s.notAfter }

// String returns the name, the kind and the end, and no key.
func (s Secret) String() string {
	if s.notAfter.IsZero() {
		return fmt.Sprintf("pki.Secret(%q, %s)", s.name, s.kind())
	}
	return fmt.Sprintf("pki.Secret(%q, %s until %s)", s.name, s.kind(), s.notAfter.UTC().Format(time.RFC3339))
}

// GoString returns the same as String, so that %#v does not show the key.
func (s Secret) GoString() string { return s.String() }

// LogValue implements [slog.LogValuer]: the name, the kind and, for a key pair, its end.
func (s Secret) LogValue() slog.Value {
	attrs := []slog.Attr{slog.String("name", s.name), slog.String("kind", s.kind())}
	if !s.notAfter.IsZero() {
		attrs = append(attrs, slog.Time("not_after", s.notAfter))
	}
	return slog.GroupValue(attrs...)
}

func (s Secret) contents() secretPEM {
	if s.pem == nil {
		return secretPEM{}
	}
	return s.pem()
}

func (s Secret) kind() string {
	if _, _, ok := s.KeyPair(); ok {
		return "key pair"
	}
	if _, ok := s.Roots(); ok {
		return "roots"
	}
	return "empty"
}
