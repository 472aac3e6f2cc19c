package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesink"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// settledGolden compares what a command has shown with a golden file, in which the names of this run are others.
func settledGolden(t *testing.T, name string, got outcome, args []string, names ...string) {
	t.Helper()
	for i, arg := range args {
		args[i] = settled(arg, names...)
	}
	got.out, got.errOut = settled(got.out, names...), settled(got.errOut, names...)
	compareGolden(t, filepath.Join("testdata", "golden"), name, args, got)
}

// read returns a file.
func read(t testing.TB, elem ...string) string {
	t.Helper()
	return string(must.Get(os.ReadFile(filepath.Join(elem...)))(t))
}

func TestFetch(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	ca.Federate(spiffetest.NewCA(t, "partner.test").Bundle())
	api := workloadapitest.NewServer(t, ca, "/ns/prod/sa/web")
	dir := filepath.Join(t.TempDir(), "identity")
	args := []string{"fetch", "-socket", api.Config().Address, "-dir", dir, "-jwt", "db=db.token"}
	got := svid(t, args...)
	require.Equal(t, 0, got.code, got.errOut)
	settledGolden(t, "fetch", got, args, api.Config().Address, "unix:///run/agent/api.sock", dir, "/run/identity")

	svid := must.Get(spiffe.ParseSVIDPEM([]byte(read(t, dir, "svid.pem")), []byte(read(t, dir, "svid-key.pem"))))(t)
	assert.Equal(t, must.Get(api.Snapshot().SVID())(t).Leaf(), svid.Leaf())
	assert.Equal(t, string(ca.Bundle().MarshalPEM()), read(t, dir, "bundle.pem"))
	partner := must.Get(api.Snapshot().Bundle(spiffe.MustParseID("spiffe://partner.test/x").TrustDomain()))(t)
	assert.Equal(t, string(partner.MarshalPEM()), read(t, dir, "bundle-partner.test.pem"))
	set := must.Get(spiffe.ParseBundleMap([]byte(read(t, dir, "bundles.json"))))(t)
	assert.Equal(t, 2, set.Len())
	own := must.Get(set.Bundle(ca.TrustDomain()))(t)
	assert.Empty(t, own.Contents().JWTAuthorities, "without -jwt-bundles")
	v := must.Get(jwtsvid.NewValidator(api.Snapshot(), []string{"db"}, nil))(t)
	must.Get(v.Validate(read(t, dir, "db.token")))(t)
	if runtime.GOOS != "windows" {
		for name, mode := range map[string]fs.FileMode{
			"svid.pem": 0o644, "svid-key.pem": 0o600, "bundle.pem": 0o644, "bundle-partner.test.pem": 0o644, "bundles.json": 0o644,
			"db.token": 0o600, ".": 0o755 | fs.ModeDir, "..data": 0o755 | fs.ModeDir,
		} {
			assert.Equal(t, mode, must.Get(os.Stat(filepath.Join(dir, name)))(t).Mode(), name)
		}
	}
}

// Names, modes and the keys for tokens are the operator's choice, and a file that is not asked for any more goes.
func TestFetchChoices(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, ca, "/a", "/b")
	api.SetIdentities(workloadserver.Identity{SVID: ca.SVID("/a"), Hint: "first"}, workloadserver.Identity{SVID: ca.SVID("/b"), Hint: "second"})
	dir := t.TempDir()
	got := svid(t, "fetch", "-socket", api.Config().Address, "-dir", dir, "-hint", "second", "-mode", "0640", "-jwt-bundles", "-json",
		"-cert-name", "tls.crt", "-key-name", "tls.key", "-bundle-name", "ca.crt", "-jwt", "https://db?a=b=x.token")
	require.Equal(t, 0, got.code, got.errOut)
	var shown struct {
		ID    spiffe.ID `json:"spiffe_id"`
		Files []string
	}
	require.NoError(t, json.Unmarshal([]byte(got.out), &shown))
	assert.Equal(t, "spiffe://example.org/b", shown.ID.String())
	assert.Equal(t, []string{"bundles.json", "ca.crt", "tls.crt", "tls.key", "x.token"}, shown.Files)
	info := must.Get(os.Stat(filepath.Join(dir, "tls.key")))(t)
	if runtime.GOOS != "windows" {
		assert.Equal(t, fs.FileMode(0o640), info.Mode())
	}
	set := must.Get(spiffe.ParseBundleMap([]byte(read(t, dir, "bundles.json"))))(t)
	assert.NotEmpty(t, must.Get(set.Bundle(ca.TrustDomain()))(t).Contents().JWTAuthorities)

	got = svid(t, "fetch", "-socket", api.Config().Address, "-dir", dir)
	require.Equal(t, 0, got.code, got.all())
	names := must.Get(filepath.Glob(filepath.Join(dir, "[a-z]*")))(t)
	assert.Len(t, names, 4, "the default names alone: %v", names)
}

