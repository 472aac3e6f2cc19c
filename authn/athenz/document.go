package athenz

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/spiffe"
)

const (
	audience        = "k8s-athenz-identity"
	defaultLifetime = 5 * time.Minute
	maxLifetime     = 15 * time.Minute
	defaultKeyName  = "athenz-init-secret"

	leeway = 5 * time.Second // the signing service and the provider run on different nodes, whose clocks may differ
)

// Signer signs an identity document for a pod, to be used once and soon. The document is a secret. The error wraps
// [ErrDocument] if the subject is not valid. [NewSigner] returns a Signer that holds the keys, [NewSigningClient] one
// that calls the signing service. It must be safe for concurrent use.
type Signer func(ctx context.Context, subject PodSubject) (string, error)

// NewSigner returns a Signer that uses the newest private key in the directory dir. Each version is a PEM file,
// keyName with .v1, .v2 and so on, which other users must not be able to read. An empty keyName means
// "athenz-init-secret". Documents are valid for lifetime, at most 15 minutes; 0 means 5. NewSigner reads no key: keys
// are read for each document, so a new version is used as soon as it is there. Give its public key to the verifiers
// first.
func NewSigner(dir, keyName string, lifetime time.Duration) (Signer, error) {
	keys := &keyDir{dir, cmp.Or(keyName, defaultKeyName), true}
	lifetime = cmp.Or(lifetime, defaultLifetime)
	err := keys.check()
	if err == nil && (lifetime < time.Second || lifetime > maxLifetime) {
		err = fmt.Errorf("the lifetime is %v, want at least a second and at most %v", lifetime, maxLifetime)
	}
	if err != nil {
		return nil, fmt.Errorf("athenz: new signer: %w", err)
	}
	return func(_ context.Context, subject PodSubject) (string, error) {
		text, err := keys.sign(subject, lifetime)
		if err != nil {
			return "", fmt.Errorf("athenz: sign identity document: %w", err)
		}
		return text, nil
	}, nil
}

// sign signs a document with the newest key.
func (k *keyDir) sign(subject PodSubject, lifetime time.Duration) (string, error) {
	if err := subject.check(); err != nil {
		return "", err
	}
	version, err := k.newest()
	if err != nil {
		return "", err
	}
	key, err := readKey(k, version, certpem.PrivateKey)
	if err != nil {
		return "", err
	}
	issuer := k.uri(version)
	with, err := token.NewSigner(key, "", "", "JWT", token.Member{Name: "iss", Value: issuer})
	if err != nil {
		return "", err
	}
	if !allowed(with.Algorithm) {
		return "", fmt.Errorf("version v%d of the key %q is for %v; use an RSA key or an ECDSA key on P-256",
			version, k.name, with.Algorithm)
	}
	now := time.Now().Unix()
	payload, err := json.Marshal(struct {
		Audience string `json:"aud"`
		Expires  int64  `json:"exp"`
		Issued   int64  `json:"iat"`
		Issuer   string `json:"iss"`
		Subject  string `json:"sub"`
	}{audience, now + int64(lifetime/time.Second), now, issuer, subject.uri()})
	if err != nil {
		return "", err
	}
	return with.Token(payload)
}

func allowed(a jws.Algorithm) bool { return a == jws.RS256 || a == jws.ES256 }

// Verifier verifies identity documents with the public keys in a directory. It is safe for concurrent use.
type Verifier struct{ keys keyDir }

// NewVerifier returns a Verifier with the public keys in the directory dir. Each version is a PEM file (PKIX), named
// as for [NewSigner]. An empty keyName means "athenz-init-secret"; issuers with another name are refused. NewVerifier
// reads no key: keys are read for each document, so a removed version is no longer accepted.
func NewVerifier(dir, keyName string) (*Verifier, error) {
	v := &Verifier{keyDir{dir, cmp.Or(keyName, defaultKeyName), false}}
	if err := v.keys.check(); err != nil {
		return nil, fmt.Errorf("athenz: new verifier: %w", err)
	}
	return v, nil
}

