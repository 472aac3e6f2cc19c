package caprogram

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/svidkit/svidkit/caclient"
	caclientistio "github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/examples/ca/caconfig"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
	istiowire "github.com/svidkit/svidkit/internal/test/wire/istioca"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// arguments are those of a server on ports that are free, with its state in dir.
func arguments(dir string, more ...string) []string {
	plugged := filepath.Join(dir, "plugged-in")
	if _, err := os.Stat(plugged); err != nil {
		plugged = ""
	}
	return append([]string{
		"-state-dir", dir, "-create", "-root-ca-dir", plugged,
		"-istio-addr", "127.0.0.1:0", "-linkerd-addr", "127.0.0.1:0", "-bundle-addr", "127.0.0.1:0", "-admin-addr", "127.0.0.1:0",
	}, more...)
}

func newConfig(t testing.TB, dir string, more ...string) *caconfig.Config {
	t.Helper()
	o := must.Get(alone.parse(arguments(dir, more...), env{}.get, io.Discard))(t)
	return o.Config
}

// env is an environment.
type env map[string]string

func (e env) get(name string) string { return e[name] }

// server is a CA that is served.
type server struct {
	c  *caconfig.Config
	ca *caconfig.Authority
	at caserver.Listeners
}

// start serves until the test is over, or stop is called.
func start(t testing.TB, c *caconfig.Config) (s *server, stop func()) {
	t.Helper()
	return startLogged(t, c, t.Output())
}

// startLogged is start with a log of the test's own.
func startLogged(t testing.TB, c *caconfig.Config, out io.Writer) (s *server, stop func()) {
	t.Helper()
	log := slog.New(slog.NewTextHandler(out, nil))
	s = &server{c: c}
	ctx, cancel := context.WithCancel(t.Context())
	up, over := make(chan struct{}), make(chan error, 1)
	go func() {
		over <- c.Serve(ctx, log, func(a *caconfig.Authority, at caserver.Listeners) {
			s.ca, s.at = a, at
			close(up)
		})
	}()
	select {
	case <-up:
	case err := <-over:
		require.NoError(t, err)
	case <-time.After(30 * time.Second):
		require.Fail(t, "the server does not start")
	}
	stop = sync.OnceFunc(func() {
		cancel()
		assert.NoError(t, <-over)
	})
	t.Cleanup(stop)
	return s, stop
}

// shell runs the program as its user does, with one command.
func shell(t testing.TB, in string, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	err := alone.run(t.Context(), args, env{}.get, strings.NewReader(in), &out, io.Discard)
	return out.String(), err
}

func newCSR(t testing.TB) string {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	return string(must.Get(pki.NewCSR(key, pki.CSROptions{}))(t).PEM())
}

// rootsOf returns the current roots in PEM.
func rootsOf(s *server) []byte { return s.ca.Bundle().MarshalPEM() }

// token returns a token of development mode.
func token(t testing.TB, s *server, name string) string {
	t.Helper()
	return string(must.Get(os.ReadFile(s.c.SecretFile))(t)) + ":" + name
}

// codeOf returns the code of an answer.
func codeOf(err error) grpchttp.Code {
	e, _ := errors.AsType[*grpchttp.Error](err)
	if e == nil {
		return grpchttp.OK
	}
	return e.Code
}

func mustSVID(t testing.TB, chain []*x509.Certificate, key crypto.Signer) *spiffe.SVID {
	t.Helper()
	return must.Get(spiffe.NewSVID(chain, key))(t)
}

// istioRequest asks Istio's API for a certificate, as an agent does: with a token, or with an empty
// one if the client presents a certificate. It returns the chain, leaf first, and the roots that came
// with it.
func istioRequest(ctx context.Context, c *http.Client, url string, td spiffe.TrustDomain, token string, key crypto.Signer) (chain, roots []*x509.Certificate, err error) {
	csr, err := pki.NewCSR(key, pki.CSROptions{})
	if err != nil {
		return nil, nil, err
	}
	return istioCSR(ctx, c, url, td, token, csr)
}

func istioCSR(ctx context.Context, c *http.Client, url string, td spiffe.TrustDomain, token string, csr *pki.CSR) (chain, roots []*x509.Certificate, err error) {
	client, err := caclientistio.New(caclientistio.Options{Endpoint: caclient.Endpoint{
		URL: url, HTTPClient: c, TrustDomain: td,
		Token: func(context.Context) (string, error) { return token, nil },
	}})
	if err != nil {
		return nil, nil, err
	}
	if chain, err = client.Sign(ctx, csr, 0); err != nil {
		return nil, nil, err
	}
	set, err := client.FetchBundles(ctx)
	if err != nil {
		return nil, nil, err
	}
	b, err := set.Bundle(td)
	if err != nil {
		return nil, nil, err
	}
	return chain, slices.Collect(b.X509Authorities()), nil
}

// certify asks Linkerd's API for a certificate for name, as a proxy does and without the checks of package
// caclient/linkerd, and returns the chain, leaf first.
func certify(ctx context.Context, c *http.Client, url, token, name string, csr *pki.CSR) ([]*x509.Certificate, error) {
	request, err := protofield.Write(func(w *protofield.Writer) {
		w.Text(1, name)
		w.Bytes(2, []byte(token))
		w.Bytes(3, csr.DER())
	})
	if err != nil {
		return nil, err
	}
	response, err := grpchttp.NewClient(c, url, 1<<20).Unary(ctx, linkerd.Certify, nil, request)
	if err != nil {
		return nil, err
	}
	var chain []byte
	err = protofield.Read(response, func(f *protofield.Field) {
		if f.Number == 1 || f.Number == 2 { // the leaf, the intermediates
			chain = append(chain, f.Data...)
		}
	})
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificates(chain)
}

// proxyCSR returns a request as a Linkerd proxy makes it.
func proxyCSR(t testing.TB, name string) *pki.CSR {
	t.Helper()
	_, csr := must.Get2(newRequest(pki.DNSSAN(name)))(t)
	return csr
}

// checkLinkerd verifies a chain as Linkerd's proxies do: by the name, against the trust anchors.
func checkLinkerd(chain []*x509.Certificate, name string, b *spiffe.Bundle) error {
	between := x509.NewCertPool()
	for _, cert := range chain[1:] {
		between.AddCert(cert)
	}
	return must.Err(chain[0].Verify(x509.VerifyOptions{
		DNSName: name, Roots: b.CertPool(), Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
	}))
}

// requireUnauthenticated says that the CA does not authenticate a caller with that token.
func requireUnauthenticated(t testing.TB, err error, token string) {
	t.Helper()
	e, ok := errors.AsType[*caclient.Error](err)
	require.True(t, ok, "%q: %v", token, err)
	require.Equal(t, caclient.ErrUnauthenticated, e.Kind, "%q: %v", token, err)
}

// audited returns the serial numbers in the audit log of c, which must be in order.
func audited(t testing.TB, c *caconfig.Config) map[string]ca.Issuance {
	t.Helper()
	text := must.Get(os.ReadFile(c.AuditLog))(t)
	require.NoError(t, auditlog.Verify(io.Discard, "", "", bytes.NewReader(text)))
	records := make(map[string]ca.Issuance)
	for line := range bytes.Lines(text) {
		var i ca.Issuance
		require.NoError(t, json.Unmarshal(line, &i))
		if i.Kind == "" { // a change of keys
			continue
		}
		_, twice := records[i.Serial]
		require.False(t, twice, i.Serial)
		records[i.Serial] = i
	}
	return records
}

