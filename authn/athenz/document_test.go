package athenz_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/internal/test/athenztest"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
)

func TestPodSubject(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-4-1", "ATH-4-2", "ATH-4-3", "ATH-4-4", "ATH-4-5", "ATH-4-6", "ATH-4-7", "ATH-4-8", "ATH-4-9")
	const text, six = subject, "pod:media-sports/web-0?d=media.sports&n=frontend&i=fd00%3A%3A1"
	format, parse := subjects(t)
	s := athenztest.Subject()
	s.IP = netip.MustParseAddr("fd00::1")
	for want, good := range map[string]athenz.PodSubject{text: athenztest.Subject(), six: s} {
		assert.Equal(t, want, format(t, good))
		assert.Equal(t, good, must.Get(parse(t, want))(t))
	}
	for _, same := range []string{
		"pod:media-sports/web-0?i=10.1.2.3&n=frontend&d=media.sports",
		"pod:media-sports/web-0?d=media%2Esports&n=%66rontend&i=10.1.2.3&s=10.0.0.1&x",
	} {
		assert.Equal(t, athenztest.Subject(), must.Get(parse(t, same))(t))
	}
	assert.Equal(t, s, must.Get(parse(t, "pod:media-sports/web-0?d=media.sports&n=frontend&i=fd00::1"))(t))

	for _, bad := range []string{
		"", "pod:", "pod", text[4:], "POD:" + text[4:], "pods:" + text[4:], "spiffe:" + text[4:],
		"pod:/media-sports/web-0?d=media.sports&n=frontend&i=10.1.2.3", "pod://media-sports/web-0?d=media.sports&n=frontend&i=10.1.2.3",
		"pod:?d=media.sports&n=frontend&i=10.1.2.3", "pod:media-sports?d=media.sports&n=frontend&i=10.1.2.3", "pod:media-sports/?d=media.sports&n=frontend&i=10.1.2.3",
		"pod:media-sports/web-0/x?d=media.sports&n=frontend&i=10.1.2.3", "pod:media%2Dsports/web-0?d=media.sports&n=frontend&i=10.1.2.3",
		"pod:media-sports%2Fweb-0?d=media.sports&n=frontend&i=10.1.2.3", "pod:Media/web-0?d=media.sports&n=frontend&i=10.1.2.3",
		"pod:../web-0?d=media.sports&n=frontend&i=10.1.2.3", "pod:media-sports/..?d=media.sports&n=frontend&i=10.1.2.3",
		"pod:media-sports/web-0", "pod:media-sports/web-0?", "pod:media-sports/web-0?n=frontend&i=10.1.2.3", "pod:media-sports/web-0?d=media.sports&i=10.1.2.3",
		"pod:media-sports/web-0?d=media.sports&n=frontend", "pod:media-sports/web-0?d=media.sports&n=frontend&i=",
		"pod:media-sports/web-0?d=&n=frontend&i=10.1.2.3", "pod:media-sports/web-0?d=media.sports&n=&i=10.1.2.3",
		text + "&d=media.news", text + "&i=10.1.2.4", text + "&n=backend", text + "&d=media.sports", text + ";x", text + "&%zz=1", text + "%",
		"pod:media-sports/web-0?d=Media.sports&n=frontend&i=10.1.2.3", "pod:media-sports/web-0?d=media.sports&n=front.end&i=10.1.2.3",
		"pod:media-sports/web-0?d=media..sports&n=frontend&i=10.1.2.3", "pod:media-sports/web-0?d=media.sports&n=front+end&i=10.1.2.3",
		"pod:media-sports/web-0?d=media.sports&n=frontend&i=10.1.2", "pod:media-sports/web-0?d=media.sports&n=frontend&i=010.1.2.3",
		"pod:media-sports/web-0?d=media.sports&n=frontend&i=fe80%3A%3A1%25eth0", "pod:media-sports/web-0?d=media.sports&n=frontend&i=%3A%3Affff%3A10.1.2.3",
		"pod:media-sports/web-0?d=media.sports&n=frontend&i=0.0.0.0", "pod:media-sports/web-0?d=media.sports&n=frontend&i=224.0.0.1",
		text + "#x", strings.Repeat("a", 8<<10), "pod:" + strings.Repeat("a", 254) + "/web?d=media.sports&n=frontend&i=10.1.2.3",
	} {
		_, err := parse(t, bad)
		must.Fail(t, err, athenz.ErrDocument, "pod")
		assert.Less(t, len(err.Error()), 1024)
	}
}

