package witsvid_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"os"
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
	"github.com/svidkit/svidkit/spiffe/exp/witsvid"
)

var rsaKey = sync.OnceValue(func() *rsa.PrivateKey {
	return must.Do(rsa.GenerateKey(rand.Reader, 2048))
})

func newIssuer(t testing.TB, opts *witsvid.IssuerOptions) *witsvid.Issuer {
	t.Helper()
	return must.Get(witsvid.NewIssuer(exampleOrg, "wit-1", wit1, opts))(t)
}

// issuedAt are options with a clock that stands still at NOW.
func issuedAt() *witsvid.IssuerOptions {
	return &witsvid.IssuerOptions{Now: func() time.Time { return time.Unix(now, 999e6) }}
}

// bundleOf returns a bundle with the key "wit-1".
func bundleOf(t testing.TB, key crypto.Signer) *spiffe.Bundle {
	t.Helper()
	wits := map[string]crypto.PublicKey{"wit-1": key.Public()}
	return must.Get(spiffe.NewBundle(exampleOrg, spiffe.BundleContents{WITAuthorities: wits}))(t)
}

// decode returns header and payload of a token as encoding/json reads them.
func decode(t testing.TB, token string) (header, payload map[string]any) {
	t.Helper()
	parts := strings.Split(token, ".")
	require.Len(t, parts, 3)
	for i, to := range []*map[string]any{&header, &payload} {
		data := must.Get(base64.RawURLEncoding.DecodeString(parts[i]))(t)
		require.NoError(t, json.Unmarshal(data, to))
	}
	return header, payload
}

func TestIssue(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WIT-1", "WIT-2", "WIT-5", "WIT-6", "WIT-7", "WIT-10", "WIT-11", "WIT-12", "WIT-16", "WIT-21", "WIT-23", "WIT-24", "WIT-27", "WIT-28")
	i := newIssuer(t, issuedAt())
	id := spiffe.MustParseID(webID)
	token := must.Get(i.Issue(id, wk.Public()))(t)
	header, payload := decode(t, token)
	assert.Equal(t, map[string]any{"alg": "ES256", "kid": "wit-1", "typ": "wit+jwt"}, header)
	jti, _ := payload["jti"].(string)
	assert.Len(t, jti, 26, "128 bits in base32")
	var key map[string]any
	require.NoError(t, json.Unmarshal([]byte("{"+jwk(wk)+`,"alg":"ES256"}`), &key))
	assert.Equal(t, map[string]any{
		"sub": webID, "iat": float64(now), "exp": float64(now + 3600), "jti": jti, "cnf": map[string]any{"jwk": key},
	}, payload)

	again := must.Get(i.Issue(id, wk.Public()))(t)
	_, payload2 := decode(t, again)
	assert.NotEqual(t, jti, payload2["jti"])

	v := newValidator(t, bundleOf(t, wit1), atNow())
	_, err := v.Validate(token, proofFor(token, "1"), witsvid.Call{Target: vectorTarget})
	require.NoError(t, err)
}

// All nine algorithms on both sides: of the issuer's key and of the workload's.
func TestIssueAlgorithms(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "WIT-6", "WIT-12", "WIT-14", "WIT-15")
	p384, p521 := ecKey(elliptic.P384(), "384"), ecKey(elliptic.P521(), "521")
	for alg, key := range map[string]crypto.Signer{
		"ES256": wit1, "ES384": p384, "ES512": p521, "RS256": rsaKey(), "RS384": rsaKey(), "RS512": rsaKey(),
		"PS256": rsaKey(), "PS384": rsaKey(), "PS512": rsaKey(),
	} {
		t.Run(alg, func(t *testing.T) {
			t.Parallel()
			i := must.Get(witsvid.NewIssuer(exampleOrg, "wit-1", key, &witsvid.IssuerOptions{Algorithm: alg}))(t)
			v := newValidator(t, bundleOf(t, key), nil)
			for workload, want := range map[crypto.Signer]string{wk: "ES256", ecKey(elliptic.P384(), "w"): "ES384", ecKey(elliptic.P521(), "w"): "ES512", rsaKey(): "RS256"} {
				token, err := i.Issue(spiffe.MustParseID(webID), workload.Public())
				if workload == key {
					require.ErrorContains(t, err, "is the key of the issuer")
					continue
				}
				require.NoError(t, err)
				header, payload := decode(t, token)
				assert.Equal(t, alg, header["alg"])
				assert.Equal(t, want, payload["cnf"].(map[string]any)["jwk"].(map[string]any)["alg"])
				svid := must.Get(witsvid.NewSVID(token, workload))(t)
				token, proof := prove(t, svid, nil, witsvid.Call{Target: "db"})
				must.Get(v.Validate(token, proof, witsvid.Call{Target: "db"}))(t)
			}
		})
	}
}

