package spiffe_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
)

// issuerKeys are the members of two keys of an issuer: an EC key and an RSA key, without "kid".
var issuerKeys = sync.OnceValues(func() (ec, rsaKey string) {
	b64 := base64.RawURLEncoding.EncodeToString
	k := must.Do(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	point := must.Do(k.PublicKey.Bytes())
	r := bundleRSA()
	return fmt.Sprintf(`"kty":"EC","crv":"P-256","x":%q,"y":%q`, b64(point[1:33]), b64(point[33:])),
		fmt.Sprintf(`"kty":"RSA","n":%q,"e":%q`, b64(r.N.Bytes()), b64(big.NewInt(int64(r.E)).Bytes()))
})

func TestParseJWKS(t *testing.T) {
	t.Parallel()
	td := spiffe.MustParseTrustDomain("example.org")
	ec, rsaKey := issuerKeys()
	set := func(keys ...string) string { return `{"keys":[` + strings.Join(keys, ",") + `]}` }
	key := func(members, more string) string { return `{` + members + `,` + more + `}` }
	for name, test := range map[string]struct {
		doc     string
		want    []string
		skipped string // in the reason for the one that is skipped
		err     string
	}{
		"without use":                {set(key(ec, `"kid":"1"`)), []string{"1"}, "", ""},
		"sig":                        {set(key(ec, `"kid":"1","use":"sig","alg":"ES256"`)), []string{"1"}, "", ""},
		"of SPIFFE":                  {set(key(ec, `"kid":"1","use":"jwt-svid"`)), []string{"1"}, "", ""},
		"two":                        {set(key(ec, `"kid":"1"`), key(rsaKey, `"kid":"2","alg":"PS512","use":"sig"`)), []string{"1", "2"}, "", ""},
		"key_ops":                    {set(key(ec, `"kid":"1","key_ops":["sign","verify"]`)), []string{"1"}, "", ""},
		"members of certificates":    {set(key(rsaKey, `"kid":"1","x5c":["AA=="],"x5t":"AA"`)), []string{"1"}, "", ""},
		"with sequence and hint":     {`{"spiffe_sequence":-1,"spiffe_refresh_hint":"x",` + set(key(ec, `"kid":"1"`))[1:], []string{"1"}, "", ""},
		"none":                       {set(), nil, "", ""},
		"enc":                        {set(key(rsaKey, `"kid":"1","use":"enc"`)), nil, `"use" is missing or unknown: "enc"`, ""},
		"Sig":                        {set(key(rsaKey, `"kid":"1","use":"Sig"`)), nil, `"Sig"`, ""},
		"an empty use":               {set(key(rsaKey, `"kid":"1","use":""`)), nil, `unknown: ""`, ""},
		"use is a number":            {set(key(rsaKey, `"kid":"1","use":1`)), nil, `"use" is not a string`, ""},
		"use is null":                {set(key(rsaKey, `"kid":"1","use":null`)), nil, `"use" is not a string`, ""},
		"x509-svid":                  {set(key(ec, `"kid":"1","use":"x509-svid"`)), nil, "unknown", ""},
		"wit-svid":                   {set(key(ec, `"kid":"1","use":"wit-svid"`)), nil, "unknown", ""},
		"a secret key":               {set(key(ec, `"kid":"1","d":"AA"`)), nil, "secret key", ""},
		"a symmetric key":            {set(`{"kty":"oct","k":"AAAA","kid":"1"}`), nil, "secret key", ""},
		"not to verify":              {set(key(ec, `"kid":"1","key_ops":["encrypt"]`)), nil, "verify", ""},
		"key_ops is a text":          {set(key(ec, `"kid":"1","key_ops":"verify"`)), nil, "verify", ""},
		"alg for encryption":         {set(key(rsaKey, `"kid":"1","alg":"RSA-OAEP"`)), nil, "RSA-OAEP", ""},
		"alg of another key":         {set(key(ec, `"kid":"1","alg":"RS256"`)), nil, "RS256", ""},
		"alg of another curve":       {set(key(ec, `"kid":"1","alg":"ES384"`)), nil, "ES384", ""},
		"alg none":                   {set(key(ec, `"kid":"1","alg":"none"`)), nil, "none", ""},
		"alg is empty":               {set(key(ec, `"kid":"1","alg":""`)), nil, `"alg"`, ""},
		"alg is a number":            {set(key(ec, `"kid":"1","alg":1`)), nil, `"alg" is not a string`, ""},
		"without a key ID":           {set(`{` + ec + `}`), nil, `"kid" is missing`, ""},
		"Ed25519":                    {set(`{"kty":"OKP","crv":"Ed25519","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo","kid":"1"}`), nil, "no algorithm", ""},
		"a point not on the curve":   {set(`{"kty":"EC","crv":"P-256","x":"` + strings.Repeat("A", 43) + `","y":"` + strings.Repeat("A", 43) + `","kid":"1"}`), nil, "curve", ""},
		"no object":                  {set(`1`), nil, "not an object", ""},
		"one key ID, two keys":       {set(key(ec, `"kid":"1"`), key(rsaKey, `"kid":"1"`)), nil, "", "two different keys"},
		"a member twice":             {set(key(ec, `"kid":"1","use":"enc","use":"sig"`)), nil, "", "twice"},
		"no keys":                    {`{}`, nil, "", `"keys" is missing`},
		"keys is an object":          {`{"keys":{}}`, nil, "", "not an array"},
		"an array":                   {`[]`, nil, "", "not a JSON object"},
		"not JSON":                   {`{`, nil, "", "not JSON"},
		"empty":                      {``, nil, "", "not a JSON object"},
		"an HTML page":               {`<html>`, nil, "", "not a JSON object"},
		"something behind":           {set() + "{}", nil, "", "follows"},
		"too many":                   {set(slices.Repeat([]string{"0"}, jws.MaxSetKeys+1)...), nil, "", "more than 1000 keys"},
		"too large":                  {strings.Repeat(" ", jws.MaxSetSize) + "{}", nil, "", "longer than"},
		"keys of the other spelling": {`{"Keys":[]}`, nil, "", `"keys" is missing`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, err := spiffe.ParseJWKS(td, []byte(test.doc))
			if test.err != "" {
				require.ErrorContains(t, err, test.err)
				require.ErrorContains(t, err, `JWK Set of "example.org"`)
				var pe *spiffe.ParseError
				require.ErrorAs(t, err, &pe)
				return
			}
			require.NoError(t, err)
			assert.Equal(t, td, b.TrustDomain())
			assert.Equal(t, test.want, slices.Sorted(maps.Keys(maps.Collect(b.JWTAuthorities()))))
			assert.Empty(t, slices.Collect(b.X509Authorities()))
			_, has := b.Sequence()
			assert.False(t, has)
			_, has = b.RefreshHint()
			assert.False(t, has)
			if test.skipped == "" {
				assert.Empty(t, b.Skipped())
				return
			}
			require.Len(t, b.Skipped(), 1)
			assert.ErrorContains(t, b.Skipped()[0], test.skipped)
		})
	}
	_, err := spiffe.ParseJWKS(spiffe.TrustDomain{}, []byte(`{"keys":[]}`))
	require.ErrorIs(t, err, spiffe.ErrZero)
	// A bundle document does not take what a JWK Set may have.
	b := must.Get(spiffe.ParseBundle(td, []byte(set(key(ec, `"kid":"1","use":"sig"`), key(ec, `"kid":"2"`)))))(t)
	assert.Empty(t, maps.Collect(b.JWTAuthorities()))
	assert.Len(t, b.Skipped(), 2)
	// Nor does it ask for what a JWK Set is asked for.
	b = must.Get(spiffe.ParseBundle(td, []byte(set(key(ec, `"kid":"1","use":"jwt-svid","alg":"x","key_ops":[]`)))))(t)
	assert.Len(t, maps.Collect(b.JWTAuthorities()), 1)
}

