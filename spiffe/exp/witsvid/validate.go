package witsvid

import (
	"cmp"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/internal/tokens/token"
	"github.com/svidkit/svidkit/spiffe"
)

const (
	defaultProofs = 100_000
	maxProofs     = 10_000_000
)

// ValidatorOptions are the choices of a [Validator] that have a default.
type ValidatorOptions struct {
	// Leeway is how long tokens and proofs are accepted after their end and before their beginning, for
	// clocks that disagree: from 0 to two minutes. Nil means one minute.
	Leeway *time.Duration

	// Proofs is how many used proofs of one ID are remembered, each until it expires, so that none is accepted twice.
	// An ID's proofs beyond this are refused with [ErrUnavailable], so set more than all clients of the ID send in a
	// proof's lifetime and the leeway: two minutes for most. Each costs about 150 bytes. 0 means 100,000, at most
	// 10,000,000; -1 means that a proof may be used any number of times until it expires.
	//
	// All IDs together have space for half as many again. Each further ID gets at most two thirds of the rest, so that
	// no allowed caller locks the others out.
	Proofs int

	// Now gives the time to validate at. Nil means time.Now. It must be safe for concurrent use.
	Now func() time.Time
}

// Validator decides whether a token and a proof prove an identity that is allowed. It is safe for
// concurrent use.
type Validator struct {
	check   *token.Checker[*holder]
	allow   spiffe.PolicySource
	replays *replays // nil for none
}

// NewValidator returns a Validator that takes the WIT key for each token from bundles, and only from the bundle of
// the trust domain that the token's own ID names. It accepts the holders that the policy allows at that moment. A
// policy that can allow no peer is an error; see [spiffe.CheckPolicySource]. The options may be nil.
//
// The Validator remembers up to 1,000 verified tokens of at most 8 KiB, so that their signature is not checked
// again; the signature of each proof is. It asks the source for each token, remembered or not, so that a removed
// key is distrusted at once. A remembered token counts only while the source returns the same *spiffe.Bundle, so a
// source should not make a new one for each call. Bundles have WIT keys only if [spiffe.ParseBundleWIT] or
// [spiffe.ParseJWKSWIT] read them, as a watch of WIT bundles does, or [spiffe.NewBundle] got them.
func NewValidator(bundles spiffe.BundleSource, allow spiffe.PolicySource, opts *ValidatorOptions) (*Validator, error) {
	o := *cmp.Or(opts, &ValidatorOptions{})
	proofs := cmp.Or(o.Proofs, defaultProofs)
	check, err := token.NewChecker[*holder](tokens, bundles, o.Leeway, o.Now)
	if err == nil {
		err = spiffe.CheckPolicySource(allow)
	}
	if err == nil && (proofs < -1 || proofs > maxProofs) {
		err = fmt.Errorf("the option Proofs is %d, not from -1 to %d", proofs, maxProofs)
	}
	if err != nil {
		return nil, fmt.Errorf("witsvid: new validator: %w", err)
	}
	v := &Validator{check: check, allow: allow}
	if proofs > 0 {
		v.replays = newReplays(proofs)
	}
	return v, nil
}

var errNotMade = errors.New("the Validator was not made by NewValidator")

// Proof is proof that its holder has the key of a WIT-SVID, that the token was verified, and that its ID
// is allowed. Only this package makes one, so a function that takes a *Proof cannot be called with an
// unproven name. It never changes. The zero Proof proves nothing: its ID is the zero ID.
type Proof struct {
	id       spiffe.ID
	notAfter time.Time
}

// ID returns the ID that the holder proved.
func (p *Proof) ID() spiffe.ID { return p.id }

// NotAfter returns when the token expires, which is the latest end of a session that the proof opened. The proof
// itself was for one call.
func (p *Proof) NotAfter() time.Time { return p.notAfter }

// Validate verifies a token and a Workload Proof Token for one call, and returns the proof. There is no way to
// accept a token alone. The call has the tokens that were received; its Target is from the configuration of the
// receiver. For HTTP see [Middleware]. The checks come in this order, and the error is the first failure:
//
//  1. The form of the token: three parts of canonical base64url, at most 16 KiB; a known algorithm, "typ",
//     "kid" and no "crit" in the header; "sub", "exp" and the public key in "cnf", and no "aud".
//  2. The bundle of that ID's trust domain, the WIT key in it that "kid" names, the signature.
//  3. "exp" and "nbf" of the token. All other claims, "iat" and "iss" included, are ignored, and a token may come
//     any number of times, each time with another proof.
//  4. The form of the proof, its "alg", "typ" and signature: by the key in "cnf".
//  5. "aud", "exp", "jti", "wth", "ath", "tth" and "oth" of the proof.
//  6. The policy; and last that the proof was not used before, so that only allowed callers fill the memory.
//
// The error carries neither token nor proof. See [ErrUnavailable] for what it may wrap.
func (v *Validator) Validate(token, proof string, c Call) (*Proof, error) {
	p, err := v.validate(token, proof, c)
	if err != nil {
		return nil, err
	}
	return p, nil
}