func TestIssuerKeyID(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WIT-4", "WIT-3")
	const keyID = `é "\ 1`
	named := must.Get(witsvid.NewIssuer(exampleOrg, keyID, wit1, nil))(t)
	token := must.Get(named.Issue(spiffe.MustParseID(webID), wk.Public()))(t)
	header, _ := decode(t, token)
	assert.Equal(t, keyID, header["kid"])
	wits := map[string]crypto.PublicKey{keyID: wit1.Public(), "other": other.Public()}
	bundle := must.Get(spiffe.NewBundle(exampleOrg, spiffe.BundleContents{WITAuthorities: wits}))(t)
	must.Get(newValidator(t, bundle, nil).Validate(token, freshProof(token), witsvid.Call{Target: vectorTarget}))(t)
}

func TestNewIssuerRefuses(t *testing.T) {
	t.Parallel()
	_, ed := must.Get2(ed25519.GenerateKey(rand.Reader))(t)
	for want, c := range map[string]struct {
		td    spiffe.TrustDomain
		keyID string
		key   crypto.Signer
		opts  witsvid.IssuerOptions
	}{
		"no trust domain: zero value": {spiffe.TrustDomain{}, "1", wit1, witsvid.IssuerOptions{}},
		"no key":                      {exampleOrg, "1", nil, witsvid.IssuerOptions{}},
		"no algorithm of SPIFFE tokens uses this key, a ed25519.PublicKey": {exampleOrg, "1", ed, witsvid.IssuerOptions{}},
		"no algorithm of SPIFFE tokens uses this key, a *ecdsa.PublicKey":  {exampleOrg, "1", ecKey(elliptic.P224(), "1"), witsvid.IssuerOptions{}},
		`the algorithm "EdDSA" is not one of the nine`:                     {exampleOrg, "1", wit1, witsvid.IssuerOptions{Algorithm: "EdDSA"}},
		`the algorithm "HS256" is not one of the nine`:                     {exampleOrg, "1", wit1, witsvid.IssuerOptions{Algorithm: "HS256"}},
		"the algorithm ES384 does not fit the key":                         {exampleOrg, "1", wit1, witsvid.IssuerOptions{Algorithm: "ES384"}},
		"the algorithm RS256 does not fit the key":                         {exampleOrg, "1", wit1, witsvid.IssuerOptions{Algorithm: "RS256"}},
		"the key ID is empty or not UTF-8":                                 {exampleOrg, "\xff", wit1, witsvid.IssuerOptions{}},
		"a lifetime of -1s is less than a second":                          {exampleOrg, "1", wit1, witsvid.IssuerOptions{Lifetime: -time.Second}},
		"a lifetime of 999ms is less than a second":                        {exampleOrg, "1", wit1, witsvid.IssuerOptions{Lifetime: 999 * time.Millisecond}},
	} {
		i, err := witsvid.NewIssuer(c.td, c.keyID, c.key, &c.opts)
		require.ErrorContains(t, err, "witsvid: new issuer: "+want)
		assert.Nil(t, i)
	}
}

// badSigner claims to have a key and signs with another, or fails.
type badSigner struct {
	crypto.Signer
	pub crypto.PublicKey
	err error
}

func (b badSigner) Public() crypto.PublicKey { return b.pub }

func (b badSigner) Sign(random io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	if b.err != nil {
		return nil, b.err
	}
	return b.Signer.Sign(random, digest, opts)
}