// The use decides which keys are WIT authorities: missing it may be, as the Workload API sends them, but not another.
func TestParseJWKSWIT(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-62", "WAPI-16", "WIT-62", "AMB-21")
	td := spiffe.MustParseTrustDomain("example.org")
	ec, _ := issuerKeys()
	for member, taken := range map[string]bool{
		`"kid":"1"`: true, `"kid":"1","use":"wit-svid"`: true,
		`"kid":"1","use":"sig"`: true, `"kid":"1","alg":"ES256"`: true,
		`"kid":"1","use":"jwt-svid"`: false, `"kid":"1","use":"x509-svid"`: false, `"kid":"1","use":"WIT-SVID"`: false,
		`"kid":"1","use":"enc"`: false, `"kid":"1","use":""`: false,
		`"kid":"1","d":"AA"`: false, `"kid":"1","alg":"EdDSA"`: false,
		`"kid":""`: false, `"use":"wit-svid"`: false,
	} {
		b, err := spiffe.ParseJWKSWIT(td, []byte(`{"keys":[{`+ec+`,`+member+`}]}`))
		require.NoError(t, err, member)
		_, there := b.Contents().WITAuthorities["1"]
		assert.Equal(t, taken, there, member)
		assert.Equal(t, !taken, len(b.Skipped()) == 1, member)
		assert.Empty(t, b.Contents().JWTAuthorities, member)
	}
	_, err := spiffe.ParseJWKSWIT(spiffe.TrustDomain{}, []byte(`{"keys":[]}`))
	require.ErrorIs(t, err, spiffe.ErrZero)
}

