package jwtsvid_test

import (
	"crypto"
	"crypto/elliptic"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"
	"weak"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// counted is a bundle source that counts, and gives what it is told to.
type counted struct {
	asked  atomic.Int64
	answer func(spiffe.TrustDomain) (*spiffe.Bundle, error)
}

func (c *counted) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	c.asked.Add(1)
	return c.answer(td)
}

// es256 signs a header and a payload as JWT1.
func es256(t testing.TB, header, payload string) string {
	t.Helper()
	return sign(header, payload, "ES256", newMaterial(t).jwt1)
}

func TestNewValidator(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "JWT-15", "JWT-20", "AMB-28", "DIV-7")
	set := bundles(t, "")
	db := []string{"db"}
	leeway := func(d time.Duration) *jwtsvid.ValidatorOptions { return &jwtsvid.ValidatorOptions{Leeway: &d} }
	for want, c := range map[string]struct {
		source   spiffe.BundleSource
		audience []string
		opts     *jwtsvid.ValidatorOptions
	}{
		"no bundle source":               {nil, db, nil},
		"no audience; name this service": {set, nil, nil},
		"no audience; name":              {set, []string{}, nil},
		"an audience is empty":           {set, []string{""}, nil},
		"an audience is not UTF-8":       {set, []string{"db", "\xc0"}, nil},
		"is there twice":                 {set, []string{"db", "x", "db"}, nil},
		"the leeway is 2m0.000000001s":   {set, db, leeway(2*time.Minute + 1)},
		"the leeway is -1ns, not from 0": {set, db, leeway(-1)},
	} {
		v, err := jwtsvid.NewValidator(c.source, c.audience, c.opts)
		assert.ErrorContains(t, err, want)
		assert.ErrorContains(t, err, "jwtsvid: new validator: ")
		assert.Nil(t, v)
	}
	for _, opts := range []*jwtsvid.ValidatorOptions{nil, leeway(0), leeway(2 * time.Minute)} {
		_, err := jwtsvid.NewValidator(set, db, opts)
		assert.NoError(t, err)
	}

	for _, v := range []*jwtsvid.Validator{nil, {}} {
		_, err := v.Validate("x")
		assert.ErrorContains(t, err, "not made by NewValidator")
	}

	// The list is fixed.
	own := []string{"db"}
	v := must.Get(jwtsvid.NewValidator(set, own, &jwtsvid.ValidatorOptions{Now: atNow}))(t)
	own[0] = "cache"
	_, err := v.Validate(es256(t, baseHeader, basePay))
	assert.NoError(t, err)
}