func TestFetchFails(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, ca, "/web")
	api.Deny()
	dir := t.TempDir()
	got := svid(t, "fetch", "-socket", api.Config().Address, "-dir", dir, "-timeout", "700ms")
	assert.Equal(t, 1, got.code, "denied is an answer")
	assert.Contains(t, got.errOut, "told to deny")
	api.Mend()
	api.Hang()
	got = svid(t, "fetch", "-socket", api.Config().Address, "-dir", dir, "-timeout", "200ms")
	assert.Equal(t, 3, got.code, "silence is none")
	assert.Contains(t, got.errOut, "see -timeout")
	got = svid(t, "fetch", "-socket", "unix:///nowhere/api.sock", "-dir", dir, "-timeout", "200ms")
	assert.Equal(t, 3, got.code)
	assert.Contains(t, got.errOut, "no such file")
	api.Mend()

	require.NoError(t, os.WriteFile(filepath.Join(dir, "bundle.pem"), []byte("mine"), 0o644))
	got = svid(t, "fetch", "-socket", api.Config().Address, "-dir", dir)
	assert.Equal(t, 3, got.code)
	assert.Contains(t, got.errOut, "was not made by this program")
	assert.Equal(t, "mine", read(t, dir, "bundle.pem"))
	require.NoFileExists(t, filepath.Join(dir, "svid-key.pem"))
	if runtime.GOOS != "windows" {
		open := filepath.Join(t.TempDir(), "open")
		require.NoError(t, os.Mkdir(open, 0o700))
		require.NoError(t, os.Chmod(open, 0o777))
		got = svid(t, "fetch", "-socket", api.Config().Address, "-dir", open)
		assert.Equal(t, 3, got.code)
		assert.Contains(t, got.errOut, "chmod")
	}
	require.NoError(t, os.Remove(filepath.Join(dir, "bundle.pem")))
	_, stop := watching(t, "-socket", api.Config().Address, "-dir", dir)
	defer stop()
	eventually(t, written(dir), "the files of another program")
	got = svid(t, "fetch", "-socket", api.Config().Address, "-dir", dir)
	assert.Equal(t, 3, got.code)
	assert.Contains(t, got.errOut, "another program writes")
}

// watching starts watch, until stop is called, which returns what it has shown.
func watching(t *testing.T, args ...string) (errOut *buffer, stop func() outcome) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var out buffer
	errOut = new(buffer)
	a := &app{in: strings.NewReader(""), out: &out, errOut: errOut, getenv: env{}.get, retry: 20 * time.Millisecond}
	done := make(chan int, 1)
	go func() { done <- a.run(ctx, append([]string{"watch"}, args...)) }()
	ended := false
	stop = func() outcome {
		if ended {
			return outcome{}
		}
		ended = true
		cancel()
		return outcome{<-done, out.String(), errOut.String()}
	}
	t.Cleanup(func() { stop() })
	return errOut, stop
}

const soon = 20 * time.Second

// eventually waits until f is true.
func eventually(t testing.TB, f func() bool, what string) {
	t.Helper()
	require.Eventually(t, f, soon, 5*time.Millisecond, what)
}

// written reports whether all names are there. The last is svid.pem, as they are made in their order.
func written(dir string) func() bool {
	return func() bool { _, err := os.Stat(filepath.Join(dir, "svid.pem")); return err == nil }
}