// subjects returns functions for the subject of documents: format has one signed, and parse has one verified.
func subjects(t testing.TB) (
	format func(testing.TB, athenz.PodSubject) string, parse func(testing.TB, string) (athenz.PodSubject, error),
) {
	t.Helper()
	k, key := athenztest.NewKeys(t), ecKey(t, elliptic.P256())
	k.Add(t, "v1", key)
	sign, v := k.Signer(t), k.Verifier(t)
	format = func(t testing.TB, s athenz.PodSubject) string {
		part := strings.Split(must.Get(sign(t.Context(), s))(t), ".")[1]
		var claims struct{ Sub string }
		require.NoError(t, json.Unmarshal(must.Get(base64.RawURLEncoding.DecodeString(part))(t), &claims))
		return claims.Sub
	}
	parse = func(t testing.TB, text string) (athenz.PodSubject, error) {
		c := newClaims()
		c.head["alg"], c.key, c.body["sub"] = "ES256", key, text
		return v.Verify(c.document(t))
	}
	return format, parse
}

func FuzzPodSubject(f *testing.F) {
	format, parse := subjects(f)
	for _, s := range []string{
		"pod:media-sports/web-0?d=media.sports&n=frontend&i=10.1.2.3", "pod:media-sports/web-0?d=media.sports&n=frontend&i=fd00%3A%3A1",
		"pod:media-sports/web-0?i=::1&n=a&d=b&d=c", "pod:/x?d=a", "pod:a/b?d=%zz", "",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := parse(t, text)
		if err != nil {
			require.ErrorIs(t, err, athenz.ErrDocument)
			return
		}
		require.Equal(t, s, must.Get(parse(t, format(t, s)))(t))
	})
}

// claims are those of the example in the design.
type claims struct {
	head, body object
	key        crypto.Signer // nil for version 1
	sign       func(data string) []byte
	raw        string // the whole document
}

// subject is the text of athenztest.Subject in a document.
const subject = "pod:media-sports/web-0?d=media.sports&n=frontend&i=10.1.2.3"

func newClaims() *claims {
	now := time.Now().Unix()
	const issuer = "secret:athenz-init-secret?version=v1"
	return &claims{
		head: object{"alg": "RS256", "iss": issuer, "typ": "JWT"},
		body: object{"aud": "k8s-athenz-identity", "exp": now + 900, "iat": now, "iss": issuer, "sub": subject},
	}
}

// document signs the claims with nothing of this library.
func (c *claims) document(t testing.TB) string {
	t.Helper()
	if c.raw != "" {
		return c.raw
	}
	b64 := func(v any) string {
		data, ok := v.([]byte)
		if !ok {
			data = must.Get(json.Marshal(v))(t)
		}
		return base64.RawURLEncoding.EncodeToString(data)
	}
	data := b64(c.head) + "." + b64(c.body)
	if c.sign != nil {
		return data + "." + b64(c.sign(data))
	}
	key := c.key
	if key == nil {
		key = athenztest.RSAKey()
	}
	sum := sha256.Sum256([]byte(data))
	if k, ok := key.(*ecdsa.PrivateKey); ok {
		r, s, err := ecdsa.Sign(rand.Reader, k, sum[:])
		require.NoError(t, err)
		sig := make([]byte, 64)
		r.FillBytes(sig[:32])
		s.FillBytes(sig[32:])
		return data + "." + b64(sig)
	}
	sig := must.Get(rsa.SignPKCS1v15(rand.Reader, key.(*rsa.PrivateKey), crypto.SHA256, sum[:]))(t)
	return data + "." + b64(sig)
}