// TestOrder has tokens with two faults. The earlier check decides, and what comes later is not done.
func TestOrder(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "JWT-4", "JWT-29", "JWT-30", "JWT-6", "JWT-13", "JWT-19", "JWT-22")
	m := newMaterial(t)
	const (
		badSub = `{"sub":"web","aud":["db"],"exp":1767225900}`
		noTD   = `{"sub":"spiffe://nowhere.test/web","aud":["cache"],"exp":1}`
	)
	pay := func(aud string, exp, nbf int) string {
		return fmt.Sprintf(`{%s,"aud":[%q],"exp":%d,"nbf":%d}`, webSubject, aud, exp, nbf)
	}
	const good, past, future = now + 300, now - 600, now + 600
	for _, c := range []struct {
		name         string
		token        string
		reason, rule string
		asked        int64 // calls of the bundle source
	}{
		{"parts before algorithm", es256(t, `{"alg":"none"}`, basePay) + "\n", "malformed", "JWT-26", 0},
		{"the payload's form before algorithm", b64([]byte(`{"alg":"none"}`)) + ".!.", "malformed", "JWT-26", 0},
		{"JSON before algorithm", es256(t, `{"alg":"none","a":1,"a":2}`, basePay), "malformed", "JWT-26", 0},
		{"JWT-4 algorithm before extra members", es256(t, `{"alg":"none","jku":"x"}`, basePay), "algorithm", "JWT-4", 0},
		{"JWT-4 algorithm before kid and typ", es256(t, `{"alg":"HS256","kid":7,"typ":"x"}`, basePay), "algorithm", "JWT-4", 0},
		{"JWT-4 algorithm before payload", es256(t, `{"alg":"HS256"}`, `nothing`), "algorithm", "JWT-4", 0},
		{"JWT-4 no algorithm", es256(t, `{"kid":"jwt-1"}`, basePay), "algorithm", "JWT-4", 0},
		{"JWT-4 algorithm of another type", es256(t, `{"alg":["ES256"]}`, basePay), "algorithm", "JWT-4", 0},
		{"JWT-4 algorithm in another case", es256(t, `{"alg":"es256","kid":"jwt-1"}`, basePay), "algorithm", "JWT-4", 0},
		{"JWT-4 member in another case", es256(t, `{"Alg":"ES256","kid":"jwt-1"}`, basePay), "algorithm", "JWT-4", 0},
		{"extra members before kid", es256(t, `{"alg":"ES256","crit":["b64"],"kid":7}`, basePay), "header", "JWT-6", 0},
		{"kid before typ", es256(t, `{"alg":"ES256","kid":7,"typ":"x"}`, basePay), "header", "JWT-7", 0},
		{"kid of null", es256(t, `{"alg":"ES256","kid":null}`, basePay), "header", "JWT-7", 0},
		{"typ before payload", es256(t, `{"alg":"ES256","typ":"x"}`, `nothing`), "header", "JWT-10", 0},
		{"header is an array", es256(t, `[]`, basePay), "malformed", "JWT-26", 0},
		{"header is empty", "." + b64([]byte(basePay)) + ".AAAA", "malformed", "JWT-26", 0},
		{"payload is an array", es256(t, baseHeader, `[]`), "malformed", "JWT-26", 0},
		{"payload has more behind it", es256(t, baseHeader, basePay+`{}`), "malformed", "JWT-26", 0},
		{"payload is not UTF-8", es256(t, baseHeader, strings.Replace(basePay, "web", "w\xff", 1)), "malformed", "JWT-26", 0},
		{"JSON before subject", es256(t, baseHeader, badSub[:len(badSub)-1]), "malformed", "JWT-26", 0},
		{"subject before bundle", es256(t, baseHeader, badSub), "subject", "JWT-11", 0},
		{"subject of another type", es256(t, baseHeader, `{"sub":7}`), "subject", "JWT-11", 0},
		{"subject in another case", es256(t, baseHeader, strings.Replace(basePay, `"sub"`, `"Sub"`, 1)), "subject", "JWT-11", 0},
		{"bundle before key", es256(t, `{"alg":"ES256","kid":"nope"}`, noTD), "unknown trust domain", "JWT-29", 1},
		{"key before signature", sign(`{"alg":"ES256","kid":"nope"}`, pay("cache", past, future), "ES256", m.jwtx), "unknown key", "JWT-8", 1},
		{"key's kind before signature", sign(`{"alg":"ES512","kid":"jwt-1"}`, pay("cache", past, future), "ES512", m.jwt4), "unknown key", "JWT-27", 1},
		{"signature before audience", sign(baseHeader, pay("cache", past, future), "ES256", m.jwtx), "signature", "JWT-26", 1},
		{"signature's size before audience", es256(t, baseHeader, pay("cache", past, future)) + "AAAA", "signature", "JWT-28", 1},
		{"no signature", strings.TrimRight(es256(t, baseHeader, basePay), "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"), "signature", "JWT-28", 1},
		{"bound to a certificate", es256(t, baseHeader, strings.Replace(pay("db", good, past), "{", `{"cnf":{"x5t#S256":"`+b64(make([]byte, 32))+`"},`, 1)), "binding", "", 1},
		{"bound to nothing", es256(t, baseHeader, strings.Replace(pay("cache", past, future), "{", `{"cnf":null,`, 1)), "binding", "", 1},
		{"audience before exp", es256(t, baseHeader, pay("cache", past, future)), "audience", "JWT-13", 1},
		{"audience of another type before exp", es256(t, baseHeader, `{`+webSubject+`,"aud":{"db":1}}`), "audience", "JWT-12", 1},
		{"exp before nbf", es256(t, baseHeader, pay("db", past, future)), "expired", "JWT-19", 1},
		{"exp before nbf of another type", es256(t, baseHeader, `{`+webSubject+`,"aud":"db","exp":1,"nbf":"x"}`), "expired", "JWT-19", 1},
		{"nbf", es256(t, baseHeader, pay("db", good, future)), "not yet valid", "JWT-22", 1},
		{"nbf of another type", es256(t, baseHeader, `{`+webSubject+`,"aud":"db","exp":1767225900,"nbf":"x"}`), "not yet valid", "JWT-22", 1},
		{"nbf of null", es256(t, baseHeader, `{`+webSubject+`,"aud":"db","exp":1767225900,"nbf":null}`), "not yet valid", "JWT-22", 1},
		{"too long", strings.Repeat("A", maxSize+1), "malformed", "", 0},
		{"empty", "", "malformed", "JWT-1", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			set := bundles(t, "")
			source := &counted{answer: set.Bundle}
			v := validator(t, source, jwtsvid.ValidatorOptions{})
			p, err := v.Validate(c.token)
			assert.Nil(t, p)
			refused(t, err, c.token, c.reason, c.rule)
			assert.Equal(t, c.asked, source.asked.Load())
		})
	}
}

