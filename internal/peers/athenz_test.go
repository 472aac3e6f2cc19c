package peers_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	authnathenz "github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/athenzdemo"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	server "github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// testAthenz takes pods of the cluster through their lives with the programs of Athenz. The kubelet is made up: it has
// the pods of the API server. What happens is what happens with an API server that is made up.
func testAthenz(t *testing.T, c *cluster) {
	const namespace, pods = athenzdemo.Namespace, "/api/v1/namespaces/" + athenzdemo.Namespace + "/pods"
	c.Account(t, "k8s-admin", "athenz-callback")
	grant(t, c.Cluster, "k8s-admin", "athenz-callback", "ClusterRole", documented(t, "authn/athenz"))
	c.Account(t, namespace, athenzdemo.Account)
	phase := func(pod, ip, phase string) {
		c.Do(t, "PATCH", pods+"/"+pod+"/status", map[string]any{"status": map[string]any{"phase": phase, "podIP": ip, "podIPs": []any{map[string]any{"ip": ip}}}}, nil)
	}
	trace := athenzdemo.Show(t, athenzdemo.Build(t), io.Discard, athenzdemo.Kubernetes{
		URL: c.URL, Client: c.ClientOf(t, "k8s-admin", "athenz-callback"),
		List: func() ([]byte, error) {
			answer, err := c.Admin().Get(c.URL + pods)
			if err != nil {
				return nil, err
			}
			defer answer.Body.Close()
			var list json.RawMessage
			if answer.StatusCode != http.StatusOK {
				return nil, errors.New(answer.Status)
			}
			err = json.NewDecoder(answer.Body).Decode(&list)
			return list, err
		},
		Create: func(pod, ip string) {
			c.Pod(t, namespace, athenzdemo.Account, pod, "node-a")
			phase(pod, ip, "Running")
		},
		Phase:  phase,
		Delete: func(pod string) { c.DeletePod(t, namespace, pod) },
	})
	readme := must.Get(os.ReadFile("../../examples/athenz-sia/README.md"))(t)
	require.Contains(t, string(readme), trace.Diagram())
}

// TestZTSSvcCert has Athenz's own client judge our ZTS: it registers an instance by attestation data, and is refused.
func TestZTSSvcCert(t *testing.T) {
	t.Parallel()
	program := peers.Program(t, "zts-svccert")
	ca := spiffetest.NewCA(t, "athenz.io")
	z := cafake.NewZTS(t, ca, "/ns/media-sports/sa/frontend")
	instance := cafake.AthenzInstance(z.Fake)
	dir := t.TempDir()
	put := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, data, 0o600))
		return path
	}
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	der := must.Get(x509.MarshalECPrivateKey(key.(*ecdsa.PrivateKey)))(t)
	token := must.Get(z.Endpoint().Token(t.Context()))(t)
	roots := put("roots.pem", ca.Bundle().MarshalPEM())
	keyFile := put("key.pem", pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}))
	register := func(attestation, id string, more ...string) (leaf *x509.Certificate, says string) {
		t.Helper()
		cert, signer := filepath.Join(dir, id+".cert"), filepath.Join(dir, id+".ca")
		out, err := exec.Command(program, append([]string{
			"-zts", z.Endpoint().URL + "/zts/v1", "-cacert", roots, "-private-key", keyFile, "-attestation-data", put(id+".data", []byte(attestation)),
			"-provider", instance.Provider.String(), "-domain", instance.Service.Domain, "-service", instance.Service.Name, "-instance", id,
			"-dns-domain", instance.Suffix, "-cert-file", cert, "-signer-cert-file", signer,
		}, more...)...).CombinedOutput()
		if err != nil {
			return nil, string(out)
		}
		text := must.Get(os.ReadFile(cert))(t)
		chain := must.Get(pki.ParseCertificatesPEM(text))(t)
		text = must.Get(os.ReadFile(signer))(t)
		signers := must.Get(pki.ParseCertificatesPEM(text))(t)
		pool := x509.NewCertPool()
		for _, c := range signers {
			pool.AddCert(c)
		}
		_, err = chain[0].Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
		require.NoError(t, err)
		return chain[0], string(out)
	}
	leaf, says := register(token, "frontend-0")
	require.NotNil(t, leaf, says)
	assert.Equal(t, instance.Service.String(), leaf.Subject.CommonName)
	assert.Equal(t, key.Public(), leaf.PublicKey)
	assert.True(t, time.Now().Before(leaf.NotAfter))
	t.Log(leaf.DNSNames, leaf.URIs)

	for name, c := range map[string]struct {
		attestation string
		more        []string
		says        string
	}{
		"attestation":  {"another", nil, "401 the attestation data is not good"},
		"provider":     {token, []string{"-provider", "k8s.admin.other"}, "403 the provider"},
		"service":      {token, []string{"-service", "backend"}, "400 the service"},
		"trust domain": {token, []string{"-spiffe-trust-domain", "evil.example"}, "400 the SPIFFE URI"},
	} {
		leaf, says := register(c.attestation, "frontend-1", c.more...)
		t.Logf("%s: %s", name, says)
		assert.Nil(t, leaf, name)
		assert.Contains(t, says, c.says, name)
	}
}

