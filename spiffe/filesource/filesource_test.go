package filesource_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/retry"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesource"
	"github.com/svidkit/svidkit/spiffe/source"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

var (
	_ source.Source = (*filesource.Source)(nil)

	_ = source.LastGoodConfig{Source: (*filesource.Source)(nil)}
)

// Each layout of files that other programs write is understood.
func TestLayouts(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ca, other := newCA(t), spiffetest.NewCA(t, "partner.test")
	svid := ca.Intermediate().SVID("/web")
	certs, key := must.Get2(svid.MarshalPEM())(t)
	ecKey := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	doc := must.Get(ca.Bundle().Marshal())(t)
	all := must.Get(must.Get(spiffe.NewBundleSet(ca.Bundle(), other.Bundle()))(t).Marshal())(t)
	files := map[string][]byte{
		"tls.crt": certs, "tls.key": key, "ca.crt": ca.Bundle().MarshalPEM(),
		"key-first.pem": slices.Concat(key, certs), "chain-first.pem": slices.Concat(certs, key),
		"partner.pem": slices.Concat(other.Bundle().MarshalPEM(), spiffetest.NewCA(t, "partner.test").Bundle().MarshalPEM()),
		"bundle.json": doc, "map.json": all, "jwks.json": fmt.Appendf(nil, `{"keys":[%s,%s]}`, jwk(t, ecKey, "a", `"use":"sig"`), jwk(t, ecKey, "b", `"alg":"ES256"`)),
	}
	type bundle = filesource.BundleFile
	for name, test := range map[string]struct {
		cert, key   string
		bundles     []bundle
		domains     int
		roots, keys map[spiffe.TrustDomain]int
	}{
		"cert-manager":        {"tls.crt", "tls.key", []bundle{{Path: "ca.crt"}}, 1, map[spiffe.TrustDomain]int{td: 1}, nil},
		"PodCertificate":      {"key-first.pem", "", []bundle{{Path: "ca.crt"}}, 1, map[spiffe.TrustDomain]int{td: 1}, nil},
		"chain first, twice":  {"chain-first.pem", "chain-first.pem", []bundle{{Path: "ca.crt", TrustDomain: td}}, 1, map[spiffe.TrustDomain]int{td: 1}, nil},
		"ClusterTrustBundle":  {"tls.crt", "tls.key", []bundle{{Path: "ca.crt"}, {Path: "partner.pem", TrustDomain: partner}}, 2, map[spiffe.TrustDomain]int{td: 1, partner: 2}, nil},
		"a bundle document":   {"tls.crt", "tls.key", []bundle{{Path: "bundle.json"}}, 1, map[spiffe.TrustDomain]int{td: 1}, nil},
		"a bundle map":        {"tls.crt", "tls.key", []bundle{{Path: "map.json", Map: true}}, 2, map[spiffe.TrustDomain]int{td: 1, partner: 1}, nil},
		"roots and a JWK Set": {"tls.crt", "tls.key", []bundle{{Path: "ca.crt"}, {Path: "jwks.json", JWKS: true}}, 1, map[spiffe.TrustDomain]int{td: 1}, map[spiffe.TrustDomain]int{td: 2}},
		"bundles only":        {"", "", []bundle{{Path: "partner.pem", TrustDomain: partner}}, 1, map[spiffe.TrustDomain]int{partner: 2}, nil},
		"keys only":           {"", "", []bundle{{Path: "jwks.json", JWKS: true, TrustDomain: partner}}, 1, nil, map[spiffe.TrustDomain]int{partner: 2}},
		"no bundles":          {"tls.crt", "tls.key", nil, 0, nil, nil},
		"twice the same":      {"tls.crt", "tls.key", []bundle{{Path: "ca.crt"}, {Path: "ca.crt", TrustDomain: td}}, 1, map[spiffe.TrustDomain]int{td: 1}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			for name, data := range files {
				write(t, filepath.Join(dir, name), data)
			}
			in := func(name string) string {
				if name == "" {
					return ""
				}
				return filepath.Join(dir, name)
			}
			cfg := filesource.Config{CertFile: in(test.cert), KeyFile: in(test.key)}
			for _, b := range test.bundles {
				b.Path = in(b.Path)
				cfg.Bundles = append(cfg.Bundles, b)
			}
			s := start(t, cfg)
			st := s.Status()
			assert.True(t, st.Ready)
			assert.NoError(t, st.Err)
			assert.Empty(t, st.Notes)
			assert.Equal(t, test.domains, s.Bundles().Len())
			for td, n := range test.roots {
				assert.Len(t, slices.Collect(must.Get(s.Bundle(td))(t).X509Authorities()), n)
			}
			for td, n := range test.keys {
				assert.Len(t, maps.Collect(must.Get(s.Bundle(td))(t).JWTAuthorities()), n)
			}
			_, err := s.Bundle(spiffe.MustParseTrustDomain("unknown.test"))
			require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
			require.NotErrorIs(t, err, spiffe.ErrNotReady)
			snap, err := s.Snapshot()
			if test.cert == "" {
				must.Fail(t, err, spiffe.ErrNotReady, "bundles only")
				return
			}
			require.NoError(t, err)
			assert.Same(t, s.Bundles(), snap.Bundles())
			assert.Equal(t, number(svid), serial(t, s))
			r := s.Report()
			require.NoError(t, r.NotReady)
			require.Len(t, r.Identities, 1)
			assert.Equal(t, svid.ID().String(), r.Identities[0].Name)
			assert.Equal(t, svid.NotAfter(), r.Identities[0].NotAfter)
		})
	}
}