// A reader of the files sees a certificate with its key, and every name, at all times, while the identity is renewed
// without a pause.
func TestWatchPair(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, ca, "/web")
	dir := t.TempDir()
	_, stop := watching(t, "-socket", api.Config().Address, "-dir", dir, "-json")
	cert, key := filepath.Join(dir, "svid.pem"), filepath.Join(dir, "svid-key.pem")
	eventually(t, written(dir), "the first files")

	var pairs, renewed atomic.Int64
	over := make(chan struct{})
	done := make(chan struct{})
	go func() { // reads the key before and after the certificate: one that is the same has that certificate
		defer close(done)
		last := ""
		for {
			select {
			case <-over:
				return
			default:
			}
			before, err := os.ReadFile(key)
			if !assert.NoError(t, err) {
				return
			}
			certs, err := os.ReadFile(cert)
			if !assert.NoError(t, err) {
				return
			}
			after, err := os.ReadFile(key)
			if !assert.NoError(t, err) {
				return
			}
			if string(before) != string(after) {
				continue
			}
			pairs.Add(1)
			if _, err := spiffe.ParseSVIDPEM(certs, after); !assert.NoError(t, err, "a key with another certificate") {
				return
			}
			if last != string(after) {
				last = string(after)
				renewed.Add(1)
			}
		}
	}()
	for start := time.Now(); time.Since(start) < time.Duration(rounds.Of(200))*time.Millisecond || renewed.Load() <= 5 && time.Since(start) < 10*time.Second; {
		api.Rotate()
		time.Sleep(2 * time.Millisecond)
	}
	close(over)
	<-done
	t.Log(pairs.Load(), "pairs read,", renewed.Load(), "different")
	assert.Greater(t, renewed.Load(), int64(5), "the reader has seen renewals")
	want := must.Get(api.Snapshot().SVID())(t)
	eventually(t, func() bool {
		svid, err := spiffe.ParseSVIDPEM([]byte(read(t, cert)), []byte(read(t, key)))
		return err == nil && svid.Leaf().Equal(want.Leaf())
	}, "the newest identity")
	got := stop()
	assert.Equal(t, 0, got.code)
	for line := range strings.Lines(got.out) {
		assert.True(t, json.Valid([]byte(line)), "one line for each change: %s", line)
	}
	versions := must.Get(filepath.Glob(filepath.Join(dir, "..v-*")))(t)
	assert.LessOrEqual(t, len(versions), 2, "old versions are removed")
}

// A version of the files that is gone before it is listed, as another has taken its place or another program has removed
// it, does not end the command.
func TestWatchVersionGone(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	api := workloadapitest.NewServer(t, spiffetest.NewCA(t, "example.org"), "/web")
	dir := t.TempDir()
	_, stop := watching(t, "-socket", api.Config().Address, "-dir", dir)
	eventually(t, written(dir), "the first files")
	removing, over := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for removing.Err() == nil {
			_ = os.Remove(filepath.Join(dir, "..data"))
		}
	}()
	for range rounds.Of(13) {
		api.Rotate()
		time.Sleep(5 * time.Millisecond)
	}
	over()
	<-done
	api.Rotate()
	want := must.Get(api.Snapshot().SVID())(t)
	eventually(t, func() bool {
		certs, _ := os.ReadFile(filepath.Join(dir, "svid.pem"))
		return bytes.Equal(certs, pki.MarshalCertificatesPEM(want.Chain()...))
	}, "the newest identity")
	assert.Equal(t, 0, stop().code)
}

// While the agent is away, and after it has withdrawn the identity, the files stay.
func TestWatchOutage(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, ca, "/web")
	dir := t.TempDir()
	errOut, stop := watching(t, "-socket", api.Config().Address, "-dir", dir, "-jwt", "db=db.token")
	key := filepath.Join(dir, "svid-key.pem")
	eventually(t, written(dir), "the first files")
	before, token := read(t, key), read(t, dir, "db.token")
	api.Deny()
	eventually(t, func() bool { return strings.Contains(errOut.String(), "withdrawn") }, "the reason")
	assert.Equal(t, before, read(t, key))
	assert.Equal(t, token, read(t, dir, "db.token"))
	api.Rotate()
	api.Mend()
	eventually(t, func() bool { return read(t, key) != before }, "the files after the outage")
	got := stop()
	assert.Equal(t, 0, got.code)
	assert.NotContains(t, got.all(), "PRIVATE")
	assert.NotContains(t, got.all(), token)
}

// Tokens are renewed when half of their life is over, and the private key stays as it is.
func TestWatchTokens(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	source := ca.Source("/web")
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	issuer := must.Get(jwtsvid.NewIssuer(ca.TrustDomain(), "jwt", key, &jwtsvid.IssuerOptions{Lifetime: 2 * time.Second}))(t)
	var broken atomic.Bool
	socket := serve(t, source, &workloadserver.Options{
		IssueJWTSVID: func(ctx context.Context, id spiffe.ID, audience []string) (string, error) {
			if broken.Load() {
				return "", errors.New("broken")
			}
			return issuer.IssueJWTSVID(ctx, id, audience)
		},
	})
	dir := t.TempDir()
	errOut, stop := watching(t, "-socket", socket, "-dir", dir, "-jwt", "db=db.token")
	token := filepath.Join(dir, "db.token")
	eventually(t, written(dir), "the first files")
	first, svidKey := read(t, token), read(t, dir, "svid-key.pem")
	eventually(t, func() bool { return read(t, token) != first }, "the next token")
	broken.Store(true)
	eventually(t, func() bool { return strings.Contains(errOut.String(), `JWT-SVID for \"db\"`) }, "the reason")
	last := read(t, token)
	assert.Equal(t, svidKey, read(t, dir, "svid-key.pem"))
	source.Renew()
	eventually(t, func() bool { return read(t, dir, "svid-key.pem") != svidKey }, "the identity is renewed without tokens")
	assert.Equal(t, last, read(t, token), "the last token stays")
	assert.Equal(t, 0, stop().code)
}