func (v *Validator) validate(text, proof string, c Call) (*Proof, *token.Error) {
	if err := c.check(); err != nil {
		return nil, &token.Error{Kind: proofs, Reason: token.Audience, Rule: "WPT-5", Err: err}
	}
	h, now, e := v.verifyToken(text)
	if e != nil {
		return nil, e
	}
	want := canonicalTarget(c.Target)
	return v.verifyProof(h, text, proof, &c, now, func(aud string) bool { return canonicalTarget(aud) == want })
}

// verifyToken makes the checks of a token that need no proof. Its result never leaves this package without a proof.
func (v *Validator) verifyToken(text string) (*holder, time.Time, *token.Error) {
	if v == nil || v.check == nil {
		return nil, time.Time{}, &token.Error{Kind: tokens, Reason: token.BundleSource, Err: errNotMade}
	}
	now := v.check.Now()
	h, known, e := v.check.Recall(text)
	if e == nil && !known {
		h, e = v.verifyAnew(text)
	}
	if e == nil {
		e = v.check.InTime(tokens, h.expires, h.notBefore, now)
	}
	if e != nil {
		if h != nil {
			e.ID = h.id
		}
		return nil, now, e
	}
	return h, now, nil
}

func (v *Validator) verifyAnew(text string) (*holder, *token.Error) {
	h, s, e := parseToken(text)
	if e != nil {
		return nil, e
	}
	b, e := v.check.Bundle(h.id.TrustDomain())
	if e == nil {
		e = verifySignature(s, b)
	}
	if e == nil {
		v.check.Keep(strings.Clone(text), h, b, h.expires) // text may be a small part of something large
	}
	return h, e
}

// verifySignature checks the signature of a token with the WIT key that it names.
func verifySignature(s *token.Signed, b *spiffe.Bundle) *token.Error {
	kid := token.Clip(s.KeyID, token.MaxQuoted)
	keys := b.Contents().WITAuthorities
	key, ok := keys[s.KeyID]
	switch {
	case len(keys) == 0:
		return tokens.Refuse("unknown key", "WIT-63",
			"the bundle of %q has no WIT keys; ParseBundle leaves them out, ParseBundleWIT reads them", b.TrustDomain())
	case !ok:
		return tokens.Refuse("unknown key", "WIT-62", "the bundle of %q has no WIT key %q", b.TrustDomain(), kid)
	case !s.Algorithm.Fits(key):
		return tokens.Refuse("unknown key", "WIT-6", "the key %q is not one for %v", kid, s.Algorithm)
	}
	if err := s.Verify(key, spiffe.Algorithms{}); err != nil {
		return tokens.Refuse("signature", "WIT-1", "key %q: %w", kid, err)
	}
	return nil
}

// verifyProof verifies a Workload Proof Token of h, checks the policy, and records that the proof was used.
func (v *Validator) verifyProof(
	h *holder, text, proof string, c *Call, now time.Time, accept func(aud string) bool,
) (*Proof, *token.Error) {
	p, e := v.checkProof(h, text, proof, c, now, accept)
	if e == nil {
		if err := v.allow.Policy().Check(h.id); err != nil {
			e = &token.Error{Kind: proofs, Reason: token.Denied, Err: err}
		} else {
			e = v.use(h, hash(text), p, now)
		}
	}
	if e != nil {
		e.ID = h.id
		return nil, e
	}
	return &Proof{h.id, h.expires}, nil
}

// checkProof checks the claims of a proof and its signature.
func (v *Validator) checkProof(
	h *holder, text, proof string, c *Call, now time.Time, accept func(aud string) bool,
) (*proofClaims, *token.Error) {
	s, e := parseSigned(proofs, proof)
	switch {
	case e != nil:
	case s.Algorithm != h.alg:
		e = proofs.Refuse("algorithm", "WPT-3", `"alg" is %v, and the token confirms a key for %v`, s.Algorithm, h.alg)
	default:
		e = typeFault(proofs, s, proofType, "WPT-2", "WPT-2")
	}
	if e != nil {
		return nil, e
	}
	if err := s.Verify(h.key, spiffe.Algorithms{}); err != nil {
		return nil, proofs.Refuse("signature", "WPT-4", "%w", err)
	}
	p, e := readProof(s.Payload)
	switch {
	case e != nil:
	case !accept(p.aud):
		e = proofs.Refuse(token.Audience, "WPT-5", `"aud" is %q, which is not what is called here`,
			token.Clip(p.aud, 4*token.MaxQuoted))
	default:
		e = v.check.InTime(proofs, p.exp.At, p.nbf.At, now)
	}
	switch {
	case e != nil:
	case p.exp.At.After(now.Add(maxProofLifetime + v.check.Leeway)):
		e = proofs.Refuse("lifetime", "WPT-7", "it lasts until %s, and no more than %v is accepted",
			token.Stamp(p.exp.At), maxProofLifetime)
	case p.texts["wth"] != hash(text):
		e = proofs.Refuse("binding", "WPT-10", `"wth" is that of another token`)
	default:
		e = p.checkTokens(c)
	}
	if e != nil {
		return nil, e
	}
	return p, nil
}