// jwk returns a key of a JWK Set with a key ID and more members.
func jwk(t testing.TB, key *ecdsa.PrivateKey, id, more string) string {
	t.Helper()
	point := must.Get(key.PublicKey.Bytes())(t)
	b64 := base64.RawURLEncoding.EncodeToString
	if more != "" {
		more = "," + more
	}
	return fmt.Sprintf(`{"kty":"EC","crv":"P-256","x":%q,"y":%q,"kid":%q%s}`, b64(point[1:33]), b64(point[33:]), id, more)
}

func TestConfig(t *testing.T) {
	t.Parallel()
	type bundle = filesource.BundleFile
	id := spiffe.MustParseID("spiffe://example.org/web")
	for text, cfg := range map[string]filesource.Config{
		"neither a Folder nor a CertFile nor Bundles": {},
		"a KeyFile and no CertFile":                   {KeyFile: "k"},
		"has an ID, and no CertFile":                  {ID: id, Bundles: []bundle{{Path: "b", TrustDomain: td}}},
		"a CertFile, a KeyFile or Bundles beside it":  {Folder: "f", CertFile: "c"},
		"has a Folder, and":                           {Folder: "f", KeyFile: "c"},
		"a KeyFile or Bundles beside it":              {Folder: "f", Bundles: []bundle{{Path: "b"}}},
		"that of a trust domain and not":              {CertFile: "c", ID: td.ID()},
		"Bundles[1] has no Path":                      {CertFile: "c", Bundles: []bundle{{Path: "b"}, {}}},
		"is a Map and a JWKS":                         {CertFile: "c", Bundles: []bundle{{Path: "b", Map: true, JWKS: true}}},
		"is a Map, which names":                       {CertFile: "c", Bundles: []bundle{{Path: "b", Map: true, TrustDomain: td}}},
		"Bundles[0] has no TrustDomain":               {Bundles: []bundle{{Path: "b"}}},
		"Bundles[0] is the file with the pr":          {CertFile: "c", Bundles: []bundle{{Path: "c"}}},
	} {
		must.Fail(t, must.Err(filesource.New(cfg)), text, "filesource: new: ")
		require.ErrorContains(t, must.Err(filesource.Start(t.Context(), cfg)), text)
	}
}

const credential = "credential-bundle.private-key.x509.pem"

// folder returns what is in a credential folder.
func folder(t testing.TB, svid *spiffe.SVID, bundles ...*spiffe.Bundle) map[string][]byte {
	t.Helper()
	certs, key := must.Get2(svid.MarshalPEM())(t)
	files := map[string][]byte{credential: append(key, certs...)}
	for _, b := range bundles {
		files[b.TrustDomain().String()+".spiffe-trust-bundle.x509.pem"] = b.MarshalPEM()
	}
	return files
}

