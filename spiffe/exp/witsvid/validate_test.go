package witsvid_test

import (
	"crypto/elliptic"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/witsvid"
)

// wit1Bundle has the WIT key of the vectors, and their JWT key.
func wit1Bundle(t testing.TB) *spiffe.Bundle {
	t.Helper()
	return parseBundle(t, "example.org", []byte(`{"keys":[{"use":"jwt-svid","kid":"jwt-1",`+jwk(jwt1)+`},{"use":"wit-svid","kid":"wit-1",`+jwk(wit1)+`}]}`))
}

// outcome is "" or the reason and the rule of a refusal.
func outcome(t testing.TB, err error) string {
	t.Helper()
	if err == nil {
		return ""
	}
	e := refusal(t, err)
	return strings.TrimSpace(string(e.Reason) + " " + e.Rule)
}

// A token is three parts of strict base64url and never JSON.
func TestTokenForm(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WIT-1")
	good := baseToken()
	parts := strings.Split(good, ".")
	v := newValidator(t, wit1Bundle(t), atNow())
	stray := func(s string) string { // bits that mean nothing
		const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
		return s[:len(s)-1] + string(alphabet[strings.IndexByte(alphabet, s[len(s)-1])|1])
	}
	for name, token := range map[string]string{
		"empty":             "",
		"flattened JSON":    `{"protected":"` + parts[0] + `","payload":"` + parts[1] + `","signature":"` + parts[2] + `"}`,
		"two parts":         parts[0] + "." + parts[1],
		"five parts":        good + ".." + parts[2],
		"padding":           good + "==",
		"leading space":     " " + good,
		"line break":        parts[0] + "." + parts[1] + "." + parts[2][:40] + "\n" + parts[2][40:],
		"stray bits":        parts[0] + "." + parts[1] + "." + stray(parts[2]),
		"too long":          good + strings.Repeat("A", maxSize),
		"header twice":      sign(`{"alg":"ES256","alg":"ES256","kid":"wit-1","typ":"wit+jwt"}`, basePayload(), wit1),
		"header is array":   sign(`["ES256"]`, basePayload(), wit1),
		"kid is number":     sign(`{"alg":"ES256","kid":1,"typ":"wit+jwt"}`, basePayload(), wit1),
		"payload twice":     sign(tokenHeader, claims(webSubject, webSubject, tokenEnd, goodCNF()), wit1),
		"payload is string": sign(tokenHeader, `"x"`, wit1),
		"payload trailing":  sign(tokenHeader, basePayload()+"{}", wit1),
	} {
		_, err := v.Validate(token, proofFor(token, name), witsvid.Call{Target: vectorTarget})
		assert.Equal(t, "malformed WIT-1", outcome(t, err), name)
		_, err = witsvid.ParseUnverified(token)
		assert.Equal(t, "malformed WIT-1", outcome(t, err), name)
	}
	other := parts[0] + "." + base64.RawURLEncoding.EncodeToString([]byte(claims(webSubject, tokenEnd, goodCNF()))) + "." + parts[2]
	_, err := v.Validate(other, proofFor(other, "x"), witsvid.Call{Target: vectorTarget})
	assert.Equal(t, "signature WIT-1", outcome(t, err), "another payload, the old signature")
}

func TestTokenHeader(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WIT-2", "WIT-3", "WIT-5", "WIT-6", "WIT-8", "WIT-9")
	v := newValidator(t, wit1Bundle(t), atNow())
	for header, want := range map[string]string{
		`{"typ":"wit+jwt","x-extra":{"a":[null]},"kid":"wit-1","jku":"https://evil.test","alg":"ES256"}`: "",
		`{"alg":"ES256","kid":"wit-1","typ":"wit+jwt","crit":[]}`:                                        "header WIT-9",
		`{"alg":"ES256","kid":"wit-1","typ":"wit+jwt","crit":null}`:                                      "header WIT-9",
		`{"alg":"ES256","kid":"wit-1","typ":"wit+jwt","crit":["b64"],"b64":true}`:                        "header WIT-9",
		`{"alg":"ES256","kid":"wit-1","typ":"wit+jwt","b64":false}`:                                      "header WIT-9",
		`{"alg":"ES256","kid":"","typ":"wit+jwt"}`:                                                       "header WIT-2",
		`{"alg":"ES256","kid":"wit-1 ","typ":"wit+jwt"}`:                                                 "unknown key WIT-62",
		`{"alg":"ES256","kid":"wit-1","typ":"WIT+JWT"}`:                                                  "header WIT-5",
		`{"alg":"ES256","kid":"wit-1","typ":"application/wit+jwt"}`:                                      "header WIT-5",
		`{"alg":"ES256","kid":"wit-1","typ":"wpt+jwt"}`:                                                  "header WIT-5",
		`{"kid":"wit-1","typ":"wit+jwt"}`:                                                                "algorithm WIT-6",
		`{"alg":"none","kid":"wit-1","typ":"wit+jwt"}`:                                                   "algorithm WIT-6",
		`{"alg":"HS256","kid":"wit-1","typ":"wit+jwt"}`:                                                  "algorithm WIT-6",
		`{"alg":"es256","kid":"wit-1","typ":"wit+jwt"}`:                                                  "algorithm WIT-6",
		`{"alg":"ES384","kid":"wit-1","typ":"wit+jwt"}`:                                                  "unknown key WIT-6",
	} {
		token := sign(header, basePayload(), wit1)
		_, err := v.Validate(token, proofFor(token, "1"), witsvid.Call{Target: vectorTarget})
		assert.Equal(t, want, outcome(t, err), header)
	}
}

