package witsvid

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/jws"
	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/spiffe"
)

// The bounds of [ValidatorOptions].
const (
	// DefaultLeeway is how far the clocks of an issuer, a sender and a validator may be apart.
	DefaultLeeway = time.Minute

	// MaxLeeway is the largest leeway that a validator can be given (WIT-17).
	MaxLeeway = 2 * time.Minute

	defaultProofs   = 100_000
	maxProofs       = 10_000_000
	defaultRemember = 1000
	maxRemember     = 1 << 20
)

// ValidatorOptions are the choices of a [Validator] that have a default.
type ValidatorOptions struct {
	// Leeway is how long tokens and proofs are accepted after their end and before their beginning, to
	// forgive clocks that disagree: from 0, which forgives nothing, to MaxLeeway. Nil means DefaultLeeway.
	Leeway *time.Duration

	// MaxLifetime is the longest that a token may last, from "nbf" or, without, from now, to "exp"
	// (WIT-19). 0 means that it does not matter.
	MaxLifetime time.Duration

	// MaxProofLifetime is the longest that a proof may last from now, and for a message signature also from
	// "created" (WPT-7): up to MaxProofLifetime, which 0 stands for.
	MaxProofLifetime time.Duration

	// Proofs is how many used proofs are remembered, each until it is over, so that none is accepted twice.
	// If there are as many, further proofs are refused with [ReasonBusy]: so it must be more than come in a
	// proof's lifetime and the leeway, in two minutes for most senders. Each costs about 100 bytes. 0 means
	// 100,000, at most 10,000,000; -1 means that proofs may come any number of times while they last.
	Proofs int

	// Remember is how many verified tokens are remembered, so that the signature of one that comes again is
	// not checked again, while that of its new proof is: at most 1,048,576; 0 means 1,000, and -1 means
	// none. Each costs about two kilobytes; tokens of more than 4 KiB are not remembered.
	Remember int

	// Now gives the time to validate at. Nil means time.Now. It must be safe for concurrent use.
	Now func() time.Time
}

// Validator decides whether a token and a proof prove an identity that is allowed. It is safe for
// concurrent use.
type Validator struct {
	bundles     spiffe.BundleSource
	allow       spiffe.PolicySource
	leeway      time.Duration
	maxLifetime time.Duration
	maxProof    time.Duration
	now         func() time.Time
	replays     *replays // nil for none
	memory      *memory  // nil for none
}

// NewValidator returns a Validator that takes WIT keys from bundles, for each token from the bundle of
// the trust domain that its own ID names and from no other (WIT-53), and accepts the holders that allow
// allows. A policy that can allow nobody is an error. The options may be nil.
//
// The source is asked for each token, remembered or not, so that a removed key is distrusted at once. A
// remembered token counts only while the source gives the same *spiffe.Bundle, so a source should not
// make a new one for each call. Bundles have WIT keys only if [spiffe.ParseBundleWIT] was asked to read
// them.
func NewValidator(bundles spiffe.BundleSource, allow spiffe.PolicySource, opts *ValidatorOptions) (*Validator, error) {
	var o ValidatorOptions
	if opts != nil {
		o = *opts
	}
	v := &Validator{
		bundles: bundles, allow: allow, leeway: DefaultLeeway, now: time.Now,
		maxLifetime: o.MaxLifetime, maxProof: cmp.Or(o.MaxProofLifetime, MaxProofLifetime),
	}
	if o.Leeway != nil {
		v.leeway = *o.Leeway
	}
	if o.Now != nil {
		v.now = o.Now
	}
	proofs, remember := cmp.Or(o.Proofs, defaultProofs), cmp.Or(o.Remember, defaultRemember)
	// The Verifier knows which sources and policies are mistakes.
	_, err := spiffe.NewVerifier(bundles, allow, &spiffe.VerifierOptions{Remember: -1})
	switch {
	case err != nil:
		err = errors.New(strings.TrimPrefix(err.Error(), "spiffe: new verifier: "))
	case v.leeway < 0 || v.leeway > MaxLeeway:
		err = fmt.Errorf("the leeway is %v, not from 0 to %v (WIT-17)", v.leeway, MaxLeeway)
	case v.maxLifetime < 0:
		err = fmt.Errorf("MaxLifetime is %v, which is less than 0", v.maxLifetime)
	case v.maxProof < time.Second || v.maxProof > MaxProofLifetime:
		err = fmt.Errorf("MaxProofLifetime is %v, not from 1s to %v (WPT-7)", v.maxProof, MaxProofLifetime)
	case proofs < -1 || proofs > maxProofs:
		err = fmt.Errorf("the number of Proofs is %d, not from -1 to %d", proofs, maxProofs)
	case remember < -1 || remember > maxRemember:
		err = fmt.Errorf("the number to Remember is %d, not from -1 to %d", remember, maxRemember)
	}
	if err != nil {
		return nil, fmt.Errorf("witsvid: new validator: %w", err)
	}
	if proofs > 0 {
		v.replays = newReplays(proofs)
	}
	if remember > 0 {
		v.memory = newMemory(remember)
	}
	return v, nil
}

