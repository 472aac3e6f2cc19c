package sidecar_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/athenz-sia/sidecar"
	"github.com/svidkit/svidkit/examples/internal/agentapi"
	"github.com/svidkit/svidkit/internal/test/athenztest"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// fakeAgent gives identities that live for a while, and counts what it is asked.
type fakeAgent struct {
	t    testing.TB
	ca   *spiffetest.CA
	life time.Duration

	inits, refreshs atomic.Int32
	begun           atomic.Int32 // inits that gave something

	mu    sync.Mutex
	err   error
	shown []*pki.Credential
	given []*agentapi.Answer
}

func (f *fakeAgent) give() (*agentapi.Answer, error) {
	if f.err != nil {
		return nil, f.err
	}
	chain, key := f.ca.Certificate("/web", func(c *x509.Certificate) { c.NotBefore, c.NotAfter = time.Now(), time.Now().Add(f.life) })
	credential, err := pki.NewCredential(chain, key)
	assert.NoError(f.t, err)
	i := &agentapi.Answer{Credential: credential, Token: func() string { return "" }}
	if len(f.given) == 0 { // later ones have none
		i.Roots = []*x509.Certificate{f.ca.Root()}
	}
	f.given = append(f.given, i)
	return i, nil
}

func (f *fakeAgent) Init(context.Context) (*agentapi.Answer, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inits.Add(1)
	if f.err == nil {
		f.begun.Add(1)
	}
	return f.give()
}

func (f *fakeAgent) Refresh(_ context.Context, current *pki.Credential) (*agentapi.Answer, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refreshs.Add(1)
	f.shown = append(f.shown, current)
	return f.give()
}

func (f *fakeAgent) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

// history returns what was given and what was shown, so far.
func (f *fakeAgent) history() ([]*agentapi.Answer, []*pki.Credential) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.given), slices.Clone(f.shown)
}

func (f *fakeAgent) last() *pki.Credential {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.given[len(f.given)-1].Credential
}

// sleep lets all that is due happen, too.
func sleep(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestSidecar(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "ATH-8-1", "ATH-8-8", "ATH-8-9")
	synctest.Test(t, func(t *testing.T) {
		f := &fakeAgent{t: t, ca: spiffetest.NewCA(t, "athenz.example"), life: 30 * 24 * time.Hour}
		var log bytes.Buffer
		var mu sync.Mutex
		var kept []*sidecar.Identity
		s, err := sidecar.StartWith(t.Context(), sidecar.Config{Logger: slog.New(slog.NewTextHandler(&log, nil))}, f, func(_ context.Context, i *sidecar.Identity) error {
			mu.Lock()
			defer mu.Unlock()
			kept = append(kept, i)
			return nil
		}, nil)
		require.NoError(t, err)
		changed := s.Changed()
		i := must.Get(s.Identity())(t)
		assert.Same(t, f.last(), i.Credential)
		sleep(50 * time.Minute)
		assert.Zero(t, f.refreshs.Load())
		sleep(20 * time.Minute)
		<-changed
		assert.Equal(t, []int32{1, 1}, []int32{f.inits.Load(), f.refreshs.Load()})
		hours := rounds.Of(12)
		sleep(time.Duration(hours) * time.Hour)
		assert.InDelta(t, hours+1, f.refreshs.Load(), float64(hours)/12)
		assert.Equal(t, int32(1), f.inits.Load())
		given, all := f.history()
		for k, shown := range all {
			assert.Same(t, given[k].Credential, shown, "each refresh shows the one before")
		}
		i = must.Get(s.Identity())(t)
		require.Len(t, i.Roots, 1, "those that are known stay")
		mu.Lock()
		assert.Len(t, kept, len(given))
		mu.Unlock()

		// An agent that is away: the identity stays, and Close still works.
		f.fail(errors.New("away"))
		sleep(time.Duration(hours) * time.Hour)
		assert.Same(t, i, must.Get(s.Identity())(t))
		state := s.Report()
		require.NoError(t, state.NotReady)
		require.ErrorContains(t, state.Upstreams[0].Err, "away")
		assert.Greater(t, state.Upstreams[0].Failures, 10)
		assert.Less(t, state.Upstreams[0].Failures, 60*hours)
		assert.Equal(t, i.Credential.NotAfter(), state.Identities[0].NotAfter)
		var text bytes.Buffer
		require.NoError(t, s.Report().Metrics(&text))
		assert.Empty(t, must.Get(metricstest.Of(s.Report().Metrics))(t).Lint())
		assert.Contains(t, text.String(), "svidkit_athenz_sidecar_ready 1\n")
		f.fail(nil)
		sleep(10 * time.Minute)
		require.NoError(t, s.Report().Upstreams[0].Err)
		require.NoError(t, s.Close())
		require.NoError(t, s.Close())
		require.Error(t, s.Run(t.Context()))
		must.Get(s.Identity())(t)
	})
}

