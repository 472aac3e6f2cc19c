package tpmkey_test

import (
	"crypto"
	"crypto/tls"
	"testing"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/tpmkey"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// What keys in swtpm, a software TPM, cost beside keys in memory: TPM chips are slower.
func Benchmark(b *testing.B) {
	tpm := newChip(b).open()
	for _, algorithm := range []string{"ecdsa-p256", "ecdsa-p384", "rsa-2048"} {
		for place, make := range map[string]func(string) (crypto.Signer, error){"TPM": tpm.NewKey, "memory": pki.NewKey} {
			key := must.Get(make(algorithm))(b)
			b.Run("Sign/"+algorithm+"/"+place, func(b *testing.B) {
				for b.Loop() {
					_ = must.Get(key.Sign(nil, digest[:], crypto.SHA256))(b)
				}
			})
		}
	}
	b.Run("NewKey/ecdsa-p256/TPM", func(b *testing.B) {
		for b.Loop() {
			_ = must.Get(tpm.NewKey("ecdsa-p256"))(b)
		}
	})
	keys := must.Get(tpm.Custodian(b.TempDir() + "/keys"))(b)
	sealed := must.Get(keys.Seal(b.Context(), secret, nil))(b)
	b.Run("Unseal", func(b *testing.B) {
		for b.Loop() {
			_ = must.Get(keys.Unseal(b.Context(), sealed, nil))(b)
		}
	})
	for _, place := range []string{"memory", "TPM server", "TPM both"} {
		b.Run("Handshake/"+place, func(b *testing.B) { handshakes(b, tpm, place) })
	}
}

var digest [32]byte

func handshakes(b *testing.B, tpm *tpmkey.TPM, place string) {
	authority := spiffetest.NewCA(b, "example.org")
	identity := func(path string, inTPM bool) *spiffe.SVID {
		if !inTPM {
			return authority.SVID(path)
		}
		key := must.Get(tpm.NewKey("ecdsa-p256"))(b)
		id := must.Get(spiffe.ParseID("spiffe://example.org" + path))(b)
		csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(id)}}))(b)
		return must.Get(spiffe.NewSVID(must.Get(authority.Sign(b.Context(), csr, 0))(b), key))(b)
	}
	config := spiffetls.Config{Self: identity("/server", place != "memory"), Peers: authority.Bundle(),
		Allow: spiffe.AllowMembersOf(authority.TrustDomain())}
	serves := must.Get(must.Get(spiffetls.New(config))(b).ServerConfig())(b)
	config.Self = identity("/client", place == "TPM both")
	calls := must.Get(must.Get(spiffetls.New(config))(b).ClientConfig())(b)
	l := must.Get(tls.Listen("tcp", "127.0.0.1:0", serves))(b)
	defer l.Close()
	go echo(l)
	for b.Loop() {
		if err := call(l.Addr(), calls, tls.VersionTLS13); err != nil {
			b.Fatal(err)
		}
	}
}
