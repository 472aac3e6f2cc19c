package jwtsvid

import (
	"bytes"
	"cmp"
	"crypto"
	"crypto/ecdsa"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/svidkit/svidkit/internal/jws"
	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/spiffe"
)

// The bounds of [ValidatorOptions].
const (
	// DefaultLeeway is how far the clocks of an issuer and a validator may be apart.
	DefaultLeeway = time.Minute

	// MaxLeeway is the largest leeway that a validator can be given (JWT-20).
	MaxLeeway = 2 * time.Minute

	defaultRemember = 1000
	maxRemember     = 1 << 20

	// maxTrials is how many keys are tried for a token that names none: enough for any rotation, and
	// not enough to keep us busy with a stranger's nonsense.
	maxTrials = 16
)

// ValidatorOptions are the choices of a [Validator] that have a default.
type ValidatorOptions struct {
	// Leeway is how long a token is accepted after its "exp" and before its "nbf", to forgive clocks
	// that disagree: from 0, which forgives nothing, to MaxLeeway. Nil means DefaultLeeway.
	Leeway *time.Duration

	// Remember is how many verified tokens are remembered, so that one that comes again costs no
	// signature check: at most 1,048,576; 0 means 1,000, and -1 means none. Each usually costs a kilobyte
	// or two. Tokens of more than 4 KiB are not remembered.
	Remember int

	// Now gives the time to validate at. Nil means time.Now. It must be safe for concurrent use.
	Now func() time.Time
}

// Validator decides whether a token proves an identity to us. It is safe for concurrent use.
type Validator struct {
	bundles  spiffe.BundleSource
	audience []string
	leeway   time.Duration
	now      func() time.Time
	memory   *memory
}

// NewValidator returns a Validator that takes keys from bundles, for each token from the bundle of the
// trust domain that its own ID names and from no other, and accepts tokens that are for one of the
// values in audience. Those are our own names, compared byte for byte; one is usual. There is no way
// to accept every audience: a token for somebody else, presented here, was stolen or passed on. The
// options may be nil.
//
// The source is asked for each token, remembered or not, so that a removed key is distrusted at once.
// A remembered token counts only while the source gives the same *spiffe.Bundle, so a source should
// not make a new one for each call.
func NewValidator(bundles spiffe.BundleSource, audience []string, opts *ValidatorOptions) (*Validator, error) {
	v := &Validator{bundles: bundles, audience: slices.Clone(audience), leeway: DefaultLeeway, now: time.Now}
	remember := 0
	if opts != nil {
		if opts.Leeway != nil {
			v.leeway = *opts.Leeway
		}
		if opts.Now != nil {
			v.now = opts.Now
		}
		remember = opts.Remember
	}
	if remember == 0 {
		remember = defaultRemember
	}
	err := checkAudience(v.audience)
	switch {
	case bundles == nil:
		err = errors.New("no bundle source")
	case err != nil:
		err = fmt.Errorf("%w; give the names by which clients know this service (JWT-15)", err)
	case v.leeway < 0 || v.leeway > MaxLeeway:
		err = fmt.Errorf("the leeway is %v, not from 0 to %v (JWT-20)", v.leeway, MaxLeeway)
	case remember < -1 || remember > maxRemember:
		err = fmt.Errorf("the option Remember is %d, not from -1 to %d", remember, maxRemember)
	}
	if err != nil {
		return nil, fmt.Errorf("jwtsvid: new validator: %w", err)
	}
	v.memory = newMemory(max(remember, 0))
	return v, nil
}

// checkAudience refuses a list that no token can be for or of.
func checkAudience(audience []string) error {
	if len(audience) == 0 {
		return errors.New("no audience")
	}
	for i, a := range audience {
		switch {
		case a == "":
			return errors.New("an audience is empty")
		case !utf8.ValidString(a):
			return errors.New("an audience is not UTF-8")
		case slices.Contains(audience[:i], a):
			return fmt.Errorf("the audience %q is there twice", clip(a, maxQuoted))
		}
	}
	return nil
}