func TestTime(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "JWT-18", "JWT-19", "JWT-20", "JWT-22", "JWT-23", "DIV-6", "DIV-7")
	for _, c := range []struct {
		claims string
		leeway time.Duration
		at     float64 // seconds after NOW
		reason string  // empty: accepted
	}{
		{`"exp":1767225600`, 0, -0.001, ""},
		{`"exp":1767225600`, 0, 0, "expired"},
		{`"exp":1767225600`, time.Minute, 59.999, ""},
		{`"exp":1767225600`, time.Minute, 60, "expired"},
		{`"exp":1767225600`, 2 * time.Minute, 119.999, ""},
		{`"exp":1767225600`, 2 * time.Minute, 120, "expired"},
		{`"exp":1767225600.75`, 0, 0.7, ""},
		{`"exp":1767225600.75`, 0, 0.8, "expired"},
		{`"exp":1.7672256e9`, 0, -1, ""},
		{`"exp":17672256E2`, 0, 0, "expired"},
		{`"exp":1767225900,"nbf":1767225600`, 0, 0, ""},
		{`"exp":1767225900,"nbf":1767225600`, 0, -0.001, "not yet valid"},
		{`"exp":1767225900,"nbf":1767225600`, time.Minute, -60, ""},
		{`"exp":1767225900,"nbf":1767225600`, time.Minute, -60.001, "not yet valid"},
		{`"exp":1767225900,"nbf":-1e300`, 0, 0, ""},
		{`"exp":1767225900,"nbf":1e300`, 0, 0, "not yet valid"},
		{`"exp":9223372036854775807`, 0, 0, ""},
		{`"exp":9223372036854775808`, 0, 0, ""},
		{`"exp":1e999`, time.Minute, 0, ""},
		{`"exp":-1e999`, time.Minute, 0, "expired"},
		{`"exp":-9223372036854775808`, time.Minute, 0, "expired"},
		{`"exp":0`, time.Minute, 0, "expired"},
		{`"exp":-0.5`, time.Minute, 0, "expired"},
		{`"exp":null`, 0, 0, "expired"},
		{`"exp":true`, 0, 0, "expired"},
		{`"exp":[1767225900]`, 0, 0, "expired"},
		{`"exp":1767225900,"iat":"never"`, 0, 0, ""},
		{`"Exp":1767225900`, 0, 0, "expired"},
	} {
		at := time.Unix(now, 0).Add(time.Duration(c.at * float64(time.Second)))
		v := validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{Leeway: &c.leeway, Now: func() time.Time { return at }})
		token := es256(t, baseHeader, `{`+webSubject+`,"aud":"db",`+c.claims+`}`)
		for range 2 {
			_, err := v.Validate(token)
			if c.reason == "" {
				assert.NoError(t, err, "%+v", c)
				continue
			}
			e := must.As[*refusal](err)(t, c)
			assert.Equal(t, c.reason, string(e.Reason), "%+v", c)
			assert.Equal(t, webID, e.ID, "%+v", c)
		}
	}

	p, err := validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{}).Validate(es256(t, baseHeader, `{`+webSubject+`,"aud":"db","exp":1e300}`))
	require.NoError(t, err)
	assert.Equal(t, "9999-12-31T23:59:59Z", p.Expires().UTC().Format(time.RFC3339))
}

