package jwtsvid_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/fips140"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/big"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// issuer signs as JWT1 at NOW unless the options say otherwise.
func issuer(t testing.TB, opts jwtsvid.IssuerOptions) *jwtsvid.Issuer {
	t.Helper()
	if opts.Now == nil {
		opts.Now = atNow
	}
	return must.Get(jwtsvid.NewIssuer(domain, "jwt-1", ecKey(elliptic.P256(), "svidkit-jwtsvid-jwt1"), &opts))(t)
}

// longIssuer signs at NOW tokens that both the clock of the vectors and that of the host accept.
func longIssuer(t testing.TB) *jwtsvid.Issuer {
	t.Helper()
	return issuer(t, jwtsvid.IssuerOptions{Lifetime: 100 * 365 * 24 * time.Hour})
}

// mint is a source that issues tokens, counts, and fails on demand.
type mint struct {
	issuer   *jwtsvid.Issuer
	lifetime time.Duration

	mu      sync.Mutex
	fetched int
	err     error
	edit    func(token string) string
	wait    func(context.Context) error
}

func (m *mint) Fetch(ctx context.Context, audience ...string) (string, error) {
	m.mu.Lock()
	m.fetched++
	n, err, edit, wait, lifetime := m.fetched, m.err, m.edit, m.wait, m.lifetime
	m.mu.Unlock()
	if wait != nil {
		if err := wait(ctx); err != nil {
			return "", err
		}
	}
	if err != nil {
		return "", err
	}
	token, err := m.issuer.Issue(jwtsvid.Request{ID: webID, Audience: audience, Lifetime: lifetime, Claims: map[string]any{"n": n}})
	if err == nil && edit != nil {
		token = edit(token)
	}
	return token, err
}

func (m *mint) set(f func(*mint)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f(m)
}

func (m *mint) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.fetched
}

// await waits, in a bubble, until m was asked for n tokens.
func (m *mint) await(n int) {
	for m.count() < n {
		time.Sleep(time.Second)
	}
}

// parts decodes the header and the payload of a token.
func parts(t testing.TB, token string) (header, payload string) {
	t.Helper()
	p := strings.Split(token, ".")
	require.Len(t, p, 3)
	h := must.Get(base64.RawURLEncoding.DecodeString(p[0]))(t)
	c := must.Get(base64.RawURLEncoding.DecodeString(p[1]))(t)
	return string(h), string(c)
}

func TestIssueShape(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "JWT-1", "JWT-5", "JWT-9", "JWT-10", "JWT-12", "JWT-18", "JWT-21", "JWT-36", "AMB-3", "AMB-12", "DIV-4", "DIV-6", "SVID-9")
	late := func() time.Time { return time.Unix(now, 999_999_999) }
	for name, c := range map[string]struct {
		opts jwtsvid.IssuerOptions
		req  jwtsvid.Request
		want string // the payload
	}{
		"JWT-21 five minutes": {jwtsvid.IssuerOptions{}, jwtsvid.Request{Audience: []string{"db"}}, basePay},
		"DIV-6 iat is the second that has begun": {
			jwtsvid.IssuerOptions{Now: late}, jwtsvid.Request{Audience: []string{"db"}, Lifetime: 1900 * time.Millisecond},
			`{` + webSubject + `,"aud":["db"],"exp":1767225601,"iat":1767225600}`,
		},
		"the issuer's lifetime": {
			jwtsvid.IssuerOptions{Lifetime: time.Hour}, jwtsvid.Request{Audience: []string{"db"}},
			`{` + webSubject + `,"aud":["db"],"exp":1767229200,"iat":1767225600}`,
		},
		"the request's lifetime": {
			jwtsvid.IssuerOptions{Lifetime: time.Hour}, jwtsvid.Request{Audience: []string{"db"}, Lifetime: time.Second},
			`{` + webSubject + `,"aud":["db"],"exp":1767225601,"iat":1767225600}`,
		},
		"JWT-16 several audiences": {
			jwtsvid.IssuerOptions{WideAudience: true}, jwtsvid.Request{Audience: []string{"db", "spiffe://example.org", `"\` + "\n"}},
			`{` + webSubject + `,"aud":["db","spiffe://example.org","\"\\\n"],"exp":1767225900,"iat":1767225600}`,
		},
		"an issuer of OpenID Connect": {
			jwtsvid.IssuerOptions{Issuer: "https://oidc.example.org/prod"}, jwtsvid.Request{Audience: []string{"db"}},
			`{"iss":"https://oidc.example.org/prod",` + webSubject + `,"aud":["db"],"exp":1767225900,"iat":1767225600}`,
		},
		"the claim iss of a caller": {
			jwtsvid.IssuerOptions{}, jwtsvid.Request{Audience: []string{"db"}, Claims: map[string]any{"iss": "x"}},
			`{"iss":"x",` + webSubject + `,"aud":["db"],"exp":1767225900,"iat":1767225600}`,
		},
		"JWT-24 further claims": {
			jwtsvid.IssuerOptions{}, jwtsvid.Request{Audience: []string{"db"}, Claims: map[string]any{"scope": []string{"a"}, "jti": "x", "n": 1 << 60}},
			`{` + webSubject + `,"aud":["db"],"exp":1767225900,"iat":1767225600,"jti":"x","n":1152921504606846976,"scope":["a"]}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.req.ID = webID
			token, err := issuer(t, c.opts).Issue(c.req)
			require.NoError(t, err)
			header, payload := parts(t, token)
			assert.Equal(t, baseHeader, header)
			assert.JSONEq(t, c.want, payload)
			if slices.Contains(c.req.Audience, "db") {
				_, err = validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{Leeway: new(time.Duration(0))}).Validate(token)
				assert.NoError(t, err)
			}
		})
	}
}

