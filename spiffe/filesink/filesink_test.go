package filesink_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesink"
	"github.com/svidkit/svidkit/spiffe/filesource"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

const patience = time.Minute // for a slow machine

var layouts = []bool{false, true} // Config.Plain

func start(t testing.TB, cfg filesink.Config) *filesink.Sink {
	t.Helper()
	s := must.Get(filesink.Start(t.Context(), cfg))(t)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// writeOnce writes what the source of cfg has.
func writeOnce(t testing.TB, cfg filesink.Config) (changed bool, err error) {
	t.Helper()
	return must.Get(filesink.New(cfg))(t).Write()
}

// reads is the configuration of a reader of the usual files.
func reads(dir string) filesource.Config {
	return filesource.Config{
		CertFile: filepath.Join(dir, "cert-chain.pem"), KeyFile: filepath.Join(dir, "key.pem"),
		Bundles: []filesource.BundleFile{{Path: filepath.Join(dir, "root-cert.pem")}},
	}
}

// read returns the identity in the usual files.
func read(t testing.TB, dir string) *spiffe.SVID {
	t.Helper()
	certs := must.Get(os.ReadFile(filepath.Join(dir, "cert-chain.pem")))(t)
	return must.Get(spiffe.ParseSVIDPEM(certs, must.Get(os.ReadFile(filepath.Join(dir, "key.pem")))(t)))(t)
}

// status is the state of a Sink, of which the times are those of the identity in the files and of the files.
type status struct {
	Ready                        bool
	Writes                       int
	NotAfter, LastWrite, Checked time.Time
	Err                          error
}

// statusOf reads the Report of s.
func statusOf(t testing.TB, s *filesink.Sink) status {
	t.Helper()
	r := s.Report()
	m := must.Get(metricstest.Of(r.Metrics))(t).Samples
	st := status{Ready: m["svidkit_filesink_ready"] == 1, Writes: int(m["svidkit_filesink_writes_total"])}
	for _, id := range r.Identities {
		st.NotAfter, st.LastWrite = id.NotAfter, id.LastSuccess
	}
	st.Checked, st.Err = r.Upstreams[0].LastSuccess, r.Upstreams[0].Err
	return st
}

func leaf(t testing.TB, s spiffe.SVIDSource) *x509.Certificate {
	t.Helper()
	return must.Get(s.SVID())(t).Leaf()
}

// diary keeps what was logged.
type diary struct{ logtest.Buffer }

func (d *diary) logger() *slog.Logger { return slog.New(slog.NewJSONHandler(d, nil)) }

func (d *diary) count(text string) int { return strings.Count(d.String(), text) }

// keyed is a source with a key of any algorithm.
type keyed struct{ snap *spiffe.Snapshot }

func (k keyed) Snapshot() (*spiffe.Snapshot, error) { return k.snap, nil }
func (k keyed) Changed() <-chan struct{}            { return nil }

func newKeyed(t *testing.T, ca *spiffetest.CA, key crypto.Signer) keyed {
	t.Helper()
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.org/web"))}})
	require.NoError(t, err)
	svid := must.Get(spiffe.NewSVID(must.Get(ca.Sign(t.Context(), csr, time.Hour))(t), key))(t)
	return keyed{spiffe.NewSnapshot(svid, ca.Bundles())}
}

// The key is in the form that the configuration says, in a file of its own and in front of the certificates.
func TestTraditionalKey(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-9.2-18")
	ca := spiffetest.NewCA(t, "example.org")
	for algorithm, name := range map[string]string{"ecdsa-p384": "EC PRIVATE KEY", "rsa-2048": "RSA PRIVATE KEY", "ed25519": "PRIVATE KEY"} {
		key := must.Get(pki.NewKey(algorithm))(t)
		src := newKeyed(t, ca, key)
		for _, keyName := range []string{"key.pem", "cert-chain.pem"} {
			dir := t.TempDir()
			for n, traditional := range []bool{keyName == "key.pem", keyName != "key.pem"} {
				want := "PRIVATE KEY"
				if traditional {
					want = name
				}
				cfg := filesink.Config{Source: src, Dir: dir, KeyName: keyName, TraditionalKey: traditional}
				changed := must.Get(writeOnce(t, cfg))(t)
				assert.Equal(t, n == 0 || name != "PRIVATE KEY", changed, "the other form takes its place")
				block, rest := pem.Decode(must.Get(os.ReadFile(filepath.Join(dir, keyName)))(t))
				require.NotNil(t, block)
				assert.Equal(t, want, block.Type)
				assert.Equal(t, keyName == "key.pem", len(rest) == 0)
				read := must.Get(pki.ParsePrivateKeyPEM(pem.EncodeToMemory(block)))(t)
				assert.True(t, key.(interface{ Equal(crypto.PrivateKey) bool }).Equal(read))
				changed = must.Get(writeOnce(t, cfg))(t)
				assert.False(t, changed, "the same again")
			}
		}
	}
}

// The identity and the root change while a file source follows the directory and a reader spins. The source takes each
// identity that stays, and with links two equal readings never find a fault. A reader that finds the same certificates
// before and after the key has a pair with links; with plain files it may have to read again.
func TestRotation(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	for _, plain := range layouts {
		t.Run(map[bool]string{false: "links", true: "plain"}[plain], func(t *testing.T) {
			t.Parallel()
			ca := spiffetest.NewCA(t, "example.org")
			ca.Federate(spiffetest.NewCA(t, "partner.test").Bundle())
			src := ca.Source("/web")
			dir := t.TempDir()
			sink := start(t, filesink.Config{Source: src, Dir: dir, Plain: plain, BundlesName: "bundles.json"})
			var log diary
			cfg := reads(dir)
			cfg.Logger = log.logger()
			cfg.Bundles = append(cfg.Bundles, filesource.BundleFile{Path: filepath.Join(dir, "bundles.json"), Map: true})
			reader := must.Get(filesource.Start(t.Context(), cfg))(t)
			defer reader.Close()
			require.Equal(t, 2, reader.Bundles().Len())

			var pairs, mixed atomic.Int64
			ctx, cancel := context.WithCancel(t.Context())
			var readers sync.WaitGroup
			defer readers.Wait()
			defer cancel()
			readers.Go(func() {
				file := func(name string) []byte {
					data, err := os.ReadFile(filepath.Join(dir, name))
					if !plain && errors.Is(err, fs.ErrNotExist) {
						return nil // two versions later the directory that the name led to is gone
					}
					assert.NoError(t, err)
					return data
				}
				for ; ctx.Err() == nil && !t.Failed(); time.Sleep(200 * time.Microsecond / time.Duration(rounds.Of(1))) {
					certs, key, again := file("cert-chain.pem"), file("key.pem"), file("cert-chain.pem")
					_, err := spiffe.ParseSVIDPEM(certs, key)
					switch {
					case certs == nil || key == nil:
					case err == nil:
						pairs.Add(1)
					case plain || !bytes.Equal(certs, again):
						mixed.Add(1) // a moment of the rotation
					default:
						assert.NoError(t, err)
					}
				}
			})
			for n := range rounds.Of(10) {
				if n%5 == 4 {
					ca.Rotate()
				}
				src.Renew()
				if n%10 == 9 {
					require.Eventually(t, func() bool { return leaf(t, reader).Equal(leaf(t, src)) && reader.Report().Upstreams[0].Err == nil }, patience, 10*time.Millisecond)
					require.Equal(t, leaf(t, src), leaf(t, read(t, dir)))
					continue
				}
				time.Sleep(time.Duration(n) * time.Millisecond)
			}
			st := statusOf(t, sink)
			assert.Equal(t, leaf(t, src).NotAfter, st.NotAfter)
			assert.NoError(t, st.Err)
			if !plain { // a machine that stands still between two of the moves can show plain files twice
				assert.Zero(t, log.count("files refused"), "what two equal readings found was in order")
			}
			t.Logf("%d writes, %d pairs read, %d mixed", st.Writes, pairs.Load(), mixed.Load())
			assert.Positive(t, pairs.Load())
		})
	}
}

// The names and modes are those of OUTPUT_CERTS.
func TestOutputCerts(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-7.3-8", "IST-7.9-1", "IST-7.9-2")
	ca := spiffetest.NewCA(t, "example.org")
	svid := ca.SVID("/ns/default/sa/web")
	for _, mode := range []fs.FileMode{0, 0o600, 0o644} {
		dir := t.TempDir()
		var log diary
		cfg := filesink.Config{Source: ca.Source("/web"), Dir: dir, Plain: true, Mode: mode, KeyMode: mode, Logger: log.logger()}
		require.True(t, must.Get(writeOnce(t, cfg))(t))
		entries := must.Get(os.ReadDir(dir))(t)
		want := map[string]fs.FileMode{"cert-chain.pem": mode, "key.pem": mode, "root-cert.pem": mode}
		if mode == 0 {
			want = map[string]fs.FileMode{"cert-chain.pem": 0o644, "key.pem": 0o600, "root-cert.pem": 0o644}
		}
		want["..lock"] = 0o600 // which other users cannot open, whatever the mode of the directory is
		require.Len(t, entries, len(want))
		for _, e := range entries {
			info := must.Get(e.Info())(t)
			if runtime.GOOS != "windows" {
				require.Equal(t, want[e.Name()], info.Mode(), e.Name())
			}
		}
		require.Equal(t, ca.Bundle().MarshalPEM(), must.Get(os.ReadFile(filepath.Join(dir, "root-cert.pem")))(t))
		require.Equal(t, svid.ID().TrustDomain(), read(t, dir).ID().TrustDomain())
		require.Equal(t, map[bool]int{true: 1}[mode == 0o644], log.count("can read the private key"))
	}
}

// After a restart what is there is not written again, and what another program has damaged is, within a minute.
func TestRestart(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-7.9-1")
	for _, plain := range layouts {
		synctest.Test(t, func(t *testing.T) {
			dir := t.TempDir()
			src := spiffetest.NewCA(t, "example.org").Source("/web")
			cfg := filesink.Config{Source: src, Dir: dir, Plain: plain}
			first := start(t, cfg)
			require.Equal(t, 1, statusOf(t, first).Writes)
			require.NoError(t, first.Close())
			second := start(t, cfg)
			time.Sleep(10 * time.Minute)
			synctest.Wait()
			require.Zero(t, statusOf(t, second).Writes)
			require.Zero(t, statusOf(t, second).LastWrite)
			require.WithinDuration(t, time.Now(), statusOf(t, second).Checked, 2*time.Minute)

			changed := second.Changed()
			require.NoError(t, os.Remove(filepath.Join(dir, "key.pem")))
			require.NoError(t, os.Chmod(filepath.Join(dir, "cert-chain.pem"), 0o600))
			<-changed
			require.Equal(t, 1, statusOf(t, second).Writes)
			require.Equal(t, leaf(t, src), leaf(t, read(t, dir)))

			require.NoError(t, os.RemoveAll(dir)) // the volume was made anew
			<-second.Changed()
			require.Equal(t, leaf(t, src), leaf(t, read(t, dir)))
			require.NoError(t, second.Close())
		})
	}
}

// A program is ready while its files have an identity with some life left, whatever the last write was like.
func TestReadiness(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := spiffetest.NewCA(t, "example.org").Source("/web")
		dir := filepath.Join(t.TempDir(), "d")
		s := must.Get(filesink.New(filesink.Config{Source: src, Dir: dir}))(t)
		require.ErrorIs(t, s.Report().NotReady, spiffe.ErrNotReady)
		must.Get(s.Write())(t)
		require.NoError(t, s.Report().NotReady)

		require.NoError(t, os.RemoveAll(dir)) // a lock of another, a full disk: it cannot be written
		require.NoError(t, os.WriteFile(dir, nil, 0o600))
		time.Sleep(30 * time.Minute) // of an hour
		src.Renew()
		require.Error(t, must.Err(s.Write()))
		require.NoError(t, s.Report().NotReady, "readers have half a life")
		time.Sleep(20 * time.Minute)
		require.ErrorContains(t, s.Report().NotReady, "the identity in the files ends at ")

		require.NoError(t, os.Remove(dir))
		must.Get(s.Write())(t)
		require.NoError(t, s.Report().NotReady)
	})
}