func TestIssueRefuses(t *testing.T) {
	t.Parallel()
	i := newIssuer(t, nil)
	web := spiffe.MustParseID(webID)
	ed, _ := must.Get2(ed25519.GenerateKey(rand.Reader))(t)
	for want, c := range map[string]struct {
		id  spiffe.ID
		key crypto.PublicKey
	}{
		`"invalid SPIFFE ID": no ID: zero value`:         {spiffe.ID{}, wk.Public()},
		`the ID is not in "example.org"`:                 {spiffe.MustParseID("spiffe://other.test/web"), wk.Public()},
		"the ID has no path, so it names a trust domain": {spiffe.MustParseID("spiffe://example.org"), wk.Public()},
		"the workload's key: no algorithm uses a key":    {web, ed},
		"of type <nil>": {web, nil},
		"the workload's key is the key of the issuer": {web, wit1.Public()},
		"the workload's key: the curve is not P-256":  {web, ecKey(elliptic.P224(), "1").Public()},
	} {
		token, err := i.Issue(c.id, c.key)
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "witsvid: issue for ")
		assert.Empty(t, token)
	}
	_, _, err := i.IssueWITSVID(t.Context(), spiffe.ID{}, "")
	require.ErrorIs(t, err, spiffe.ErrZero)
	_, err = (&witsvid.Issuer{}).Issue(web, wk.Public())
	require.ErrorContains(t, err, "not made by NewIssuer")

	failed := errors.New("the device is gone")
	broken := must.Get(witsvid.NewIssuer(exampleOrg, "1", badSigner{wit1, wit1.Public(), failed}, nil))(t)
	_, err = broken.Issue(web, wk.Public())
	require.ErrorIs(t, err, failed)
	liar := must.Get(witsvid.NewIssuer(exampleOrg, "1", badSigner{wit1, other.Public(), nil}, nil))(t)
	_, err = liar.Issue(web, wk.Public())
	require.ErrorContains(t, err, "no validator would accept the token: the signature does not match the key")

	big := must.Get(witsvid.NewIssuer(exampleOrg, strings.Repeat("k", maxSize), wit1, nil))(t)
	_, err = big.Issue(web, wk.Public())
	require.ErrorIs(t, err, spiffe.ErrTooLarge)
}

func TestNewSVID(t *testing.T) {
	t.Parallel()
	token := baseToken()
	s := must.Get(witsvid.NewSVID(token, wk))(t)
	call := witsvid.Call{Target: vectorTarget}
	sent, proof := prove(t, s, atNow().Now, call)
	assert.Equal(t, token, sent)
	v := newValidator(t, wit1Bundle(t), atNow())
	must.Get(v.Validate(sent, proof, call))(t)

	_, err := witsvid.NewSVID(token, other)
	require.EqualError(t, err, `witsvid: SVID of "`+webID+`": the private key is not the one that the token confirms`)
	_, err = witsvid.NewSVID(token, nil)
	require.ErrorContains(t, err, "no key")
	_, err = witsvid.NewSVID(token+".", wk)
	assert.Equal(t, "malformed WIT-1", outcome(t, err))
}