// Validate verifies a token and returns the proof. The checks come in this order, and the first that
// fails decides the [Reason]:
//
//  1. The form: three parts of strict base64url, at most [MaxSize] bytes.
//  2. The header: one of the nine algorithms before all else; then nothing but "alg", "kid" and "typ".
//  3. The payload: one JSON object; "sub" is a SPIFFE ID.
//  4. The bundle of that ID's trust domain.
//  5. The key in it: the one that "kid" names or, without "kid", those that fit the algorithm.
//  6. The signature.
//  7. "aud", then "exp", then "nbf".
//
// "iat" and all other claims mean nothing here; "jti" is not tracked, and a token may come any number
// of times while it lasts. An ID without a path is valid: that it names no workload is for a policy to
// say, and every [spiffe.Policy] does unless it lists that ID.
//
// The error is an [*Error], which does not carry the token.
func (v *Validator) Validate(token string) (*Verified, error) {
	if v == nil || v.bundles == nil {
		return nil, &Error{Reason: ReasonBundleSource, Err: errors.New("the Validator was not made by NewValidator")}
	}
	known, hash := v.memory.lookup(token)
	if known != nil {
		return v.again(known, token, hash)
	}
	return v.fresh(token, hash)
}

// again checks what may have changed since a token was verified.
func (v *Validator) again(m *memo, token string, hash uint64) (*Verified, error) {
	p := m.proof
	b, e := v.bundle(p.id.TrustDomain())
	if e != nil {
		e.ID = p.id
		return nil, e
	}
	if b != m.bundle.Value() {
		v.memory.forget(m)
		return v.fresh(token, hash)
	}
	if e := v.timeFault(p.expires, p.notBefore); e != nil {
		if e.Reason == ReasonExpired {
			v.memory.forget(m)
		}
		e.ID = p.id
		return nil, e
	}
	return p, nil
}

func (v *Validator) fresh(token string, hash uint64) (*Verified, error) {
	p, e := parse(token)
	if e != nil {
		return nil, e
	}
	b, e := v.bundle(p.id.TrustDomain())
	if e == nil {
		e = p.verify(b)
	}
	if e == nil {
		e = v.claimsFault(p)
	}
	if e != nil {
		e.ID = p.id
		return nil, e
	}
	token = strings.Clone(token) // which may be a small part of something large
	proof := &Verified{id: p.id, audience: p.aud, expires: p.exp.at, notBefore: p.nbf.at, token: func() string { return token }}
	v.memory.store(hash, token, proof, b)
	return proof, nil
}

// bundle asks the source, and does not believe that it answers what was asked.
func (v *Validator) bundle(td spiffe.TrustDomain) (*spiffe.Bundle, *Error) {
	b, err := v.bundles.Bundle(td)
	switch {
	case errors.Is(err, spiffe.ErrUnknownTrustDomain):
		return nil, &Error{Reason: ReasonTrustDomain, Rule: "JWT-29", Err: err}
	case err != nil:
		return nil, &Error{Reason: ReasonBundleSource, Err: err}
	case b == nil:
		return nil, refuse(ReasonTrustDomain, "JWT-29", "the bundle source gave no bundle and no error: %w", spiffe.ErrUnknownTrustDomain)
	case b.TrustDomain() != td:
		return nil, refuse(ReasonBundleSource, "JWT-29", "the bundle source was asked for %q and gave the bundle of %q", td, b.TrustDomain())
	}
	return b, nil
}

// verify finds the key in b and checks the signature.
func (p *parsed) verify(b *spiffe.Bundle) *Error {
	if p.hasKID {
		key, ok := b.JWTAuthority(p.kid)
		switch {
		case !ok:
			return p.noKey(b, refuse(ReasonKey, "JWT-8", "the bundle has no JWT key with the ID %q", clip(p.kid, maxQuoted)))
		case !p.alg.Fits(key):
			return refuse(ReasonKey, "JWT-27", "the key with the ID %q is not one for %v", clip(p.kid, maxQuoted), p.alg)
		}
		return p.verifyWith(key)
	}
	var fit []crypto.PublicKey
	for _, key := range b.JWTAuthorities() {
		if p.alg.Fits(key) {
			fit = append(fit, key)
		}
	}
	switch {
	case len(fit) == 0:
		return p.noKey(b, refuse(ReasonKey, "JWT-27", "the bundle has no JWT key for %v", p.alg))
	case len(fit) > maxTrials:
		return refuse(ReasonKey, "JWT-7", "the token names no key, and %d keys in the bundle fit, more than the %d that are tried; issue tokens with \"kid\"",
			len(fit), maxTrials)
	}
	var e *Error
	for _, key := range fit {
		if e = p.verifyWith(key); e == nil {
			return nil
		}
	}
	return e
}