// An identity that has expired takes the place of nothing; the next valid one does.
func TestExpired(t *testing.T) {
	t.Parallel()
	for _, plain := range layouts {
		synctest.Test(t, func(t *testing.T) {
			ca := spiffetest.NewCA(t, "example.org")
			dir := t.TempDir()
			src, good := ca.Source("/web"), ca.Source("/web")
			time.Sleep(2 * time.Hour) // the lifetime is an hour
			good.Renew()
			must.Get(writeOnce(t, filesink.Config{Source: good, Dir: dir, Plain: plain}))(t)
			var log diary
			s := must.Get(filesink.New(filesink.Config{Source: src, Dir: dir, Plain: plain, Logger: log.logger()}))(t)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- s.Run(ctx) }()
			time.Sleep(10 * time.Minute)
			require.ErrorContains(t, statusOf(t, s).Err, "has expired at")
			require.False(t, statusOf(t, s).Ready)
			require.Equal(t, leaf(t, good), leaf(t, read(t, dir)), "the valid one stays")
			require.Equal(t, 1, log.count("could not be written"), "told once")
			src.Renew()
			require.NoError(t, s.Ready(t.Context()))
			require.NoError(t, statusOf(t, s).Err)
			require.Equal(t, leaf(t, src), leaf(t, read(t, dir)))

			src.Fail(errors.New("withdrawn"))
			time.Sleep(70 * time.Minute)
			require.ErrorContains(t, statusOf(t, s).Err, "withdrawn")
			require.Equal(t, leaf(t, read(t, dir)).NotAfter, statusOf(t, s).NotAfter, "the files stay")
			cancel()
			require.NoError(t, <-ended)
			require.NoError(t, s.Close())
		})
	}
}

