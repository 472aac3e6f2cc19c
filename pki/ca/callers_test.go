package ca_test

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// callers is a source of the bundle by which a server that signs verifies its callers.
type callers struct{ a *ca.Authority }

func (c callers) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return c.a.CallerBundle().Bundle(td)
}

// door is how a server authenticates callers by their certificate.
func door(t *testing.T, a *ca.Authority) func(chain ...*x509.Certificate) error {
	t.Helper()
	v := must.Get(spiffe.NewVerifier(callers{a}, spiffe.AllowMembersOf(td), nil))(t)
	method := authn.ClientCertificate(v)
	return func(chain ...*x509.Certificate) error {
		_, err := method.Authenticate(&http.Request{TLS: &tls.ConnectionState{PeerCertificates: chain}})
		return err
	}
}

// From the moment of Taint, the thief of a root's key cannot exchange what he signed for a certificate of its
// successor, and workloads go on with what they have.
func TestTaintedRootDoesNotAuthenticate(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, make func(...func(*ca.Config)) *ca.Authority) {
		a := make(func(c *ca.Config) { c.MaxTTL = 90 * 24 * time.Hour })
		enter, csr := door(t, a), newCSR(t)
		assert.Same(t, a.Bundle(), a.CallerBundle(), "nothing is tainted")
		forged := sign(t, a, csr, 90*24*time.Hour) // as a thief has it
		require.NoError(t, enter(forged))
		changed := a.Changed()
		require.NoError(t, a.Taint(t.Context(), a.Roots()[0].ID))
		<-changed
		for range 2 { // what was verified before is not remembered
			require.ErrorIs(t, enter(forged), authn.ErrRefused)
		}
		require.NoError(t, verify(a.Bundle(), forged, time.Now()), "workloads know no better")
		require.ErrorIs(t, enter(sign(t, a, csr, time.Hour)), authn.ErrRefused, "the tainted root still signs")
		_, numbered := a.CallerBundle().Sequence()
		assert.False(t, numbered, "it is not for publishing")
		assert.Same(t, a.CallerBundle(), a.CallerBundle())

		time.Sleep(25 * time.Minute)
		clean := sign(t, a, csr, time.Hour)
		require.NoError(t, enter(clean), "its successor")
		require.ErrorIs(t, enter(forged), authn.ErrRefused)
		require.NoError(t, must.Err(a.Revoke(t.Context(), a.Roots()[0].ID, false)))
		require.NoError(t, enter(clean))
		require.ErrorIs(t, enter(forged), authn.ErrRefused)
		require.Error(t, verify(a.Bundle(), forged, time.Now()))
		assert.Same(t, a.Bundle(), a.CallerBundle(), "nothing is tainted any more")
	})
}

// The same in another replica, and after a start.
func TestTaintReachesReplicas(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		store := ca.NewMemoryStore()
		a, b := open(t, store, withJWT), open(t, store, withJWT)
		run(t, b)
		enter, forged, token := door(t, b), sign(t, b, newCSR(t), time.Hour), signJWT(t, b, time.Hour)
		require.NoError(t, a.Taint(t.Context(), a.Roots()[0].ID))
		require.NoError(t, a.Taint(t.Context(), a.Status().JWTKeys[0].ID))
		time.Sleep(30 * time.Second)
		synctest.Wait()
		for name, x := range map[string]*ca.Authority{"replica": b, "a new start": open(t, store, withJWT)} {
			require.ErrorIs(t, door(t, x)(forged), authn.ErrRefused, name)
			require.Error(t, validate(x.CallerBundle(), token), name)
			require.NoError(t, validate(x.Bundle(), token), name)
		}
		require.ErrorIs(t, enter(forged), authn.ErrRefused)
	})
}

// A directory that another process has written to is read at the next request, without Run.
func TestTaintTakesEffectAtOnce(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "ca")
	of := func() ca.Store {
		return must.Get(ca.NewDirStore(dir))(t)
	}
	operator := open(t, of(), withJWT)
	server := open(t, of(), withJWT)
	enter, leaf := door(t, server), sign(t, server, newCSR(t), time.Hour)
	require.NoError(t, enter(leaf))
	require.NoError(t, operator.Taint(t.Context(), operator.Roots()[0].ID))
	require.ErrorIs(t, enter(leaf), authn.ErrRefused)
	must.Get(operator.Revoke(t.Context(), operator.Roots()[0].ID, true))(t)
	require.NoError(t, enter(sign(t, server, newCSR(t), time.Hour)))
	require.Equal(t, operator.Roots(), server.Roots())
	require.Len(t, server.Roots(), 1)

	require.NoError(t, operator.Taint(t.Context(), operator.Status().JWTKeys[0].ID))
	must.Get(operator.Revoke(t.Context(), operator.Status().JWTKeys[0].ID, true))(t)
	require.NoError(t, validate(operator.CallerBundle(), signJWT(t, server, time.Minute)), "by the new key")

	// A directory that cannot be read costs one request the time for it.
	require.NoError(t, os.WriteFile(filepath.Join(dir, "record.json"), []byte("{}"), 0o600))
	require.NoError(t, enter(sign(t, server, newCSR(t), time.Hour)), "and the last that was read stays")
}

