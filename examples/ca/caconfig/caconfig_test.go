package caconfig_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/ca/caconfig"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/spiffe"
)

// newConfig returns a configuration with its state in dir, on ports that are free.
func newConfig(t *testing.T, dir string, more ...string) *caconfig.Config {
	t.Helper()
	fs := flag.NewFlagSet("my-ca", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	plugged := filepath.Join(dir, "plugged-in")
	if _, err := os.Stat(plugged); err != nil {
		plugged = ""
	}
	c := must.Get(caconfig.Parse(fs, append([]string{
		"-state-dir", dir, "-create", "-root-ca-dir", plugged,
		"-istio-addr", "127.0.0.1:0", "-linkerd-addr", "", "-bundle-addr", "", "-admin-addr", "127.0.0.1:0",
	}, more...), func(string) string { return "" }))(t)
	return c
}

// A program's own flags stand beside those of the CA, and may have variables as well.
func TestParseWithFlagsOfTheProgram(t *testing.T) {
	t.Parallel()
	fs := flag.NewFlagSet("my-ca", flag.ContinueOnError)
	verbose, region := fs.Bool("v", false, "log more"), fs.String("region", "", "`name` of the region [MY_REGION]")
	env := map[string]string{"MY_REGION": "r1", "TRUST_DOMAIN": "example.org", "region": "none"}
	c, err := caconfig.Parse(fs, []string{"-v", "-namespace", "mesh"}, func(name string) string { return env[name] })
	require.NoError(t, err)
	assert.True(t, *verbose)
	assert.Equal(t, "r1", *region)
	assert.Equal(t, "spiffe://example.org/ns/mesh/sa/svidkit-ca", c.ServerID.String())
}

// Serve serves what the flags say, and ends without an error when its context does.
func TestServe(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "state")
	c := newConfig(t, dir)
	ctx, cancel := context.WithTimeoutCause(t.Context(), 30*time.Second, errors.New("it does not serve"))
	defer cancel()
	served := false
	err := c.Serve(ctx, slog.New(slog.NewTextHandler(t.Output(), nil)), func(a *caconfig.Authority, at caserver.Listeners) {
		defer cancel()
		served = true
		assert.Nil(t, at.Linkerd)
		assert.Nil(t, at.Bundle)
		assert.Equal(t, "in "+filepath.Join(dir, "ca"), a.Where)
		roots, err := os.ReadFile(c.RootsFile)
		assert.NoError(t, err)
		assert.Equal(t, string(a.Bundle().MarshalPEM()), string(roots))
		resp, err := http.Get("http://" + at.Admin.Addr().String() + "/status")
		if assert.NoError(t, err) {
			defer resp.Body.Close()
			text, err := io.ReadAll(resp.Body)
			assert.NoError(t, err)
			assert.Contains(t, string(text), a.Own.Status().Roots[0].ID)
		}
	})
	require.NoError(t, err)
	require.True(t, served)
	require.FileExists(t, c.AuditLog)
}

// What a server may not be is refused before there is a CA.
func TestServeRefuses(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	none := func(*caconfig.Authority, caserver.Listeners) { assert.Fail(t, "it serves") }
	dir := t.TempDir()
	for _, tc := range [][2]string{{"-istio-addr", ":15012"}, {"-bundle-addr", "192.0.2.1:1"}, {"-admin-addr", ":8080"}} {
		err := newConfig(t, dir, tc[0], tc[1]).Serve(t.Context(), nil, none)
		require.ErrorContains(t, err, tc[0]+": not on loopback")
		require.NoDirExists(t, filepath.Join(dir, "ca"))
	}
	for _, flag := range []string{"-istio-addr", "-admin-addr"} { // the first and the last one
		err = newConfig(t, dir, flag, l.Addr().String()).Serve(t.Context(), nil, none)
		require.ErrorContains(t, err, flag+" names another address")
		require.NoDirExists(t, filepath.Join(dir, "ca"))
	}
	free := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	require.NoError(t, free.Close())
	err = newConfig(t, dir, "-istio-addr", free.Addr().String(), "-admin-addr", l.Addr().String()).Serve(t.Context(), nil, none)
	require.Error(t, err)
	again := must.Get(net.Listen("tcp", free.Addr().String()))(t, "what was opened is closed")
	require.NoError(t, again.Close())
}