// Faults of the token beyond the vectors.
func TestTokenClaims(t *testing.T) {
	t.Parallel()
	v := newValidator(t, wit1Bundle(t), atNow())
	for name, c := range map[string]struct{ payload, want string }{
		"sub is number":     {claims(`"sub":7`, tokenEnd, goodCNF()), "subject WIT-10"},
		"sub in upper case": {claims(`"sub":"SPIFFE://example.org/web"`, tokenEnd, goodCNF()), "subject WIT-10"},
		"exp is text":       {claims(webSubject, `"exp":"1767225900"`, goodCNF()), "claim WIT-16"},
		"exp is null":       {claims(webSubject, `"exp":null`, goodCNF()), "claim WIT-16"},
		"exp is now":        {claims(webSubject, `"exp":1767225600`, goodCNF()), "expired WIT-16"},
		"exp in a moment":   {claims(webSubject, `"exp":1767225600.5`, goodCNF()), ""},
		"exp is huge":       {claims(webSubject, `"exp":1e400`, goodCNF()), ""},
		"nbf is text":       {claims(webSubject, tokenEnd, `"nbf":"x"`, goodCNF()), "claim WIT-18"},
		"nbf is now":        {claims(webSubject, tokenEnd, `"nbf":1767225600`, goodCNF()), ""},
		"iat is nonsense":   {claims(webSubject, tokenEnd, `"iat":{}`, `"jti":[]`, `"iss":7`, goodCNF()), ""},
		"aud is null":       {claims(webSubject, tokenEnd, `"aud":null`, goodCNF()), "claim WIT-25"},
		"cnf is text":       {claims(webSubject, tokenEnd, `"cnf":"x"`), "confirmation WIT-11"},
		"jwk is text":       {claims(webSubject, tokenEnd, `"cnf":{"jwk":"x"}`), "confirmation WIT-11"},
		"jwk is broken":     {claims(webSubject, tokenEnd, cnfOf(`"alg":"ES256","kty":"EC","crv":"P-256","x":"AA","y":"AA"`)), "confirmation WIT-11"},
		"jwk off the curve": {claims(webSubject, tokenEnd, cnfOf(`"alg":"ES256","kty":"EC","crv":"P-256","x":"`+strings.Repeat("A", 43)+`","y":"`+strings.Repeat("A", 43)+`"`)), "confirmation WIT-11"},
		"alg is encryption": {claims(webSubject, tokenEnd, cnfOf(jwk(wk)+`,"alg":"ECDH-ES"`)), "confirmation WIT-12"},
		"RSA for EC":        {claims(webSubject, tokenEnd, cnfOf(jwk(wk)+`,"alg":"RS256"`)), "confirmation WIT-14"},
		"more in cnf":       {claims(webSubject, tokenEnd, `"cnf":{"jku":"https://evil.test","kid":"x","jwk":{`+jwk(wk)+`,"alg":"ES256","use":"sig","kid":"w"}}`), ""},
		"more after jwk":    {claims(webSubject, tokenEnd, `"cnf":{"jwk":{`+jwk(wk)+`,"alg":"ES256"},"x":{`+jwk(other)+`,"alg":"ES256"},"kid":1}`), ""},
		"another member":    {claims(webSubject, tokenEnd, `"cnf":{"key":{`+jwk(wk)+`,"alg":"ES256"}}`), "confirmation WIT-11"},
		"no path":           {claims(`"sub":"spiffe://example.org"`, tokenEnd, goodCNF()), "denied"},
	} {
		token := sign(tokenHeader, c.payload, wit1)
		_, err := v.Validate(token, proofFor(token, name), witsvid.Call{Target: vectorTarget})
		assert.Equal(t, c.want, outcome(t, err), "%s: %v", name, err)
	}
	for _, member := range []string{"d", "p", "q", "dp", "dq", "qi", "oth", "k", "priv"} { // WIT-13
		token := sign(tokenHeader, claims(webSubject, tokenEnd, cnfOf(jwk(wk)+`,"alg":"ES256","`+member+`":null`)), wit1)
		_, err := v.Validate(token, proofFor(token, member), witsvid.Call{Target: vectorTarget})
		assert.Equal(t, "confirmation WIT-13", outcome(t, err), member)
	}
	conformance.Covers(t, "WIT-11", "WIT-12", "WIT-13", "WIT-14", "WIT-16", "WIT-18", "WIT-20", "WIT-25", "WIT-26")
}

// An ID without a path is for a policy to name.
func TestPathlessID(t *testing.T) {
	t.Parallel()
	v := must.Get(witsvid.NewValidator(wit1Bundle(t), spiffe.AllowIDs(exampleOrg.ID()), atNow()))(t)
	token := sign(tokenHeader, claims(`"sub":"spiffe://example.org"`, tokenEnd, goodCNF()), wit1)
	p := must.Get(v.Validate(token, proofFor(token, "1"), witsvid.Call{Target: vectorTarget}))(t)
	assert.Equal(t, exampleOrg.ID(), p.ID())
}