// Proof is proof that its holder has the key of a WIT-SVID, that the token was verified, and that its ID
// is allowed. Only this package makes one, so a function that takes a *Proof cannot be called with an
// unproven name. It never changes. The zero Proof proves nothing: its ID is the zero ID.
type Proof struct {
	id       spiffe.ID
	notAfter time.Time
	covered  []string // names of header fields, in lower case
}

// ID returns the ID that the holder proved.
func (p *Proof) ID() spiffe.ID { return p.id }

// NotAfter returns when the token expires: who is known by it has to come back with another one. The
// proof was for one call, which is now.
func (p *Proof) NotAfter() time.Time { return p.notAfter }

// Covers reports whether the proof covers a header field, by its name in whatever case: whether the
// holder of the key has sent that token or value. What is not covered may have been put there by anybody
// on the way and must not decide what is allowed (WPT-13). For a call that is not HTTP, the name of an
// access token is "authorization", and that of a transaction token "txn-token".
func (p *Proof) Covers(field string) bool { return slices.Contains(p.covered, strings.ToLower(field)) }

// String returns the ID.
func (p *Proof) String() string { return p.id.String() }

// GoString returns the ID in a form that is not taken for Go source.
func (p *Proof) GoString() string { return fmt.Sprintf("witsvid.Proof(%s)", p.id) }

// LogValue implements [slog.LogValuer] with String.
func (p *Proof) LogValue() slog.Value { return slog.StringValue(p.String()) }

// Validate verifies a token and a Workload Proof Token for one call, and returns the proof. There is no
// way to accept a token alone (WIT-30). The call says what was received, and its Target what the receiver
// knows itself to be. For HTTP see [Middleware]. The checks come in this order, and the first that fails
// decides the [Reason]:
//
//  1. The form of the token: three parts of strict base64url, at most [MaxSize] bytes; one of the nine
//     algorithms, "typ", "kid" and no "crit" in the header; "sub", "exp" and the public key in "cnf", and
//     no "aud".
//  2. The bundle of that ID's trust domain, the WIT key in it that "kid" names, the signature.
//  3. "exp" and "nbf" of the token. "iat" and all other claims mean nothing here, "iss" is not looked at,
//     and a token may come any number of times, each time with another proof.
//  4. The form of the proof, its "alg", "typ" and signature: by the key in "cnf" (WPT-2 to WPT-4).
//  5. "aud", "exp", "jti", "wth", "ath", "tth" and "oth" of the proof (WPT-5 to WPT-14).
//  6. The policy; and last that the proof was not used before, as only who is allowed in shall fill the
//     memory.
//
// The error is an [*Error], which carries neither token nor proof.
func (v *Validator) Validate(token, proof string, c Call) (*Proof, error) {
	p, err := v.validate(token, proof, c)
	if err != nil {
		return nil, err
	}
	return p, nil
}

func (v *Validator) validate(token, proof string, c Call) (*Proof, *Error) {
	if err := c.check(); err != nil {
		return nil, &Error{What: whatProof, Reason: ReasonAudience, Rule: "WPT-5", Err: err}
	}
	t, now, e := v.verifyToken(token)
	if e != nil {
		return nil, e
	}
	want := canonicalTarget(c.Target)
	name, end, e := v.verifyProof(t, token, proof, &c, now, func(aud string) bool { return canonicalTarget(aud) == want })
	if e == nil {
		e = v.admit(t, whatProof, hash(token), name, now, end)
	}
	if e != nil {
		e.ID = t.id
		return nil, e
	}
	return &Proof{id: t.id, notAfter: t.exp, covered: c.covered()}, nil
}