func TestBundleSources(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "JWT-29", "JWT-31", "BND-3", "BND-4", "BND-6", "BND-10", "BND-11", "SVID-1")
	down := errors.New("not ready")
	own, other := bundle(t, "example.org", "example.org"), bundle(t, "other.test", "other.test")
	empty := must.Get(spiffe.NewBundle(domain, spiffe.BundleContents{}))(t)
	token := es256(t, baseHeader, basePay)
	type answer = func(spiffe.TrustDomain) (*spiffe.Bundle, error)
	for name, c := range map[string]struct {
		answer       answer
		reason, rule string
		is           error
	}{
		"fails":              {func(spiffe.TrustDomain) (*spiffe.Bundle, error) { return nil, down }, "bundle source", "", down},
		"knows no such":      {other.Bundle, "unknown trust domain", "JWT-29", spiffe.ErrUnknownTrustDomain},
		"nothing":            {func(spiffe.TrustDomain) (*spiffe.Bundle, error) { return nil, nil }, "unknown trust domain", "JWT-29", spiffe.ErrUnknownTrustDomain},
		"another":            {func(spiffe.TrustDomain) (*spiffe.Bundle, error) { return other, nil }, "bundle source", "JWT-29", nil},
		"BND-10 empty":       {empty.Bundle, "unknown key", "JWT-31", nil},
		"JWT-31 no JWT keys": {bundle(t, "example.org", "no-jwt").Bundle, "unknown key", "JWT-31", nil},
	} {
		source := &counted{answer: c.answer}
		v := validator(t, source, jwtsvid.ValidatorOptions{})
		_, err := v.Validate(token)
		e := refused(t, err, token, c.reason, c.rule)
		assert.Equal(t, webID, e.ID, name)
		assert.ErrorContains(t, err, `jwtsvid: token of "spiffe://example.org/ns/prod/sa/web": `+c.reason, name)
		if c.is != nil {
			assert.ErrorIs(t, err, c.is, name)
		}

		// The same for a token that is remembered: the source has the last word.
		source.answer = own.Bundle
		_, err = v.Validate(token)
		require.NoError(t, err, name)
		source.answer = c.answer
		_, err = v.Validate(token)
		e = refused(t, err, token, c.reason, c.rule)
		assert.Equal(t, webID, e.ID, name)
		source.answer = own.Bundle
		_, err = v.Validate(token)
		require.NoError(t, err, name)
	}
}

