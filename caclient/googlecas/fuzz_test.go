package googlecas_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/googlecas"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// FuzzAnswers gives one status and one body to both requests, in the place of the service.
func FuzzAnswers(f *testing.F) {
	ca := spiffetest.NewCA(f, "example.org")
	csr := newCSR(f, webID)
	chain := must.Get(ca.Intermediate().Sign(f.Context(), csr, 0))(f)
	leaf, middle, root := pem(chain[0]), pem(chain[1]), pem(ca.Root())
	retry := doc{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "3.5s"}
	for _, body := range []any{
		"", "{", doc{}, doc{"pemCertificate": leaf, "pemCertificateChain": []string{middle, root}}, doc{"pemCertificate": leaf + leaf},
		doc{"pemCertificate": middle, "pemCertificateChain": []string{leaf}}, doc{"pemCertificate": []int{1}}, doc{"pemCertificate": "x"},
		caCerts(ca), doc{"caCerts": []doc{{"certificates": []string{middle}}}}, doc{"caCerts": []doc{{"certificates": []string{middle, root}}, {}}},
		doc{"caCerts": []doc{{"certificates": []string{middle + root}}}, "pemCertificate": leaf}, doc{"caCerts": 7},
		refusal(429, "RESOURCE_EXHAUSTED", "Quota exceeded", retry), refusal(409, "ALREADY_EXISTS", "x"), refusal(409, "ABORTED", secret, retry),
		doc{"error": "x"}, `{"pemCertificate":"x","pemCertificate":"y"}`,
	} {
		text := must.Get(cafake.Text(body))(f)
		for _, code := range []int{200, 400, 409, 429} {
			f.Add(code, text)
		}
	}
	f.Fuzz(func(t *testing.T, code int, body string) {
		if code < 200 || code > 999 {
			code = 200
		}
		s := &cafake.Script{Answer: func(cafake.Call) (int, any) { return code, body }}
		c := newCA(t, googlecas.Options{Endpoint: endpoint(s)})
		judge := func(err error) {
			told := must.As[*caclient.Error](err)(t)
			require.NotNil(t, told.Kind)
			require.LessOrEqual(t, told.RetryAfter, time.Hour)
			require.GreaterOrEqual(t, told.RetryAfter, time.Duration(0))
			require.NotContains(t, err.Error(), secret)
			require.Less(t, len(err.Error()), 2000)
		}
		got, err := c.Sign(t.Context(), csr, 0)
		if err != nil {
			require.Empty(t, got)
			judge(err)
		} else {
			require.True(t, pki.PublicKeysEqual(got[0].PublicKey, csr.PublicKey()))
		}
		roots, err := rootsOf(t, c)
		if err != nil {
			judge(err)
			return
		}
		require.NotEmpty(t, roots)
		for _, root := range roots {
			require.True(t, root.IsCA)
			require.NoError(t, root.CheckSignatureFrom(root))
		}
	})
}
