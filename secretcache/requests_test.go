package secretcache_test

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/rsa"
	"crypto/x509"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// kept is a CA that keeps what it is asked for.
type kept struct {
	caclient.CA
	requests  []*x509.CertificateRequest
	lifetimes []time.Duration
}

func (k *kept) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	r, err := x509.ParseCertificateRequest(csr.DER())
	if err != nil {
		return nil, err
	}
	k.requests, k.lifetimes = append(k.requests, r), append(k.lifetimes, lifetime)
	return k.CA.Sign(ctx, csr, lifetime)
}

// A request has the identity, a new key of the kind that was chosen, the lifetime, and no subject.
func TestRequests(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-7.5-3", "IST-7.5-4")
	for kind, want := range map[pki.KeyAlgorithm]string{
		pki.ECDSAP256: "P-256", pki.ECDSAP384: "P-384", pki.RSA2048: "RSA 2048",
	} {
		synctest.Test(t, func(t *testing.T) {
			k := &kept{CA: spiffetest.NewCA(t, "example.org")}
			m := newManager(t, secretcache.Config{CA: k, Lifetime: 2 * time.Hour, NewKey: func() (crypto.Signer, error) { return pki.NewKey(kind) }})
			start(t, m)
			time.Sleep(5 * time.Hour)
			synctest.Wait()
			require.Greater(t, len(k.requests), 3)
			seen := map[string]bool{}
			for i, r := range k.requests {
				assert.Empty(t, r.Subject.Names)
				require.Len(t, r.URIs, 1)
				assert.Equal(t, web.String(), r.URIs[0].String())
				switch public := r.PublicKey.(type) {
				case *ecdsa.PublicKey:
					assert.Equal(t, want, public.Params().Name)
				case *rsa.PublicKey:
					assert.Equal(t, want, fmt.Sprint("RSA ", public.N.BitLen()))
				default:
					assert.Fail(t, "another kind of key", "%T", public)
				}
				assert.Equal(t, 2*time.Hour, k.lifetimes[i])
				key := fmt.Sprint(r.RawSubjectPublicKeyInfo)
				assert.False(t, seen[key], "a key is used twice")
				seen[key] = true
			}
		})
	}
}
