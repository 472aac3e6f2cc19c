package linkerdproxy_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/testkey"
	"github.com/svidkit/svidkit/pki"
)

// files returns the names in a directory, and checks that each is 0400.
func files(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries := must.Get(os.ReadDir(dir))(t)
	for _, e := range entries {
		assert.Equal(t, fs.FileMode(0o400), must.Get(e.Info())(t).Mode(), e.Name())
		names = append(names, e.Name())
	}
	return names
}

// The store has the key, the request and the anchors, each with mode 0400, in either set of names.
func TestStore(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-1-3", "LNK-4-1", "LNK-4-2", "LNK-4-4", "LNK-9-3", "LNK-9-4", "LNK-9-5", "LNK-10-1")
	s := newService(t, time.Hour)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "key.der"), []byte("of an earlier process"), 0o400))
	id := certified(t, s, web, func(c *linkerdproxy.Config) { c.Dir = dir })
	assert.Equal(t, []string{"csr.p8", "key.der", "trust-anchors.pem"}, files(t, dir))
	der := must.Get(os.ReadFile(filepath.Join(dir, "key.der")))(t)
	parsed := must.Get(x509.ParsePKCS8PrivateKey(der))(t)
	key := parsed.(*ecdsa.PrivateKey)
	assert.Equal(t, elliptic.P256(), key.Curve)
	der = must.Get(os.ReadFile(filepath.Join(dir, "csr.p8")))(t)
	csr := must.Get(pki.ParseCSR(der))(t)
	assert.Equal(t, []pki.SAN{pki.DNSSAN(web)}, csr.SANs())
	require.NoError(t, csr.OnlyNames())
	assert.True(t, pki.PublicKeysEqual(csr.PublicKey(), key.Public()))
	assert.Equal(t, s.csrs[0], der, "it is what was sent")
	anchors := must.Get(os.ReadFile(filepath.Join(dir, "trust-anchors.pem")))(t)
	assert.Equal(t, s.ca.Bundle().MarshalPEM(), anchors)
	c := must.Get(id.Credential())(t)
	assert.True(t, pki.PublicKeysEqual(c.Leaf().PublicKey, key.Public()))

	// Two proxies with one name have different keys.
	current := t.TempDir()
	other := certified(t, s, web, func(c *linkerdproxy.Config) { c.Dir, c.CurrentNames = current, true })
	assert.Equal(t, []string{"csr.der", "key.p8"}, files(t, current))
	assert.Nil(t, other.Environ())
	assert.False(t, pki.PublicKeysEqual(c.Leaf().PublicKey, must.Get(other.Credential())(t).Leaf().PublicKey))
}

// Whatever is wrong with the token or the store is found before there is a key.
func TestBeforeTheKey(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-9-2")
	s := newService(t, time.Hour)
	for name, c := range map[string]struct {
		edit func(t *testing.T, c *linkerdproxy.Config)
		want string
	}{
		"no token": {func(_ *testing.T, c *linkerdproxy.Config) { c.TokenFile += "-missing" }, "the token of the service account: "},
		"empty token": {func(t *testing.T, c *linkerdproxy.Config) {
			require.NoError(t, os.WriteFile(c.TokenFile, []byte("\n"), 0o600))
		}, "is empty"},
		"directory without a token": {func(t *testing.T, c *linkerdproxy.Config) { c.TokenFile = t.TempDir() }, "token"},
		"no store":                  {func(_ *testing.T, c *linkerdproxy.Config) { c.Dir += "/missing" }, "mount a directory in memory"},
		"store is a file": {func(t *testing.T, c *linkerdproxy.Config) {
			c.Dir += "/file"
			require.NoError(t, os.WriteFile(c.Dir, nil, 0o600))
		}, "the directory of the identity: "},
		"store cannot be written": {func(t *testing.T, c *linkerdproxy.Config) {
			if os.Getuid() == 0 { // for which no mode counts: a directory in the place of the file that is tried
				require.NoError(t, os.MkdirAll(filepath.Join(c.Dir, ".linkerdproxy-probe", "x"), 0o700))
				return
			}
			require.NoError(t, os.Chmod(c.Dir, 0o500))
		}, "no file can be written"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := config(t, web, s.ca.Bundle().MarshalPEM())
			cfg.Dir = t.TempDir()
			dir := cfg.Dir
			c.edit(t, &cfg)
			id := must.Get(linkerdproxy.NewWith(cfg, s))(t)
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			require.ErrorContains(t, id.Run(ctx), c.want)
			for _, file := range []string{"key.der", "csr.p8", "trust-anchors.pem"} {
				assert.NoFileExists(t, filepath.Join(dir, file))
			}
			assert.Nil(t, id.Environ())
		})
	}
}

