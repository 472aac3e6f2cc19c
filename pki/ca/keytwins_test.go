package ca_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
	"github.com/svidkit/svidkit/spiffe"
)

// named returns keys with IDs and key pairs of their own.
func named(t *testing.T, keys ...rotation.Key) []rotation.Key {
	t.Helper()
	for i := range keys {
		key := must.Get(pki.NewKey("ecdsa-p256"))(t)
		keys[i].ID, keys[i].Cert.PublicKey, keys[i].Cert.Raw = keys[i].Cert.SerialNumber.Text(16), key.Public(), keys[i].Cert.SerialNumber.Bytes()
	}
	return keys
}

// What takes the place of a key keeps its terms, as others may have signed by them: revoked, replaced, or renewed.
func TestTermsGoOn(t *testing.T) {
	t.Parallel()
	long := rotation.Terms{Longest: 48 * time.Hour, Grace: time.Hour, Propagation: 2 * time.Hour}
	begin := func() *rotation.Document {
		d := &rotation.Document{Keys: [3][]rotation.Key{named(t, active(1), distributing(2, 25))}}
		d.Keys[rotation.Root][0].Terms = long
		return d
	}
	d := begin()
	after := must.Get(d.Revoke("1", func() (rotation.Key, error) { panic("there is one") }, at(10)))(t)
	assert.Equal(t, "2", after.ID)
	assert.Equal(t, long, after.Terms)
	require.Len(t, d.Keys[rotation.Root], 1)

	d = &rotation.Document{Keys: [3][]rotation.Key{begin().Keys[rotation.Root][:1]}}
	after = must.Get(d.Revoke("1", func() (rotation.Key, error) { return named(t, signing(3))[0], nil }, at(10)))(t)
	assert.Equal(t, long, after.Terms)
	assert.Equal(t, at(10), after.Prepared)

	d = begin()
	require.NoError(t, d.ReplaceActive(named(t, active(9))[0], at(10)))
	assert.Equal(t, "9", d.In(rotation.Root, rotation.Active).ID)
	assert.Equal(t, long, d.In(rotation.Root, rotation.Active).Terms)
	assert.Equal(t, "1:retiring@3070 9:active 2:distributing@25", timeline(d.Keys[rotation.Root]), "the longest leaf of a replica that learns of it in two hours")
}

// What is tainted is tainted once: the first grace counts. Each certificate of its key pair is, and nothing that one of them signed proves a caller.
func TestTaintOfTwins(t *testing.T) {
	t.Parallel()
	td := spiffe.MustParseTrustDomain("example.org")
	var certs []rotation.Key
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	for i := range 3 {
		if i == 2 {
			key = must.Get(pki.NewKey("ecdsa-p256"))(t)
		}
		issuer, err := pki.NewRoot(key, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(td.ID())}, NotBefore: at(-100), NotAfter: at(100000)})
		require.NoError(t, err)
		k := rotation.Key{ID: rotation.Serial(issuer.Certificate()), Cert: issuer.Certificate(), Phase: rotation.Retiring, Retires: at(1000)}
		if i == 2 {
			k.Phase, k.Retires = rotation.Active, time.Time{}
		}
		certs = append(certs, k)
	}
	d := &rotation.Document{Keys: [3][]rotation.Key{certs}}
	require.True(t, d.Taint(certs[0].ID, 10*time.Minute, at(0)))
	for _, k := range d.Keys[rotation.Root][:2] {
		assert.True(t, k.Tainted)
		assert.Equal(t, at(10), k.Retires)
	}
	assert.False(t, d.Keys[rotation.Root][2].Tainted)
	before := d.Clone()
	for _, grace := range []time.Duration{time.Minute, time.Hour} {
		require.False(t, d.Taint(certs[1].ID, grace, at(1)), "it is")
		assert.Equal(t, before, d)
	}
	// One of them may not say so, as it joined the bundle since.
	d.Keys[rotation.Root][1].Tainted = false
	clean := d.Untainted()
	require.Len(t, clean.X509Authorities, 1)
	assert.True(t, clean.X509Authorities[0].Equal(certs[2].Cert))
	require.Len(t, d.Contents().X509Authorities, 3)
}

// A reader keeps when it first met a key, and notes it for one that it meets now.
func TestMet(t *testing.T) {
	t.Parallel()
	known := &rotation.Document{Keys: [3][]rotation.Key{named(t, active(1), distributing(2, 25))}}
	for i := range known.Keys[rotation.Root] {
		known.Keys[rotation.Root][i].Met = at(3)
	}
	read := known.Clone()
	read.Keys[rotation.Root] = append(read.Keys[rotation.Root], named(t, retiring(4, 50))...)
	for i := range read.Keys[rotation.Root] {
		read.Keys[rotation.Root][i].Met = time.Time{}
	}
	after := read.Merge(known, at(7))
	var met []time.Time
	for _, k := range after.Keys[rotation.Root] {
		met = append(met, k.Met)
	}
	assert.Equal(t, []time.Time{at(3), at(3), at(7)}, met)
}

// The number after a decision is above each that time alone leads to.
func TestNumberOfNext(t *testing.T) {
	t.Parallel()
	until := trusted(3)
	until.Retires = at(60)
	for _, keys := range [][]rotation.Key{
		{active(1)}, {active(1), distributing(2, 25)}, {retiring(1, 50), active(2)}, {until, active(2)},
		{until, retiring(1, 50), active(2), distributing(4, 55)}, {until, retiring(1, 60), active(2)},
	} {
		d := &rotation.Document{Sequence: 7, Keys: [3][]rotation.Key{keys}}
		after, _ := d.Advance(at(1e6))
		assert.Greater(t, d.NumberOfNext(), after.Sequence, timeline(keys))
	}
}
