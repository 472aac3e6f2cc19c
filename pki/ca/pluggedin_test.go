package ca_test

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// offline is a root that an operator keeps offline.
type offline struct {
	key    crypto.Signer
	issuer *pki.Issuer
}

func newOffline(t testing.TB, edit ...func(*pki.CertificateOptions)) *offline {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	o := pki.CertificateOptions{CA: true, SANs: []pki.SAN{pki.IDSAN(td.ID())}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(10 * 365 * 24 * time.Hour)}
	for _, e := range edit {
		e(&o)
	}
	issuer := must.Get(pki.NewRoot(key, o))(t)
	return &offline{key, issuer}
}

func (o *offline) cert() *x509.Certificate { return o.issuer.Certificate() }

// files are those of a CA below o, with Istio's names.
func (o *offline) files(t testing.TB, life time.Duration, edit ...func(*pki.CertificateOptions)) map[string][]byte {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	opts := pki.CertificateOptions{PublicKey: key.Public(), CA: true, SANs: []pki.SAN{pki.IDSAN(td.ID())}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(life)}
	for _, e := range edit {
		e(&opts)
	}
	cert := must.Get(o.issuer.Issue(opts))(t)
	keyPEM := must.Get(pki.MarshalPrivateKeyPEM(key))(t)
	return map[string][]byte{
		"ca-cert.pem": pki.MarshalCertificatesPEM(cert), "ca-key.pem": keyPEM,
		"cert-chain.pem": pki.MarshalCertificatesPEM(cert), "root-cert.pem": pki.MarshalCertificatesPEM(o.cert()),
	}
}

// directory is files that can be changed while they are read.
type folder struct{ now atomic.Pointer[fstest.MapFS] }

func newFolder(files map[string][]byte) *folder {
	f := new(folder)
	f.now.Store(new(fstest.MapFS{}))
	f.put(files)
	return f
}

func (f *folder) Open(name string) (fs.File, error) { return f.now.Load().Open(name) }

func (f *folder) put(files map[string][]byte) {
	next := maps.Clone(*f.now.Load())
	for name, b := range files {
		next[name] = &fstest.MapFile{Data: b, Mode: 0o600, ModTime: time.Now()}
	}
	f.now.Store(&next)
}

func loadCA(t testing.TB, fsys fs.FS, edit ...func(*ca.Config)) *ca.Authority {
	t.Helper()
	return must.Get(tryLoadCA(t.Context(), fsys, nil, edit...))(t)
}

func tryLoadCA(ctx context.Context, fsys fs.FS, store ca.Store, edit ...func(*ca.Config)) (*ca.Authority, error) {
	return tryLoadFrom(ctx, ca.PluggedIn{Tokens: store}.In(fsys), edit...)
}

func tryLoadFrom(ctx context.Context, from ca.PluggedIn, edit ...func(*ca.Config)) (*ca.Authority, error) {
	cfg := ca.Config{TrustDomain: td, Create: true}
	for _, e := range edit {
		e(&cfg)
	}
	return ca.Load(ctx, cfg, from)
}

func verifyChain(b *spiffe.Bundle, chain []*x509.Certificate) error {
	v, err := spiffe.NewVerifier(b, spiffe.AllowIDs(web), nil)
	if err != nil {
		return err
	}
	_, err = v.VerifyChain(chain, spiffe.AnyRole)
	return err
}

