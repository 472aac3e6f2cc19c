package caconfig

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"flag"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// A pair of -tls-cert that cannot be used now, as its life is over or has not begun, does not take the place of the one that is presented; the one after it does. At the
// start it is refused.
func TestServerCertificateOutOfTime(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	host := spiffetest.NewCA(t, "server.test")
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	write := func(certName string, change func(*x509.Certificate)) {
		chain, private := host.Certificate("/ca", func(c *x509.Certificate) { c.DNSNames = []string{certName}; change(c) })
		require.NoError(t, os.WriteFile(key, must.Get(pki.MarshalPrivateKeyPEM(private))(t), 0o600))
		require.NoError(t, os.WriteFile(cert, pki.MarshalCertificatesPEM(chain...), 0o600))
	}
	ended := func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Minute)
	}
	write("first.test", func(*x509.Certificate) {})
	l := new(logs)
	_, at := serve(t, l, env{}.get, "-tls-cert", cert, "-tls-key", key)
	presented := func() string {
		conn, err := tls.Dial("tcp", at.Istio.Addr().String(), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}) //nolint:gosec // to look
		require.NoError(t, err)
		defer conn.Close()
		return strings.Join(conn.ConnectionState().PeerCertificates[0].DNSNames, ",")
	}
	require.Equal(t, "first.test", presented())
	write("ended.test", ended)
	require.Eventually(t, func() bool {
		return strings.Contains(l.String(), cert+": the certificate has expired at ")
	}, time.Minute, 10*time.Millisecond, "%s", l)
	require.Equal(t, "first.test", presented())
	write("early.test", func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = time.Now().Add(time.Hour), time.Now().Add(2*time.Hour)
	})
	require.Eventually(t, func() bool { return strings.Contains(l.String(), cert+": the certificate is valid from ") }, time.Minute, 10*time.Millisecond, "%s", l)
	require.Equal(t, "first.test", presented())
	data := must.Get(os.ReadFile(cert))(t)
	require.NoError(t, os.WriteFile(cert, append(data, "-----BEGIN CERTIFICATE-----\nMIIB\n"...), 0o600))
	require.Eventually(t, func() bool { return strings.Contains(l.String(), cert+": 1 damaged PEM block") }, time.Minute, 10*time.Millisecond, "%s", l)
	require.Equal(t, "first.test", presented())
	write("third.test", func(*x509.Certificate) {})
	require.Eventually(t, func() bool { return presented() == "third.test" }, time.Minute, 20*time.Millisecond)

	write("ended.test", ended)
	_, _, err := followTLS(t.Context(), "-tls-cert", cert, key, l.logger())
	require.ErrorContains(t, err, "-tls-cert: ")
	require.ErrorContains(t, err, "has expired at")
}

// Where istiod has its certificate is where its successor looks, and what the help says.
func TestFolderOfIstiod(t *testing.T) {
	t.Parallel()
	require.Equal(t, "/var/run/secrets/istiod/tls", istiodTLS)
	var help bytes.Buffer
	_, err := parse([]string{"-help"}, env{}.get, &help, false)
	require.ErrorIs(t, err, flag.ErrHelp)
	require.Contains(t, strings.Join(strings.Fields(help.String()), " "), "/var/run/secrets/istiod/tls/tls.crt")
}

// Roots go into no namespace that is being deleted, and a ConfigMap that another replica has written since it was read is not written over.
func TestRootConfigMapOfOthers(t *testing.T) {
	t.Parallel()
	api := kubetest.Start(t)
	api.Put("/api/v1/namespaces/ending", map[string]any{"metadata": map[string]any{"deletionTimestamp": time.Now().UTC().Format(time.RFC3339)}})
	api.Put("/api/v1/namespaces/prod", map[string]any{"metadata": map[string]any{}})
	at := func(ns string) string { return "/api/v1/namespaces/" + ns + "/configmaps/roots" }
	write := func(roots string) {
		api.Put(at("prod"), map[string]any{"metadata": map[string]any{}, "data": map[string]string{"root-cert.pem": roots}})
	}
	write("old")
	var raced atomic.Bool
	api.Faults(func(r *http.Request) *kubetest.Fault {
		if r.Method == http.MethodPatch && raced.CompareAndSwap(false, true) {
			write("of another replica")
		}
		return nil
	})
	a := must.Get(ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org")}))(t)
	c, err := parse([]string{"-kubernetes", "-kubernetes-api", api.URL(), "-root-configmap", "roots"}, env{}.get, new(bytes.Buffer), true)
	require.NoError(t, err)
	c.cluster.API.HTTPClient = api.Client()
	l := new(logs)
	stop := must.Get(c.handOutRoots(t.Context(), a, 50*time.Millisecond, l.logger()))(t)
	defer stop()
	var o struct{ Data map[string]string }
	require.Eventually(t, func() bool {
		return api.Get(at("prod"), &o) && o.Data["root-cert.pem"] == string(a.Bundle().MarshalPEM())
	}, time.Minute, 10*time.Millisecond, "%s", l)
	var codes []int
	for _, r := range api.Requests() {
		require.NotContains(t, r.Path, "/ending/", "%+v", r)
		if r.Method == http.MethodPatch {
			codes = append(codes, r.Code)
		}
	}
	require.Equal(t, []int{http.StatusConflict, http.StatusOK}, codes)
	require.NotContains(t, l.String(), "level=WARN", "another replica is no failure")
}