// A credential folder in a volume of Kubernetes: what is in it counts, whatever else is there, and what is lost for a while stays.
func TestFolder(t *testing.T) {
	t.Parallel()
	onlyUnix(t)
	ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "partner.test")
	v := &volume{dir: t.TempDir()}
	svid := ca.SVID("/web")
	files := folder(t, svid, ca.Bundle())
	for _, name := range []string{"README", "Bad.spiffe-trust-bundle.x509.pem", "x.spiffe-trust-bundle.pem"} {
		files[name] = []byte("not read")
	}
	v.swap(t, 0o644, files)
	s := start(t, filesource.Config{Folder: v.dir})
	awaitSVID(t, s, svid)
	require.Equal(t, 1, s.Bundles().Len())
	has := func(tds ...spiffe.TrustDomain) {
		t.Helper()
		require.Eventually(t, func() bool {
			for _, td := range tds {
				if _, err := s.Bundle(td); err != nil {
					return false
				}
			}
			return s.Bundles().Len() == len(tds)
		}, patience, 10*time.Millisecond)
	}
	v.swap(t, 0o644, folder(t, svid, ca.Bundle(), other.Bundle()))
	has(td, partner)

	// Another trust domain gets the bytes that one had.
	third := spiffe.MustParseTrustDomain("third.test")
	moved := folder(t, svid, ca.Bundle())
	moved["third.test.spiffe-trust-bundle.x509.pem"] = other.Bundle().MarshalPEM()
	require.NoError(t, os.Remove(filepath.Join(v.dir, "partner.test.spiffe-trust-bundle.x509.pem")))
	v.swap(t, 0o644, moved)
	has(td, third)

	// A bad bundle stays as it was, and holds up nothing else.
	next := ca.SVID("/web")
	bad := folder(t, next, ca.Bundle())
	bad["third.test.spiffe-trust-bundle.x509.pem"] = []byte("broken")
	v.swap(t, 0o644, bad)
	awaitErr(t, s, "third.test.spiffe-trust-bundle.x509.pem")
	require.Equal(t, number(next), serial(t, s))
	has(td, third)

	// Without the identity the directory is not whole: the volume may be away.
	v.swap(t, 0o644, map[string][]byte{})
	links := must.Get(filepath.Glob(filepath.Join(v.dir, "*.pem")))(t)
	for _, link := range links { // as the kubelet does
		require.NoError(t, os.Remove(link))
	}
	awaitErr(t, s, credential)
	time.Sleep(200 * time.Millisecond)
	require.Equal(t, number(next), serial(t, s))
	has(td, third)
	again := ca.SVID("/web")
	v.swap(t, 0o644, folder(t, again, ca.Bundle()))
	awaitSVID(t, s, again)
	has(td)
}

// Many large bundles do not fill the memory: beyond a bound the largest are left out, and all else is in force.
func TestLargeFolder(t *testing.T) {
	t.Parallel()
	ca, partners := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "partner.test")
	dir, svid := t.TempDir(), ca.SVID("/web")
	for name, data := range folder(t, svid, ca.Bundle(), partners.Bundle()) {
		write(t, filepath.Join(dir, name), data)
	}
	large := append(bytes.Repeat([]byte("# padding\n"), 90_000), partners.Bundle().MarshalPEM()...)
	name := func(i int) string { return filepath.Join(dir, fmt.Sprintf("a%d.test.spiffe-trust-bundle.x509.pem", i)) }
	write(t, name(0), large)
	for i := range 29 {
		require.NoError(t, os.Link(name(0), name(i+1)))
	}
	write(t, filepath.Join(dir, "huge.test.spiffe-trust-bundle.x509.pem"), append(large, large...))
	s := must.Get(filesource.New(filesource.Config{Folder: dir}))(t)
	go func() { _ = s.Run(t.Context()) }()
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	require.Eventually(t, func() bool { return s.Status().Err != nil }, patience, 10*time.Millisecond)
	require.Equal(t, number(svid), serial(t, s))
	must.Get(s.Bundle(partner))(t)
	assert.Equal(t, 2+9, s.Bundles().Len(), "9 of 900 kB in 8 MiB")
	text := s.Status().Err.Error()
	assert.Contains(t, text, "too many beside the other files")
	assert.Contains(t, text, "; and 2 more")
	assert.Less(t, len(text), 10_000)
	write(t, name(0), partners.Bundle().MarshalPEM())
	awaitErr(t, s, "huge.test.spiffe-trust-bundle.x509.pem has more than 1048576 bytes")
	require.Eventually(t, func() bool { return s.Bundles().Len() == 32 }, patience, 10*time.Millisecond)
}