func TestLoad(t *testing.T) {
	conformance.Covers(t, "IST-3.7-1")
	bubble.Test(t, func(t *testing.T) {
		root := newOffline(t)
		istio := root.files(t, 1000*time.Hour)
		for name, files := range map[string]map[string][]byte{
			"Istio":      istio,
			"TLS secret": {"tls.crt": istio["ca-cert.pem"], "tls.key": istio["ca-key.pem"], "ca.crt": istio["root-cert.pem"]},
			"Linkerd":    {"crt.pem": istio["ca-cert.pem"], "key.pem": istio["ca-key.pem"], "ca.crt": istio["root-cert.pem"]},
		} {
			a := loadCA(t, newFolder(files))
			chain, err := a.Sign(t.Context(), ca.Request{CSR: newCSR(t), ID: web})
			require.NoError(t, err, name)
			require.Len(t, chain, 2, "leaf and CA, and not the root")
			assert.Equal(t, istio["ca-cert.pem"], pki.MarshalCertificatesPEM(chain[1]))
			assert.NoError(t, verifyChain(a.Bundle(), chain), name)
			assert.Equal(t, []*x509.Certificate{root.cert()}, slices.Collect(a.Bundle().X509Authorities()))
			assert.EqualValues(t, time.Now().UnixMilli(), sequence(t, a.Bundle()))
			require.Len(t, a.Roots(), 1)
			assert.Equal(t, "trusted", a.Roots()[0].Phase)
			assert.Contains(t, a.Roots()[0].String(), ": trusted")
			assert.Equal(t, time.Now().Round(0), a.Status().Synced)

			id := a.Roots()[0].ID
			_, err = a.Rotate(t.Context())
			require.ErrorIs(t, err, ca.ErrPluggedIn)
			require.ErrorIs(t, a.Taint(t.Context(), id), ca.ErrPluggedIn)
			require.ErrorIs(t, must.Err(a.Revoke(t.Context(), id, false)), ca.ErrPluggedIn)
			require.ErrorIs(t, must.Err(a.Revoke(t.Context(), "0", false)), ca.ErrUnknownKey)
		}
		// A root that signs leaves itself.
		keyPEM := must.Get(pki.MarshalPrivateKeyPEM(root.key))(t)
		rootPEM := pki.MarshalCertificatesPEM(root.cert())
		a := loadCA(t, newFolder(map[string][]byte{"ca-cert.pem": rootPEM, "ca-key.pem": keyPEM, "cert-chain.pem": rootPEM, "root-cert.pem": rootPEM}))
		leaf := sign(t, a, newCSR(t), 0)
		assert.NoError(t, verify(a.Bundle(), leaf, time.Now()))
		assert.Equal(t, "active", a.Roots()[0].Phase)
	})
}

// What a CA has left is what a leaf can have, at each signature anew.
// kms is a key that can sign, and nothing else, as those in an HSM or a KMS.
type kms struct{ key crypto.Signer }

func (k kms) Public() crypto.PublicKey { return k.key.Public() }

func (k kms) Sign(rand io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	return k.key.Sign(rand, digest, opts)
}

// The key of a plugged-in CA need not be in a file.
func TestPluggedInKey(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		root := newOffline(t)
		files := root.files(t, 24*time.Hour)
		key := must.Get(pki.ParsePrivateKeyPEM(files["ca-key.pem"]))(t)
		delete(files, "ca-key.pem")
		fsys := newFolder(files)
		a := must.Get(tryLoadFrom(t.Context(), ca.PluggedIn{Key: func() crypto.Signer { return kms{key} }}.In(fsys)))(t)
		chain := must.Get(a.Sign(t.Context(), ca.Request{CSR: newCSR(t), ID: web}))(t)
		require.NoError(t, verifyChain(a.Bundle(), chain))
		require.True(t, pki.PublicKeysEqual(key.Public(), chain[1].PublicKey))

		// Another CA certificate for the key is taken, and one for another key is not.
		run(t, a)
		time.Sleep(time.Second) // so that new files have another time
		other := root.files(t, 24*time.Hour)
		delete(other, "ca-key.pem")
		fsys.put(other)
		time.Sleep(5 * time.Second)
		require.ErrorIs(t, a.Status().SyncError, pki.ErrKeyMismatch)
		again := must.Get(a.Sign(t.Context(), ca.Request{CSR: newCSR(t), ID: web}))(t)
		assert.True(t, again[1].Equal(chain[1]))
		renewed, err := root.issuer.Issue(pki.CertificateOptions{PublicKey: key.Public(), CA: true, SANs: []pki.SAN{pki.IDSAN(td.ID())}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(48 * time.Hour)})
		require.NoError(t, err)
		fsys.put(map[string][]byte{"ca-cert.pem": pki.MarshalCertificatesPEM(renewed), "cert-chain.pem": pki.MarshalCertificatesPEM(renewed)})
		time.Sleep(5 * time.Second)
		require.NoError(t, a.Status().SyncError)
		again = must.Get(a.Sign(t.Context(), ca.Request{CSR: newCSR(t), ID: web}))(t)
		assert.True(t, again[1].Equal(renewed))
	})
}

