package sidecar_test

import (
	"crypto"
	"crypto/x509"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/athenz-sia/sidecar"
	"github.com/svidkit/svidkit/examples/internal/agentapi"
	"github.com/svidkit/svidkit/internal/test/athenztest"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

var discard = slog.New(slog.DiscardHandler)

func newKey(t *testing.T) crypto.Signer {
	t.Helper()
	return must.Get(pki.NewKey(pki.ECDSAP256))(t)
}

func filesIn(dir string) sidecar.Files {
	return sidecar.Files{
		KeyFile: filepath.Join(dir, "tls", "service.key"), CertificateFile: filepath.Join(dir, "tls", "service.cert"), RootsFile: filepath.Join(dir, "tls", "cacert.pem"),
		TokenFile: filepath.Join(dir, "tokens", "ntoken"),
	}
}

// identityOf returns a new identity with a key.
func identityOf(t *testing.T, ca *spiffetest.CA, key crypto.Signer) *sidecar.Identity {
	t.Helper()
	ca.EditTemplates(func(c *x509.Certificate) { c.Subject.CommonName = "media.sports.frontend" })
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseID(ca.TrustDomain().ID().String() + "/web"))}})
	require.NoError(t, err)
	chain := must.Get(ca.Sign(t.Context(), csr, 0))(t)
	i := sidecar.IdentityOf(must.Get(pki.NewCredential(chain, key))(t))
	for root := range ca.Bundle().X509Authorities() {
		i.Roots = append(i.Roots, root)
	}
	return i
}

func TestFiles(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-8-2", "ATH-8-3", "ATH-8-4", "ATH-18-6", "ATH-18-10", "ATH-18-11")
	ca, f := spiffetest.NewCA(t, "athenz.example"), filesIn(t.TempDir())
	require.ErrorIs(t, must.Err(f.Read(discard)), fs.ErrNotExist)

	ec := must.Get(pki.NewKey(pki.ECDSAP256))(t)
	for _, c := range []struct {
		key   crypto.Signer
		label string
	}{{athenztest.RSAKey(), "RSA PRIVATE KEY"}, {ec, "PRIVATE KEY"}} {
		given := identityOf(t, ca, c.key)
		require.NoError(t, f.Write(t.Context(), given, discard))
		assert.Contains(t, string(must.Get(os.ReadFile(f.KeyFile))(t)), "-----BEGIN "+c.label+"-----")
		got := must.Get(f.Read(discard))(t)
		assert.True(t, got.Credential.Leaf().Equal(given.Credential.Leaf()))
		require.Len(t, got.Roots, 1)
		assert.True(t, got.Roots[0].Equal(ca.Root()))
		assert.Empty(t, got.ServiceToken())
	}
	for name, mode := range map[string]fs.FileMode{f.KeyFile: 0o440, f.CertificateFile: 0o444, f.RootsFile: 0o444} {
		assert.Equal(t, mode, must.Get(os.Stat(name))(t).Mode(), name)
	}

	// What ZTS does not send stays.
	next := identityOf(t, ca, ec)
	next.Roots = nil
	require.NoError(t, f.Write(t.Context(), next, discard))
	assert.Len(t, must.Get(f.Read(discard))(t).Roots, 1)

}

// A process was killed after it had committed an identity, and before all of the files were in their places.
func TestFilesAfterACrash(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-8-7", "ATH-18-11")
	ca, dir := spiffetest.NewCA(t, "athenz.example"), t.TempDir()
	f, other := filesIn(dir), filesIn(filepath.Join(dir, "other"))
	before, after := identityOf(t, ca, athenztest.RSAKey()), identityOf(t, ca, newKey(t))
	require.NoError(t, f.Write(t.Context(), before, discard))
	require.NoError(t, other.Write(t.Context(), after, discard))

	next := filepath.Join(dir, "tls", "..next")
	require.NoError(t, os.Mkdir(next, 0o700))
	require.NoError(t, os.Rename(other.CertificateFile, filepath.Join(next, "service.cert")))
	require.NoError(t, os.Rename(other.KeyFile, f.KeyFile)) // which was in its place already

	got := must.Get(f.Read(discard))(t)
	assert.True(t, got.Credential.Leaf().Equal(after.Credential.Leaf()))
	assert.NoDirExists(t, next)

	// It was the first one.
	require.NoError(t, other.Write(t.Context(), before, discard))
	require.NoError(t, os.Remove(f.CertificateFile))
	require.NoError(t, os.Mkdir(next, 0o700))
	require.NoError(t, os.Rename(other.CertificateFile, filepath.Join(next, "service.cert")))
	require.NoError(t, os.Rename(other.KeyFile, f.KeyFile))
	got = must.Get(f.Read(discard))(t)
	assert.True(t, got.Credential.Leaf().Equal(before.Credential.Leaf()))
}