// verifyToken verifies all that can be said about a token without a proof. So what it returns is not
// for anybody outside.
func (v *Validator) verifyToken(token string) (*parsed, time.Time, *Error) {
	if v == nil || v.bundles == nil {
		return nil, time.Time{}, &Error{What: whatToken, Reason: ReasonBundleSource, Err: errNotMade}
	}
	now := v.now()
	p := v.recall(token)
	var e *Error
	if p == nil {
		p, e = v.verifyAnew(token)
	}
	if e == nil {
		e = v.checkTime(p, now)
	}
	if e != nil {
		if p != nil {
			e.ID = p.id
		}
		return nil, now, e
	}
	return p, now, nil
}

// recall returns what a token says if its signature was verified before and would be verified again:
// with the bundle that the source gives now.
func (v *Validator) recall(token string) *parsed {
	m := v.memory.find(token)
	if m == nil {
		return nil
	}
	if b, e := v.bundle(m.parsed.id.TrustDomain()); e != nil || m.bundle.Value() != b {
		return nil
	}
	return m.parsed
}

func (v *Validator) verifyAnew(token string) (*parsed, *Error) {
	p, e := parseToken(token)
	if e != nil {
		return nil, e
	}
	b, e := v.bundle(p.id.TrustDomain())
	if e == nil {
		e = p.verify(b)
	}
	if e == nil {
		v.memory.keep(token, p, b)
	}
	return p, e
}

// bundle asks the source, and does not believe that it answers what was asked.
func (v *Validator) bundle(td spiffe.TrustDomain) (*spiffe.Bundle, *Error) {
	b, err := v.bundles.Bundle(td)
	switch {
	case errors.Is(err, spiffe.ErrUnknownTrustDomain):
		return nil, &Error{What: whatToken, Reason: ReasonTrustDomain, Rule: "WIT-53", Err: err}
	case err != nil:
		return nil, &Error{What: whatToken, Reason: ReasonBundleSource, Err: err}
	case b == nil:
		return nil, refuse(whatToken, ReasonTrustDomain, "WIT-53", "trust domain %q: %w", td, spiffe.ErrUnknownTrustDomain)
	case b.TrustDomain() != td:
		return nil, refuse(whatToken, ReasonTrustDomain, "WIT-53", "the bundle source was asked for %q and gave the bundle of %q: %w",
			td, b.TrustDomain(), spiffe.ErrUnknownTrustDomain)
	}
	return b, nil
}

// verify checks the signature of a token with the WIT key that it names.
func (p *parsed) verify(b *spiffe.Bundle) *Error {
	key, ok := b.WITAuthority(p.kid)
	if !ok {
		for range b.WITAuthorities() {
			return refuse(whatToken, ReasonKey, "WIT-62", "the bundle of %q has no WIT key %q", b.TrustDomain(), clip(p.kid, maxQuoted))
		}
		return refuse(whatToken, ReasonKey, "WIT-63", "the bundle of %q has no WIT keys; they are read only by ParseBundleWIT", b.TrustDomain())
	}
	if err := p.alg.Verify(key, p.input, p.sig); err != nil {
		e := refuse(whatToken, ReasonSignature, "WIT-1", "key %q: %w", clip(p.kid, maxQuoted), err)
		if f, ok := errors.AsType[*jws.Error](err); ok && f.Code == jws.Key {
			e.Reason, e.Rule = ReasonKey, "WIT-6"
		}
		return e
	}
	return nil
}