// An identity that is not valid yet takes the place of nothing: the files stay while what they have is valid, the report says why they
// are not current, and they are written when its time has come.
func TestNotValidYet(t *testing.T) {
	t.Parallel()
	for _, plain := range layouts {
		synctest.Test(t, func(t *testing.T) {
			src := spiffetest.NewCA(t, "example.org").Source("/web")
			dir := t.TempDir()
			var log diary
			s := start(t, filesink.Config{Source: src, Dir: dir, Plain: plain, Logger: log.logger()})
			good := leaf(t, src)
			require.Equal(t, good, leaf(t, read(t, dir)))
			begin := time.Now().Add(20 * time.Minute)
			src.Renew(func(c *x509.Certificate) { c.NotBefore, c.NotAfter = begin, begin.Add(time.Hour) })
			time.Sleep(time.Until(begin) - time.Second)
			require.Equal(t, good, leaf(t, read(t, dir)))
			r := s.Report()
			require.ErrorContains(t, r.Upstreams[0].Err, "the certificate is valid from "+begin.UTC().Format(time.RFC3339)+" on; compare the clocks")
			require.NoError(t, r.NotReady, "the files have half an hour")
			require.Equal(t, good.NotAfter, r.Identities[0].NotAfter)
			require.Equal(t, 1, log.count("could not be written"), "told once")

			time.Sleep(10 * time.Minute)
			require.Equal(t, leaf(t, src), leaf(t, read(t, dir)))
			require.NoError(t, s.Report().Upstreams[0].Err)
			require.NoError(t, s.Close())
		})
	}
}

