package witsvid_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/sha256"
	"encoding/asn1"
	"encoding/base64"
	"encoding/json"
	"flag"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

var updateVectors = flag.Bool("update-witsvid", false, "write testdata/vectors.json anew")

// now is NOW of the vectors, 2026-01-01T00:00:00Z.
const now = 1767225600

// vectorFile is testdata/vectors.json.
type vectorFile struct {
	About   string                     `json:"about"`
	Now     int64                      `json:"now"`
	URL     string                     `json:"url"`
	Bundles map[string]json.RawMessage `json:"bundles"`
	Vectors []vector                   `json:"vectors"`
}

// vector is one row of the conformance table.
type vector struct {
	ID     string `json:"id"`
	Rule   string `json:"rule"` // of a refusal, the one in the error
	What   string `json:"what,omitempty"`
	Reason string `json:"reason,omitempty"`
	Choice bool   `json:"choice,omitempty"`
	Why    string `json:"why"`
	Steps  []step `json:"steps"`
}

// step is a request: what is in its header fields, and what has to come of it. All steps of a vector go
// to one validator.
type step struct {
	Token         string `json:"token,omitempty"`
	Proof         string `json:"proof,omitempty"`
	Authorization string `json:"authorization,omitempty"`
	Expect        string `json:"expect"`
}

func ecKey(curve elliptic.Curve, label string) *ecdsa.PrivateKey {
	size := (curve.Params().BitSize + 7) / 8
	scalar := make([]byte, size)
	sum := sha256.Sum256([]byte(label))
	copy(scalar[max(0, size-len(sum)):], sum[:])
	return must.Do(ecdsa.ParseRawPrivateKey(curve, scalar))
}

var b64 = base64.RawURLEncoding.EncodeToString

// sign makes a token or proof with ES256 in the plainest way, without the code under test and without
// randomness (RFC 6979), so that it comes out the same every time.
func sign(header, payload string, key *ecdsa.PrivateKey) string {
	input := b64([]byte(header)) + "." + b64([]byte(payload))
	return input + "." + b64(rawSignature([]byte(input), key))
}

func rawSignature(input []byte, key *ecdsa.PrivateKey) []byte {
	sum := sha256.Sum256(input)
	der := must.Do(key.Sign(nil, sum[:], crypto.SHA256))
	var v struct{ R, S *big.Int }
	if _, err := asn1.Unmarshal(der, &v); err != nil {
		panic(err)
	}
	return append(v.R.FillBytes(make([]byte, 32)), v.S.FillBytes(make([]byte, 32))...)
}

func hashOf(s string) string {
	sum := sha256.Sum256([]byte(s))
	return b64(sum[:])
}

// jwk returns the members of a public key on a curve.
func jwk(key *ecdsa.PrivateKey) string {
	point := must.Do(key.PublicKey.Bytes())
	half := len(point) / 2
	return fmt.Sprintf(`"kty":"EC","crv":"%s","x":"%s","y":"%s"`, key.Params().Name, b64(point[1:1+half]), b64(point[1+half:]))
}

// The keys of the vectors: WIT1, JWT1, WK of the fixtures, and a foreign one.
var (
	wit1  = ecKey(elliptic.P256(), "svidkit-witsvid-wit1")
	jwt1  = ecKey(elliptic.P256(), "svidkit-witsvid-jwt1")
	jwtx  = ecKey(elliptic.P256(), "svidkit-witsvid-jwtx")
	wk    = ecKey(elliptic.P256(), "svidkit-witsvid-workload")
	other = ecKey(elliptic.P256(), "svidkit-witsvid-other")
)

const (
	vectorURL    = "https://db.example.org/query?x=1"
	vectorTarget = "https://db.example.org/query"
	webID        = "spiffe://example.org/ns/prod/sa/web"

	tokenHeader = `{"alg":"ES256","kid":"wit-1","typ":"wit+jwt"}`
	proofHeader = `{"alg":"ES256","typ":"wpt+jwt"}`
	webSubject  = `"sub":"` + webID + `"`
	tokenEnd    = `"exp":1767225900`
	proofEnd    = `"exp":1767225660`
)

func cnfOf(jwk string) string { return `"cnf":{"jwk":{` + jwk + `}}` }

// goodCNF is the "cnf" of WK.
func goodCNF() string { return cnfOf(jwk(wk) + `,"alg":"ES256"`) }

// claims joins members to an object.
func claims(members ...string) string { return "{" + strings.Join(members, ",") + "}" }

func basePayload() string { return claims(webSubject, tokenEnd, `"iat":1767225600`, goodCNF()) }

func baseToken() string { return sign(tokenHeader, basePayload(), wit1) }

// proofClaims are the claims of a good proof for a token, with this "jti".
func proofClaims(token, jti string) string {
	return claims(`"aud":"`+vectorTarget+`"`, proofEnd, `"jti":"`+jti+`"`, `"wth":"`+hashOf(token)+`"`)
}

func proofFor(token, jti string) string { return sign(proofHeader, proofClaims(token, jti), wk) }