// The demo ends by itself and says what it did.
func TestDemo(t *testing.T) {
	t.Parallel()
	rounds.Slow(t)
	var out bytes.Buffer
	require.NoError(t, demo(t.Context(), spiffe.MustParseTrustDomain("cluster.local"), 3*time.Second, &out), out.String())
	for _, want := range []string{
		"DEVELOPMENT ONLY",
		"demo/web is spiffe://cluster.local/ns/demo/sa/web",
		"by its certificate instead of a token: spiffe://cluster.local/ns/demo/sa/web",
		"demo/db is db.demo.serviceaccount.identity.linkerd.cluster.local",
		"elsewhere.test/web is refused",
		"bundle 2", "retiring, leaves the bundle at", "health: 200 OK", "the audit log has",
	} {
		assert.Contains(t, out.String(), want)
	}
	assert.Equal(t, 2, strings.Count(out.String(), "certificates are signed by root"), "the first and the new one")
}

// The demo ends early, without an error, when it is told to.
func TestDemoInterrupted(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer time.AfterFunc(time.Second, cancel).Stop() // as a signal does: a dial may see a deadline before its context does
	require.NoError(t, alone.run(ctx, []string{"-demo"}, env{}.get, nil, io.Discard, io.Discard))
}

// A server without flags but for its ports: both APIs, bundle, metrics and health, from one CA that
// is there again after a restart.
func TestServer(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	c := newConfig(t, t.TempDir())
	s, stop := start(t, c)
	root := must.Get(os.ReadFile(c.RootsFile))(t)
	bundle := must.Get(spiffe.ParseBundlePEM(c.CA.TrustDomain, root))(t)
	client := newClient(bundle, nil)
	defer client.CloseIdleConnections()

	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	chain, roots, err := istioRequest(t.Context(), client, "https://"+s.at.Istio.Addr().String(), s.c.CA.TrustDomain, token(t, s, "demo/web"), key)
	require.NoError(t, err)
	require.Equal(t, "spiffe://cluster.local/ns/demo/sa/web", chain[0].URIs[0].String())
	require.WithinDuration(t, time.Now().Add(time.Hour), chain[0].NotAfter, time.Minute)
	require.Equal(t, pki.MarshalCertificatesPEM(roots...), root)
	for _, name := range []string{"", "x", "spiffe://elsewhere.test/web", "spiffe://cluster.local", "a/b/c", "../b", "/", "a/"} {
		for _, token := range []string{name, token(t, s, name)} {
			_, _, err := istioRequest(t.Context(), client, "https://"+s.at.Istio.Addr().String(), s.c.CA.TrustDomain, token, key)
			requireUnauthenticated(t, err, token)
		}
	}
	_, _, err = istioRequest(t.Context(), client, "https://"+s.at.Istio.Addr().String(), s.c.CA.TrustDomain, "demo/web", key)
	requireUnauthenticated(t, err, "the name without the secret")

	certified := newClient(bundle, mustSVID(t, chain, key))
	defer certified.CloseIdleConnections()
	again, _, err := istioRequest(t.Context(), certified, "https://"+s.at.Istio.Addr().String(), s.c.CA.TrustDomain, "", key)
	require.NoError(t, err)
	require.Equal(t, chain[0].URIs, again[0].URIs)

	const name = "db.demo.serviceaccount.identity.linkerd.cluster.local"
	proxied, err := certify(t.Context(), client, "https://"+s.at.Linkerd.Addr().String(), token(t, s, "demo/db"), name, proxyCSR(t, name))
	require.NoError(t, err)
	require.NoError(t, checkLinkerd(proxied, name, bundle))
	_, err = certify(t.Context(), client, "https://"+s.at.Linkerd.Addr().String(), token(t, s, "demo/web"), name, proxyCSR(t, name))
	require.Equal(t, grpchttp.FailedPrecondition, codeOf(err), err)
	for _, bad := range []string{token(t, s, "spiffe://cluster.local/other"), "demo/db"} {
		_, err = certify(t.Context(), client, "https://"+s.at.Linkerd.Addr().String(), bad, name, proxyCSR(t, name))
		require.Equal(t, grpchttp.InvalidArgument, codeOf(err), err)
	}

	fetched := must.Get(federation.Fetch(t.Context(), federation.Relationship{
		TrustDomain: c.CA.TrustDomain, URL: "https://" + s.at.Bundle.Addr().String() + "/",
		Profile: federation.SPIFFE{EndpointID: spiffe.MustParseID("spiffe://cluster.local/ns/istio-system/sa/svidkit-ca"), Initial: bundle},
	}, nil))(t)
	sequence, _ := fetched.Sequence()
	require.EqualValues(t, 1, sequence)

	admin := "http://" + s.at.Admin.Addr().String()
	for path, want := range map[string]string{
		"/live": "ok", "/ping": "ok", "/healthz/live": "ok", "/ready": "ok", "/healthz/ready": "ok",
		"/": ": active since", "/status": "active since", "/root-cert.pem": string(root),
		"/metrics": "citadel_server_success_cert_issuance_count 2",
	} {
		status, body := programtest.Page(t, admin+path)
		assert.Equal(t, http.StatusOK, status, path)
		assert.Contains(t, body, want, path)
	}
	_, metrics := programtest.Page(t, admin+"/metrics")
	must.Get(metricstest.Page(metrics))(t)
	assert.Contains(t, metrics, "issuer_cert_ttl_seconds")
	assert.NotContains(t, metrics, "# HELP citadel_server_csr_count citadel_server_csr_count")
	status, _ := programtest.Page(t, admin+"/nothing")
	assert.Equal(t, http.StatusNotFound, status)

	stop()
	require.Error(t, must.Err(net.DialTimeout("tcp", s.at.Istio.Addr().String(), time.Second)), "the port is closed")
	records := audited(t, c)
	for _, cert := range []*x509.Certificate{chain[0], again[0], proxied[0]} {
		require.Contains(t, records, cert.SerialNumber.Text(16))
	}
	require.Equal(t, "developer", records[chain[0].SerialNumber.Text(16)].Method)
	require.Equal(t, "client-certificate", records[again[0].SerialNumber.Text(16)].Method)

	later, _ := start(t, c)
	require.Equal(t, string(root), string(rootsOf(later)), "the same CA")
}

// Without -shorten-ttl it is refused, with both lifetimes, and the flag and the variable of the limit.
func TestAgentOfADayRefused(t *testing.T) {
	t.Parallel()
	s, _ := start(t, newConfig(t, t.TempDir(), "-shorten-ttl=false"))
	client := newClient(s.ca.Bundle(), nil)
	defer client.CloseIdleConnections()
	agent := must.Get(caclientistio.New(caclientistio.Options{Endpoint: caclient.Endpoint{
		URL: "https://" + s.at.Istio.Addr().String(), HTTPClient: client, TrustDomain: s.c.CA.TrustDomain,
		Token: func(context.Context) (string, error) { return token(t, s, "demo/web"), nil },
	}}))(t)
	_, csr := must.Get2(newRequest())(t)
	_, err := agent.Sign(t.Context(), csr, 24*time.Hour)
	require.ErrorIs(t, err, caclient.ErrInvalid)
	require.ErrorContains(t, err, "24h0m0s was asked for, the longest is 1h0m0s (-max-ttl, MAX_WORKLOAD_CERT_TTL)")
}

