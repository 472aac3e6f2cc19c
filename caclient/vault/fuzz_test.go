package vault_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/vault"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// FuzzAnswers gives one status and one body to every request, in the place of Vault: those that sign, log in, list issuers and
// show one.
func FuzzAnswers(f *testing.F) {
	ca := spiffetest.NewCA(f, "example.org")
	csr := webCSR(f)
	chain := must.Get(ca.Intermediate().Sign(f.Context(), csr, 0))(f)
	leaf, middle, root := pem(chain[0]), pem(chain[1]), pem(ca.Root())
	good := doc{"certificate": leaf, "issuing_ca": middle, "ca_chain": []string{middle, root}, "keys": []string{"id-1"}}
	for _, body := range []any{
		"", "{", doc{}, doc{"data": nil}, doc{"data": good}, doc{"data": good, "auth": doc{"client_token": "hvs.1", "lease_duration": 60}},
		doc{"data": doc{"certificate": leaf, "issuing_ca": root}}, doc{"data": doc{"certificate": root, "keys": []string{"a"}}},
		doc{"data": doc{"certificate": root, "revocation_time": 7, "keys": []string{"a", "b"}}}, doc{"data": doc{"certificate": leaf + leaf}},
		doc{"data": doc{"certificate": root, "ca_chain": []string{middle, root}, "revocation_time": "0", "keys": []string{"../x"}}},
		doc{"auth": doc{"client_token": "a b", "lease_duration": -1}}, doc{"auth": doc{"client_token": "x", "lease_duration": 1e40}},
		vaultErrors("permission denied"), vaultErrors("invalid token", secret), doc{"errors": "x"}, `{"data":{"certificate":"x","certificate":"y"}}`,
	} {
		text := must.Get(cafake.Text(body))(f)
		for _, code := range []int{200, 400, 403, 412, 307} {
			f.Add(code, text)
		}
	}
	f.Fuzz(func(t *testing.T, code int, body string) {
		if code < 200 || code > 999 {
			code = 200
		}
		s := &cafake.Script{Answer: func(cafake.Call) (int, any) { return code, body }}
		judge := func(err error) {
			told := must.As[*caclient.Error](err)(t)
			require.NotNil(t, told.Kind)
			if told.Op == "sign" { // the other requests have no token
				require.NotContains(t, err.Error(), secret)
			}
			require.Less(t, len(err.Error()), 2000)
		}
		for _, login := range []vault.Login{{}, vault.KubernetesLogin("", "web")} {
			c := newCA(t, vault.Options{Endpoint: endpoint(s), Role: "web", Login: login})
			got, err := c.Sign(t.Context(), csr, 0)
			if err != nil {
				require.Empty(t, got)
				judge(err)
				continue
			}
			require.True(t, pki.PublicKeysEqual(got[0].PublicKey, csr.PublicKey()))
			for i, c := range got[1:] {
				require.False(t, c.Equal(got[i]))
			}
		}
		c := newCA(t, vault.Options{Endpoint: endpoint(s), Role: "web"})
		roots, err := rootsOf(t, c)
		if err != nil {
			judge(err)
		} else {
			require.NotEmpty(t, roots)
			for _, root := range roots {
				require.True(t, root.IsCA)
				require.NoError(t, root.CheckSignatureFrom(root))
			}
		}
		for _, path := range s.Paths() {
			require.NotContains(t, path, "..")
			require.False(t, strings.Contains(path, "verbatim"))
		}
		require.LessOrEqual(t, len(s.Paths()), 4+1+64)
	})
}
