package rotation

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// named returns keys with IDs and key pairs; same are two certificates of one key pair.
func named(t *testing.T, keys ...Key) []Key {
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
	long := Terms{Longest: 48 * time.Hour, Grace: time.Hour, Propagation: 2 * time.Hour}
	begin := func() *Document {
		d := &Document{Keys: [2][]Key{named(t, active(1), distributing(2, 25))}}
		d.Keys[Root][0].Terms = long
		return d
	}
	d := begin()
	after := must.Get(d.Revoke("1", func() (Key, error) { panic("there is one") }, at(10)))(t)
	assert.Equal(t, "2", after.ID)
	assert.Equal(t, long, after.Terms)
	require.Len(t, d.Keys[Root], 1)

	d = &Document{Keys: [2][]Key{begin().Keys[Root][:1]}}
	after = must.Get(d.Revoke("1", func() (Key, error) { return named(t, signing(3))[0], nil }, at(10)))(t)
	assert.Equal(t, long, after.Terms)
	assert.Equal(t, at(10), after.Prepared)

	d = begin()
	require.NoError(t, d.ReplaceActive(named(t, active(9))[0], at(10)))
	assert.Equal(t, "9", d.In(Root, Active).ID)
	assert.Equal(t, long, d.In(Root, Active).Terms)
	assert.Equal(t, "1:retiring@3070 9:active 2:distributing@25", timeline(d.Keys[Root]), "the longest leaf of a replica that learns of it in two hours")
}

// What is tainted is tainted once: the first grace counts. Each certificate of its key pair is, and nothing that one of them signed proves a caller.
func TestTaintOfTwins(t *testing.T) {
	t.Parallel()
	td := spiffe.MustParseTrustDomain("example.org")
	var certs []Key
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	for i := range 3 {
		if i == 2 {
			key = must.Get(pki.NewKey("ecdsa-p256"))(t)
		}
		issuer, err := pki.NewRoot(key, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(td.ID())}, NotBefore: at(-100), NotAfter: at(100000)})
		require.NoError(t, err)
		k := Key{ID: Serial(issuer.Certificate()), Cert: issuer.Certificate(), Phase: Retiring, Retires: at(1000)}
		if i == 2 {
			k.Phase, k.Retires = Active, time.Time{}
		}
		certs = append(certs, k)
	}
	d := &Document{Keys: [2][]Key{certs}}
	require.True(t, d.Taint(certs[0].ID, 10*time.Minute, at(0)))
	for _, k := range d.Keys[Root][:2] {
		assert.True(t, k.Tainted)
		assert.Equal(t, at(10), k.Retires)
	}
	assert.False(t, d.Keys[Root][2].Tainted)
	before := d.Clone()
	for _, grace := range []time.Duration{time.Minute, time.Hour} {
		require.False(t, d.Taint(certs[1].ID, grace, at(1)), "it is")
		assert.Equal(t, before, d)
	}
	// One of them may not say so, as it joined the bundle since.
	d.Keys[Root][1].Tainted = false
	clean := d.Untainted()
	require.Len(t, clean.X509Authorities, 1)
	assert.True(t, clean.X509Authorities[0].Equal(certs[2].Cert))
	require.Len(t, d.Contents().X509Authorities, 3)
}

// A reader keeps when it first met a key, and notes it for one that it meets now.
func TestMet(t *testing.T) {
	t.Parallel()
	known := &Document{Keys: [2][]Key{named(t, active(1), distributing(2, 25))}}
	for i := range known.Keys[Root] {
		known.Keys[Root][i].Met = at(3)
	}
	read := known.Clone()
	read.Keys[Root] = append(read.Keys[Root], named(t, retiring(4, 50))...)
	for i := range read.Keys[Root] {
		read.Keys[Root][i].Met = time.Time{}
	}
	after := read.Merge(known, at(7))
	var met []time.Time
	for _, k := range after.Keys[Root] {
		met = append(met, k.Met)
	}
	assert.Equal(t, []time.Time{at(3), at(3), at(7)}, met)
}

// The number after a decision is above each that time alone leads to.
func TestNumberOfNext(t *testing.T) {
	t.Parallel()
	until := trusted(3)
	until.Retires = at(60)
	for _, keys := range [][]Key{
		{active(1)}, {active(1), distributing(2, 25)}, {retiring(1, 50), active(2)}, {until, active(2)},
		{until, retiring(1, 50), active(2), distributing(4, 55)}, {until, retiring(1, 60), active(2)},
	} {
		d := &Document{Sequence: 7, Keys: [2][]Key{keys}}
		after, _ := d.Advance(at(1e6))
		assert.Greater(t, d.NumberOfNext(), after.Sequence, timeline(keys))
	}
}