// What was announced is where it is, and the warning comes first.
func TestAnnounce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	out := &lockedBuffer{}
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan error, 1)
	go func() {
		over <- alone.run(ctx, arguments(dir, "-linkerd-plaintext", "-bundle-addr", "", "-v"), env{}.get, nil, out, io.Discard)
	}()
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "/ready /status") }, time.Minute, 10*time.Millisecond)
	text := out.String()
	assert.True(t, strings.HasPrefix(text, "*** DEVELOPMENT ONLY"), text)
	assert.Contains(t, text, filepath.Join(dir, "ca"))
	assert.Regexp(t, `Istio's API: +https://127\.0\.0\.1:\d+/istio\.v1\.auth`, text)
	assert.Regexp(t, `Linkerd's API: +http://127\.0\.0\.1:\d+/io\.linkerd`, text)
	assert.NotContains(t, text, "bundle endpoint")
	cancel()
	require.NoError(t, <-over)
}

// Without a directory the server makes a temporary one, and says where.
func TestTemporaryState(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	out := &lockedBuffer{}
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan error, 1)
	go func() {
		over <- alone.run(ctx, arguments(""), env{}.get, nil, out, io.Discard)
	}()
	require.Eventually(t, func() bool { return strings.Contains(out.String(), "/ready /status") }, time.Minute, 10*time.Millisecond)
	cancel()
	require.NoError(t, <-over)
	matches := must.Get(filepath.Glob(filepath.Join(os.TempDir(), "svidkit-ca*", "audit.jsonl")))(t)
	require.Len(t, matches, 1)
	require.Contains(t, out.String(), matches[0])
}

type lockedBuffer = logtest.Buffer

// A port that is taken, or a state that cannot be used, ends the program with its name.
func TestCannotStart(t *testing.T) {
	t.Parallel()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	dir := t.TempDir()
	err := alone.run(t.Context(), arguments(dir, "-linkerd-addr", l.Addr().String()), env{}.get, nil, io.Discard, io.Discard)
	require.ErrorContains(t, err, "Linkerd's API")
	require.ErrorContains(t, err, l.Addr().String())
	require.ErrorContains(t, err, "-linkerd-addr", "what to change")

	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	err = alone.run(t.Context(), arguments(filepath.Join(file, "below"), "-root-ca-dir", ""), env{}.get, nil, io.Discard, io.Discard)
	require.ErrorContains(t, err, "-state-dir")
	require.ErrorContains(t, alone.run(t.Context(), arguments(dir, "-audit-log", dir), env{}.get, nil, io.Discard, io.Discard), "auditlog")
	require.NoError(t, os.Mkdir(filepath.Join(dir, "plugged-in"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "plugged-in", "ca-cert.pem"), nil, 0o600))
	require.ErrorContains(t, alone.run(t.Context(), arguments(dir), env{}.get, nil, io.Discard, io.Discard), "-root-ca-dir")
	fresh := arguments(t.TempDir(), "-root-ca-dir", filepath.Join(dir, "plugged-in"))
	require.ErrorContains(t, must.Err(shell(t, "", append(fresh, "-status")...)), "-root-ca-dir", "and not that there is no CA")
}

// A directory that this user may not write to, and one that it may not read: the error says as whom, and nothing is left behind.
func TestFolderOfAnother(t *testing.T) {
	t.Parallel()
	if os.Geteuid() <= 0 {
		t.Skip("root may do everything, and Windows has no users of this kind")
	}
	dir := filepath.Join(t.TempDir(), "own")
	require.NoError(t, os.Mkdir(dir, 0o500))
	remedy := fmt.Sprintf("; run this as the user that the directory belongs to (it is user %d now), or name a directory in -state-dir that this one may write to", os.Geteuid())
	_, err := shell(t, "", arguments(filepath.Join(dir, "new"), "-jwt", "db", "-id", "spiffe://cluster.local/web")...)
	require.ErrorContains(t, err, remedy)
	require.ErrorContains(t, alone.run(t.Context(), arguments(filepath.Join(dir, "new")), env{}.get, nil, io.Discard, io.Discard), remedy)
	require.NoDirExists(t, filepath.Join(dir, "new"))
	require.NoError(t, os.Chmod(dir, 0))
	require.ErrorContains(t, must.Err(shell(t, "", arguments(dir, "-status")...)), remedy)
	require.NoError(t, os.Chmod(dir, 0o700))
	require.NoError(t, must.Err(shell(t, "", arguments(filepath.Join(dir, "new"), "-jwt", "db", "-id", "spiffe://cluster.local/web")...)))
}

// From the shell: a request is signed, with or without a server, and a token, and both are audited.
func TestOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := newConfig(t, dir)
	const id = "spiffe://cluster.local/ns/demo/sa/web"
	out := must.Get(shell(t, newCSR(t), arguments(dir, "-once", "-", "-id", id, "-ttl", "1h")...))(t)
	certs := must.Get(pki.ParseCertificatesPEM([]byte(out)))(t)
	require.Len(t, certs, 2, "leaf and root")
	require.NoError(t, certs[0].CheckSignatureFrom(certs[1]))
	require.Equal(t, id, certs[0].URIs[0].String())
	require.WithinDuration(t, time.Now().Add(time.Hour), certs[0].NotAfter, time.Minute)

	start(t, c) // which has the same CA and the same audit log
	file := filepath.Join(dir, "csr.pem")
	require.NoError(t, os.WriteFile(file, []byte(newCSR(t)), 0o600))
	out = must.Get(shell(t, "", arguments(dir, "-once", file, "-id", id)...))(t)
	second := must.Get(pki.ParseCertificatesPEM([]byte(out)))(t)
	require.NoError(t, second[0].CheckSignatureFrom(certs[1]))

	token := must.Get(shell(t, "", arguments(dir, "-jwt", "audience", "-id", id)...))(t)
	authority := must.Get(ca.Open(t.Context(), c.CA, mustStore(t, c)))(t)
	validator := must.Get(jwtsvid.NewValidator(authority.Bundle(), []string{"audience"}, nil))(t)
	require.Equal(t, id, must.Get(validator.Validate(strings.TrimSpace(token)))(t).ID().String())

	records := audited(t, c)
	for _, cert := range []*x509.Certificate{certs[0], second[0]} {
		i := records[cert.SerialNumber.Text(16)]
		require.Equal(t, "command", i.Method)
		require.Equal(t, fmt.Sprintf("uid %d", os.Getuid()), i.Caller)
	}
	require.Len(t, records, 4, "the server's own certificate is the fourth")

	for _, tc := range []struct {
		in   string
		args []string
		want string
	}{
		{"", []string{"-once", "-", "-id", id}, "-once"},
		{"-----BEGIN NONSENSE-----", []string{"-once", "-", "-id", id}, "-once"},
		{string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: []byte{0x30}})), []string{"-once", "-", "-id", id}, "-once"},
		{newCSR(t), []string{"-once", "-", "-id", "web"}, "-id"},
		{newCSR(t), []string{"-once", "-", "-id", "spiffe://elsewhere.test/web"}, "trust domain"},
		{newCSR(t), []string{"-once", "-", "-id", "spiffe://cluster.local"}, "path"},
		{newCSR(t), []string{"-once", "-", "-id", id, "-ttl", "9999h"}, "lifetime"},
		{"", []string{"-once", filepath.Join(dir, "none.pem"), "-id", id}, "none.pem"},
		{"", []string{"-jwt", "audience", "-id", "web"}, "-id"},
	} {
		out, err := shell(t, tc.in, arguments(dir, tc.args...)...)
		require.ErrorContains(t, err, tc.want, tc.args)
		require.Empty(t, out)
	}
}

