package kube_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/test/must"
)

// cluster is an API server with TLS that only looks at tokens, and the machine that finds it.
type cluster struct {
	server *httptest.Server

	mu     sync.Mutex
	cert   tls.Certificate
	tokens []string // that came
	dialed []string
	protos []string
	hellos []tls.ClientHelloInfo
}

// newCluster starts the server, which has no certificate yet.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{}
	c.server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c.mu.Lock()
		c.tokens, c.protos = append(c.tokens, r.Header.Get("Authorization")), append(c.protos, r.Proto)
		c.mu.Unlock()
		answer(w, 200, `{}`)
	}))
	c.server.EnableHTTP2 = true
	c.server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	c.server.TLS = &tls.Config{GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.hellos = append(c.hellos, *hello)
		return &tls.Config{Certificates: []tls.Certificate{c.cert}, NextProtos: []string{"h2", "http/1.1"}}, nil
	}}
	c.server.StartTLS()
	t.Cleanup(c.server.Close)
	return c
}

// renew gives the server a certificate from a new CA, and returns that in PEM.
func (c *cluster) renew(t *testing.T) (caPEM []byte) {
	t.Helper()
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	root := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	rootDER := must.Get(x509.CreateCertificate(rand.Reader, root, root, key.Public(), key))(t)
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: root.NotBefore, NotAfter: root.NotAfter, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{net.ParseIP("10.96.0.1"), net.ParseIP("fd00::1")}, DNSNames: []string{"kubernetes.default.svc"},
	}
	leafDER := must.Get(x509.CreateCertificate(rand.Reader, leaf, root, key.Public(), key))(t)
	c.mu.Lock()
	c.cert = tls.Certificate{Certificate: [][]byte{leafDER}, PrivateKey: key}
	c.mu.Unlock()
	c.server.CloseClientConnections()
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: rootDER})
}

// machine is one in the cluster.
func (c *cluster) machine(host, port string, files fs.FS) kube.Machine {
	return kube.Machine{
		Env: map[string]string{"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}, Files: files,
		Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c.mu.Lock()
			c.dialed = append(c.dialed, addr)
			c.mu.Unlock()
			return (&net.Dialer{}).DialContext(ctx, network, c.server.Listener.Addr().String())
		},
	}
}

// mount writes the files of a service account as the kubelet does: into a new directory, to which a link
// then moves.
func mount(t *testing.T, root string, files map[string]string) {
	t.Helper()
	dir := filepath.Join(root, filepath.FromSlash(kube.AccountDir))
	require.NoError(t, os.MkdirAll(dir, 0o700))
	data := must.Get(os.MkdirTemp(dir, "..2026_"))(t)
	for name, text := range files {
		require.NoError(t, os.WriteFile(filepath.Join(data, name), []byte(text), 0o600))
		if _, err := os.Lstat(filepath.Join(dir, name)); errors.Is(err, fs.ErrNotExist) {
			require.NoError(t, os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)))
		}
	}
	require.NoError(t, os.Symlink(filepath.Base(data), filepath.Join(dir, "..tmp")))
	require.NoError(t, os.Rename(filepath.Join(dir, "..tmp"), filepath.Join(dir, "..data")))
}

// TestPostQuantum: a client that may use X25519MLKEM768 alone asks for nothing else.
func TestPostQuantum(t *testing.T) {
	t.Parallel()
	for _, only := range []bool{true, false} {
		s := newCluster(t)
		root := t.TempDir()
		mount(t, root, map[string]string{"token": "first", "ca.crt": string(s.renew(t)), "namespace": "istio-system"})
		c := must.Get(s.machine("10.96.0.1", "443", os.DirFS(root)).New(kube.Options{PostQuantum: only}))(t)
		require.NoError(t, c.Get(t.Context(), "/x", nil, nil))
		s.mu.Lock()
		hello := s.hellos[0]
		s.mu.Unlock()
		assert.Equal(t, only, slices.Equal(hello.SupportedCurves, []tls.CurveID{tls.X25519MLKEM768}))
		assert.Equal(t, only, slices.Equal(hello.SupportedVersions, []uint16{tls.VersionTLS13}))
	}
}

