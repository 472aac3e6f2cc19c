package caconfig

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// logs collects what is logged.
type logs struct{ logtest.Buffer }

func (l *logs) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// serve runs the server of some flags until the test ends, and returns where it listens.
func serve(t *testing.T, l *logs, getenv func(string) string, args ...string) (*Config, caserver.Listeners) {
	t.Helper()
	dir := t.TempDir()
	c := must.Get(parse(append([]string{
		"-state-dir", filepath.Join(dir, "state"), "-create", "-root-ca-dir=", "-istio-addr", "127.0.0.1:0",
		"-linkerd-addr", "127.0.0.1:0", "-bundle-addr", "127.0.0.1:0", "-admin-addr", "127.0.0.1:0",
	}, args...), getenv, io.Discard, true))(t)
	ctx, cancel := context.WithCancel(t.Context())
	ready, ended := make(chan caserver.Listeners, 1), make(chan error, 1)
	go func() {
		ended <- c.Serve(ctx, l.logger(), func(_ *Authority, at caserver.Listeners) { ready <- at })
	}()
	t.Cleanup(func() { cancel(); <-ended })
	select {
	case at := <-ready:
		return c, at
	case err := <-ended:
		ended <- nil
		require.NoError(t, err)
	}
	panic("not reached")
}

// Z4.1: with ENABLE_CA_SERVER=false no certificate API is served, which is logged once; bundle and health are.
func TestWithoutCAServer(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.2-1")
	l := new(logs)
	_, at := serve(t, l, env{"ENABLE_CA_SERVER": "false"}.get)
	require.Nil(t, at.Istio)
	require.Nil(t, at.Linkerd)
	require.NotNil(t, at.Bundle)
	resp := must.Get(http.Get("http://" + at.Admin.Addr().String() + "/ready"))(t)
	defer resp.Body.Close()
	require.Equal(t, http.StatusOK, resp.StatusCode)
	require.Equal(t, 1, strings.Count(l.String(), "no certificate API is served"))
}

// Z4.12, Z5.7: a start that may make no CA waits for one for as long as CA_WAIT says, reads every five seconds, and makes none.
func TestWait(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.5-1")
	synctest.Test(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "state")
		flags := func(args ...string) *Config {
			c, err := parse(append([]string{"-state-dir", dir, "-root-ca-dir", "", "-audit-log", "none"}, args...), env{"CA_WAIT": "5m"}.get, io.Discard, false)
			require.NoError(t, err)
			return c
		}
		l := new(logs)
		start := time.Now()
		_, err := flags().await(t.Context(), l.logger())
		require.ErrorIs(t, err, ca.ErrNoRecord)
		require.ErrorContains(t, err, "-wait: it has taken 5m0s")
		require.ErrorContains(t, err, "-create")
		require.Equal(t, 5*time.Minute, time.Since(start))
		require.Equal(t, 1, strings.Count(l.String(), "waiting for a CA"), l)
		require.NoDirExists(t, dir)

		made := make(chan string, 1)
		go func() {
			time.Sleep(12 * time.Second)
			a, err := flags("-create").Open(t.Context(), OpenOptions{})
			if assert.NoError(t, err) {
				made <- a.Own.Status().Roots[0].ID
				a.Close()
			}
		}()
		start = time.Now()
		a := must.Get(flags().await(t.Context(), l.logger()))(t)
		defer a.Close()
		require.Equal(t, 15*time.Second, time.Since(start))
		require.Equal(t, <-made, a.Own.Status().Roots[0].ID)
	})
}