// What is no request, or has no identity, makes no CA.
func TestOnceBeforeThereIsACA(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "state")
	for _, args := range [][]string{
		{"-once", "-", "-id", "spiffe://cluster.local/x"},
		{"-once", filepath.Join(dir, "none.pem"), "-id", "spiffe://cluster.local/x"},
		{"-once", "-", "-id", "x"},
	} {
		require.Error(t, must.Err(shell(t, "no request", arguments(dir, args...)...)))
		require.NoDirExists(t, dir)
	}
}

// A command that reads standard input ends with its context.
func TestOnceInterrupted(t *testing.T) {
	t.Parallel()
	in, typist := io.Pipe()
	defer typist.Close()
	enough := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	over := make(chan error, 1)
	go func() {
		over <- alone.run(ctx, arguments(t.TempDir(), "-once", "-", "-id", "spiffe://cluster.local/x"), env{}.get, in, io.Discard, io.Discard)
	}()
	_, err := io.WriteString(typist, "-----BEGIN") // it reads
	require.NoError(t, err)
	cancel(enough)
	require.ErrorIs(t, <-over, enough)
}

// A CA with names that Linkerd cannot have serves the rest.
func TestServerWithoutLinkerd(t *testing.T) {
	t.Parallel()
	s, _ := start(t, newConfig(t, t.TempDir(), "-trust-domain", "my_domain", "-linkerd-addr", ""))
	require.Nil(t, s.at.Linkerd)
	status, body := programtest.Page(t, "http://"+s.at.Admin.Addr().String()+"/metrics")
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, body, "citadel_server_csr_count")
	require.NotContains(t, body, "issuer_cert_ttl_seconds")
}

// A directory that cannot be written to does not end the server, and the roots are written when it can.
func TestRootsFile(t *testing.T) {
	t.Parallel()
	rounds.Slow(t)
	_, args := cluster(t) // so that the CA is elsewhere
	c := newConfig(t, filepath.Join(t.TempDir(), "state"), append(args, "-audit-log", "none", "-refresh-hint", "1s", "-propagation", "2s")...)
	s, _ := start(t, c)
	first := must.Get(os.ReadFile(c.RootsFile))(t)
	require.NoError(t, os.RemoveAll(c.StateDir))
	must.Get(s.ca.Own.Rotate(t.Context()))(t)
	require.Eventually(t, func() bool { return !bytes.Equal(rootsOf(s), first) }, time.Minute, 10*time.Millisecond)
	require.Never(t, func() bool { // the server has noticed, and serves
		resp, err := http.Get("http://" + s.at.Admin.Addr().String() + "/ready")
		if err != nil {
			return true
		}
		resp.Body.Close()
		return resp.StatusCode != http.StatusOK
	}, time.Second, 50*time.Millisecond)
	require.NoError(t, os.Mkdir(c.StateDir, 0o700))
	require.Eventually(t, func() bool {
		b, err := os.ReadFile(c.RootsFile)
		return err == nil && bytes.Equal(b, rootsOf(s))
	}, 60*time.Second, 50*time.Millisecond)
}

// TestFolderGone: a CA whose directory is gone stays ready while it signs, and says that and until when.
func TestFolderGone(t *testing.T) {
	t.Parallel()
	rounds.Slow(t)
	c := newConfig(t, filepath.Join(t.TempDir(), "state"), "-create", "-audit-log", "none")
	s, _ := start(t, c)
	ready := "http://" + s.at.Admin.Addr().String() + "/ready"
	code, text := programtest.Page(t, ready)
	require.Equal(t, http.StatusOK, code)
	require.Equal(t, "ok\n", text)
	folder := filepath.Join(c.StateDir, "ca")
	require.NoError(t, os.Rename(folder, folder+".gone"))
	_, err := s.ca.Own.Rotate(t.Context()) // which reads the directory, as Run does now and then
	require.ErrorIs(t, err, ca.ErrUnfit)
	code, text = programtest.Page(t, ready)
	require.Equal(t, http.StatusOK, code)
	require.Regexp(t, `^ok\nstore: .* is gone; .*\nsigns until 20\S+Z if nothing changes\n$`, text)
	require.NoError(t, os.Rename(folder+".gone", folder))
	must.Get(s.ca.Own.Rotate(t.Context()))(t)
	_, text = programtest.Page(t, ready)
	require.Equal(t, "ok\n", text)
}

// TestPrintedProbe: the readiness probe of what -install kubernetes prints takes no replica away that signs, whatever
// becomes of the Secret, and no alert that is critical fires for it.
func TestPrintedProbe(t *testing.T) {
	t.Parallel()
	rounds.Slow(t)
	manifest := printed(t)
	probe := regexp.MustCompile(`readinessProbe: \{httpGet: \{path: (\S+), port: admin\}`).FindStringSubmatch(manifest)
	require.NotNil(t, probe)
	k, args := cluster(t)
	s, _ := start(t, newConfig(t, t.TempDir(), args...))
	at := "http://" + s.at.Admin.Addr().String()
	const secret = "/api/v1/namespaces/istio-system/secrets/istio-ca-secret"
	var fine map[string]any
	require.True(t, k.Get(secret, &fine))
	for name, broken := range map[string]func(){
		"an API server that is away": func() {
			k.Faults(func(r *http.Request) *kubetest.Fault {
				if strings.HasPrefix(r.URL.Path, secret) {
					return &kubetest.Fault{Code: http.StatusInternalServerError, Reason: "InternalError"}
				}
				return nil
			})
		},
		"a Secret of another type": func() {
			other := maps.Clone(fine)
			other["type"] = "Opaque"
			k.Put(secret, other)
		},
		"a record that cannot be read": func() {
			other := maps.Clone(fine)
			other["data"] = map[string]any{"svidkit-state.json": []byte("x")}
			k.Put(secret, other)
		},
	} {
		broken()
		_, err := s.ca.Own.Rotate(t.Context()) // which reads the Secret
		require.Error(t, err, name)
		require.Error(t, s.ca.Own.Health().Store, name)
		code, text := programtest.Page(t, at+probe[1])
		require.Equal(t, http.StatusOK, code, name)
		require.Contains(t, text, "\nstore: ", name)
		require.Contains(t, text, "\nsigns until 20", name)
		_, text = programtest.Page(t, at+"/metrics")
		for _, line := range []string{`svidkit_ready{part="ca"} 1`, "svidkit_ca_signing 1", "svidkit_ca_store_up 0", "svidkit_ca_audit_up 1"} {
			require.Contains(t, text, "\n"+line+"\n", name)
		}
		k.Faults(nil)
		k.Put(secret, fine)
	}
}