// Neither keys nor tokens show, however a value is printed.
func TestNothingPrints(t *testing.T) {
	t.Parallel()
	token := baseToken()
	s := must.Get(witsvid.NewSVID(token, wk))(t)
	i := newIssuer(t, nil)
	p := proverOf(s)
	tr := must.Get(witsvid.NewTransport(p, nil))(t)
	proof, err := newValidator(t, bundleOf(t, wit1), atNow()).Validate(token, proofFor(token, "1"), witsvid.Call{Target: vectorTarget})
	require.NoError(t, err)
	for v, want := range map[any]string{
		s: "witsvid.SVID(" + webID + ")", i: `witsvid.Issuer(example.org, ES256, "wit-1")`, &witsvid.SVID{}: "[redacted]", &witsvid.Issuer{}: "[redacted]",
	} {
		assert.Equal(t, want, fmt.Sprint(v))
		assert.Equal(t, want, fmt.Sprintf("%#v", v))
	}

	var out strings.Builder
	log := slog.New(slog.NewTextHandler(&out, nil))
	wkScalar := must.Get(wk.Bytes())(t)
	witScalar := must.Get(wit1.Bytes())(t)
	for _, v := range []any{s, i, p, *p, tr, proof, struct{ V any }{s}, struct{ V any }{i}, struct{ V any }{p}, struct{ V any }{tr}} {
		log.Info("x", "v", v)
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
			fmt.Fprintf(&out, verb+"\n", v)
		}
		if data, err := json.Marshal(v); err == nil {
			out.Write(data)
		}
	}
	for _, secret := range []string{
		strings.Split(token, ".")[2], fmt.Sprintf("%x", wkScalar), fmt.Sprintf("%x", witScalar),
		new(big.Int).SetBytes(wkScalar).String(), new(big.Int).SetBytes(witScalar).String(),
	} {
		assert.NotContains(t, out.String(), secret)
	}
}

// TestSentinels branches on errors as a program does.
func TestSentinels(t *testing.T) {
	t.Parallel()
	call := witsvid.Call{Target: vectorTarget}
	token := baseToken()
	v := newValidator(t, wit1Bundle(t), atNow(func(o *witsvid.ValidatorOptions) { o.Proofs = 1 }))
	_, malformed := v.Validate("x", "x", call)
	old := sign(tokenHeader, claims(webSubject, `"exp":1767225600`, goodCNF()), wit1)
	_, expired := v.Validate(old, proofFor(old, "1"), call)
	must.Get(v.Validate(token, proofFor(token, "1"), call))(t)
	_, replayed := v.Validate(token, proofFor(token, "1"), call)
	_, full := v.Validate(token, proofFor(token, "2"), call)
	down := sourceFunc(func(spiffe.TrustDomain) (*spiffe.Bundle, error) { return nil, errors.New("down") })
	_, unavailable := newValidator(t, down, atNow()).Validate(token, proofFor(token, "1"), call)
	picky, err := witsvid.NewValidator(wit1Bundle(t), spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/other")), atNow())
	require.NoError(t, err)
	_, denied := picky.Validate(token, proofFor(token, "1"), call)
	for _, c := range []struct {
		err  error
		want error // nil for none of the sentinels
	}{
		{malformed, nil}, {expired, nil}, {replayed, nil}, {full, witsvid.ErrUnavailable}, {unavailable, witsvid.ErrUnavailable}, {denied, spiffe.ErrDenied},
	} {
		for _, s := range []error{witsvid.ErrUnavailable, spiffe.ErrDenied} {
			assert.Equal(t, s == c.want, errors.Is(c.err, s), "%v is %v", c.err, s)
		}
	}
}

// An Issuer answers a Workload API with a new key each time.
func TestIssueWITSVID(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WIT-52")
	i := newIssuer(t, nil)
	token, key := must.Get2(i.IssueWITSVID(t.Context(), spiffe.MustParseID(webID), "hint"))(t)
	must.Get(witsvid.NewSVID(token, key))(t)
	u := must.Get(witsvid.ParseUnverified(token))(t)
	assert.Equal(t, webID, u.ID.String())
	assert.WithinDuration(t, time.Now().Add(time.Hour), u.Expires, 5*time.Second)
	_, second := must.Get2(i.IssueWITSVID(t.Context(), spiffe.MustParseID(webID), "hint"))(t)
	assert.False(t, key.(*ecdsa.PrivateKey).Equal(second), "a new key for each token")
	token, key, err := i.IssueWITSVID(t.Context(), spiffe.MustParseID("spiffe://other.test/web"), "")
	require.ErrorContains(t, err, "the ID is not in")
	assert.Empty(t, token)
	assert.Nil(t, key)
}

func TestRevision(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "STAB-3")
	doc := must.Get(os.ReadFile("witsvid.go"))(t)
	assert.Contains(t, string(doc), "665a28f3253ecdce59f26f3ef29c0d6408b37c3d")
	assert.Contains(t, string(doc), "draft-ietf-wimse-wpt-01")
}
