package jwtsvid_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/fips140"
	"crypto/hmac"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/asn1"
	"encoding/base64"
	"encoding/pem"
	"flag"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

var updateTokens = flag.Bool("update-jwtsvid", false, "write the keys, bundles and tokens of testdata anew")

// now is NOW of the vectors, 2026-01-01T00:00:00Z.
const now = 1767225600

const (
	baseHeader = `{"alg":"ES256","kid":"jwt-1","typ":"JWT"}`
	webSubject = `"sub":"spiffe://example.org/ns/prod/sa/web"`
	basePay    = `{` + webSubject + `,"aud":["db"],"exp":1767225900,"iat":1767225600}`
)

func ecKey(curve elliptic.Curve, label string) *ecdsa.PrivateKey {
	size := (curve.Params().BitSize + 7) / 8
	scalar := make([]byte, size)
	sum := sha256.Sum256([]byte(label))
	copy(scalar[max(0, size-len(sum)):], sum[:])
	return must.Do(ecdsa.ParseRawPrivateKey(curve, scalar))
}

// material are the keys of the vectors. Those on curves follow from labels, the RSA keys are files.
type material struct {
	jwt1, jwt3, jwt4, jwtx, wit1, kat *ecdsa.PrivateKey
	jwt2, weak                        *rsa.PrivateKey
}

func newMaterial(t testing.TB) material {
	t.Helper()
	return material{
		jwt1: ecKey(elliptic.P256(), "svidkit-jwtsvid-jwt1"),
		jwt2: rsaKey(t, "jwt-2", 2048),
		jwt3: ecKey(elliptic.P384(), "svidkit-jwtsvid-jwt3"),
		jwt4: ecKey(elliptic.P521(), "svidkit-jwtsvid-jwt4"),
		jwtx: ecKey(elliptic.P256(), "svidkit-jwtsvid-jwtx"),
		wit1: ecKey(elliptic.P256(), "svidkit-jwtsvid-wit1"),
		kat:  ecKey(elliptic.P256(), "spiffe-kat-jwt1"),
		weak: rsaKey(t, "weak", 1024),
	}
}

func rsaKey(t testing.TB, name string, bits int) *rsa.PrivateKey {
	t.Helper()
	file := filepath.Join("testdata", "keys", name+".pem")
	if _, err := os.Stat(file); err != nil && *updateTokens {
		k := must.Get(rsa.GenerateKey(rand.Reader, bits))(t)
		block := &pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(k)}
		require.NoError(t, os.WriteFile(file, pem.EncodeToMemory(block), 0o644))
	}
	data := must.Get(os.ReadFile(file))(t)
	block, _ := pem.Decode(data)
	require.NotNil(t, block)
	return must.Get(x509.ParsePKCS1PrivateKey(block.Bytes))(t)
}

var b64 = base64.RawURLEncoding.EncodeToString

// sign makes a token in the plainest way, without the code under test.
func sign(header, payload string, alg string, key crypto.Signer) string {
	input := b64([]byte(header)) + "." + b64([]byte(payload))
	return input + "." + b64(signature(input, alg, key))
}

func signature(input, alg string, key crypto.Signer) []byte {
	hash := map[string]crypto.Hash{"256": crypto.SHA256, "384": crypto.SHA384, "512": crypto.SHA512}[alg[2:]]
	h := hash.New()
	h.Write([]byte(input))
	opts := crypto.SignerOpts(hash)
	random := rand.Reader
	switch alg[:2] {
	case "PS":
		opts = &rsa.PSSOptions{SaltLength: rsa.PSSSaltLengthEqualsHash, Hash: hash}
	case "ES":
		random = nil // by RFC 6979, so that the same token comes out every time
	}
	var sig []byte
	fips140.WithoutEnforcement(func() { // some vectors have keys that it would not sign with
		var err error
		if sig, err = key.Sign(random, h.Sum(nil), opts); err != nil {
			panic(err)
		}
	})
	if k, ok := key.(*ecdsa.PrivateKey); ok {
		var v struct{ R, S *big.Int }
		if _, err := asn1.Unmarshal(sig, &v); err != nil {
			panic(err)
		}
		size := (k.Params().BitSize + 7) / 8
		sig = make([]byte, 2*size)
		v.R.FillBytes(sig[:size])
		v.S.FillBytes(sig[size:])
	}
	return sig
}