// TestPrintedCommands: the commands that -install kubernetes names for operators work with the environment and the flags of the pods
// that it prints, in the namespace of the installation, and what has to stay is on a volume that does.
func TestPrintedCommands(t *testing.T) {
	t.Parallel()
	rounds.Slow(t)
	manifest := printed(t, "namespace=identity", "trust-domain=example.org", "metrics-namespace=watch")
	variables := env{}
	for _, m := range regexp.MustCompile(`(?m)^        - \{name: ([A-Z_]+), value: "(.*)"\}$`).FindAllStringSubmatch(manifest, -1) {
		variables[m[1]] = m[2]
	}
	k, _ := cluster(t)
	state := t.TempDir()
	var serves []string
	for _, m := range regexp.MustCompile(`(?m)^        - (-[a-z-]+)(=\S*)?$`).FindAllStringSubmatch(manifest, -1) {
		switch m[1] {
		case "-istio-addr", "-bundle-addr", "-admin-addr":
			m[2] = "=127.0.0.1:0"
		case "-state-dir":
			require.Equal(t, "=/state", m[2])
			m[2] = "=" + state
		case "-create":
			m[2] = ""
		}
		serves = append(serves, m[1]+m[2])
	}
	o := must.Get(alone.parse(append(serves, "-kubernetes-api", k.URL()), variables.get, io.Discard))(t)
	s, _ := start(t, o.Config)
	var root string
	for _, r := range s.ca.Own.Status().Roots {
		root = r.ID
	}
	lines := regexp.MustCompile(`(?m)^#   kubectl -n (\S+) exec statefulset/ca -- /program (.*)$`).FindAllStringSubmatch(manifest, -1)
	require.Len(t, lines, 2)
	for _, line := range lines {
		require.Equal(t, "identity", line[1])
		args := strings.Fields(strings.NewReplacer("/state", state, "SERIAL", root).Replace(line[2]))
		var out bytes.Buffer
		require.NoError(t, alone.run(t.Context(), append(args, "-kubernetes-api", k.URL()), variables.get, nil, &out, io.Discard), line[0])
		require.Contains(t, out.String(), "CA of example.org, in the Secret identity/istio-ca-secret, bundle ")
		require.Contains(t, out.String(), "\nroot "+root+": active")
	}
	log := must.Get(os.ReadFile(filepath.Join(state, "audit.jsonl")))(t)
	require.Contains(t, string(log), `"event":"tainted","key":"root","serial":"`+root+`"`, "in the audit log of the pod")

	for _, want := range []string{
		"kind: StatefulSet\nmetadata: {name: ca, namespace: identity}", "  volumeClaimTemplates:\n  - metadata: {name: state}\n", "- {name: state, mountPath: /state}",
		"kind: PodDisruptionBudget\nmetadata: {name: ca, namespace: identity}\nspec:\n  maxUnavailable: 1\n  selector: {matchLabels: {app: ca}}\n",
		"kind: NetworkPolicy\nmetadata: {name: ca, namespace: identity}\nspec:\n  podSelector: {matchLabels: {app: ca}}\n  policyTypes: [Ingress]\n",
		"  - from:\n    - namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: watch}}\n    ports:\n    - {port: admin}\n",
		"enableServiceLinks: false",
	} {
		require.Contains(t, manifest, want)
	}
	require.NotContains(t, manifest, "emptyDir")
}

// TestPageBegins: the page begins with what the CA signs, and what it has refused and changed last; a serial number has the form of -status.
func TestPageBegins(t *testing.T) {
	t.Parallel()
	o := must.Get(alone.parse(arguments(t.TempDir()), env{}.get, io.Discard))(t)
	o.refusals = new(refusals)
	log := slog.New(noting{slog.NewTextHandler(io.Discard, nil), o.refusals}).With("a", 1).WithGroup("g")
	s, _ := start(t, o.Config)
	log.Info("istioca: certificate refused", "err", "token of nobody", "peer", "192.0.2.7:1")
	for i := range 30 {
		log.Info("istioca: certificate refused", "err", fmt.Sprint("refusal ", i))
	}
	log.Info("istioca: certificate refused", "err", "the last refusal", "peer", "192.0.2.7:1")
	_, text := programtest.Page(t, "http://"+s.at.Admin.Addr().String()+"/")
	root := s.ca.Own.Status().Roots[0].ID
	at := -1
	for _, part := range []string{"certificates of cluster.local", "serial=" + root + "<", "the last refusal", "root " + root + ": active since", "audit log", ">Roots<"} {
		i := strings.Index(text, part)
		require.Greater(t, i, at, "%s comes after what is before it, in %s", part, text)
		at = i
	}
	require.NotContains(t, text, "token of nobody", "old ones go")
	require.NotContains(t, text, strings.ToUpper(root))
}

// printed returns what -install kubernetes prints.
func printed(t testing.TB, with ...string) string {
	t.Helper()
	args := []string{"-install", "kubernetes", "-with", "image=ca:1"}
	for _, w := range with {
		args = append(args, "-with", w)
	}
	return must.Get(shell(t, "", args...))(t)
}

func mustStore(t testing.TB, c *caconfig.Config) ca.Store {
	t.Helper()
	return must.Get(ca.NewDirStore(filepath.Join(c.StateDir, "ca")))(t)
}

// An operator's commands work on the store, and a server on the same store follows.
func TestOperator(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	rounds.Slow(t)
	short := []string{"-refresh-hint", "1s", "-propagation", "5s"} // time enough for what has to come before the new root signs
	c := newConfig(t, dir, short...)
	for _, args := range [][]string{{"-status"}, {"-rotate"}, {"-taint", "5"}, {"-revoke", "5"}} {
		require.ErrorIs(t, must.Err(shell(t, "", arguments(dir, append(args, short...)...)...)), ca.ErrNoRecord)
	}
	require.NoDirExists(t, filepath.Join(dir, "ca"), "nothing was made")
	require.NoFileExists(t, c.AuditLog)

	s, _ := start(t, c)
	first := s.ca.Own.Status().Roots[0]
	out := must.Get(shell(t, "", arguments(dir, append([]string{"-status"}, short...)...)...))(t)
	require.Contains(t, out, first.ID)
	require.Contains(t, out, "active")

	out = must.Get(shell(t, "", arguments(dir, append([]string{"-rotate"}, short...)...)...))(t)
	require.Contains(t, out, "distributing")
	require.Eventually(t, func() bool { return len(s.ca.Own.Status().Roots) == 2 }, time.Minute, 10*time.Millisecond, "the server follows")
	_, err := shell(t, "", arguments(dir, append([]string{"-rotate"}, short...)...)...)
	require.ErrorIs(t, err, ca.ErrRotating)
	_, err = shell(t, "", arguments(dir, append([]string{"-revoke", first.ID}, short...)...)...)
	require.ErrorContains(t, err, "-now", "it signs")
	require.ErrorIs(t, must.Err(shell(t, "", arguments(dir, append([]string{"-taint", "abcdef"}, short...)...)...)), ca.ErrUnknownKey)

	out = must.Get(shell(t, "", arguments(dir, append([]string{"-taint", first.ID}, short...)...)...))(t)
	require.Contains(t, out, "tainted")
	require.Eventually(t, func() bool { return s.ca.Own.Status().Roots[0].Phase == "retiring" }, time.Minute, 10*time.Millisecond)
	require.Eventually(t, func() bool { // until the server has written down that the other one signs
		r, err := mustStore(t, c).Load(t.Context())
		return err == nil && !bytes.Equal(r.Data()["ca-cert.pem"], pki.MarshalCertificatesPEM(first.Certificate))
	}, time.Minute, 10*time.Millisecond)
	out = must.Get(shell(t, "", arguments(dir, append([]string{"-revoke", first.ID}, short...)...)...))(t)
	require.NotContains(t, out, first.ID)
	require.Eventually(t, func() bool { return len(s.ca.Own.Status().Roots) == 1 }, time.Minute, 10*time.Millisecond)
}