// The keys for tokens of a plugged-in CA are its own, and its roots are not.
func TestTaintPluggedIn(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		root := newOffline(t)
		a := loadCA(t, newFolder(root.files(t, 1000*time.Hour)), withJWT)
		token := signJWT(t, a, time.Minute)
		require.NoError(t, validate(a.CallerBundle(), token))
		require.NoError(t, a.Taint(t.Context(), a.Status().JWTKeys[0].ID))
		require.Error(t, validate(a.CallerBundle(), token))
		chain := must.Get(a.Sign(t.Context(), ca.Request{CSR: newCSR(t), ID: web}))(t)
		require.NoError(t, door(t, a)(chain...))
	})
}

// A root that was renewed with its key has several certificates, and one thief.
func TestTaintAndRevokeAllCertificatesOfAKey(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		cert, key := istioCA(t)
		older := istioRoot(t, key) // the same CA before it was renewed
		ofAge := istioLeaf(t, older, key)
		for _, name := range []string{"taint", "taint the old one", "revoke"} {
			store := put(t, istioSecret(t, cert, key, older))
			a := open(t, store)
			require.Len(t, a.Roots(), 2)
			require.NoError(t, door(t, a)(ofAge))
			old, active := a.Roots()[0].ID, a.Roots()[1].ID
			switch name {
			case "taint":
				require.NoError(t, a.Taint(t.Context(), active))
			case "taint the old one":
				require.NoError(t, a.Taint(t.Context(), old))
			case "revoke":
				require.ErrorIs(t, must.Err(a.Revoke(t.Context(), old, false)), ca.ErrActive, "what it signed would verify with the other one")
				must.Get(a.Revoke(t.Context(), old, true))(t)
				require.Len(t, a.Roots(), 1)
				require.Error(t, verify(a.Bundle(), ofAge, time.Now()))
				continue
			}
			require.ErrorIs(t, door(t, a)(ofAge), authn.ErrRefused, name)
			require.Len(t, a.Roots(), 3, "there is a successor")
			require.True(t, a.Roots()[0].Tainted && a.Roots()[1].Tainted)

			// Another program renews the tainted root: it stays tainted.
			r := load(t, store)
			r.Data()["ca-cert.pem"] = pki.MarshalCertificatesPEM(istioRoot(t, key))
			must.Get(store.Save(t.Context(), r))(t)
			b := open(t, store)
			require.ErrorIs(t, door(t, b)(ofAge), authn.ErrRefused, name)
			for _, k := range b.Roots() {
				require.Equal(t, k.Phase != "distributing", k.Tainted, "%v", k)
			}
		}
	})
}

// A chain of renewals by certificate alone carries the time at which it began.
func TestProven(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, make func(...func(*ca.Config)) *ca.Authority) {
		a := make(func(c *ca.Config) { c.MaxTTL = 24 * time.Hour })
		run(t, a)
		csr, began := newCSR(t), time.Now()
		leaf := sign(t, a, csr, 0)
		for range 20 {
			require.Equal(t, began.Unix(), a.Proven(leaf).Unix())
			time.Sleep(11*time.Hour + 333*time.Millisecond)
			chain := must.Get(a.Sign(t.Context(), ca.Request{CSR: csr, ID: web, Proven: a.Proven(leaf)}))(t)
			require.Equal(t, time.Now().Add(-2*time.Minute).Unix(), chain[0].NotBefore.Unix(), "as clients compute with it")
			leaf = chain[0]
		}
		again := sign(t, a, csr, 0)
		require.Equal(t, time.Now().Unix(), a.Proven(again).Unix(), "another proof begins anew")

		now := time.Now()
		for name, tt := range map[string]struct{ given, want time.Time }{
			"the future":  {now.Add(time.Hour), now},
			"now":         {now, now},
			"long ago":    {now.Add(-50 * 365 * 24 * time.Hour), time.Unix(0, 0)},
			"a past time": {time.Unix(1_000_000, 999_999_999), time.Unix(1_000_000, 0)},
		} {
			chain := must.Get(a.Sign(t.Context(), ca.Request{CSR: csr, ID: web, Proven: tt.given}))(t)
			require.Equal(t, tt.want.Unix(), a.Proven(chain[0]).Unix(), name)
		}
	})
}