// An identity without the bundle of its trust domain is refused, as it cannot be verified.
func TestFolderWithoutBundle(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	dir := t.TempDir()
	for name, data := range folder(t, ca.SVID("/web"), spiffetest.NewCA(t, "partner.test").Bundle()) {
		write(t, filepath.Join(dir, name), data)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := filesource.Start(ctx, filesource.Config{Folder: dir})
	must.Fail(t, err, spiffe.ErrNotReady, "example.org.spiffe-trust-bundle.x509.pem")
}

// Without a configuration the environment says where the directory is.
func TestFolderByVariable(t *testing.T) { // not parallel, as it sets a variable
	ca := spiffetest.NewCA(t, "example.org")
	dir := t.TempDir()
	for name, data := range folder(t, ca.SVID("/web"), ca.Bundle()) {
		write(t, filepath.Join(dir, name), data)
	}
	t.Setenv("SPIFFE_CREDENTIAL_FOLDER", dir)
	s := start(t, filesource.Config{ID: spiffe.MustParseID("spiffe://example.org/web")})
	must.Get(s.SVID())(t)
	_, err := filesource.New(filesource.Config{KeyFile: "k"})
	require.ErrorContains(t, err, "a KeyFile and no CertFile", "the variable is for a Config that names no files")
}

func TestLife(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ca, dir := newCA(t), t.TempDir()
	s := must.Get(filesource.New(layout(dir)))(t)
	soon, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	must.Fail(t, s.Ready(soon), spiffe.ErrNotReady, context.DeadlineExceeded, "neither called Start nor Run")
	require.ErrorContains(t, must.Err(s.SVID()), "neither called Start nor Run")
	must.Fail(t, must.Err(s.Bundle(td)), spiffe.ErrNotReady, spiffe.ErrUnknownTrustDomain)

	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	awaitErr(t, s, "tls.crt")
	soon, cancel = context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	err := s.Ready(soon)
	require.ErrorIs(t, err, fs.ErrNotExist, "the reason, and not only that it has taken too long")
	_, advice := retry.After(err)
	assert.Equal(t, retry.Again, advice)
	require.ErrorContains(t, s.Run(t.Context()), "alternatives")

	putAll(t, dir, ca.SVID("/web"), ca.Bundle())
	require.NoError(t, s.Ready(t.Context()))
	stop()
	require.NoError(t, <-ended, "a clean stop")
	must.Get(s.SVID())(t, "what was read stays")
	require.NoError(t, s.Close())
	require.NoError(t, s.Close())
	require.ErrorContains(t, s.Run(t.Context()), "closed")

	// A start that fails says why, and leaves nothing running.
	soon, cancel = context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	must.Fail(t, must.Err(filesource.Start(soon, layout(t.TempDir()))), fs.ErrNotExist, context.DeadlineExceeded)
}

// What is not good replaces nothing, the reason is told, and the source recovers by itself. The files really change,
// and the system really says so.
func TestOldBeforeNew(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	onlyUnix(t)
	ca := newCA(t)
	for name, test := range map[string]struct {
		cfg    func(*filesource.Config)
		damage func(t *testing.T, dir string)
		want   string
		is     error
	}{
		"half a pair: the certificate": {damage: func(t *testing.T, dir string) {
			certs, _, _ := ca.SVID("/web").MarshalPEM()
			write(t, filepath.Join(dir, "tls.crt"), certs)
		}, want: "does not belong"},
		"half a pair: the key": {damage: func(t *testing.T, dir string) {
			_, key, _ := ca.SVID("/web").MarshalPEM()
			write(t, filepath.Join(dir, "tls.key"), key)
		}, want: "does not belong"},
		"no certificate": {damage: func(t *testing.T, dir string) { require.NoError(t, os.Remove(filepath.Join(dir, "tls.crt"))) }, want: "tls.crt", is: fs.ErrNotExist},
		"no key":         {damage: func(t *testing.T, dir string) { require.NoError(t, os.Remove(filepath.Join(dir, "tls.key"))) }, want: "tls.key", is: fs.ErrNotExist},
		"no roots":       {damage: func(t *testing.T, dir string) { require.NoError(t, os.Remove(filepath.Join(dir, "ca.crt"))) }, want: "ca.crt", is: fs.ErrNotExist},
		"empty roots":    {damage: func(t *testing.T, dir string) { write(t, filepath.Join(dir, "ca.crt"), nil) }, want: "no certificate found"},
		"a directory": {damage: func(t *testing.T, dir string) {
			require.NoError(t, os.Remove(filepath.Join(dir, "tls.key")))
			require.NoError(t, os.Mkdir(filepath.Join(dir, "tls.key"), 0o700))
		}, want: "not a regular file"},
		"too large": {damage: func(t *testing.T, dir string) { write(t, filepath.Join(dir, "tls.crt"), make([]byte, 2<<20)) }, want: "has more than 1048576 bytes"},
		"another trust domain": {damage: func(t *testing.T, dir string) {
			other := spiffetest.NewCA(t, "evil.test")
			putAll(t, dir, other.SVID("/web"), other.Bundle())
		}, want: `the identity in force is of the trust domain "example.org"`},
		"another ID": {cfg: func(c *filesource.Config) { c.ID = spiffe.MustParseID("spiffe://example.org/web") }, damage: func(t *testing.T, dir string) {
			putSVID(t, dir, ca.SVID("/db"))
		}, want: `Config.ID is "spiffe://example.org/web"`},
		"expired":       {damage: func(t *testing.T, dir string) { putBroken(t, dir, ca, "Expired") }, want: "has expired at"},
		"not yet valid": {damage: func(t *testing.T, dir string) { putBroken(t, dir, ca, "NotYetValid") }, want: "is valid from"},
		"one role only": {damage: func(t *testing.T, dir string) {
			putEdited(t, dir, ca, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} })
		}, want: "permit less than those of the certificate in force"},
		"no role": {damage: func(t *testing.T, dir string) {
			putEdited(t, dir, ca, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning} })
		}, want: "neither a server nor a client"},
		"another CA": {damage: func(t *testing.T, dir string) { putSVID(t, dir, newCA(t).SVID("/web")) }, want: "unknown authority"},
		"a key for all": {damage: func(t *testing.T, dir string) {
			putSVID(t, dir, ca.SVID("/web"))
			require.NoError(t, os.Chmod(filepath.Join(dir, "tls.key"), 0o644))
		}, want: "chmod o=", is: private.ErrUnsafe},
		"roots that all can write": {damage: func(t *testing.T, dir string) {
			require.NoError(t, os.Chmod(filepath.Join(dir, "ca.crt"), 0o666))
		}, want: "chmod ", is: private.ErrUnsafe},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			first := ca.SVID("/web")
			putAll(t, dir, first, ca.Bundle())
			var log diary
			cfg := layout(dir)
			cfg.Logger = log.logger()
			if test.cfg != nil {
				test.cfg(&cfg)
			}
			s := start(t, cfg)
			snap := must.Get(s.Snapshot())(t)

			test.damage(t, dir)
			err := awaitErr(t, s, test.want)
			if test.is != nil {
				require.ErrorIs(t, err, test.is)
			}
			assert.NotContains(t, err.Error(), "PRIVATE KEY-----")
			assert.Same(t, snap, must.Get(s.Snapshot())(t), "the last good stays")
			assert.True(t, s.Status().Ready)
			require.Eventually(t, func() bool { return len(log.lines(t, "files refused, the ones before stay in use")) > 0 }, patience, 10*time.Millisecond)

			// In order again, with a new identity.
			for _, name := range []string{"tls.crt", "tls.key", "ca.crt"} {
				require.NoError(t, os.RemoveAll(filepath.Join(dir, name)))
			}
			next := ca.SVID("/web")
			putAll(t, dir, next, ca.Bundle())
			awaitSVID(t, s, next)
		})
	}
}

