package athenz_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/internal/test/athenztest"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
)

func anyCaller(*http.Request) (*authn.Caller, error) {
	return &authn.Caller{Name: athenztest.Node, Method: "test"}, nil
}

func TestSigningHandler(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-1-3", "ATH-6-1", "ATH-6-2", "ATH-6-3", "ATH-6-4", "ATH-6-5")
	k := athenztest.NewKeys(t)
	h := must.Get(athenz.NewSigningHandler(k.Signer(t), authn.Func(anyCaller), nil))(t)
	const good = `{"subject":{"ID":"media-sports/web-0","Domain":"media.sports","Service":"frontend","IP":"10.1.2.3"}}`
	code, text := call(t, h, http.MethodPost, "/v1/jwt", good)
	require.Equal(t, http.StatusOK, code, text)
	var answer map[string]string
	require.NoError(t, json.Unmarshal([]byte(text), &answer))
	require.Len(t, answer, 1)
	d := must.Get(k.Verifier(t).Verify(answer["jwt"]))(t)
	assert.Equal(t, athenztest.Subject(), d)

	for body, want := range map[string]int{
		"": 400, "x": 400, "[]": 400, `{"subject":7}`: 400, strings.Repeat(" ", 1<<17): 400, "null": 500, "{}": 500,
		strings.Replace(good, "10.1.2.3", "", 1):     500,
		strings.Replace(good, "10.1.2.3", "x", 1):    500,
		strings.Replace(good, "/web-0", "", 1):       500,
		strings.Replace(good, "frontend", "", 1):     500,
		strings.Replace(good, "media.sports", "", 1): 500,
	} {
		code, text := call(t, h, http.MethodPost, "/v1/jwt", body)
		assert.Equal(t, want, code, "%.50s: %s", body, text)
		assert.NotContains(t, text, "{")
	}
	code, text = call(t, h, http.MethodGet, "/healthz", nil)
	assert.Equal(t, "200 ok", fmt.Sprint(code, " ", text))
	code, _ = call(t, h, http.MethodGet, "/v1/jwt", nil)
	assert.Equal(t, http.StatusMethodNotAllowed, code)

	nobody := authn.Func(func(*http.Request) (*authn.Caller, error) { return nil, authn.ErrNoCredential })
	h = must.Get(athenz.NewSigningHandler(k.Signer(t), nobody, nil))(t)
	code, _ = call(t, h, http.MethodPost, "/v1/jwt", good)
	assert.Equal(t, http.StatusUnauthorized, code)
	code, _ = call(t, h, http.MethodGet, "/healthz", nil)
	assert.Equal(t, http.StatusOK, code)
	require.Error(t, must.Err(athenz.NewSigningHandler(nil, nobody, nil)))
	require.Error(t, must.Err(athenz.NewSigningHandler(k.Signer(t), nil, nil)))
}

// TestSigningCallers has callers of all kinds over TLS.
func TestSigningCallers(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-6-2", "ATH-2-10")
	c := athenztest.New(t)
	for cn, good := range map[string]bool{athenztest.Node: true, "K8s.Admin.K8s-Node": true, "": false, "media.sports.frontend": false, "k8s.admin.k8s-nodes": false, "k8s.admin:role.k8s-node": false} {
		a := must.Get(athenz.ClientCertificate(c.CA.TrustDomain(), c.CA.Bundle(), athenztest.Node))(t)
		h := must.Get(athenz.NewSigningHandler(c.Keys.Signer(t), a, nil))(t)
		s := must.Get(athenz.NewSigningClient(c.ServeTLS(h, "x.y"), c.MutualTLS(cn)))(t)
		_, err := s(t.Context(), athenztest.Subject())
		if good {
			require.NoError(t, err)
			continue
		}
		require.ErrorContains(t, err, "answers 401", cn)
	}
	for _, names := range [][]string{nil, {""}, {"A.b"}, {"a:role.b"}} {
		_, err := athenz.ClientCertificate(c.CA.TrustDomain(), c.CA.Bundle(), names...)
		require.ErrorContains(t, err, "athenz: client certificate: ")
	}
	require.Error(t, must.Err(athenz.ClientCertificate(spiffe.TrustDomain{}, c.CA.Bundle(), "a.b")))

	// A SPIFFE ID is no principal.
	a := must.Get(athenz.ClientCertificate(c.CA.TrustDomain(), c.CA.Bundle(), athenztest.Node))(t)
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	chain, _ := c.CA.Certificate("/"+athenztest.Node, func(*x509.Certificate) {})
	r.TLS = &tls.ConnectionState{PeerCertificates: chain}
	require.ErrorIs(t, must.Err(a.Authenticate(r)), authn.ErrRefused)
}