// Federated bundles have files of their own, and tokens the mode of the key; what is not asked for any more goes.
func TestMoreFiles(t *testing.T) {
	t.Parallel()
	for _, plain := range layouts {
		ca, partner, unnamed := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "partner.test"), spiffetest.NewCA(t, "unnamed.test")
		ca.Federate(partner.Bundle())
		ca.Federate(unnamed.Bundle())
		dir := filepath.Join(t.TempDir(), "out")
		asked := map[string]int{}
		s, err := filesink.New(filesink.Config{
			Source: ca.Source("/web"), Dir: dir, Plain: plain, Tokens: map[string]string{"db.token": "db"}, TokenSource: tokenSource(issue(2 * time.Hour)),
			FederatedName: func(td spiffe.TrustDomain) string {
				if asked[td.String()]++; td == partner.TrustDomain() {
					return td.String() + ".pem"
				}
				return ""
			},
		})
		require.NoError(t, err)
		write := func() bool {
			return must.Get(s.Write())(t)
		}
		require.True(t, write())
		require.False(t, write())
		require.Equal(t, map[string]int{"partner.test": 2, "unnamed.test": 2}, asked, "not for its own trust domain")
		text := must.Get(os.ReadFile(filepath.Join(dir, "partner.test.pem")))(t)
		require.Equal(t, partner.Bundle().MarshalPEM(), text)
		if runtime.GOOS != "windows" {
			for name, mode := range map[string]fs.FileMode{"partner.test.pem": 0o644, "db.token": 0o600} {
				require.Equal(t, mode, must.Get(os.Stat(filepath.Join(dir, name)))(t).Mode(), name)
			}
		}
		require.NoError(t, s.Close())
	}
}