// remote is a key that is somewhere else: all that one sees of it is a Signer.
type remote struct{ crypto.Signer }

func TestIssueAlgorithms(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "JWT-3", "JWT-26", "JWT-27", "JWT-28", "GO-11")
	m := newMaterial(t)
	ed := must.Get(rsaOrEd(ed25519.GenerateKey(rand.Reader)))(t)
	keys := map[string]crypto.Signer{
		"jwt-1": m.jwt1, "jwt-2": m.jwt2, "jwt-3": m.jwt3, "jwt-4": m.jwt4,
		"P-224": ecKey(elliptic.P224(), "svidkit-jwtsvid-p224"), "weak": m.weak, "Ed25519": ed,
	}
	good := map[string][]string{ // the first is the one that the key has by default
		"jwt-1": {"ES256"},
		"jwt-2": {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"},
		"jwt-3": {"ES384"},
		"jwt-4": {"ES512"},
	}
	names := []string{"RS256", "RS384", "RS512", "ES256", "ES384", "ES512", "PS256", "PS384", "PS512", "EdDSA", "ES256K", "HS256", "HS512", "none", "es256", "JWT-3"}
	v := validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{})
	for kid, key := range keys {
		for _, name := range append(names, "") {
			i, err := jwtsvid.NewIssuer(domain, kid, remote{key}, &jwtsvid.IssuerOptions{Algorithm: name, Now: atNow})
			want := name
			if name == "" && good[kid] != nil {
				want = good[kid][0]
			}
			if !slices.Contains(good[kid], want) {
				assert.ErrorContains(t, err, "jwtsvid: new issuer: ", "%s %s", kid, name)
				continue
			}
			require.NoError(t, err, "%s %s", kid, name)
			for range rounds.Of(2) { // R and S have leading zeros now and then
				token := must.Get(i.Issue(jwtsvid.Request{ID: webID, Audience: []string{"db"}}))(t)
				header, _ := parts(t, token)
				assert.Equal(t, fmt.Sprintf(`{"alg":%q,"kid":%q,"typ":"JWT"}`, want, kid), header)
				_, err := v.Validate(token)
				assert.NoError(t, err, "%s %s", kid, want)
			}
		}
	}
}

func rsaOrEd(_ ed25519.PublicKey, k ed25519.PrivateKey, err error) (crypto.Signer, error) {
	return k, err
}