func putBroken(t *testing.T, dir string, ca *spiffetest.CA, fault string) {
	t.Helper()
	chain, key := ca.Broken(fault)
	put(t, dir, chain, key)
}

func put(t *testing.T, dir string, chain []*x509.Certificate, key crypto.Signer) {
	t.Helper()
	certs, keyPEM := pemOf(t, chain, key)
	write(t, filepath.Join(dir, "tls.crt"), certs)
	write(t, filepath.Join(dir, "tls.key"), keyPEM)
}

func putEdited(t *testing.T, dir string, ca *spiffetest.CA, edit func(*x509.Certificate)) {
	t.Helper()
	chain, key := ca.Certificate("/web", edit)
	put(t, dir, chain, key)
}

// What comes back is taken back, although it was taken before and only a part was refused meanwhile.
func TestPartsGoOn(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ca, other := newCA(t), spiffetest.NewCA(t, "partner.test")
	dir := t.TempDir()
	svid := ca.SVID("/web")
	putAll(t, dir, svid, ca.Bundle())
	federated := filepath.Join(dir, "partner.pem")
	write(t, federated, other.Bundle().MarshalPEM())
	cfg := layout(dir)
	cfg.Bundles = append(cfg.Bundles, filesource.BundleFile{Path: federated, TrustDomain: partner})
	s := start(t, cfg)
	own := must.Get(s.Bundle(td))(t)

	// The partner's file is damaged: the identity is renewed all the same.
	write(t, federated, []byte("garbage"))
	awaitErr(t, s, "partner.pem")
	second := ca.SVID("/web")
	putSVID(t, dir, second)
	require.Eventually(t, func() bool { return serial(t, s) == number(second) }, patience, 10*time.Millisecond)
	assert.ErrorContains(t, s.Status().Err, "partner.pem")
	b := must.Get(s.Bundle(partner))(t)
	assert.True(t, sameRoots(b, other.Bundle()))

	// The identity is damaged: the partner's bundle is renewed all the same.
	write(t, filepath.Join(dir, "tls.key"), []byte("garbage"))
	before := other.Bundle()
	other.Rotate()
	write(t, federated, other.Bundle().MarshalPEM())
	require.Eventually(t, func() bool {
		b, err := s.Bundle(partner)
		return err == nil && sameRoots(b, other.Bundle())
	}, patience, 10*time.Millisecond)
	assert.ErrorContains(t, s.Status().Err, "tls.key")
	assert.Equal(t, number(second), serial(t, s))
	assert.Same(t, own, must.Get(s.Bundle(td))(t), "what has not changed is the same value")

	// All is as it was.
	write(t, federated, before.MarshalPEM())
	putSVID(t, dir, svid)
	awaitSVID(t, s, svid)
	b = must.Get(s.Bundle(partner))(t)
	assert.True(t, sameRoots(b, before), "not what came between")
}

