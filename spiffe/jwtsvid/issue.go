package jwtsvid

import (
	"cmp"
	"crypto"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/svidkit/svidkit/internal/jws"
	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/spiffe"
)

// DefaultLifetime is how long a token lasts if nobody says otherwise: a token that was stolen cannot
// be called back (JWT-21).
const DefaultLifetime = 5 * time.Minute

// IssuerOptions are the choices of an [Issuer] that have a default.
type IssuerOptions struct {
	// Algorithm is the value of "alg", which must fit the key. Empty means ES256, ES384 or ES512 for a
	// key on P-256, P-384 or P-521, and RS256 for an RSA key, which can also have RS384, RS512, PS256,
	// PS384 and PS512.
	Algorithm string

	// Lifetime is that of a token whose [Request] does not say; 0 means DefaultLifetime.
	Lifetime time.Duration

	// WideAudience permits what makes a token good for more than one receiver: several values in "aud"
	// (JWT-16), and the ID of a whole trust domain as a value (JWT-17). Each receiver of such a token can
	// present it to the others.
	WideAudience bool

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
	wide     bool
	now      func() time.Time
	key      func() crypto.Signer // a func, because no printer sees what it holds
}

// NewIssuer returns an Issuer of tokens for the trust domain td. The key may live in hardware; it is an
// ECDSA key on P-256, P-384 or P-521, or an RSA key of 2048 to 8192 bits, and its public half must be
// in the bundle of td under keyID before anybody accepts the tokens; see
// [spiffe.BundleContents.JWTAuthorities]. The options may be nil.
func NewIssuer(td spiffe.TrustDomain, keyID string, key crypto.Signer, opts *IssuerOptions) (*Issuer, error) {
	i := &Issuer{td: td, kid: keyID, lifetime: DefaultLifetime, now: time.Now, key: func() crypto.Signer { return key }}
	name := ""
	if opts != nil {
		i.lifetime = cmp.Or(opts.Lifetime, DefaultLifetime)
		i.wide = opts.WideAudience
		if opts.Now != nil {
			i.now = opts.Now
		}
		name = opts.Algorithm
	}
	err := i.chooseAlgorithm(name)
	switch {
	case td.IsZero():
		err = fmt.Errorf("no trust domain: %w", spiffe.ErrZero)
	case keyID == "" || !utf8.ValidString(keyID):
		err = errors.New("the key ID is empty or not UTF-8; give the one that the key has in the bundle (JWT-9)")
	case i.lifetime < time.Second:
		err = fmt.Errorf("a lifetime of %v is less than a second", i.lifetime)
	}
	if err != nil {
		return nil, fmt.Errorf("jwtsvid: new issuer: %w", err)
	}
	return i, nil
}

// chooseAlgorithm sets i.alg to the one of this name, or to the usual one for the key.
func (i *Issuer) chooseAlgorithm(name string) error {
	key := i.key()
	if key == nil {
		return errors.New("no key")
	}
	pub := key.Public()
	alg, ok := jws.DefaultAlgorithm(pub)
	if !ok {
		return fmt.Errorf("no algorithm of JWT-SVID uses this key, a %T: take ECDSA on P-256, P-384 or P-521, or RSA of 2048 to 8192 bits (JWT-27)", pub)
	}
	if name != "" {
		if alg, ok = jws.ParseAlgorithm(name); !ok {
			return fmt.Errorf("the algorithm %q is not one of the nine that begin with RS, ES or PS (JWT-3)", clip(name, maxQuoted))
		}
		if !alg.Fits(pub) {
			return fmt.Errorf("the algorithm %v does not fit the key (JWT-27)", alg)
		}
	}
	i.alg = alg
	return nil
}

// Request is what a token is to say. Who it is for is decided by the caller of [Issuer.Issue], who has
// authenticated the workload.
type Request struct {
	// ID is the workload: in the Issuer's trust domain, with a path. Required.
	ID spiffe.ID

	// Audience is whom the token is for. Required; more than one value needs
	// [IssuerOptions.WideAudience].
	Audience []string

	// Lifetime is how long the token lasts; 0 means the Issuer's default. It is cut to whole seconds.
	Lifetime time.Duration

	// Claims are further claims, by name, in what [json.Marshal] makes of them. "sub", "aud", "exp", "nbf"
	// and "iat", in whatever case, are not among them. A claim is believed until the token expires
	// (SVID-9), so what changes sooner does not belong here.
	Claims map[string]any
}