func TestNewIssuerRefusals(t *testing.T) {
	t.Parallel()
	key := newMaterial(t).jwt1
	for want, c := range map[string]struct {
		td   spiffe.TrustDomain
		kid  string
		key  crypto.Signer
		opts *jwtsvid.IssuerOptions
	}{
		"no trust domain":                  {spiffe.TrustDomain{}, "k", key, nil},
		"the key ID is empty or not UTF":   {domain, "", key, nil},
		"not UTF-8":                        {domain, "\xff", key, nil},
		"no key":                           {domain, "k", nil, nil},
		"is less than a second":            {domain, "k", key, &jwtsvid.IssuerOptions{Lifetime: -time.Minute}},
		"999ms is less than a second":      {domain, "k", key, &jwtsvid.IssuerOptions{Lifetime: 999 * time.Millisecond}},
		`"x` + strings.Repeat("x", 63):     {domain, "k", key, &jwtsvid.IssuerOptions{Algorithm: strings.Repeat("x", 1000)}},
		"no algorithm of SPIFFE tokens":    {domain, "k", remote{fakeSigner{}}, nil},
		"ES512 does not fit":               {domain, "k", key, &jwtsvid.IssuerOptions{Algorithm: "ES512"}},
		"IssuerOptions.Issuer: the scheme": {domain, "k", key, &jwtsvid.IssuerOptions{Issuer: "http://oidc.example.org"}},
		"does not end in a slash":          {domain, "k", key, &jwtsvid.IssuerOptions{Issuer: "https://oidc.example.org/"}},
		"not one of the nine that begin":   {domain, "k", key, &jwtsvid.IssuerOptions{Algorithm: "none"}},
	} {
		i, err := jwtsvid.NewIssuer(c.td, c.kid, c.key, c.opts)
		assert.ErrorContains(t, err, want)
		assert.Nil(t, i)
	}
	_, err := jwtsvid.NewIssuer(spiffe.TrustDomain{}, "k", key, nil)
	assert.ErrorIs(t, err, spiffe.ErrZero)
}

type fakeSigner struct{}

func (fakeSigner) Public() crypto.PublicKey                                  { return "secret" }
func (fakeSigner) Sign(io.Reader, []byte, crypto.SignerOpts) ([]byte, error) { return nil, nil }

func TestIssueRefusals(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "JWT-11", "JWT-12", "JWT-16", "JWT-17", "SVID-1", "AMB-19", "AMB-28")
	db := []string{"db"}
	for want, c := range map[string]jwtsvid.Request{
		"no ID: zero value":                           {Audience: db},
		"the ID is not in":                            {ID: spiffe.MustParseID("spiffe://other.test/web"), Audience: db},
		"the ID has no path":                          {ID: domain.ID(), Audience: db},
		"no audience; name the receiver of the token": {ID: webID},
		"an audience is empty":                        {ID: webID, Audience: []string{"db", ""}},
		"an audience is not UTF-8":                    {ID: webID, Audience: []string{"\xff"}},
		`the audience "db" is there twice`:            {ID: webID, Audience: []string{"db", "db"}},
		"2 audiences":                                 {ID: webID, Audience: []string{"db", "cache"}},
		"is a whole trust domain; name the":           {ID: webID, Audience: []string{"spiffe://example.org"}},
		"a lifetime of -1s is less than a second":     {ID: webID, Audience: db, Lifetime: -time.Second},
		`the claim "sub" is set by the Issuer`:        {ID: webID, Audience: db, Claims: map[string]any{"sub": "x"}},
		`the claim "AUD" is set`:                      {ID: webID, Audience: db, Claims: map[string]any{"AUD": "x"}},
		`the claim "exp" is set`:                      {ID: webID, Audience: db, Claims: map[string]any{"exp": 1}},
		`the claim "nbf" is set`:                      {ID: webID, Audience: db, Claims: map[string]any{"nbf": 1}},
		`the claim "Iat" is set`:                      {ID: webID, Audience: db, Claims: map[string]any{"Iat": 1}},
		"the claims cannot be written as JSON":        {ID: webID, Audience: db, Claims: map[string]any{"f": func() {}}},
		"a member occurs twice":                       {ID: webID, Audience: db, Claims: map[string]any{"x": json.RawMessage(`{"a":1,"a":2}`)}},
		"the limit is 16384":                          {ID: webID, Audience: db, Claims: map[string]any{"x": strings.Repeat("x", maxSize)}},
	} {
		token, err := issuer(t, jwtsvid.IssuerOptions{}).Issue(c)
		assert.ErrorContains(t, err, want)
		assert.ErrorContains(t, err, "jwtsvid: issue for ")
		assert.Empty(t, token)
	}
	_, err := issuer(t, jwtsvid.IssuerOptions{Issuer: "https://oidc.example.org"}).Issue(jwtsvid.Request{ID: webID, Audience: db, Claims: map[string]any{"Iss": "x"}})
	assert.ErrorContains(t, err, `the claim "Iss" is set by the Issuer`)
	_, err = issuer(t, jwtsvid.IssuerOptions{}).Issue(jwtsvid.Request{ID: webID, Audience: db, Claims: map[string]any{"x": strings.Repeat("x", 1<<20)}})
	assert.ErrorIs(t, err, spiffe.ErrTooLarge)
	var none *jwtsvid.Issuer
	_, err = none.Issue(jwtsvid.Request{})
	assert.ErrorContains(t, err, "not made by NewIssuer")
	_, err = new(jwtsvid.Issuer).Issue(jwtsvid.Request{})
	assert.ErrorContains(t, err, "not made by NewIssuer")
}