func TestPluggedInLifetimes(t *testing.T) {
	conformance.Covers(t, "IST-2.6-3", "IST-3.3-2", "IST-3.4-1", "IST-3.7-7")
	bubble.Test(t, func(t *testing.T) {
		a, csr := loadCA(t, newFolder(newOffline(t).files(t, 30*time.Hour))), newCSR(t)
		start := time.Now()
		for _, tt := range []struct{ age, want time.Duration }{{0, 24 * time.Hour}, {6 * time.Hour, 24 * time.Hour}, {7 * time.Hour, 23 * time.Hour}, {30*time.Hour - time.Second, time.Second}} {
			time.Sleep(time.Until(start.Add(tt.age)))
			chain := must.Get(a.Sign(t.Context(), ca.Request{CSR: csr, ID: web}))(t)
			assert.Equal(t, time.Now().Add(tt.want).UTC(), chain[0].NotAfter)
			assert.NoError(t, verifyChain(a.Bundle(), chain))
		}
		_, err := a.Sign(t.Context(), ca.Request{CSR: csr, ID: web, TTL: 91 * 24 * time.Hour})
		require.ErrorIs(t, err, ca.ErrTTL)
		time.Sleep(time.Second)
		_, err = a.Sign(t.Context(), ca.Request{CSR: csr, ID: web})
		require.ErrorIs(t, err, spiffe.ErrNotReady)
	})
	// The root ends first.
	synctest.Test(t, func(t *testing.T) {
		key := must.Get(pki.NewKey("ecdsa-p256"))(t)
		o := pki.CertificateOptions{CA: true, SANs: []pki.SAN{pki.IDSAN(td.ID())}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(5 * time.Hour)}
		short := must.Get(pki.NewRoot(key, o))(t)
		o.NotAfter = time.Now().Add(50 * time.Hour)
		long := must.Get(pki.NewRoot(key, o))(t) // signs what outlives its twin
		files := (&offline{key, long}).files(t, 40*time.Hour)
		files["root-cert.pem"] = pki.MarshalCertificatesPEM(short.Certificate())
		a := loadCA(t, newFolder(files))
		chain := must.Get(a.Sign(t.Context(), ca.Request{CSR: newCSR(t), ID: web}))(t)
		assert.Equal(t, short.Certificate().NotAfter, chain[0].NotAfter)
	})
	// A CA in the middle ends first.
	synctest.Test(t, func(t *testing.T) {
		root := newOffline(t)
		key := must.Get(pki.NewKey("ecdsa-p256"))(t)
		o := pki.CertificateOptions{PublicKey: key.Public(), CA: true, SANs: []pki.SAN{pki.IDSAN(td.ID())}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(5 * time.Hour)}
		short := must.Get(root.issuer.Issue(o))(t)
		o.NotAfter = time.Now().Add(50 * time.Hour)
		long := must.Get(root.issuer.Issue(o))(t)
		issuer := must.Get(pki.NewIssuer([]*x509.Certificate{long}, key))(t)
		files := (&offline{key, issuer}).files(t, 40*time.Hour)
		files["cert-chain.pem"] = append(files["cert-chain.pem"], pki.MarshalCertificatesPEM(short)...)
		files["root-cert.pem"] = pki.MarshalCertificatesPEM(root.cert())
		a := loadCA(t, newFolder(files))
		chain := must.Get(a.Sign(t.Context(), ca.Request{CSR: newCSR(t), ID: web}))(t)
		require.Len(t, chain, 3)
		assert.Equal(t, short.NotAfter, chain[0].NotAfter)
		assert.NoError(t, verifyChain(a.Bundle(), chain))
	})
}

func TestLoadRefuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BND-2", "IST-3.7-6")
	for name, tt := range map[string]struct {
		files func(t *testing.T) map[string][]byte
		says  string
	}{
		"another trust domain": {func(t *testing.T) map[string][]byte {
			other := func(o *pki.CertificateOptions) {
				o.SANs = []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.com"))}
			}
			return newOffline(t, other).files(t, time.Hour, other)
		}, "cannot sign for the trust domain \"example.org\""},
		"a root that permits another trust domain": {func(t *testing.T) map[string][]byte {
			other := func(o *pki.CertificateOptions) {
				o.SANs = []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.com"))}
			}
			permits := func(o *pki.CertificateOptions) {
				o.PermittedTrustDomains = []spiffe.TrustDomain{spiffe.MustParseTrustDomain("example.com")}
			}
			return newOffline(t, other, permits).files(t, time.Hour, other)
		}, "cannot sign"},
		"no private key": {func(t *testing.T) map[string][]byte {
			f := newOffline(t).files(t, time.Hour)
			delete(f, "ca-key.pem")
			return f
		}, "ca-key.pem"},
		"another's private key": {func(t *testing.T) map[string][]byte {
			f, o := newOffline(t).files(t, time.Hour), newOffline(t).files(t, time.Hour)
			f["ca-key.pem"] = o["ca-key.pem"]
			return f
		}, pki.ErrKeyMismatch.Error()},
		"another root": {func(t *testing.T) map[string][]byte {
			f, o := newOffline(t).files(t, time.Hour), newOffline(t).files(t, time.Hour)
			f["root-cert.pem"] = o["root-cert.pem"]
			return f
		}, "does not lead to a root"},
		"expired": {func(t *testing.T) map[string][]byte {
			return newOffline(t).files(t, -time.Minute)
		}, "expired"},
		"a workload's certificate": {func(t *testing.T) map[string][]byte {
			o := newOffline(t)
			f := o.files(t, time.Hour)
			key := must.Get(pki.ParsePrivateKeyPEM(f["ca-key.pem"]))(t)
			leaf, err := o.issuer.Issue(pki.CertificateOptions{PublicKey: key.Public(), SANs: []pki.SAN{pki.IDSAN(web)}, NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour)})
			require.NoError(t, err)
			f["ca-cert.pem"] = pki.MarshalCertificatesPEM(leaf)
			return f
		}, "CA"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, err := tryLoadCA(t.Context(), newFolder(tt.files(t)), nil)
			require.Error(t, err)
			assert.Nil(t, a)
			assert.Regexp(t, `^ca: load the CA of example.org: `, err.Error())
			assert.ErrorContains(t, err, tt.says)
			assert.NotErrorIs(t, err, fs.ErrNotExist)
		})
	}
	_, err := tryLoadCA(t.Context(), fstest.MapFS{}, nil)
	assert.ErrorIs(t, err, fs.ErrNotExist, "there is no CA in files")
	_, err = tryLoadCA(t.Context(), nil, nil)
	assert.ErrorContains(t, err, "needs a directory")
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	_, err = tryLoadCA(ctx, newFolder(newOffline(t).files(t, time.Hour)), nil)
	assert.ErrorIs(t, err, cause)
}

