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

	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/internal/tokens/token"
)

const (
	audience        = "k8s-athenz-identity"
	defaultLifetime = 5 * time.Minute
	maxLifetime     = 15 * time.Minute
	defaultKeyName  = "athenz-init-secret"

	leeway = 5 * time.Second // the signing service and the provider run on different nodes, whose clocks may differ
)

// Signer signs identity documents. [NewSigner] returns a Signer that holds the keys, [NewSigningClient] one that
// calls the signing service. It must be safe for concurrent use.
type Signer interface {
	// SignDocument returns an identity document for the pod, to be used once and soon. It is a secret. The error
	// wraps [ErrDocument] if the subject is not valid.
	SignDocument(ctx context.Context, subject PodSubject) (string, error)
}

type signer struct {
	keys     keyDir
	lifetime time.Duration
}

// NewSigner returns a Signer that uses the newest private key in the directory dir. Each version is a PEM file,
// keyName with .v1, .v2 and so on, which other users must not be able to read. An empty keyName means
// "athenz-init-secret". Documents are valid for lifetime, at most 15 minutes; 0 means 5. NewSigner reads no key: keys
// are read for each document, so a new version is used as soon as it is there. Give its public key to the verifiers
// first.
func NewSigner(dir, keyName string, lifetime time.Duration) (Signer, error) {
	s := &signer{keyDir{dir, cmp.Or(keyName, defaultKeyName), true}, cmp.Or(lifetime, defaultLifetime)}
	err := s.keys.check()
	if err == nil && (s.lifetime < time.Second || s.lifetime > maxLifetime) {
		err = fmt.Errorf("the lifetime is %v, want at least a second and at most %v", lifetime, maxLifetime)
	}
	if err != nil {
		return nil, fmt.Errorf("athenz: new signer: %w", err)
	}
	return s, nil
}

func (s *signer) SignDocument(_ context.Context, subject PodSubject) (string, error) {
	if err := subject.check(); err != nil {
		return "", err
	}
	text, err := s.sign(subject)
	if err != nil {
		return "", fmt.Errorf("athenz: sign identity document: %w", err)
	}
	return text, nil
}

func (s *signer) sign(subject PodSubject) (string, error) {
	key, version, err := s.keys.signer()
	if err != nil {
		return "", err
	}
	issuer := s.keys.uri(version)
	with, err := token.NewSigner(key, "", "", "JWT", token.Member{Name: "iss", Value: issuer})
	if err != nil {
		return "", err
	}
	if !allowed(with.Algorithm) {
		return "", fmt.Errorf("version v%d of the key %q is for %v; use an RSA key or an ECDSA key on P-256",
			version, s.keys.name, with.Algorithm)
	}
	now := time.Now().Unix()
	payload, err := json.Marshal(struct {
		Audience string `json:"aud"`
		Expires  int64  `json:"exp"`
		Issued   int64  `json:"iat"`
		Issuer   string `json:"iss"`
		Subject  string `json:"sub"`
	}{audience, now + int64(s.lifetime/time.Second), now, issuer, subject.String()})
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

// Document is the content of a verified identity document.
type Document struct {
	Subject PodSubject
	Expires time.Time

	use [32]byte // the hash of header and payload, without the signature: ECDSA has two signatures for each
}

// Verify verifies an identity document: its form, its signature by the key version that it names, its audience and
// times, and that header and claims name the same issuer. It allows 5 seconds between clocks. The provider must still
// compare the document with the pod. The error wraps [ErrDocument], or says that the key could not be read.
func (v *Verifier) Verify(text string) (*Document, error) {
	d, err := v.verify(text)
	if err != nil {
		return nil, fmt.Errorf("athenz: verify identity document: %w", err)
	}
	return d, nil
}

var kind = &token.Kind{Package: "athenz", What: "identity document"}

func bad(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrDocument}, args...)...)
}

func (v *Verifier) verify(text string) (*Document, error) {
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
	key, err := v.keys.public(version)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, bad("there is no version v%d of the key %q here; give the public key to the verifier before "+
			"the signer has the private one", version, v.keys.name)
	}
	if err != nil {
		return nil, err
	}
	if err := signed.Verify(key); err != nil {
		return nil, bad("%w", err)
	}
	return readClaims(text, signed.Payload, signed.Issuer)
}

func readClaims(text string, payload []byte, headIssuer string) (*Document, error) {
	var aud, iss, sub []byte
	var hasAud, hasIss, hasSub, bound bool
	var exp, iat, nbf jws.Date
	refused := kind.ReadObject(payload, func(name string, r *strictjson.Reader) {
		switch name {
		case "aud":
			aud, hasAud = r.Text()
		case "iss":
			iss, hasIss = r.Text()
		case "sub":
			sub, hasSub = r.Text()
		case "exp":
			exp = jws.ReadDate(r)
		case "iat":
			iat = jws.ReadDate(r)
		case "nbf":
			nbf = jws.ReadDate(r)
		case "cnf":
			bound = true
		}
	})
	now := time.Now()
	switch {
	case refused != nil:
		return nil, bad("%w", refused.Err)
	case !hasAud || string(aud) != audience:
		return nil, bad("its audience is not the string %q", audience)
	case !hasIss || string(iss) != headIssuer:
		return nil, bad("its issuer is %q in the claims and %q in the header",
			token.Clip(string(iss), token.MaxQuoted), token.Clip(headIssuer, token.MaxQuoted))
	case !exp.Number || !iat.Number || nbf.Present && !nbf.Number:
		return nil, bad(`its "exp" or "iat" is missing or not a number, or its "nbf" is not one`)
	case iat.At.After(now.Add(leeway)):
		return nil, bad("it was issued at %s, which is in the future", token.Stamp(iat.At))
	case nbf.Present && nbf.At.After(now.Add(leeway)):
		return nil, bad("it is not valid before %s", token.Stamp(nbf.At))
	case !now.Before(exp.At.Add(leeway)):
		return nil, bad("it expired at %s", token.Stamp(exp.At))
	case exp.At.Sub(iat.At) > maxLifetime:
		return nil, bad("it is valid for %v, the limit is %v", exp.At.Sub(iat.At), maxLifetime)
	case bound:
		return nil, bad(`"cnf" binds it to a key, whose holder cannot be seen here`)
	case !hasSub:
		return nil, bad(`its "sub" is not a string`)
	}
	subject, err := parsePodSubject(string(sub))
	if err != nil {
		return nil, err
	}
	use := sha256.Sum256([]byte(text[:strings.LastIndexByte(text, '.')]))
	return &Document{Subject: subject, Expires: exp.At, use: use}, nil
}