// The command runs after each change, knows the directory, and sees the new files.
func TestWatchExec(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, ca, "/ns/prod/sa/web")
	base := t.TempDir()
	dir, record := filepath.Join(base, "identity"), filepath.Join(base, "log")
	args := []string{"-socket", api.Config().Address, "-dir", dir, "-exec", "cat $SVID_DIR/svid.pem >>" + record}
	_, stop := watching(t, args...)
	logged := func() string { data, _ := os.ReadFile(record); return string(data) }
	eventually(t, func() bool { return strings.Count(logged(), "BEGIN") == 1 }, "the first")
	api.Rotate()
	eventually(t, func() bool { return strings.Count(logged(), "BEGIN") == 2 }, "the second")
	assert.True(t, strings.HasSuffix(logged(), read(t, dir, "svid.pem")))
	got := stop()
	require.Equal(t, 0, got.code, got.errOut)
	settledGolden(t, "watch", got, append([]string{"watch"}, args...),
		api.Config().Address, "unix:///run/agent/api.sock", "cat "+"$SVID_DIR/svid.pem >>"+record, "nginx -s reload", dir, "/run/identity")
}

// A command that fails is reported and runs again; commands do not overlap.
func TestWatchExecFails(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, ca, "/web")
	dir, record := t.TempDir(), filepath.Join(t.TempDir(), "log")
	errOut, stop := watching(t, "-socket", api.Config().Address, "-dir", dir, "-exec",
		"echo begin >>"+record+"; sleep 0.05; echo end >>"+record+"; test $(grep -c end "+record+") -gt 2")
	logged := func() string { data, _ := os.ReadFile(record); return string(data) }
	eventually(t, func() bool { return strings.Count(logged(), "end") >= 3 }, "the third attempt")
	for range 3 {
		api.Rotate()
		time.Sleep(10 * time.Millisecond)
	}
	eventually(t, func() bool { return strings.Count(logged(), "end") >= 4 }, "one after the changes")
	stop()
	assert.Equal(t, 2, strings.Count(errOut.String(), "the command failed"))
	assert.Contains(t, errOut.String(), "exit status 1")
	assert.NotContains(t, logged(), "begin\nbegin")
}

// A command that does not end is killed, with what it has started.
func TestExecBounded(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("there are no process groups")
	}
	ca := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, ca, "/web")
	pid := filepath.Join(t.TempDir(), "pid")
	got := svid(t, "fetch", "-socket", api.Config().Address, "-dir", t.TempDir(), "-exec-timeout", "300ms", "-exec", "sleep 300 & echo $! >"+pid+"; sleep 300")
	assert.Equal(t, 1, got.code)
	assert.Contains(t, got.errOut, "killed after 300ms")
	child := strings.TrimSpace(read(t, pid))
	eventually(t, func() bool { // it is gone, or a zombie that its new parent has not collected
		stat, err := os.ReadFile("/proc/" + child + "/stat")
		return err != nil || strings.Contains(string(stat), ") Z ")
	}, "the child is killed")
}

// tlsServer is an HTTPS server that requires an identity.
func tlsServer(t *testing.T, self spiffe.SVIDSource, peers spiffe.BundleSource) string {
	t.Helper()
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: self, Peers: peers, Allow: spiffe.AllowAnyPeer()}))(t)
	config := must.Get(endpoint.ServerConfig())(t)
	spiffetest.StartTLS(server, config)
	t.Cleanup(server.Close)
	return server.Listener.Addr().String()
}

func TestLive(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, ca, "/ns/prod/sa/web")
	addr := tlsServer(t, ca.SVID("/ns/prod/sa/db"), ca.Bundle())
	args := []string{"inspect", "-socket", api.Config().Address, "-allow", "spiffe://example.org/ns/prod/sa/db", addr}
	got := svid(t, args...)
	require.Equal(t, 0, got.code, got.all())
	assert.Contains(t, got.out, "the server accepts our identity")
	settledGolden(t, "inspect-live", got, args, api.Config().Address, "unix:///run/agent/api.sock")
}

func TestLiveRefused(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	addr := tlsServer(t, ca.SVID("/ns/prod/sa/db"), ca.Bundle())
	bundle := filepath.Join(t.TempDir(), "roots.pem")
	require.NoError(t, os.WriteFile(bundle, spiffetest.NewCA(t, "example.org").Bundle().MarshalPEM(), 0o644))
	args := []string{"verify", "-bundle", bundle, "-allow", "*", addr}
	got := svid(t, args...)
	require.Equal(t, 1, got.code, got.all())
	settledGolden(t, "verify-live", got, args, bundle, "roots.pem")
}