func TestDocument(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-3.1-1", "ATH-3.1-2", "ATH-3.1-3", "ATH-3.1-4", "ATH-3.1-5", "ATH-3.2-1", "ATH-3.2-2", "ATH-3.2-3", "ATH-3.2-4", "ATH-3.2-5", "ATH-3.2-7",
		"ATH-3.2-9", "ATH-5-1", "ATH-5-4", "ATH-5-5", "ATH-18-1", "ATH-18-2")
	k := athenztest.NewKeys(t)
	text := must.Get(k.Signer(t)(t.Context(), athenztest.Subject()))(t)
	head, rest, _ := strings.Cut(text, ".")
	assert.Equal(t, "eyJhbGciOiJSUzI1NiIsImlzcyI6InNlY3JldDphdGhlbnotaW5pdC1zZWNyZXQ_dmVyc2lvbj12MSIsInR5cCI6IkpXVCJ9", head, "the bytes of the vector")
	payload, _, _ := strings.Cut(rest, ".")
	data := must.Get(base64.RawURLEncoding.DecodeString(payload))(t)
	var body map[string]any
	require.NoError(t, json.Unmarshal(data, &body))
	assert.Len(t, body, 5)
	assert.Equal(t, "k8s-athenz-identity", body["aud"])
	assert.Equal(t, "secret:athenz-init-secret?version=v1", body["iss"])
	assert.Equal(t, subject, body["sub"])
	assert.InDelta(t, 300, body["exp"].(float64)-body["iat"].(float64), 0)
	assert.InDelta(t, float64(time.Now().Unix()), body["iat"], 5)

	for _, text := range []string{text, newClaims().document(t)} {
		d := must.Get(k.Verifier(t).Verify(text))(t)
		assert.Equal(t, athenztest.Subject(), d)
	}
	// The newest version signs: 10 is more than 9.
	k.Add(t, "v9", athenztest.RSAKey())
	k.Add(t, "v10", ecKey(t, elliptic.P256()))
	text = must.Get(k.Signer(t)(t.Context(), athenztest.Subject()))(t)
	require.NoError(t, must.Err(k.Verifier(t).Verify(text)))
	head, _, _ = strings.Cut(text, ".")
	decoded := must.Get(base64.RawURLEncoding.DecodeString(head))(t)
	assert.JSONEq(t, `{"alg":"ES256","iss":"secret:athenz-init-secret?version=v10","typ":"JWT"}`, string(decoded))
	// A version that is removed counts no more.
	require.NoError(t, os.Remove(filepath.Join(k.Public, secret+".v10")))
	must.Fail(t, must.Err(k.Verifier(t).Verify(text)), athenz.ErrDocument, "no version v10")
}

