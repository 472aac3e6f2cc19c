//go:build go1.27

package jwtsvid_test

import (
	"bytes"
	"crypto"
	"crypto/mldsa"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// quantumKeys are one key of each algorithm that a token can have, by the key's ID.
func quantumKeys(t testing.TB) map[string]crypto.Signer {
	return map[string]crypto.Signer{
		"p256": must.Get(pki.NewKey("ecdsa-p256"))(t), "rsa": must.Get(pki.NewKey("rsa-2048"))(t),
		"44": must.Get(pki.NewKey("ml-dsa-44"))(t), "65": must.Get(pki.NewKey("ml-dsa-65"))(t),
		"other": must.Get(pki.NewKey("ml-dsa-65"))(t),
	}
}

func quantumBundle(t testing.TB, keys map[string]crypto.PublicKey) *spiffe.Bundle {
	return must.Get(spiffe.NewBundle(quantum.TrustDomain, spiffe.BundleContents{JWTAuthorities: keys}))(t)
}

func quantumSign(t testing.TB, header string, key crypto.Signer, opts crypto.SignerOpts) (input string, signature []byte) {
	input = b64([]byte(header)) + "." + b64([]byte(basePay))
	return input, must.Get(key.Sign(rand.Reader, []byte(input), opts))(t)
}

// TestQuantumTokenVectors: a token of ML-DSA is accepted if its key is allowed and signed its very bytes. Each vector has
// one fault.
func TestQuantumTokenVectors(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	keys := quantumKeys(t)
	public := make(map[string]crypto.PublicKey)
	for id, key := range keys {
		public[id] = key.Public()
	}
	all := quantumBundle(t, public)
	only := func(ids ...string) *spiffe.Bundle {
		some := make(map[string]crypto.PublicKey)
		for _, id := range ids {
			some[id] = public[id]
		}
		return quantumBundle(t, some)
	}
	allow := func(text string) spiffe.Algorithms { return must.Get(spiffe.ParseAlgorithms(text))(t) }
	any := spiffe.AnyAlgorithm()
	plain := &mldsa.Options{}
	make65 := func(change func(sig []byte) []byte) string {
		input, sig := quantumSign(t, `{"alg":"ML-DSA-65","kid":"65"}`, keys["65"], plain)
		return input + "." + b64(change(sig))
	}
	token := func(header, key string, opts crypto.SignerOpts) string {
		input, sig := quantumSign(t, header, keys[key], opts)
		return input + "." + b64(sig)
	}
	good := make65(func(sig []byte) []byte { return sig })
	classical := sign(`{"alg":"ES256","kid":"p256"}`, basePay, "ES256", keys["p256"])
	const signature, unknown = "signature", "unknown key"
	for name, c := range map[string]struct {
		token        string
		bundle       *spiffe.Bundle
		allowed      spiffe.Algorithms
		reason, rule string // "" for a good one
	}{
		"65":                      {good, all, any, "", ""},
		"44":                      {token(`{"alg":"ML-DSA-44","kid":"44"}`, "44", plain), all, any, "", ""},
		"65 alone":                {good, all, allow("ml-dsa-65"), "", ""},
		"without kid":             {token(`{"alg":"ML-DSA-65"}`, "65", plain), only("65", "p256"), any, "", ""},
		"without kid, among two":  {token(`{"alg":"ML-DSA-65"}`, "65", plain), all, any, "", ""},
		"not allowed by default":  {good, all, spiffe.Algorithms{}, signature, "JWT-26"},
		"the other one allowed":   {good, all, allow("ecdsa,ml-dsa-44"), signature, "JWT-26"},
		"no kid, not allowed":     {token(`{"alg":"ML-DSA-65"}`, "65", plain), only("65"), spiffe.Algorithms{}, signature, "JWT-26"},
		"classical, not allowed":  {classical, all, allow("ml-dsa-44,ml-dsa-65"), signature, "JWT-26"},
		"signed by another":       {token(`{"alg":"ML-DSA-65","kid":"65"}`, "other", plain), all, any, signature, "JWT-26"},
		"44 signed by 65":         {token(`{"alg":"ML-DSA-44","kid":"44"}`, "65", plain), all, any, signature, "JWT-26"},
		"65 signed by 44":         {token(`{"alg":"ML-DSA-65","kid":"65"}`, "44", plain), all, any, signature, "JWT-26"},
		"44 with a key of 65":     {token(`{"alg":"ML-DSA-44","kid":"65"}`, "65", plain), all, any, unknown, "JWT-27"},
		"65 with a key of 44":     {token(`{"alg":"ML-DSA-65","kid":"44"}`, "44", plain), all, any, unknown, "JWT-27"},
		"65 with a key of P-256":  {token(`{"alg":"ML-DSA-65","kid":"p256"}`, "65", plain), all, any, unknown, "JWT-27"},
		"65 with a key of RSA":    {token(`{"alg":"ML-DSA-65","kid":"rsa"}`, "65", plain), all, any, unknown, "JWT-27"},
		"P-256 with a key of 65":  {sign(`{"alg":"ES256","kid":"65"}`, basePay, "ES256", keys["p256"]), all, any, unknown, "JWT-27"},
		"RSA with a key of 44":    {sign(`{"alg":"RS256","kid":"44"}`, basePay, "RS256", keys["rsa"]), all, any, unknown, "JWT-27"},
		"no kid, no such key":     {token(`{"alg":"ML-DSA-65"}`, "65", plain), only("44", "p256"), any, unknown, "JWT-27"},
		"unknown kid":             {token(`{"alg":"ML-DSA-65","kid":"66"}`, "65", plain), all, any, unknown, "JWT-8"},
		"87":                      {token(`{"alg":"ML-DSA-87","kid":"65"}`, "65", plain), all, any, "algorithm", "JWT-4"},
		"in lower case":           {token(`{"alg":"ml-dsa-65","kid":"65"}`, "65", plain), all, any, "algorithm", "JWT-4"},
		"none":                    {b64([]byte(`{"alg":"none","kid":"65"}`)) + "." + b64([]byte(basePay)) + ".", all, any, "algorithm", "JWT-4"},
		"with a context":          {token(`{"alg":"ML-DSA-65","kid":"65"}`, "65", &mldsa.Options{Context: "JWT"}), all, any, signature, "JWT-26"},
		"prehashed":               {preHashed(t, keys["65"]), all, any, signature, "JWT-26"},
		"a byte short":            {make65(func(sig []byte) []byte { return sig[:len(sig)-1] }), all, any, signature, "JWT-26"},
		"a byte long":             {make65(func(sig []byte) []byte { return append(sig, 0) }), all, any, signature, "JWT-26"},
		"the first bit flipped":   {make65(func(sig []byte) []byte { sig[0] ^= 1; return sig }), all, any, signature, "JWT-26"},
		"the last bit flipped":    {make65(func(sig []byte) []byte { sig[len(sig)-1] ^= 0x80; return sig }), all, any, signature, "JWT-26"},
		"zeros":                   {make65(func(sig []byte) []byte { return make([]byte, len(sig)) }), all, any, signature, "JWT-26"},
		"twice":                   {make65(func(sig []byte) []byte { return append(sig, sig...) }), all, any, signature, "JWT-26"},
		"no signature":            {make65(func([]byte) []byte { return nil }), all, any, signature, "JWT-26"},
		"of the size of P-256":    {make65(func(sig []byte) []byte { return sig[:64] }), all, any, signature, "JWT-26"},
		"the payload is another":  {strings.Replace(good, b64([]byte(basePay)), b64([]byte(basePay+" ")), 1), all, any, signature, "JWT-26"},
		"the signature in padded": {good + "=", all, any, "malformed", "JWT-26"},
	} {
		v := validator(t, c.bundle, jwtsvid.ValidatorOptions{Algorithms: c.allowed})
		for range 2 { // what is remembered changes no decision
			proof, err := v.Validate(c.token)
			if c.reason == "" {
				require.NoError(t, err, name)
				assert.Equal(t, "spiffe://example.org/ns/prod/sa/web", proof.ID().String())
				continue
			}
			if !assert.Error(t, err, name) {
				continue
			}
			refused(t, err, c.token, c.reason, c.rule)
			assert.Equal(t, strings.Contains(name, "allowed"), errors.Is(err, spiffe.ErrAlgorithm), "%s: %v", name, err)
		}
	}
}

// preHashed returns a token whose signature is over the hash of its input, as ECDSA has it.
func preHashed(t testing.TB, key crypto.Signer) string {
	input := b64([]byte(`{"alg":"ML-DSA-65","kid":"65"}`)) + "." + b64([]byte(basePay))
	h := crypto.SHA512.New()
	h.Write([]byte(input))
	return input + "." + b64(must.Get(key.Sign(rand.Reader, h.Sum(nil), &mldsa.Options{}))(t))
}

// TestQuantumTokenLimits: a token of ML-DSA-65 is issued and accepted with up to 16 KiB, and remembered with up to 8 KiB.
func TestQuantumTokenLimits(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	key := must.Get(pki.NewKey("ml-dsa-65"))(t)
	b := quantumBundle(t, map[string]crypto.PublicKey{"65": key.Public()})
	issuer := must.Get(jwtsvid.NewIssuer(b.TrustDomain(), "65", key, &jwtsvid.IssuerOptions{WideAudience: true}))(t)
	request := func(size int) jwtsvid.Request {
		return jwtsvid.Request{ID: spiffe.MustParseID("spiffe://example.org/web"), Audience: []string{"db"},
			Claims: map[string]any{"x": strings.Repeat("x", size)}, Lifetime: time.Hour}
	}
	// sized returns a token of n bytes, or less by up to two.
	sized := func(n int) (string, error) {
		empty := must.Get(issuer.Issue(request(0)))(t)
		return issuer.Issue(request((n - len(empty)) * 3 / 4))
	}
	v := must.Get(jwtsvid.NewValidator(b, []string{"db"}, &jwtsvid.ValidatorOptions{Algorithms: spiffe.AnyAlgorithm()}))(t)

	usual := must.Get(issuer.Issue(request(0)))(t)
	t.Log(len(usual), "bytes")
	assert.Less(t, len(usual), 5<<10)

	for _, c := range []struct {
		size       int
		remembered bool
	}{{len(usual), true}, {8 << 10, true}, {8<<10 + 4, false}, {16 << 10, false}} {
		text := must.Get(sized(c.size))(t)
		assert.InDelta(t, c.size, len(text), 2)
		first := must.Get(v.Validate(text))(t)
		assert.Equal(t, c.remembered, first == must.Get(v.Validate(text))(t), c.size)
	}
	_, err := sized(16<<10 + 4)
	assert.ErrorIs(t, err, spiffe.ErrTooLarge)

	// A workload API accepts 8 KiB of audiences: these fit beside an ID of usual length.
	audience := make([]string, 64)
	for i := range audience {
		audience[i] = fmt.Sprintf("%0128d", i)
	}
	r := request(0)
	r.Audience = audience
	text := must.Get(issuer.Issue(r))(t)
	t.Log(len(text), "bytes with the most audiences")
	r.ID = spiffe.MustParseID("spiffe://example.org/" + string(bytes.Repeat([]byte{'x'}, 2000)))
	_, err = issuer.Issue(r)
	assert.ErrorIs(t, err, spiffe.ErrTooLarge)
}