// A file is judged by the bundles of an agent, a token too.
func TestVerifyByAgent(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, ca, "/web")
	dir := t.TempDir()
	require.Equal(t, 0, svid(t, "fetch", "-socket", api.Config().Address, "-dir", dir, "-jwt", "db=db.token").code)
	for _, name := range []string{"svid.pem", "db.token"} {
		got := svid(t, "verify", "-socket", api.Config().Address, "-allow", "spiffe://example.org/web", "-audience", "db", filepath.Join(dir, name))
		assert.Equal(t, 0, got.code, got.all())
		assert.Contains(t, got.out, "accepted")
	}
	got := svid(t, "verify", "-socket", api.Config().Address, "-allow", "*", "testdata/web.pem")
	assert.Equal(t, 1, got.code)
	got = svid(t, "verify", "-socket", "unix:///nowhere/api.sock", "-timeout", "100ms", "-allow", "*", "testdata/web.pem")
	assert.Equal(t, 3, got.code, got.all())
}

func TestLivePeers(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	dir := t.TempDir()
	identity := func(name string, s *spiffe.SVID) []string {
		certs, key := must.Get2(s.MarshalPEM())(t)
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), append(certs, key...), 0o600))
		return []string{"inspect", "-cert", filepath.Join(dir, name), "-key", filepath.Join(dir, name)}
	}
	addr := tlsServer(t, ca.SVID("/db"), ca.Bundle())
	good, other := identity("good", ca.SVID("/web")), identity("other", spiffetest.NewCA(t, "other.test").SVID("/web"))

	open := httptest.NewUnstartedServer(http.NotFoundHandler()) // an ordinary web server
	open.StartTLS()
	t.Cleanup(open.Close)
	chain, key := ca.Certificate("/db")
	optional := httptest.NewUnstartedServer(http.NotFoundHandler()) // asks, and needs none
	optional.TLS = spiffetest.TLSConfig(chain, key)
	optional.TLS.ClientAuth = tls.RequestClientCert
	optional.StartTLS()
	t.Cleanup(optional.Close)
	mail, err := net.Listen("tcp", "127.0.0.1:0") // answers, and speaks no TLS
	require.NoError(t, err)
	t.Cleanup(func() { _ = mail.Close() })
	go func() {
		for conn, err := mail.Accept(); err == nil; conn, err = mail.Accept() {
			_, _ = io.WriteString(conn, "220 mail.test ESMTP\r\n")
		}
	}()
	mute := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { _ = mute.Close() })

	for _, c := range []struct {
		name string
		args []string
		code int
		want string
	}{
		{"accepted", append(good, addr), 0, "the server accepts our identity"},
		{"foreign", append(other, addr), 1, "the server refuses our identity: remote error: tls: bad certificate"},
		{"web", []string{"inspect", open.Listener.Addr().String()}, 1, "X5-3]"},
		{"asks for none", []string{"inspect", open.Listener.Addr().String()}, 1, "does not ask for a certificate"},
		{"optional", []string{"inspect", "-json", optional.Listener.Addr().String()}, 0, "does not need one"},
		{"no TLS", []string{"inspect", mail.Addr().String()}, 3, "not look like a TLS handshake"},
		{"mute", []string{"inspect", "-timeout", "200ms", mute.Addr().String()}, 3, "no answer in 200ms"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			got := svid(t, c.args...)
			assert.Equal(t, c.code, got.code, got.all())
			assert.Contains(t, got.all(), c.want)
			assert.NotContains(t, got.all(), "PRIVATE")
		})
	}
}

// steps returns the result of each step of doctor.
func steps(t *testing.T, got outcome) map[string]check {
	t.Helper()
	var shown struct{ Checks []check }
	require.NoError(t, json.Unmarshal([]byte(got.out), &shown), got.all())
	require.Len(t, shown.Checks, 7)
	all := make(map[string]check)
	for _, c := range shown.Checks {
		assert.NotEmpty(t, c.Detail, "%v", c)
		if c.Result == failed {
			assert.NotEmpty(t, c.Remedy+c.Detail, "%v", c)
		}
		all[c.Name] = c
	}
	return all
}

// mode is that of a socket, which the umask decides.
func mode(t *testing.T, socket string) string {
	t.Helper()
	return must.Get(os.Lstat(socket))(t).Mode().String()
}