// Issue returns a new token. Its header has "alg", "kid" and "typ", its payload "sub", "aud" as an
// array, "exp" and "iat" in whole seconds, and the claims of the request. "iat" is the present second
// and never later, because validators exist that refuse what was issued in their future.
//
// The token is checked with the public key before it is returned: a signer that is not what it says
// fails here and not with every receiver. The token is a credential; the error does not carry it.
func (i *Issuer) Issue(r Request) (string, error) {
	if i == nil || i.key == nil {
		return "", errors.New("jwtsvid: issue: the Issuer was not made by NewIssuer")
	}
	token, err := i.issue(r)
	if err != nil {
		return "", fmt.Errorf("jwtsvid: issue for %q: %w", clip(r.ID.String(), maxInError), err)
	}
	return token, nil
}

func (i *Issuer) issue(r Request) (string, error) {
	lifetime := cmp.Or(r.Lifetime, i.lifetime)
	if lifetime < time.Second {
		return "", fmt.Errorf("a lifetime of %v is less than a second", lifetime)
	}
	switch {
	case r.ID.IsZero():
		return "", fmt.Errorf("the request names no ID: %w", spiffe.ErrZero)
	case !r.ID.MemberOf(i.td):
		return "", fmt.Errorf("the ID is not in %q, the trust domain of the issuer (SVID-1)", i.td)
	case r.ID.Path() == "":
		return "", errors.New("the ID has no path, so it names a trust domain and not a workload (AMB-19)")
	}
	if err := i.checkAudience(r.Audience); err != nil {
		return "", err
	}
	further, err := furtherClaims(r.Claims)
	if err != nil {
		return "", err
	}

	iat := i.now().Unix()
	payload := strictjson.AppendText([]byte(`{"sub":`), r.ID.String())
	payload = append(payload, `,"aud":[`...)
	for n, a := range r.Audience {
		if n > 0 {
			payload = append(payload, ',')
		}
		payload = strictjson.AppendText(payload, a)
	}
	payload = append(payload, `],"exp":`...)
	payload = strconv.AppendInt(payload, iat+int64(lifetime/time.Second), 10)
	payload = append(payload, `,"iat":`...)
	payload = strconv.AppendInt(payload, iat, 10)
	payload = append(append(payload, further...), '}')

	key := i.key()
	token, err := jws.Compact(jws.AppendHeader(nil, i.alg, i.kid, "JWT"), payload, i.alg, key)
	if err != nil {
		return "", err
	}
	if len(token) > MaxSize {
		return "", fmt.Errorf("the token would have %d bytes, the limit is %d: %w", len(token), MaxSize, spiffe.ErrTooLarge)
	}
	p, e := parse(token)
	if e == nil {
		e = p.verifyWith(key.Public())
	}
	if e != nil {
		return "", fmt.Errorf("nobody would accept the token: %v: %w", e.Reason, e.Err)
	}
	return token, nil
}

func (i *Issuer) checkAudience(audience []string) error {
	if err := checkAudience(audience); err != nil {
		return fmt.Errorf("%w; say whom the token is for (JWT-12)", err)
	}
	if i.wide {
		return nil
	}
	if n := len(audience); n > 1 {
		return fmt.Errorf("%d audiences, so that each can present the token to the others; issue one token for each, or set WideAudience (JWT-16)", n)
	}
	if id, err := spiffe.ParseID(audience[0]); err == nil && id.Path() == "" {
		return fmt.Errorf("the audience %q is a whole trust domain; name the receiving service, or set WideAudience (JWT-17)", clip(audience[0], maxQuoted))
	}
	return nil
}

// furtherClaims returns the members of claims, each with a comma in front.
func furtherClaims(claims map[string]any) ([]byte, error) {
	if len(claims) == 0 {
		return nil, nil
	}
	for name := range claims {
		for _, own := range []string{"sub", "aud", "exp", "nbf", "iat"} {
			if strings.EqualFold(name, own) { // readers exist that do not tell them apart
				return nil, fmt.Errorf("the claim %q is not for the caller to set", clip(name, maxQuoted))
			}
		}
	}
	object, err := json.Marshal(claims)
	if err != nil {
		return nil, fmt.Errorf("the claims cannot be written as JSON: %w", err)
	}
	object[0] = ','
	return object[:len(object)-1], nil
}

// String returns the trust domain, the algorithm and the key ID.
func (i *Issuer) String() string {
	if i == nil {
		return "jwtsvid.Issuer(none)"
	}
	return fmt.Sprintf("jwtsvid.Issuer(%s, %v, %q)", i.td, i.alg, i.kid)
}

// GoString returns the same as String, so that %#v does not show the key.
func (i *Issuer) GoString() string { return i.String() }

// LogValue implements [slog.LogValuer] with String.
func (i *Issuer) LogValue() slog.Value { return slog.StringValue(i.String()) }
