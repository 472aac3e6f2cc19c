package certs_test

import (
	"crypto/rsa"
	"crypto/x509"
	"math/big"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func TestCertchainCheckSize(t *testing.T) {
	t.Parallel()
	leaf := spiffetest.NewCA(t, "example.org").SVID("/web").Leaf()
	most := slices.Repeat([]*x509.Certificate{leaf}, 16)
	require.NoError(t, certchain.CheckSize(most))
	require.ErrorContains(t, certchain.CheckSize(nil), "empty")
	require.ErrorContains(t, certchain.CheckSize([]*x509.Certificate{leaf, nil}), "nil")
	require.ErrorIs(t, certchain.CheckSize(append(most, leaf)), spiffe.ErrTooLarge)
	require.NoError(t, certchain.CheckSize([]*x509.Certificate{{Raw: make([]byte, 64<<10)}}))
	require.ErrorIs(t, certchain.CheckSize([]*x509.Certificate{leaf, {Raw: make([]byte, 64<<10)}}), spiffe.ErrTooLarge)
}

func TestCertchainSelfSigned(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	assert.True(t, certchain.SelfSigned(ca.Root()))
	assert.False(t, certchain.SelfSigned(ca.Intermediate().SVID("/web").Chain()[1]))
	assert.False(t, certchain.SelfSigned(ca.SVID("/web").Leaf()))

	// The link from an old root to a new one of the same name is signed by the old.
	link := *ca.Root()
	link.Signature = slices.Clone(link.Signature)
	link.Signature[len(link.Signature)-1] ^= 1
	assert.False(t, certchain.SelfSigned(&link))
}

// A CA cannot make us compute with a huge key: a modulus that fills the chain takes a quarter of a minute.
func TestCertchainHugeKeys(t *testing.T) {
	t.Parallel()
	leaf := spiffetest.NewCA(t, "example.org").SVID("/web").Leaf()
	// root says that it is self-signed, and looks it until its signature is checked.
	root := func(bits uint) *x509.Certificate {
		n := new(big.Int).Lsh(big.NewInt(1), bits)
		n.Sub(n, big.NewInt(1))
		signature := make([]byte, (bits+7)/8)
		signature[len(signature)-1] = 2
		return &x509.Certificate{
			Version: 3, IsCA: true, BasicConstraintsValid: true, Raw: []byte{1}, RawTBSCertificate: []byte{1},
			PublicKeyAlgorithm: x509.RSA, SignatureAlgorithm: x509.SHA256WithRSA, Signature: signature,
			PublicKey: &rsa.PublicKey{N: n, E: 1<<31 - 1},
		}
	}
	assert.NoError(t, certchain.CheckSize([]*x509.Certificate{leaf, root(8192)}))
	for _, bits := range []uint{8193, 400_000} {
		err := certchain.CheckSize([]*x509.Certificate{leaf, root(bits)})
		assert.ErrorIs(t, err, spiffe.ErrTooLarge)
		assert.ErrorContains(t, err, "certificate 2 has an RSA key of ")
	}
	assert.False(t, certchain.SelfSigned(root(400_000)))
}