// lying is a signer that is not what it says: a replica behind a key service, say, that lags behind.
type lying struct {
	crypto.Signer
	sign func(io.Reader, []byte, crypto.SignerOpts) ([]byte, error)
}

func (l lying) Sign(r io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	return l.sign(r, digest, opts)
}

func TestIssueWithBadSigner(t *testing.T) {
	t.Parallel()
	m := newMaterial(t)
	broken := errors.New("the module is gone")
	for name, sign := range map[string]func(io.Reader, []byte, crypto.SignerOpts) ([]byte, error){
		"another key": m.jwtx.Sign,
		"fails":       func(io.Reader, []byte, crypto.SignerOpts) ([]byte, error) { return nil, broken },
		"nothing":     func(io.Reader, []byte, crypto.SignerOpts) ([]byte, error) { return nil, nil },
		"not ASN.1":   func(io.Reader, []byte, crypto.SignerOpts) ([]byte, error) { return make([]byte, 64), nil },
		"more behind": func(r io.Reader, d []byte, o crypto.SignerOpts) ([]byte, error) {
			sig, err := m.jwt1.Sign(r, d, o)
			return append(sig, 0), err
		},
		"wide": m.jwt4.Sign,
	} {
		i := must.Get(jwtsvid.NewIssuer(domain, "jwt-1", lying{m.jwt1, sign}, nil))(t)
		token, err := i.Issue(jwtsvid.Request{ID: webID, Audience: []string{"db"}})
		assert.Error(t, err, name)
		assert.Empty(t, token, name)
		assert.Equal(t, name == "fails", errors.Is(err, broken), name)
	}
	i, err := jwtsvid.NewIssuer(domain, "jwt-2", lying{m.jwt2, m.weak.Sign}, nil)
	require.NoError(t, err)
	fips140.WithoutEnforcement(func() { _, err = i.Issue(jwtsvid.Request{ID: webID, Audience: []string{"db"}}) })
	assert.ErrorContains(t, err, "no validator would accept the token: the signature does not match the key")
}

