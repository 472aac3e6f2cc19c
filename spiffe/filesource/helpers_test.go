package filesource_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesource"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func TestMain(m *testing.M) {
	rounds.Parallel(8)
	m.Run()
}

const patience = time.Minute // for a slow machine

var (
	td      = spiffe.MustParseTrustDomain("example.org")
	partner = spiffe.MustParseTrustDomain("partner.test")
)

func write(t testing.TB, path string, data []byte) {
	t.Helper()
	require.NoError(t, os.WriteFile(path, data, 0o600))
}

// pemOf returns a chain and its key in PEM.
func pemOf(t testing.TB, chain []*x509.Certificate, key crypto.Signer) (certs, keyPEM []byte) {
	t.Helper()
	for _, c := range chain {
		certs = append(certs, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw})...)
	}
	der := must.Get(x509.MarshalPKCS8PrivateKey(key))(t)
	return certs, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

// putSVID writes tls.crt and tls.key.
func putSVID(t testing.TB, dir string, svid *spiffe.SVID) {
	t.Helper()
	certs, key := must.Get2(svid.MarshalPEM())(t)
	write(t, filepath.Join(dir, "tls.crt"), certs)
	write(t, filepath.Join(dir, "tls.key"), key)
}

// putAll writes tls.crt, tls.key and ca.crt.
func putAll(t testing.TB, dir string, svid *spiffe.SVID, bundle *spiffe.Bundle) {
	t.Helper()
	putSVID(t, dir, svid)
	write(t, filepath.Join(dir, "ca.crt"), bundle.MarshalPEM())
}

// layout is the usual configuration: the files of cert-manager.
func layout(dir string) filesource.Config {
	return filesource.Config{
		CertFile: filepath.Join(dir, "tls.crt"), KeyFile: filepath.Join(dir, "tls.key"),
		Bundles: []filesource.BundleFile{{Path: filepath.Join(dir, "ca.crt")}},
	}
}

func start(t testing.TB, cfg filesource.Config) *filesource.Source {
	t.Helper()
	s := must.Get(filesource.Start(t.Context(), cfg))(t)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// refused returns why the first reading of cfg's files fails.
func refused(t testing.TB, cfg filesource.Config) error {
	t.Helper()
	s := must.Get(filesource.New(cfg))(t)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	defer func() {
		stop()
		require.NoError(t, <-ended)
	}()
	return awaitErr(t, s, "")
}

func serial(t testing.TB, s spiffe.SVIDSource) string {
	t.Helper()
	return must.Get(s.SVID())(t).Leaf().SerialNumber.String()
}

func number(svid *spiffe.SVID) string { return svid.Leaf().SerialNumber.String() }

// awaitSVID waits until s hands out svid and all files are in order.
func awaitSVID(t testing.TB, s *filesource.Source, svid *spiffe.SVID) {
	t.Helper()
	require.Eventually(t, func() bool { return serial(t, s) == number(svid) && s.Status().Err == nil }, patience, 10*time.Millisecond)
}

// awaitErr waits until a part of the files is refused for a reason with text in it.
func awaitErr(t testing.TB, s *filesource.Source, text string) error {
	t.Helper()
	var err error
	require.Eventually(t, func() bool {
		err = s.Status().Err
		return err != nil && bytes.Contains([]byte(err.Error()), []byte(text))
	}, patience, 10*time.Millisecond, "waiting for %q", text)
	return err
}

// diary keeps what was logged.
type diary struct{ logtest.Buffer }

func (d *diary) logger() *slog.Logger { return slog.New(slog.NewJSONHandler(d, nil)) }

// lines returns the lines with the message.
func (d *diary) lines(t testing.TB, msg string) (found []map[string]any) {
	t.Helper()
	for line := range strings.Lines(d.String()) {
		var m map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &m))
		if m["msg"] == msg {
			found = append(found, m)
		}
	}
	return found
}

func onlyUnix(t testing.TB) {
	t.Helper()
	if runtime.GOOS == "windows" {
		t.Skip("links and modes are others there")
	}
}

// volume is a volume of Kubernetes.
type volume struct {
	dir string
	n   int
}

// swap makes a new version of the volume with the files, as the kubelet does, and deletes the one before.
func (v *volume) swap(t testing.TB, mode os.FileMode, files map[string][]byte) {
	t.Helper()
	v.n++
	name := fmt.Sprintf("..2026_01_02_15_04_05.%09d", v.n)
	require.NoError(t, os.Mkdir(filepath.Join(v.dir, name), 0o755))
	for file, data := range files {
		path := filepath.Join(v.dir, name, file)
		require.NoError(t, os.WriteFile(path, data, mode))
		require.NoError(t, os.Chmod(path, mode))
		link := filepath.Join(v.dir, file)
		if _, err := os.Lstat(link); err != nil {
			require.NoError(t, os.Symlink(filepath.Join("..data", file), link))
		}
	}
	before, _ := os.Readlink(filepath.Join(v.dir, "..data"))
	require.NoError(t, os.Symlink(name, filepath.Join(v.dir, "..data_tmp")))
	require.NoError(t, os.Rename(filepath.Join(v.dir, "..data_tmp"), filepath.Join(v.dir, "..data")))
	if before != "" {
		require.NoError(t, os.RemoveAll(filepath.Join(v.dir, before)))
	}
}

// secret is what a Secret of cert-manager has.
func secret(t testing.TB, svid *spiffe.SVID, bundle *spiffe.Bundle) map[string][]byte {
	t.Helper()
	certs, key := must.Get2(svid.MarshalPEM())(t)
	return map[string][]byte{"tls.crt": certs, "tls.key": key, "ca.crt": bundle.MarshalPEM()}
}

func newCA(t testing.TB) *spiffetest.CA { t.Helper(); return spiffetest.NewCA(t, "example.org") }