// A credential folder has the names of the draft, and filesource reads it: bundles that come and go, and rotations.
func TestDelivery(t *testing.T) {
	t.Parallel()
	ca, partner := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "partner.test")
	dir := filepath.Join(t.TempDir(), "credentials")
	source := ca.Source("/web")
	sink := start(t, filesink.Config{Source: source, Dir: dir, Delivery: true})
	const credential, own, other = "credential-bundle.private-key.x509.pem", "example.org.spiffe-trust-bundle.x509.pem", "partner.test.spiffe-trust-bundle.x509.pem"
	block, rest := pem.Decode(must.Get(os.ReadFile(filepath.Join(dir, credential)))(t))
	require.Equal(t, "PRIVATE KEY", block.Type, "the key comes first")
	block, _ = pem.Decode(rest)
	require.Equal(t, leaf(t, source).Raw, block.Bytes)
	require.NoFileExists(t, filepath.Join(dir, "root-cert.pem"))
	require.NoFileExists(t, filepath.Join(dir, other))

	src := must.Get(filesource.Start(t.Context(), filesource.Config{Folder: dir}))(t)
	defer src.Close()
	is := func(svid *x509.Certificate, bundles ...*spiffe.Bundle) {
		t.Helper()
		require.Eventually(t, func() bool {
			set := src.Bundles()
			for _, b := range bundles {
				if got, err := set.Bundle(b.TrustDomain()); err != nil || !bytes.Equal(got.MarshalPEM(), b.MarshalPEM()) {
					return false
				}
			}
			got, err := src.SVID()
			return err == nil && got.Leaf().Equal(svid) && set.Len() == len(bundles)
		}, patience, time.Millisecond)
	}
	is(leaf(t, source), ca.Bundle())
	ca.Federate(partner.Bundle())
	source.Renew()
	is(leaf(t, source), ca.Bundle(), partner.Bundle())
	require.FileExists(t, filepath.Join(dir, own))
	ca.Rotate()
	source.Renew()
	is(leaf(t, source), ca.Bundle(), partner.Bundle())
	require.NoError(t, sink.Report().NotReady)
}

