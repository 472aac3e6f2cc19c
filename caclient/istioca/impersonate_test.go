package istioca_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/istioca"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	server "github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// The metadata has the ID of the signing request, and only with the option.
func TestImpersonatedIdentity(t *testing.T) {
	t.Parallel()
	var sent []map[string]any
	url, client := listen(t, fake(func(r call) (*wire.IstioCertificateResponse, error) {
		sent = append(sent, r.msg.GetMetadata().AsMap()) // one call at a time
		return nil, grpchttp.Errorf(grpchttp.InvalidArgument, "no")
	}))
	o := istioca.Options{Endpoint: caclient.Endpoint{URL: url, HTTPClient: client}, CertSigner: "special"}
	_, err := newCA(t, o).Sign(t.Context(), freshCSR(t), 0)
	require.Error(t, err)
	o.Impersonate = true
	c := newCA(t, o)
	require.Error(t, must.Err(c.Sign(t.Context(), freshCSR(t), 0)))
	_, err = c.FetchBundles(t.Context()) // for a key without a name: the agent's own certificate has the roots
	require.Error(t, err)
	require.Equal(t, []map[string]any{
		{"CertSigner": "special"},
		{"CertSigner": "special", "ImpersonatedIdentity": webID.String()},
		{"CertSigner": "special"},
	}, sent)

	key := must.Get(pki.NewKey(pki.ECDSAP256))(t)
	for name, sans := range map[string][]pki.SAN{
		"no name":  nil,
		"DNS name": {pki.DNSSAN("web.test")},
		"two IDs":  {pki.IDSAN(webID), pki.IDSAN(domain.ID())},
	} {
		csr, err := pki.NewCSR(key, pki.CSROptions{SANs: sans})
		if err != nil {
			continue // package pki refuses it already
		}
		_, err = c.Sign(t.Context(), csr, 0)
		requireKind(t, err, caclient.ErrInvalid)
		require.ErrorContains(t, err, "whom to impersonate", name)
	}
	require.Len(t, sent, 3, "what is refused is not sent")
}

// node is a node of a cluster with a node agent, whose token is nodeToken, and pods of prod with the accounts w0, w1, and
// so on. Our CA trusts the agent.
type node struct {
	api         *kubetest.Server
	ca          istioca.Options
	connections atomic.Int32
	requests    atomic.Int32
	authority   *ca.Authority
}

const nodeToken = "node." + "agent." + "token"

func workload(i int) spiffe.ID {
	return spiffe.MustParseID(fmt.Sprintf("spiffe://example.org/ns/prod/sa/w%d", i))
}

func newNode(t testing.TB, pods int) *node {
	t.Helper()
	n := &node{api: kubetest.Start(t), authority: newAuthority(t, ca.Config{})}
	pod := func(namespace, name, account, node string) {
		n.api.Put("/api/v1/namespaces/"+namespace+"/pods/"+name, map[string]any{
			"metadata": map[string]any{"uid": "uid-" + name},
			"spec":     map[string]any{"serviceAccountName": account, "nodeName": node},
			"status":   map[string]any{"phase": "Running"},
		})
	}
	pod("istio-system", "agent-1", "agent", "n1")
	pod("prod", "elsewhere", "elsewhere", "n2")
	for i := range pods {
		account := fmt.Sprint("w", i)
		pod("prod", account+"-1", account, "n1")
	}
	n.api.TokenReviews(func(s kubetest.TokenReviewSpec) kubetest.TokenReviewStatus {
		if s.Token != nodeToken {
			return kubetest.TokenReviewStatus{Error: "no"}
		}
		return kubetest.TokenReviewStatus{Authenticated: true, Audiences: s.Audiences, User: kubetest.UserInfo{
			Username: "system:serviceaccount:istio-system:agent", UID: "account",
			Groups: []string{"system:serviceaccounts", "system:serviceaccounts:istio-system"},
			Extra: map[string][]string{
				"authentication.kubernetes.io/pod-name": {"agent-1"}, "authentication.kubernetes.io/pod-uid": {"uid-agent-1"},
			},
		}}
	})
	reviewer, err := kube.NewReviewer(&kube.ReviewerOptions{APIServer: n.api.URL(), HTTPClient: n.api.Client()})
	require.NoError(t, err)
	tokens, err := kube.TokenReview(kube.TokenReviewOptions{Reviewer: reviewer, TrustDomain: domain, Cluster: "Kubernetes"})
	require.NoError(t, err)
	nodes := must.Get(kube.NewNodeAuthorizer(reviewer, []string{"istio-system/agent"}, nil))(t)
	srv, err := server.New(server.Options{Signer: n.authority, Authenticator: tokens, NodeAuthorizer: nodes.Authorize})
	require.NoError(t, err)

	host := spiffetest.NewCA(t, "server.test")
	chain, key := host.Certificate("/ca")
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n.requests.Add(1)
		srv.ServeHTTP(w, r)
	}), tls.NewListener(&counting{l, &n.connections}, &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"},
		Certificates: []tls.Certificate{{Certificate: [][]byte{chain[0].Raw}, PrivateKey: key}},
	}))
	var protocols http.Protocols
	protocols.SetHTTP2(true)
	tr := &http.Transport{Protocols: &protocols, TLSClientConfig: &tls.Config{
		MinVersion: tls.VersionTLS12, InsecureSkipVerify: true, // who the server is does not matter here
	}}
	t.Cleanup(tr.CloseIdleConnections)
	n.ca = istioca.Options{
		Endpoint: caclient.Endpoint{
			URL: "https://" + l.Addr().String(), HTTPClient: &http.Client{Transport: tr}, TrustDomain: domain,
			Token: cafake.Give(nodeToken), Roots: n.authority.Bundle(),
		},
		ClusterID: "Kubernetes", Impersonate: true,
	}
	return n
}

