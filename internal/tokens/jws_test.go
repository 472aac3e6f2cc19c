package tokens_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/base64"
	"encoding/json"
	"math/big"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/tokens/jws"
)

var rsa2048 = sync.OnceValue(func() *rsa.PrivateKey {
	return must.Do(rsa.GenerateKey(rand.Reader, 2048))
})

func ecKey(t testing.TB, c elliptic.Curve) *ecdsa.PrivateKey {
	t.Helper()
	return must.Get(ecdsa.GenerateKey(c, rand.Reader))(t)
}

func code(t testing.TB, err error) jws.Code {
	t.Helper()
	e := must.As[*jws.Error](err)(t)
	assert.NotEmpty(t, e.Reason)
	return e.Code
}

func TestJWSAlgorithms(t *testing.T) {
	t.Parallel()
	keys := []crypto.PublicKey{ecKey(t, elliptic.P256()).Public(), ecKey(t, elliptic.P384()).Public(), ecKey(t, elliptic.P521()).Public(), rsa2048().Public()}
	for a := jws.ES256; a <= jws.PS512; a++ {
		named, ok := jws.ParseAlgorithm(a.String())
		assert.True(t, ok)
		assert.Equal(t, a, named)
		for i, key := range keys {
			assert.Equal(t, i == min(int(a-jws.ES256), 3), a.Fits(key), "%v %T %d", a, key, i)
		}
		assert.True(t, strings.HasSuffix(a.String(), strings.TrimPrefix(a.Hash().String(), "SHA-")), "%v %v", a, a.Hash())
	}
	for _, name := range []string{"", "none", "None", "es256", "ES256 ", "EdDSA", "ES256K", "HS256", "RS1", "Algorithm(0)"} {
		a, ok := jws.ParseAlgorithm(name)
		assert.False(t, ok, name)
		assert.Zero(t, a, name)
	}
	assert.Equal(t, "Algorithm(0)", jws.Algorithm(0).String())
	assert.Equal(t, "Algorithm(12)", jws.Algorithm(12).String())
	assert.False(t, jws.Algorithm(0).Fits(rsa2048().Public()))
	assert.False(t, jws.Algorithm(12).Fits(rsa2048().Public()))
	assert.False(t, jws.ES256.Fits(&ecdsa.PublicKey{}))
}

// RSA keys that look like one and are not, or whose use costs too much.
func TestJWSUnsoundRSA(t *testing.T) {
	t.Parallel()
	good := rsa2048().PublicKey
	text := func(b []byte) []byte { return base64.RawURLEncoding.AppendEncode(nil, b) }
	n, e := good.N.Bytes(), jws.Exponent(&good)
	even := bytes.Clone(n)
	even[len(even)-1] &^= 1
	for name, k := range map[string]jws.JWK{
		"even":                    {N: text(even), E: text(e)},
		"zero in front of n":      {N: text(append([]byte{0}, n...)), E: text(e)},
		"zero in front of e":      {N: text(n), E: text(append([]byte{0}, e...))},
		"short":                   {N: text(n[:len(n)-1]), E: text(e)},
		"of 8200 bits":            {N: text(append(bytes.Repeat([]byte{0xff}, 1025-len(n)), n...)), E: text(e)},
		"n is empty":              {E: text(e)},
		"e is empty":              {N: text(n)},
		"e is 1":                  {N: text(n), E: text([]byte{1})},
		"e is even":               {N: text(n), E: text([]byte{4})},
		"e is 2³¹+1":              {N: text(n), E: text([]byte{0x80, 0, 0, 1})},
		"e has five bytes":        {N: text(n), E: text([]byte{1, 0, 0, 0, 1})},
		"padding":                 {N: append(text(n), '='), E: text(e)},
		"a line break":            {N: append(text(n), '\n'), E: text(e)},
		"a line break in the way": {N: append([]byte{'\n'}, text(n)[1:]...), E: text(e)},
	} {
		k.Kty = []byte("RSA")
		key, reason := k.PublicKey()
		assert.NotEmpty(t, reason, name)
		assert.Nil(t, key, name)
	}
	k := jws.JWK{Kty: []byte("RSA"), N: text(n), E: text([]byte{0x7f, 0xff, 0xff, 0xff})}
	_, reason := k.PublicKey()
	assert.Empty(t, reason, "the largest e")
}

