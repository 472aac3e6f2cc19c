package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

func TestBundleOIDC(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "www")
	args := []string{"bundle", "oidc", "-issuer", "https://oidc.example.org", "-bundle", "testdata/bundle.json", dir}
	got := svid(t, args...)
	require.Equal(t, 0, got.code, got.errOut)
	settledGolden(t, "oidc", got, append([]string{}, args...), dir, "/srv/oidc", "testdata/", "")
	assert.JSONEq(t, `{"issuer":"https://oidc.example.org","jwks_uri":"https://oidc.example.org/keys","response_types_supported":["id_token"],
		"subject_types_supported":["public"],"id_token_signing_alg_values_supported":["ES256"]}`, read(t, dir, ".well-known", "openid-configuration"))
	assert.Contains(t, read(t, dir, "keys"), `{"use":"sig","alg":"ES256","kid":"jwt-1","kty":"EC"`)
	if runtime.GOOS != "windows" {
		info := must.Get(os.Stat(filepath.Join(dir, "keys")))(t)
		assert.Equal(t, fs.FileMode(0o644), info.Mode(), "public")
	}
	before := must.Get(os.Stat(filepath.Join(dir, "keys")))(t)
	got = svid(t, args...)
	require.Equal(t, 0, got.code, got.errOut)
	after := must.Get(os.Stat(filepath.Join(dir, "keys")))(t)
	assert.True(t, os.SameFile(before, after), "unchanged")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "keys"), []byte("{"), 0o644))
	got = svid(t, args...)
	require.Equal(t, 0, got.code, got.errOut)
	assert.Contains(t, read(t, dir, "keys"), "jwt-1")
	assert.Len(t, must.Get(os.ReadDir(dir))(t), 2, "nothing else is left")

	for says, c := range map[string]struct {
		code int
		args []string
	}{
		"there is no -issuer":         {2, []string{"-bundle", "testdata/bundle.json", dir}},
		"no URL of an issuer":         {3, []string{"-issuer", "https://oidc.example.org/", "-bundle", "testdata/bundle.json", dir}},
		"the scheme":                  {3, []string{"-issuer", "http://oidc.example.org", "-bundle", "testdata/bundle.json", dir}},
		"has no JWT key":              {3, []string{"-issuer", "https://oidc.example.org", "-bundle", "testdata/roots.pem", dir}},
		"pick one with -trust-domain": {2, []string{"-issuer", "https://oidc.example.org", "-bundle", "testdata/map.json", dir}},
		"arguments":                   {2, []string{"-issuer", "https://oidc.example.org", "-bundle", "testdata/bundle.json"}},
		"not a directory":             {3, []string{"-issuer", "https://oidc.example.org", "-bundle", "testdata/bundle.json", "testdata/bundle.json"}},
	} {
		got := svid(t, append([]string{"bundle", "oidc"}, c.args...)...)
		assert.Equal(t, c.code, got.code, says)
		assert.Contains(t, got.errOut, says)
	}
	assert.Contains(t, read(t, dir, "keys"), "jwt-1", "a failure changes no file")
}