// counting counts the connections that a listener accepts.
type counting struct {
	net.Listener
	n *atomic.Int32
}

func (l *counting) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err == nil {
		l.n.Add(1)
	}
	return c, err
}

// An agent with one token gets the certificate of a pod of its node, and no other.
func TestImpersonation(t *testing.T) {
	t.Parallel()
	n := newNode(t, 2)
	c, err := caclient.New(newCA(t, n.ca), nil)
	require.NoError(t, err)
	for _, id := range []spiffe.ID{workload(0), workload(1), spiffe.MustParseID("spiffe://example.org/ns/istio-system/sa/agent")} {
		csr, err := pki.NewCSR(must.Get(pki.NewKey(pki.ECDSAP256))(t), pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(id)}})
		require.NoError(t, err)
		chain, err := c.Sign(t.Context(), csr, time.Hour) // which checks the ID
		require.NoError(t, err)
		require.Equal(t, id.String(), chain[0].URIs[0].String())
	}
	for name, id := range map[string]string{
		"of another node": "spiffe://example.org/ns/prod/sa/elsewhere",
		"of no pod":       "spiffe://example.org/ns/prod/sa/none",
	} {
		csr, err := pki.NewCSR(must.Get(pki.NewKey(pki.ECDSAP256))(t), pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseID(id))}})
		require.NoError(t, err)
		_, err = c.Sign(t.Context(), csr, time.Hour)
		require.ErrorIs(t, err, caclient.ErrUnauthenticated, name)
		require.NotContains(t, err.Error(), nodeToken)
	}
	n.ca.Impersonate = false
	c = must.Get(caclient.New(newCA(t, n.ca), nil))(t)
	_, err = c.Sign(t.Context(), freshCSR(t), time.Hour)
	require.ErrorIs(t, err, caclient.ErrBadAnswer, "without impersonation the agent gets its own certificate")
}

// TestNodeAgent has one Manager obtain 1,000 identities with one token, over one connection.
func TestNodeAgent(t *testing.T) {
	rounds.Slow(t)
	const pods = 1000
	n := newNode(t, pods)
	fetched := new(fetches)
	fetched.CA = newCA(t, n.ca)
	m, err := secretcache.New(secretcache.Config{ID: spiffe.MustParseID("spiffe://example.org/ns/istio-system/sa/agent"), CA: fetched})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer func() { cancel(); running.Wait() }()
	running.Go(func() { _ = m.Run(ctx) })
	require.NoError(t, m.Ready(ctx))
	before, started := heap(), time.Now()
	for i := range pods {
		require.NoError(t, m.Add(workload(i)))
	}
	for i := range pods {
		limited, cancel := context.WithTimeout(ctx, time.Minute)
		_, err := m.GenerateSecret(limited, workload(i).String())
		cancel()
		require.NoError(t, err)
	}
	took, after := time.Since(started), heap()
	t.Logf("%d identities in %v: %d requests over %d connections, %d FetchBundles, %d token reviews, %d reads of pods, %.1f KiB each",
		pods, took.Round(time.Millisecond), n.requests.Load(), n.connections.Load(), fetched.n.Load(),
		n.api.Count("POST", "/apis/authentication"), n.api.Count("GET", "/api/v1/namespaces/"), float64(after-before)/1024/pods)
	assert.EqualValues(t, 1, n.connections.Load())
	assert.EqualValues(t, 1, fetched.n.Load(), "the bundles of all")
	assert.GreaterOrEqual(t, n.requests.Load(), int32(pods+1))
	runtime.KeepAlive(n)
}

// heap returns the bytes in use.
func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// fetches counts the calls of FetchBundles, which are not followed by a watch.
type fetches struct {
	caclient.CA
	n atomic.Int32
}

func (f *fetches) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	f.n.Add(1)
	return f.CA.FetchBundles(ctx)
}