func TestSidecarShortLife(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fakeAgent{t: t, ca: spiffetest.NewCA(t, "athenz.example"), life: 20 * time.Minute}
		s := must.Get(sidecar.StartWith(t.Context(), sidecar.Config{}, f, nil, nil))(t)
		sleep(11 * time.Minute)
		assert.Equal(t, int32(1), f.refreshs.Load(), "half of the life is over before the interval")
		// An outage of 45 % of a life, from any moment.
		f.fail(errors.New("away"))
		sleep(9 * time.Minute)
		must.Get(s.Identity())(t)
		f.fail(nil)
		sleep(time.Minute)
		assert.Same(t, f.last(), present(t, s).Credential, "soon after it is back")
		// One that lasts: the identity ends, and the next is asked for by init.
		f.fail(errors.New("away"))
		sleep(21 * time.Minute)
		_, err := s.Identity()
		require.ErrorIs(t, err, spiffe.ErrNotReady)
		require.ErrorContains(t, err, "expired")
		require.ErrorIs(t, s.Report().NotReady, spiffe.ErrNotReady)
		var text bytes.Buffer
		require.NoError(t, s.Report().Metrics(&text))
		assert.Contains(t, text.String(), "svidkit_athenz_sidecar_ready 0\n")
		f.fail(nil)
		sleep(time.Minute)
		assert.Equal(t, int32(2), f.begun.Load())
		present(t, s)
		require.NoError(t, s.Close())
	})
}

func present(t testing.TB, s *sidecar.Sidecar) *sidecar.Identity {
	t.Helper()
	return must.Get(s.Identity())(t)
}

// TestSidecarKeepsFirst has the first identity, which the agent gives once, not be lost because it could not be kept at once.
func TestSidecarKeepsFirst(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fakeAgent{t: t, ca: spiffetest.NewCA(t, "athenz.example"), life: 24 * time.Hour}
		full := errors.New("the disk is full")
		var kept []*sidecar.Identity
		ctx, cancel := context.WithCancel(t.Context())
		soon, stop := context.WithTimeout(t.Context(), time.Hour)
		defer stop()
		s := must.Get(sidecar.StartWith(soon, sidecar.Config{}, f, func(_ context.Context, i *sidecar.Identity) error {
			f.fail(errors.New("given already"))
			if kept = append(kept, i); len(kept) < 4 {
				return full
			}
			return nil
		}, nil))(t)
		assert.Equal(t, int32(1), f.inits.Load())
		assert.Same(t, kept[0], present(t, s))
		require.NoError(t, s.Close())

		// One that was kept while the Sidecar is told to stop is the present one.
		f.fail(nil)
		s, err := sidecar.NewWith(sidecar.Config{}, f, func(context.Context, *sidecar.Identity) error { cancel(); return nil }, nil)
		require.NoError(t, err)
		require.NoError(t, s.Run(ctx))
		assert.Same(t, f.last(), present(t, s).Credential)
	})
}