// TestZTSServiceKey has Athenz's own client judge how the owner of a registered key is certified: it asks our ZTS as our client
// does, by the same path and header, with a service token and a body of the same form, for the same names.
func TestZTSServiceKey(t *testing.T) {
	t.Parallel()
	program := peers.Program(t, "zts-svccert")
	ca := spiffetest.NewCA(t, "athenz.io")
	z := cafake.NewZTS(t, ca, "/ns/media-sports/sa/frontend")
	service := athenzname.Service{Domain: "k8s.admin", Name: "athenz-callback"}
	key := must.Get(rsa.GenerateKey(rand.Reader, 2048))(t)
	type request struct {
		path, form string
		body       map[string]any
	}
	var mu sync.Mutex
	var requests []request
	z.Change(func(r *cafake.ZTSRules) {
		r.Keys = map[string]crypto.PublicKey{service.String() + " v1": key.Public()}
		r.Observe = func(q *http.Request, code int) {
			if code != 0 {
				return
			}
			data, err := io.ReadAll(q.Body)
			assert.NoError(t, err)
			q.Body = io.NopCloser(bytes.NewReader(data))
			var form []string // of the token: its tags
			for tag := range strings.SplitSeq(q.Header.Get("Athenz-Principal-Auth"), ";") {
				name, value, _ := strings.Cut(tag, "=")
				if name == "v" || name == "d" || name == "n" || name == "k" {
					name += "=" + value
				}
				form = append(form, name)
			}
			form = slices.DeleteFunc(form, func(tag string) bool { return tag == "h" || tag == "i" }) // which are optional
			got := request{path: q.Method + " " + q.URL.Path, form: strings.Join(form, ";")}
			assert.NoError(t, json.Unmarshal(data, &got.body))
			mu.Lock()
			defer mu.Unlock()
			requests = append(requests, got)
		}
	})
	dir := t.TempDir()
	put := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, data, 0o600))
		return path
	}
	roots := put("roots.pem", ca.Bundle().MarshalPEM())
	keyFile := put("key.pem", pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}))
	theirs := func(version string) (string, error) {
		cert := filepath.Join(dir, "cert")
		out, err := exec.Command(program, "-zts", z.Endpoint().URL+"/zts/v1", "-cacert", roots, "-private-key", keyFile, "-key-version", version,
			"-domain", service.Domain, "-service", service.Name, "-dns-domain", "svc.cluster.local", "-expiry-time", "60", "-subj-ou", "", "-subj-o", "", "-subj-c", "",
			"-cert-file", cert, "-signer-cert-file", filepath.Join(dir, "signers")).CombinedOutput()
		if err != nil {
			return "", errors.New(string(out))
		}
		text, err := os.ReadFile(cert)
		return string(text), err
	}
	text := must.Get(theirs("v1"))(t)
	chain := must.Get(pki.ParseCertificatesPEM([]byte(text)))(t)
	require.ErrorContains(t, must.Err(theirs("v2")), "401")

	id := must.Get(service.ID())(t)
	instance := athenzname.Instance{Service: service, Suffix: "svc.cluster.local", SPIFFE: id}
	want := must.Get(athenz.Expectation(instance, ca.TrustDomain()))(t)
	e := z.Endpoint()
	e.Token = func(context.Context) (string, error) {
		return authnathenz.SignServiceToken(authnathenz.ServiceToken{Service: service, KeyID: "v1"}, key)
	}
	c := must.Get(athenz.New(athenz.Options{Endpoint: e, Instance: instance, KeyID: "v1"}))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{CommonName: service.String(), SANs: want.Names()}))(t)
	ours := must.Get(c.Sign(t.Context(), csr, time.Hour))(t)

	require.Len(t, requests, 3)
	their, our := requests[0], requests[2]
	assert.Equal(t, their.path, our.path)
	assert.Equal(t, their.form, our.form)
	for _, name := range []string{"keyId", "expiryTime"} {
		assert.Equal(t, their.body[name], our.body[name])
	}
	assert.Equal(t, slices.Sorted(maps.Keys(their.body)), slices.Sorted(maps.Keys(our.body)))
	asked := must.Get(pki.ParseCSRPEM([]byte(their.body["csr"].(string))))(t)
	assert.Equal(t, asked.CommonName(), csr.CommonName())
	assert.ElementsMatch(t, asked.SANs(), csr.SANs())
	assert.Equal(t, chain[0].PublicKey, ours[0].PublicKey)
}

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
		nodes, err := kube.NewNodeAuthorizer(reviewer, []string{"node/agent"}, nil)
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
