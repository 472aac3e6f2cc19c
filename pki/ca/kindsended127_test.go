//go:build go1.27

package ca_test

import (
	"context"
	"errors"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// flaky is a store that does not answer one of the replicas while it is down.
type flaky struct {
	ca.Store
	down atomic.Bool
}

func (f *flaky) Load(ctx context.Context) (ca.Record, error) {
	if f.down.Load() {
		return ca.Record{}, errors.New("down")
	}
	return f.Store.Load(ctx)
}

// TestKindsEndedByAnother: a replica that has not heard that a kind was ended signs nothing that peers refuse.
func TestKindsEndedByAnother(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := must.Get(ca.NewDirStore(filepath.Join(t.TempDir(), "ca")))(t)
		open := func(keys string, store ca.Store) *ca.Authority {
			return must.Get(ca.Open(t.Context(), ca.Config{TrustDomain: quantum.TrustDomain, Create: true, Algorithms: spiffe.AnyAlgorithm(),
				DefaultTTL: time.Hour, MaxTTL: time.Hour, Rotation: ca.Rotation{KeyAlgorithm: keys}}, store))(t)
		}
		b := &flaky{Store: store}
		old := open("ecdsa-p256,ml-dsa-44", b)
		go func() { _ = old.Run(t.Context()) }()
		time.Sleep(time.Hour)
		must.Get(old.Rotate(t.Context()))(t)
		time.Sleep(20 * time.Minute) // of 25
		b.down.Store(true)
		a := open("ecdsa-p256", store)
		go func() { _ = a.Run(t.Context()) }()
		time.Sleep(10 * time.Minute)
		require.Equal(t, "active", old.Status().Roots[3].Phase, "it does not know")
		k := must.Get(pki.NewKey("ml-dsa-44"))(t)
		csr := must.Get(pki.NewCSR(k, pki.CSROptions{}))(t)
		chain := must.Get(old.Sign(t.Context(), ca.Request{CSR: csr, ID: spiffe.MustParseID("spiffe://example.org/web")}))(t)
		for time.Now().Before(chain[0].NotAfter) {
			v := must.Get(spiffe.NewVerifier(a.Bundle(), spiffe.AllowAnyPeer(), nil))(t).WithAlgorithms(spiffe.AnyAlgorithm())
			must.Get(v.VerifyChain(chain, spiffe.AnyRole))(t)
			time.Sleep(time.Minute)
		}
	})
}