func sameRoots(a, b *spiffe.Bundle) bool { return bytes.Equal(a.MarshalPEM(), b.MarshalPEM()) }

// A new root and a leaf below it may come together or one after the other.
func TestRootRotation(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ca, dir := newCA(t), t.TempDir()
	first := ca.SVID("/web")
	putAll(t, dir, first, ca.Bundle())
	s := start(t, layout(dir))

	ca.Rotate()
	second := ca.SVID("/web")
	putSVID(t, dir, second) // before the roots
	awaitErr(t, s, "unknown authority")
	assert.Equal(t, number(first), serial(t, s))
	write(t, filepath.Join(dir, "ca.crt"), ca.Bundle().MarshalPEM())
	awaitSVID(t, s, second)

	// A root that has left is not trusted, even if the identity is below it.
	ca.Rotate()
	ca.DropOldRoots()
	write(t, filepath.Join(dir, "ca.crt"), ca.Bundle().MarshalPEM())
	require.Eventually(t, func() bool { b, err := s.Bundle(td); return err == nil && sameRoots(b, ca.Bundle()) }, patience, time.Millisecond)
	assert.Equal(t, number(second), serial(t, s), "there is no other")
	st := s.Status()
	require.Len(t, st.Notes, 1)
	require.ErrorContains(t, st.Notes[0], "peers will refuse")
	ve, ok := errors.AsType[*spiffe.VerifyError](st.Notes[0])
	require.True(t, ok)
	assert.Equal(t, "chain", ve.Stage)
	third := ca.SVID("/web")
	putSVID(t, dir, third)
	awaitSVID(t, s, third)
	assert.Empty(t, s.Status().Notes)
}

// An older bundle document does not come back.
func TestSequence(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ca, dir := newCA(t), t.TempDir()
	path := filepath.Join(dir, "bundle.json")
	put := func(n uint64, roots ...*x509.Certificate) *spiffe.Bundle {
		b := must.Get(spiffe.NewBundle(partner, spiffe.BundleContents{X509Authorities: roots, Sequence: &n}))(t)
		write(t, path, must.Get(b.Marshal())(t))
		return b
	}
	put(7, ca.Root())
	cfg := filesource.Config{Bundles: []filesource.BundleFile{{Path: path, TrustDomain: partner}}}
	s := start(t, cfg)
	put(6, ca.Root(), newCA(t).Root())
	awaitErr(t, s, "has the sequence number 6, and the one in force has 7")
	b := must.Get(s.Bundle(partner))(t)
	n, _ := b.Sequence()
	assert.EqualValues(t, 7, n)
	// No authorities are an answer: all is revoked.
	put(8)
	require.Eventually(t, func() bool { b, _ := s.Bundle(partner); n, _ := b.Sequence(); return n == 8 }, patience, 10*time.Millisecond)
	b = must.Get(s.Bundle(partner))(t)
	assert.Empty(t, slices.Collect(b.X509Authorities()))
	// After a restart the operator's word counts.
	put(6, ca.Root())
	awaitErr(t, s, "restart")
	b = must.Get(start(t, cfg).Bundle(partner))(t)
	n, _ = b.Sequence()
	assert.EqualValues(t, 6, n)
}

// At the start there is no last good, and nothing is handed out that cannot be verified.
func TestNotReady(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ca, other := newCA(t), spiffetest.NewCA(t, "other.test")
	for name, test := range map[string]struct {
		put  func(t *testing.T, dir string)
		cfg  func(*filesource.Config)
		want string
	}{
		"expired":              {func(t *testing.T, dir string) { putBroken(t, dir, ca, "Expired") }, nil, "has expired"},
		"another CA":           {func(t *testing.T, dir string) { putSVID(t, dir, newCA(t).SVID("/web")) }, nil, "unknown authority"},
		"roots of others only": {func(t *testing.T, dir string) { putSVID(t, dir, ca.SVID("/web")) }, func(c *filesource.Config) { c.Bundles[0].TrustDomain = other.TrustDomain() }, "set Config.ID"},
		"no roots yet":         {func(t *testing.T, dir string) { _ = os.Remove(filepath.Join(dir, "ca.crt")) }, func(c *filesource.Config) { c.ID = spiffe.MustParseID("spiffe://example.org/web") }, "cannot be verified without"},
		"no certificate":       {func(t *testing.T, dir string) { _ = os.Remove(filepath.Join(dir, "tls.crt")) }, nil, "ca.crt waits for the certificate"},
		"a partner is missing": {func(t *testing.T, dir string) {}, func(c *filesource.Config) {
			c.Bundles = append(c.Bundles, filesource.BundleFile{Path: "/none", TrustDomain: partner})
		}, "/none"},
		"roots without a CA":    {func(t *testing.T, dir string) { write(t, filepath.Join(dir, "ca.crt"), []byte("{}")) }, nil, "ca.crt"},
		"an empty bundle":       {func(t *testing.T, dir string) { write(t, filepath.Join(dir, "ca.crt"), []byte(`{"keys":[]}`)) }, nil, "no X.509 authority"},
		"a map without the own": {func(t *testing.T, dir string) { write(t, filepath.Join(dir, "ca.crt"), []byte(`{"trust_domains":{}}`)) }, func(c *filesource.Config) { c.Bundles[0].Map = true }, "set Config.ID"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			putAll(t, dir, ca.SVID("/web"), ca.Bundle())
			test.put(t, dir)
			cfg := layout(dir)
			if test.cfg != nil {
				test.cfg(&cfg)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 250*time.Millisecond)
			defer cancel()
			must.Fail(t, must.Err(filesource.Start(ctx, cfg)), spiffe.ErrNotReady, test.want)
		})
	}
	// With an ID and no file that could be for its trust domain, the path is not looked for.
	dir := t.TempDir()
	putAll(t, dir, ca.SVID("/web"), other.Bundle())
	cfg := layout(dir)
	cfg.ID, cfg.Bundles[0].TrustDomain = spiffe.MustParseID("spiffe://example.org/web"), other.TrustDomain()
	start(t, cfg)
}