// A key that is known to be stolen is replaced at once, and the operator is told what that costs.
func TestRevokeNow(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	dir := t.TempDir()
	args := []string{"-refresh-hint", "1s", "-propagation", "8s"}
	s, _ := start(t, newConfig(t, dir, args...))
	first := s.ca.Own.Status().Roots[0]
	_, err := shell(t, "", arguments(dir, append(args, "-revoke", first.ID)...)...)
	require.ErrorContains(t, err, "signs")
	out := must.Get(shell(t, "", arguments(dir, append(args, "-revoke", first.ID, "-now")...)...))(t)
	require.Contains(t, out, "root "+first.ID+" is revoked")
	require.Contains(t, out, "signs in its place, and verifiers that have not read the bundle refuse what it signs, until ")
	require.Contains(t, out, "make all workloads renew")
	require.Contains(t, out, "active since")
	require.Eventually(t, func() bool { // the server follows
		roots := s.ca.Own.Status().Roots
		return len(roots) == 1 && roots[0].ID != first.ID
	}, time.Minute, 50*time.Millisecond)
	_, err = shell(t, "", arguments(dir, append(args, "-taint", first.ID, "-now")...)...)
	require.ErrorContains(t, err, "-now: it is for -revoke")
}

// An operator taints the root by a command: from then on what it signed is no proof to the server, on a connection that is
// open as on a new one, and a token is. With -renew-by-certificate=off it never was.
func TestTaintByCommand(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	for _, off := range []bool{false, true} {
		dir := t.TempDir()
		args := []string{"-refresh-hint", "1s", "-propagation", "8s"}
		if off {
			args = append(args, "-renew-by-certificate", "off")
		}
		s, _ := start(t, newConfig(t, dir, args...))
		url := "https://" + s.at.Istio.Addr().String()
		plain := newClient(s.ca.Bundle(), nil)
		defer plain.CloseIdleConnections()
		key := must.Get(pki.NewKey("ecdsa-p256"))(t)
		chain, _, err := istioRequest(t.Context(), plain, url, s.c.CA.TrustDomain, token(t, s, "demo/web"), key)
		require.NoError(t, err)
		thief := newClient(s.ca.Bundle(), mustSVID(t, chain, key))
		defer thief.CloseIdleConnections()
		renew := func() error {
			_, _, err := istioRequest(t.Context(), thief, url, s.c.CA.TrustDomain, "", key)
			return err
		}
		if off {
			requireUnauthenticated(t, renew(), "its certificate alone")
			continue
		}
		require.NoError(t, renew())
		must.Get(shell(t, "", arguments(dir, append(args, "-taint", s.ca.Own.Status().Roots[0].ID)...)...))(t)
		require.Eventually(t, func() bool { return errors.Is(renew(), caclient.ErrUnauthenticated) }, time.Minute, 100*time.Millisecond, "when the server has read the store")
		_, _, err = istioRequest(t.Context(), thief, url, s.c.CA.TrustDomain, token(t, s, "demo/web"), key)
		require.NoError(t, err, "a clean proof")
	}
}

// The audit log says what became of the keys, and which user did it with which command on which host.
func TestKeyEvents(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	_, stop := start(t, newConfig(t, dir))
	stop()
	ids := func() (ids []string) {
		a := must.Get(newConfig(t, dir).Open(t.Context(), caconfig.OpenOptions{ReadOnly: true}))(t)
		defer a.Close()
		for _, r := range a.Own.Status().Roots {
			ids = append(ids, r.ID)
		}
		return ids
	}
	first := ids()[0]
	for _, args := range [][]string{{"-rotate"}, {"-taint", first}, {"-revoke", first, "-now"}} {
		must.Get(shell(t, "", arguments(dir, args...)...))(t, args)
	}
	out := must.Get(shell(t, "", "-verify-audit", filepath.Join(dir, "audit.jsonl")))(t)
	require.Contains(t, out, "are as they were written")

	text := must.Get(os.ReadFile(filepath.Join(dir, "audit.jsonl")))(t)
	host := must.Get(os.Hostname())(t)
	seen := map[string]string{}
	for line := range bytes.Lines(text) {
		var k ca.KeyEvent
		require.NoError(t, json.Unmarshal(line, &k))
		if k.Key == "root" {
			seen[k.Event] = k.Serial
			assert.Equal(t, host, k.Host)
			assert.Equal(t, fmt.Sprint(os.Getuid()), k.UID)
			assert.Contains(t, k.Command, filepath.Base(os.Args[0]))
		}
	}
	for _, event := range []string{"created", "tainted", "revoked"} {
		assert.Equal(t, first, seen[event], event)
	}
	assert.NotEmpty(t, seen["prepared"])
}

// To look, in the middle of a rotation that no server has published, writes nothing and moves no date, however often and late.
func TestStatusWritesNothing(t *testing.T) {
	t.Parallel()
	rounds.Slow(t)
	dir := t.TempDir()
	short := []string{"-refresh-hint", "1s", "-propagation", "10s"}
	c := newConfig(t, dir, short...)
	_, err := shell(t, newCSR(t), arguments(dir, append([]string{"-once", "-", "-id", "spiffe://cluster.local/x"}, short...)...)...)
	require.NoError(t, err)
	must.Get(shell(t, "", arguments(dir, append([]string{"-rotate"}, short...)...)...))(t)
	before := must.Get(mustStore(t, c).Load(t.Context()))(t)
	first := must.Get(shell(t, "", arguments(dir, append([]string{"-status"}, short...)...)...))(t)
	require.Contains(t, first, "distributing, signs from ")
	time.Sleep(4500 * time.Millisecond) // less than three fifths are left, and more than half
	out := must.Get(shell(t, "", arguments(dir, append([]string{"-status"}, short...)...)...))(t)
	require.Equal(t, first, out)
	time.Sleep(6 * time.Second) // its time has come, and there was no server
	out = must.Get(shell(t, "", arguments(dir, append([]string{"-status"}, short...)...)...))(t)
	require.Equal(t, first+"a time here has passed: no server runs on this store, and the next one takes the step, or has a root wait that no peer was told of\n", out)
	require.Equal(t, before.Version, must.Get(mustStore(t, c).Load(t.Context()))(t).Version)
}