// vector is one file of testdata/vectors.
type vector struct {
	id      string
	rule    string // that the error names, or that an accepted token proves
	covers  string // what else of the conformance table it proves
	expect  string // "accept" or "reject"
	reason  string // of the error
	peer    string // the proved ID, if it is not the usual one
	bundles string // a set of bundles, if it is not the usual one
	leeway  string // if it is not the usual one
	why     string
	tokens  []string
}

func (v *vector) fields() []struct {
	name string
	to   *string
} {
	return []struct {
		name string
		to   *string
	}{
		{"id", &v.id},
		{"rule", &v.rule},
		{"covers", &v.covers},
		{"expect", &v.expect},
		{"reason", &v.reason},
		{"peer", &v.peer},
		{"bundles", &v.bundles},
		{"leeway", &v.leeway},
		{"why", &v.why},
	}
}

// text has a header, and the tokens in quotes, one a line.
func (v vector) text() string {
	var b strings.Builder
	for _, f := range v.fields() {
		if *f.to != "" {
			fmt.Fprintf(&b, "%s: %s\n", f.name, *f.to)
		}
	}
	b.WriteString("\n")
	for _, t := range v.tokens {
		b.WriteString(strconv.Quote(t) + "\n")
	}
	return b.String()
}

func readVector(t testing.TB, file string) vector {
	t.Helper()
	data := must.Get(os.ReadFile(file))(t)
	var v vector
	head, body, ok := strings.Cut(string(data), "\n\n")
	require.True(t, ok, file)
	for line := range strings.SplitSeq(head, "\n") {
		name, value, ok := strings.Cut(line, ": ")
		require.True(t, ok, "%s: %q", file, line)
		known := false
		for _, f := range v.fields() {
			if f.name == name {
				*f.to, known = value, true
			}
		}
		require.True(t, known, "%s: %q", file, line)
	}
	for line := range strings.Lines(body) {
		token, err := strconv.Unquote(strings.TrimSpace(line))
		require.NoError(t, err, file)
		v.tokens = append(v.tokens, token)
	}
	require.NotEmpty(t, v.tokens, file)
	require.Equal(t, v.id+".txt", filepath.Base(file))
	return v
}

