package peers_test

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/caclient/caclienttest/storetest"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/kubesecret"
	"github.com/svidkit/svidkit/sds/kubesecrets"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

const (
	passing = 30 * time.Second       // for what an API server does a little later
	often   = 100 * time.Millisecond // to look
)

var domain = spiffe.MustParseTrustDomain("example.org")

// cluster is a real API server, and a signer for it.
type cluster struct {
	*peers.Cluster
	signer *signer
}

// TestKubernetes has the proofs against a real API server, which they share. Each has namespaces of its own.
func TestKubernetes(t *testing.T) {
	t.Parallel()
	// By Athenz.
	conformance.Covers(t, "ATH-1-1", "ATH-1-2", "ATH-1-3", "ATH-1-4", "ATH-1-5", "ATH-2-1", "ATH-7.1-1", "ATH-7.1-3", "ATH-7.1-4", "ATH-7.2-1", "ATH-7.2-2",
		"ATH-7.2-3", "ATH-7.2-4", "ATH-7.2-5", "ATH-11.1-4", "ATH-12-2", "ATH-12-3", "ATH-12-4", "ATH-12-5", "ATH-12-6")
	c := &cluster{Cluster: peers.NewCluster(t)}
	c.signer = startSigner(t, c.Cluster)
	for name, test := range map[string]func(*testing.T, *cluster){
		"replicas":               testReplicas,
		"store":                  testSecretStore,
		"token review":           testTokenReview,
		"login at OpenBao":       testOpenBaoLogin,
		"node authorizer":        testNodeAuthorizer,
		"registration authority": testRegistrationAuthority,
		"rights":                 testRights,
		"Athenz":                 testAthenz,
		"Linkerd mesh":           testLinkerdMesh,
		"gateway secrets":        testGatewaySecrets,
		"installed":              testInstalled,
		"brokers":                testBrokers,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, c)
		})
	}
}

func secretStore(t testing.TB, c *peers.Cluster, namespace string, client *http.Client) *kubesecret.Store {
	t.Helper()
	s := must.Get(kubesecret.New(kubesecret.Options{Namespace: namespace, APIServer: c.URL, HTTPClient: client}))(t)
	return s
}

// quick are the settings of a CA whose roots are replaced within seconds.
func quick() ca.Config {
	return ca.Config{
		TrustDomain: domain, Create: true, DefaultTTL: time.Hour, MaxTTL: time.Hour, RefreshHint: time.Second,
		Rotation: ca.Rotation{Manual: true, Propagation: 3 * time.Second},
	}
}

// run runs an authority until stop, or until the test ends.
func run(t testing.TB, a *ca.Authority) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = a.Run(ctx) })
	stop = func() { cancel(); running.Wait() }
	t.Cleanup(stop)
	return stop
}

// gate holds the first answer of each of several clients back until all have theirs, so that all have seen the same
// before any of them acts.
type gate struct {
	next http.RoundTripper
	all  *sync.WaitGroup
	once sync.Once
}

func (g *gate) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := g.next.RoundTrip(r)
	g.once.Do(func() { g.all.Done(); g.all.Wait() })
	return response, err
}

// version is a version of the Secret of a CA.
type version struct {
	Revision  uint64 `json:"revision"`
	Sequence  uint64 `json:"sequence"`
	Authority string `json:"authority"`

	roots  []string // their serial numbers
	active string
}

// watchSecret collects every version of the Secret of a CA, from before it exists until the test ends.
func watchSecret(t *testing.T, c *peers.Cluster, namespace string) func() []version {
	t.Helper()
	var list struct {
		Metadata struct{ ResourceVersion string }
	}
	path := "/api/v1/namespaces/" + namespace + "/secrets"
	c.Do(t, "GET", path, nil, &list)
	r, err := http.NewRequestWithContext(t.Context(), "GET",
		c.URL+path+"?watch=1&fieldSelector=metadata.name%3D"+"istio-ca-secret"+"&resourceVersion="+list.Metadata.ResourceVersion, nil)
	require.NoError(t, err)
	client := *c.Admin()
	client.Timeout = 0
	response := must.Get(client.Do(r))(t)
	require.Equal(t, http.StatusOK, response.StatusCode)

	var mu sync.Mutex
	var all []version
	var reading sync.WaitGroup
	reading.Go(func() {
		for d := json.NewDecoder(response.Body); ; {
			var event struct {
				Type   string
				Object struct{ Data map[string][]byte }
			}
			if d.Decode(&event) != nil { // the test has ended
				return
			}
			var v version
			data := event.Object.Data
			if assert.NoError(t, json.Unmarshal(data["svidkit-state.json"], &v), event.Type) {
				v.roots = serials(data["root-cert.pem"])
				v.active = strings.Join(serials(data["ca-cert.pem"]), " ")
				mu.Lock()
				all = append(all, v)
				mu.Unlock()
			}
		}
	})
	t.Cleanup(func() { _ = response.Body.Close(); reading.Wait() })
	return func() []version {
		mu.Lock()
		defer mu.Unlock()
		return append([]version{}, all...)
	}
}

