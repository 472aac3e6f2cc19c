package sdssource_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

const patience = time.Minute // for a slow machine

func onlyUnix(t testing.TB) {
	t.Helper()
	if runtime.GOOS == "windows" {
		t.Skip("links and modes are others there")
	}
}

func start(t testing.TB, cfg sdssource.FilesConfig) *sdssource.Files {
	t.Helper()
	f := must.Get(sdssource.NewFiles(cfg))(t)
	go func() { _ = f.Run(context.Background()) }()
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f
}

func write(t testing.TB, data []byte, parts ...string) string {
	t.Helper()
	path := filepath.Join(parts...)
	require.NoError(t, os.WriteFile(path, data, 0o600))
	return path
}

// put writes the files of svid to dir, and returns their name.
func put(t testing.TB, dir string, svid *spiffe.SVID) (name string) {
	t.Helper()
	certs, key, err := svid.MarshalPEM()
	require.NoError(t, err)
	return "file-cert:" + write(t, certs, dir, "tls.crt") + "~" + write(t, key, dir, "tls.key")
}

// valid is for a certificate that is valid from one time to another.
func valid(from, to time.Duration) func(*x509.Certificate) {
	return func(c *x509.Certificate) { c.NotBefore, c.NotAfter = time.Now().Add(from), time.Now().Add(to) }
}

func get(t testing.TB, f *sdssource.Files, name string) *pki.Secret {
	t.Helper()
	s := must.Get(f.GenerateSecret(t.Context(), name))(t)
	require.Equal(t, name, s.Name())
	return s
}

// await waits until f hands out svid under the name.
func await(t testing.TB, f *sdssource.Files, name string, svid *spiffe.SVID) {
	t.Helper()
	want := certsOf(t, svid)
	require.Eventually(t, func() bool {
		s, err := f.GenerateSecret(t.Context(), name)
		return err == nil && chainOf(t, s) == want
	}, patience, time.Millisecond)
}

// awaitErr waits until the status of the name has an error with the text.
func awaitErr(t testing.TB, f *sdssource.Files, name, text string) {
	t.Helper()
	require.Eventually(t, func() bool {
		st := statusOf(f, name)
		return st.Err != nil && strings.Contains(st.Err.Error(), text)
	}, patience, time.Millisecond, "waiting for %q", text)
}

// statusOf returns what f reports of a name.
func statusOf(f *sdssource.Files, name string) report.Upstream {
	all := f.Report().Upstreams
	if i := slices.IndexFunc(all, func(u report.Upstream) bool { return u.Name == name }); i >= 0 {
		return all[i]
	}
	return report.Upstream{}
}

// swap makes a new version of a volume of Kubernetes, as the kubelet does, and deletes the one before.
func swap(t testing.TB, dir string, n int, files map[string][]byte) {
	t.Helper()
	name := fmt.Sprintf("..2026_01_02_15_04_05.%09d", n)
	require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o755))
	for file, data := range files {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name, file), data, 0o644))
		link := filepath.Join(dir, file)
		if _, err := os.Lstat(link); err != nil {
			require.NoError(t, os.Symlink(filepath.Join("..data", file), link))
		}
	}
	before, _ := os.Readlink(filepath.Join(dir, "..data"))
	require.NoError(t, os.Symlink(name, filepath.Join(dir, "..data_tmp")))
	require.NoError(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	if before != "" {
		require.NoError(t, os.RemoveAll(filepath.Join(dir, before)))
	}
}

func volume(t testing.TB, svid *spiffe.SVID, bundle *spiffe.Bundle) map[string][]byte {
	t.Helper()
	certs, key, err := svid.MarshalPEM()
	require.NoError(t, err)
	return map[string][]byte{"tls.crt": certs, "tls.key": key, "ca.crt": bundle.MarshalPEM()}
}