// vectors builds the table of the conformance document.
func (m material) vectors() []vector {
	pay := func(old, replacement string) string {
		if !strings.Contains(basePay, old) {
			panic(old)
		}
		return sign(baseHeader, strings.Replace(basePay, old, replacement, 1), "ES256", m.jwt1)
	}
	head := func(header string) string { return sign(header, basePay, "ES256", m.jwt1) }
	base := sign(baseHeader, basePay, "ES256", m.jwt1)
	input, sig := base[:strings.LastIndexByte(base, '.')], base[strings.LastIndexByte(base, '.')+1:]
	accept := func(id, rule, why string, tokens ...string) vector {
		return vector{id: id, rule: rule, expect: "accept", why: why, tokens: tokens}
	}
	reject := func(id, rule, reason, why, token string) vector {
		return vector{id: id, rule: rule, expect: "reject", reason: reason, why: why, tokens: []string{token}}
	}
	with := func(v vector, edit func(*vector)) vector { edit(&v); return v }
	const aud, exp = `"aud":["db"]`, `"exp":1767225900`

	all := []struct {
		alg, kid string
		key      crypto.Signer
	}{
		{"RS256", "jwt-2", m.jwt2},
		{"RS384", "jwt-2", m.jwt2},
		{"RS512", "jwt-2", m.jwt2},
		{"ES256", "jwt-1", m.jwt1},
		{"ES384", "jwt-3", m.jwt3},
		{"ES512", "jwt-4", m.jwt4},
		{"PS256", "jwt-2", m.jwt2},
		{"PS384", "jwt-2", m.jwt2},
		{"PS512", "jwt-2", m.jwt2},
	}
	var nine []string
	for _, a := range all {
		nine = append(nine, sign(fmt.Sprintf(`{"alg":%q,"kid":%q,"typ":"JWT"}`, a.alg, a.kid), basePay, a.alg, a.key))
	}

	hs := b64([]byte(`{"alg":"HS256","kid":"jwt-2"}`)) + "." + b64([]byte(basePay))
	mac := hmac.New(sha256.New, must.Do(x509.MarshalPKIXPublicKey(m.jwt2.Public())))
	mac.Write([]byte(hs))

	raw := must.Do(base64.RawURLEncoding.DecodeString(sig))
	r, s := new(big.Int).SetBytes(raw[:32]), new(big.Int).SetBytes(raw[32:])
	der := must.Do(asn1.Marshal(struct{ R, S *big.Int }{r, s}))

	admin := strings.Replace(basePay, "/ns/prod/sa/web", "/admin", 1)
	es384 := `{"alg":"ES384","kid":"jwt-1","typ":"JWT"}`
	point := must.Do(m.jwtx.PublicKey.Bytes())
	jwk := fmt.Sprintf(`{"alg":"ES256","kid":"jwt-1","typ":"JWT","jwk":{"kty":"EC","crv":"P-256","x":"%s","y":"%s"}}`, b64(point[1:33]), b64(point[33:]))
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	last := len(base) - 1

	return []vector{
		accept("JV-01", "JWT-26", "base", base),
		accept("JV-02", "JWT-14", "single string", pay(aud, `"aud":"db"`)),
		accept("JV-03", "JWT-14", "one of several", pay(aud, `"aud":["cache","db"]`)),
		reject("JV-04", "JWT-13", "audience", "not for this validator", pay(aud, `"aud":["cache"]`)),
		reject("JV-05", "JWT-12", "audience", "required", pay(aud+",", "")),
		reject("JV-06", "JWT-12", "audience", "at least one value", pay(aud, `"aud":[]`)),
		reject("JV-07", "JWT-13", "audience", "case-sensitive", pay(aud, `"aud":["DB"]`)),
		reject("JV-08", "JWT-13", "audience", "no prefix match", pay(aud, `"aud":["db2"]`)),
		reject("JV-09", "JWT-14", "audience", "strings only", pay(aud, `"aud":[42]`)),
		reject("JV-10", "JWT-18", "expired", "required", pay(exp+",", "")),
		reject("JV-11", "JWT-19", "expired", "expired beyond leeway", pay(exp, fmt.Sprintf(`"exp":%d`, now-3600))),
		accept("JV-12", "JWT-19", "inside 60 s leeway", pay(exp, fmt.Sprintf(`"exp":%d`, now-30))),
		with(reject("JV-13", "JWT-19", "expired", "on or after", pay(exp, fmt.Sprintf(`"exp":%d`, now))), func(v *vector) { v.leeway = "0s" }),
		reject("JV-14", "JWT-18", "expired", "NumericDate is a number", pay(exp, `"exp":"1767225900"`)),
		accept("JV-15", "JWT-19", "NumericDate may have a fraction", pay(exp, `"exp":1767225900.5`)),
		reject("JV-16", "JWT-22", "not yet valid", "not yet valid", pay(exp, fmt.Sprintf(exp+`,"nbf":%d`, now+600))),
		accept("JV-17", "JWT-22", "valid already", pay(exp, fmt.Sprintf(exp+`,"nbf":%d`, now-600))),
		accept("JV-18", "JWT-23", "no role in validation", pay(`"iat":1767225600`, fmt.Sprintf(`"iat":%d`, now+3600))),
		reject("JV-19", "JWT-11", "subject", "required", pay(webSubject+",", "")),
		reject("JV-20", "JWT-11", "subject", "not a SPIFFE ID", pay(webSubject, `"sub":"web"`)),
		reject("JV-21", "JWT-11", "subject", "upper case", pay("example.org", "Example.org")),
		with(reject("JV-22", "JWT-26", "signature", "key of the same kid exists there, signature does not match",
			pay("example.org/ns/prod/sa", "other.test")), func(v *vector) { v.covers = "JWT-29" }),
		reject("JV-23", "JWT-29", "unknown trust domain", "no bundle", pay("example.org/ns/prod/sa", "nowhere.test")),
		reject("JV-24", "JWT-4", "algorithm", "algorithm", b64([]byte(`{"alg":"none","kid":"jwt-1"}`))+"."+b64([]byte(basePay))+"."),
		reject("JV-25", "JWT-4", "algorithm", "algorithm confusion", hs+"."+b64(mac.Sum(nil))),
		reject("JV-26", "JWT-4", "algorithm", "not in the list", head(`{"alg":"EdDSA","kid":"jwt-1","typ":"JWT"}`)),
		reject("JV-27", "JWT-27", "unknown key", "key type mismatch", head(`{"alg":"RS256","kid":"jwt-1","typ":"JWT"}`)),
		reject("JV-28", "JWT-27", "unknown key", "curve mismatch", sign(es384, basePay, "ES384", m.jwt1)),
		accept("JV-29", "JWT-3", "all nine", nine...),
		accept("JV-30", "JWT-10", "optional", head(`{"alg":"ES256","kid":"jwt-1"}`)),
		accept("JV-31", "JWT-10", "permitted", head(`{"alg":"ES256","kid":"jwt-1","typ":"JOSE"}`)),
		reject("JV-32", "JWT-10", "header", "exact values only", head(`{"alg":"ES256","kid":"jwt-1","typ":"jwt"}`)),
		reject("JV-33", "JWT-10", "header", "a WIT is not a JWT-SVID", head(`{"alg":"ES256","kid":"jwt-1","typ":"wit+jwt"}`)),
		reject("JV-34", "JWT-10", "header", "OAuth access token", head(`{"alg":"ES256","kid":"jwt-1","typ":"at+jwt"}`)),
		accept("JV-35", "JWT-7", "optional; key found by trial", head(`{"alg":"ES256","typ":"JWT"}`)),
		reject("JV-36", "JWT-8", "unknown key", "no fallback", head(`{"alg":"ES256","kid":"nope","typ":"JWT"}`)),
		reject("JV-37", "JWT-8", "unknown key", "names no key", head(`{"alg":"ES256","kid":"","typ":"JWT"}`)),
		reject("JV-38", "JWT-6", "header", "extra member; never fetched", head(`{"alg":"ES256","kid":"jwt-1","typ":"JWT","jku":"https://example.org/keys"}`)),
		reject("JV-39", "JWT-6", "header", "embedded keys are never trusted", sign(jwk, basePay, "ES256", m.jwtx)),
		reject("JV-40", "JWT-6", "header", "RFC 7515", head(`{"alg":"ES256","kid":"jwt-1","typ":"JWT","crit":["x"],"x":1}`)),
		reject("JV-41", "JWT-6", "header", "extra member", head(`{"alg":"ES256","kid":"jwt-1","typ":"JWT","cty":"JWT"}`)),
		reject("JV-42", "JWT-1", "malformed", "compact only",
			fmt.Sprintf(`{"payload":%q,"protected":%q,"signature":%q}`, b64([]byte(basePay)), b64([]byte(baseHeader)), sig)),
		reject("JV-43", "JWT-1", "malformed", "two parts", input),
		reject("JV-44", "JWT-2", "malformed", "JWE shape", base+".AAAA.AAAA"),
		reject("JV-45", "JWT-26", "malformed", "base64url without padding", base+"=="),
		reject("JV-46", "JWT-26", "malformed", "leading space", " "+base),
		reject("JV-47", "JWT-26", "signature", "another payload", b64([]byte(baseHeader))+"."+b64([]byte(admin))+"."+sig),
		reject("JV-48", "JWT-28", "signature", "R and S, 64 bytes", input+"."+b64(der)),
		with(reject("JV-49", "JWT-8", "unknown key", "key of another use", sign(`{"alg":"ES256","kid":"wit-1","typ":"JWT"}`, basePay, "ES256", m.wit1)),
			func(v *vector) { v.covers = "JWT-30" }),
		reject("JV-50", "JWT-26", "malformed", "duplicate member", pay(webSubject, `"sub":"spiffe://example.org/admin",`+webSubject)),
		accept("JV-51", "JWT-24", "returned to the caller", pay(`"iat":`, `"role":"reader","scope":["a","b"],"iat":`)),
		with(reject("JV-52", "JWT-31", "unknown key", "domain does not do JWT-SVID", base), func(v *vector) { v.bundles = "no-jwt" }),
		with(reject("JV-53", "JWT-8", "unknown key", "RFC 7518 minimum", sign(`{"alg":"RS256","kid":"weak","typ":"JWT"}`, basePay, "RS256", m.weak)),
			func(v *vector) { v.bundles, v.covers = "weak", "JWT-27" }),
		func() vector {
			t := pay(`"iat":`, `"jti":"one","iat":`)
			return accept("JV-54", "JWT-25", "no uniqueness tracking required", t, t)
		}(),
		with(accept("JV-55", "JWT-11", "a path is for policies to ask for", pay("/ns/prod/sa/web", "")), func(v *vector) { v.peer = "spiffe://example.org" }),
		with(accept("JV-56", "JWT-29", "same kid, right domain", sign(baseHeader, strings.Replace(basePay, "example.org/ns/prod/sa", "other.test", 1), "ES256", m.jwtx)),
			func(v *vector) { v.peer = "spiffe://other.test/web" }),
		reject("JV-57", "JWT-13", "audience", "empty value never matches", pay(aud, `"aud":""`)),
		accept("JV-58", "JWT-13", "match present", pay(aud, `"aud":["db",""]`)),
		reject("JV-59", "JWT-10", "header", "set, but to neither value", head(`{"alg":"ES256","kid":"jwt-1","typ":null}`)),
		reject("JV-60", "JWT-26", "malformed", "duplicate member", head(`{"alg":"ES256","kid":"jwt-1","typ":"JWT","alg":"ES256"}`)),
		reject("JV-61", "JWT-26", "malformed", "a line break", base[:last-10]+"\n"+base[last-10:]),
		reject("JV-62", "JWT-26", "malformed", "canonical base64url only", base[:last]+string(alphabet[strings.IndexByte(alphabet, base[last])|1])),
	}
}

