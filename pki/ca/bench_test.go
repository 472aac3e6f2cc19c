package ca_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"testing"
	"time"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
)

// BenchmarkParseAndSign is a request from its bytes to the certificate. It reports the time as a
// multiple of the cryptography that no CA can do without, measured in the same loop: one
// verification, of the request, and one signature.
func BenchmarkParseAndSign(b *testing.B) {
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(b)
	digest := sha256.Sum256([]byte("digest"))
	sig := must.Get(ecdsa.SignASN1(rand.Reader, key, digest[:]))(b)
	a, der := newAuthority(b), newCSR(b, pki.IDSAN(web)).DER()

	var bare, whole time.Duration
	b.ReportAllocs()
	for b.Loop() {
		start := time.Now()
		csr, err := pki.ParseCSR(der)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := a.Sign(b.Context(), ca.Request{CSR: csr, ID: web}); err != nil {
			b.Fatal(err)
		}
		whole += time.Since(start)

		b.StopTimer()
		start = time.Now()
		if !ecdsa.VerifyASN1(&key.PublicKey, digest[:], sig) {
			b.Fatal("does not verify")
		}
		if _, err := ecdsa.SignASN1(rand.Reader, key, digest[:]); err != nil {
			b.Fatal(err)
		}
		bare += time.Since(start)
		b.StartTimer()
	}
	b.ReportMetric(float64(whole)/float64(bare), "x-bare")
}

// BenchmarkSign signs without parsing the request, for each kind of root, with a memory store and
// without, and with an audit record that costs nothing.
func BenchmarkSign(b *testing.B) {
	p256 := func(*ca.Config) {}
	rsa := func(c *ca.Config) { c.Rotation.KeyAlgorithm = pki.RSA2048 }
	audit := func(c *ca.Config) { c.Auditor = nowhere{} }
	limits := func(c *ca.Config) { c.Limits = ca.Limits{Concurrent: 4, Queue: 4, Rate: 1e9, CallerRate: 1e9} }
	for _, bb := range []struct {
		name string
		a    *ca.Authority
	}{
		{"ecdsa-p256", newAuthority(b, p256)},
		{"ecdsa-p256/store", open(b, ca.NewMemoryStore(), p256)},
		{"ecdsa-p256/audit", newAuthority(b, p256, audit)},
		{"ecdsa-p256/limits", newAuthority(b, p256, limits)},
		{"rsa-2048", newAuthority(b, rsa)},
		{"rsa-2048/audit", newAuthority(b, rsa, audit)},
	} {
		b.Run(bb.name, func(b *testing.B) {
			csr := newCSR(b)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := bb.a.Sign(b.Context(), ca.Request{CSR: csr, ID: web}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

type nowhere struct{}

func (nowhere) Record(context.Context, *ca.Issuance) error { return nil }

func BenchmarkSignJWT(b *testing.B) {
	for _, alg := range []string{"ES256", "RS256"} {
		b.Run(alg, func(b *testing.B) {
			a := newAuthority(b, func(c *ca.Config) { c.JWT = &ca.JWTConfig{Algorithm: alg} })
			b.ReportAllocs()
			for b.Loop() {
				if _, err := a.SignJWT(b.Context(), ca.JWTRequest{ID: web, Audience: []string{"db"}}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkDirStore is a rotation, durable.
func BenchmarkDirStore(b *testing.B) {
	d, _ := newDirStore(b)
	r := ca.NewRecord("", map[string][]byte{"a": make([]byte, 10_000), "b": make([]byte, 1000)})
	for b.Loop() {
		var err error
		if r.Version, err = d.Save(b.Context(), r); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkSignParallel(b *testing.B) {
	a, csr := newAuthority(b), newCSR(b)
	b.RunParallel(func(p *testing.PB) {
		for p.Next() {
			if _, err := a.Sign(b.Context(), ca.Request{CSR: csr, ID: web}); err != nil {
				b.Error(err)
				return
			}
		}
	})
}

func BenchmarkBundle(b *testing.B) {
	a := newAuthority(b)
	b.ReportAllocs()
	for b.Loop() {
		if a.Bundle() == nil {
			b.Fatal("no bundle")
		}
	}
}
