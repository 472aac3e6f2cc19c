//go:build go1.27

package ca_test

import (
	"context"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// TestKindsOfCommands: only Run adds and ends a kind of roots. A program that opens the store without the setting, such as
// an operator's command, changes keys of both kinds and leaves both there.
func TestKindsOfCommands(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	synctest.Test(t, func(t *testing.T) {
		store := must.Get(ca.NewDirStore(filepath.Join(t.TempDir(), "ca")))(t)
		open := func(keys string) *ca.Authority {
			return must.Get(ca.Open(t.Context(), ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org"), Create: true,
				DefaultTTL: time.Hour, MaxTTL: time.Hour, Rotation: ca.Rotation{KeyAlgorithm: keys}}, store))(t)
		}
		run := func(a *ca.Authority, d time.Duration) {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			defer cancel()
			require.NoError(t, a.Run(ctx))
		}
		roots := func(a *ca.Authority) (all []string) {
			for _, k := range a.Status().Roots {
				all = append(all, k.Phase+" "+k.Certificate.SignatureAlgorithm.String())
			}
			return all
		}
		const classical, quantum = "active ECDSA-SHA256", "active ML-DSA-44"
		server := open("ecdsa-p256")
		run(server, time.Minute)
		server = open("ml-dsa-44,ecdsa-p256")
		assert.Equal(t, []string{classical}, roots(server), "the server does not run yet")
		run(server, 5*time.Hour)
		require.Equal(t, []string{classical, quantum}, roots(server))

		command := open("")
		assert.Equal(t, []string{classical, quantum}, roots(command))
		must.Get(command.Rotate(t.Context()))(t)
		assert.Equal(t, []string{classical, "distributing ECDSA-SHA256", quantum, "distributing ML-DSA-44"}, roots(command))
		run(server, 5*time.Hour)
		require.Equal(t, []string{classical, quantum}, roots(server))
		for i, want := range [][]string{
			{"active ECDSA-SHA256", "distributing ECDSA-SHA256", "active ML-DSA-44"},
			{"active ECDSA-SHA256", "active ML-DSA-44", "distributing ML-DSA-44"},
		} {
			command, id := open(""), server.Status().Roots[i].ID
			require.NoError(t, command.Taint(t.Context(), id))
			assert.Equal(t, want, roots(command))
			must.Get(command.Revoke(t.Context(), id, true))(t)
			assert.Equal(t, []string{classical, quantum}, roots(command))
			must.Get(command.Revoke(t.Context(), command.Status().Roots[i].ID, true))(t)
			assert.Equal(t, []string{classical, quantum}, roots(command), "a successor that no peer knows signs")
			run(server, time.Minute)
			require.Equal(t, roots(command), roots(server))
		}

		// From one kind to the other in one step: the one stays until the other signs.
		server = open("ml-dsa-44")
		run(server, time.Minute)
		require.Equal(t, []string{"retiring ECDSA-SHA256", quantum}, roots(server))
		run(server, 5*time.Hour)
		must.Get(open("").Rotate(t.Context()))(t)
		run(server, 5*time.Hour)
		require.Equal(t, []string{quantum}, roots(server))
		server = open("ecdsa-p256")
		run(server, time.Minute)
		require.Equal(t, []string{"distributing ECDSA-SHA256", quantum}, roots(server))
		run(server, 5*time.Hour)
		require.Equal(t, []string{classical}, roots(server))

		// A kind that is no longer wanted before it signs is ended like one that does.
		server = open("ecdsa-p256,ml-dsa-44")
		run(server, time.Minute)
		require.Equal(t, []string{classical, "distributing ML-DSA-44"}, roots(server))
		server = open("ecdsa-p256")
		run(server, time.Minute)
		require.Equal(t, []string{classical, "retiring ML-DSA-44"}, roots(server))
		run(server, 5*time.Hour)
		require.Equal(t, []string{classical}, roots(server))
	})
}

// TestKindsKeepKey: with KeepKey Run renews the root of each kind before it ends.
func TestKindsKeepKey(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := must.Get(ca.NewDirStore(filepath.Join(t.TempDir(), "ca")))(t)
		a := must.Get(ca.Open(t.Context(), ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org"), Create: true,
			DefaultTTL: time.Hour, MaxTTL: time.Hour, Rotation: ca.Rotation{KeyAlgorithm: "ecdsa-p256,ml-dsa-44",
				RootTTL: 100 * time.Hour, KeepKey: true, NoJitter: true}}, store))(t)
		ctx, cancel := context.WithTimeout(t.Context(), 99*time.Hour)
		defer cancel()
		require.NoError(t, a.Run(ctx))
		for _, k := range a.Status().Roots {
			assert.Greater(t, time.Until(k.Certificate.NotAfter), 15*time.Hour, k)
		}
	})
}