// document is the content of a verified identity document.
type document struct {
	subject PodSubject
	expires time.Time
	use     [32]byte // the hash of header and payload, without the signature: ECDSA has two signatures for each
}

// Verify verifies an identity document and returns its subject: its form, its signature by the key version that it
// names, its audience and times, and that header and claims name the same issuer. It allows 5 seconds between clocks.
// The provider must still compare the subject with the pod. The error wraps [ErrDocument], or says that the key could
// not be read.
func (v *Verifier) Verify(text string) (PodSubject, error) {
	d, err := v.verify(text)
	if err != nil {
		return PodSubject{}, fmt.Errorf("athenz: verify identity document: %w", err)
	}
	return d.subject, nil
}

var kind = &token.Kind{Package: "athenz", What: "identity document"}

func bad(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrDocument}, args...)...)
}

func (v *Verifier) verify(text string) (*document, error) {
	signed, refused := kind.Parse(text)
	if refused != nil {
		return nil, bad("%w", refused.Err)
	}
	switch {
	case !slices.Equal(signed.Extra, []string{"iss"}) || signed.Issuer == "":
		return nil, bad(`its header has no "iss" that is a string, or a member that is none of alg, iss and typ`)
	case !allowed(signed.Algorithm):
		return nil, bad("its algorithm is %v, want RS256 or ES256", signed.Algorithm)
	case signed.Type != "JWT":
		return nil, bad("its type is not JWT")
	case signed.HasKeyID:
		return nil, bad("its header has a key ID")
	}
	version, err := v.keys.version(signed.Issuer)
	if err != nil {
		return nil, bad("%w", err)
	}
	key, err := readKey(&v.keys, version, certpem.PublicKey)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, bad("there is no version v%d of the key %q here; give the public key to the verifier before "+
			"the signer has the private one", version, v.keys.name)
	}
	if err != nil {
		return nil, err
	}
	if err := signed.Verify(key, spiffe.Algorithms{}); err != nil {
		return nil, bad("%w", err)
	}
	return readClaims(text, signed.Payload, signed.Issuer)
}

func readClaims(text string, payload []byte, headIssuer string) (*document, error) {
	c, err := jws.ParseClaims(payload, nil)
	latest, earliest := time.Now().Add(leeway), time.Now().Add(-leeway)
	switch {
	case err != nil:
		return nil, bad("the payload is not a strict JSON object: %w", err)
	case c.AudienceList || !slices.Equal(c.Audience, []string{audience}):
		return nil, bad("its audience is not the string %q", audience)
	case c.Issuer != headIssuer:
		return nil, bad("its issuer is %q in the claims and %q in the header",
			token.Clip(c.Issuer, token.MaxQuoted), token.Clip(headIssuer, token.MaxQuoted))
	case !c.Expires.Number || !c.IssuedAt.Number || c.NotBefore.Present && !c.NotBefore.Number:
		return nil, bad(`its "exp" or "iat" is missing or not a number, or its "nbf" is not one`)
	case c.IssuedAt.At.After(latest) || c.NotBefore.At.After(latest):
		return nil, bad(`it is from the future: its "iat" is %s, and its "nbf" %s`, token.Stamp(c.IssuedAt.At),
			token.Stamp(c.NotBefore.At))
	case !earliest.Before(c.Expires.At):
		return nil, bad("it expired at %s", token.Stamp(c.Expires.At))
	case c.Expires.At.Sub(c.IssuedAt.At) > maxLifetime:
		return nil, bad("it is valid for %v, the limit is %v", c.Expires.At.Sub(c.IssuedAt.At), maxLifetime)
	case c.Bound:
		return nil, bad(`"cnf" binds it to a key, whose holder cannot be seen here`)
	}
	subject, err := parsePodSubject(c.Subject)
	use := sha256.Sum256([]byte(text[:strings.LastIndexByte(text, '.')]))
	return &document{subject, c.Expires.At, use}, err
}