func serials(b []byte) (out []string) {
	certs, _ := pki.ParseCertificatesPEM(b) // the caller compares what can be read
	for _, cert := range certs {
		out = append(out, cert.SerialNumber.Text(16))
	}
	return out
}

// testSecretStore has a Secret pass the suite of stores.
func testSecretStore(t *testing.T, c *cluster) {
	cases := 0
	storetest.Run(t, func(t *testing.T) storetest.Place {
		cases++
		namespace := fmt.Sprint("store-", cases)
		c.Account(t, namespace, "ca")
		grant(t, c.Cluster, namespace, "ca", "Role", documented(t, "pki/ca/kubesecret"))
		return storetest.Place{Open: func() (ca.Store, error) {
			return secretStore(t, c.Cluster, namespace, c.ClientOf(t, namespace, "ca")), nil
		}}
	})
}

// testReplicas starts eight replicas of a CA at the same moment, and has all of them rotate at the same moment. There is one
// root, then one more, and every write builds on the one before.
func testReplicas(t *testing.T, c *cluster) {
	const namespace = "replicas"
	c.Account(t, namespace, "ca")
	grant(t, c.Cluster, namespace, "ca", "Role", documented(t, "pki/ca/kubesecret"))
	history := watchSecret(t, c.Cluster, namespace)

	replicas := make([]*ca.Authority, 8)
	var opening, looked sync.WaitGroup
	looked.Add(len(replicas))
	for i := range replicas {
		client := c.ClientOf(t, namespace, "ca")
		client.Transport = &gate{next: client.Transport, all: &looked}
		store := secretStore(t, c.Cluster, namespace, client)
		opening.Go(func() {
			var err error
			replicas[i], err = ca.Open(t.Context(), quick(), store)
			assert.NoError(t, err)
		})
	}
	opening.Wait()
	for _, a := range replicas {
		require.NotNil(t, a)
		run(t, a)
	}
	first := replicas[0]
	converged := func(roots int) {
		t.Helper()
		require.EventuallyWithT(t, func(t *assert.CollectT) {
			for _, a := range replicas {
				require.Len(t, a.Status().Roots, roots)
				require.True(t, a.Bundle().Equal(first.Bundle()))
			}
		}, passing, often)
	}
	converged(1)
	web := spiffe.MustParseID("spiffe://example.org/ns/prod/sa/web")
	active := first.Status().Roots[0].ID
	for round := range 2 {
		var mu sync.Mutex
		var winners []string
		var rotating sync.WaitGroup
		for _, a := range replicas {
			rotating.Go(func() {
				root, err := a.Rotate(t.Context())
				if err != nil {
					assert.ErrorIs(t, err, ca.ErrRotating)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				winners = append(winners, root.ID)
			})
		}
		rotating.Wait()
		require.Len(t, winners, 1, "round %d", round)
		converged(round + 2)
		for _, a := range replicas {
			require.EventuallyWithT(t, func(t *assert.CollectT) {
				chain := must.Get(a.Sign(context.Background(), ca.Request{CSR: request(t), ID: web}))(t)
				require.NoError(t, chain[0].CheckSignatureFrom(rootOf(t, a, winners[0])), "the new root signs")
			}, passing, often)
		}
		require.NotEqual(t, active, winners[0])
		active = winners[0]
	}

	require.EventuallyWithT(t, func(t *assert.CollectT) {
		all := history()
		require.NotEmpty(t, all)
		require.Len(t, all[len(all)-1].roots, 3)
	}, passing, often)
	all := history()
	require.EqualValues(t, 1, all[0].Revision)
	require.Len(t, all[0].roots, 1)
	for i, v := range all[1:] {
		before := all[i]
		require.Equal(t, before.Revision+1, v.Revision, "a write builds on the last one")
		require.Equal(t, before.Authority, v.Authority)
		require.GreaterOrEqual(t, v.Sequence, before.Sequence)
		require.Subset(t, v.roots, before.roots, "no root is lost")
		require.LessOrEqual(t, len(v.roots), len(before.roots)+1)
		if v.active != before.active {
			require.Contains(t, before.roots, v.active, "a root is in the bundle before it signs")
		}
	}
}

func request(t require.TestingT) *pki.CSR {
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	return must.Get(pki.NewCSR(key, pki.CSROptions{}))(t)
}

func rootOf(t require.TestingT, a *ca.Authority, id string) *x509.Certificate {
	for _, r := range a.Status().Roots {
		if r.ID == id {
			return r.Certificate
		}
	}
	require.FailNow(t, "no such root", id)
	return nil
}

// testTokenReview proves callers by their tokens, with the rights that the documentation names.
func testTokenReview(t *testing.T, c *cluster) {
	const namespace = "review"
	c.Account(t, namespace, "server")
	grant(t, c.Cluster, namespace, "server", "ClusterRole", documented(t, "authn/kube"))
	c.Account(t, namespace, "web")
	uid := c.Pod(t, namespace, "web", "web-1", "node-a")
	c.Pod(t, namespace, "web", "web-2", "node-a")

	reviewer := func(o kube.ReviewerOptions) *kube.Reviewer {
		o.APIServer, o.HTTPClient = c.URL, c.ClientOf(t, namespace, "server")
		return must.Get(kube.NewReviewer(&o))(t)
	}
	r := reviewer(kube.ReviewerOptions{})
	require.NoError(t, r.Check(t.Context()))

	good := c.Token(t, namespace, "web", "web-1", "istio-ca", "other")
	t.Run("bound to a pod", func(t *testing.T) {
		a := must.Get(r.Review(t.Context(), good, []string{"istio-ca"}))(t)
		assert.NotEmpty(t, a.ServiceAccountUID)
		a.ServiceAccountUID = ""
		assert.Equal(t, &spiffe.Pod{
			Namespace: namespace, ServiceAccount: "web", Name: "web-1", UID: uid,
		}, withoutNode(t, a, "node-a"))
	})
	t.Run("bound to none", func(t *testing.T) {
		a, err := r.Review(t.Context(), c.Token(t, namespace, "web", "", "istio-ca"), []string{"wrong", "istio-ca"})
		require.NoError(t, err)
		assert.Equal(t, "web", a.ServiceAccount)
		assert.Empty(t, a.Name)
	})
	t.Run("as an authenticator", func(t *testing.T) {
		a, err := kube.TokenReview(kube.TokenReviewOptions{Reviewer: r, TrustDomain: domain, AllowPlaintext: true})
		require.NoError(t, err)
		hr := must.Get(http.NewRequestWithContext(t.Context(), "POST", "http://ca.test/", nil))(t)
		hr.Header.Set("Authorization", "Bearer "+good)
		caller := must.Get(a.Authenticate(hr))(t)
		assert.Equal(t, "spiffe://example.org/ns/review/sa/web", caller.ID.String())
		assert.Equal(t, "web-1", caller.Pod.Name)
	})

	other := c.Token(t, namespace, "web", "web-1", "other")
	api := c.Token(t, namespace, "web", "web-1", peers.Issuer)
	for _, bad := range []struct {
		name, token string
		options     kube.ReviewerOptions
		is          error
	}{
		// The first is refused by what it says of itself, and the second by the API server.
		{"audience", other, kube.ReviewerOptions{}, kube.ErrInvalidToken},
		{"audience, asked", other, kube.ReviewerOptions{AnyAudience: true}, nil},
		{"audience of the API server", api, kube.ReviewerOptions{}, kube.ErrInvalidToken},
		{"signature", good[:len(good)-8] + "AAAAAAAA", kube.ReviewerOptions{}, nil},
		{"no signature", good[:strings.LastIndex(good, ".")+1], kube.ReviewerOptions{}, nil},
		{"no JWT", "garbage", kube.ReviewerOptions{}, nil},
	} {
		t.Run("bad "+bad.name, func(t *testing.T) {
			_, err := reviewer(bad.options).Review(t.Context(), bad.token, []string{"istio-ca"})
			require.Error(t, err)
			if bad.is != nil {
				assert.ErrorIs(t, err, bad.is)
			}
			assert.NotErrorIs(t, err, kube.ErrReviewFailed)
			assert.True(t, errors.Is(err, kube.ErrInvalidToken) || errors.Is(err, kube.ErrNotAuthenticated), "%v", err)
			assert.NotContains(t, err.Error(), bad.token)
		})
	}
	t.Run("any audience", func(t *testing.T) {
		a, err := reviewer(kube.ReviewerOptions{AnyAudience: true}).Review(t.Context(), api, []string{"istio-ca"})
		require.NoError(t, err)
		assert.Equal(t, "web-1", a.Name)
	})

	t.Run("pod and account deleted", func(t *testing.T) {
		c.Account(t, namespace, "db")
		token := c.Token(t, namespace, "db", "", "istio-ca")
		for _, token := range []string{good, token} {
			must.Get(r.Review(t.Context(), token, []string{"istio-ca"}))(t)
		}
		c.DeletePod(t, namespace, "web-1")
		c.Do(t, "DELETE", "/api/v1/namespaces/"+namespace+"/serviceaccounts/db", nil, nil)
		refused := func() {
			require.EventuallyWithT(t, func(t *assert.CollectT) { // the API server remembers a good token for ten seconds
				for _, token := range []string{good, token} {
					_, err := r.Review(context.Background(), token, []string{"istio-ca"})
					require.Error(t, err)
					require.NotErrorIs(t, err, kube.ErrReviewFailed)
				}
			}, passing, time.Second)
		}
		refused()
		// Others of the same names are others.
		require.NotEqual(t, uid, c.Pod(t, namespace, "web", "web-1", "node-a"))
		c.Account(t, namespace, "db")
		time.Sleep(1500 * time.Millisecond) // longer than a refused token is remembered
		refused()
	})
}

// withoutNode checks the node of an account, and returns the account without.
func withoutNode(t *testing.T, a *spiffe.Pod, node string) *spiffe.Pod {
	t.Helper()
	assert.Equal(t, node, a.Node)
	out := *a
	out.Node = ""
	return &out
}

// testNodeAuthorizer has a proxy ask for the identities of the pods of its node, and of others.
func testNodeAuthorizer(t *testing.T, c *cluster) {
	const mesh, apps = "node-mesh", "node-apps"
	c.Account(t, mesh, "ca")
	grant(t, c.Cluster, mesh, "ca", "ClusterRole", documented(t, "authn/kube"))
	for _, account := range []string{"ztunnel", "impostor"} {
		c.Account(t, mesh, account)
		c.Pod(t, mesh, account, account, "node-a")
	}
	for _, account := range []string{"near", "far", "failed"} {
		c.Account(t, apps, account)
	}
	for i := range 3 {
		c.Pod(t, apps, "near", fmt.Sprint("near-", i), "node-a")
	}
	c.Pod(t, apps, "far", "far", "node-b")
	c.Pod(t, apps, "failed", "failed", "node-a")
	c.Do(t, "PATCH", "/api/v1/namespaces/"+apps+"/pods/failed/status", map[string]any{"status": map[string]any{"phase": "Failed"}}, nil)

	client := c.ClientOf(t, mesh, "ca")
	reviewer := must.Get(kube.NewReviewer(&kube.ReviewerOptions{APIServer: c.URL, HTTPClient: client}))(t)
	n, err := kube.NewNodeAuthorizer(reviewer, []string{mesh + "/ztunnel"}, nil)
	require.NoError(t, err)
	require.NoError(t, n.Check(t.Context()))

	caller := func(account, pod string) *authn.Caller {
		a, err := reviewer.Review(t.Context(), c.Token(t, mesh, account, pod, "istio-ca"), []string{"istio-ca"})
		require.NoError(t, err)
		id := must.Get(domain.WorkloadID("ns", a.Namespace, "sa", a.ServiceAccount))(t)
		return &authn.Caller{ID: id, Pod: &spiffe.Pod{Namespace: a.Namespace, ServiceAccount: a.ServiceAccount, Name: a.Name, UID: a.UID}}
	}
	id := func(account string) spiffe.ID {
		return must.Get(domain.WorkloadID("ns", apps, "sa", account))(t)
	}
	proxy := caller("ztunnel", "ztunnel")
	require.NoError(t, n.Authorize(t.Context(), proxy, id("near")))
	for name, err := range map[string]error{
		"a pod of another node":           n.Authorize(t.Context(), proxy, id("far")),
		"a pod that has failed":           n.Authorize(t.Context(), proxy, id("failed")),
		"no pod":                          n.Authorize(t.Context(), proxy, id("none")),
		"an account that is not trusted":  n.Authorize(t.Context(), caller("impostor", "impostor"), id("near")),
		"a token that is bound to no pod": n.Authorize(t.Context(), caller("ztunnel", ""), id("near")),
	} {
		assert.ErrorIs(t, err, kube.ErrDenied, name)
	}
	c.Pod(t, apps, "far", "far-2", "node-a")
	assert.NoError(t, n.Authorize(t.Context(), proxy, id("far")), "a pod that has just started")
	c.DeletePod(t, mesh, "ztunnel")
	assert.ErrorIs(t, n.Authorize(t.Context(), proxy, id("near")), kube.ErrDenied)
	c.Pod(t, mesh, "ztunnel", "ztunnel", "node-a")
	assert.ErrorIs(t, n.Authorize(t.Context(), proxy, id("near")), kube.ErrDenied, "the pod has another UID")
}

// TestOutage kills an API server under a CA and starts it again.
func TestOutage(t *testing.T) {
	t.Parallel()
	const namespace = "outage"
	c := peers.NewCluster(t)
	c.Account(t, namespace, "ca")
	grant(t, c, namespace, "ca", "Role", documented(t, "pki/ca/kubesecret"))
	cfg := quick()
	open := func() *ca.Authority {
		a := must.Get(ca.Open(t.Context(), cfg, secretStore(t, c, namespace, c.ClientOf(t, namespace, "ca"))))(t)
		return a
	}
	token := c.Token(t, namespace, "ca", "", "istio-ca")
	a, b := open(), open()
	stop := run(t, a)
	run(t, b)
	web := spiffe.MustParseID("spiffe://example.org/ns/prod/sa/web")
	sign := func(a *ca.Authority) error {
		return must.Err(a.Sign(t.Context(), ca.Request{CSR: request(t), ID: web, TTL: time.Minute}))
	}
	require.NoError(t, sign(a))
	before := a.Bundle()

	c.Account(t, namespace, "server")
	grant(t, c, namespace, "server", "ClusterRole", documented(t, "authn/kube"))
	reviewer, err := kube.NewReviewer(&kube.ReviewerOptions{APIServer: c.URL, HTTPClient: c.ClientOf(t, namespace, "server")})
	require.NoError(t, err)
	c.Account(t, namespace, "ra")
	grant(t, c, namespace, "ra", "ClusterRole", documented(t, "pki/ra"))
	registration := startSigner(t, c).registration(t, c.ClientOf(t, namespace, "ra"), nil)
	others := func() (review, sign error) {
		_, review = reviewer.Review(t.Context(), token, []string{"istio-ca"})
		_, sign = registration.Sign(t.Context(), ca.Request{CSR: csrFor(t, web), ID: web})
		return review, sign
	}
	review, signed := others()
	require.NoError(t, errors.Join(review, signed))

	c.KillServer()
	review, signed = others()
	require.ErrorIs(t, review, kube.ErrReviewFailed)
	require.ErrorIs(t, signed, spiffe.ErrNotReady)
	require.Eventually(t, func() bool { return a.Health().Store != nil }, passing, often, "the outage is reported")
	assert.NoError(t, a.Health().Signing)
	require.NoError(t, sign(a), "it goes on signing with what it read last")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	require.Error(t, must.Err(a.Rotate(ctx)), "a root that no replica can learn of is not made")
	require.True(t, a.Bundle().Equal(before))
	stop() // a replica that ends in the outage

	opened := make(chan error, 1)
	go func() { // a replica that starts in the outage waits
		late, err := ca.Open(t.Context(), cfg, secretStore(t, c, namespace, &http.Client{Transport: c.Admin().Transport}))
		if err == nil && !late.Bundle().Equal(before) {
			err = errors.New("it has another bundle")
		}
		opened <- err
	}()

	c.StartServer(t)
	require.Eventually(t, func() bool { review, signed := others(); return errors.Join(review, signed) == nil }, passing, often)
	require.Eventually(t, func() bool { return b.Health().Store == nil }, passing, often, "it has recovered")
	require.NoError(t, <-opened)
	require.True(t, b.Bundle().Equal(before))
	root := must.Get(b.Rotate(t.Context()))(t)
	require.Eventually(t, func() bool {
		chain, err := b.Sign(t.Context(), ca.Request{CSR: request(t), ID: web})
		return err == nil && chain[0].CheckSignatureFrom(root.Certificate) == nil
	}, passing, often, "rotation goes on")
	require.True(t, open().Bundle().Equal(b.Bundle()))
}

// shortDir returns a directory whose name leaves room for that of a Unix socket.
func shortDir(t *testing.T) string {
	t.Helper()
	dir := must.Get(os.MkdirTemp("", "pa"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) }) // the agent has ended
	return dir
}

