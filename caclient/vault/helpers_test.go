package vault_test

import (
	"context"
	"strings"
	"testing"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/vault"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

const secret = "eyJhbGciOi.token.c2VjcmV0" // what must not be seen

var (
	domain = spiffe.MustParseTrustDomain("example.org")
	webID  = spiffe.MustParseID("spiffe://example.org/web")
)

func webCSR(t testing.TB) *pki.CSR {
	return cafake.NewCSR(t, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(webID)}})
}

func newCA(t testing.TB, o vault.Options) *vault.CA {
	t.Helper()
	return must.Get(vault.New(o))(t)
}

func logins(s *cafake.Script) (n int) {
	for _, p := range s.Paths() {
		if strings.HasSuffix(p, "/login") {
			n++
		}
	}
	return n
}

func endpoint(s *cafake.Script) caclient.Endpoint {
	return s.Endpoint("https://vault.test", domain, secret)
}

// doc is a JSON object.
type doc = map[string]any

func vaultErrors(texts ...string) doc { return doc{"errors": texts} }

func loginAnswer(token string, lease any) doc {
	return doc{"auth": doc{"client_token": token, "lease_duration": lease, "renewable": true}}
}

// signed returns the answer of sign/ROLE for the CSR in a call.
func signed(ca *spiffetest.CA, c cafake.Call) (int, any) {
	csr, err := pki.ParseCSRPEM([]byte(c.Body["csr"].(string)))
	if err != nil {
		return 400, vaultErrors(err.Error())
	}
	chain, err := ca.Sign(context.Background(), csr, 0)
	if err != nil {
		return 400, vaultErrors(err.Error())
	}
	return 200, doc{"data": doc{"certificate": string(pki.MarshalCertificatesPEM(chain[0])), "issuing_ca": string(pki.MarshalCertificatesPEM(ca.Root()))}}
}