func TestSigningClient(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-6-3", "ATH-6-4", "ATH-6-6")
	for _, address := range []string{"", "http://127.0.0.1", "https://", "https://u@h", "https://h?x=1", "unix:///x"} {
		_, err := athenz.NewSigningClient(address, new(http.Client))
		require.ErrorContains(t, err, "athenz: new signing client: ", address)
	}
	require.Error(t, must.Err(athenz.NewSigningClient("https://h", nil)))

	var answer string
	code := http.StatusOK
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		assert.JSONEq(t, `{"subject":{"ID":"media-sports/web-0","Domain":"media.sports","Service":"frontend","IP":"10.1.2.3"}}`, string(body))
		assert.Equal(t, "/base/v1/jwt", r.URL.Path)
		if code == http.StatusFound {
			http.Redirect(w, r, "/elsewhere", code)
			return
		}
		w.WriteHeader(code)
		_, _ = io.WriteString(w, answer)
	}))
	t.Cleanup(s.Close)
	c := must.Get(athenz.NewSigningClient(s.URL+"/base/", s.Client()))(t)
	good := newClaims().document(t)
	answer = `{"jwt":"` + good + `"}`
	text := must.Get(c(t.Context(), athenztest.Subject()))(t)
	assert.Equal(t, good, text)
	for _, answer = range []string{"", "x", "{}", `{"jwt":7}`, `{"jwt":""}`, `{"jwt":"a.b"}`, `{"jwt":"` + strings.Repeat("a", 2<<20) + `"}`} {
		_, err := c(t.Context(), athenztest.Subject())
		require.ErrorContains(t, err, "athenz: ask the signing service: ", "%.30s", answer)
	}
	answer = "a reason"
	for _, code = range []int{201, 302, 400, 401, 500} {
		_, err := c(t.Context(), athenztest.Subject())
		require.ErrorContains(t, err, fmt.Sprint("answers ", code))
	}
	bad := athenztest.Subject()
	bad.Pod = ""
	require.ErrorIs(t, must.Err(c(t.Context(), bad)), athenz.ErrDocument)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, must.Err(c(ctx, athenztest.Subject())), context.Canceled)
}