// A store without a CA is an error that says what to do, and nothing is made.
func TestWithoutCreate(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := newConfig(t, dir, "-create=false")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	err := c.Serve(ctx, nil, func(*caconfig.Authority, caserver.Listeners) { assert.Fail(t, "it serves"); cancel() })
	require.ErrorIs(t, err, ca.ErrNoRecord)
	require.EqualError(t, err, "there is no CA in "+filepath.Join(dir, "ca")+"; if there was one, name its directory in -state-dir, mount its volume or restore it from a backup; to make a new one, start the server once with -create")
	require.ErrorIs(t, must.Err(c.Open(t.Context(), caconfig.OpenOptions{})), ca.ErrNoRecord)
	require.NoFileExists(t, filepath.Join(dir, "ca", "record.json"))

	a := must.Get(newConfig(t, dir).Open(t.Context(), caconfig.OpenOptions{}))(t)
	root := a.Own.Status().Roots[0].ID
	a.Close()
	a = must.Get(c.Open(t.Context(), caconfig.OpenOptions{}))(t, "it is there now")
	require.Equal(t, root, a.Own.Status().Roots[0].ID)
	a.Close()
}

// A start that has failed leaves no directory behind, and one that was there stays.
func TestFailedStartLeavesNothing(t *testing.T) {
	t.Parallel()
	top := t.TempDir()
	dir := filepath.Join(top, "a", "b")
	none := func(*caconfig.Authority, caserver.Listeners) { assert.Fail(t, "it serves") }
	err := newConfig(t, dir, "-create=false").Serve(t.Context(), nil, none)
	require.ErrorIs(t, err, ca.ErrNoRecord)
	require.NotErrorIs(t, err, caconfig.ErrUsage)
	require.NoDirExists(t, filepath.Join(top, "a"))

	require.NoError(t, os.MkdirAll(dir, 0o700))
	_, err = newConfig(t, dir, "-create=false").Open(t.Context(), caconfig.OpenOptions{})
	require.ErrorIs(t, err, ca.ErrNoRecord)
	require.Empty(t, must.Get(os.ReadDir(dir))(t, "it was there before"))

	audit := filepath.Join(dir, "audit.jsonl")
	require.NoError(t, os.WriteFile(audit, nil, 0o600))
	_, err = newConfig(t, dir, "-create=false").Open(t.Context(), caconfig.OpenOptions{})
	require.ErrorIs(t, err, ca.ErrNoRecord)
	require.FileExists(t, audit)

	_, err = newConfig(t, "").Open(t.Context(), caconfig.OpenOptions{})
	require.ErrorIs(t, err, caconfig.ErrUsage)
	require.ErrorContains(t, err, "-state-dir")
}