// A CA that an operator plugged in is used as it is, and rotates no roots.
func TestPluggedIn(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	plugIn(t, filepath.Join(dir, "plugged-in"))
	require.ErrorContains(t, alone.run(t.Context(), arguments(dir), env{}.get, nil, io.Discard, io.Discard), "-root-ca-dir: there is a CA in")
	require.Contains(t, must.Get(shell(t, "", arguments(dir, "-status")...))(t), "plugged in")
	require.ErrorContains(t, must.Err(shell(t, "", arguments(dir, "-rotate")...)), "the roots are plugged in")

	_, args := cluster(t)
	own := must.Get(newConfig(t, t.TempDir(), args...).Open(t.Context(), caconfig.OpenOptions{}))(t)
	own.Close()
	var log bytes.Buffer
	plugged, err := newConfig(t, dir, args...).Open(t.Context(), caconfig.OpenOptions{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	plugged.Close()
	require.Contains(t, log.String(), "the own CA signs nothing any more", "in a cluster, where the volume says that this is meant")
	s, _ := start(t, newConfig(t, dir, append(args, "-create=false")...))
	bundle := s.ca.Bundle()
	client := newClient(bundle, nil)
	defer client.CloseIdleConnections()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	chain, roots, err := istioRequest(t.Context(), client, "https://"+s.at.Istio.Addr().String(), s.c.CA.TrustDomain, "token-web", key)
	require.NoError(t, err)
	require.Len(t, chain, 2, "leaf and intermediate")
	require.Len(t, roots, 1)
	require.NoError(t, chain[0].CheckSignatureFrom(chain[1]))
	require.NoError(t, chain[1].CheckSignatureFrom(roots[0]))
	const name = "web.demo.serviceaccount.identity.linkerd.cluster.local"
	proxied := must.Get(certify(t.Context(), client, "https://"+s.at.Linkerd.Addr().String(), "token-web", name, proxyCSR(t, name)))(t)
	require.NoError(t, checkLinkerd(proxied, name, bundle))
	require.True(t, proxied[1].Equal(chain[1]))

	token := must.Get(shell(t, "", arguments(dir, append(args, "-jwt", "audience", "-id", "spiffe://cluster.local/x")...)...))(t)
	require.Equal(t, 2, strings.Count(token, "."))
}

// plugIn writes an intermediate CA and its root in the files of Istio.
func plugIn(t testing.TB, dir string) {
	t.Helper()
	td := spiffe.MustParseTrustDomain("cluster.local")
	rootKey := must.Get(pki.NewKey("ecdsa-p256"))(t)
	now := time.Now()
	root, err := pki.NewRoot(rootKey, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(td.ID())}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(24 * time.Hour * 365)})
	require.NoError(t, err)
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	cert := must.Get(root.Issue(pki.CertificateOptions{
		PublicKey: key.Public(), CA: true, Organization: "mesh", SANs: []pki.SAN{pki.IDSAN(td.ID())},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(24 * time.Hour * 30),
	}))(t)
	keyPEM := must.Get(pki.MarshalPrivateKeyPEM(key))(t)
	require.NoError(t, os.MkdirAll(dir, 0o700))
	for name, text := range map[string][]byte{
		"ca-cert.pem": pki.MarshalCertificatesPEM(cert), "ca-key.pem": keyPEM,
		"cert-chain.pem": pki.MarshalCertificatesPEM(cert), "root-cert.pem": pki.MarshalCertificatesPEM(root.Certificate()),
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), text, 0o600))
	}
}

// cluster is an API server that knows two pods by their tokens.
func cluster(t *testing.T) (*kubetest.Server, []string) {
	t.Helper()
	k := kubetest.Start(t)
	allow(k)
	k.TokenReviews(reviews(map[string]string{"token-web": "web", "token-db": "db", "token-tunnel": "tunnel"}))
	return k, []string{"-kubernetes", "-kubernetes-api", k.URL(), "-namespace", "istio-system"}
}

// reviews is an API server that knows these tokens, of service accounts in the namespace demo.
func reviews(accounts map[string]string) func(kubetest.TokenReviewSpec) kubetest.TokenReviewStatus {
	return func(s kubetest.TokenReviewSpec) kubetest.TokenReviewStatus {
		account, ok := accounts[s.Token]
		if !ok {
			return kubetest.TokenReviewStatus{Error: "unknown token"}
		}
		return kubetest.TokenReviewStatus{Authenticated: true, Audiences: s.Audiences, User: kubetest.UserInfo{
			Username: "system:serviceaccount:demo:" + account, Groups: []string{"system:serviceaccounts", "system:serviceaccounts:demo", "system:authenticated"},
			Extra: map[string][]string{"authentication.kubernetes.io/pod-name": {"pod-0"}, "authentication.kubernetes.io/pod-uid": {"uid-0"}},
		}}
	}
}

func allow(k *kubetest.Server) {
	k.AccessReviews(func(kubetest.AccessReviewSpec) kubetest.AccessReviewStatus {
		return kubetest.AccessReviewStatus{Allowed: true}
	})
}

// In a cluster, replicas share the CA in its Secret, and tokens are what the API server says.
func TestKubernetes(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-3.1-1", "IST-3.4-11")
	k, args := cluster(t)
	first, _ := start(t, newConfig(t, t.TempDir(), args...))
	second, _ := start(t, newConfig(t, t.TempDir(), args...))
	require.Equal(t, rootsOf(first), rootsOf(second), "one CA")
	var secret struct {
		Type string            `json:"type"`
		Data map[string]string `json:"data"`
	}
	require.True(t, k.Get("/api/v1/namespaces/istio-system/secrets/istio-ca-secret", &secret))
	require.Equal(t, "istio.io/ca-root", secret.Type)
	require.Contains(t, secret.Data, "ca-key.pem")

	bundle := first.ca.Bundle()
	client := newClient(bundle, nil)
	defer client.CloseIdleConnections()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	for _, s := range []*server{first, second} {
		chain, _, err := istioRequest(t.Context(), client, "https://"+s.at.Istio.Addr().String(), s.c.CA.TrustDomain, "token-web", key)
		require.NoError(t, err)
		require.Equal(t, "spiffe://cluster.local/ns/demo/sa/web", chain[0].URIs[0].String())
		for _, token := range []string{"demo/web", "spiffe://cluster.local/ns/demo/sa/web", "other"} {
			_, _, err = istioRequest(t.Context(), client, "https://"+s.at.Istio.Addr().String(), s.c.CA.TrustDomain, token, key)
			requireUnauthenticated(t, err, token)
		}
		const name = "db.demo.serviceaccount.identity.linkerd.cluster.local"
		proxied, err := certify(t.Context(), client, "https://"+s.at.Linkerd.Addr().String(), "token-db", name, proxyCSR(t, name))
		require.NoError(t, err)
		require.NoError(t, checkLinkerd(proxied, name, bundle))
		_, err = certify(t.Context(), client, "https://"+s.at.Linkerd.Addr().String(), "demo/db", name, proxyCSR(t, name))
		require.Equal(t, grpchttp.InvalidArgument, codeOf(err))
	}
	var out bytes.Buffer
	announce(&out, first.c, first.ca, first.at)
	require.NotContains(t, out.String(), "DEVELOPMENT")
	require.Contains(t, out.String(), "istio-system/istio-ca-secret")
}