// noKey returns e, or what explains it if b has no key for JWT-SVIDs at all.
func (p *parsed) noKey(b *spiffe.Bundle, e *Error) *Error {
	for range b.JWTAuthorities() {
		return e
	}
	return refuse(ReasonKey, "JWT-31", "the trust domain's bundle has no JWT keys, so it issues no JWT-SVIDs")
}

func (p *parsed) verifyWith(key crypto.PublicKey) *Error {
	if k, ok := key.(*ecdsa.PublicKey); ok {
		if size := 2 * jws.CurveSize(k.Curve); len(p.sig) != size {
			return refuse(ReasonSignature, "JWT-28", "the signature has %d bytes; %v has R and S in %d", len(p.sig), p.alg, size)
		}
	}
	if err := p.alg.Verify(key, p.input, p.sig); err != nil {
		return &Error{Reason: ReasonSignature, Rule: "JWT-26", Err: err}
	}
	return nil
}

// claimsFault judges what a verified payload says.
func (v *Validator) claimsFault(p *parsed) *Error {
	if e := p.audienceFault(); e != nil {
		return e
	}
	if !slices.ContainsFunc(p.aud, func(a string) bool { return slices.Contains(v.audience, a) }) {
		return refuse(ReasonAudience, "JWT-13", "it is for %s, and this is %s", quote(p.aud), quote(v.audience))
	}
	if e := p.expiryFault(); e != nil {
		return e
	}
	if p.nbf.present && !p.nbf.number {
		// Only if it is not over as well: exp comes before nbf.
		if e := v.timeFault(p.exp.at, time.Time{}); e != nil {
			return e
		}
		return refuse(ReasonNotYetValid, "JWT-22", `"nbf" is not a number`)
	}
	return v.timeFault(p.exp.at, p.nbf.at)
}

// timeFault compares with the time. A zero notBefore means none.
func (v *Validator) timeFault(expires, notBefore time.Time) *Error {
	now := v.now()
	switch {
	case !now.Before(expires.Add(v.leeway)):
		return refuse(ReasonExpired, "JWT-19", "it ended at %s", expires.UTC().Format(time.RFC3339))
	case !notBefore.IsZero() && now.Before(notBefore.Add(-v.leeway)):
		return refuse(ReasonNotYetValid, "JWT-22", "it begins at %s", notBefore.UTC().Format(time.RFC3339))
	}
	return nil
}

// String returns what the Validator accepts. The tokens that it remembers do not show.
func (v *Validator) String() string {
	if v == nil {
		return "jwtsvid.Validator(none)"
	}
	return "jwtsvid.Validator(" + quote(v.audience) + ")"
}

// GoString returns the same as String.
func (v *Validator) GoString() string { return v.String() }

// LogValue implements [slog.LogValuer] with String.
func (v *Validator) LogValue() slog.Value { return slog.StringValue(v.String()) }

// Verified is proof that a token was validated: its signature, its audience and its time. Only a
// [Validator] makes one, so a function that takes a *Verified cannot be called with the word of a
// stranger. It never changes. The zero Verified proves nothing: its ID is the zero ID.
//
// A token is proof by possession: whoever has seen it can present it. Verified holds it and, however
// it is printed, does not show it; see [Verified.Token].
type Verified struct {
	id        spiffe.ID
	audience  []string
	expires   time.Time
	notBefore time.Time     // zero if there is none
	token     func() string // a func, because no printer sees what it holds
}

// ID returns the ID that was proved.
func (p *Verified) ID() spiffe.ID { return p.id }

// Audience returns all values of "aud", in a new slice. At least one is ours.
func (p *Verified) Audience() []string { return slices.Clone(p.audience) }

