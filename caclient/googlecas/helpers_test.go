package googlecas_test

import (
	"context"
	"testing"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/googlecas"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

const (
	secret = "ya29.token.c2VjcmV0" // what must not be seen
	pool   = cafake.GoogleCASPool
)

var (
	domain = spiffe.MustParseTrustDomain("example.org")
	webID  = spiffe.MustParseID("spiffe://example.org/web")
)

func newCSR(t testing.TB, id spiffe.ID) *pki.CSR {
	return cafake.NewCSR(t, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(id)}})
}

func newCA(t testing.TB, o googlecas.Options) *googlecas.CA {
	t.Helper()
	if o.Pool == "" {
		o.Pool = pool
	}
	return must.Get(googlecas.New(o))(t)
}

func endpoint(s *cafake.Script) caclient.Endpoint { return s.Endpoint("", domain, secret) }

// doc is a JSON object.
type doc = map[string]any

func refusal(code int, status, message string, details ...any) doc {
	return doc{"error": doc{"code": code, "status": status, "message": message, "details": details}}
}

// signed returns the answer for the CSR in a call.
func signed(ca *spiffetest.CA, c cafake.Call) (int, any) {
	csr, err := pki.ParseCSRPEM([]byte(c.Body["pemCsr"].(string)))
	if err != nil {
		return 400, refusal(400, "INVALID_ARGUMENT", err.Error())
	}
	chain, err := ca.Sign(context.Background(), csr, 0)
	if err != nil {
		return 400, refusal(400, "INVALID_ARGUMENT", err.Error())
	}
	return 200, doc{"pemCertificate": pem(chain[0]), "pemCertificateChain": []string{pem(ca.Root())}}
}

// caCerts returns the answer of fetchCaCerts with the roots of ca.
func caCerts(ca *spiffetest.CA) doc {
	chains := []doc{}
	for root := range ca.Bundle().X509Authorities() {
		chains = append(chains, doc{"certificates": []string{pem(root)}})
	}
	return doc{"caCerts": chains}
}