func TestDoctor(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	ca.Federate(spiffetest.NewCA(t, "partner.test").Bundle())
	api := workloadapitest.NewServer(t, ca, "/ns/prod/sa/web")
	got := svidWith(t.Context(), env{workloadapi.SocketEnv: api.Config().Address}, "", "doctor")
	require.Equal(t, 0, got.code, got.all())
	socket := strings.TrimPrefix(api.Config().Address, "unix://")
	settledGolden(t, "doctor", got, []string{"doctor"}, socket, "/run/agent/api.sock", mode(t, socket), "Srwxrwxrwx", "less than 2s", "less than 1s")
}

// Doctor goes through the files of a credential folder, where there is one and no agent.
func TestDoctorFolder(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	dir := filepath.Join(t.TempDir(), "identity")
	sink := must.Get(filesink.New(filesink.Config{Source: ca.Source("/ns/prod/sa/web"), Dir: dir, Delivery: true}))(t)
	must.Get(sink.Write())(t)
	got := svidWith(t.Context(), env{"SPIFFE_CREDENTIAL_FOLDER": dir}, "", "doctor", "-json")
	require.Equal(t, 0, got.code, got.all())
	all := steps(t, got)
	require.Equal(t, "SPIFFE_CREDENTIAL_FOLDER is "+dir, all["environment"].Detail)
	require.Equal(t, skipped, all["socket"].Result)
	require.Contains(t, all["permission"].Detail, "may read the files")
	require.Equal(t, "spiffe://example.org/ns/prod/sa/web", all["identity"].Detail)
	for _, step := range []string{"bundle", "expiry", "clock"} {
		require.Equal(t, ok, all[step].Result, step)
	}

	require.NoError(t, os.Remove(filepath.Join(dir, "example.org.spiffe-trust-bundle.x509.pem")))
	got = svidWith(t.Context(), env{"SPIFFE_CREDENTIAL_FOLDER": dir}, "", "doctor", "-json", "-timeout", "500ms")
	require.Equal(t, 1, got.code, got.all())
	require.Contains(t, steps(t, got)["permission"].Detail, "example.org.spiffe-trust-bundle.x509.pem")
	require.Contains(t, steps(t, got)["permission"].Remedy, "clusterTrustBundle")
	api := workloadapitest.NewServer(t, ca, "/ns/prod/sa/web")
	got = svidWith(t.Context(), env{"SPIFFE_CREDENTIAL_FOLDER": dir, workloadapi.SocketEnv: api.Config().Address}, "", "doctor", "-json")
	require.Equal(t, 0, got.code, "an agent comes first: %s", got.all())
}

func TestDoctorDenied(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, ca, "/ns/prod/sa/web")
	api.Deny()
	args := []string{"doctor", "-socket", api.Config().Address}
	got := svid(t, args...)
	require.Equal(t, 1, got.code, got.all())
	socket := strings.TrimPrefix(api.Config().Address, "unix://")
	settledGolden(t, "doctor-denied", got, args, socket, "/run/agent/api.sock", mode(t, socket), "Srwxrwxrwx")
}

// noSecrets is a source of SDS without any.
type noSecrets struct{}

func (noSecrets) GenerateSecret(context.Context, string) (*pki.Secret, error) {
	return nil, fs.ErrNotExist
}
func (noSecrets) Subscribe(func(string)) func() { return func() {} }