func TestWithoutKeyID(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "JWT-7", "JWT-8", "JWT-27", "AMB-12", "DIV-4")
	m := newMaterial(t)
	const noKID = `{"alg":"ES256"}`
	with := func(n int, more map[string]crypto.PublicKey) *spiffe.Bundle {
		keys := map[string]crypto.PublicKey{"rsa": m.jwt2.Public(), "384": m.jwt3.Public()}
		for i := range n {
			keys[fmt.Sprintf("other-%02d", i)] = ecKey(elliptic.P256(), fmt.Sprint("svidkit-jwtsvid-", i)).Public()
		}
		maps.Copy(keys, more)
		return must.Get(spiffe.NewBundle(domain, spiffe.BundleContents{JWTAuthorities: keys}))(t)
	}
	token := sign(noKID, basePay, "ES256", m.jwt1)
	for name, c := range map[string]struct {
		bundle       *spiffe.Bundle
		reason, rule string
	}{
		"last of 16":      {with(15, map[string]crypto.PublicKey{"zz": m.jwt1.Public()}), "", ""},
		"first of 16":     {with(15, map[string]crypto.PublicKey{"00": m.jwt1.Public()}), "", ""},
		"none of 16":      {with(16, nil), "signature", "JWT-26"},
		"one of 17":       {with(16, map[string]crypto.PublicKey{"00": m.jwt1.Public()}), "unknown key", "JWT-7"},
		"no key fits":     {with(0, nil), "unknown key", "JWT-27"},
		"no key at all":   {bundle(t, "example.org", "no-jwt"), "unknown key", "JWT-31"},
		"by another name": {with(0, map[string]crypto.PublicKey{"x": m.jwt1.Public()}), "", ""},
	} {
		_, err := validator(t, c.bundle, jwtsvid.ValidatorOptions{}).Validate(token)
		if c.reason == "" {
			assert.NoError(t, err, name)
			continue
		}
		refused(t, err, token, c.reason, c.rule)
	}
	for _, a := range []struct {
		alg string
		key crypto.Signer
	}{{"ES384", m.jwt3}, {"ES512", m.jwt4}, {"RS512", m.jwt2}, {"PS384", m.jwt2}} {
		_, err := validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{}).Validate(sign(fmt.Sprintf(`{"alg":%q}`, a.alg), basePay, a.alg, a.key))
		assert.NoError(t, err, a.alg)
	}
}

// TestSentinels branches on errors as a program does.
func TestSentinels(t *testing.T) {
	t.Parallel()
	set := bundles(t, "")
	down := errors.New("not ready")
	v := validator(t, set, jwtsvid.ValidatorOptions{})
	_, malformed := v.Validate("x")
	_, audience := v.Validate(es256(t, baseHeader, strings.Replace(basePay, "db", "cache", 1)))
	_, expired := v.Validate(es256(t, baseHeader, `{`+webSubject+`,"aud":"db","exp":1}`))
	_, domain := v.Validate(es256(t, baseHeader, strings.Replace(basePay, "example.org", "nowhere.test", 1)))
	failing := &counted{answer: func(spiffe.TrustDomain) (*spiffe.Bundle, error) { return nil, down }}
	_, unavailable := validator(t, failing, jwtsvid.ValidatorOptions{}).Validate(es256(t, baseHeader, basePay))
	for _, c := range []struct {
		err  error
		want error // nil for none of the sentinels
	}{
		{malformed, nil}, {audience, jwtsvid.ErrAudience}, {expired, jwtsvid.ErrExpired},
		{domain, spiffe.ErrUnknownTrustDomain}, {unavailable, jwtsvid.ErrUnavailable},
	} {
		for _, s := range []error{jwtsvid.ErrAudience, jwtsvid.ErrExpired, jwtsvid.ErrUnavailable, spiffe.ErrUnknownTrustDomain} {
			assert.Equal(t, s == c.want, errors.Is(c.err, s), "%v is %v", c.err, s)
		}
		retry := must.As[interface {
			error
			Retryable() (time.Duration, bool)
		}](c.err)(t)
		_, again := retry.Retryable()
		assert.Equal(t, c.want == jwtsvid.ErrUnavailable, again)
	}
	assert.ErrorIs(t, unavailable, down)
}