func TestLeeway(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WIT-17", "WIT-18", "WPT-6", "WPT-7", "AMB-18")
	at := func(seconds float64, leeway *time.Duration) *witsvid.Validator {
		return newValidator(t, wit1Bundle(t), &witsvid.ValidatorOptions{
			Leeway: leeway, Now: func() time.Time { return time.Unix(now, 0).Add(time.Duration(seconds * float64(time.Second))) },
		})
	}
	nbf := sign(tokenHeader, claims(webSubject, tokenEnd, `"nbf":1767225600`, goodCNF()), wit1)
	long := sign(tokenHeader, claims(webSubject, `"exp":1767229200`, goodCNF()), wit1)
	late := func(token, exp string) string {
		return sign(proofHeader, claims(`"aud":"`+vectorTarget+`"`, `"exp":`+exp, `"jti":"1"`, `"wth":"`+hashOf(token)+`"`), wk)
	}
	for name, c := range map[string]struct {
		token, proof string
		at           float64
		leeway       *time.Duration
		want         string
	}{
		"token, default, within":      {baseToken(), late(baseToken(), "1767225960"), 359.5, nil, ""},
		"token, default, over":        {baseToken(), late(baseToken(), "1767225960"), 360, nil, "expired WIT-16"},
		"token, none, within":         {baseToken(), late(baseToken(), "1767225900"), 299.5, new(time.Duration), ""},
		"token, none, over":           {baseToken(), late(baseToken(), "1767225900"), 300, new(time.Duration), "expired WIT-16"},
		"token, most, within":         {baseToken(), late(baseToken(), "1767225960"), 419, new(2 * time.Minute), ""},
		"nbf, default, within":        {nbf, late(nbf, "1767225660"), -60, nil, ""},
		"nbf, default, before":        {nbf, late(nbf, "1767225660"), -60.5, nil, "not yet valid WIT-18"},
		"nbf, none, before":           {nbf, late(nbf, "1767225660"), -0.5, new(time.Duration), "not yet valid WIT-18"},
		"proof, default, within":      {long, late(long, "1767225660"), 119.5, nil, ""},
		"proof, default, over":        {long, late(long, "1767225660"), 120, nil, "expired WPT-6"},
		"proof, none, over":           {long, late(long, "1767225660"), 60, new(time.Duration), "expired WPT-6"},
		"proof, far, within":          {long, late(long, "1767225960"), 0, nil, ""},
		"proof, far, beyond":          {long, late(long, "1767225961"), 0, nil, "lifetime WPT-7"},
		"proof, far, none, beyond":    {long, late(long, "1767225901"), 0, new(time.Duration), "lifetime WPT-7"},
		"proof, in no unit of 64 bit": {long, late(long, "1e300"), 0, nil, "lifetime WPT-7"},
	} {
		_, err := at(c.at, c.leeway).Validate(c.token, c.proof, witsvid.Call{Target: vectorTarget})
		assert.Equal(t, c.want, outcome(t, err), name)
	}
}

func TestNewValidatorRefuses(t *testing.T) {
	t.Parallel()
	b := wit1Bundle(t)
	for want, o := range map[string]witsvid.ValidatorOptions{
		"the leeway is -1ns, not from 0 to 2m0s":           {Leeway: new(time.Duration(-1))},
		"the leeway is 2m0.000000001s, not from 0 to 2m0s": {Leeway: new(2*time.Minute + 1)},
		"the option Proofs is -2, not from -1 to 10000000": {Proofs: -2},
		"the option Proofs is 10000001, not from":          {Proofs: 10_000_001},
	} {
		v, err := witsvid.NewValidator(b, spiffe.AllowAnyPeer(), &o)
		require.ErrorContains(t, err, "witsvid: new validator: "+want)
		assert.Nil(t, v)
	}
	_, err := witsvid.NewValidator(nil, spiffe.AllowAnyPeer(), nil)
	require.EqualError(t, err, "witsvid: new validator: no bundle source")
	_, err = witsvid.NewValidator(b, nil, nil)
	require.ErrorContains(t, err, "witsvid: new validator: no policy; use AllowIDs")
	_, err = witsvid.NewValidator(b, spiffe.Policy{}, nil)
	require.ErrorContains(t, err, "witsvid: new validator: the policy is zero")
	_, err = witsvid.NewValidator(b, spiffe.AllowIDs(), nil)
	require.ErrorContains(t, err, "AllowIDs needs at least one ID")

	_, err = (&witsvid.Validator{}).Validate(baseToken(), proofFor(baseToken(), "1"), witsvid.Call{Target: vectorTarget})
	require.ErrorContains(t, err, "not made by NewValidator")
	_, err = (*witsvid.Validator)(nil).Validate("", "", witsvid.Call{Target: vectorTarget})
	require.Error(t, err)
}