func TestReload(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.10-5", "IST-3.7-8", "IST-3.7-10")
	for _, multi := range []bool{false, true} {
		bubble.Run(t, map[bool]string{false: "one root", true: "several roots"}[multi], func(t *testing.T) {
			root, other := newOffline(t), newOffline(t)
			f := newFolder(root.files(t, 1000*time.Hour))
			a := must.Get(tryLoadFrom(t.Context(), ca.PluggedIn{MultiRoot: multi}.In(f)))(t)
			run(t, a)
			csr := newCSR(t)
			signer := func() string {
				chain := must.Get(a.Sign(t.Context(), ca.Request{CSR: csr, ID: web}))(t)
				require.NoError(t, verifyChain(a.Bundle(), chain))
				return chain[1].SerialNumber.Text(16)
			}
			look := func() { time.Sleep(2 * time.Second); synctest.Wait() }
			look()
			first, bundle := signer(), a.Bundle()

			f.put(root.files(t, 500*time.Hour))
			changed := a.Changed()
			look()
			second := signer()
			require.NotEqual(t, first, second, "a new CA below the same root")
			require.Same(t, bundle, a.Bundle())
			<-changed
			require.NoError(t, a.Status().SyncError)
			require.WithinDuration(t, time.Now(), a.Status().Synced, 2*time.Second)

			// Swapped, it is always refused; the CA that works goes on.
			good := f.now.Load()
			f.put(other.files(t, 500*time.Hour))
			look()
			require.Equal(t, second, signer())
			require.ErrorContains(t, a.Status().SyncError, "the roots have")
			had := a.Status().Synced
			look()
			require.Equal(t, had, a.Status().Synced)

			// Half written, too, and what came before is in order again when it is put back.
			f.put(map[string][]byte{"ca-key.pem": []byte("-----BEGIN")})
			look()
			require.Equal(t, second, signer())
			require.Error(t, a.Status().SyncError)
			f.now.Store(good)
			look()
			require.NoError(t, a.Status().SyncError)
			require.Equal(t, second, signer())

			both := root.files(t, 400*time.Hour)
			both["root-cert.pem"] = pki.MarshalCertificatesPEM(root.cert(), other.cert())
			f.put(both)
			look()
			if !multi {
				require.Equal(t, second, signer())
				require.ErrorContains(t, a.Status().SyncError, "the roots have changed")
				return
			}
			require.NotEqual(t, second, signer())
			require.Len(t, slices.Collect(a.Bundle().X509Authorities()), 2)
			n := sequence(t, a.Bundle())
			require.Greater(t, n, sequence(t, bundle))

			// The new root's CA signs now, and the old root leaves.
			next := other.files(t, 400*time.Hour)
			next["root-cert.pem"] = both["root-cert.pem"]
			f.put(next)
			look()
			third := signer()
			require.Equal(t, n, sequence(t, a.Bundle()), "nothing has changed in it")
			f.put(map[string][]byte{"root-cert.pem": pki.MarshalCertificatesPEM(other.cert())})
			look()
			require.Equal(t, third, signer())
			require.Len(t, slices.Collect(a.Bundle().X509Authorities()), 1)
			require.Greater(t, sequence(t, a.Bundle()), n)
			require.GreaterOrEqual(t, sequence(t, loadCA(t, f).Bundle()), sequence(t, a.Bundle()), "not even after a restart")
		})
	}
}

// Links that are swapped, as Kubernetes does it, on a real file system.
func TestReloadOfSwappedLinks(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.7-8")
	onlyUnix(t)
	dir := t.TempDir()
	root := newOffline(t)
	version := func(name string, files map[string][]byte) {
		require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o700))
		for f, b := range files {
			require.NoError(t, os.WriteFile(filepath.Join(dir, name, f), b, 0o600))
		}
		require.NoError(t, os.Symlink(name, filepath.Join(dir, "..data_tmp")))
		require.NoError(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	}
	version("..1", root.files(t, 1000*time.Hour))
	for _, f := range []string{"ca-cert.pem", "ca-key.pem", "cert-chain.pem", "root-cert.pem"} {
		require.NoError(t, os.Symlink(filepath.Join("..data", f), filepath.Join(dir, f)))
	}
	a := must.Get(tryLoadFrom(t.Context(), ca.PluggedIn{Dir: dir}))(t)
	run(t, a)
	changed := a.Changed()
	old := a.Signer()
	version("..2", root.files(t, 1000*time.Hour))
	select {
	case <-changed:
	case <-time.After(30 * time.Second):
		t.Fatal("the change was not noticed")
	}
	assert.NotEqual(t, old, a.Signer())
	require.NoError(t, a.Status().SyncError)
}