func TestJWSDefaultAlgorithm(t *testing.T) {
	t.Parallel()
	_, ed := must.Get2(ed25519.GenerateKey(rand.Reader))(t)
	for want, key := range map[jws.Algorithm]crypto.PublicKey{
		jws.ES256: ecKey(t, elliptic.P256()).Public(), jws.ES384: ecKey(t, elliptic.P384()).Public(),
		jws.ES512: ecKey(t, elliptic.P521()).Public(), jws.RS256: rsa2048().Public(),
	} {
		got, ok := jws.DefaultAlgorithm(key)
		assert.True(t, ok)
		assert.Equal(t, want, got)
	}
	for _, key := range []crypto.PublicKey{
		nil, ed.Public(), ecKey(t, elliptic.P224()).Public(), (*ecdsa.PublicKey)(nil), &ecdsa.PublicKey{}, (*rsa.PublicKey)(nil), &rsa.PublicKey{},
		&rsa.PublicKey{N: new(big.Int).Lsh(big.NewInt(1), 2046), E: 3}, &rsa.PublicKey{N: new(big.Int).Lsh(big.NewInt(1), 8192), E: 3},
	} {
		_, ok := jws.DefaultAlgorithm(key)
		assert.False(t, ok, "%T", key)
	}
}

func TestJWSParseRefuses(t *testing.T) {
	t.Parallel()
	b64 := base64.RawURLEncoding.EncodeToString
	h, p, s := b64([]byte(`{"alg":"ES256"}`)), b64([]byte(`{}`)), b64([]byte("sig"))
	ok := must.Get(jws.Parse(h + "." + p + "." + s))(t)
	assert.Equal(t, "sig", string(ok.Signature))
	empty := must.Get(jws.Parse(".."))(t)
	assert.Empty(t, empty.Header)

	for token, want := range map[string]jws.Code{
		"":          jws.Shape,
		h:           jws.Shape,
		h + "." + p: jws.Shape,
		h + "." + p + "." + s + "." + s + "." + s:            jws.Shape,
		`{"payload":"e30","protected":"e30","signature":""}`: jws.Shape,
		" " + h + "." + p + "." + s:                          jws.Encoding,
		h + "." + p + "." + s + "=":                          jws.Encoding,
		h + "." + p + "." + s + "\n":                         jws.Encoding,
		h + "." + p[:1] + "\r" + p[1:] + "." + s:             jws.Encoding,
		h + "." + p + ".A":                                   jws.Encoding,
		h + "." + p + ".AB":                                  jws.Encoding, // bits that mean nothing
		h + "." + p + ".A+":                                  jws.Encoding,
		h + ".é." + s:                                        jws.Encoding,
		h + "." + p + "." + strings.Repeat("A", jws.MaxSize): jws.Size,
	} {
		_, err := jws.Parse(token)
		assert.Equal(t, want, code(t, err), "%.80q", token)
		assert.NotContains(t, err.Error(), h, "errors do not carry the token")
	}
}