func TestPolicy(t *testing.T) {
	t.Parallel()
	live := &spiffe.LivePolicy{}
	v := must.Get(witsvid.NewValidator(wit1Bundle(t), live, atNow()))(t)
	token := baseToken()
	call := witsvid.Call{Target: vectorTarget}
	_, err := v.Validate(token, proofFor(token, "1"), call)
	require.ErrorIs(t, err, spiffe.ErrDenied)
	assert.Equal(t, "denied", outcome(t, err))
	_, err = v.Validate(token, sign(proofHeader, proofClaims(token, "1"), other), call)
	assert.Equal(t, "signature WPT-4", outcome(t, err), "who proves nothing learns nothing about the policy")
	require.NoError(t, live.Set(spiffe.AllowIDs(spiffe.MustParseID(webID))))
	_, err = v.Validate(token, proofFor(token, "1"), call)
	require.NoError(t, err, "a proof that was denied is not used up")

	// The policy does not depend on whether proofs are remembered.
	off, err := witsvid.NewValidator(wit1Bundle(t), spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/else")), atNow(func(o *witsvid.ValidatorOptions) { o.Proofs = -1 }))
	require.NoError(t, err)
	_, err = off.Validate(token, proofFor(token, "1"), call)
	assert.Equal(t, "denied", outcome(t, err))
}

// source is a BundleSource that counts and can fail.
type source struct {
	mu    sync.Mutex
	set   *spiffe.BundleSet
	err   error
	asked []string
}

func (s *source) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, td.String())
	if s.err != nil {
		return nil, s.err
	}
	return s.set.Bundle(td)
}

func (s *source) put(b *spiffe.Bundle) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set = s.set.With(b)
}

type sourceFunc func(spiffe.TrustDomain) (*spiffe.Bundle, error)

func (f sourceFunc) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return f(td) }

// Keys come from the bundle of the trust domain in "sub", whatever "iss" and the headers say.
func TestTrustByDomain(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WIT-53", "WIT-62", "WIT-63", "SVID-1")
	src := &source{set: (&spiffe.BundleSet{}).With(wit1Bundle(t))}
	v := newValidator(t, src, atNow())
	call := witsvid.Call{Target: vectorTarget}
	token := sign(`{"alg":"ES256","kid":"wit-1","typ":"wit+jwt","jku":"https://evil.test/jwks","jwk":{`+jwk(other)+`}}`,
		claims(webSubject, tokenEnd, `"iss":"https://evil.test"`, goodCNF()), wit1)
	_, err := v.Validate(token, proofFor(token, "1"), call)
	require.NoError(t, err)
	assert.Equal(t, []string{"example.org"}, src.asked, "nothing else was asked for")

	evil := sign(`{"alg":"ES256","kid":"wit-1","typ":"wit+jwt","jku":"https://evil.test/jwks","jwk":{`+jwk(other)+`}}`, basePayload(), other)
	for range 2 { // what is refused is not remembered
		_, err = v.Validate(evil, proofFor(evil, "1"), call)
		assert.Equal(t, "signature WIT-1", outcome(t, err))
	}

	foreign := sign(tokenHeader, claims(`"sub":"spiffe://unknown.test/web"`, tokenEnd, goodCNF()), wit1)
	_, err = v.Validate(foreign, proofFor(foreign, "1"), call)
	assert.Equal(t, "unknown trust domain WIT-53", outcome(t, err))
	require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)

	down := errors.New("the disk is full")
	src.err = down
	_, err = v.Validate(token, proofFor(token, "2"), call)
	require.ErrorIs(t, err, down)
	assert.Equal(t, "bundle source", outcome(t, err), "even for a token that is remembered")

	for want, f := range map[string]sourceFunc{
		"unknown trust domain WIT-53": func(spiffe.TrustDomain) (*spiffe.Bundle, error) { return nil, nil },
		"bundle source WIT-53": func(spiffe.TrustDomain) (*spiffe.Bundle, error) {
			return parseBundle(t, "other.test", []byte(`{"keys":[]}`)), nil
		},
	} {
		_, err = newValidator(t, f, atNow()).Validate(token, proofFor(token, "1"), call)
		assert.Equal(t, want, outcome(t, err))
	}

	// The algorithm in the token must fit the key in the bundle.
	p384 := parseBundle(t, "example.org", []byte(`{"keys":[{"use":"wit-svid","kid":"wit-1",`+jwk(ecKey(elliptic.P384(), "x"))+`}]}`))
	_, err = newValidator(t, p384, atNow()).Validate(token, proofFor(token, "1"), call)
	assert.Equal(t, "unknown key WIT-6", outcome(t, err))
}