func TestDocumentVectors(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-3.1-1", "ATH-3.1-2", "ATH-3.1-3", "ATH-3.1-4", "ATH-3.1-5", "ATH-3.2-1", "ATH-3.2-2", "ATH-3.2-3", "ATH-3.2-4", "ATH-3.2-5", "ATH-3.2-6", "ATH-5-1",
		"ATH-5-2", "ATH-5-3", "ATH-5-6", "ATH-12-1", "ATH-18-1", "ATH-18-2")
	k := athenztest.NewKeys(t)
	p256, p384 := ecKey(t, elliptic.P256()), ecKey(t, elliptic.P384())
	k.AddPublic(t, "v2", p256)
	k.AddPublic(t, "v3", p384)
	issuer := func(c *claims, s string) { c.head["iss"], c.body["iss"] = s, s }
	now := time.Now().Unix()
	symmetric := func(data string) []byte {
		public := must.Get(os.ReadFile(filepath.Join(k.Public, secret+".v1")))(t)
		m := hmac.New(sha256.New, public)
		m.Write([]byte(data))
		return m.Sum(nil)
	}
	for _, v := range []struct {
		name string
		edit func(*claims)
		good bool
	}{
		{"as it is", func(*claims) {}, true},
		{"ES256", func(c *claims) {
			issuer(c, "secret:athenz-init-secret?version=v2")
			c.head["alg"], c.key = "ES256", p256
		}, true},
		{"unknown claim", func(c *claims) { c.body["jti"] = "1" }, true},
		{"nbf now", func(c *claims) { c.body["nbf"] = now }, true},

		{"no typ", func(c *claims) { delete(c.head, "typ") }, false},
		{"other typ", func(c *claims) { c.head["typ"] = "JOSE" }, false},
		{"typ in lower case", func(c *claims) { c.head["typ"] = "jwt" }, false},
		{"kid", func(c *claims) { c.head["kid"] = "v1" }, false},
		{"jwk", func(c *claims) { c.head["jwk"] = object{} }, false},
		{"crit", func(c *claims) { c.head["crit"] = array{"iss"} }, false},
		{"jku", func(c *claims) { c.head["jku"] = "https://keys.example/v1" }, false},
		{"x5c", func(c *claims) { c.head["x5c"] = array{"AA=="} }, false},
		{"b64", func(c *claims) { c.head["b64"] = false }, false},
		{"b64 that is critical", func(c *claims) { c.head["b64"], c.head["crit"] = false, array{"b64"} }, false},
		{"zip", func(c *claims) { c.head["zip"] = "DEF" }, false},
		{"an empty kid", func(c *claims) { c.head["kid"] = "" }, false},
		{"no alg", func(c *claims) { delete(c.head, "alg") }, false},
		{"none", func(c *claims) { c.head["alg"], c.sign = "none", func(string) []byte { return nil } }, false},
		{"HS256 with the public key", func(c *claims) { c.head["alg"], c.sign = "HS256", symmetric }, false},
		{"RS256 that is HS256", func(c *claims) { c.sign = symmetric }, false},
		{"EC256", func(c *claims) {
			issuer(c, "secret:athenz-init-secret?version=v2")
			c.head["alg"], c.key = "EC256", p256
		}, false},
		{"RS512", func(c *claims) {
			c.head["alg"] = "RS512"
			c.sign = func(data string) []byte {
				sum := sha512.Sum512([]byte(data))
				sig := must.Get(athenztest.RSAKey().Sign(rand.Reader, sum[:], crypto.SHA512))(t)
				return sig
			}
		}, false},
		{"PS256", func(c *claims) {
			c.head["alg"] = "PS256"
			c.sign = func(data string) []byte {
				sum := sha256.Sum256([]byte(data))
				sig := must.Get(athenztest.RSAKey().Sign(rand.Reader, sum[:], &rsa.PSSOptions{SaltLength: rsa.PSSSaltLengthEqualsHash, Hash: crypto.SHA256}))(t)
				return sig
			}
		}, false},
		{"ES256 with the key of P-384", func(c *claims) {
			issuer(c, "secret:athenz-init-secret?version=v3")
			c.head["alg"], c.key = "ES256", p256
		}, false},
		{"RS256 with the version of an EC key", func(c *claims) { issuer(c, "secret:athenz-init-secret?version=v2") }, false},
		{"another key", func(c *claims) { c.key = must.Get(rsa.GenerateKey(rand.Reader, 2048))(t) }, false},
		{"no header iss", func(c *claims) { delete(c.head, "iss") }, false},
		{"header iss is a number", func(c *claims) { c.head["iss"] = 1 }, false},
		{"no claim iss", func(c *claims) { delete(c.body, "iss") }, false},
		{"iss differ", func(c *claims) { c.body["iss"] = "secret:athenz-init-secret?version=v2" }, false},
		{"other secret", func(c *claims) { issuer(c, "secret:other?version=v1") }, false},
		{"other scheme", func(c *claims) { issuer(c, "file:athenz-init-secret?version=v1") }, false},
		{"no version", func(c *claims) { issuer(c, "secret:athenz-init-secret") }, false},
		{"empty version", func(c *claims) { issuer(c, "secret:athenz-init-secret?version=") }, false},
		{"version without v", func(c *claims) { issuer(c, "secret:athenz-init-secret?version=1") }, false},
		{"version with a zero", func(c *claims) { issuer(c, "secret:athenz-init-secret?version=v01") }, false},
		{"version with a sign", func(c *claims) { issuer(c, "secret:athenz-init-secret?version=v+1") }, false},
		{"version below", func(c *claims) { issuer(c, "secret:athenz-init-secret?version=v-1") }, false},
		{"version with a path", func(c *claims) { issuer(c, "secret:athenz-init-secret?version=v1/../v1") }, false},
		{"unknown version", func(c *claims) { issuer(c, "secret:athenz-init-secret?version=v7") }, false},
		{"more parameters", func(c *claims) { issuer(c, "secret:athenz-init-secret?version=v1&x=1") }, false},

		{"no aud", func(c *claims) { delete(c.body, "aud") }, false},
		{"other aud", func(c *claims) { c.body["aud"] = "k8s-athenz" }, false},
		{"aud is a list", func(c *claims) { c.body["aud"] = array{"k8s-athenz-identity"} }, false},
		{"no exp", func(c *claims) { delete(c.body, "exp") }, false},
		{"exp beyond the leeway", func(c *claims) { c.body["exp"], c.body["iat"] = now-5, now-60 }, false},
		{"exp long past", func(c *claims) { c.body["exp"], c.body["iat"] = now-600, now-660 }, false},
		{"exp is text", func(c *claims) { c.body["exp"] = "9999999999" }, false},
		{"exp is null", func(c *claims) { c.body["exp"] = nil }, false},
		{"a life of 16 minutes", func(c *claims) { c.body["exp"] = now + 960 }, false},
		{"a life of ages", func(c *claims) { c.body["exp"] = 1e300 }, false},
		{"no iat", func(c *claims) { delete(c.body, "iat") }, false},
		{"iat ahead", func(c *claims) { c.body["iat"] = now + 30 }, false},
		{"iat is text", func(c *claims) { c.body["iat"] = "0" }, false},
		{"nbf ahead", func(c *claims) { c.body["nbf"] = now + 30 }, false},
		{"nbf is text", func(c *claims) { c.body["nbf"] = "0" }, false},
		{"bound", func(c *claims) { c.body["cnf"] = object{"x5t#S256": "x"} }, false},
		{"no sub", func(c *claims) { delete(c.body, "sub") }, false},
		{"sub is a list", func(c *claims) { c.body["sub"] = array{} }, false},
		{"sub is none", func(c *claims) { c.body["sub"] = "pod:x" }, false},
		{"names of claims in another case", func(c *claims) { c.body["AUD"] = c.body["aud"]; delete(c.body, "aud") }, false},

		{"empty", func(c *claims) { c.raw = "." }, false},
		{"two parts", func(c *claims) { c.raw = "e30.e30" }, false},
		{"four parts", func(c *claims) { c.raw = newClaims().document(t) + ".e30" }, false},
		{"padding", func(c *claims) { c.raw = newClaims().document(t) + "=" }, false},
		{"a line break", func(c *claims) { c.raw = newClaims().document(t) + "\n" }, false},
		{"no signature", func(c *claims) { s := newClaims().document(t); c.raw = s[:strings.LastIndexByte(s, '.')+1] }, false},
		{"half a signature", func(c *claims) { s := newClaims().document(t); c.raw = s[:len(s)-100] }, false},
		{"payload is a list", func(c *claims) {
			c.raw = signedRaw(t, `{"alg":"RS256","iss":"secret:athenz-init-secret?version=v1","typ":"JWT"}`, `[]`)
		}, false},
		{"a claim twice", func(c *claims) {
			c.raw = signedRaw(t, `{"alg":"RS256","iss":"secret:athenz-init-secret?version=v1","typ":"JWT"}`,
				fmt.Sprintf(`{"aud":"k8s-athenz-identity","exp":%d,"iat":%d,"iss":"secret:athenz-init-secret?version=v1","sub":"pod:a/b?d=a&n=b&i=1.2.3.4","sub":%q}`, now+60, now, subject))
		}, false},
		{"a header twice", func(c *claims) {
			c.raw = signedRaw(t, `{"alg":"RS256","iss":"secret:athenz-init-secret?version=v2","iss":"secret:athenz-init-secret?version=v1","typ":"JWT"}`,
				fmt.Sprintf(`{"aud":"k8s-athenz-identity","exp":%d,"iat":%d,"iss":"secret:athenz-init-secret?version=v1","sub":%q}`, now+60, now, subject))
		}, false},
		{"an escaped ampersand", func(c *claims) {
			c.raw = signedRaw(t, `{"alg":"RS256","iss":"secret:athenz-init-secret?version=v1","typ":"JWT"}`,
				fmt.Sprintf(`{"aud":"k8s-athenz-identity","exp":%d,"iat":%d,"iss":"secret:athenz-init-secret?version=v1","sub":"%s"}`, now+60, now, strings.ReplaceAll(subject, "&", `\u0026`)))
		}, true},
		{"17 KiB", func(c *claims) { c.body["x"] = strings.Repeat("x", 17<<10) }, false},
	} {
		t.Run(v.name, func(t *testing.T) {
			c := newClaims()
			v.edit(c)
			text := c.document(t)
			d, err := k.Verifier(t).Verify(text)
			if v.good {
				require.NoError(t, err)
				assert.Equal(t, athenztest.Subject(), d)
				return
			}
			require.ErrorIs(t, err, athenz.ErrDocument)
			assert.Zero(t, d)
			assert.NotContains(t, err.Error(), "eyJ")
			assert.Less(t, len(err.Error()), 1024)
		})
	}
}

