package vault_test

import (
	"strings"
	"testing"

	"github.com/svidkit/svidkit/caclient/vault"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// BenchmarkSign is what the client itself costs, without a network: with the token of an earlier login, and with a login
// for each call, whose answer says that the token has ended when the next one comes.
func BenchmarkSign(b *testing.B) {
	ca := spiffetest.NewCA(b, "example.org")
	csr := webCSR(b)
	chain, err := ca.Intermediate().Sign(b.Context(), csr, 0)
	if err != nil {
		b.Fatal(err)
	}
	answer := doc{"data": doc{"certificate": pem(chain[0]), "issuing_ca": pem(chain[1]), "ca_chain": []string{pem(chain[1]), pem(ca.Root())}}}
	for name, refuse := range map[string]bool{"cached": false, "login": true} {
		b.Run(name, func(b *testing.B) {
			s := &script{}
			fresh := false
			s.answer = func(c call) (int, any) {
				s.calls = s.calls[:0]
				switch {
				case strings.HasSuffix(c.URL.Path, "/login"):
					fresh = true
					return 200, loginAnswer("hvs.1", 3600)
				case refuse && !fresh:
					return 403, vaultErrors("permission denied")
				}
				fresh = false
				return 200, answer
			}
			c := newCA(b, vault.Options{Endpoint: s.endpoint(), Role: "web", Login: vault.KubernetesLogin("", "web")})
			b.ReportAllocs()
			for b.Loop() {
				if _, err := c.Sign(b.Context(), csr, 0); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