// A proxy that was named may ask for what runs on its node, and for nothing else; others may not.
func TestImpersonation(t *testing.T) {
	t.Parallel()
	k, args := cluster(t)
	pod := func(name, uid, account, node string) {
		k.Put("/api/v1/namespaces/demo/pods/"+name, map[string]any{
			"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": name, "namespace": "demo", "uid": uid},
			"spec": map[string]any{"serviceAccountName": account, "nodeName": node}, "status": map[string]any{"phase": "Running"},
		})
	}
	pod("pod-0", "uid-0", "tunnel", "n1")
	pod("web-0", "uid-1", "web", "n1")
	pod("db-0", "uid-2", "db", "n2")
	s, _ := start(t, newConfig(t, t.TempDir(), append(args, "-trusted-node-accounts", "demo/tunnel")...))
	client := newClient(s.ca.Bundle(), nil)
	defer client.CloseIdleConnections()
	rpc := grpchttp.NewClient(client, "https://"+s.at.Istio.Addr().String(), 1<<20)
	ask := func(token, id string) ([]string, error) {
		metadata := must.Get(structpb.NewStruct(map[string]any{"ImpersonatedIdentity": id}))(t)
		request := must.Get(proto.Marshal(&istiowire.IstioCertificateRequest{Csr: newCSR(t), Metadata: metadata}))(t)
		response, err := rpc.Unary(t.Context(), istioca.CreateCertificate, http.Header{"Authorization": {"Bearer " + token}}, request)
		if err != nil {
			return nil, err
		}
		answer := new(istiowire.IstioCertificateResponse)
		require.NoError(t, proto.Unmarshal(response, answer))
		return answer.GetCertChain(), nil
	}
	chain := must.Get(ask("token-tunnel", "spiffe://cluster.local/ns/demo/sa/web"))(t)
	certs := must.Get(pki.ParseCertificatesPEM([]byte(chain[0])))(t)
	require.Equal(t, "spiffe://cluster.local/ns/demo/sa/web", certs[0].URIs[0].String())
	for _, tc := range [][2]string{
		{"token-tunnel", "spiffe://cluster.local/ns/demo/sa/db"}, // on another node
		{"token-tunnel", "spiffe://elsewhere.test/ns/demo/sa/web"},
		{"token-web", "spiffe://cluster.local/ns/demo/sa/db"}, // not trusted
	} {
		_, err := ask(tc[0], tc[1])
		require.Equal(t, grpchttp.Unauthenticated, codeOf(err), "%v: %v", tc, err)
	}

	k.AccessReviews(func(s kubetest.AccessReviewSpec) kubetest.AccessReviewStatus {
		return kubetest.AccessReviewStatus{Allowed: s.ResourceAttributes.Resource != "pods"}
	})
	err := alone.run(t.Context(), arguments(t.TempDir(), append(args, "-trusted-node-accounts", "demo/tunnel")...), env{}.get, nil, io.Discard, io.Discard)
	require.ErrorContains(t, err, "pods")
}

// A server that may not ask for reviews ends when it starts.
func TestKubernetesWithoutRights(t *testing.T) {
	t.Parallel()
	k, args := cluster(t)
	k.AccessReviews(func(kubetest.AccessReviewSpec) kubetest.AccessReviewStatus { return kubetest.AccessReviewStatus{} })
	require.ErrorContains(t, alone.run(t.Context(), arguments(t.TempDir(), args...), env{}.get, nil, io.Discard, io.Discard), "tokenreviews")
}

// With -external-ca a signer of the cluster signs, for callers and for our own certificate.
func TestExternalCA(t *testing.T) {
	t.Parallel()
	k, args := cluster(t)
	signer := newClusterSigner(t)
	signer.serve(t, k)
	dir := t.TempDir()
	roots := filepath.Join(dir, "roots.pem")
	require.NoError(t, os.WriteFile(roots, pki.MarshalCertificatesPEM(signer.root.Certificate()), 0o600))
	args = append(args, "-external-ca", "ISTIOD_RA_KUBERNETES_API", "-k8s-signer", "example.com/mesh")
	for name, more := range map[string][]string{
		"configured": {"-external-roots", roots},
		"learned":    {"-external-roots", filepath.Join(dir, "none"), "-cert-signer-domain", "example.com"},
	} {
		c := newConfig(t, filepath.Join(dir, name), append(args, more...)...)
		s, stop := start(t, c)
		client := newClient(s.ca.Bundle(), nil)
		key := must.Get(pki.NewKey("ecdsa-p256"))(t)
		csr, err := pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://cluster.local/ns/demo/sa/web"))}})
		require.NoError(t, err)
		chain, _, err := istioCSR(t.Context(), client, "https://"+s.at.Istio.Addr().String(), s.c.CA.TrustDomain, "token-web", csr)
		require.NoError(t, err, name)
		require.NoError(t, chain[0].CheckSignatureFrom(signer.root.Certificate()))
		require.Contains(t, audited(t, c), chain[0].SerialNumber.Text(16))
		_, body := programtest.Page(t, "http://"+s.at.Admin.Addr().String()+"/status")
		require.Contains(t, body, "signers of the cluster")
		client.CloseIdleConnections()
		stop()
		_, err = shell(t, "", arguments(c.StateDir, append(append(args, more...), "-rotate")...)...)
		require.ErrorContains(t, err, "-external-ca")
	}
}

// clusterSigner signs what is approved in the API of a cluster.
type clusterSigner struct{ root *pki.Issuer }

func newClusterSigner(t testing.TB) *clusterSigner {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	now := time.Now()
	root, err := pki.NewRoot(key, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseTrustDomain("cluster.local").ID())}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(24 * time.Hour)})
	require.NoError(t, err)
	return &clusterSigner{root}
}

const requestsPath = "/apis/certificates.k8s.io/v1/certificatesigningrequests"

// serve polls, as the fake API server has no limits on that.
func (s *clusterSigner) serve(t *testing.T, k *kubetest.Server) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for tick := time.Tick(5 * time.Millisecond); ctx.Err() == nil; {
			s.sign(t, k)
			select {
			case <-tick:
			case <-ctx.Done():
			}
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
}

func (s *clusterSigner) sign(t *testing.T, k *kubetest.Server) {
	resp, err := k.Client().Get(k.URL() + requestsPath)
	if !assert.NoError(t, err) {
		return
	}
	defer resp.Body.Close()
	var requests struct {
		Items []map[string]any `json:"items"`
	}
	if !assert.NoError(t, json.NewDecoder(resp.Body).Decode(&requests)) {
		return
	}
	for _, item := range requests.Items {
		status, _ := item["status"].(map[string]any)
		if status["conditions"] == nil || status["certificate"] != nil {
			continue
		}
		text, _ := item["spec"].(map[string]any)["request"].(string)
		var request []byte
		if !assert.NoError(t, json.Unmarshal([]byte(`"`+text+`"`), &request)) {
			return
		}
		csr, err := pki.ParseCSRPEM(request)
		if !assert.NoError(t, err) {
			return
		}
		cert, err := s.root.Issue(pki.CertificateOptions{
			PublicKey: csr.PublicKey(), SANs: csr.SANs(), NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		})
		if !assert.NoError(t, err) {
			return
		}
		status = maps.Clone(status)
		status["certificate"] = pki.MarshalCertificatesPEM(cert, s.root.Certificate())
		item["status"] = status
		body, err := json.Marshal(item)
		if !assert.NoError(t, err) {
			return
		}
		name, _ := item["metadata"].(map[string]any)["name"].(string)
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, fmt.Sprintf("%s%s/%s/status", k.URL(), requestsPath, name), bytes.NewReader(body))
		if !assert.NoError(t, err) {
			return
		}
		req.Header.Set("Content-Type", "application/json")
		put, err := k.Client().Do(req)
		if assert.NoError(t, err) {
			put.Body.Close()
			assert.Contains(t, []int{http.StatusOK, http.StatusConflict, http.StatusNotFound}, put.StatusCode) // others may be faster
		}
	}
}