func TestPods(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "ATH-1-1", "ATH-7.2-2", "ATH-12-2", "ATH-18-12")
	api := kubetest.Start(t)
	pods := must.Get(athenz.NewAPIServer(api.URL(), api.Client()))(t)
	api.Put("/api/v1/namespaces/media-sports/pods/web-0", object{
		"metadata": object{"uid": "u"}, "spec": object{"serviceAccountName": "frontend"},
		"status": object{"phase": "Running", "podIP": "10.1.2.3", "podIPs": array{object{"ip": "10.1.2.3"}, object{"ip": "fd00::3"}, object{"ip": "noise"}}},
	})
	p := must.Get(pods(t.Context(), namespace, "web-0"))(t)
	assert.Equal(t, athenztest.Subject().IP, p.IP)
	assert.Len(t, p.IPs, 2)
	assert.Equal(t, []string{"media-sports", "web-0", "u", "frontend", "Running"}, []string{p.Namespace, p.Name, p.UID, p.ServiceAccount, p.Phase})
	for _, name := range []string{"web-1", "", "..", "A", "a/b"} {
		require.ErrorIs(t, must.Err(pods(t.Context(), namespace, name)), athenz.ErrNoPod, name)
	}
	api.FailNext(1, kubetest.Fault{Code: 403, Reason: "Forbidden", Message: "no"}, nil)
	_, err := pods(t.Context(), namespace, "web-0")
	require.ErrorContains(t, err, "athenz: pod")
	require.NotErrorIs(t, err, athenz.ErrNoPod)

	// A kubelet has all pods of its node, however many.
	body := `{"kind":"PodList","items":[{"metadata":{"name":"other","namespace":"media-sports"},"x":"` + strings.Repeat("x", 6<<20) + `"},
		{"metadata":{"name":"web-0","namespace":"media-sports","deletionTimestamp":"2026-01-01T00:00:00Z"},"status":{"podIP":"10.1.2.3"}},
		{"metadata":{"name":"web-0","namespace":"other"},"status":{"podIP":"10.1.2.4"}}]}`
	kubelet := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Empty(t, r.Header.Get("Authorization"))
		if body == "forbidden" {
			http.Error(w, "Forbidden (user=agent, verb=get, resource=nodes, subresource(s)=[pods proxy])", http.StatusForbidden)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, body)
	}))
	t.Cleanup(kubelet.Close)
	pods = must.Get(athenz.NewKubelet(kubelet.URL, nil))(t)
	p = must.Get(pods(t.Context(), namespace, "web-0"))(t)
	assert.Equal(t, athenztest.Subject().IP, p.IP)
	assert.True(t, p.Deleting)
	assert.Equal(t, "default", p.ServiceAccount)
	require.ErrorIs(t, must.Err(pods(t.Context(), namespace, "web-1")), athenz.ErrNoPod)
	// One that is deleted may be listed beside the one that has its name now.
	body = strings.Replace(body, `]}`, `,{"metadata":{"name":"web-0","namespace":"media-sports"},"status":{"podIP":"10.1.2.5","phase":"Running"}},
		{"metadata":{"name":"web-0","namespace":"media-sports"},"status":{"podIP":"10.1.2.6","phase":"Failed"}}]}`, 1)
	p = must.Get(pods(t.Context(), namespace, "web-0"))(t)
	assert.Equal(t, "10.1.2.5", p.IP.String())
	assert.False(t, p.Deleting)
	body = "x"
	_, err = pods(t.Context(), namespace, "web-0")
	require.ErrorContains(t, err, "ask the kubelet")
	require.NotContains(t, err.Error(), "nodes/pods")
	body = "forbidden"
	_, err = pods(t.Context(), namespace, "web-0")
	require.ErrorContains(t, err, "bind a ClusterRole that may get nodes/pods, or nodes/proxy before Kubernetes 1.33")
	body = strings.Repeat(" ", 33<<20)
	require.ErrorContains(t, must.Err(pods(t.Context(), namespace, "web-0")), "larger than 32 MiB")
	ctx, cancel := context.WithTimeoutCause(t.Context(), time.Nanosecond, errors.New("late"))
	defer cancel()
	require.Error(t, must.Err(pods(ctx, namespace, "web-0")))

	// Without TLS and a token only on this machine, and only where the address says so.
	for _, address := range []string{"", "http://10.1.2.3:10255", "http://node:10255", "127.0.0.1:10255", "ftp://127.0.0.1"} {
		require.ErrorContains(t, must.Err(athenz.NewKubelet(address, nil)), "athenz: new kubelet: ", address)
	}
	require.Error(t, must.Err(athenz.NewKubelet("http://10.1.2.3:10255", new(http.Client))))
	for _, client := range []*http.Client{nil, new(http.Client)} {
		require.ErrorContains(t, must.Err(athenz.NewAPIServer("http://10.1.2.3", client)), "athenz: new API server: ")
	}
	pods = must.Get(athenz.NewAPIServer(api.URL(), nil))(t)
	require.NoError(t, must.Err(pods(t.Context(), namespace, "web-0")))
}