// A variable that is a slip for another one is a warning that names that, and one without effect is named once.
func TestVariables(t *testing.T) {
	conformance.Covers(t, "IST-3.2-25")
	for name, value := range map[string]string{
		"MAX_WORKLOD_CERT_TTL": "1h", "TRUSTDOMAIN": "x.test", "XDS_AUTH": "true", "XDS_AUTH_PLAINTEXT": "true", "USE_REMOTE_CERTS": "true",
		"PILOT_ENABLE_CA_CRL": "true", "PILOT_TRACE_SAMPLING": "1", "CITADEL_OTHER": "x", "KUBECONFIG": "/x", "REVISION": "default", "PILOT_EMPTY": "", "PILOT_ENABLE_XDS_IDENTITY_CHECK": "false", "DEFAULT_WORKLOAD_CERT_TTL": "1h", "SVIDKIT_OTHER": "1",
		"PILOT_PORT": "tcp://10.0.0.1:80", "CITADEL_SERVICE_HOST": "10.0.0.1", // of Services
	} {
		t.Setenv(name, value)
	}
	c := must.Get(parse(nil, os.Getenv, io.Discard, false))(t)
	l := new(logs)
	c.variables(l.logger())
	for _, want := range []string{
		"level=WARN msg=\"caconfig: a variable is not known, and looks like another one\" variable=MAX_WORKLOD_CERT_TTL known=MAX_WORKLOAD_CERT_TTL\n",
		"variable=TRUSTDOMAIN known=TRUST_DOMAIN\n",
		"level=INFO msg=\"caconfig: a variable has no effect\" variable=XDS_AUTH because=\"callers are always authenticated\"\n",
		"variable=XDS_AUTH_PLAINTEXT because=", "variable=USE_REMOTE_CERTS because=", "variable=PILOT_ENABLE_CA_CRL because=",
		"variable=PILOT_ENABLE_XDS_IDENTITY_CHECK because=", "variable=PILOT_TRACE_SAMPLING because=", "variable=CITADEL_OTHER because=",
		"variable=KUBECONFIG because=", "variable=REVISION because=",
	} {
		assert.Equal(t, 1, strings.Count(l.String(), want), want)
	}
	assert.Equal(t, 2, strings.Count(l.String(), "level=WARN"), l)
	assert.NotContains(t, l.String(), "SVIDKIT_OTHER")
	assert.NotContains(t, l.String(), "PILOT_EMPTY")
	assert.NotContains(t, l.String(), "PILOT_PORT")
	assert.NotContains(t, l.String(), "CITADEL_SERVICE_HOST")
}

// Z6.3: the certificate of the server comes from files, which are followed; a pair that is not good leaves the last one in use.
func TestServerCertificateFromFiles(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-3.9-2")
	host := spiffetest.NewCA(t, "server.test")
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	write := func(certName string) (chain []*x509.Certificate) {
		chain, private := host.Certificate("/ca", func(c *x509.Certificate) { c.DNSNames = []string{certName} })
		pem := must.Get(pki.MarshalPrivateKeyPEM(private))(t)
		require.NoError(t, os.WriteFile(cert, pki.MarshalCertificatesPEM(chain...), 0o600))
		require.NoError(t, os.WriteFile(key, pem, 0o600))
		return chain
	}
	write("first.test")
	l := new(logs)
	_, at := serve(t, l, env{}.get, "-tls-cert", cert, "-tls-key", key)
	presented := func() string {
		conn, err := tls.Dial("tcp", at.Istio.Addr().String(), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}) // to look
		require.NoError(t, err)
		defer conn.Close()
		return strings.Join(conn.ConnectionState().PeerCertificates[0].DNSNames, ",")
	}
	require.Equal(t, "first.test", presented())
	require.NoError(t, os.WriteFile(key, []byte("nonsense"), 0o600))
	require.Eventually(t, func() bool { return strings.Contains(l.String(), "tls.key") }, time.Minute, 10*time.Millisecond, "%s", l)
	require.Equal(t, "first.test", presented(), "the last good pair stays")
	write("second.test")
	require.Eventually(t, func() bool { return presented() == "second.test" }, time.Minute, 20*time.Millisecond)

	require.ErrorIs(t, must.Err(parse([]string{"-tls-cert", cert}, env{}.get, io.Discard, true)), ErrUsage)
}