// A token is remembered, its end and its key are not forgotten.
func TestRemember(t *testing.T) {
	t.Parallel()
	src := &source{set: (&spiffe.BundleSet{}).With(wit1Bundle(t))}
	var clock atomic.Int64
	clock.Store(now)
	v := newValidator(t, src, atNow(func(o *witsvid.ValidatorOptions) {
		o.Now = func() time.Time { return time.Unix(clock.Load(), 0) }
	}))
	call := witsvid.Call{Target: vectorTarget}
	token := baseToken()
	for i := range 5 {
		must.Get(v.Validate(token, proofFor(token, fmt.Sprint(i)), call))(t)
	}
	second := sign(tokenHeader, claims(`"sub":"spiffe://example.org/other"`, tokenEnd, goodCNF()), wit1)
	for i := range 3 {
		p := must.Get(v.Validate(second, proofFor(second, fmt.Sprint(i)), call))(t)
		assert.Equal(t, "spiffe://example.org/other", p.ID().String())
		p = must.Get(v.Validate(token, proofFor(token, fmt.Sprint("between ", i)), call))(t)
		assert.Equal(t, webID, p.ID().String())
	}
	_, err := v.Validate(token, sign(proofHeader, proofClaims(token, "x"), other), call)
	assert.Equal(t, "signature WPT-4", outcome(t, err), "a proof is asked for each time")

	src.put(wit1Bundle(t)) // an equal one
	must.Get(v.Validate(token, proofFor(token, "again"), call))(t)
	src.put(parseBundle(t, "example.org", []byte(`{"keys":[{"use":"wit-svid","kid":"wit-1",`+jwk(other)+`}]}`)))
	_, err = v.Validate(token, proofFor(token, "other key"), call)
	assert.Equal(t, "signature WIT-1", outcome(t, err))
	src.put(parseBundle(t, "example.org", []byte(`{"keys":[]}`)))
	_, err = v.Validate(token, proofFor(token, "no key"), call)
	assert.Equal(t, "unknown key WIT-63", outcome(t, err))
	src.put(wit1Bundle(t))
	must.Get(v.Validate(token, proofFor(token, "back"), call))(t)
	clock.Store(now + 300)
	_, err = v.Validate(token, proofFor(token, "late"), call)
	assert.Equal(t, "expired WIT-16", outcome(t, err))
}

// One token, or several with one key, may be with many instances of a workload.
func TestSharedToken(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WIT-29", "WIT-22")
	v := newValidator(t, wit1Bundle(t), atNow())
	first := baseToken()
	second := sign(tokenHeader, claims(webSubject, tokenEnd, `"jti":"2"`, goodCNF()), wit1)
	for _, token := range []string{first, second} {
		for _, jti := range []string{"a", "b"} {
			must.Get(v.Validate(token, proofFor(token, jti), witsvid.Call{Target: vectorTarget}))(t)
		}
	}
}

