package certchain_test

import (
	"crypto/x509"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/certchain"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func TestCheckSize(t *testing.T) {
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

func TestSelfSigned(t *testing.T) {
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