// An agent validates for any audience, and for none without being told.
func TestAgentValidator(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "JWT-13", "JWT-15")
	agent := must.Get(jwtsvid.NewAgentValidator(bundles(t, ""), &jwtsvid.ValidatorOptions{Now: atNow}))(t)
	text := es256(t, baseHeader, `{`+webSubject+`,"aud":["a","b"],"exp":1767225900,"n":1.5,"Sub":"x"}`)
	for _, audience := range []string{"a", "b", "a"} {
		id, claims := must.Get2(agent.ValidateJWTSVID(t.Context(), audience, text))(t)
		assert.Equal(t, webID, id)
		assert.Equal(t, map[string]any{
			"sub": webID.String(), "aud": []any{"a", "b"}, "exp": 1767225900.0, "n": 1.5, "Sub": "x",
		}, claims)
	}
	// Remembered or not, the audience counts.
	for _, audience := range []string{"c", ""} {
		id, claims, err := agent.ValidateJWTSVID(t.Context(), audience, text)
		refused(t, err, text, "audience", "JWT-13")
		assert.True(t, id.IsZero())
		assert.Nil(t, claims)
	}
	_, err := agent.Validate(text)
	refused(t, err, text, "audience", "JWT-13")
	_, err = jwtsvid.Middleware(agent, spiffe.AllowAnyPeer(), nil)
	require.ErrorContains(t, err, "jwtsvid: middleware: the Validator is one for agents")
	_, _, err = new(jwtsvid.Validator).ValidateJWTSVID(t.Context(), "a", text)
	require.ErrorContains(t, err, "not made by NewValidator")
	_, err = jwtsvid.NewAgentValidator(nil, nil)
	require.ErrorContains(t, err, "jwtsvid: new validator: no bundle source")

	// One with an audience of its own does both.
	both := validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{})
	_, _, err = both.ValidateJWTSVID(t.Context(), "a", text)
	require.NoError(t, err)
	_, err = both.Validate(text)
	refused(t, err, text, "audience", "JWT-13")
}

// Errors quote what is in a token, cut to a bounded length.
func TestErrorsAreShort(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "JWT-13")
	v := validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{})
	long := strings.Repeat("é", 2000)
	many := strings.Repeat(`"x",`, 1000) + `"y"`
	for _, token := range []string{
		es256(t, `{"alg":"ES256","kid":"`+long+`"}`, basePay),
		es256(t, `{"alg":"ES256","`+long+`":1}`, basePay),
		es256(t, `{"alg":"`+long+`"}`, basePay),
		es256(t, baseHeader, `{"sub":"`+long+`"}`),
		es256(t, `{"alg":"ES256","x`+long+`":1}`, basePay), // cut in the middle of a character
		es256(t, baseHeader, `{`+webSubject+`,"aud":["`+long+`"],"exp":1}`),
		es256(t, baseHeader, `{`+webSubject+`,"aud":[`+many+`],"exp":1}`),
		es256(t, baseHeader, `{"sub":"spiffe://example.org/`+strings.Repeat("a", 2000)+`","aud":["x"],"exp":1}`),
	} {
		_, err := v.Validate(token)
		require.Error(t, err)
		assert.Less(t, len(err.Error()), 1300, "%v", err)
		assert.NotContains(t, err.Error(), `\x`, "no half characters")
	}
	_, err := v.Validate(es256(t, baseHeader, `{`+webSubject+`,"aud":["a","b","c","d"],"exp":1}`))
	assert.EqualError(t, err, `jwtsvid: token of "spiffe://example.org/ns/prod/sa/web": audience: it is for "a" "b" "c" "d", and this is "db"`)
}

func TestParseUnverified(t *testing.T) {
	t.Parallel()
	token := sign(baseHeader, basePay, "ES256", newMaterial(t).jwtx) // by a foreign key
	u := must.Get(jwtsvid.ParseUnverified(token))(t)
	assert.Equal(t, &jwtsvid.Unverified{ID: webID, Audience: []string{"db"}, Expires: time.Unix(now+300, 0).UTC(), KeyID: "jwt-1"}, u)
	for payload, want := range map[string][2]string{
		`{` + webSubject + `,"exp":1}`:                    {"audience", "JWT-12"},
		`{` + webSubject + `,"exp":1,"aud":[]}`:           {"audience", "JWT-12"},
		`{` + webSubject + `,"exp":1,"aud":["a",1]}`:      {"audience", "JWT-14"},
		`{` + webSubject + `,"aud":["a"]}`:                {"expired", "JWT-18"},
		`{` + webSubject + `,"aud":["a"],"exp":"1"}`:      {"expired", "JWT-18"},
		`{"sub":"x","aud":["a"],"exp":1}`:                 {"subject", "JWT-11"},
		`{"sub":"spiffe://example.org/a#","aud":"a"}`:     {"subject", "JWT-11"},
		`{` + webSubject + `,"aud":["a"],"exp":1,"exp":1`: {"malformed", "JWT-26"},
	} {
		token := es256(t, baseHeader, payload)
		u, err := jwtsvid.ParseUnverified(token)
		refused(t, err, token, want[0], want[1])
		assert.Nil(t, u)
	}
	_, err := jwtsvid.ParseUnverified(es256(t, baseHeader, `{"sub":"spiffe://example.org/a#"}`))
	pe := must.As[*spiffe.ParseError](err)(t)
	assert.Equal(t, "ID-5", pe.Rule)
}