// M.1: the roots of the CA are in a ConfigMap of every namespace, and are kept there whatever others do.
func TestRootConfigMap(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.2-18", "IST-3.9-1")
	api := kubetest.Start(t)
	namespace := func(name string) {
		api.Put("/api/v1/namespaces/"+name, map[string]any{"metadata": map[string]any{}})
	}
	for _, name := range []string{"prod", "istio-system", "kube-system", "kube-public", "kube-node-lease", "local-path-storage"} {
		namespace(name)
	}
	at := func(ns string) string { return "/api/v1/namespaces/" + ns + "/configmaps/istio-ca-root-cert" }
	api.Put(at("istio-system"), map[string]any{
		"metadata": map[string]any{"labels": map[string]string{"mine": "yes"}}, "data": map[string]string{"root-cert.pem": "old", "other": "stays"},
	})
	api.Faults(func(*http.Request) *kubetest.Fault {
		return &kubetest.Fault{Code: 403, Reason: "Forbidden", Message: "no"}
	}) // at first
	a, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org"), Rotation: ca.Rotation{Propagation: time.Hour}})
	require.NoError(t, err)
	c, err := parse([]string{"-kubernetes", "-kubernetes-api", api.URL(), "-root-configmap", "istio-ca-root-cert"}, env{}.get, io.Discard, true)
	require.NoError(t, err)
	c.cluster.API.HTTPClient = api.Client()
	l := new(logs)
	for range 2 { // replicas
		stop := must.Get(c.handOutRoots(t.Context(), a, 100*time.Millisecond, l.logger()))(t)
		defer stop()
	}
	require.Eventually(t, func() bool { return strings.Contains(l.String(), "list, watch, create and patch configmaps") }, time.Minute, 5*time.Millisecond, "%s", l)
	api.Faults(func(*http.Request) *kubetest.Fault { return nil })

	var object struct {
		Metadata struct{ Labels map[string]string }
		Data     map[string]string
	}
	has := func(ns, roots string) {
		t.Helper()
		require.Eventually(t, func() bool {
			object.Data = nil
			return api.Get(at(ns), &object) && object.Data["root-cert.pem"] == roots
		}, time.Minute, 10*time.Millisecond, "%s: %s", ns, l)
	}
	roots := string(a.Bundle().MarshalPEM())
	has("prod", roots)
	require.Equal(t, map[string]string{"istio.io/config": "true"}, object.Metadata.Labels)
	has("istio-system", roots)
	require.Equal(t, "yes", object.Metadata.Labels["mine"])
	require.Equal(t, "stays", object.Data["other"])
	namespace("new")
	has("new", roots)
	for _, ns := range rootless {
		require.False(t, api.Get(at(ns), &object), ns)
	}
	must.Get(a.Rotate(t.Context()))(t)
	require.NotEqual(t, roots, string(a.Bundle().MarshalPEM()))
	has("prod", string(a.Bundle().MarshalPEM()))
	written := func() int { return len(api.History(at("new"))) }
	has("new", string(a.Bundle().MarshalPEM()))
	for before := -1; before != written(); time.Sleep(300 * time.Millisecond) { // both replicas know
		before = written()
	}
	api.Remove(at("new"))
	has("new", string(a.Bundle().MarshalPEM()))
	api.Remove(at("prod"))
	has("prod", string(a.Bundle().MarshalPEM()))
	api.Put(at("prod"), map[string]any{"metadata": map[string]any{}, "data": map[string]string{"root-cert.pem": "of another"}})
	has("prod", string(a.Bundle().MarshalPEM()))
}

// M.10: a caller of another cluster is proven by the API server there, with the token and the roots in a directory.
func TestRemoteCluster(t *testing.T) {
	t.Parallel()
	var sent []string // one request at a time
	east := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sent = append(sent, r.URL.Path+" "+r.Header.Get("Authorization"))
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(map[string]any{
			"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "status": map[string]any{
				"authenticated": true, "audiences": []string{"istio-ca"},
				"user": map[string]any{"username": "system:serviceaccount:prod:web", "groups": []string{"system:serviceaccounts", "system:serviceaccounts:prod"}},
			},
		})
	}))
	t.Cleanup(east.Close)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "ca.crt"), pki.MarshalCertificatesPEM(east.Certificate()), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "token"), []byte("remote-token\n"), 0o600))
	own := kubetest.Start(t)
	own.AccessReviews(func(kubetest.AccessReviewSpec) kubetest.AccessReviewStatus {
		return kubetest.AccessReviewStatus{Allowed: true}
	})
	c, err := parse([]string{"-kubernetes", "-kubernetes-api", own.URL(), "-remote-cluster", "east=" + east.URL + "," + dir}, env{}.get, io.Discard, true)
	require.NoError(t, err)
	c.cluster.API.HTTPClient = own.Client()
	o := &caserver.Options{Logger: slog.New(slog.DiscardHandler)}
	require.NoError(t, c.setAPIs(t.Context(), o, nil))
	request := func(cluster string) *http.Request {
		r := httptest.NewRequest(http.MethodPost, "https://ca.test/", nil)
		r.Header.Set("Authorization", "Bearer pod.token.x")
		r.Header.Set("ClusterID", cluster)
		return r
	}
	caller := must.Get(o.Istio.Authenticator.Authenticate(request("east")))(t)
	require.Equal(t, "spiffe://cluster.local/ns/prod/sa/web", caller.ID.String())
	require.Equal(t, "east", caller.Pod.Cluster)
	require.NotEmpty(t, sent)
	for _, s := range sent {
		require.Equal(t, "/apis/authentication.k8s.io/v1/tokenreviews Bearer remote-token", s)
	}
	require.Error(t, must.Err(o.Istio.Authenticator.Authenticate(request("west"))))
	for args, text := range map[string]string{
		"east=http://x,/d": "ID=https://HOST:PORT,/DIRECTORY", "=https://x,/d": "ID=https", "east=https://x": "ID=https", "east=https://x,d": "ID=https",
		"Kubernetes=https://x,/d": "cluster of the server itself",
	} {
		_, err := parse([]string{"-kubernetes", "-remote-cluster", args}, env{}.get, io.Discard, true)
		require.ErrorContains(t, err, text)
		require.True(t, errors.Is(err, ErrUsage))
	}
}