// A directory that cannot be written leaves the last good set, is retried at a share of what is left, and ends nothing.
func TestRetry(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-7.3-8")
	for _, plain := range layouts {
		synctest.Test(t, func(t *testing.T) {
			ca := spiffetest.NewCA(t, "example.org")
			dir := filepath.Join(t.TempDir(), "out")
			src := ca.Source("/web")
			var log diary
			s := start(t, filesink.Config{Source: src, Dir: dir, Plain: plain, BundlesName: "bundles.json", Logger: log.logger()})
			before := leaf(t, src)
			require.NoError(t, os.Remove(filepath.Join(dir, "bundles.json")))
			require.NoError(t, os.Mkdir(filepath.Join(dir, "bundles.json"), 0o755)) // what cannot be replaced
			src.Renew()
			time.Sleep(20 * time.Minute)
			st := statusOf(t, s)
			require.ErrorContains(t, st.Err, "bundles.json is there and was not made by this program: remove it")
			require.Equal(t, before, leaf(t, read(t, dir)))
			require.True(t, st.Ready)
			require.Equal(t, before.NotAfter, st.NotAfter)
			require.Equal(t, 1, log.count("could not be written"), "told once")
			require.NoError(t, os.Remove(filepath.Join(dir, "bundles.json")))
			time.Sleep(time.Minute)
			synctest.Wait()
			require.NoError(t, statusOf(t, s).Err)
			require.Equal(t, leaf(t, src), leaf(t, read(t, dir)))
			require.Equal(t, 2, log.count("are current"))
			require.NoError(t, s.Close())
		})
	}
}

// A source that is not ready yet is part of each normal start, and no warning; one that fails later is.
func TestStartWithoutWarning(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		src := spiffetest.NewCA(t, "example.org").Source("/web")
		src.Fail(fmt.Errorf("%w: nothing was received yet", spiffe.ErrNotReady))
		var log diary
		logger := slog.New(slog.NewJSONHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
		s := must.Get(filesink.New(filesink.Config{Source: src, Dir: t.TempDir(), Logger: logger}))(t)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- s.Run(ctx) }()
		time.Sleep(10 * time.Minute)
		require.ErrorIs(t, statusOf(t, s).Err, spiffe.ErrNotReady)
		require.NotZero(t, log.count("the source is not ready yet"))
		require.Zero(t, log.count("WARN"))
		src.Fail(nil)
		require.NoError(t, s.Ready(t.Context()))
		synctest.Wait() // the log is written after readers are told
		require.Equal(t, 1, log.count("are current"))
		src.Fail(fmt.Errorf("%w: withdrawn", spiffe.ErrNotReady))
		time.Sleep(10 * time.Minute)
		require.Equal(t, 1, log.count("could not be written"), "told once")
		cancel()
		require.NoError(t, <-ended)
	})
}

// A directory that other users can write to is refused with the remedy, and accepted if the program says so.
func TestUnsafe(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("owners and modes are not checked there")
	}
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o777))
	var log diary
	cfg := filesink.Config{Source: spiffetest.NewCA(t, "example.org").Source("/web"), Dir: dir, Plain: true, Logger: log.logger()}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := filesink.Start(ctx, cfg)
	must.Fail(t, err, private.ErrUnsafe, spiffe.ErrNotReady, context.DeadlineExceeded, "run: chmod")
	cfg.AllowWritable = true
	s := start(t, cfg)
	must.Get(s.Write())(t)
	require.Equal(t, 1, log.count("other users can replace the files"))
	if os.Geteuid() == 0 {
		other := t.TempDir()
		require.NoError(t, os.Chown(other, 54321, -1))
		cfg.Dir = other
		must.Fail(t, must.Err(writeOnce(t, cfg)), private.ErrUnsafe, "run: chown 0")
	}
}

// One file has the key and the certificates, as many servers take it.
func TestOneFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	src := spiffetest.NewCA(t, "example.org").Source("/web")
	_, err := writeOnce(t, filesink.Config{Source: src, Dir: dir, Plain: true, CertName: "all.pem", KeyName: "all.pem", RootsName: "ca.pem"})
	require.NoError(t, err)
	reader, err := filesource.Start(t.Context(), filesource.Config{
		CertFile: filepath.Join(dir, "all.pem"), Bundles: []filesource.BundleFile{{Path: filepath.Join(dir, "ca.pem")}},
	})
	require.NoError(t, err)
	defer reader.Close()
	require.Equal(t, leaf(t, src), leaf(t, reader))
	if runtime.GOOS != "windows" {
		info := must.Get(os.Stat(filepath.Join(dir, "all.pem")))(t)
		require.Equal(t, fs.FileMode(0o600), info.Mode(), "that of the key")
	}
}

