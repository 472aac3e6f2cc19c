package peers_test

import (
	"context"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
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
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	server "github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// nodeRules are what the node authorizer of Istio's CA needs, whose client also looks at namespaces.
const nodeRules = istiodRules + `- {apiGroups: [""], resources: [pods], verbs: [get, list, watch]}
- {apiGroups: [""], resources: [namespaces], verbs: [get, list, watch]}
`

// TestNodeAgent has one agent obtain the certificates of the 1,000 pods of its node with its one token and over one
// connection: from Istio's CA, and from ours. Both ask a real API server.
func TestNodeAgent(t *testing.T) {
	t.Parallel()
	peers.Program(t, "istio-ca") // before an API server is started
	const pods = 1000
	c := peers.NewCluster(t)
	c.Account(t, "node", "agent")
	c.Pod(t, "node", "agent", "agent-1", "node-a")
	c.Account(t, "fleet", "default")
	var creating sync.WaitGroup
	for worker := range 8 {
		creating.Go(func() {
			for i := worker; i < pods; i += 8 {
				account := fmt.Sprint("w", i)
				c.Pod(t, "fleet", account, account+"-1", "node-a")
			}
		})
	}
	creating.Wait()
	c.Pod(t, "fleet", "elsewhere", "elsewhere-1", "node-b")
	token := c.Token(t, "node", "agent", "agent-1", "istio-ca")

	judge := func(t *testing.T, o istioca.Options, connections *atomic.Int32) {
		o.TrustDomain, o.ClusterID, o.Impersonate = domain, "Kubernetes", true
		o.Token = func(context.Context) (string, error) { return token, nil }
		client := must.Get(istioca.New(o))(t)
		for _, other := range []string{"elsewhere", "nobody"} {
			_, err := checked(t, client, spiffe.MustParseID("spiffe://example.org/ns/fleet/sa/"+other))
			require.ErrorIs(t, err, caclient.ErrUnauthenticated)
			require.NotContains(t, err.Error(), token)
		}
		counted := &countedCA{CA: client}
		m, err := secretcache.New(secretcache.Config{ID: spiffe.MustParseID("spiffe://example.org/ns/node/sa/agent"), CA: counted})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { _ = m.Run(ctx) })
		defer func() { cancel(); running.Wait() }()
		require.NoError(t, m.Ready(ctx))
		before, dialed, start := inUse(), connections.Load(), time.Now()
		for i := range pods {
			require.NoError(t, m.Add(fleet(i)))
		}
		for i := range pods {
			must.Get(m.GenerateSecret(ctx, fleet(i).String()))(t)
		}
		took := time.Since(start)
		t.Logf("%d identities in %v: %d requests over %d new connections, %d FetchBundles, %.1f KiB each", pods, took.Round(time.Millisecond),
			counted.signed.Load(), connections.Load()-dialed, counted.fetched.Load(), float64(inUse()-before)/1024/pods)
		assert.Equal(t, dialed, connections.Load(), "the connection of the first certificate serves all")
		assert.EqualValues(t, 1, counted.fetched.Load(), "the bundles of all")
	}

	t.Run("of Istio's CA", func(t *testing.T) {
		c.Account(t, "istio-system", "istiod")
		grant(t, c, "istio-system", "istiod", "ClusterRole", nodeRules)
		s := startIstioCA(t, c, "istio-system", "CA_TRUSTED_NODE_ACCOUNTS=node/agent")
		hc, dialed := dialing(t, s.roots)
		judge(t, istioca.Options{Endpoint: caclient.Endpoint{URL: s.url, RootsFile: s.roots, HTTPClient: hc}}, dialed)
	})
	t.Run("of ours", func(t *testing.T) {
		c.Account(t, "ca", "ca")
		grant(t, c, "ca", "ca", "ClusterRole", documented(t, "authn/kube"))
		api := c.ClientOf(t, "ca", "ca")
		reviewer := must.Get(kube.NewReviewer(&kube.ReviewerOptions{APIServer: c.URL, HTTPClient: api}))(t)
		tokens, err := kube.TokenReview(kube.TokenReviewOptions{Reviewer: reviewer, TrustDomain: domain, Cluster: "Kubernetes"})
		require.NoError(t, err)
		nodes, err := kube.NewNodeAuthorizer(kube.NodeAuthorizerOptions{APIServer: c.URL, HTTPClient: api, Accounts: []string{"node/agent"}})
		require.NoError(t, err)
		authority := must.Get(ca.New(ca.Config{TrustDomain: domain}))(t)
		h, err := server.New(server.Options{Signer: authority, Authenticator: tokens, NodeAuthorizer: nodes.Authorize})
		require.NoError(t, err)
		srv := httptest.NewUnstartedServer(h)
		srv.EnableHTTP2 = true
		srv.StartTLS()
		t.Cleanup(srv.Close)
		roots := filepath.Join(t.TempDir(), "roots")
		require.NoError(t, os.WriteFile(roots, append(pki.MarshalCertificatesPEM(srv.Certificate()),
			pki.MarshalCertificatesPEM(authority.Status().Roots[0].Certificate)...), 0o600))
		hc, dialed := dialing(t, roots)
		judge(t, istioca.Options{Endpoint: caclient.Endpoint{URL: srv.URL, Roots: authority.Bundle(), HTTPClient: hc}}, dialed)
	})
}

func fleet(i int) spiffe.ID {
	return spiffe.MustParseID(fmt.Sprintf("spiffe://example.org/ns/fleet/sa/w%d", i))
}

// dialing returns a client that trusts the roots in a file, and counts its connections.
func dialing(t *testing.T, roots string) (*http.Client, *atomic.Int32) {
	t.Helper()
	client := must.Get(x509Client(roots, nil))(t)
	n := new(atomic.Int32)
	dial := new(net.Dialer).DialContext
	tr := client.Transport.(*http.Transport)
	tr.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		n.Add(1)
		return dial(ctx, network, addr)
	}
	t.Cleanup(tr.CloseIdleConnections)
	return client, n
}

// countedCA counts the calls of a CA, whose bundles are not watched.
type countedCA struct {
	caclient.CA
	signed, fetched atomic.Int32
}

func (c *countedCA) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	c.signed.Add(1)
	return c.CA.Sign(ctx, csr, lifetime)
}

func (c *countedCA) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	c.fetched.Add(1)
	return c.CA.FetchBundles(ctx)
}

// inUse returns the bytes of the heap.
func inUse() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