// Each step fails for its own reason, and says what helps.
func TestDoctorSteps(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	dir := must.Get(os.MkdirTemp("", "doc"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	dead := filepath.Join(dir, "dead.sock")
	l := must.Get(net.ListenUnix("unix", &net.UnixAddr{Name: dead, Net: "unix"}))(t)
	l.SetUnlinkOnClose(false)
	require.NoError(t, l.Close())
	closed := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	require.NoError(t, closed.Close())
	hanging := workloadapitest.NewServer(t, ca, "/web")
	hanging.Hang()
	garbled := workloadapitest.NewServer(t, ca, "/web")
	garbled.Garble()
	expired := workloadapitest.NewServer(t, ca, "/web")
	expired.ExpireIn(-time.Minute)
	ending := workloadapitest.NewServer(t, ca, "/web")
	ending.SetIdentities(workloadserver.Identity{SVID: ca.SVID("/web", func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(5*time.Minute)
	})})

	other := must.Get(sds.NewHandler(sdssource.FromIdentity(ca.Source("/web")), nil))(t)
	envoys := serveHandler(t, other)
	silent := must.Get(sds.NewHandler(noSecrets{}, nil))(t)

	for _, c := range []struct {
		socket, step, detail, remedy string
	}{
		{envoys, "identity", "this is SDS, not the Workload API", "set the address of the Workload API"},
		{serveHandler(t, silent), "identity", "this is SDS, not the Workload API", "set the address of the Workload API"},
		{serveHandler(t, http.NotFoundHandler()), "identity", "FetchX509SVID", "another API: set the address of the Workload API"},
		{"", "environment", "is not set", "set it to"},
		{"/run/agent.sock", "environment", "write unix:///run/agent.sock", ""},
		{"unix://" + dir + "/none", "socket", "there is nothing at", "mount"},
		{"unix://" + file, "socket", "is not a socket", "mount the directory"},
		{"unix://" + dir, "socket", "is not a socket", "mount the directory"},
		{"unix://" + dead, "permission", "refused", "start the agent"},
		{"tcp://" + closed.Addr().String(), "permission", "refused", "listens"},
		{hanging.Config().Address, "identity", "no answer in 1s", "silent"},
		{garbled.Config().Address, "identity", "FetchX509SVID", "log of the agent"},
		{expired.Config().Address, "expiry", "has expired", "reaches its server"},
		{ending.Config().Address, "expiry", "are left", "renewed"},
	} {
		timeout := "20s"
		if c.socket == hanging.Config().Address {
			timeout = "1s"
		}
		got := svid(t, "doctor", "-json", "-timeout", timeout, "-socket", c.socket)
		assert.Equal(t, 1, got.code, c.socket)
		step := steps(t, got)[c.step]
		assert.Equal(t, failed, step.Result, "%s: %v", c.socket, got.out)
		assert.Contains(t, step.Detail, c.detail)
		assert.Contains(t, step.Remedy, c.remedy, step.Detail)
	}
}

// serve serves the Workload API on a Unix socket.
func serve(t *testing.T, p workloadserver.Provider, opts *workloadserver.Options) (address string) {
	t.Helper()
	h := must.Get(workloadserver.NewHandler(p, opts))(t)
	address = serveHandler(t, h)
	t.Cleanup(func() { _ = h.Close() })
	return address
}

// serveHandler serves on a Unix socket.
func serveHandler(t *testing.T, h http.Handler) (address string) {
	t.Helper()
	dir := must.Get(os.MkdirTemp("", "svid"))(t)
	server := &unixsocket.Server{Path: filepath.Join(dir, "api.sock"), Handler: h}
	require.NoError(t, server.Listen())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { _ = server.Run(ctx); close(done) }()
	t.Cleanup(func() {
		cancel()
		<-done
		_ = os.RemoveAll(dir)
	})
	return "unix://" + server.Path
}

// An agent that permits no token for an audience has answered: the exit code is 1, and the text names the audience.
func TestFetchAudience(t *testing.T) {
	t.Parallel()
	snap := must.Get(spiffetest.NewCA(t, "example.org").Source("/web").Snapshot())(t)
	for _, c := range []struct {
		err  error
		code int
		says string
	}{
		{workloadapi.ErrDenied, exitNo, `for the audience [\"bank\"]: no token for this caller`},
		{errors.New("broken"), exitUnknown, "cannot issue tokens now"},
	} {
		socket := serve(t, fixed{snap}, &workloadserver.Options{
			IssueJWTSVID: func(context.Context, spiffe.ID, []string) (string, error) { return "", c.err },
		})
		got := svid(t, "fetch", "-socket", socket, "-dir", t.TempDir(), "-jwt", "bank=bank.token")
		assert.Equal(t, c.code, got.code, got.errOut)
		assert.Contains(t, strings.ReplaceAll(got.errOut, `"`, `\"`), c.says)
		assert.NotContains(t, got.errOut, "register")
	}
}

// The clock of the issuer is in its tokens.
func TestDoctorClock(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	snap := must.Get(ca.Source("/web").Snapshot())(t)
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	for _, c := range []struct {
		ahead  time.Duration
		want   result
		detail string
	}{
		{0, ok, "less than"},
		{time.Hour, failed, "behind the issuer's"},
		{-time.Hour, failed, "ahead of the issuer's"},
	} {
		issuer := must.Get(jwtsvid.NewIssuer(ca.TrustDomain(), "jwt", key, &jwtsvid.IssuerOptions{
			Now: func() time.Time { return time.Now().Add(c.ahead) },
		}))(t)
		socket := serve(t, fixed{snap}, &workloadserver.Options{IssueJWTSVID: issuer.IssueJWTSVID})
		step := steps(t, svid(t, "doctor", "-json", "-socket", socket))["clock"]
		assert.Equal(t, c.want, step.Result, "%v", step)
		assert.Contains(t, step.Detail, c.detail)
	}
	socket := serve(t, fixed{snap}, nil) // no tokens: the certificate has to do
	got := svid(t, "doctor", "-json", "-socket", socket)
	assert.Equal(t, 0, got.code)
	assert.Contains(t, steps(t, got)["clock"].Detail, "no token to compare with")

	for err, want := range map[error]result{workloadserver.ErrDenied: ok, errors.New("the server is away"): failed} {
		socket := serve(t, fixed{snap}, &workloadserver.Options{
			IssueJWTSVID: func(context.Context, spiffe.ID, []string) (string, error) { return "", err },
		})
		step := steps(t, svid(t, "doctor", "-json", "-socket", socket))["clock"]
		assert.Equal(t, want, step.Result, "%v", step)
		assert.Equal(t, want == failed, strings.Contains(step.Remedy, "see whether it reaches its server"), "%v", step)
	}

	early := spiffe.NewSnapshot(ca.SVID("/web", later), snap.Bundles())
	step := steps(t, svid(t, "doctor", "-json", "-socket", serve(t, fixed{early}, nil)))
	assert.Equal(t, failed, step["clock"].Result)
	assert.Contains(t, step["clock"].Remedy, "slow")
}

// A socket that the user may not use is seen by a process without the rights of root.
func TestDoctorPermission(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("there are no modes")
	}
	ca := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, ca, "/web")
	socket := strings.TrimPrefix(api.Config().Address, "unix://")
	require.NoError(t, os.Chmod(filepath.Dir(socket), 0o755))
	require.NoError(t, os.Chmod(socket, 0o600))
	cmd := started(t, "doctor", "-json", "-socket", api.Config().Address)
	if !unprivileged(cmd) {
		require.NoError(t, os.Chmod(socket, 0o000))
	}
	out, err := cmd.Output()
	require.Error(t, err)
	step := steps(t, outcome{out: string(out)})["permission"]
	assert.Equal(t, failed, step.Result, "%s", out)
	assert.Contains(t, step.Remedy, "write permission")
	assert.Contains(t, step.Detail, "may not connect: "+socket+" has mode 0")
	assert.Contains(t, step.Detail, "; "+filepath.Dir(socket)+" has mode 0755 (drwxr-xr-x)")

	if os.Geteuid() != 0 {
		return // only root can be another user
	}
	folder := filepath.Dir(socket)
	require.NoError(t, os.Chmod(folder, 0o700))
	cmd = started(t, "doctor", "-json", "-socket", api.Config().Address)
	unprivileged(cmd)
	out, err = cmd.Output()
	require.Error(t, err)
	step = steps(t, outcome{out: string(out)})["socket"]
	assert.Equal(t, "let this user pass the directory: chmod o+x "+folder, step.Remedy, "%s", out)
	assert.Contains(t, step.Detail, folder+" has mode 0700 (drwx------)")
}