// TestServiceAccount shows that a client in a pod follows its token and its CA as they rotate.
func TestServiceAccount(t *testing.T) {
	t.Parallel()
	s := newCluster(t)
	root := t.TempDir()
	old := s.renew(t)
	mount(t, root, map[string]string{"token": "first\n", "ca.crt": string(old), "namespace": "istio-system"})
	m := s.machine("10.96.0.1", "443", os.DirFS(root))
	c := must.Get(m.New(kube.Options{}))(t)
	assert.Equal(t, "kube.Client(https://10.96.0.1:443)", c.String())
	ns := must.Get(m.Namespace())(t)
	assert.Equal(t, "istio-system", ns)
	dialed := func() []string {
		s.mu.Lock()
		defer s.mu.Unlock()
		return slices.Clone(s.dialed)
	}
	var kept []string
	for before := -1; before != len(kept); { // net/http may dial for a request, too, that comes at once
		require.Less(t, len(kept), 20, "connections are not kept")
		before = len(kept)
		for range 3 {
			require.NoError(t, c.Get(t.Context(), "/x", nil, nil))
			time.Sleep(2 * time.Millisecond)
		}
		kept = dialed()
	}
	assert.Equal(t, []string{"10.96.0.1:443"}, slices.Compact(slices.Clone(kept)))

	mount(t, root, map[string]string{"token": "second", "ca.crt": string(old)})
	require.NoError(t, c.Get(t.Context(), "/x", nil, nil))
	require.NoError(t, c.Create(t.Context(), "/x", object{}, nil))
	assert.Equal(t, []string{"Bearer first", "Bearer second"}, slices.Compact(slices.Clone(s.tokens)))
	assert.Equal(t, "Bearer second", s.tokens[len(s.tokens)-2])
	assert.Equal(t, kept, dialed(), "another token needs no other connection")
	assert.Equal(t, []string{"HTTP/2.0"}, slices.Compact(slices.Clone(s.protos)))

	// A connection does not outlive the CA that it was verified with, and comes back with it.
	mount(t, root, map[string]string{"token": "second", "ca.crt": string(newCluster(t).renew(t))})
	err := c.Get(t.Context(), "/x", nil, nil)
	require.ErrorAs(t, err, new(x509.UnknownAuthorityError))
	mount(t, root, map[string]string{"token": "second", "ca.crt": "garbage"})
	require.Error(t, c.Get(t.Context(), "/x", nil, nil))
	mount(t, root, map[string]string{"token": "second", "ca.crt": string(old)})
	require.NoError(t, c.Get(t.Context(), "/x", nil, nil))
	before := len(dialed())
	require.NoError(t, c.Get(t.Context(), "/x", nil, nil))
	assert.Len(t, dialed(), before, "it is kept while ca.crt is")

	next := s.renew(t)
	for range 100 { // until the client has noticed that its connection is gone
		if err := c.Create(t.Context(), "/x", object{}, nil); !kube.MayHaveLanded(err) {
			break
		}
	}
	_, unknown := errors.AsType[x509.UnknownAuthorityError](err)
	assert.True(t, unknown, "%v", err)
	assert.False(t, kube.MayHaveLanded(err), "no server was found to send it to")
	mount(t, root, map[string]string{"token": "third", "ca.crt": string(old) + string(next)})
	require.NoError(t, c.Get(t.Context(), "/x", nil, nil))
	assert.Equal(t, "Bearer third", s.tokens[len(s.tokens)-1])
}