// The modes of an audit log that others can write to are complained of.
func TestAuditLog(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var log bytes.Buffer
	require.NoError(t, os.WriteFile(filepath.Join(dir, "audit.jsonl"), nil, 0o600))
	require.NoError(t, os.Chmod(filepath.Join(dir, "audit.jsonl"), 0o666))
	a, err := newConfig(t, dir).Open(t.Context(), caconfig.OpenOptions{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	a.Close()
	if runtime.GOOS != "windows" {
		require.Contains(t, log.String(), "0666")
	}
}

// What other users can change is refused: the directory of the state, the directory of a plugged-in CA, a file in it, and a directory
// above. So a CA that another user has planted signs nothing.
func TestUnsafeFolders(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("there are no such modes")
	}
	none := func(*caconfig.Authority, caserver.Listeners) { assert.Fail(t, "it serves") }
	for _, tc := range []struct{ what, want string }{{"state", "-state-dir"}, {"above", "-state-dir"}, {"plugged-in", "-root-ca-dir"}, {"plugged-in/ca-cert.pem", "-root-ca-dir"}, {"plugged-in/ca-key.pem", "-root-ca-dir"}} {
		above := filepath.Join(t.TempDir(), "above")
		dir := filepath.Join(above, "state")
		require.NoError(t, os.MkdirAll(dir, 0o700))
		args := []string{"-root-ca-dir", ""}
		if tc.want == "-root-ca-dir" {
			plugIn(t, filepath.Join(dir, "plugged-in"))
			args = nil
		}
		path := filepath.Join(dir, tc.what)
		switch tc.what {
		case "state":
			path = dir
		case "above":
			path = above
		}
		require.NoError(t, os.Chmod(path, 0o777))
		err := newConfig(t, dir, args...).Serve(t.Context(), nil, none)
		require.ErrorContains(t, err, tc.want+": ", tc.what)
		require.ErrorContains(t, err, filepath.Dir(path))
		require.ErrorContains(t, err, filepath.Base(path))
		require.ErrorContains(t, err, "chmod")
		_, err = newConfig(t, dir, args...).Open(t.Context(), caconfig.OpenOptions{})
		require.ErrorContains(t, err, tc.want+": ", tc.what)
		require.NoDirExists(t, filepath.Join(dir, "ca"))
	}
}

// A CA that is plugged in does not take the place of the own one without being told to, and is not served in development
// mode at all.
func TestPluggedInBesideTheOwn(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	a := must.Get(newConfig(t, dir).Open(t.Context(), caconfig.OpenOptions{}))(t)
	own := a.Own.Status().Roots[0].ID
	a.Close()
	plugIn(t, filepath.Join(dir, "plugged-in"))
	_, err := newConfig(t, dir).Open(t.Context(), caconfig.OpenOptions{})
	require.ErrorContains(t, err, "-replace-own-ca")
	require.ErrorContains(t, err, filepath.Join(dir, "ca"))
	for _, more := range [][]string{nil, {"-replace-own-ca"}} {
		err = newConfig(t, dir, more...).Serve(t.Context(), nil, func(*caconfig.Authority, caserver.Listeners) { assert.Fail(t, "it serves") })
		require.ErrorContains(t, err, "-root-ca-dir: there is a CA in")
	}
	require.NoFileExists(t, filepath.Join(dir, "root-cert.pem"), "what clients trust was not replaced")
	a = must.Get(newConfig(t, dir, "-replace-own-ca").Open(t.Context(), caconfig.OpenOptions{}))(t)
	require.NotEqual(t, own, a.Own.Status().Roots[0].ID)
	a.Close()
	a = must.Get(newConfig(t, dir, "-root-ca-dir", "").Open(t.Context(), caconfig.OpenOptions{}))(t)
	require.Equal(t, own, a.Own.Status().Roots[0].ID, "it is there as before")
	a.Close()
}

// plugIn writes a root and its key in the files of Istio.
func plugIn(t testing.TB, dir string) {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	now := time.Now()
	root, err := pki.NewRoot(key, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseTrustDomain("cluster.local").ID())}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(24 * time.Hour * 365)})
	require.NoError(t, err)
	keyPEM := must.Get(pki.MarshalPrivateKeyPEM(key))(t)
	cert := pki.MarshalCertificatesPEM(root.Certificate())
	require.NoError(t, os.MkdirAll(dir, 0o700))
	for name, text := range map[string][]byte{"ca-cert.pem": cert, "ca-key.pem": keyPEM, "cert-chain.pem": cert, "root-cert.pem": cert} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), text, 0o600))
	}
}

// Open makes a CA, unless it has to exist, and a reader changes nothing in the store.
func TestOpen(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "state")
	c := newConfig(t, dir, "-refresh-hint", "1s", "-propagation", "1m", "-istio-addr", "")
	for _, o := range []caconfig.OpenOptions{{Existing: true}, {ReadOnly: true}} {
		require.ErrorIs(t, must.Err(c.Open(t.Context(), o)), ca.ErrNoRecord)
		require.NoDirExists(t, filepath.Join(dir, "ca"))
	}
	a := must.Get(c.Open(t.Context(), caconfig.OpenOptions{}))(t)
	defer a.Close()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{}))(t)
	must.Get(a.Sign(t.Context(), ca.Request{CSR: csr, ID: spiffe.MustParseID("spiffe://cluster.local/x")}))(t)
	must.Get(a.Own.Rotate(t.Context()))(t)
	log := must.Get(os.ReadFile(c.AuditLog))(t)
	require.Equal(t, 1, bytes.Count(log, []byte(`"kind":"x509-svid"`)))
	require.Equal(t, 3, bytes.Count(log, []byte(`"event":`)), "a root and a key for tokens were created, and a root prepared")

	store := must.Get(ca.NewDirStore(filepath.Join(dir, "ca")))(t)
	before := must.Get(store.Load(t.Context()))(t)
	reader := must.Get(c.Open(t.Context(), caconfig.OpenOptions{ReadOnly: true}))(t)
	defer reader.Close()
	require.ErrorContains(t, reader.Own.Taint(t.Context(), a.Own.Status().Roots[0].ID), "to look only")
	var status bytes.Buffer
	reader.WriteStatus(&status)
	require.Contains(t, status.String(), "distributing, signs from ")
	require.NotContains(t, status.String(), "tainted")
	require.Equal(t, before.Version, must.Get(store.Load(t.Context()))(t).Version, "the store is as it was")

	require.ErrorContains(t, must.Err(newConfig(t, "").Open(t.Context(), caconfig.OpenOptions{})), "-state-dir")
}