// Expires returns "exp", without leeway: the proof is worth nothing later. It may end sooner, when the
// key leaves the bundle.
func (p *Verified) Expires() time.Time { return p.expires }

// Token returns the token itself. It is a credential: until it expires, whoever reads it can be the
// workload to everybody in its audience. There is one good use, to ask somebody else to validate it,
// and no good place to write it down. The zero Verified returns "".
func (p *Verified) Token() string {
	if p.token == nil {
		return ""
	}
	return p.token()
}

// Claims decodes the whole payload into what into points to, a struct of the caller's or, to have it
// as it is, a [json.RawMessage]. They are the word of the ID's trust domain and of nobody else
// (SVID-8): "admin" there is not "admin" here.
//
// Names of claims are case-sensitive (RFC 7519 section 10.1.1), which package encoding/json is not.
// So a claim whose name differs from that of a field by case only is left out: give each field a json
// tag. Numbers that go into an interface are a [json.Number]. Within the value of a claim the rules are
// those of encoding/json.
func (p *Verified) Claims(into any) error {
	payload, err := p.payload()
	if err == nil {
		d := json.NewDecoder(bytes.NewReader(exact(payload, into)))
		d.UseNumber()
		err = d.Decode(into)
	}
	if err != nil {
		return fmt.Errorf("jwtsvid: claims of %q: %w", clip(p.id.String(), maxInError), err)
	}
	return nil
}

// payload decodes the payload again. That it was decoded once is known.
func (p *Verified) payload() ([]byte, error) {
	_, rest, _ := strings.Cut(p.Token(), ".")
	text, _, ok := strings.Cut(rest, ".")
	if !ok {
		return nil, errors.New("nothing was verified")
	}
	return base64.RawURLEncoding.DecodeString(text)
}

// exact leaves out of an object the members that encoding/json would put into a field of into which
// they are not named for.
func exact(object []byte, into any) []byte {
	fields := fieldNames(into)
	if len(fields) == 0 {
		return object
	}
	out := append(make([]byte, 0, len(object)), '{')
	r := strictjson.NewReader(object)
	for member := range r.Members() {
		name := string(member)
		from := r.Offset()
		r.Skip()
		value := object[from:r.Offset()]
		if !slices.Contains(fields, name) && slices.ContainsFunc(fields, func(f string) bool { return strings.EqualFold(f, name) }) {
			continue
		}
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(append(strictjson.AppendText(out, name), ':'), value...)
	}
	return append(out, '}')
}

// fieldNames returns the names under which encoding/json knows the fields of the struct that into
// points to. It may return more, of fields that are hidden by others, but not of those that it never
// fills: their names would let a claim through that it then puts into a field whose name differs by case.
func fieldNames(into any) []string {
	if _, ok := into.(json.Unmarshaler); ok {
		return nil
	}
	t := reflect.TypeOf(into)
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t == nil || t.Kind() != reflect.Struct {
		return nil
	}
	return appendFields(nil, t, nil)
}

// appendFields appends the names in t, which lies in the structs above.
func appendFields(names []string, t reflect.Type, above []reflect.Type) []string {
	if slices.Contains(above, t) {
		return names
	}
	above = append(above, t)
	for f := range t.Fields() {
		tag := f.Tag.Get("json")
		name, _, _ := strings.Cut(tag, ",")
		in := f.Type
		if in.Kind() == reflect.Pointer {
			in = in.Elem()
		}
		embedded := f.Anonymous && in.Kind() == reflect.Struct
		switch {
		case tag == "-", !f.IsExported() && !embedded:
		case embedded && name == "":
			names = appendFields(names, in, above)
		default:
			names = append(names, cmp.Or(name, f.Name))
		}
	}
	return names
}

// String returns the ID.
func (p *Verified) String() string { return p.id.String() }

// GoString returns the ID in a form that is not taken for Go source.
func (p *Verified) GoString() string { return fmt.Sprintf("jwtsvid.Verified(%s)", p.id) }

// LogValue implements [slog.LogValuer]: the ID and when the token ends.
func (p *Verified) LogValue() slog.Value {
	return slog.GroupValue(slog.String("id", p.id.String()), slog.Time("expires", p.expires))
}