func makeVectors() vectorFile {
	f := vectorFile{
		About: "WIT-SVIDs with Workload Proof Tokens for trust domain example.org, at the time now and with leeway 0, " +
			"in a request to url. rule is the one that the vector is about or, where it is refused, the one in the error, " +
			"whose what and reason are given. choice marks our reading where the standard leaves room. " +
			"All steps of a vector go to one validator, with the memory of used proofs on.",
		Now: now, URL: vectorURL,
		Bundles: map[string]json.RawMessage{
			"example.org": json.RawMessage(`{"keys":[{"use":"jwt-svid","kid":"jwt-1",` + jwk(jwt1) + `},{"use":"wit-svid","kid":"wit-1",` + jwk(wit1) + `}]}`),
			"other.test":  json.RawMessage(`{"keys":[{"use":"jwt-svid","kid":"jwt-1",` + jwk(jwtx) + `}]}`),
		},
	}
	add := func(id, rule, what, reason, why string, steps ...step) *vector {
		f.Vectors = append(f.Vectors, vector{ID: id, Rule: rule, What: what, Reason: reason, Why: why, Steps: steps})
		return &f.Vectors[len(f.Vectors)-1]
	}
	expect := func(reason string) string {
		if reason == "" {
			return "accept"
		}
		return "reject"
	}
	token := func(id, rule, reason, why, header, payload string, key *ecdsa.PrivateKey) *vector {
		what := "token"
		if reason == "" {
			what = ""
		}
		t := sign(header, payload, key)
		return add(id, rule, what, reason, why, step{Token: t, Proof: proofFor(t, id), Expect: expect(reason)})
	}
	header := func(id, rule, reason, why, header string) *vector {
		return token(id, rule, reason, why, header, basePayload(), wit1)
	}
	payload := func(id, rule, reason, why string, members ...string) *vector {
		return token(id, rule, reason, why, tokenHeader, claims(members...), wit1)
	}
	ed := ed25519.NewKeyFromSeed(bytes.Repeat([]byte{7}, 32)).Public().(ed25519.PublicKey)
	scalar := must.Do(wk.Bytes())

	header("WV-01", "WIT-1", "", "base", tokenHeader)
	header("WV-02", "WIT-2", "header", "kid is mandatory, unlike in a JWT-SVID", `{"alg":"ES256","typ":"wit+jwt"}`)
	header("WV-03", "WIT-62", "unknown key", "kid is case-sensitive (WIT-3)", `{"alg":"ES256","kid":"WIT-1","typ":"wit+jwt"}`)
	header("WV-04", "WIT-5", "header", "typ is mandatory", `{"alg":"ES256","kid":"wit-1"}`)
	header("WV-05", "WIT-5", "header", "typ must be wit+jwt", `{"alg":"ES256","kid":"wit-1","typ":"JWT"}`)
	header("WV-06", "WIT-6", "algorithm", "alg is not in the list", `{"alg":"EdDSA","kid":"wit-1","typ":"wit+jwt"}`)
	header("WV-07", "WIT-8", "", "unknown headers are ignored", `{"alg":"ES256","kid":"wit-1","typ":"wit+jwt","x-extra":1}`)
	header("WV-08", "WIT-9", "header", "critical and unknown", `{"alg":"ES256","kid":"wit-1","typ":"wit+jwt","crit":["x-extra"],"x-extra":1}`)
	payload("WV-09", "WIT-10", "subject", "sub is mandatory", tokenEnd, goodCNF())
	payload("WV-10", "WIT-10", "subject", "a WIT, and not a WIT-SVID", `"sub":"wimse://example.org/web"`, tokenEnd, goodCNF())
	payload("WV-11", "WIT-11", "confirmation", "cnf is mandatory", webSubject, tokenEnd)
	payload("WV-12", "WIT-11", "confirmation", "jwk is needed", webSubject, tokenEnd, `"cnf":{"kid":"k1"}`)
	payload("WV-13", "WIT-12", "confirmation", "alg in the jwk is mandatory", webSubject, tokenEnd, cnfOf(jwk(wk)))
	payload("WV-14", "WIT-12", "confirmation", "EdDSA is not in the list, fine as it is for a plain WIT", webSubject, tokenEnd,
		cnfOf(`"kty":"OKP","crv":"Ed25519","x":"`+b64(ed)+`","alg":"EdDSA"`))
	payload("WV-15", "WIT-14", "confirmation", "the curve does not fit the alg", webSubject, tokenEnd, cnfOf(jwk(wk)+`,"alg":"ES384"`)).Choice = true
	payload("WV-16", "WIT-13", "confirmation", "the private key shows", webSubject, tokenEnd, cnfOf(jwk(wk)+`,"alg":"ES256","d":"`+b64(scalar)+`"`))
	payload("WV-17", "WIT-12", "confirmation", "symmetric", webSubject, tokenEnd, cnfOf(`"kty":"oct","alg":"HS256","k":"AAAA"`))
	payload("WV-18", "WIT-16", "claim", "exp is mandatory", webSubject, goodCNF())
	payload("WV-19", "WIT-16", "expired", "over for an hour", webSubject, `"exp":1767222000`, goodCNF())
	payload("WV-20", "WIT-18", "not yet valid", "nbf in the future", webSubject, tokenEnd, `"nbf":1767226200`, goodCNF())
	payload("WV-21", "WIT-20", "", "iat must not limit validity", webSubject, tokenEnd, `"iat":1767229200`, goodCNF())
	payload("WV-22", "WIT-25", "claim", "aud is forbidden", webSubject, tokenEnd, `"aud":["db"]`, goodCNF()).Choice = true
	payload("WV-23", "WIT-25", "claim", "aud is forbidden, even empty", webSubject, tokenEnd, `"aud":[]`, goodCNF()).Choice = true
	payload("WV-24", "WIT-20", "", "jti and iat are optional", webSubject, tokenEnd, goodCNF())
	payload("WV-25", "WIT-23", "", "an issuer should not, a validator does not care", webSubject, tokenEnd, `"iss":"https://issuer.example.org"`, goodCNF())
	payload("WV-26", "WIT-26", "", "further claims are ignored", webSubject, tokenEnd, `"acme.example/x":{"a":[1]}`, goodCNF())
	token("WV-27", "WIT-62", "unknown key", "a key of another use", `{"alg":"ES256","kid":"jwt-1","typ":"wit+jwt"}`, basePayload(), jwt1)
	token("WV-28", "WIT-63", "unknown key", "that trust domain does not do WIT-SVID", tokenHeader,
		claims(`"sub":"spiffe://other.test/web"`, tokenEnd, goodCNF()), wit1)

	base := baseToken()
	proof := func(id, rule, reason, why, header, payload string, key *ecdsa.PrivateKey) {
		what := "proof"
		if reason == "" {
			what = ""
		}
		add(id, rule, what, reason, why, step{Token: base, Proof: sign(header, payload, key), Expect: expect(reason)})
	}
	aud, jti, wth := `"aud":"`+vectorTarget+`"`, `"jti":"WV"`, `"wth":"`+hashOf(base)+`"`
	good := claims(aud, proofEnd, jti, wth)
	proof("WV-31", "WPT-2", "", "base", proofHeader, good, wk)
	proof("WV-32", "WPT-4", "signature", "not the key in cnf", proofHeader, good, other)
	proof("WV-33", "WPT-10", "binding", "bound to another WIT", proofHeader, claims(aud, proofEnd, jti, `"wth":"`+hashOf("another")+`"`), wk)
	proof("WV-34", "WPT-5", "audience", "another host", proofHeader, claims(`"aud":"https://evil.example.org/query"`, proofEnd, jti, wth), wk)
	proof("WV-35", "WPT-6", "expired", "over for a second", proofHeader, claims(aud, `"exp":1767225599`, jti, wth), wk)
	proof("WV-36", "WPT-2", "header", "explicit typing", `{"alg":"ES256","typ":"JWT"}`, good, wk)
	proof("WV-37", "WPT-3", "algorithm", "differs from the alg in cnf", `{"alg":"ES384","typ":"wpt+jwt"}`, good, wk)
	proof("WV-38", "WPT-7", "lifetime", "unreasonably far", proofHeader, claims(aud, `"exp":1767312000`, jti, wth), wk)
	proof("WV-39", "WPT-8", "claim", "jti is mandatory", proofHeader, claims(aud, proofEnd, wth), wk)
	add("WV-40", "WIT-40", "request", "missing", "never a bearer token", step{Token: base, Expect: "reject"})
	add("WV-41", "WIT-42", "request", "misplaced", "the wrong header for a WIT", step{Authorization: "Bearer " + base, Proof: proofFor(base, "WV-41"), Expect: "reject"})
	add("WV-42", "WPT-9", "proof", "replay", "second use",
		step{Token: base, Proof: proofFor(base, "WV-42"), Expect: "accept"}, step{Token: base, Proof: proofFor(base, "WV-42"), Expect: "reject"})
	withID := sign(tokenHeader, claims(webSubject, tokenEnd, `"jti":"the same"`, goodCNF()), wit1)
	add("WV-43", "WIT-22", "", "", "the jti of a WIT is not a replay key",
		step{Token: withID, Proof: proofFor(withID, "WV-43 a"), Expect: "accept"}, step{Token: withID, Proof: proofFor(withID, "WV-43 b"), Expect: "accept"})
	return f
}

func vectorsOnDisk(t testing.TB) []byte {
	t.Helper()
	return must.Get(os.ReadFile(filepath.Join("testdata", "vectors.json")))(t)
}

// The vectors on disk are what the generator says; with -update-witsvid they are made so.
func TestVectorsOnDisk(t *testing.T) {
	t.Parallel()
	want := must.Get(json.MarshalIndent(makeVectors(), "", " "))(t)
	want = append(want, '\n')
	if *updateVectors {
		require.NoError(t, os.WriteFile(filepath.Join("testdata", "vectors.json"), want, 0o644))
	}
	assert.Equal(t, string(want), string(vectorsOnDisk(t)))
}