// TestFiles follows a pair and roots over each fault that their files can have: the last good one stays, the reason is
// in the status and in the log, and subscribers hear of what changes and of nothing else.
func TestFiles(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-7.2-3", "IST-7.2-4", "IST-7.4-4", "IST-7.10-5")
	onlyUnix(t)
	ca := spiffetest.NewCA(t, td.String())
	dir := t.TempDir()
	var log logtest.Buffer
	f := start(t, sdssource.FilesConfig{Allow: []string{dir}, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	var news told
	t.Cleanup(f.Subscribe(news.add))
	one := ca.SVID("/web")
	pair := put(t, dir, one)
	certFile, keyFile := filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	roots := "file-root:" + write(t, ca.Bundle().MarshalPEM(), dir, "ca.crt")

	assert.Equal(t, certsOf(t, one), chainOf(t, get(t, f, pair)))
	pem1, ok := get(t, f, roots).Roots()
	require.True(t, ok)
	assert.Equal(t, string(ca.Bundle().MarshalPEM()), string(pem1))
	assert.Equal(t, one.NotAfter(), get(t, f, pair).NotAfter())
	news.await(t, pair, roots)

	good := get(t, f, pair)
	stays := func(reason string) {
		t.Helper()
		awaitErr(t, f, pair, reason)
		assert.Same(t, good, get(t, f, pair), reason)
		assert.True(t, statusOf(f, pair).OK)
		assert.Empty(t, news.take(), reason)
	}
	two := ca.SVID("/web")
	certs, key, err := two.MarshalPEM()
	require.NoError(t, err)
	write(t, certs, certFile)
	stays("does not belong")
	write(t, certs[:len(certs)/2], certFile)
	stays("tls.crt and")
	require.NoError(t, os.Remove(certFile))
	stays("does not exist")
	write(t, certs, certFile)
	require.NoError(t, os.Remove(keyFile))
	stays("tls.key: file does not exist")
	write(t, nil, keyFile)
	stays("private key")
	write(t, key, keyFile)
	await(t, f, pair, two)
	news.await(t, pair)
	assert.GreaterOrEqual(t, strings.Count(log.String(), "the last good ones stay in use"), 4)

	// A key that others can read is not used, and is once they cannot.
	good = get(t, f, pair)
	require.NoError(t, os.Chmod(keyFile, 0o644))
	stays("chmod")
	write(t, append([]byte("# a comment\n"), key...), keyFile)
	stays("chmod")
	require.NoError(t, os.Chmod(keyFile, 0o600))
	news.await(t, pair)

	// A new key with its certificate, key first: only the key changes at first.
	good = get(t, f, pair)
	three := ca.SVID("/web")
	certs, key, err = three.MarshalPEM()
	require.NoError(t, err)
	write(t, key, keyFile)
	stays("does not belong")
	write(t, certs, certFile)
	await(t, f, pair, three)
	news.await(t, pair)

	for reason, from := range map[string]time.Duration{"has expired": -2 * time.Hour, "is valid from": time.Hour} {
		good = get(t, f, pair)
		put(t, dir, ca.SVID("/web", valid(from, from+time.Hour)))
		stays(reason)
		put(t, dir, three)
		require.Eventually(t, func() bool { return statusOf(f, pair).Err == nil }, patience, time.Millisecond)
	}

	// Roots: what is not good replaces nothing, and what is half good is used in part.
	before := get(t, f, roots)
	all := ca.Bundle().MarshalPEM()
	for text, data := range map[string][]byte{"damaged": all[:len(all)-60], "no certificate": {}, "not a CA": certs} {
		write(t, data, dir, "ca.crt")
		awaitErr(t, f, roots, text)
		assert.Same(t, before, get(t, f, roots))
	}
	assert.Empty(t, news.take())
	ca.Rotate()
	write(t, append(certs, ca.Bundle().MarshalPEM()...), dir, "ca.crt")
	require.Eventually(t, func() bool { return get(t, f, roots) != before }, patience, time.Millisecond)
	pem1, _ = get(t, f, roots).Roots()
	assert.Equal(t, string(ca.Bundle().MarshalPEM()), string(pem1))
	require.Len(t, f.Report().Problems, 1)
	assert.ErrorContains(t, f.Report().Problems[0], "1 of 3 certificates are left out")
	news.await(t, roots)
	var metrics bytes.Buffer
	require.NoError(t, f.Report().Metrics(&metrics))
	assert.Contains(t, metrics.String(), "svidkit_sdssource_files_names 2\n")
	assert.Contains(t, metrics.String(), "svidkit_sdssource_files_refused 0\n")
}

// Files that are not there yet are followed, and told of when they appear, roots before pairs.
func TestFilesAppear(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-7.10-3", "IST-7.10-6")
	onlyUnix(t)
	ca := spiffetest.NewCA(t, td.String())
	dir := t.TempDir()
	f := start(t, sdssource.FilesConfig{Allow: []string{dir}})
	var news told
	t.Cleanup(f.Subscribe(news.add))
	join := func(name string) string { return filepath.Join(dir, name) }
	pair, roots := "file-cert:"+join("tls.crt")+"~"+join("tls.key"), "file-root:"+join("ca.crt")
	for _, name := range []string{pair, roots} {
		_, err := f.GenerateSecret(t.Context(), name)
		require.ErrorContains(t, err, "does not exist", name)
		require.NotErrorIs(t, err, fs.ErrNotExist, "it may be asked for again: %s", name)
	}
	for n := range 3 {
		svid := ca.SVID("/web")
		swap(t, dir, n, volume(t, svid, ca.Bundle()))
		await(t, f, pair, svid)
		ca.Rotate()
	}
	news.await(t, roots, pair, roots, pair, roots, pair)

	// One file with both.
	svid := ca.SVID("/web")
	certs, key, err := svid.MarshalPEM()
	require.NoError(t, err)
	path := write(t, append(key, certs...), dir, "bundle.pem")
	await(t, f, "file-cert:"+path+"~"+path, svid)
}

// A client can name files that the operator has listed, and no others, by whatever path or link.
func TestFilesOfClients(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	onlyUnix(t)
	ca := spiffetest.NewCA(t, td.String())
	top := t.TempDir()
	dir, out, secret := filepath.Join(top, "certs"), filepath.Join(top, "out"), filepath.Join(top, "secret")
	for _, d := range []string{dir, out, secret, filepath.Join(dir, "more"), filepath.Join(top, "certs2")} {
		require.NoError(t, os.Mkdir(d, 0o700))
	}
	roots := ca.Bundle().MarshalPEM()
	for _, d := range []string{dir, out, secret, filepath.Join(dir, "more"), filepath.Join(top, "certs2")} {
		write(t, roots, d, "ca.crt")
	}
	require.NoError(t, os.Symlink(filepath.Join(secret, "ca.crt"), filepath.Join(dir, "leak.crt")))
	require.NoError(t, os.Symlink(secret, filepath.Join(dir, "leak")))
	require.NoError(t, os.Symlink(filepath.Join("more", "ca.crt"), filepath.Join(dir, "inside.crt")))
	require.NoError(t, os.Symlink(filepath.Join(out, "ca.crt"), filepath.Join(dir, "own.crt")))
	require.NoError(t, os.Symlink(filepath.Join(dir, "ca.crt"), filepath.Join(out, "back.crt")))
	one := filepath.Join(top, "one.crt")
	require.NoError(t, os.Symlink(write(t, roots, secret, "one.crt"), one))
	alias := filepath.Join(top, "alias")
	require.NoError(t, os.Symlink(out, alias))
	f := start(t, sdssource.FilesConfig{Allow: []string{dir + "/", one, out}, Refuse: []string{alias}})

	for _, path := range []string{filepath.Join(dir, "ca.crt"), filepath.Join(dir, "more", "ca.crt"), filepath.Join(dir, "inside.crt"), one} {
		assert.NoError(t, must.Err(f.GenerateSecret(t.Context(), "file-root:"+path)), path)
	}
	for path, text := range map[string]string{
		filepath.Join(dir, "leak.crt"): "is a link to a file that is not below", filepath.Join(dir, "leak", "ca.crt"): "is a link to a file that is not below",
		filepath.Join(dir, "own.crt"): "to which this program writes", filepath.Join(out, "ca.crt"): "to which this program writes",
		filepath.Join(out, "back.crt"): "to which this program writes", dir: "is not a regular file",
	} {
		assert.ErrorContains(t, must.Err(f.GenerateSecret(t.Context(), "file-root:"+path)), text, path)
	}
	names := len(f.Report().Upstreams)
	for _, path := range []string{
		filepath.Join(secret, "ca.crt"), filepath.Join(top, "certs2", "ca.crt"), dir + "/../secret/ca.crt", dir + "//ca.crt", dir + "/./ca.crt",
		"ca.crt", "", "/", "..", dir + "/ca.crt\x00", top, "/etc/passwd", dir + "/" + strings.Repeat("a", 5000),
	} {
		_, err := f.GenerateSecret(t.Context(), "file-root:"+path)
		assert.ErrorIs(t, err, fs.ErrNotExist, "%.100q", path)
		assert.Less(t, len(fmt.Sprint(err)), 600)
	}
	for _, rest := range []string{"", "~", "a~b", dir + "/a", dir + "/a~", "~" + dir + "/a",
		dir + "/a~" + dir + "/b~" + dir + "/c", dir + "/a~/etc/shadow", "/etc/shadow~" + dir + "/a"} {
		assert.ErrorIs(t, must.Err(f.GenerateSecret(t.Context(), "file-cert:"+rest)), fs.ErrNotExist, rest)
	}
	for _, name := range []string{"", "default", "ROOTCA", "file-root:" + dir + "/a~b", "file-certs:" + dir, "FILE-ROOT:" + dir + "/ca.crt"} {
		assert.ErrorIs(t, must.Err(f.GenerateSecret(t.Context(), name)), fs.ErrNotExist, name)
	}
	assert.Len(t, f.Report().Upstreams, names, "none of them is followed")
	none := start(t, sdssource.FilesConfig{})
	_, err := none.GenerateSecret(t.Context(), "file-root:"+filepath.Join(dir, "ca.crt"))
	assert.ErrorIs(t, err, fs.ErrNotExist, "nothing is allowed by default")

	// A client that names the roots of others as the key of a pair costs them nothing.
	shared := filepath.Join(dir, "ca.crt")
	require.NoError(t, os.Chmod(shared, 0o644))
	require.Error(t, must.Err(f.GenerateSecret(t.Context(), "file-cert:"+shared+"~"+shared)))
	ca.Rotate()
	require.NoError(t, os.WriteFile(shared, ca.Bundle().MarshalPEM(), 0o644))
	require.Eventually(t, func() bool {
		got, _ := get(t, f, "file-root:"+shared).Roots()
		return string(got) == string(ca.Bundle().MarshalPEM())
	}, patience, time.Millisecond)
	assert.NoError(t, statusOf(f, "file-root:"+shared).Err)
	for _, bad := range []sdssource.FilesConfig{{Allow: []string{""}}, {Allow: []string{"/"}}} {
		assert.Error(t, must.Err(sdssource.NewFiles(bad)))
	}
}

// The number of names is bounded. One that has nothing and is not asked for makes room; one with a secret does not.
func TestFilesBound(t *testing.T) {
	t.Parallel()
	onlyUnix(t)
	dir := t.TempDir()
	ca := spiffetest.NewCA(t, td.String())
	roots := "file-root:" + write(t, ca.Bundle().MarshalPEM(), dir, "ca.crt")
	name := func(n int) string { return fmt.Sprintf("file-root:%s/%d", dir, n) }
	const most = 256
	synctest.Test(t, func(t *testing.T) {
		f := must.Get(sdssource.NewFiles(sdssource.FilesConfig{Allow: []string{dir}}))(t)
		ask := func(n int) error { // nothing runs, so nothing is read
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			_, err := f.GenerateSecret(ctx, name(n))
			return err
		}
		require.ErrorContains(t, ask(1), "neither called Start nor Run")
		for n := 2; n <= most; n++ {
			require.ErrorContains(t, ask(n), "not read yet")
		}
		require.ErrorContains(t, ask(0), "names already")
		require.NotErrorIs(t, ask(0), fs.ErrNotExist)
		time.Sleep(time.Minute)
		for n := 2; n <= most; n++ {
			require.ErrorContains(t, ask(n), "not read yet", "it is still asked for")
		}
		require.ErrorContains(t, ask(0), "not read yet", "in the place of the first")
		require.ErrorContains(t, ask(1), "names already")
	})
	f := start(t, sdssource.FilesConfig{Allow: []string{dir}})
	get(t, f, roots)
	done, cancel := context.WithCancel(t.Context())
	cancel()
	for n := range most {
		_, err := f.GenerateSecret(done, name(n))
		require.Equal(t, n == most-1, strings.Contains(err.Error(), "names already"), n)
	}
	require.NoError(t, f.Close())
	get(t, f, roots) // stays readable
	require.NoError(t, f.Close())
	require.Error(t, f.Run(t.Context()))
}

// An expired certificate is not handed out.
func TestFilesExpire(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-7.4-9")
	onlyUnix(t)
	ca := spiffetest.NewCA(t, td.String())
	dir := t.TempDir()
	f := start(t, sdssource.FilesConfig{Allow: []string{dir}})
	name := put(t, dir, ca.SVID("/web", valid(-time.Hour, 2*time.Second)))
	get(t, f, name)
	require.Eventually(t, func() bool {
		_, err := f.GenerateSecret(t.Context(), name)
		return err != nil && strings.Contains(err.Error(), "has expired")
	}, patience, 10*time.Millisecond)
	next := ca.SVID("/web")
	put(t, dir, next)
	await(t, f, name, next)
}

func TestSystemRoots(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-7.2-5", "IST-7.4-3")
	onlyUnix(t)
	ca := spiffetest.NewCA(t, td.String())
	dir := t.TempDir()
	junk := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("not one")})
	path := write(t, append(junk, ca.Bundle().MarshalPEM()...), dir, "roots.pem")
	f := start(t, sdssource.FilesConfig{SystemRoots: path})
	got, _ := get(t, f, "file-root:system").Roots()
	assert.Equal(t, string(ca.Bundle().MarshalPEM()), string(got))
	_, err := f.GenerateSecret(t.Context(), "file-root:"+path)
	assert.ErrorIs(t, err, fs.ErrNotExist, "that name is not allowed")

	host, err := start(t, sdssource.FilesConfig{}).GenerateSecret(t.Context(), "file-root:system")
	if errors.Is(err, fs.ErrNotExist) {
		t.Skip("this system has no file of roots")
	}
	require.NoError(t, err)
	all, _ := host.Roots()
	assert.True(t, x509.NewCertPool().AppendCertsFromPEM(all))
}

