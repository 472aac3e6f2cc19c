package ca_test

import (
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