// Volumes of Kubernetes, with the modes that they have.
func TestModes(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	onlyUnix(t)
	ca := newCA(t)
	for name, mode := range map[string]os.FileMode{"a Secret": 0o644, "with fsGroup": 0o640, "defaultMode": 0o400, "a Secret, 444": 0o444} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := &volume{dir: t.TempDir()}
			require.NoError(t, os.Chmod(v.dir, 0o777|os.ModeSticky))
			v.swap(t, mode, secret(t, ca.SVID("/web"), ca.Bundle()))
			s := start(t, layout(v.dir))
			next := ca.SVID("/web")
			v.swap(t, mode, secret(t, next, ca.Bundle()))
			awaitSVID(t, s, next)
		})
	}
	t.Run("an emptyDir", func(t *testing.T) {
		t.Parallel()
		dir := t.TempDir()
		require.NoError(t, os.Chmod(dir, 0o777))
		putAll(t, dir, ca.SVID("/web"), ca.Bundle())
		var log diary
		cfg := layout(dir)
		cfg.Logger = log.logger()
		s := start(t, cfg)
		next := ca.SVID("/web")
		putSVID(t, dir, next)
		awaitSVID(t, s, next)
		assert.Len(t, log.lines(t, "filesource: other users can replace the files"), 1, "once")
	})
	t.Run("of a helper", func(t *testing.T) { // which runs as another user, in a group of this process
		t.Parallel()
		if os.Geteuid() != 0 {
			t.Skip("gives files to another user, which takes root")
		}
		const helper = 54321
		dir := t.TempDir()
		next := func(mode os.FileMode, owner int) *spiffe.SVID {
			for _, name := range []string{"tls.crt", "tls.key", "ca.crt"} {
				require.NoError(t, os.Chown(filepath.Join(dir, name), owner, os.Getegid()))
				require.NoError(t, os.Chmod(filepath.Join(dir, name), mode))
			}
			svid := ca.SVID("/web")
			putAll(t, dir, svid, ca.Bundle())
			return svid
		}
		putAll(t, dir, ca.SVID("/web"), ca.Bundle())
		next(0o640, helper)
		require.NoError(t, os.Chown(dir, helper, -1))
		require.NoError(t, os.Chmod(dir, 0o750))
		err := refused(t, layout(dir))
		must.Fail(t, err, private.ErrUnsafe, "or see Config.Owners")

		cfg := layout(dir)
		cfg.Owners = []int{helper}
		s := start(t, cfg)
		cfg.Owners[0] = 0 // it was copied
		awaitSVID(t, s, next(0o640, helper))
		before := serial(t, s)
		next(0o644, helper)
		awaitErr(t, s, "chmod o=")
		next(0o660, helper+1)
		awaitErr(t, s, "belongs to user 54322")
		require.Equal(t, before, serial(t, s))
		awaitSVID(t, s, next(0o600, helper))
	})
	t.Run("a directory of bundles", func(t *testing.T) { // whose names say of which trust domain they are
		t.Parallel()
		dir, partnerCA := t.TempDir(), spiffetest.NewCA(t, "partner.test")
		for name, data := range folder(t, ca.SVID("/web"), ca.Bundle(), partnerCA.Bundle()) {
			write(t, filepath.Join(dir, name), data)
		}
		require.NoError(t, os.Chmod(dir, 0o777))
		named := func(tds ...spiffe.TrustDomain) (cfg filesource.Config) {
			for _, td := range tds {
				cfg.Bundles = append(cfg.Bundles, filesource.BundleFile{Path: filepath.Join(dir, td.String()+".spiffe-trust-bundle.x509.pem"), TrustDomain: td})
			}
			return cfg
		}
		for _, cfg := range []filesource.Config{{Folder: dir}, named(td, partner)} {
			err := refused(t, cfg)
			must.Fail(t, err, private.ErrUnsafe, "chmod o-w")
			require.ErrorContains(t, err, "and Config.AllowWritable")
			var log diary
			cfg.AllowWritable, cfg.Logger = true, log.logger()
			s := start(t, cfg)
			require.Equal(t, 2, s.Bundles().Len())
			assert.Len(t, log.lines(t, "filesource: other users can replace the files"), 1, "once")
		}
		start(t, named(partner)) // with a warning
		require.NoError(t, os.Chmod(dir, 0o777|os.ModeSticky))
		start(t, filesource.Config{Folder: dir})
	})
}