// TestClose has a client whose server keeps each connection, after a request and in the midst of one.
func TestClose(t *testing.T) {
	t.Parallel()
	s := newCluster(t)
	m := s.machine("10.96.0.1", "443", account("token", string(s.renew(t)), "default"))
	var open atomic.Int64
	dial := m.Dial
	m.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		open.Add(1)
		return &counted{Conn: c, closed: sync.OnceFunc(func() { open.Add(-1) })}, nil
	}
	c := must.Get(m.New(kube.Options{}))(t)
	require.NoError(t, c.Close(), "before any")
	for range 2 {
		require.NoError(t, c.Get(t.Context(), "/x", nil, nil))
		require.Positive(t, open.Load(), "it is kept")
		require.NoError(t, c.Close())
		require.Eventually(t, func() bool { return open.Load() == 0 }, time.Minute, 5*time.Millisecond)
	}

	// One that is made for a request whose caller has gone.
	begun, end := make(chan struct{}), make(chan struct{})
	before := m.Dial
	m.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		close(begun)
		<-end
		return before(ctx, network, addr)
	}
	c = must.Get(m.New(kube.Options{}))(t)
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() { failed <- c.Get(ctx, "/x", nil, nil) }()
	<-begun
	cancel()
	require.ErrorIs(t, <-failed, context.Canceled)
	require.NoError(t, c.Close())
	close(end)
	time.Sleep(50 * time.Millisecond) // for the handshake
	require.Eventually(t, func() bool { return open.Load() == 0 }, time.Minute, 5*time.Millisecond)
}

type counted struct {
	net.Conn
	closed func()
}

func (c *counted) Close() error {
	c.closed()
	return c.Conn.Close()
}

// TestServiceAddresses has clusters with addresses of different kinds.
func TestServiceAddresses(t *testing.T) {
	t.Parallel()
	s := newCluster(t)
	files := account("token", string(s.renew(t)), "default")
	for host, want := range map[string]string{"10.96.0.1": "10.96.0.1:6443", "fd00::1": "[fd00::1]:6443", "kubernetes.default.svc": "kubernetes.default.svc:6443"} {
		c := must.Get(s.machine(host, "6443", files).New(kube.Options{}))(t)
		s.dialed = nil
		require.NoError(t, c.Get(t.Context(), "/x", nil, nil), host)
		assert.Equal(t, []string{want}, s.dialed)
	}
	c := must.Get(s.machine("10.96.0.2", "6443", files).New(kube.Options{}))(t)
	asked := len(s.tokens)
	err := c.Get(t.Context(), "/x", nil, nil)
	_, wrong := errors.AsType[x509.HostnameError](err)
	assert.True(t, wrong, "%v", err)
	assert.Len(t, s.tokens, asked, "the token is not for a server at another address")

	// The URL may be given, and the rest be that of the pod.
	c = must.Get(s.machine("", "", files).New(kube.Options{URL: "https://kubernetes.default.svc"}))(t)
	require.NoError(t, c.Get(t.Context(), "/x", nil, nil))
	assert.Equal(t, "Bearer token", s.tokens[len(s.tokens)-1])
	// And the other way round: then the http.Client has its own credentials.
	c = must.Get(s.machine("10.96.0.1", "443", nil).New(kube.Options{Client: s.server.Client()}))(t)
	assert.Equal(t, "kube.Client(https://10.96.0.1:443)", c.String())
}

func account(token, ca, namespace string) fstest.MapFS {
	files := fstest.MapFS{}
	for name, text := range map[string]string{"token": token, "ca.crt": ca, "namespace": namespace} {
		if text != "-" {
			files[path.Join(kube.AccountDir, name)] = &fstest.MapFile{Data: []byte(text)}
		}
	}
	return files
}