// TestNothingPrints goes through all values that hold a key or a token, and all ways to print them.
func TestNothingPrints(t *testing.T) {
	t.Parallel()
	m := newMaterial(t)
	i := issuer(t, jwtsvid.IssuerOptions{})
	token := must.Get(i.Issue(jwtsvid.Request{ID: webID, Audience: []string{"db"}}))(t)
	v := validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{})
	proof := must.Get(v.Validate(token))(t)
	u := must.Get(jwtsvid.ParseUnverified(token))(t)
	cache := must.Get(jwtsvid.NewCache(&mint{issuer: issuer(t, jwtsvid.IssuerOptions{Now: time.Now})}, nil))(t)
	cached := must.Get(cache.Fetch(t.Context(), "db"))(t)
	transport := must.Get(jwtsvid.NewTransport(cache, map[string]string{"b.test": "db", "a.test": "db"}, nil))(t)
	_, refusal := v.Validate(token[:len(token)-8] + "AAAAAAAA")
	require.Error(t, refusal)

	secrets := map[string]string{
		"the token":        token[len(token)-30:],
		"the payload":      strings.Split(token, ".")[1],
		"the cached token": cached[len(cached)-30:],
		"the key":          new(big.Int).SetBytes(must.Do(m.jwt1.Bytes())).String(),
		"the key in hex":   fmt.Sprintf("%x", must.Do(m.jwt1.Bytes())),
	}
	for _, secret := range slices.Collect(maps.Values(secrets)) {
		secrets["%x of "+secret] = fmt.Sprintf("%x", secret)
		secrets["%X of "+secret] = fmt.Sprintf("%X", secret)
		secrets["%d of "+secret] = strings.Trim(fmt.Sprintf("%d", []byte(secret)), "[]")
	}
	type inside struct{ hidden any }
	type typed struct {
		i *jwtsvid.Issuer
		p *jwtsvid.Verified
		c *jwtsvid.Cache
		v *jwtsvid.Validator
		t http.RoundTripper
	}
	for _, x := range []any{
		i, *i, v, *v, proof, *proof, u, *u, cache, transport, refusal,
		inside{proof}, inside{*proof}, inside{i}, inside{cache}, inside{v}, typed{i, proof, cache, v, transport},
		[]any{proof}, map[string]any{"x": i}, (*jwtsvid.Issuer)(nil), (*jwtsvid.Cache)(nil),
	} {
		var out bytes.Buffer
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%#x", "%d", "%o", "%b", "%c", "%U"} {
			fmt.Fprintf(&out, verb+"\n", x)
		}
		log := slog.New(slog.NewJSONHandler(&out, nil))
		log.Info("x", "x", x)
		slog.New(slog.NewTextHandler(&out, nil)).Info("x", "x", x)
		if doc, err := json.Marshal(x); err == nil {
			out.Write(doc)
		}
		for what, secret := range secrets {
			assert.False(t, strings.Contains(out.String(), secret), "%T shows %s", x, what)
		}
	}
	assert.Equal(t, `jwtsvid.Issuer(example.org, ES256, "jwt-1")`, i.String())
	assert.Equal(t, webID.String(), proof.String())
	assert.Equal(t, webID.String(), fmt.Sprintf("%#v", proof))
	assert.Equal(t, "jwtsvid.Cache", cache.String())
}

// Leading zeros of R and S are kept: the width is fixed (GO-11).
func TestFixedWidth(t *testing.T) {
	t.Parallel()
	m := newMaterial(t)
	// A signer whose every signature has a short R: it draws until it has one.
	short := lying{m.jwt1, func(r io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
		for {
			sig, err := m.jwt1.Sign(r, digest, opts)
			if err != nil || sig[3] < 0x20 {
				return sig, err
			}
		}
	}}
	i := must.Get(jwtsvid.NewIssuer(domain, "jwt-1", short, &jwtsvid.IssuerOptions{Now: atNow}))(t)
	token := must.Get(i.Issue(jwtsvid.Request{ID: webID, Audience: []string{"db"}}))(t)
	sig := must.Get(base64.RawURLEncoding.DecodeString(token[strings.LastIndexByte(token, '.')+1:]))(t)
	assert.Len(t, sig, 64)
	assert.Zero(t, sig[0])
	assert.True(t, ecdsaVerify(&m.jwt1.PublicKey, token, sig))
}

func ecdsaVerify(k *ecdsa.PublicKey, token string, sig []byte) bool {
	h := crypto.SHA256.New()
	h.Write([]byte(token[:strings.LastIndexByte(token, '.')]))
	half := len(sig) / 2
	return ecdsa.Verify(k, h.Sum(nil), new(big.Int).SetBytes(sig[:half]), new(big.Int).SetBytes(sig[half:]))
}