// A CA of files may have tokens of its own, in a store of their own.
func TestPluggedInJWT(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		f := newFolder(newOffline(t).files(t, 1000*time.Hour))
		store := ca.NewMemoryStore()
		a := must.Get(tryLoadCA(t.Context(), f, store, withJWT))(t)
		b := must.Get(tryLoadCA(t.Context(), f, store, withJWT))(t)
		require.NoError(t, validate(b.Bundle(), signJWT(t, a, 0)))
		assert.True(t, a.Bundle().Equal(b.Bundle()))
		n := sequence(t, a.Bundle())
		run(t, a)
		run(t, b)
		must.Get(a.RotateJWT(t.Context()))(t)
		assert.Equal(t, n+1, sequence(t, a.Bundle()))
		time.Sleep(26 * time.Minute)
		synctest.Wait()
		assert.True(t, a.Bundle().Equal(b.Bundle()))
		require.NoError(t, validate(b.Bundle(), signJWT(t, a, 0)))
		bad := b.Status().JWTKeys[0].ID
		require.NoError(t, must.Err(b.Revoke(t.Context(), bad, false)))
		require.Len(t, b.Status().JWTKeys, 1)

		// Not in the store of a CA that has roots of its own, nor the other way round.
		_, err := tryOpen(t.Context(), store)
		require.ErrorIs(t, err, ca.ErrRecord)
		own := ca.NewMemoryStore()
		open(t, own)
		_, err = tryLoadCA(t.Context(), f, own, withJWT)
		require.ErrorIs(t, err, ca.ErrRecord)

		// Without a store they live as long as the process.
		c := must.Get(tryLoadCA(t.Context(), f, nil, withJWT))(t)
		require.NoError(t, validate(c.Bundle(), signJWT(t, c, 0)))
		must.Get(c.RotateJWT(t.Context()))(t)
	})
}

// slowFolder is a directory whose file system takes its time.
type slowFolder struct {
	*folder
	open func() // before each file
}

func (f slowFolder) Open(name string) (fs.File, error) {
	f.open()
	return f.folder.Open(name)
}

// While new files are read, which may take long, everything else goes on, and nothing locks itself out.
func TestSlowReload(t *testing.T) {
	t.Parallel()
	const patience = time.Minute
	root := newOffline(t)
	f := newFolder(root.files(t, time.Hour))
	reading, read := make(chan struct{}), make(chan struct{})
	var slow atomic.Bool
	hang := sync.OnceFunc(func() { close(reading); <-read })
	logged := make(chan error, 10)
	var a *ca.Authority
	a = loadCA(t, slowFolder{f, func() {
		if slow.Load() {
			hang()
		}
	}}, func(c *ca.Config) {
		c.Logger = slog.New(onLog(func(msg string) {
			if msg == "CA files taken over" {
				logged <- a.Status().SyncError // a log handler may ask
			}
		}))
	})
	soon := func(what string, do func()) {
		t.Helper()
		done := make(chan struct{})
		go func() { defer close(done); do() }()
		select {
		case <-done:
		case <-time.After(patience):
			t.Fatal(what)
		}
	}
	changed, csr := a.Changed(), newCSR(t)
	slow.Store(true)
	f.put(root.files(t, time.Hour))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = a.Run(ctx) }()
	soon("Run does not look", func() { <-reading })
	for range 2 {
		soon("Status waits for the files", func() { assert.NoError(t, a.Status().SyncError) })
		soon("Sign waits for the files", func() {
			_, err := a.Sign(ctx, ca.Request{CSR: csr, ID: web})
			assert.NoError(t, err)
		})
	}
	close(read)
	soon("the new files are not taken", func() { <-changed; assert.NoError(t, <-logged) })
	cancel()
	soon("Run does not end", func() { <-ended })
}