func TestProof(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WIT-30", "WIT-48", "WPT-2", "WPT-3", "WPT-4", "WPT-5", "WPT-6", "WPT-8", "WPT-10", "WPT-14")
	token := baseToken()
	v := newValidator(t, wit1Bundle(t), atNow())
	aud, jti, wth := `"aud":"`+vectorTarget+`"`, func(s string) string { return `"jti":"` + s + `"` }, `"wth":"`+hashOf(token)+`"`
	for name, c := range map[string]struct{ header, payload, want string }{
		"further claims":     {proofHeader, claims(aud, proofEnd, jti("1"), wth, `"iat":9999999999`, `"acme.example/x":[]`, `"iss":"x"`), ""},
		"further headers":    {`{"alg":"ES256","typ":"wpt+jwt","kid":"x","jwk":{` + jwk(other) + `},"x":{}}`, claims(aud, proofEnd, jti("2"), wth), ""},
		"jwk is empty":       {`{"alg":"ES256","typ":"wpt+jwt","jwk":{}}`, claims(aud, proofEnd, jti("ignored"), wth), ""},
		"b64":                {`{"alg":"ES256","typ":"wpt+jwt","b64":true}`, claims(aud, proofEnd, jti("3"), wth), "header WPT-2"},
		"crit":               {`{"alg":"ES256","typ":"wpt+jwt","crit":["x"]}`, claims(aud, proofEnd, jti("3"), wth), "header WPT-2"},
		"no typ":             {`{"alg":"ES256"}`, claims(aud, proofEnd, jti("3"), wth), "header WPT-2"},
		"a token's typ":      {`{"alg":"ES256","typ":"wit+jwt"}`, claims(aud, proofEnd, jti("3"), wth), "header WPT-2"},
		"no alg":             {`{"typ":"wpt+jwt"}`, claims(aud, proofEnd, jti("3"), wth), "algorithm WPT-3"},
		"alg none":           {`{"alg":"none","typ":"wpt+jwt"}`, claims(aud, proofEnd, jti("3"), wth), "algorithm WPT-3"},
		"aud in an array":    {proofHeader, claims(`"aud":["`+vectorTarget+`"]`, proofEnd, jti("4"), wth), ""},
		"two in aud":         {proofHeader, claims(`"aud":["`+vectorTarget+`","x"]`, proofEnd, jti("5"), wth), "claim WPT-5"},
		"none in aud":        {proofHeader, claims(`"aud":[]`, proofEnd, jti("5"), wth), "claim WPT-5"},
		"no aud":             {proofHeader, claims(proofEnd, jti("5"), wth), "claim WPT-5"},
		"empty aud":          {proofHeader, claims(`"aud":""`, proofEnd, jti("5"), wth), "claim WPT-5"},
		"aud is number":      {proofHeader, claims(`"aud":7`, proofEnd, jti("5"), wth), "claim WPT-5"},
		"aud with query":     {proofHeader, claims(`"aud":"`+vectorURL+`"`, proofEnd, jti("5"), wth), "audience WPT-5"},
		"aud, other path":    {proofHeader, claims(`"aud":"https://db.example.org/Query"`, proofEnd, jti("5"), wth), "audience WPT-5"},
		"aud, other spell":   {proofHeader, claims(`"aud":"HTTPS://DB.example.org:443/query"`, proofEnd, jti("6"), wth), ""},
		"aud, other port":    {proofHeader, claims(`"aud":"https://db.example.org:8443/query"`, proofEnd, jti("7"), wth), "audience WPT-5"},
		"aud, other scheme":  {proofHeader, claims(`"aud":"http://db.example.org/query"`, proofEnd, jti("7"), wth), "audience WPT-5"},
		"no exp":             {proofHeader, claims(aud, jti("7"), wth), "claim WPT-6"},
		"exp is text":        {proofHeader, claims(aud, `"exp":"1"`, jti("7"), wth), "claim WPT-6"},
		"nbf ahead":          {proofHeader, claims(aud, proofEnd, `"nbf":1767225601`, jti("7"), wth), "not yet valid WPT-6"},
		"nbf is text":        {proofHeader, claims(aud, proofEnd, `"nbf":"x"`, jti("7"), wth), "claim WPT-6"},
		"jti is number":      {proofHeader, claims(aud, proofEnd, `"jti":7`, wth), "claim WPT-8"},
		"jti is empty":       {proofHeader, claims(aud, proofEnd, `"jti":""`, wth), "claim WPT-8"},
		"no wth":             {proofHeader, claims(aud, proofEnd, jti("7")), "claim WPT-10"},
		"wth with padding":   {proofHeader, claims(aud, proofEnd, jti("7"), `"wth":"`+hashOf(token)+`="`), "binding WPT-10"},
		"ath for nothing":    {proofHeader, claims(aud, proofEnd, jti("7"), wth, `"ath":"`+hashOf("x")+`"`), "binding WPT-11"},
		"empty ath":          {proofHeader, claims(aud, proofEnd, jti("7"), wth, `"ath":""`), "binding WPT-11"},
		"tth for nothing":    {proofHeader, claims(aud, proofEnd, jti("7"), wth, `"tth":"`+hashOf("x")+`"`), "binding WPT-12"},
		"oth not understood": {proofHeader, claims(aud, proofEnd, jti("7"), wth, `"oth":{"x-user":"`+hashOf("x")+`"}`), "binding WPT-13"},
		"empty oth":          {proofHeader, claims(aud, proofEnd, jti("8"), wth, `"oth":{}`), ""},
		"oth is array":       {proofHeader, claims(aud, proofEnd, jti("9"), wth, `"oth":[]`), "claim WPT-13"},
		"oth of numbers":     {proofHeader, claims(aud, proofEnd, jti("9"), wth, `"oth":{"a":1}`), "claim WPT-13"},
		"oth of many":        {proofHeader, claims(aud, proofEnd, jti("9"), wth, `"oth":{`+many(33)+`}`), "claim WPT-13"},
		"oth twice":          {proofHeader, claims(aud, proofEnd, jti("9"), wth, `"oth":{"a":"","a":""}`), "malformed WPT-2"},
		"aud twice":          {proofHeader, claims(aud, aud, proofEnd, jti("9"), wth), "malformed WPT-2"},
		"array":              {proofHeader, `[]`, "malformed WPT-2"},
	} {
		_, err := v.Validate(token, sign(c.header, c.payload, wk), witsvid.Call{Target: vectorTarget})
		assert.Equal(t, c.want, outcome(t, err), "%s: %v", name, err)
		if err != nil {
			assert.Equal(t, "proof", refusal(t, err).What)
		}
	}
	_, err := v.Validate(token, "", witsvid.Call{Target: vectorTarget})
	assert.Equal(t, "malformed WPT-2", outcome(t, err), "no proof is no proof")
	_, err = v.Validate(token, token, witsvid.Call{Target: vectorTarget})
	assert.Equal(t, "header WPT-2", outcome(t, err), "a token is not its own proof")

	for want, c := range map[string]witsvid.Call{
		"the call has no target":               {},
		"the target has a query or a fragment": {Target: vectorURL},
		"the target is not UTF-8":              {Target: "\xff"},
		`the name "X-User" of a token`:         {Target: vectorTarget, Tokens: map[string]string{"X-User": "x"}},
		`the name "" of a token`:               {Target: vectorTarget, Tokens: map[string]string{"": "x"}},
	} {
		_, err := v.Validate(token, proofFor(token, "z"), c)
		require.ErrorContains(t, err, want)
		svid := must.Get(witsvid.NewSVID(token, wk))(t)
		_, _, err = (&witsvid.Prover{Source: fixed(svid), Now: atNow().Now}).Prove(c)
		require.ErrorContains(t, err, want)
	}
}

func many(n int) string {
	var list []string
	for i := range n {
		list = append(list, fmt.Sprintf(`"h%d":""`, i))
	}
	return strings.Join(list, ",")
}

