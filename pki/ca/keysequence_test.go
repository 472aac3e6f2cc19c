package ca_test

import (
	"crypto/x509"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
	"github.com/svidkit/svidkit/spiffe"
)

// A step gives the bundle the next number if a key leaves it, once for each moment, and otherwise it keeps its number: the contents are the same.
func TestSequenceOfSteps(t *testing.T) {
	t.Parallel()
	token := func(k rotation.Key) rotation.Key { k.ID, k.Cert = "token-"+k.Cert.SerialNumber.String(), nil; return k }
	for name, c := range map[string]struct {
		roots, tokens []rotation.Key
		now           time.Time
		steps         int
		more          uint64
	}{
		"nothing":                            {[]rotation.Key{active(1)}, nil, at(100), 0, 0},
		"an activation":                      {[]rotation.Key{active(1), distributing(2, 25)}, nil, at(30), 1, 0},
		"an activation and its retirement":   {[]rotation.Key{active(1), distributing(2, 25)}, nil, at(100), 2, 1},
		"a retirement":                       {[]rotation.Key{retiring(1, 50), active(3)}, nil, at(50), 1, 1},
		"two retirements at one moment":      {[]rotation.Key{retiring(1, 50), retiring(2, 50), active(3)}, nil, at(50), 2, 1},
		"two retirements at two moments":     {[]rotation.Key{retiring(1, 50), retiring(2, 60), active(3)}, nil, at(60), 2, 2},
		"the first of two":                   {[]rotation.Key{retiring(1, 50), retiring(2, 60), active(3)}, nil, at(59), 1, 1},
		"both kinds":                         {[]rotation.Key{retiring(1, 50), active(3)}, []rotation.Key{token(retiring(4, 50)), token(active(5))}, at(50), 2, 2},
		"an activation of a key for tokens":  {[]rotation.Key{active(1)}, []rotation.Key{token(active(4)), token(distributing(5, 25))}, at(30), 1, 0},
		"a retirement beside an activation":  {[]rotation.Key{retiring(1, 50), active(2), distributing(3, 50)}, nil, at(55), 2, 1},
		"a retirement beside one of a token": {[]rotation.Key{retiring(1, 50), active(2)}, []rotation.Key{token(active(4)), token(distributing(5, 50))}, at(50), 2, 1},
	} {
		d := &rotation.Document{Sequence: 7, Keys: [3][]rotation.Key{c.roots, c.tokens}}
		after, steps := d.Advance(c.now)
		assert.Len(t, steps, c.steps, name)
		assert.Equal(t, 7+c.more, after.Sequence, name)
		assert.LessOrEqual(t, after.Sequence, d.NumberOfNext(), name)
		again, more := after.Advance(c.now)
		assert.Same(t, after, again, name)
		assert.Empty(t, more, name)
		assert.EqualValues(t, 7, d.Sequence, name)
	}
}

// Roots from elsewhere are trusted until they end; one that has ended is not added, and the next step of the others is their end.
func TestTrustedUntilTheEnd(t *testing.T) {
	t.Parallel()
	td := spiffe.MustParseTrustDomain("example.org")
	root := func(from, to int) *x509.Certificate {
		key := must.Get(pki.NewKey("ecdsa-p256"))(t)
		issuer, err := pki.NewRoot(key, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(td.ID())}, NotBefore: at(from), NotAfter: at(to)})
		require.NoError(t, err)
		return issuer.Certificate()
	}
	ended, short, long := root(-100, -1), root(-100, 10), root(-100, 1000)
	d := new(rotation.Document)
	require.NoError(t, d.AddTrusted(td, []*x509.Certificate{ended, short, long, short}, at(0)))
	require.Len(t, d.Keys[rotation.Root], 2)
	for i, c := range []*x509.Certificate{short, long} {
		assert.True(t, d.Keys[rotation.Root][i].Cert.Equal(c))
		assert.Equal(t, rotation.Trusted, d.Keys[rotation.Root][i].Phase)
	}
	require.NoError(t, d.AddTrusted(td, []*x509.Certificate{long, ended}, at(0)), "known, and ended")
	require.Len(t, d.Keys[rotation.Root], 2)
	assert.Equal(t, at(10), d.Next().UTC())
	after, steps := d.Advance(at(10))
	require.Len(t, steps, 1)
	require.Len(t, after.Keys[rotation.Root], 1)
	assert.True(t, after.Keys[rotation.Root][0].Cert.Equal(long))
}

// What is full has no room for one more, and room for one less.
func TestRoom(t *testing.T) {
	t.Parallel()
	of := func(n int64) *rotation.Document {
		d := new(rotation.Document)
		for i := range n - 1 {
			d.Keys[rotation.Root] = append(d.Keys[rotation.Root], retiring(i+1, 100))
		}
		d.Keys[rotation.Root] = named(t, append(d.Keys[rotation.Root], active(n))...)
		return d
	}
	full, almost := of(rotation.MaxKeys), of(rotation.MaxKeys-1)
	id := func(d *rotation.Document) string { return d.Keys[rotation.Root][len(d.Keys[rotation.Root])-1].ID }
	require.ErrorIs(t, full.MayPrepare(rotation.Root, true), rotation.ErrRotating)
	require.NoError(t, full.MayPrepare(rotation.Root, false), "a renewal adds none")
	require.NoError(t, almost.MayPrepare(rotation.Root, true))
	assert.False(t, full.NeedsSuccessor(id(full)))
	assert.True(t, almost.NeedsSuccessor(id(almost)))
	other := named(t, active(1000))[0]
	require.NoError(t, almost.ReplaceActive(other, at(0)))
	require.ErrorContains(t, full.ReplaceActive(other, at(0)), "65 roots, the limit is 64")
}