// onLog is called with each message.
type onLog func(msg string)

func (onLog) Enabled(context.Context, slog.Level) bool        { return true }
func (f onLog) Handle(_ context.Context, r slog.Record) error { f(r.Message); return nil }
func (f onLog) WithAttrs([]slog.Attr) slog.Handler            { return f }
func (f onLog) WithGroup(string) slog.Handler                 { return f }

func TestMayReplace(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.7-9")
	a, b, c := newOffline(t).cert(), newOffline(t).cert(), newOffline(t).cert()
	set := func(roots ...*x509.Certificate) []*x509.Certificate { return roots }
	for name, tc := range map[string]struct {
		old, next          []*x509.Certificate
		same, single, many bool // single: allowed without support for several roots; many: with
	}{
		"the same":             {set(a, b), set(a, b), true, true, true},
		"in another order":     {set(a, b), set(b, a), true, true, true},
		"a root more":          {set(a), set(a, b), false, false, true},
		"a root less":          {set(a, b), set(b), false, false, true},
		"all roots swapped":    {set(a), set(b), false, false, false},
		"one of two swapped":   {set(a, b), set(a, c), false, false, false},
		"one kept, two others": {set(a), set(b, c), false, false, false},
	} {
		for multi, want := range map[bool]bool{false: tc.single, true: tc.many} {
			same, err := ca.MayReplace(tc.old, tc.next, multi)
			assert.Equal(t, want, err == nil, "%s, %v: %v", name, multi, err)
			assert.Equal(t, tc.same, same, name)
		}
	}
	_, err := ca.MayReplace(set(a), set(a, b), false)
	assert.ErrorContains(t, err, "support for several roots")
	_, err = ca.MayReplace(set(a), set(b), true)
	assert.ErrorContains(t, err, "first add the new roots beside the old ones")
}

// What an operator puts in the wrong file, or has let end, is named.
func TestPluggedInSlips(t *testing.T) {
	t.Parallel()
	root := newOffline(t)
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	below := func(ends time.Duration) map[string][]byte {
		cert, err := root.issuer.Issue(pki.CertificateOptions{
			PublicKey: key.Public(), CA: true, CommonName: "between", SANs: []pki.SAN{pki.IDSAN(td.ID())}, NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: time.Now().Add(ends),
		})
		require.NoError(t, err)
		issuer := must.Get(pki.NewIssuer([]*x509.Certificate{cert}, key))(t)
		files := (&offline{key, issuer}).files(t, min(ends, time.Hour), func(o *pki.CertificateOptions) { o.NotBefore = time.Now().Add(-2 * time.Hour) })
		files["cert-chain.pem"] = append(files["cert-chain.pem"], pki.MarshalCertificatesPEM(cert)...)
		files["root-cert.pem"] = pki.MarshalCertificatesPEM(root.cert())
		return files
	}
	load := func(files map[string][]byte) error {
		_, err := tryLoadCA(t.Context(), newFolder(files), nil)
		return err
	}
	require.NoError(t, load(below(time.Hour)))
	require.ErrorContains(t, load(below(-time.Minute)), "expired at "+time.Now().Add(-time.Minute).UTC().Format("2006-01-02T"))
	wrong := below(time.Hour)
	wrong["root-cert.pem"] = wrong["cert-chain.pem"]
	err := load(wrong)
	require.ErrorContains(t, err, "is among the roots, and ")
	require.ErrorContains(t, err, "has signed it: the root file takes the root, and the file of the chain what is below")
}