func TestClaims(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "JWT-24", "BND-27", "GO-9")
	v := validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{})
	verified := func(more string) *jwtsvid.Verified {
		return must.Get(v.Validate(es256(t, baseHeader, basePay[:len(basePay)-1]+more+`}`)))(t)
	}

	claim := func(p *jwtsvid.Verified, name string) any {
		var value any
		ok, err := p.Claim(name, &value)
		require.NoError(t, err)
		assert.Equal(t, ok, value != nil, name)
		return value
	}
	p := verified(`,"role":"reader","rest":{"a":[1]},"team":"x\u0041","other":{"Role":1}`)
	assert.Equal(t, webID.String(), claim(p, "sub"))
	assert.Equal(t, "reader", claim(p, "role"))
	assert.Equal(t, "xA", claim(p, "team"))
	assert.Equal(t, map[string]any{"a": []any{1.0}}, claim(p, "rest"))
	var exact json.Number
	ok, err := verified(`,"big":9007199254740993`).Claim("big", &exact)
	assert.True(t, ok)
	require.NoError(t, err)
	assert.Equal(t, json.Number("9007199254740993"), exact)

	// Names are exact: none of these is "role", whatever encoding/json thinks.
	assert.Nil(t, claim(verified(`,"Role":"admin","ROLE":"admin"`), "role"))
	assert.Equal(t, "reader", claim(verified(`,"Role":"admin","role":"reader","ROLE":"admin"`), "role"))
	assert.Equal(t, webID.String(), claim(verified(`,"\u017fub":"spiffe://example.org/admin"`), "sub"))
	assert.Equal(t, "escaped", claim(verified(`,"r\u006fle":"escaped"`), "role"))

	// The result is the caller's: it does not change the proof.
	p.Audience()[0] = "x"
	assert.Equal(t, []string{"db"}, p.Audience())

	for _, into := range []any{nil, "", (*string)(nil), new(int)} {
		_, err = p.Claim("role", into)
		assert.ErrorContains(t, err, `jwtsvid: claim "role" of "spiffe://example.org/ns/prod/sa/web": `)
	}
	_, err = new(jwtsvid.Verified).Claim("role", new(any))
	assert.ErrorContains(t, err, "nothing was verified")
	assert.True(t, new(jwtsvid.Verified).ID().IsZero())
}

func TestMemory(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "JWT-25", "BND-6", "BND-10")
	clock := time.Unix(now, 0)
	current := bundle(t, "example.org", "example.org")
	source := &counted{answer: func(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return current.Bundle(td) }}
	v := validator(t, source, jwtsvid.ValidatorOptions{Now: func() time.Time { return clock }, Leeway: new(time.Duration(0))})
	token := es256(t, baseHeader, `{`+webSubject+`,"aud":"db","exp":1767225900,"nbf":1767225600}`)

	first := must.Get(v.Validate(token))(t)
	again := must.Get(v.Validate(strings.Clone(token)))(t)
	assert.Same(t, first, again, "remembered")
	assert.Equal(t, int64(2), source.asked.Load(), "and the source is asked each time")

	// Another token of the same length is another token.
	_, err := v.Validate(token[:len(token)-8] + "AAAAAAAA")
	refused(t, err, token, "signature", "JWT-26")

	// Another bundle, be it equal, is another generation.
	current = bundle(t, "example.org", "example.org")
	third := must.Get(v.Validate(token))(t)
	assert.NotSame(t, first, third)
	fourth := must.Get(v.Validate(token))(t)
	assert.Same(t, third, fourth)

	// A bundle without the key.
	current = bundle(t, "example.org", "no-jwt")
	_, err = v.Validate(token)
	refused(t, err, token, "unknown key", "JWT-31")
	current = bundle(t, "example.org", "example.org")
	must.Get(v.Validate(token))(t)

	// The time is looked at again, in both directions.
	clock = time.Unix(now-1, 0)
	_, err = v.Validate(token)
	refused(t, err, token, "not yet valid", "JWT-22")
	clock = time.Unix(now+300, 0)
	for range 2 {
		_, err = v.Validate(token)
		refused(t, err, token, "expired", "JWT-19")
	}
}

