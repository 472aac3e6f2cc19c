package jwtsvid_test

import (
	"context"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

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

	set := bundles(t, "")
	n := allocs(func() error { _, err := validator(t, set, jwtsvid.ValidatorOptions{}).Validate(token); return err })
	engine := allocs(func() error {
		s, err := jose.ParseSignedCompact(token, []jose.SignatureAlgorithm{jose.ES256})
		if err == nil {
			_, err = s.Verify(m.jwt1.Public())
		}
		return err
	})
	assert.LessOrEqual(t, n, 75.0)
	assert.Less(t, n, engine, "go-jose parses a header once")

	again := validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{})
	assert.Zero(t, allocs(func() error { _, err := again.Validate(token); return err }), "a token that comes again")

	c := must.Get(jwtsvid.NewCache(&mint{issuer: issuer(t, jwtsvid.IssuerOptions{Now: time.Now})}, nil))(t)
	ctx := context.Background()
	assert.Zero(t, allocs(func() error { _, err := c.Fetch(ctx, "db"); return err }), "a token in the cache")
}