// TestBadServiceAccounts has pods whose files are not right, by what the error says.
func TestBadServiceAccounts(t *testing.T) {
	t.Parallel()
	s := newCluster(t)
	ca := string(s.renew(t))
	const hunter = "hunter2"
	for _, c := range []struct{ want, token, ca string }{
		{"token of the service account: not in a pod with a service account token? open var/run/secrets", "-", ca},
		{"/token is empty", "", ca},
		{"/token is empty", " \n\t", ca},
		{"/token is not a bearer token", hunter + "\nX-Header: y", ca},
		{"/token is not a bearer token", hunter + " " + hunter, ca},
		{"/token is not a bearer token", hunter + "\x00", ca},
		{"/token is not a bearer token", hunter + "é", ca},
		{"/token has more than 65536 bytes", strings.Repeat(hunter, 1<<14), ca},
		{"CA of the API server: not in a pod", hunter, "-"},
		{"/ca.crt is empty", hunter, ""},
		{"/ca.crt: no certificate found", hunter, "certificate"},
		{"/ca.crt: certificate 1: ", hunter, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"},
		{"/ca.crt has more than 1048576 bytes", hunter, strings.Repeat(ca, 1<<20/len(ca)+1)},
	} {
		k := must.Get(s.machine("10.96.0.1", "443", account(c.token, c.ca, "default")).New(kube.Options{}))(t)
		err := k.Create(t.Context(), "/x", object{}, nil)
		require.ErrorContains(t, err, c.want)
		assert.NotContains(t, fmt.Sprintf("%+v", err), hunter)
		assert.False(t, kube.MayHaveLanded(err))
	}
	assert.Empty(t, s.tokens)
	for want, namespace := range map[string]string{"no such file|not exist": "-", "is empty": "", "Istio": "Istio",
		"a/b": "a/b", "more than 1024 bytes": strings.Repeat("a", 1025)} {
		_, err := s.machine("", "", account("x", ca, namespace)).Namespace()
		require.Error(t, err)
		assert.Regexp(t, want, err.Error())
		assert.Equal(t, namespace == "-", errors.Is(err, fs.ErrNotExist))
	}
}

func TestParseUser(t *testing.T) {
	t.Parallel()
	namespace, name, err := kube.ParseUser("system:serviceaccount:shop:web.v1")
	require.NoError(t, err)
	assert.Equal(t, "shop", namespace)
	assert.Equal(t, "web.v1", name)
	for s, want := range map[string]string{
		"":                               `the user "" is not a service account`,
		"system:node:shop:web":           "is not a service account",
		"user:serviceaccount:shop:web":   "is not a service account",
		"system:serviceaccount:shop":     "is not a service account",
		"system:serviceaccount:shop:w:x": "is not a service account",
		"system:serviceaccount:Shop:web": `"Shop" in the user name is not a namespace`,
		"system:serviceaccount::web":     `"" in the user name is not a namespace`,
		"system:serviceaccount:a.b:web":  `"a.b" in the user name is not a namespace`,
		"system:serviceaccount:shop:Web": `"Web" in the user name is not a service account's name`,
		"system:serviceaccount:shop:":    `"" in the user name is not a service account's name`,
		"system:serviceaccount:shop:a/b": `"a/b" in the user name is not a service account's name`,
	} {
		_, _, err := kube.ParseUser(s)
		assert.ErrorContains(t, err, want, s)
	}
	for want, all := range map[string][]string{
		"not a service account": {"system:node:worker-1", "system:serviceaccount:prod:web:", "system:serviceaccount:prod:web:x:y", "System:serviceaccount:prod:web",
			"system:serviceaccounts:prod:web", " system:serviceaccount:prod:web"},
		"not a namespace": {"system:serviceaccount:prod/sa:web", "system:serviceaccount:" + strings.Repeat("a", 64) + ":web", "system:serviceaccount:-a:web"},
		"not a service account's name": {"system:serviceaccount:prod:web/../x", "system:serviceaccount:prod:..", "system:serviceaccount:prod:a..b",
			"system:serviceaccount:prod:web.", "system:serviceaccount:prod:a_b", "system:serviceaccount:prod:web\x00", "system:serviceaccount:prod:wéb",
			"system:serviceaccount:prod:web\n"},
	} {
		for _, s := range all {
			_, _, err := kube.ParseUser(s)
			assert.ErrorContains(t, err, want, s)
		}
	}
}

func TestOneLine(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ in, want string }{
		{"short", "short"},
		{" a\nb\x00c\xff ", "a b c\uFFFD"},
		{"0123456789", "0123456789"},
		{"0123456789a", "0123456…"},
		{"012345ééé", "012345…"}, // not half a rune
	} {
		assert.Equal(t, c.want, kube.OneLine(c.in, 10), "%q", c.in)
	}
}

func TestNamespaceOutsideOfAPod(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat("/" + kube.AccountDir); err == nil {
		t.Skip("this is a pod")
	}
	require.ErrorIs(t, must.Err(kube.Namespace()), fs.ErrNotExist)
}