// checkTime judges "exp" and "nbf" of a token.
func (v *Validator) checkTime(p *parsed, now time.Time) *Error {
	from := now
	if p.hasNBF {
		from = p.nbf
	}
	switch {
	case !now.Before(p.exp.Add(v.leeway)):
		return refuse(whatToken, ReasonExpired, "WIT-16", "it ended at %s", stamp(p.exp))
	case p.hasNBF && now.Add(v.leeway).Before(p.nbf):
		return refuse(whatToken, ReasonNotYetValid, "WIT-18", "it begins at %s", stamp(p.nbf))
	case v.maxLifetime > 0 && p.exp.After(from.Add(v.maxLifetime)):
		return refuse(whatToken, ReasonLifetime, "WIT-19", "it lasts until %s, and no more than %v is accepted", stamp(p.exp), v.maxLifetime)
	}
	return nil
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// checkProofEnd judges when a proof ends.
func (v *Validator) checkProofEnd(what, rule, lifetimeRule string, end, now time.Time) *Error {
	switch {
	case !now.Before(end.Add(v.leeway)):
		return refuse(what, ReasonExpired, rule, "it ended at %s", stamp(end))
	case end.After(now.Add(v.maxProof + v.leeway)):
		return refuse(what, ReasonLifetime, lifetimeRule, "it lasts until %s, and no more than %v is accepted", stamp(end), v.maxProof)
	}
	return nil
}

// verifyProof verifies a Workload Proof Token, and returns its "jti" and when it ends.
func (v *Validator) verifyProof(t *parsed, token, proof string, c *Call, now time.Time, accept func(aud string) bool) (string, time.Time, *Error) {
	fail := func(e *Error) (string, time.Time, *Error) { return "", time.Time{}, e }
	raw, h, e := parseJWS(whatProof, proof, "WPT-2", "WPT-3")
	if e != nil {
		return fail(e)
	}
	switch {
	case h.Algorithm != t.proofAlg:
		return fail(refuse(whatProof, ReasonAlgorithm, "WPT-3", `"alg" is %v, and the token confirms a key for %v`, h.Algorithm, t.proofAlg))
	case h.Type != proofType:
		return fail(refuse(whatProof, ReasonHeader, "WPT-2", `"typ" is not %q`, proofType))
	case critical(h):
		return fail(refuse(whatProof, ReasonHeader, "WPT-2", `"crit" is there, and nothing that it could name is understood`))
	}
	if err := t.proofAlg.Verify(t.proofKey, raw.Input, raw.Signature); err != nil {
		return fail(refuse(whatProof, ReasonSignature, "WPT-4", "%w", err))
	}
	var p proofClaims
	if e := p.read(raw.Payload); e != nil {
		return fail(e)
	}
	if !accept(p.aud) {
		return fail(refuse(whatProof, ReasonAudience, "WPT-5", `"aud" is %q, which is not what is called here`, clip(p.aud, 4*maxQuoted)))
	}
	if e := v.checkProofEnd(whatProof, "WPT-6", "WPT-7", p.exp.at, now); e != nil {
		return fail(e)
	}
	if p.nbf.present && now.Add(v.leeway).Before(p.nbf.at) {
		return fail(refuse(whatProof, ReasonNotYetValid, "WPT-6", "it begins at %s", stamp(p.nbf.at)))
	}
	if p.wth != hash(token) {
		return fail(refuse(whatProof, ReasonBinding, "WPT-10", `"wth" is that of another token`))
	}
	if e := p.checkTokens(c); e != nil {
		return fail(e)
	}
	return p.jti, p.exp.at, nil
}

// proofClaims is what the payload of a Workload Proof Token says.
type proofClaims struct {
	aud, jti, wth  string
	ath, tth       string
	hasATH, hasTTH bool
	oth            map[string]string
	exp, nbf       date
}

// maxOther is how many entries of "oth" are read; nobody understands as many.
const maxOther = 32

// read reads the payload. Claims that it does not know are ignored (WPT-14).
func (p *proofClaims) read(data []byte) *Error {
	bad := "" // the first claim that is of the wrong type
	text := func(r *strictjson.Reader, name string) string {
		s, ok := r.Text()
		if !ok && bad == "" {
			bad = name
		}
		return string(s)
	}
	r := strictjson.NewReader(data)
	object := r.Kind() == strictjson.Object
	if !object {
		r.Skip()
	}
	for name := range r.Members() {
		switch string(name) {
		case "aud":
			if r.Kind() != strictjson.Array {
				p.aud = text(r, "aud")
				break
			}
			n := 0
			for range r.Elements() {
				p.aud = text(r, "aud")
				n++
			}
			if n != 1 && bad == "" { // each receiver of such a proof could present it to the others
				bad = "aud"
			}
		case "jti":
			p.jti = text(r, "jti")
		case "wth":
			p.wth = text(r, "wth")
		case "ath":
			p.ath, p.hasATH = text(r, "ath"), true
		case "tth":
			p.tth, p.hasTTH = text(r, "tth"), true
		case "exp":
			p.exp = readDate(r)
		case "nbf":
			p.nbf = readDate(r)
		case "oth":
			if r.Kind() != strictjson.Object && bad == "" {
				bad = "oth"
			}
			p.oth = map[string]string{}
			for name := range r.Members() {
				if len(p.oth) == maxOther {
					bad = "oth"
					continue
				}
				name := string(name)
				p.oth[name] = text(r, "oth")
			}
		}
	}
	switch err := r.End(); {
	case err != nil:
		return refuse(whatProof, ReasonMalformed, "WPT-2", "the payload is not strict JSON: %w", err)
	case !object:
		return refuse(whatProof, ReasonMalformed, "WPT-2", "the payload is not a JSON object")
	case bad != "":
		return refuse(whatProof, ReasonClaim, claimRule[bad], `%q is not what it has to be: a string, for "aud" one, for "oth" an object of a few`, bad)
	case p.aud == "":
		return refuse(whatProof, ReasonClaim, "WPT-5", `"aud" is missing or empty`)
	case !p.exp.number:
		return refuse(whatProof, ReasonClaim, "WPT-6", `"exp" is missing or not a number`)
	case p.nbf.present && !p.nbf.number:
		return refuse(whatProof, ReasonClaim, "WPT-6", `"nbf" is not a number`)
	case p.jti == "":
		return refuse(whatProof, ReasonClaim, "WPT-8", `"jti" is missing or empty`)
	case p.wth == "":
		return refuse(whatProof, ReasonClaim, "WPT-10", `"wth" is missing or empty`)
	}
	return nil
}

var claimRule = map[string]string{"aud": "WPT-5", "jti": "WPT-8", "wth": "WPT-10", "ath": "WPT-11", "tth": "WPT-12", "oth": "WPT-13"}

// checkTokens compares the other tokens of the call with those that the proof covers: it is for all of
// them, and for nothing that was taken out on the way.
func (p *proofClaims) checkTokens(c *Call) *Error {
	if c.AccessToken == "" && p.hasATH || c.AccessToken != "" && p.ath != hash(c.AccessToken) {
		return refuse(whatProof, ReasonBinding, "WPT-11", `"ath" is missing or not that of the access token, or there is no access token`)
	}
	if c.TxnToken == "" && p.hasTTH || c.TxnToken != "" && p.tth != hash(c.TxnToken) {
		return refuse(whatProof, ReasonBinding, "WPT-12", `"tth" is missing or not that of the transaction token, or there is no transaction token`)
	}
	for name, want := range p.oth {
		value, ok := c.Tokens[name]
		if !ok {
			return refuse(whatProof, ReasonBinding, "WPT-13", `"oth" has an entry %q, which is not understood here or not in the call`, clip(name, maxQuoted))
		}
		if want != hash(trim(value)) {
			return refuse(whatProof, ReasonBinding, "WPT-13", `the entry %q of "oth" is not that of the value`, clip(name, maxQuoted))
		}
	}
	for name := range c.Tokens {
		if _, ok := p.oth[name]; !ok {
			return refuse(whatProof, ReasonBinding, "WPT-13", `"oth" has no entry %q`, clip(name, maxQuoted))
		}
	}
	return nil
}

// admit asks the policy, and then whether the proof was used before.
func (v *Validator) admit(t *parsed, what, holder, name string, now, end time.Time) *Error {
	if err := v.allow.Policy().Check(t.id); err != nil {
		return &Error{What: what, Reason: ReasonDenied, ID: t.id, Err: err}
	}
	if v.replays == nil {
		return nil
	}
	rule := "WPT-9"
	if what != whatProof {
		rule, holder = "HSIG-9", holder+what
	}
	switch fresh, full := v.replays.use(holder, name, now, end.Add(v.leeway)); {
	case full:
		return refuse(what, ReasonBusy, rule, "%d proofs were used and are not over yet, and no more can be told apart", v.replays.places)
	case !fresh:
		return refuse(what, ReasonReplay, rule, "it was used before")
	}
	return nil
}