func (m material) bundles() map[string]string {
	doc := func(entries ...string) string { return `{"keys":[` + strings.Join(entries, ",") + "]}\n" }
	entry := func(use, kid string, key crypto.PublicKey) string {
		k, ok := key.(*rsa.PublicKey)
		if ok {
			return fmt.Sprintf(`{"use":%q,"kid":%q,"kty":"RSA","n":"%s","e":"AQAB"}`, use, kid, b64(k.N.Bytes()))
		}
		ec := key.(*ecdsa.PublicKey)
		point := must.Do(ec.Bytes())
		half := len(point) / 2
		return fmt.Sprintf(`{"use":%q,"kid":%q,"kty":"EC","crv":%q,"x":"%s","y":"%s"}`, use, kid, ec.Params().Name, b64(point[1:1+half]), b64(point[1+half:]))
	}
	const jwt, wit = "jwt-svid", "wit-svid"
	wit1 := entry(wit, "wit-1", m.wit1.Public())
	return map[string]string{
		"example.org": doc(entry(jwt, "jwt-1", m.jwt1.Public()), entry(jwt, "jwt-2", m.jwt2.Public()),
			entry(jwt, "jwt-3", m.jwt3.Public()), entry(jwt, "jwt-4", m.jwt4.Public()), wit1),
		"other.test": doc(entry(jwt, "jwt-1", m.jwtx.Public())),
		"no-jwt":     doc(wit1),
		"weak":       doc(entry(jwt, "jwt-1", m.jwt1.Public()), entry(jwt, "weak", m.weak.Public())),
	}
}