// A directory stands for the token in it, as in the first design.
func TestTokenFolder(t *testing.T) {
	t.Parallel()
	s := newService(t, time.Hour)
	certified(t, s, web, func(c *linkerdproxy.Config) {
		dir := filepath.Dir(c.TokenFile)
		require.Equal(t, "token", filepath.Base(c.TokenFile))
		c.TokenFile = dir
	})
}

// One process prepares, and another one goes on with the files.
func TestHandOver(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-9-6", "LNK-10-1", "LNK-12.1-7")
	s := newService(t, time.Hour)
	dir := t.TempDir()
	first := certified(t, s, web, func(c *linkerdproxy.Config) { c.Dir = dir })
	env := append(seed(t, s), first.Environ()...)
	require.Contains(t, env, "LINKERD2_PROXY_IDENTITY_KEY_FILE="+filepath.Join(dir, "key.der"))
	e := must.Get(linkerdproxy.FromEnviron(env, nil))(t)
	second := must.Get(linkerdproxy.NewWith(e.Config, s))(t)
	run(t, second)
	require.NoError(t, second.Ready(t.Context()))
	assert.Len(t, files(t, dir), 3)
	s.mu.Lock()
	defer s.mu.Unlock()
	assert.Equal(t, s.csrs[0], s.csrs[1])
}

// Files of another process that do not belong together are refused.
func TestHandOverRefuses(t *testing.T) {
	t.Parallel()
	s := newService(t, time.Hour)
	p256 := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	another := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	p384 := must.Get(ecdsa.GenerateKey(elliptic.P384(), rand.Reader))(t)
	csr := must.Get(pki.NewCSR(p256, pki.CSROptions{SANs: []pki.SAN{pki.DNSSAN(web)}}))(t)
	two := must.Get(pki.NewCSR(p256, pki.CSROptions{SANs: []pki.SAN{pki.DNSSAN(web), pki.DNSSAN(voting)}}))(t)
	der := func(key any) []byte {
		return must.Get(x509.MarshalPKCS8PrivateKey(key))(t)
	}
	for name, c := range map[string]struct {
		key, csr []byte
		mode     fs.FileMode
		want     string
	}{
		"good":                    {der(p256), csr.DER(), 0o400, ""},
		"readable by all":         {der(p256), csr.DER(), 0o444, "chmod"},
		"PEM key":                 {[]byte("-----BEGIN PRIVATE KEY-----"), csr.DER(), 0o400, "PKCS#8"},
		"no key":                  {nil, csr.DER(), 0o400, "empty"},
		"P-384":                   {der(p384), csr.DER(), 0o400, "P-256"},
		"RSA":                     {der(testkey.RSA()), csr.DER(), 0o400, "P-256"},
		"request for another key": {der(another), csr.DER(), 0o400, "another key"},
		"request in PEM":          {der(p256), csr.PEM(), 0o400, "CSRFile"},
		"request for two names":   {der(p256), two.DER(), 0o400, "alone"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := config(t, web, s.ca.Bundle().MarshalPEM())
			dir := t.TempDir()
			cfg.KeyFile, cfg.CSRFile = filepath.Join(dir, "key.der"), filepath.Join(dir, "csr.p8")
			require.NoError(t, os.WriteFile(cfg.KeyFile, c.key, 0o600))
			require.NoError(t, os.Chmod(cfg.KeyFile, c.mode))
			require.NoError(t, os.WriteFile(cfg.CSRFile, c.csr, 0o400))
			id := must.Get(linkerdproxy.NewWith(cfg, s))(t)
			if c.want == "" {
				run(t, id)
				require.NoError(t, id.Ready(t.Context()))
				return
			}
			err := id.Run(t.Context())
			require.ErrorContains(t, err, c.want)
			assert.NotContains(t, err.Error(), "BEGIN")
		})
	}
}
