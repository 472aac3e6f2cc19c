package jwtsvid_test

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/asn1"
	"encoding/base64"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// bare is the least that a validation can cost: the hash and one check by package crypto.
type bare struct {
	input, sig []byte
	key        crypto.PublicKey
}

func newBare(tb testing.TB, token string, key crypto.PublicKey) bare {
	tb.Helper()
	i := strings.LastIndexByte(token, '.')
	sig := must.Get(base64.RawURLEncoding.DecodeString(token[i+1:]))(tb)
	if _, ok := key.(*ecdsa.PublicKey); ok {
		half := len(sig) / 2
		r, s := new(big.Int).SetBytes(sig[:half]), new(big.Int).SetBytes(sig[half:])
		sig = must.Get(asn1.Marshal(struct{ R, S *big.Int }{r, s}))(tb)
	}
	return bare{input: []byte(token[:i]), sig: sig, key: key}
}

func (b bare) check() bool {
	sum := sha256.Sum256(b.input)
	if k, ok := b.key.(*ecdsa.PublicKey); ok {
		return ecdsa.VerifyASN1(k, sum[:], b.sig)
	}
	return rsa.VerifyPKCS1v15(b.key.(*rsa.PublicKey), crypto.SHA256, sum[:], b.sig) == nil
}

// BenchmarkValidate compares a validation with the bare signature check, in alternation, and reports the
// medians and their ratio. The allocations are those of both; see TestAllocations.
func BenchmarkValidate(b *testing.B) {
	m := newMaterial(b)
	for _, c := range []struct {
		alg, kid string
		key      crypto.Signer
	}{
		{"ES256", "jwt-1", m.jwt1},
		{"RS256", "jwt-2", m.jwt2},
	} {
		b.Run(c.alg, func(b *testing.B) {
			v := validator(b, bundles(b, ""), jwtsvid.ValidatorOptions{Remember: -1})
			token := sign(fmt.Sprintf(`{"alg":%q,"kid":%q,"typ":"JWT"}`, c.alg, c.kid), basePay, c.alg, c.key)
			floor := newBare(b, token, c.key.Public())
			require.True(b, floor.check())
			b.ReportAllocs()
			var ours, theirs samples
			for b.Loop() {
				t0 := time.Now()
				_, err := v.Validate(token)
				t1 := time.Now()
				ok := floor.check()
				t2 := time.Now()
				if err != nil || !ok {
					b.Fatal(err, ok)
				}
				ours.add(t1.Sub(t0))
				theirs.add(t2.Sub(t1))
			}
			b.ReportMetric(float64(ours.median()), "ours-ns/op")
			b.ReportMetric(float64(theirs.median()), "bare-ns/op")
			b.ReportMetric(float64(ours.median())/float64(theirs.median()), "×bare")
		})
	}
}

// samples are the last few thousand durations.
type samples struct {
	d [4096]time.Duration
	n int
}

func (s *samples) add(d time.Duration) {
	s.d[s.n%len(s.d)] = d
	s.n++
}

func (s *samples) median() time.Duration {
	d := slices.Sorted(slices.Values(s.d[:min(s.n, len(s.d))]))
	return d[len(d)/2]
}

func BenchmarkValidateAgain(b *testing.B) {
	v := validator(b, bundles(b, ""), jwtsvid.ValidatorOptions{Now: func() time.Time { return time.Unix(now, 0) }})
	token := sign(baseHeader, basePay, "ES256", newMaterial(b).jwt1)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := v.Validate(token); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkIssue(b *testing.B) {
	i := issuer(b, jwtsvid.IssuerOptions{})
	b.ReportAllocs()
	for b.Loop() {
		if _, err := i.Issue(jwtsvid.Request{ID: webID, Audience: []string{"db"}}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkCacheFetch(b *testing.B) {
	c := must.Get(jwtsvid.NewCache(&mint{issuer: issuer(b, jwtsvid.IssuerOptions{Now: time.Now})}, nil))(b)
	ctx := b.Context()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Fetch(ctx, "db"); err != nil {
			b.Fatal(err)
		}
	}
}

// TestAllocations bounds what each request costs.
func TestAllocations(t *testing.T) {
	if rounds.Race {
		t.Skip("the race detector allocates")
	}
	m := newMaterial(t)
	token := sign(baseHeader, basePay, "ES256", m.jwt1)
	allocs := func(f func() error) float64 {
		return testing.AllocsPerRun(200, func() {
			if err := f(); err != nil {
				t.Error(err)
			}
		})
	}

	fresh := validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{Remember: -1})
	n := allocs(func() error { _, err := fresh.Validate(token); return err })
	floor := newBare(t, token, m.jwt1.Public())
	bare := testing.AllocsPerRun(200, func() { floor.check() })
	engine := allocs(func() error {
		s, err := jose.ParseSignedCompact(token, []jose.SignatureAlgorithm{jose.ES256})
		if err == nil {
			_, err = s.Verify(m.jwt1.Public())
		}
		return err
	})
	t.Logf("validate: %v allocations, go-jose alone has %v, the signature check %v", n, engine, bare)
	assert.LessOrEqual(t, n, 75.0)
	assert.Less(t, n, engine, "go-jose parses a header once")

	again := validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{})
	assert.Zero(t, allocs(func() error { _, err := again.Validate(token); return err }), "a token that comes again")

	c := must.Get(jwtsvid.NewCache(&mint{issuer: issuer(t, jwtsvid.IssuerOptions{Now: time.Now})}, nil))(t)
	ctx := context.Background()
	assert.Zero(t, allocs(func() error { _, err := c.Fetch(ctx, "db"); return err }), "a token in the cache")
}