func TestUpdatesAndMetrics(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ca, dir := newCA(t), t.TempDir()
	first, second := ca.SVID("/web"), ca.SVID("/web")
	putAll(t, dir, first, ca.Bundle())
	var log diary
	cfg := layout(dir)
	cfg.Logger = log.logger()
	s := start(t, cfg)
	var seen []string
	for snap := range renew.Follow(t.Context(), s.Changed, func() *spiffe.Snapshot { snap, _ := s.Snapshot(); return snap }) {
		seen = append(seen, serial(t, snap))
		if len(seen) == 2 {
			break
		}
		putSVID(t, dir, second)
	}
	assert.Equal(t, []string{number(first), number(second)}, seen)
	var b bytes.Buffer
	require.NoError(t, s.Report().Metrics(&b))
	for _, line := range []string{
		"svidkit_filesource_ready 1\n", "svidkit_filesource_in_order 1\n", "svidkit_filesource_trust_domains 1\n",
		"# TYPE svidkit_filesource_svid_end_timestamp_seconds gauge\n",
		fmt.Sprintf("svidkit_filesource_svid_end_timestamp_seconds %d\n", second.NotAfter().Unix()),
	} {
		assert.Contains(t, b.String(), line)
	}
	st := s.Status()
	assert.WithinDuration(t, time.Now(), st.LastUpdate, time.Minute)
	assert.WithinDuration(t, time.Now(), st.Checked, time.Minute)
	var updates []map[string]any
	require.Eventually(t, func() bool { updates = log.lines(t, "filesource: update"); return len(updates) == 2 }, patience, time.Millisecond)
	assert.Equal(t, "spiffe://example.org/web", updates[1]["id"])
	// Nothing but what is in the files makes an update.
	now := time.Now().Add(time.Minute)
	require.NoError(t, os.Chtimes(filepath.Join(dir, "tls.crt"), now, now))
	time.Sleep(300 * time.Millisecond)
	assert.Equal(t, st.LastUpdate, s.Status().LastUpdate)
}

// Suites of the library.
func TestSources(t *testing.T) {
	t.Parallel()
	spiffetest.TestSVIDSource(t, func(t testing.TB) spiffe.SVIDSource {
		ca, dir := newCA(t), t.TempDir()
		putAll(t, dir, ca.SVID("/web"), ca.Bundle())
		return start(t, layout(dir))
	})
	spiffetest.TestBundleSource(t, func(t testing.TB) (spiffe.BundleSource, []spiffe.TrustDomain) {
		ca, dir := newCA(t), t.TempDir()
		putAll(t, dir, ca.SVID("/web"), ca.Bundle())
		return start(t, layout(dir)), []spiffe.TrustDomain{td}
	})
}

// A file in a directory to which the program itself writes is not read, whether it is named there or a link leads there.
func TestRefuse(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-7.4-1", "IST-7.4-2")
	onlyUnix(t)
	ca := newCA(t)
	out, in := t.TempDir(), t.TempDir()
	putAll(t, out, ca.SVID("/web"), ca.Bundle())
	for _, name := range []string{"tls.crt", "tls.key", "ca.crt"} {
		require.NoError(t, os.Symlink(filepath.Join(out, name), filepath.Join(in, name)))
	}
	for _, dir := range []string{out, in, filepath.Join(in, "..", filepath.Base(out))} {
		cfg := layout(dir)
		cfg.Refuse = []string{out + "/"}
		s := must.Get(filesource.New(cfg))(t)
		cfg.Refuse[0] = "" // it was copied
		go func() { _ = s.Run(t.Context()) }()
		awaitErr(t, s, "to which this program writes")
		require.ErrorIs(t, must.Err(s.SVID()), spiffe.ErrNotReady)
		require.NoError(t, s.Close())
	}
	cfg := layout(in)
	cfg.Refuse = []string{in + "2", t.TempDir()}
	start(t, cfg)
}
