package witsvid

import (
	"cmp"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/svidkit/svidkit/internal/jws"
	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/spiffe"
)

// DefaultLifetime is how long a token lasts if nobody says otherwise. It is longer than that of a
// JWT-SVID, as a token that was stolen is worth nothing without its key (WIT-27).
const DefaultLifetime = time.Hour

// IssuerOptions are the choices of an [Issuer] that have a default.
type IssuerOptions struct {
	// KeyID is the value of "kid". Empty means the thumbprint of the key (RFC 7638, SHA-256 in base64url),
	// which no two keys share, as WIT-4 asks.
	KeyID string

	// Algorithm is the value of "alg", which must fit the key. Empty means ES256, ES384 or ES512 for a
	// key on P-256, P-384 or P-521, and RS256 for an RSA key, which can also have RS384, RS512, PS256,
	// PS384 and PS512.
	Algorithm string

	// Lifetime is that of the tokens, cut to whole seconds; 0 means DefaultLifetime.
	Lifetime time.Duration

	// Now gives the time of issue. Nil means time.Now. It must be safe for concurrent use.
	Now func() time.Time
}

// Issuer signs tokens for the workloads of one trust domain with one key. It is safe for concurrent
// use if the key is. However it is printed, the key does not show.
type Issuer struct {
	td       spiffe.TrustDomain
	kid      string
	alg      jws.Algorithm
	lifetime time.Duration
	now      func() time.Time
	key      func() crypto.Signer // a func, because no printer sees what it holds
}

// NewIssuer returns an Issuer of tokens for the trust domain td. The key may live in hardware; it is an
// ECDSA key on P-256, P-384 or P-521, or an RSA key of 2048 to 8192 bits. Its public half must be in
// the bundle of td before anybody accepts the tokens; see [Issuer.Authority]. The options may be nil.
func NewIssuer(td spiffe.TrustDomain, key crypto.Signer, opts *IssuerOptions) (*Issuer, error) {
	i := &Issuer{td: td, lifetime: DefaultLifetime, now: time.Now, key: func() crypto.Signer { return key }}
	var o IssuerOptions
	if opts != nil {
		o = *opts
	}
	i.lifetime = cmp.Or(o.Lifetime, DefaultLifetime)
	if o.Now != nil {
		i.now = o.Now
	}
	var err error
	switch {
	case td.IsZero():
		err = fmt.Errorf("no trust domain: %w", spiffe.ErrZero)
	case key == nil:
		err = errors.New("no key")
	case !utf8.ValidString(o.KeyID):
		err = errors.New("the key ID is not UTF-8 (WIT-3)")
	case i.lifetime < time.Second:
		err = fmt.Errorf("a lifetime of %v is less than a second", i.lifetime)
	default:
		i.alg, err = chooseAlgorithm(o.Algorithm, key.Public())
	}
	if err != nil {
		return nil, fmt.Errorf("witsvid: new issuer: %w", err)
	}
	if i.kid = o.KeyID; i.kid == "" {
		i.kid = thumbprint(key.Public())
	}
	return i, nil
}

// chooseAlgorithm returns the algorithm of this name, or the usual one for the key.
func chooseAlgorithm(name string, key crypto.PublicKey) (jws.Algorithm, error) {
	alg, ok := jws.DefaultAlgorithm(key)
	if !ok {
		return 0, fmt.Errorf("no algorithm of WIT-SVID uses this key, a %T: take ECDSA on P-256, P-384 or P-521, or RSA of 2048 to 8192 bits (WIT-12)", key)
	}
	if name != "" {
		if alg, ok = jws.ParseAlgorithm(name); !ok {
			return 0, fmt.Errorf("the algorithm %q is not one of the nine that begin with RS, ES or PS (WIT-6)", clip(name, maxQuoted))
		}
		if !alg.Fits(key) {
			return 0, fmt.Errorf("the algorithm %v does not fit the key (WIT-14)", alg)
		}
	}
	return alg, nil
}

// thumbprint returns the thumbprint of a key that fits one of the algorithms (RFC 7638).
func thumbprint(key crypto.PublicKey) string {
	sum := sha256.Sum256(jws.AppendCanonical(nil, key))
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

// Authority returns the key ID and the public key of the tokens, for [spiffe.BundleContents]:
//
//	contents := bundle.Contents()
//	contents.WITAuthorities[keyID] = key
//
// Publish a new one, and wait until consumers have seen it, before it signs.
func (i *Issuer) Authority() (keyID string, key crypto.PublicKey) { return i.kid, i.key().Public() }

// IssueSVID makes a new key for the workload id, on P-256, and returns it with a token that confirms it.
// It is the way to issue when workload and Issuer are one process or the key is sent along; a key is not
// used for a second token (WIT-52).
func (i *Issuer) IssueSVID(id spiffe.ID) (*SVID, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("witsvid: issue for %q: %w", clip(id.String(), maxInError), err)
	}
	token, err := i.Issue(id, key.Public())
	if err != nil {
		return nil, err
	}
	return NewSVID(token, key)
}