// proofClaims are the claims in a Workload Proof Token.
type proofClaims struct {
	aud      string
	texts    map[string]string // "jti", "wth", "ath" and "tth", if they are there
	oth      map[string]string
	exp, nbf jws.Date
	bad      string // the first claim that is of the wrong type
}

// maxOther is how many entries of "oth" are read.
const maxOther = 32

// readProof reads the payload of a proof. Claims that it does not know are ignored.
func readProof(payload []byte) (*proofClaims, *token.Error) {
	p := &proofClaims{texts: map[string]string{}}
	if e := proofs.ReadObject(payload, p.read); e != nil {
		return nil, e
	}
	claim := func(rule, format string, args ...any) (*proofClaims, *token.Error) {
		return nil, proofs.Refuse("claim", rule, format, args...)
	}
	switch {
	case p.bad != "":
		return claim(claimRule[p.bad],
			`%q is not what it has to be: a string, for "aud" one, for "oth" an object of a few`, p.bad)
	case p.aud == "":
		return claim("WPT-5", `"aud" is missing or empty`)
	case !p.exp.Number:
		return claim("WPT-6", `"exp" is missing or not a number`)
	case p.nbf.Present && !p.nbf.Number:
		return claim("WPT-6", `"nbf" is not a number`)
	case p.texts["jti"] == "":
		return claim("WPT-8", `"jti" is missing or empty`)
	case p.texts["wth"] == "":
		return claim("WPT-10", `"wth" is missing or empty`)
	}
	return p, nil
}

// read reads one claim.
func (p *proofClaims) read(name string, r *strictjson.Reader) {
	switch name {
	case "aud":
		if r.Kind() != strictjson.Array {
			p.aud = p.text(name, r)
			break
		}
		n := 0
		for range r.Elements() {
			p.aud = p.text(name, r)
			n++
		}
		p.check(name, n == 1) // each receiver of such a proof could present it to the others
	case "jti", "wth", "ath", "tth":
		p.texts[name] = p.text(name, r)
	case "exp":
		p.exp = jws.ReadDate(r)
	case "nbf":
		p.nbf = jws.ReadDate(r)
	case "oth":
		p.check(name, r.Kind() == strictjson.Object)
		p.oth = map[string]string{}
		for field := range r.Members() {
			field := string(field)
			p.check(name, len(p.oth) < maxOther)
			if len(p.oth) < maxOther {
				p.oth[field] = p.text(name, r)
			}
		}
	}
}

func (p *proofClaims) text(name string, r *strictjson.Reader) string {
	s, ok := r.Text()
	p.check(name, ok)
	return string(s)
}

func (p *proofClaims) check(name string, ok bool) {
	if !ok && p.bad == "" {
		p.bad = name
	}
}

var claimRule = map[string]string{
	"aud": "WPT-5", "jti": "WPT-8", "wth": "WPT-10", "ath": "WPT-11", "tth": "WPT-12", "oth": "WPT-13",
}

// checkTokens compares the other tokens of the call with the tokens that the proof covers. The proof must cover all
// of them, and no token that was removed on the way.
func (p *proofClaims) checkTokens(c *Call) *token.Error {
	for _, t := range []struct{ claim, rule, token, what string }{
		{"ath", "WPT-11", c.AccessToken, "access token"}, {"tth", "WPT-12", c.TxnToken, "transaction token"},
	} {
		if got, there := p.texts[t.claim]; there != (t.token != "") || there && got != hash(t.token) {
			return proofs.Refuse("binding", t.rule, "%q is missing or not that of the %s, or there is no %s",
				t.claim, t.what, t.what)
		}
	}
	for name, want := range p.oth {
		value, ok := c.Tokens[name]
		if !ok {
			return proofs.Refuse("binding", "WPT-13",
				`"oth" has an entry %q, which is not understood here or not in the call`,
				token.Clip(name, token.MaxQuoted))
		}
		if want != hash(trim(value)) {
			return proofs.Refuse("binding", "WPT-13", `the entry %q of "oth" is not that of the value`,
				token.Clip(name, token.MaxQuoted))
		}
	}
	for name := range c.Tokens {
		if _, ok := p.oth[name]; !ok {
			return proofs.Refuse("binding", "WPT-13", `"oth" has no entry %q`, token.Clip(name, token.MaxQuoted))
		}
	}
	return nil
}

// use records that a proof was used. owner is a value that only the holder of one key can have.
func (v *Validator) use(h *holder, owner string, p *proofClaims, now time.Time) *token.Error {
	if v.replays == nil {
		return nil
	}
	switch fresh, full := v.replays.use(h.id, owner, p.texts["jti"], now, p.exp.At.Add(v.check.Leeway)); {
	case full:
		return proofs.Refuse(token.Busy, "WPT-9",
			"its ID has used so many proofs that are not over yet that no more can be told apart; "+
				"send fewer, or raise the option Proofs from %d", v.replays.each)
	case !fresh:
		return proofs.Refuse("replay", "WPT-9", "it was used before")
	}
	return nil
}

// hash returns the SHA-256 hash of a token in base64url, for "wth" and similar claims.
func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return base64.RawURLEncoding.EncodeToString(sum[:])
}