// Every token in a call has to be covered, and nothing that is not there.
func TestProofCoversTokens(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WPT-11", "WPT-12", "WPT-13")
	token := baseToken()
	svid, err := witsvid.NewSVID(token, wk)
	require.NoError(t, err)
	full := witsvid.Call{Target: vectorTarget, AccessToken: "access", TxnToken: "txn", Tokens: map[string]string{"x-user": " user\t", "x-session": "s"}}
	edit := func(f func(c *witsvid.Call)) witsvid.Call {
		c := full
		c.Tokens = map[string]string{"x-user": "user", "x-session": "s"}
		f(&c)
		return c
	}
	calls := map[string]struct {
		call witsvid.Call
		rule string
	}{
		"other access token": {edit(func(c *witsvid.Call) { c.AccessToken = "other" }), "WPT-11"},
		"no access token":    {edit(func(c *witsvid.Call) { c.AccessToken = "" }), "WPT-11"},
		"other txn token":    {edit(func(c *witsvid.Call) { c.TxnToken = "other" }), "WPT-12"},
		"no txn token":       {edit(func(c *witsvid.Call) { c.TxnToken = "" }), "WPT-12"},
		"other token":        {edit(func(c *witsvid.Call) { c.Tokens["x-user"] = "other" }), "WPT-13"},
		"one token less":     {edit(func(c *witsvid.Call) { delete(c.Tokens, "x-user") }), "WPT-13"},
		"one token more":     {edit(func(c *witsvid.Call) { c.Tokens["x-more"] = "m" }), "WPT-13"},
	}
	v := newValidator(t, wit1Bundle(t), atNow())
	for name, c := range calls {
		_, proof := prove(t, svid, atNow().Now, full)
		_, err = v.Validate(token, proof, c.call)
		assert.Equal(t, "binding "+c.rule, outcome(t, err), "%s: proof of more or other", name)
		_, proof = prove(t, svid, atNow().Now, c.call)
		_, err = v.Validate(token, proof, full)
		assert.Equal(t, "binding "+c.rule, outcome(t, err), "%s: proof of less or other", name)
		_, err = v.Validate(token, proof, c.call)
		require.NoError(t, err, name)
	}

	_, proof := prove(t, svid, atNow().Now, full)
	_, payload := decode(t, proof)
	assert.Equal(t, hashOf("access"), payload["ath"])
	assert.Equal(t, hashOf("txn"), payload["tth"])
	assert.Equal(t, map[string]any{"x-user": hashOf("user"), "x-session": hashOf("s")}, payload["oth"])
	must.Get(v.Validate(token, proof, full))(t)
}

// What a Prover makes.
func TestProve(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WPT-2", "WPT-5", "WPT-6", "WPT-8", "WPT-10", "WIT-45", "WIT-46", "WIT-51")
	token := baseToken()
	svid := must.Get(witsvid.NewSVID(token, wk))(t)
	sent, proof := prove(t, svid, atNow().Now, witsvid.Call{Target: vectorTarget})
	assert.Equal(t, token, sent)
	header, payload := decode(t, proof)
	assert.Equal(t, map[string]any{"alg": "ES256", "typ": "wpt+jwt"}, header)
	jti, _ := payload["jti"].(string)
	assert.Len(t, jti, 26, "128 bits in base32")
	assert.Equal(t, map[string]any{"aud": vectorTarget, "exp": float64(now + 60), "jti": jti, "wth": hashOf(token)}, payload)
	_, again := prove(t, svid, atNow().Now, witsvid.Call{Target: vectorTarget})
	_, payload2 := decode(t, again)
	assert.NotEqual(t, jti, payload2["jti"])

	at := func(seconds int64) (map[string]any, error) {
		p := &witsvid.Prover{Source: fixed(svid), Now: func() time.Time { return time.Unix(now+seconds, 0) }}
		_, proof, err := p.Prove(witsvid.Call{Target: "x"})
		if err != nil {
			return nil, err
		}
		_, payload := decode(t, proof)
		return payload, nil
	}
	payload = must.Get(at(299))(t)
	assert.Equal(t, float64(now+300), payload["exp"], "a proof does not outlive its token")
	_, err := at(300)
	require.EqualError(t, err, `witsvid: prove: the WIT-SVID of "`+webID+`" expired at 2026-01-01T00:05:00Z, and its key is not used any more`)

	notReady := errors.New("not ready")
	for want, p := range map[string]*witsvid.Prover{
		"the Prover has no Source of a WIT-SVID": {},
		"not ready":                              {Source: func() (*witsvid.SVID, error) { return nil, notReady }},
		"the source gave no WIT-SVID":            {Source: fixed(nil)},
		"the source gave no WIT":                 {Source: fixed(&witsvid.SVID{})},
		"the token would have":                   {Source: fixed(svid), Now: atNow().Now},
	} {
		_, _, err := p.Prove(witsvid.Call{Target: strings.Repeat("x", maxSize)})
		require.ErrorContains(t, err, "witsvid: prove: "+want)
	}
	_, _, err = (*witsvid.Prover)(nil).Prove(witsvid.Call{Target: "x"})
	require.ErrorContains(t, err, "the Prover has no Source")
}