// What is on disk is what the table says; with -update-jwtsvid it is made so. Signatures of PSS have a
// random salt, so of those only what is signed is compared.
func TestVectorsOnDisk(t *testing.T) {
	t.Parallel()
	m := newMaterial(t)
	for name, doc := range m.bundles() {
		file := filepath.Join("testdata", "bundles", name+".json")
		if *updateTokens {
			require.NoError(t, os.WriteFile(file, []byte(doc), 0o644))
		}
		assert.Equal(t, doc, string(must.Do(os.ReadFile(file))), file)
	}
	for _, v := range m.vectors() {
		file := filepath.Join("testdata", "vectors", v.id+".txt")
		if _, err := os.Stat(file); *updateTokens && (err != nil || !bytes.Equal(signed(v), signed(readVector(t, file)))) {
			require.NoError(t, os.WriteFile(file, []byte(v.text()), 0o644))
		}
		assert.Equal(t, string(signed(v)), string(signed(readVector(t, file))), file)
	}
}

// signed is the text of v without the signatures that are not the same every time.
func signed(v vector) []byte {
	v.tokens = slices.Clone(v.tokens)
	for i, t := range v.tokens {
		head, _, _ := strings.Cut(t, ".")
		if text, err := base64.RawURLEncoding.DecodeString(head); err == nil && bytes.Contains(text, []byte(`"PS`)) {
			v.tokens[i] = t[:strings.LastIndexByte(t, '.')]
		}
	}
	return []byte(v.text())
}