// What is remembered holds no text that its token came in, nor a bundle that its source has replaced: they may be
// large, and many.
func TestMemoryHoldsLittle(t *testing.T) {
	t.Parallel()
	current := bundle(t, "example.org", "example.org")
	source := &counted{answer: func(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return current.Bundle(td) }}
	v := validator(t, source, jwtsvid.ValidatorOptions{})
	text := "Bearer " + es256(t, baseHeader, basePay)
	proof := must.Get(v.Validate(text[len("Bearer "):]))(t)
	old, around := weak.Make(current), weak.Make(unsafe.StringData(text))
	current = bundle(t, "example.org", "example.org")
	assert.True(t, collected(old) && collected(around))
	runtime.KeepAlive(v)
	runtime.KeepAlive(proof)
}

// collected reports whether nothing holds what p points to.
func collected[T any](p weak.Pointer[T]) bool {
	for n := 0; n < 100 && p.Value() != nil; n++ {
		runtime.GC() // a stack that is scanned conservatively may hold it for one round
	}
	return p.Value() == nil
}

func TestMemoryBounds(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	tokens := make([]string, 64)
	for i := range tokens {
		tokens[i] = es256(t, baseHeader, fmt.Sprintf(`{`+webSubject+`,"aud":"db","exp":%d}`, now+100+i))
	}
	remembered := func(v *jwtsvid.Validator) (n int) {
		proofs := make([]*jwtsvid.Verified, len(tokens))
		for i, token := range tokens {
			proofs[i] = must.Get(v.Validate(token))(t)
		}
		for i, token := range slices.Backward(tokens) { // those that came last are the likely ones
			p := must.Get(v.Validate(token))(t)
			if p == proofs[i] {
				n++
			}
		}
		return n
	}
	v := validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{})
	assert.Greater(t, remembered(v), 60, "64 of 1000 hardly collide four times")

	// Long tokens are not worth it.
	long := es256(t, baseHeader, `{`+webSubject+`,"aud":"db","exp":1767225900,"x":"`+strings.Repeat("x", 8000)+`"}`)
	a := must.Get(v.Validate(long))(t)
	b := must.Get(v.Validate(long))(t)
	assert.NotSame(t, a, b)
}

// TestConcurrentUse is for the race detector: many tokens, a bundle that changes.
func TestConcurrentUse(t *testing.T) {
	t.Parallel()
	var current atomic.Pointer[spiffe.Bundle]
	current.Store(bundle(t, "example.org", "example.org"))
	v := validator(t, &counted{answer: func(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return current.Load().Bundle(td) }},
		jwtsvid.ValidatorOptions{})
	tokens := make([]string, 8)
	for i := range tokens {
		tokens[i] = es256(t, baseHeader, fmt.Sprintf(`{"sub":"spiffe://example.org/%d","aud":"db","exp":%d}`, i, now+100+i))
	}
	next := bundle(t, "example.org", "example.org")
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 100 {
				n := (i*7 + g) % len(tokens)
				p, err := v.Validate(tokens[n])
				if assert.NoError(t, err) {
					assert.Equal(t, fmt.Sprintf("spiffe://example.org/%d", n), p.String())
				}
				if i == 50 {
					current.Store(next)
				}
			}
		})
	}
	wg.Wait()
}