// A proof is accepted once while it lasts, whatever else happens.
func TestReplay(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WIT-47", "WPT-9")
	synctest.Test(t, func(t *testing.T) {
		i := must.Get(witsvid.NewIssuer(exampleOrg, "wit-1", wit1, nil))(t)
		svid := issue(t, i, webID)
		v := newValidator(t, bundleOf(t, wit1), nil)
		time.Sleep(3 * time.Second) // so that ends are not where what is remembered is counted anew
		token, proof := prove(t, svid.SVID, nil, witsvid.Call{Target: "x"})
		use := func() string {
			_, err := v.Validate(token, proof, witsvid.Call{Target: "x"})
			return outcome(t, err)
		}
		require.Empty(t, use())
		for range 119 {
			_, next := prove(t, svid.SVID, nil, witsvid.Call{Target: "x"}) // makes room
			must.Get(v.Validate(token, next, witsvid.Call{Target: "x"}))(t)
			require.Equal(t, "replay WPT-9", use())
			time.Sleep(time.Second)
		}
		require.Equal(t, "replay WPT-9", use())
		time.Sleep(time.Second)
		require.Equal(t, "expired WPT-6", use(), "over, with the leeway, and only now forgotten")

		off := newValidator(t, bundleOf(t, wit1), &witsvid.ValidatorOptions{Proofs: -1})
		token, proof = prove(t, svid.SVID, nil, witsvid.Call{Target: "x"})
		for range 3 {
			must.Get(off.Validate(token, proof, witsvid.Call{Target: "x"}))(t)
		}
	})
}

// If all places are taken, nothing is forgotten before its time.
func TestReplayFull(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		i, err := witsvid.NewIssuer(exampleOrg, "wit-1", wit1, nil)
		require.NoError(t, err)
		svid := issue(t, i, webID)
		v := newValidator(t, bundleOf(t, wit1), &witsvid.ValidatorOptions{Proofs: 3})
		var first string
		for n := range 5 {
			token, proof := prove(t, svid.SVID, nil, witsvid.Call{Target: "x"})
			if n == 0 {
				first = proof
			}
			_, err = v.Validate(token, proof, witsvid.Call{Target: "x"})
			if n < 3 {
				require.NoError(t, err)
			} else {
				require.Equal(t, "busy WPT-9", outcome(t, err))
			}
			_, err = v.Validate(svid.token, first, witsvid.Call{Target: "x"})
			require.Equal(t, "replay WPT-9", outcome(t, err))
		}
		time.Sleep(130 * time.Second)
		for range 3 {
			token, proof := prove(t, svid.SVID, nil, witsvid.Call{Target: "x"})
			_, err = v.Validate(token, proof, witsvid.Call{Target: "x"})
			require.NoError(t, err, "there is room again")
		}
	})
}

// One allowed client that uses proofs as fast as it can, with one token and with ever new ones, is refused when
// it has taken its part, and a good client beside it never.
func TestReplayFlood(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		i := must.Get(witsvid.NewIssuer(exampleOrg, "wit-1", wit1, nil))(t)
		const batch = "spiffe://example.org/batch"
		steps := rounds.Of(75)
		good, greedy := issue(t, i, webID), issue(t, i, batch)
		v, err := witsvid.NewValidator(bundleOf(t, wit1), spiffe.AllowMembersOf(exampleOrg), &witsvid.ValidatorOptions{Proofs: 2 * steps})
		require.NoError(t, err)
		use := func(svid *workload) error {
			token, proof := prove(t, svid.SVID, nil, witsvid.Call{Target: "x"})
			_, err := v.Validate(token, proof, witsvid.Call{Target: "x"})
			return err
		}
		refused := 0
		for step := range steps { // of 300 seconds, more than twice the time for which a proof is remembered
			for range 10 {
				if err := use(greedy); err != nil {
					require.ErrorIs(t, err, witsvid.ErrUnavailable)
					refused++
				}
			}
			if step > steps*2/3 {
				greedy = issue(t, i, batch) // a new key each time
			}
			require.NoError(t, use(good), "step %d", step)
			time.Sleep(300 * time.Second / time.Duration(steps))
		}
		assert.Greater(t, refused, 3*steps)
	})
}

// Of many attempts with one proof at the same time, one gets in.
func TestReplayRace(t *testing.T) {
	t.Parallel()
	v := newValidator(t, wit1Bundle(t), atNow())
	token := baseToken()
	proof := proofFor(token, "race")
	var in atomic.Int32
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			if _, err := v.Validate(token, proof, witsvid.Call{Target: vectorTarget}); err == nil {
				in.Add(1)
			}
		})
	}
	wg.Wait()
	assert.EqualValues(t, 1, in.Load())
}

// FuzzValidate feeds unauthenticated tokens and proofs to a validator. The seeds are the vectors.
func FuzzValidate(f *testing.F) {
	vectors, bundles := readVectors(f)
	for _, v := range vectors.Vectors {
		for _, s := range v.Steps {
			f.Add(s.Token, s.Proof)
		}
	}
	v := newValidator(f, bundles, atNow(func(o *witsvid.ValidatorOptions) { o.Proofs = -1 }))
	f.Fuzz(func(t *testing.T, token, proof string) {
		p, err := v.Validate(token, proof, witsvid.Call{Target: vectorTarget})
		if err != nil {
			require.Nil(t, p)
			refusal(t, err, token, proof)
			return
		}
		// Only the generator has the keys, so it is one of the vectors.
		known := false
		for _, v := range vectors.Vectors {
			for _, s := range v.Steps {
				known = known || s.Token == token
			}
		}
		require.True(t, known, "a forged token was accepted: %q", token)
		require.Equal(t, webID, p.ID().String())
	})
}