func signedRaw(t testing.TB, head, payload string) string {
	t.Helper()
	data := base64.RawURLEncoding.EncodeToString([]byte(head)) + "." + base64.RawURLEncoding.EncodeToString([]byte(payload))
	sum := sha256.Sum256([]byte(data))
	sig := must.Get(athenztest.RSAKey().Sign(rand.Reader, sum[:], crypto.SHA256))(t)
	return data + "." + base64.RawURLEncoding.EncodeToString(sig)
}

func TestDocumentTimes(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-3.2-2", "ATH-3.2-3", "ATH-3.2-7")
	k := athenztest.NewKeys(t)
	synctest.Test(t, func(t *testing.T) {
		signer := must.Get(athenz.NewSigner(k.Private, "", 15*time.Minute))(t)
		text := must.Get(signer(t.Context(), athenztest.Subject()))(t)
		v := k.Verifier(t)
		time.Sleep(15*time.Minute + 5*time.Second - time.Nanosecond)
		require.NoError(t, must.Err(v.Verify(text)))
		time.Sleep(time.Nanosecond)
		must.Fail(t, must.Err(v.Verify(text)), athenz.ErrDocument, "expired at")
	})
}

func TestSignerRefuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-5-4", "ATH-5-7", "ATH-5-8")
	for name, o := range map[string]struct {
		dir, key string
		life     time.Duration
	}{
		"no directory":   {},
		"a secret name":  {"/keys", "../x", 0},
		"a hidden one":   {"/keys", ".x", 0},
		"a long life":    {"/keys", "", 16 * time.Minute},
		"a short life":   {"/keys", "", time.Millisecond},
		"no life at all": {"/keys", "", -time.Minute},
	} {
		require.ErrorContains(t, must.Err(athenz.NewSigner(o.dir, o.key, o.life)), "athenz: new signer: ", name)
	}
	for _, o := range [][2]string{{}, {"/keys", "a b"}} {
		require.ErrorContains(t, must.Err(athenz.NewVerifier(o[0], o[1])), "athenz: new verifier: ")
	}

	k := athenztest.NewKeys(t)
	s := k.Signer(t)
	for _, edit := range []func(*athenz.PodSubject){
		func(p *athenz.PodSubject) { p.IP = netip.Addr{} },
		func(p *athenz.PodSubject) { p.Pod = "" },
		func(p *athenz.PodSubject) { p.Namespace = "a/b" },
		func(p *athenz.PodSubject) { p.Service.Domain = "" },
		func(p *athenz.PodSubject) { p.Service.Name = "A" },
	} {
		p := athenztest.Subject()
		edit(&p)
		require.ErrorIs(t, must.Err(s(t.Context(), p)), athenz.ErrDocument)
	}

	file := filepath.Join(k.Private, secret+".v2")
	write := func(text []byte, mode os.FileMode) {
		require.NoError(t, os.RemoveAll(file))
		require.NoError(t, os.WriteFile(file, text, mode))
		require.NoError(t, os.Chmod(file, mode))
	}
	p384 := must.Get(pki.MarshalPrivateKeyPEM(ecKey(t, elliptic.P384())))(t)
	_, edKey, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	ed := must.Get(pki.MarshalPrivateKeyPEM(edKey))(t)
	for name, text := range map[string][]byte{"nothing": nil, "noise": []byte("noise"), "P-384": p384, "Ed25519": ed, "large": make([]byte, 1<<17)} {
		write(text, 0o600)
		_, err = s(t.Context(), athenztest.Subject())
		require.ErrorContains(t, err, "athenz: sign identity document: ", name)
	}
	ec := ecKey(t, elliptic.P256())
	der := must.Get(x509.MarshalECPrivateKey(ec))(t)
	rsaDER := x509.MarshalPKCS1PrivateKey(athenztest.RSAKey().(*rsa.PrivateKey))
	write(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: rsaDER}), 0o644)
	_, err = s(t.Context(), athenztest.Subject())
	require.ErrorContains(t, err, "not safe from other users", "a key that all can read")
	for label, der := range map[string][]byte{"RSA PRIVATE KEY": rsaDER, "EC PRIVATE KEY": der, "ECDSA PRIVATE KEY": der} {
		write(pem.EncodeToMemory(&pem.Block{Type: label, Bytes: der}), 0o600)
		require.NoError(t, must.Err(s(t.Context(), athenztest.Subject())), label)
	}
	for _, other := range []string{"x", secret, secret + ".v", secret + ".vx", secret + ".v03", "..data", secret + ".v3.tmp"} {
		require.NoError(t, os.WriteFile(filepath.Join(k.Private, other), []byte("noise"), 0o600))
	}
	require.NoError(t, must.Err(s(t.Context(), athenztest.Subject())), "other files are skipped")
	require.NoError(t, os.Remove(file))
	require.NoError(t, os.Remove(filepath.Join(k.Private, secret+".v1")))
	require.ErrorIs(t, must.Err(s(t.Context(), athenztest.Subject())), os.ErrNotExist)

	// Public keys that are none.
	text := newClaims().document(t)
	for name, data := range map[string][]byte{
		"nothing": nil, "private": pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: rsaDER}), "noise": pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: []byte{1}}),
	} {
		require.NoError(t, os.WriteFile(filepath.Join(k.Public, secret+".v1"), data, 0o600))
		_, err = k.Verifier(t).Verify(text)
		require.Error(t, err, name)
		assert.NotErrorIs(t, err, athenz.ErrDocument, "it is not the fault of the document")
	}
}

func FuzzVerify(f *testing.F) {
	k := athenztest.NewKeys(f)
	v := k.Verifier(f)
	text := newClaims().document(f)
	f.Add(text)
	f.Add("..")
	f.Add(text[:len(text)-1] + "A")
	f.Add(signedRaw(f, `{"alg":"RS256","iss":"secret:athenz-init-secret?version=v1","typ":"JWT","iss":""}`, `{"sub":1,"exp":1e999}`))
	f.Fuzz(func(t *testing.T, other string) {
		d, err := v.Verify(other)
		if err == nil {
			require.Equal(t, text, other)
			require.Equal(t, athenztest.Subject(), d)
			return
		}
		require.Zero(t, d)
	})
}