// TestSidecarKeeps has what cannot be kept not become the present identity.
func TestSidecarKeeps(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-18-11")
	synctest.Test(t, func(t *testing.T) {
		f := &fakeAgent{t: t, ca: spiffetest.NewCA(t, "athenz.example"), life: 24 * time.Hour}
		first := must.Get(f.Init(t.Context()))(t)
		full, tries := errors.New("the disk is full"), 0
		s, err := sidecar.NewWith(sidecar.Config{}, f, func(context.Context, *sidecar.Identity) error { tries++; return full }, sidecar.IdentityOf(first.Credential))
		require.NoError(t, err)
		assert.Same(t, first.Credential, present(t, s).Credential)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		sleep(4 * time.Hour)
		assert.Same(t, first.Credential, present(t, s).Credential)
		assert.Greater(t, tries, 3)
		_, all := f.history()
		require.Len(t, all, 1, "what was given is kept, and not asked for again")
		assert.Same(t, first.Credential, all[0])
		assert.Equal(t, int32(1), f.inits.Load())
		require.ErrorIs(t, s.Report().Upstreams[0].Err, full)
		cancel()
		require.NoError(t, <-done)
	})
}

func TestSidecarRefuses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fakeAgent{t: t, ca: spiffetest.NewCA(t, "athenz.example"), life: time.Hour}
		good := sidecar.Config{Socket: "/agent.sock", HandleFile: "/id"}
		for _, edit := range []func(*sidecar.Config){
			func(c *sidecar.Config) { c.Socket = "" },
			func(c *sidecar.Config) { c.HandleFile = "" },
			func(c *sidecar.Config) { c.Interval = time.Second },
			func(c *sidecar.Config) { c.Interval = -1 },
			func(c *sidecar.Config) { c.Timeout = -1 },
			func(c *sidecar.Config) { c.Files.TokenFile = "/ntoken" },
		} {
			cfg := good
			edit(&cfg)
			require.ErrorContains(t, must.Err(sidecar.New(cfg)), "sidecar: new: ")
			require.Error(t, must.Err(sidecar.Start(t.Context(), cfg)))
		}
		must.Get(sidecar.New(good))(t)
		s := must.Get(sidecar.NewWith(sidecar.Config{}, f, nil, nil))(t)
		require.ErrorIs(t, must.Err(s.Identity()), spiffe.ErrNotReady)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := s.Ready(ctx)
		require.ErrorIs(t, err, spiffe.ErrNotReady)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		away := errors.New("away")
		f.fail(away)
		ctx, cancel = context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		_, err = sidecar.StartWith(ctx, sidecar.Config{}, f, nil, nil)
		require.ErrorIs(t, err, spiffe.ErrNotReady)
		require.ErrorIs(t, err, away)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		synctest.Wait()
		assert.Greater(t, f.inits.Load(), int32(5))

		// An identity that has expired is none to begin with.
		f.fail(nil)
		old := must.Get(f.Init(t.Context()))(t)
		sleep(time.Hour)
		s = must.Get(sidecar.NewWith(sidecar.Config{}, f, nil, sidecar.IdentityOf(old.Credential)))(t)
		require.ErrorIs(t, must.Err(s.Identity()), spiffe.ErrNotReady)
	})
}

var discard = slog.New(slog.DiscardHandler)

func newKey(t *testing.T) crypto.Signer {
	t.Helper()
	return must.Get(pki.NewKey("ecdsa-p256"))(t)
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

	ec := must.Get(pki.NewKey("ecdsa-p256"))(t)
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
	other := must.Get(pki.NewKey("ecdsa-p256"))(t)
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
	i := must.Get(f.Read(slog.New(slog.NewTextHandler(log, nil))))(t, "a certificate with its key is worth something without the others")
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
