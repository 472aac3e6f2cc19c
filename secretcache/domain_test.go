package secretcache_test

import (
	"context"
	"errors"
	"io/fs"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// A Manager with a TrustDomain has the identities that were added, and no other: it is ready with its bundles alone, before
// the first identity and after the last.
func TestWithoutDefaultIdentity(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		td := spiffe.MustParseTrustDomain("example.org")
		authority, err := ca.New(ca.Config{TrustDomain: td})
		require.NoError(t, err)
		issuer := must.Get(local.NewFunc(authority, func(_ context.Context, csr *pki.CSR) (spiffe.ID, error) {
			return csr.ID()
		}))(t)
		m := must.Get(secretcache.New(secretcache.Config{TrustDomain: td, CA: issuer}))(t)
		assert.Nil(t, m.Bundles())
		assert.ErrorIs(t, m.Report().NotReady, spiffe.ErrNotReady)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- m.Run(ctx) }()
		require.NoError(t, m.Ready(ctx))
		must.Get(m.Bundles().Bundle(td))(t)
		require.NoError(t, m.Report().NotReady)
		assert.Empty(t, m.Report().Identities)

		assert.ErrorIs(t, must.ErrorOf(m.SVID()), errors.ErrUnsupported)
		assert.ErrorIs(t, must.ErrorOf(m.Snapshot()), errors.ErrUnsupported)
		assert.ErrorIs(t, must.ErrorOf(m.Credential()), errors.ErrUnsupported)
		assert.ErrorIs(t, must.ErrorOf(m.GenerateSecret(ctx, "default")), fs.ErrNotExist)

		web := spiffe.MustParseID("spiffe://example.org/web")
		require.NoError(t, m.Add(web))
		first := must.Get(m.GenerateSecret(ctx, web.String()))(t)
		time.Sleep(time.Hour) // of a day
		synctest.Wait()
		require.Len(t, m.Report().Identities, 1)
		assert.False(t, m.Report().Identities[0].Own)
		time.Sleep(20 * time.Hour)
		synctest.Wait()
		second := must.Get(m.GenerateSecret(ctx, web.String()))(t)
		assert.True(t, second.NotAfter().After(first.NotAfter()), "it was renewed")
		var out strings.Builder
		require.NoError(t, m.Report().Metrics(&out))
		assert.Contains(t, out.String(), `svidkit_secretcache_identities{state="valid"} 1`)

		m.Remove(web)
		assert.ErrorIs(t, must.ErrorOf(m.GenerateSecret(ctx, web.String())), fs.ErrNotExist)
		require.NoError(t, m.Ready(ctx))
		cancel()
		require.NoError(t, <-done)

		_, err = secretcache.New(secretcache.Config{TrustDomain: td, ID: web, CA: issuer})
		assert.ErrorContains(t, err, "has its own")
	})
}