// FuzzParseJWKS compares with what encoding/json sees: a key is taken only if its use permits that, and what is taken
// survives as a bundle document.
func FuzzParseJWKS(f *testing.F) {
	ec, rsaKey := issuerKeys()
	f.Add(`{"keys":[{` + ec + `,"kid":"1","use":"sig"},{` + rsaKey + `,"kid":"2","alg":"RS256"},{"use":"enc","x":[{"use":1}]},{},1]}`)
	f.Add(` { "keys" : [ { "use" : "si\u0067" , ` + ec + `, "kid" : "\u0022" } ] } `)
	f.Add(`{"keys":[{` + ec + `,"kid":"1","key_ops":["verify"],"d":"AA"}],"use":"sig"}`)
	td := spiffe.MustParseTrustDomain("example.org")
	f.Fuzz(func(t *testing.T, in string) {
		b, err := spiffe.ParseJWKS(td, []byte(in))
		if err != nil {
			return
		}
		var doc struct{ Keys []json.RawMessage }
		require.NoError(t, json.Unmarshal([]byte(in), &doc))
		ids := map[string]bool{}
		for _, raw := range doc.Keys {
			var k map[string]any
			if json.Unmarshal(raw, &k) != nil || k == nil {
				continue
			}
			use, there := k["use"]
			_, secret := k["d"]
			if id, ok := k["kid"].(string); ok && !secret && (!there || use == "sig" || use == "jwt-svid") {
				ids[id] = true
			}
		}
		for id := range b.JWTAuthorities() {
			require.True(t, ids[id], "%q", id)
		}
		again := must.Get(b.Marshal())(t)
		same := must.Get(spiffe.ParseBundle(td, again))(t)
		require.True(t, b.Equal(same))
	})
}

func TestMarshalJWKS(t *testing.T) {
	t.Parallel()
	b := mustBundle(t, bundleTD, fullContents())
	doc := must.Get(b.MarshalJWKS())(t)
	assert.NotContains(t, string(doc), `"use"`)
	back := must.Get(spiffe.ParseJWKS(bundleTD, doc))(t)
	assert.Equal(t, maps.Collect(b.JWTAuthorities()), maps.Collect(back.JWTAuthorities()))
	doc = must.Get(mustBundle(t, bundleTD, spiffe.BundleContents{}).MarshalJWKS())(t)
	assert.JSONEq(t, `{"keys":[]}`, string(doc))
}