// background runs f until the test ends, and waits for it then.
func background(t *testing.T, f func(ctx context.Context)) {
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { f(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
}

// pairOf returns the content of a Secret with a new certificate.
func pairOf(t testing.TB, ca *spiffetest.CA) map[string][]byte {
	t.Helper()
	certs, key := must.Get2(ca.SVID("/gateway").MarshalPEM())(t)
	return map[string][]byte{"tls.crt": certs, "tls.key": key}
}

// putSecret creates or replaces a Secret.
func putSecret(t testing.TB, c *peers.Cluster, namespace, name, kind string, data map[string][]byte) {
	t.Helper()
	path := "/api/v1/namespaces/" + namespace + "/secrets"
	object := map[string]any{
		"apiVersion": "v1", "kind": "Secret", "type": kind, "data": data,
		"metadata": map[string]any{"name": name, "labels": map[string]string{"gateway": "yes"}},
	}
	if c.Status(t, "GET", path+"/"+name) == http.StatusOK {
		c.Do(t, "PUT", path+"/"+name, object, nil)
	} else {
		c.Do(t, "POST", path, object, nil)
	}
}

// callerOf returns the context of a request of a service account.
func callerOf(t testing.TB, namespace, account string) (ctx context.Context) {
	t.Helper()
	id := must.Get(domain.WorkloadID("ns", namespace, "sa", account))(t)
	method := authn.Func(func(*http.Request) (*authn.Caller, error) { return &authn.Caller{ID: id, Method: "test"}, nil })
	next := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { ctx = r.Context() })
	authn.Require(method, next, nil).ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/", nil))
	return ctx
}

// testGatewaySecrets follows Secrets, in pages and by watches, and asks what service accounts may read.
func testGatewaySecrets(t *testing.T, c *cluster) {
	const namespace, other = "gateways", "gateways-other"
	ca := spiffetest.NewCA(t, "servers.test")
	c.Account(t, namespace, "agent")
	c.Account(t, namespace, "gateway")
	c.Account(t, namespace, "unbound")
	c.Account(t, other, "gateway")
	grant(t, c.Cluster, namespace, "agent", "ClusterRole", documented(t, "sds/kubesecrets"))
	may := "rules:\n- {apiGroups: [\"\"], resources: [secrets], verbs: [get, list, watch]}\n"
	role := grant(t, c.Cluster, namespace, "gateway", "Role", may)
	first := pairOf(t, ca)
	for i := range 130 { // more than one page
		putSecret(t, c.Cluster, namespace, fmt.Sprint("web-", i), "kubernetes.io/tls", first)
	}
	putSecret(t, c.Cluster, other, "web", "kubernetes.io/tls", first)
	putSecret(t, c.Cluster, namespace, "generic", "Opaque", map[string][]byte{"cert": first["tls.crt"], "key": first["tls.key"], "cacert": ca.Bundle().MarshalPEM()})
	putSecret(t, c.Cluster, namespace, "helm", "helm.sh/release.v1", first)

	for _, cfg := range []kubesecrets.Config{
		{AllNamespaces: true, LabelSelector: "gateway=yes", TrustDomain: domain, ReviewInterval: time.Second},
		{AllNamespaces: true, Type: "kubernetes.io/tls"},
		{Namespace: namespace},
	} {
		cfg.APIServer, cfg.HTTPClient = c.URL, c.ClientOf(t, namespace, "agent")
		src := must.Get(kubesecrets.New(cfg))(t)
		go func() { _ = src.Run(t.Context()) }()
		defer src.Close()
		await := func(name string, want map[string][]byte) {
			t.Helper()
			require.Eventually(t, func() bool {
				secret, err := src.GenerateSecret(t.Context(), name)
				if err != nil {
					return want == nil && errors.Is(err, fs.ErrNotExist)
				}
				chain, _, _ := secret.KeyPair()
				return string(chain) == string(want["tls.crt"])
			}, passing, often, name)
		}
		name := "kubernetes://" + namespace + "/web-"
		putSecret(t, c.Cluster, namespace, "web-0", "kubernetes.io/tls", first)
		for _, i := range []int{0, 64, 129} {
			await(fmt.Sprint(name, i), first)
		}
		await("kubernetes://"+namespace+"/helm", nil)
		if cfg.Type == "" {
			await("kubernetes://"+namespace+"/generic", first)
			must.Get(src.GenerateSecret(t.Context(), "kubernetes://"+namespace+"/generic-cacert"))(t)
		}
		if cfg.AllNamespaces {
			await("kubernetes://"+other+"/web", first)
		}
		for range 3 {
			next := pairOf(t, ca)
			putSecret(t, c.Cluster, namespace, "web-0", "kubernetes.io/tls", next)
			await(name+"0", next)
		}
		c.Do(t, "DELETE", "/api/v1/namespaces/"+namespace+"/secrets/web-0", nil, nil)
		await(name+"0", nil)
		putSecret(t, c.Cluster, namespace, "web-0", "kubernetes.io/tls", first)
		await(name+"0", first)
		require.NoError(t, src.Report().Upstreams[0].Err)
		if cfg.TrustDomain.IsZero() {
			continue
		}

		allowed := func(namespace, account string) func() bool {
			ctx := callerOf(t, namespace, account)
			return func() bool {
				got, err := src.Resolve(ctx, "kubernetes://web")
				return err == nil && got == "kubernetes://"+namespace+"/web"
			}
		}
		require.Eventually(t, allowed(namespace, "gateway"), passing, often)
		assert.Never(t, allowed(namespace, "unbound"), 3*time.Second, often)
		assert.Never(t, allowed(other, "gateway"), time.Second, often, "an account of the same name")
		require.Error(t, must.Err(src.Resolve(callerOf(t, namespace, "gateway"), "kubernetes://"+other+"/web")))
		c.Do(t, "DELETE", role, nil, nil)
		still := allowed(namespace, "gateway")
		require.Eventually(t, func() bool { return !still() }, passing, often, "the right is taken")
	}
}

// useSecrets follows a Secret that changes, and asks what an account may read.
func useSecrets(t *testing.T, c *cluster, namespace string, client *http.Client) error {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	src, err := kubesecrets.New(kubesecrets.Config{AllNamespaces: true, TrustDomain: domain, APIServer: c.URL, HTTPClient: client})
	if err != nil {
		return err
	}
	defer src.Close()
	go func() { _ = src.Run(t.Context()) }()
	if _, err := src.GenerateSecret(ctx, "kubernetes://"+namespace+"/none"); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	ca := spiffetest.NewCA(t, "servers.test")
	putSecret(t, c.Cluster, namespace, "web", "kubernetes.io/tls", pairOf(t, ca))
	for end := time.Now().Add(passing); ; time.Sleep(often) {
		_, err := src.GenerateSecret(t.Context(), "kubernetes://"+namespace+"/web")
		if failed := src.Report().Upstreams[0].Err; failed != nil {
			return failed
		}
		if err == nil {
			break
		}
		if time.Now().After(end) {
			return err
		}
	}
	c.Account(t, namespace, "gateway")
	grant(t, c.Cluster, namespace, "gateway", "Role", "rules:\n- {apiGroups: [\"\"], resources: [secrets], verbs: [get]}\n")
	for end := time.Now().Add(passing); ; time.Sleep(often) {
		_, err := src.Resolve(callerOf(t, namespace, "gateway"), "kubernetes://web")
		if err == nil || time.Now().After(end) || strings.Contains(err.Error(), "may not ask") {
			return err
		}
	}
}