func TestFilesThatAreBroken(t *testing.T) {
	t.Parallel()
	ca, f := spiffetest.NewCA(t, "athenz.example"), filesIn(t.TempDir())
	require.NoError(t, f.Write(t.Context(), identityOf(t, ca, athenztest.RSAKey()), discard))
	replace := func(name, text string) {
		require.NoError(t, os.Remove(name))
		require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
	}
	key := must.Get(os.ReadFile(f.KeyFile))(t)
	other := must.Get(pki.NewKey(pki.ECDSAP256))(t)
	otherKey := must.Get(pki.MarshalPrivateKeyPEM(other))(t)

	replace(f.KeyFile, string(otherKey))
	require.ErrorIs(t, must.Err(f.Read(discard)), pki.ErrKeyMismatch)
	replace(f.KeyFile, "secret")
	_, err := f.Read(discard)
	require.Error(t, err)
	assert.NotContains(t, err.Error(), "secret")
	replace(f.KeyFile, string(key))
	replace(f.RootsFile, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
	require.NoError(t, os.MkdirAll(f.TokenFile, 0o700))
	log := new(athenztest.Log)
	i, err := f.Read(slog.New(slog.NewTextHandler(log, nil)))
	require.NoError(t, err, "a certificate with its key is worth something without the others")
	assert.Empty(t, i.Roots)
	assert.Empty(t, i.ServiceToken())
	assert.Contains(t, log.String(), f.RootsFile)
	assert.Contains(t, log.String(), f.TokenFile)
	require.NoError(t, os.Remove(f.RootsFile))
	i = must.Get(f.Read(discard))(t)
	assert.Empty(t, i.Roots)
	require.NoError(t, os.Remove(f.CertificateFile))
	require.ErrorIs(t, must.Err(f.Read(discard)), fs.ErrNotExist)
}

func TestFilesCheck(t *testing.T) {
	t.Parallel()
	for name, edit := range map[string]func(*sidecar.Files){
		"no key":          func(f *sidecar.Files) { f.KeyFile = "" },
		"no certificate":  func(f *sidecar.Files) { f.CertificateFile = "" },
		"no roots":        func(f *sidecar.Files) { f.RootsFile = "" },
		"key elsewhere":   func(f *sidecar.Files) { f.KeyFile = "/elsewhere/service.key" },
		"roots elsewhere": func(f *sidecar.Files) { f.RootsFile = "/elsewhere/cacert.pem" },
		"one for two":     func(f *sidecar.Files) { f.CertificateFile = f.KeyFile },
		"spelled otherwise": func(f *sidecar.Files) {
			f.CertificateFile = filepath.Dir(f.KeyFile) + "/./" + filepath.Base(f.KeyFile)
		},
		"token otherwise":    func(f *sidecar.Files) { f.TokenFile = filepath.Dir(f.KeyFile) + "//" + filepath.Base(f.KeyFile) },
		"roots as the key":   func(f *sidecar.Files) { f.RootsFile = f.KeyFile },
		"token as the roots": func(f *sidecar.Files) { f.TokenFile = f.RootsFile },
	} {
		f := filesIn(t.TempDir())
		require.NoError(t, f.Check())
		edit(&f)
		require.Error(t, f.Check(), name)
		_, err := sidecar.New(sidecar.Config{Socket: "/agent.sock", HandleFile: "/id", Files: f})
		require.ErrorContains(t, err, "sidecar: new: Files: ", name)
	}
}

// Where other users can write, as in an emptyDir volume, the program is warned.
func TestFilesOfAll(t *testing.T) {
	t.Parallel()
	log := new(athenztest.Log)
	ca, f := spiffetest.NewCA(t, "athenz.example"), filesIn(t.TempDir())
	require.NoError(t, os.Mkdir(filepath.Dir(f.KeyFile), 0o777))
	require.NoError(t, os.Chmod(filepath.Dir(f.KeyFile), 0o777))
	require.NoError(t, f.Write(t.Context(), identityOf(t, ca, athenztest.RSAKey()), slog.New(slog.NewTextHandler(log, nil))))
	assert.Contains(t, log.String(), "other users may replace")
}

// A Sidecar begins with what the files have, and prints none of it.
func TestNewReadsFiles(t *testing.T) {
	t.Parallel()
	ca, f := spiffetest.NewCA(t, "athenz.example"), filesIn(t.TempDir())
	given := identityOf(t, ca, newKey(t))
	require.NoError(t, f.Write(t.Context(), given, discard))
	require.NoError(t, os.MkdirAll(filepath.Dir(f.TokenFile), 0o700))
	require.NoError(t, os.WriteFile(f.TokenFile, []byte("v=S1;d=media.sports;n=Frontend;s=secret"), 0o600))
	log := new(athenztest.Log)
	cfg := sidecar.Config{Socket: "/agent.sock", HandleFile: "/id", Files: f, Logger: slog.New(slog.NewTextHandler(log, nil))}
	s := must.Get(sidecar.New(cfg))(t)
	i := must.Get(s.Identity())(t)
	assert.True(t, i.Credential.Leaf().Equal(given.Credential.Leaf()))
	assert.Equal(t, "v=S1;d=media.sports;n=Frontend;s=secret", i.ServiceToken())
	assert.Empty(t, log.String())
	cfg.Logger.Info("x", "identity", i)
	for _, text := range []string{fmt.Sprintf("%v %+v %#v %s %q", i, i, i, i, i), log.String()} {
		assert.NotContains(t, text, "secret")
		assert.Contains(t, text, "sidecar.Identity(")
		assert.Contains(t, text, " until ")
	}
	require.NoError(t, os.WriteFile(f.TokenFile, []byte("v=S1;d=media.sports;n=backend;s=secret"), 0o600))
	s = must.Get(sidecar.New(cfg))(t)
	i = must.Get(s.Identity())(t, "the certificate is good without it")
	assert.Empty(t, i.ServiceToken())
	assert.Contains(t, log.String(), `it is the token of \"media.sports.backend\", and the certificate is that of \"media.sports.frontend\"`)
	assert.NotContains(t, log.String(), "secret")
	require.NoError(t, os.Remove(f.KeyFile))
	require.NoError(t, os.WriteFile(f.KeyFile, []byte("none"), 0o600))
	s = must.Get(sidecar.New(cfg))(t, "the agent says whether another one is to be had")
	require.ErrorIs(t, must.Err(s.Identity()), spiffe.ErrNotReady)
	assert.Contains(t, log.String(), "the files have no identity that can be used")
}

// A service token is a secret as the key is: what is public for all readers is the certificate and the roots.
func TestModesOfFiles(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("there are no modes")
	}
	ca, f := spiffetest.NewCA(t, "athenz.example"), filesIn(t.TempDir())
	i := identityOf(t, ca, newKey(t))
	given := sidecar.IdentityFrom(&agentapi.Answer{Credential: i.Credential, Roots: i.Roots, Token: func() string { return "v=S1;s=x" }})
	for range 2 { // made, and replaced
		require.NoError(t, f.Write(t.Context(), given, discard))
		for name, mode := range map[string]fs.FileMode{f.KeyFile: 0o440, f.TokenFile: 0o440, f.CertificateFile: 0o444, f.RootsFile: 0o444} {
			assert.Equal(t, mode, must.Get(os.Stat(name))(t).Mode(), name)
		}
	}
}