func FuzzName(f *testing.F) {
	dir := f.TempDir()
	for _, seed := range []string{
		"", "default", "file-cert:", "file-root:", "file-cert:~", "file-root:~", "file-root:system", "file-root:/", "file-cert:/a~/b", "file-cert:/a~/b~/c",
		"file-root:DIR/a", "file-cert:DIR/a~DIR/b", "file-root:DIR/../a", "file-root:DIR", "file-root:DIR/..data/a", "file-root:DIR2/a", "file-root:DIR\x00", "file-root:DIR/a/", "file-root:./DIR/a",
	} {
		f.Add(seed)
	}
	done, cancel := context.WithCancel(context.Background())
	cancel()
	f.Fuzz(func(t *testing.T, name string) {
		name = strings.ReplaceAll(name, "DIR", dir)
		if name == "file-root:system" {
			return
		}
		src := must.Get(sdssource.NewFiles(sdssource.FilesConfig{Allow: []string{dir}}))(t)
		_, err := src.GenerateSecret(done, name)
		require.Error(t, err)
		cert, isCert := strings.CutPrefix(name, "file-cert:")
		root, isRoot := strings.CutPrefix(name, "file-root:")
		if len(src.Report().Upstreams) == 0 { // it is not followed
			require.ErrorIs(t, err, fs.ErrNotExist)
			return
		}
		require.True(t, isCert || isRoot, "%q", name)
		paths := []string{root}
		if isCert {
			paths = strings.Split(cert, "~")
			require.Len(t, paths, 2, "%q", name)
		}
		for _, path := range paths {
			require.True(t, filepath.IsLocal(must.Get(filepath.Rel(dir, path))(t)), "%q", path)
			require.True(t, filepath.Clean(path) == path && filepath.IsAbs(path) && !strings.ContainsAny(path, "\x00~"), "%q", path)
		}
	})
}

// A second name for which there is no secret is seen in the log.
func TestRefusedNamesAreLogged(t *testing.T) {
	t.Parallel()
	onlyUnix(t)
	dir := t.TempDir()
	var log logtest.Buffer
	f := start(t, sdssource.FilesConfig{Allow: []string{dir}, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	for _, name := range []string{"a", "b"} {
		at := "file-root:" + filepath.Join(dir, name)
		for range 3 {
			require.Error(t, must.Err(f.GenerateSecret(t.Context(), at)))
		}
		require.Eventually(t, func() bool { return strings.Count(log.String(), at) > 0 }, patience, time.Millisecond)
	}
	assert.Equal(t, 2, strings.Count(log.String(), "there is no secret for a name"))
	assert.Zero(t, strings.Count(log.String(), "count="), "of the second name alone")
}