func TestJWSParseHeader(t *testing.T) {
	t.Parallel()
	h := must.Get(jws.ParseHeader([]byte(`{"crit":["x"],"typ":"t","alg":"PS384","x":{},"kid":"ké"}`)))(t)
	assert.Equal(t, jws.Header{Algorithm: jws.PS384, KeyID: "ké", Type: "t", HasKeyID: true, HasType: true, Extra: []string{"crit", "x"}}, h)
	h = must.Get(jws.ParseHeader([]byte(`{"alg":"ES256","kid":""}`)))(t)
	assert.Equal(t, jws.Header{Algorithm: jws.ES256, HasKeyID: true}, h)
	for doc, want := range map[string]string{
		`{"alg":"ES256","kid":7}`: "kid", `{"alg":"ES256","kid":null}`: "kid", `{"alg":"ES256","typ":null}`: "typ", `{"alg":"ES256","typ":{},"kid":[]}`: "kid",
	} {
		h = must.Get(jws.ParseHeader([]byte(doc)))(t)
		assert.Equal(t, want, h.NotText, doc)
	}

	for doc, want := range map[string]jws.Code{
		``:                              jws.Malformed,
		`[]`:                            jws.Malformed,
		`"ES256"`:                       jws.Malformed,
		`{"alg":"ES256"} {}`:            jws.Malformed,
		`{"alg":"ES256","alg":"ES256"}`: jws.Malformed,
		`{}`:                            jws.Forbidden,
		`{"alg":7}`:                     jws.Forbidden,
		`{"alg":"none"}`:                jws.Forbidden,
		`{"Alg":"ES256"}`:               jws.Forbidden,
		`{"alg":"EdDSA","kid":7}`:       jws.Forbidden, // before all else
	} {
		_, err := jws.ParseHeader([]byte(doc))
		assert.Equal(t, want, code(t, err), doc)
	}
}

func TestJWSKeys(t *testing.T) {
	t.Parallel()
	for _, key := range []crypto.PublicKey{
		ecKey(t, elliptic.P256()).Public(), ecKey(t, elliptic.P384()).Public(), ecKey(t, elliptic.P521()).Public(), rsa2048().Public(),
	} {
		assert.Empty(t, jws.Unfit(key))
		members, ok := jws.AppendKey(nil, key)
		require.True(t, ok)
		var doc map[string]string
		require.NoError(t, json.Unmarshal([]byte("{"+string(members)+"}"), &doc))
		k := jws.JWK{Kty: []byte(doc["kty"]), Crv: []byte(doc["crv"]), X: []byte(doc["x"]), Y: []byte(doc["y"]), N: []byte(doc["n"]), E: []byte(doc["e"])}
		got, reason := k.PublicKey()
		require.Empty(t, reason)
		assert.Equal(t, key, got)
	}
	for _, key := range []crypto.PublicKey{nil, ecKey(t, elliptic.P224()).Public(), "text"} {
		assert.NotEmpty(t, jws.Unfit(key))
		_, ok := jws.AppendKey(nil, key)
		assert.False(t, ok)
	}
	// Ed25519 can be in a JWK, and no algorithm takes it.
	pub, _ := must.Get2(ed25519.GenerateKey(rand.Reader))(t)
	_, ok := jws.AppendKey(nil, pub)
	assert.True(t, ok)
	assert.NotEmpty(t, jws.Unfit(pub))
	_, reason := (&jws.JWK{Kty: []byte("OKP")}).PublicKey()
	assert.NotEmpty(t, reason)
}

func TestJWSNumericDate(t *testing.T) {
	t.Parallel()
	first, last := time.Unix(-62135596800, 0), time.Unix(253402300799, 0)
	for text, want := range map[string]time.Time{
		"1767225600":           time.Unix(1767225600, 0),
		"0":                    time.Unix(0, 0),
		"-1":                   time.Unix(-1, 0),
		"1767225600.5":         time.Unix(1767225600, 5e8),
		"1.7672256e9":          time.Unix(1767225600, 0),
		"9223372036854775807":  last,
		"99999999999999999999": last,
		"1e400":                last,
		"-1e400":               first,
		"-9223372036854775808": first,
	} {
		assert.True(t, want.Equal(jws.NumericDate(text)), "%s: %v", text, jws.NumericDate(text))
	}
}

func FuzzJWSParse(f *testing.F) {
	for _, s := range []string{"", "..", "eyJhbGciOiJFUzI1NiJ9.e30.AA", "eyJhbGciOiJFUzI1NiJ9.e30.AA=", "a.b.c.d.e"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, token string) {
		p, err := jws.Parse(token)
		if err != nil {
			code(t, err)
			return
		}
		enc := base64.RawURLEncoding.EncodeToString
		require.Equal(t, token, enc(p.Header)+"."+enc(p.Payload)+"."+enc(p.Signature), "one token, one spelling")
		if _, err := jws.ParseHeader(p.Header); err == nil {
			require.True(t, json.Valid(p.Header))
		}
	})
}