func TestNew(t *testing.T) {
	t.Parallel()
	src := spiffetest.NewCA(t, "example.org").Source("/web")
	good := filesink.Config{Source: src, Dir: filepath.Join(t.TempDir(), "never")}
	must.Get(filesink.New(good))(t)
	require.NoDirExists(t, good.Dir)
	for text, edit := range map[string]func(*filesink.Config){
		"no Source":                 func(c *filesink.Config) { c.Source = nil },
		"no Dir":                    func(c *filesink.Config) { c.Dir = "" },
		"mode 0666":                 func(c *filesink.Config) { c.KeyMode = 0o666 },
		"mode 0700":                 func(c *filesink.Config) { c.Mode = 0o700 },
		"mode 0200":                 func(c *filesink.Config) { c.Mode = 0o200 },
		"mode 40000600":             func(c *filesink.Config) { c.KeyMode = 0o600 | fs.ModeSetuid },
		`"../key.pem"`:              func(c *filesink.Config) { c.KeyName = "../key.pem" },
		`"..data"`:                  func(c *filesink.Config) { c.CertName = "..data" },
		`"."`:                       func(c *filesink.Config) { c.RootsName = "." },
		`"/etc/x"`:                  func(c *filesink.Config) { c.RootsName = "/etc/x" },
		`"a/b"`:                     func(c *filesink.Config) { c.BundlesName = "a/b" },
		`the name "key.pem"`:        func(c *filesink.Config) { c.RootsName = "key.pem" },
		`the name "cert-chain.pem"`: func(c *filesink.Config) { c.BundlesName = "cert-chain.pem" },
		`the name "root-cert.pem"`:  func(c *filesink.Config) { c.BundlesName = "root-cert.pem" },
		"Delivery has":              func(c *filesink.Config) { c.Delivery, c.CertName = true, "x" },
		"and form of the key":       func(c *filesink.Config) { c.Delivery, c.TraditionalKey = true, true },
		"Plain must be empty":       func(c *filesink.Config) { c.Delivery, c.Plain = true, true },
		"CertName, KeyName":         func(c *filesink.Config) { c.Delivery, c.KeyName = true, "x" },
		"RootsName, Fed":            func(c *filesink.Config) { c.Delivery, c.RootsName = true, "x" },
		"FederatedName, Trad": func(c *filesink.Config) {
			c.Delivery, c.FederatedName = true, func(spiffe.TrustDomain) string { return "" }
		},
	} {
		cfg := good
		edit(&cfg)
		must.Fail(t, must.Err(filesink.New(cfg)), text, "filesink: new: ")
	}
}

// The methods mean what they mean in the other packages.
func TestLife(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	src := ca.Source("/web")
	src.Fail(errors.New("the agent is away"))
	dir := t.TempDir()
	s := must.Get(filesink.New(filesink.Config{Source: src, Dir: dir}))(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	must.Fail(t, s.Ready(ctx), lifecycle.ErrNotStarted, spiffe.ErrNotReady)
	require.ErrorContains(t, must.Err(s.Write()), "the agent is away")

	ended := make(chan error, 1)
	go func() { ended <- s.Run(t.Context()) }()
	src.Fail(nil)
	require.NoError(t, s.Ready(t.Context()))
	require.ErrorIs(t, s.Run(t.Context()), lifecycle.ErrRunning)
	changed, err := s.Write() // beside Run
	require.NoError(t, err)
	require.False(t, changed)
	var text strings.Builder
	require.NoError(t, s.Report().Metrics(&text))
	require.Contains(t, text.String(), "svidkit_filesink_in_order 1\n")
	require.Contains(t, text.String(), "svidkit_filesink_writes_total 1\n")
	require.NoError(t, s.Close())
	require.NoError(t, s.Close())
	require.NoError(t, <-ended)
	require.ErrorIs(t, s.Run(t.Context()), lifecycle.ErrClosed)
	require.Equal(t, leaf(t, src), leaf(t, read(t, dir)))
	other := start(t, filesink.Config{Source: src, Dir: dir})
	require.NotNil(t, other, "the directory was let go")
	require.ErrorContains(t, must.Err(s.Write()), "another program writes to")
}
