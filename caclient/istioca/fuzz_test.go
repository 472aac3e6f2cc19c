package istioca_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// FuzzReadChain reads an answer, its texts parted by zero bytes.
func FuzzReadChain(f *testing.F) {
	ca := spiffetest.NewCA(f, "example.org")
	id := spiffe.MustParseID("spiffe://example.org/web")
	key := must.Get(pki.NewKey(pki.ECDSAP256))(f)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{}))(f)
	chain := must.Get(ca.Intermediate().Certify(f.Context(), csr, []pki.SAN{pki.IDSAN(id)}, 0))(f)
	leaf, mid, root := pem(chain[0]), pem(chain[1]), pem(ca.Root())
	for _, texts := range [][]string{
		nil, {""}, {"", ""}, {leaf}, {leaf, root}, {leaf, mid, root}, {leaf + mid, root + root}, {leaf, "", root}, {root, root}, {leaf, leaf}, {leaf, "x"}, {"x", root},
		{strings.TrimSpace(leaf), strings.TrimSpace(mid), root}, {leaf[:100], root}, {strings.Repeat(leaf, 32), root}, {strings.Repeat(leaf, 33), root}, {mid, leaf, root},
	} {
		f.Add(strings.Join(texts, "\x00"))
	}
	f.Fuzz(func(t *testing.T, in string) {
		texts := strings.Split(in, "\x00")
		chain, roots, err := istioca.ReadChain(csr, texts)
		if err != nil {
			require.Empty(t, chain)
			require.Empty(t, roots)
			return
		}
		require.NotEmpty(t, chain)
		require.NotEmpty(t, roots)
		require.LessOrEqual(t, len(roots), 256)
		require.True(t, pki.PublicKeysEqual(chain[0].PublicKey, csr.PublicKey()))
		seen := map[string]bool{}
		for i, c := range chain {
			require.False(t, seen[string(c.Raw)])
			seen[string(c.Raw)] = true
			require.True(t, i == 0 || !c.IsCA || !bytes.Equal(c.RawIssuer, c.RawSubject) || c.CheckSignatureFrom(c) != nil)
		}
	})
}