// What a serial number says must be possible, and no other number says anything.
func TestProvenOfOtherSerialNumbers(t *testing.T) {
	t.Parallel()
	a := newAuthority(t, func(c *ca.Config) { c.MaxTTL = time.Hour })
	leaf := sign(t, a, newCSR(t), time.Hour)
	ours := leaf.SerialNumber.Bytes()
	require.Len(t, ours, 20)
	number := func(edit func(b []byte) []byte) *big.Int { return new(big.Int).SetBytes(edit(bytes.Clone(ours))) }
	for name, n := range map[string]*big.Int{
		"another mark":                 number(func(b []byte) []byte { b[19]++; return b }),
		"a first bit of another form":  number(func(b []byte) []byte { b[0] ^= 0x40; return b }),
		"the mark of a shorter number": number(func(b []byte) []byte { return b[1:] }),
		"16 octets":                    number(func(b []byte) []byte { return b[4:] }),
		"21 octets":                    number(func(b []byte) []byte { return append(b, 1) }),
		"negative":                     new(big.Int).Neg(leaf.SerialNumber),
		"zero":                         new(big.Int),
		"none":                         nil,
		"a time after the signature":   number(func(b []byte) []byte { b[14]++; return b }), // 65,536 seconds
		"the end of time":              number(func(b []byte) []byte { copy(b[13:], "\xff\xff\xff\xff"); return b }),
	} {
		c := *leaf
		c.SerialNumber = n
		assert.Equal(t, leaf.NotBefore, a.Proven(&c), name)
	}
	// To the second: the lifetime, or the backdating if that is longer, after NotBefore, and never after NotAfter.
	for _, tt := range []struct{ backdate, lives, latest time.Duration }{
		{2 * time.Minute, 24 * time.Hour, time.Hour},
		{2 * time.Minute, time.Hour, time.Hour},
		{2 * time.Minute, 10 * time.Minute, 10 * time.Minute},
		{3 * time.Hour, 24 * time.Hour, 3 * time.Hour},
	} {
		a := newAuthority(t, func(c *ca.Config) { c.MaxTTL, c.Backdate = time.Hour, tt.backdate })
		for _, late := range []time.Duration{-time.Second, 0, time.Second} {
			c := *leaf
			c.NotAfter = c.NotBefore.Add(tt.lives)
			says := c.NotBefore.Add(tt.latest + late)
			c.SerialNumber = number(func(b []byte) []byte { binary.BigEndian.PutUint32(b[13:], uint32(says.Unix())); return b })
			want := says
			if late > 0 {
				want = c.NotBefore
			}
			assert.Equal(t, want.Unix(), a.Proven(&c).Unix(), "%+v, %v after that", tt, late)
		}
	}
	earlier := *leaf
	earlier.SerialNumber = number(func(b []byte) []byte { copy(b[13:], "\x00\x00\x00\x07"); return b })
	assert.Equal(t, time.Unix(7, 0), a.Proven(&earlier))
}

// RFC 5280, section 4.1.2.2: positive, at most 20 octets; and as hard to guess as other numbers of ours.
func TestSerialNumbers(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.6-1")
	a, csr := newAuthority(t), newCSR(t)
	proven := time.Now().Add(-time.Hour)
	seen := map[string]bool{}
	var ones [160]int
	const n = 400
	for range n {
		chain := must.Get(a.Sign(t.Context(), ca.Request{CSR: csr, ID: web, Proven: proven}))(t)
		serial := chain[0].SerialNumber
		require.Equal(t, 1, serial.Sign())
		require.Equal(t, 159, serial.BitLen())
		require.False(t, seen[serial.String()])
		seen[serial.String()] = true
		for bit := range ones {
			ones[bit] += int(serial.Bit(bit))
		}
	}
	random := 0
	for _, count := range ones {
		if count > n/4 && count < 3*n/4 {
			random++
		}
	}
	assert.GreaterOrEqual(t, random, 96)
	first := map[byte]bool{}
	for s := range seen {
		n, _ := new(big.Int).SetString(s, 10)
		first[n.Bytes()[0]] = true
	}
	assert.Greater(t, len(first), 32, "the first digits tell them apart")
}
