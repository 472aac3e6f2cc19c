package spiffe_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/spiffe"
)

func TestAlgorithms(t *testing.T) {
	t.Parallel()
	const all = "ecdsa,rsa,ed25519,ml-dsa-44,ml-dsa-65"
	for text, want := range map[string]string{
		"ecdsa":                             "ecdsa",
		"ml-dsa-65,ml-dsa-44":               "ml-dsa-44,ml-dsa-65",
		" ecdsa , rsa,\ted25519\n":          "ecdsa,rsa,ed25519",
		"ml-dsa-65,ed25519,rsa,ecdsa":       "ecdsa,rsa,ed25519,ml-dsa-65",
		"ml-dsa-44,ecdsa,ml-dsa-65,rsa":     "ecdsa,rsa,ml-dsa-44,ml-dsa-65",
		all:                                 all,
		"":                                  "",
		",":                                 "",
		"ecdsa,":                            "",
		",ecdsa":                            "",
		"ecdsa,ecdsa":                       "",
		"ECDSA":                             "",
		"ecdsa rsa":                         "",
		"ecdsa-p256":                        "",
		"ml-dsa":                            "",
		"ml-dsa-87":                         "",
		"ML-DSA-65":                         "",
		"any":                               "",
		"ecdsa,\x00":                        "",
		"ecdsa," + strings.Repeat("x", 1e5): "",
	} {
		a, err := spiffe.ParseAlgorithms(text)
		if want != "" {
			require.NoError(t, err, text)
			assert.Equal(t, want, a.String())
			continue
		}
		require.Error(t, err, text)
		assert.Equal(t, spiffe.Algorithms{}, a)
		assert.Less(t, len(err.Error()), 300)
	}
	assert.Equal(t, all, spiffe.AnyAlgorithm().String())
	assert.Equal(t, "ecdsa,rsa,ed25519", spiffe.Algorithms{}.String(), "the default has no ML-DSA")

	keys := map[string]crypto.PublicKey{"ecdsa": &ecdsa.PublicKey{}, "rsa": &rsa.PublicKey{}, "ed25519": ed25519.PublicKey{}}
	for kind, key := range keys {
		for _, text := range []string{"", "ecdsa", "rsa", "ed25519", "ml-dsa-44,ml-dsa-65", all} {
			var a spiffe.Algorithms
			if text != "" {
				a = algorithms(t, text)
			}
			if text == "" || strings.Contains(text, kind) {
				assert.NoError(t, a.Check(key), "%s in %s", kind, a)
			} else {
				assert.ErrorIs(t, a.Check(key), spiffe.ErrAlgorithm, "%s in %s", kind, a)
			}
		}
	}
	for _, key := range []crypto.PublicKey{nil, "ecdsa", ecdsa.PublicKey{}, struct{}{}} {
		assert.ErrorIs(t, spiffe.AnyAlgorithm().Check(key), spiffe.ErrAlgorithm)
		assert.ErrorIs(t, spiffe.Algorithms{}.Check(key), spiffe.ErrAlgorithm)
	}
}

func algorithms(t testing.TB, text string) spiffe.Algorithms {
	t.Helper()
	a, err := spiffe.ParseAlgorithms(text)
	require.NoError(t, err, text)
	return a
}

// FuzzParseAlgorithms: what parses is written and parsed again as the same.
func FuzzParseAlgorithms(f *testing.F) {
	for _, text := range []string{"", "ecdsa", "ml-dsa-44, ml-dsa-65", "ecdsa,ecdsa", spiffe.AnyAlgorithm().String()} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		a, err := spiffe.ParseAlgorithms(text)
		if err != nil {
			assert.Equal(t, spiffe.Algorithms{}, a)
			return
		}
		assert.Equal(t, a, algorithms(t, a.String()))
		assert.Equal(t, strings.Count(text, ","), strings.Count(a.String(), ","), "no name is lost or added")
		for name := range strings.SplitSeq(text, ",") {
			assert.Contains(t, a.String(), strings.TrimSpace(name))
		}
	})
}
