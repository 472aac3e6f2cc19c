//go:build go1.27

package ca_test

import (
	"bytes"
	"context"
	"crypto"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/custodian"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// TestQuantumRecord: the record of a CA has two roots of each kind and two keys for tokens in a small part of what a store
// holds, of which a Secret of Kubernetes has the least: 1 MiB.
func TestQuantumRecord(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	store := must.Get(ca.NewDirStore(filepath.Join(t.TempDir(), "ca")))(t)
	a := must.Get(ca.Open(t.Context(), ca.Config{TrustDomain: quantum.TrustDomain, Create: true, Algorithms: spiffe.AnyAlgorithm(),
		Rotation: ca.Rotation{KeyAlgorithm: "ecdsa-p256,ml-dsa-65"}, JWT: &ca.JWTConfig{Algorithm: "ML-DSA-65"}}, store))(t)
	must.Get(a.Rotate(t.Context()))(t)
	must.Get(a.RotateJWT(t.Context()))(t)
	require.Len(t, slices.Collect(a.Bundle().X509Authorities()), 4)
	size := 0
	for _, item := range must.Get(store.Load(t.Context()))(t).Data() {
		size += len(item)
	}
	doc := must.Get(a.Bundle().Marshal())(t)
	t.Log(size, "bytes of record,", len(doc), "of bundle document,", len(a.Bundle().MarshalPEM()), "of roots in PEM")
	assert.Less(t, size, 64<<10)
	assert.Less(t, len(doc), 64<<10)

	token := must.Get(a.IssueJWTSVID(t.Context(), must.Get(quantum.TrustDomain.WorkloadID("web"))(t), []string{"db"}))(t)
	v := must.Get(jwtsvid.NewValidator(a.Bundle(), []string{"db"}, &jwtsvid.ValidatorOptions{Algorithms: spiffe.AnyAlgorithm()}))(t)
	must.Get(v.Validate(token))(t)
}

// TestQuantumSign: a CA certifies the kinds of keys that it allows, and no others, whatever its roots are.
func TestQuantumSign(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	id := must.Get(quantum.TrustDomain.WorkloadID("web"))(t)
	for _, roots := range []string{"", "ml-dsa-44", "ml-dsa-65", "ecdsa-p256,ml-dsa-65"} {
		for text, allowed := range map[string]string{"": "ecdsa-p256", "ml-dsa-65": "ml-dsa-65", "ecdsa,ml-dsa-44": "ecdsa-p256 ml-dsa-44"} {
			var algorithms spiffe.Algorithms
			if text != "" {
				algorithms = must.Get(spiffe.ParseAlgorithms(text))(t)
			}
			a := must.Get(ca.New(ca.Config{TrustDomain: quantum.TrustDomain, Algorithms: algorithms,
				Rotation: ca.Rotation{KeyAlgorithm: roots}}))(t)
			for _, kind := range []string{"ecdsa-p256", "ml-dsa-44", "ml-dsa-65"} {
				csr := must.Get(pki.NewCSR(must.Get(pki.NewKey(kind))(t), pki.CSROptions{}))(t)
				chain, err := a.Sign(t.Context(), ca.Request{CSR: csr, ID: id, TTL: time.Hour})
				if slices.Contains(strings.Fields(allowed), kind) {
					require.NoError(t, err, "%s by %q, allowed: %s", kind, roots, text)
					assert.True(t, pki.PublicKeysEqual(csr.PublicKey(), chain[0].PublicKey))
					continue
				}
				require.ErrorIs(t, err, spiffe.ErrAlgorithm, "%s by %q, allowed: %s", kind, roots, text)
				assert.ErrorIs(t, err, ca.ErrCSR)
			}
		}
	}
}

// noQuantum is a custodian that makes no keys of ML-DSA, as those for PKCS#11, TPMs and Vault.
type noQuantum struct{ *custodian.Custodian }

func (c noQuantum) NewKey(ctx context.Context, name, algorithm string) (crypto.Signer, error) {
	if strings.HasPrefix(algorithm, "ml-dsa") {
		return nil, fmt.Errorf("custodian: %w: the algorithm %q", errors.ErrUnsupported, algorithm)
	}
	return c.Custodian.NewKey(ctx, name, algorithm)
}

// TestQuantumCustodian: a custodian that has no ML-DSA makes no new CA of it. A CA that moves to both kinds keeps its
// classical root, which signs, and says what is missing.
func TestQuantumCustodian(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	synctest.Test(t, func(t *testing.T) {
		store, keys, log := ca.NewMemoryStore(), noQuantum{custodian.New()}, new(bytes.Buffer)
		open := func(roots string) (*ca.Authority, error) {
			return ca.Open(t.Context(), ca.Config{TrustDomain: quantum.TrustDomain, Create: true, DefaultTTL: time.Hour, MaxTTL: time.Hour,
				Algorithms: spiffe.AnyAlgorithm(), Custody: ca.Custody{Keys: keys}, Logger: slog.New(slog.NewTextHandler(log, nil)),
				Rotation: ca.Rotation{KeyAlgorithm: roots, RootTTL: 12 * time.Hour}}, store)
		}
		for _, roots := range []string{"ml-dsa-65", "ecdsa-p256,ml-dsa-44"} {
			_, err := open(roots)
			require.ErrorIs(t, err, errors.ErrUnsupported, roots)
			require.ErrorContains(t, err, "ml-dsa")
		}
		first := must.Get(open("ecdsa-p256"))(t).Status().Roots[0].ID
		a := must.Get(open("ecdsa-p256,ml-dsa-65"))(t)
		ctx, cancel := context.WithTimeout(t.Context(), 24*time.Hour)
		defer cancel()
		require.NoError(t, a.Run(ctx))
		assert.NotEqual(t, first, a.Status().Roots[0].ID, "the classical root was replaced")
		for _, kind := range []string{"ecdsa-p256", "ml-dsa-65"} {
			csr := must.Get(pki.NewCSR(must.Get(pki.NewKey(kind))(t), pki.CSROptions{}))(t)
			chain := must.Get(a.Sign(t.Context(), ca.Request{CSR: csr, ID: must.Get(quantum.TrustDomain.WorkloadID("web"))(t)}))(t)
			assert.Equal(t, "ECDSA-SHA256", chain[0].SignatureAlgorithm.String())
		}
		assert.NoError(t, a.Health().Signing)
		assert.Contains(t, log.String(), "custodian: unsupported operation: the algorithm")
	})
}