// From a shell: the exit code says how it went, answers come to standard output and everything else to standard
// error, and a signal ends watch as it should.
func TestShell(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("there are no signals")
	}
	api := workloadapitest.NewServer(t, spiffetest.NewCA(t, "example.org"), "/web")
	cmd := started(t, "inspect", "-")
	cmd.Stdin = strings.NewReader(string(readTestdata(t, "roots.pem")))
	out, err := cmd.Output()
	require.Error(t, err)
	assert.Equal(t, 1, cmd.ProcessState.ExitCode(), "roots of the year 2000")
	assert.Contains(t, string(out), "CA certificates")
	assert.NotContains(t, string(out), "\x1b", "not a terminal")
	cmd = started(t, "doctor", "now")
	out, err = cmd.Output()
	require.Error(t, err)
	assert.Equal(t, 2, cmd.ProcessState.ExitCode())
	assert.Empty(t, out)

	dir := t.TempDir()
	cmd = started(t, "watch", "-dir", dir)
	cmd.Env = append(cmd.Env, workloadapi.SocketEnv+"="+api.Config().Address)
	require.NoError(t, cmd.Start())
	eventually(t, written(dir), "the first files")
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	require.NoError(t, cmd.Wait())
}

// The time for the agent is not that of the command.
func TestFetchExec(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("there is no /bin/sh")
	}
	api := workloadapitest.NewServer(t, spiffetest.NewCA(t, "example.org"), "/web")
	dir := t.TempDir()
	got := svid(t, "fetch", "-socket", api.Config().Address, "-dir", dir, "-timeout", "700ms", "-exec", "sleep 0.8; echo done in $SVID_DIR")
	assert.Equal(t, 0, got.code, got.all())
	assert.Equal(t, "done in "+dir+"\n", got.errOut)
	got = svid(t, "fetch", "-socket", api.Config().Address, "-dir", dir, "-exec", "exit 7")
	assert.Equal(t, 1, got.code)
	assert.Contains(t, got.errOut, "exit status 7")
	assert.NotContains(t, got.errOut, ": no\n")
}

// fixed is a Provider that always has the same snapshot.
type fixed struct{ snap *spiffe.Snapshot }

func (f fixed) Snapshot() (*spiffe.Snapshot, error) { return f.snap, nil }
func (f fixed) Changed() <-chan struct{}            { return nil }