// Issue returns a new token that confirms a public key of the workload id, which must be in the Issuer's
// trust domain and have a path. That the workload has the private key is for the caller to know: it has
// authenticated the workload, and has seen a signature by the key, or made it. The key is of a kind that
// an Issuer may have too, and new with each token (WIT-52); its "alg" is the usual one for it.
//
// The header has "alg", "kid" and "typ", the payload "sub", "exp" and "iat" in whole seconds, a random
// "jti", and "cnf" (WIT-28). "iat" is the present second and never later, because validators exist that
// refuse what was issued in their future.
//
// The token is checked with the public key before it is returned: a signer that is not what it says
// fails here and not with every receiver.
func (i *Issuer) Issue(id spiffe.ID, workload crypto.PublicKey) (string, error) {
	if i == nil || i.key == nil {
		return "", errors.New("witsvid: issue: the Issuer was not made by NewIssuer")
	}
	token, err := i.issue(id, workload)
	if err != nil {
		return "", fmt.Errorf("witsvid: issue for %q: %w", clip(id.String(), maxInError), err)
	}
	return token, nil
}

func (i *Issuer) issue(id spiffe.ID, workload crypto.PublicKey) (string, error) {
	switch {
	case id.IsZero():
		return "", fmt.Errorf("no ID: %w", spiffe.ErrZero)
	case !id.MemberOf(i.td):
		return "", fmt.Errorf("the ID is not in %q, the trust domain of the issuer (SVID-1)", i.td)
	case id.Path() == "":
		return "", errors.New("the ID has no path, so it names a trust domain and not a workload (AMB-19)")
	}
	if reason := jws.Unfit(workload); reason != "" {
		return "", fmt.Errorf("the workload's key: %s (WIT-12)", reason)
	}
	alg, _ := jws.DefaultAlgorithm(workload)
	key := i.key()
	if pub, ok := workload.(interface{ Equal(crypto.PublicKey) bool }); ok && pub.Equal(key.Public()) {
		return "", errors.New("the workload's key is the key of the issuer")
	}
	iat := i.now().Unix()
	payload := strictjson.AppendText([]byte(`{"sub":`), id.String())
	payload = append(payload, `,"exp":`...)
	payload = strconv.AppendInt(payload, iat+int64(i.lifetime/time.Second), 10)
	payload = append(payload, `,"iat":`...)
	payload = strconv.AppendInt(payload, iat, 10)
	payload = append(payload, `,"jti":"`+random()+`","cnf":{"jwk":{`...)
	payload, _ = jws.AppendKey(payload, workload)
	payload = append(payload, `,"alg":"`+alg.String()+`"}}}`...)

	token, err := jws.Compact(jws.AppendHeader(nil, i.alg, i.kid, tokenType), payload, i.alg, key)
	if err != nil {
		return "", err
	}
	if len(token) > MaxSize {
		return "", fmt.Errorf("the token would have %d bytes, the limit is %d: %w", len(token), MaxSize, spiffe.ErrTooLarge)
	}
	p, e := parseToken(token)
	if e != nil {
		return "", fmt.Errorf("nobody would accept the token: %w", e.Err)
	}
	if err := p.alg.Verify(key.Public(), p.input, p.sig); err != nil {
		return "", fmt.Errorf("nobody would accept the token: %w", err)
	}
	return token, nil
}

// random returns 128 random bits in base64url (WIT-21, WPT-8).
func random() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return base64.RawURLEncoding.EncodeToString(b[:])
}

// String returns the trust domain, the algorithm and the key ID.
func (i *Issuer) String() string {
	if i == nil {
		return "witsvid.Issuer(none)"
	}
	return fmt.Sprintf("witsvid.Issuer(%s, %v, %q)", i.td, i.alg, i.kid)
}

// GoString returns the same as String, so that %#v does not show the key.
func (i *Issuer) GoString() string { return i.String() }

// LogValue implements [slog.LogValuer] with String.
func (i *Issuer) LogValue() slog.Value { return slog.StringValue(i.String()) }
