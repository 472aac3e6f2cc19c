package peers_test

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ra"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// istiodRules are what Istio's CA needs: its Secret, and token reviews.
const istiodRules = `rules:
- {apiGroups: [""], resources: [secrets], verbs: [create, get, update, watch, list]}
- {apiGroups: [authentication.k8s.io], resources: [tokenreviews], verbs: [create]}
`

// istioCA is Istio's CA server with its CA in a Secret of a namespace.
type istioCA struct {
	*peers.Process
	url   string
	roots string // a file in PEM
}

// startIstioCA starts Istio's CA server with the Secret of a namespace.
func startIstioCA(t *testing.T, c *peers.Cluster, namespace string, environment ...string) *istioCA {
	t.Helper()
	program := peers.Program(t, "istio-ca")
	dir := t.TempDir()
	token := filepath.Join(dir, "token")
	require.NoError(t, os.WriteFile(token, []byte(c.Token(t, namespace, "istiod", "", peers.Issuer)), 0o600))
	cmd := exec.Command(program, "-api", c.URL, "-api-roots", c.RootsFile(), "-api-token", token, "-namespace", namespace, "-trust-domain", domain.String())
	cmd.Env = append(os.Environ(), environment...)
	// Istio's own log goes to standard output, too.
	out := must.Get(os.Create(filepath.Join(dir, "out")))(t)
	defer out.Close() // the program has it, too
	cmd.Stdout = out
	s := &istioCA{Process: peers.Start(t, filepath.Join(dir, "log"), cmd), roots: filepath.Join(dir, "root-cert.pem")}
	s.Ready(t, func() error {
		f, err := os.Open(out.Name())
		if err != nil {
			return err
		}
		defer f.Close() // only read
		for lines := bufio.NewScanner(f); lines.Scan(); {
			if line := lines.Text(); strings.HasPrefix(line, "127.0.0.1:") {
				s.url = "https://" + line
				return nil
			}
		}
		return context.DeadlineExceeded
	})
	require.NoError(t, os.WriteFile(s.roots, secretOf(t, c, namespace)["ca-cert.pem"], 0o600))
	return s
}

// secretOf returns the data of the Secret of a CA.
func secretOf(t testing.TB, c *peers.Cluster, namespace string) map[string][]byte {
	t.Helper()
	var secret struct {
		Type string
		Data map[string]string
	}
	c.Do(t, "GET", "/api/v1/namespaces/"+namespace+"/secrets/istio-ca-secret", nil, &secret)
	require.Equal(t, "istio.io/ca-root", secret.Type)
	data := map[string][]byte{}
	for name, value := range secret.Data {
		var err error
		data[name], err = base64.StdEncoding.DecodeString(value)
		require.NoError(t, err)
	}
	return data
}

// client returns a client of ours.
func (s *istioCA) client(t testing.TB, token string, edit func(*istioca.Options)) *istioca.CA {
	t.Helper()
	o := istioca.Options{
		Endpoint: caclient.Endpoint{
			URL: s.url, TrustDomain: domain, RootsFile: s.roots,
			Token: func(context.Context) (string, error) { return token, nil },
		},
		ClusterID: "Kubernetes",
	}
	if edit != nil {
		edit(&o)
	}
	return must.Get(istioca.New(o))(t)
}

// checked asks for a certificate that has to pass every check of package caclient.
func checked(t testing.TB, a caclient.CA, id spiffe.ID) ([]*x509.Certificate, error) {
	t.Helper()
	return must.Get(caclient.New(a, nil))(t).Sign(t.Context(), csrFor(t, id), time.Hour)
}

// TestIstioCA has our client ask Istio's CA server, which asks a real API server about tokens; and both CAs take
// over from each other.
func TestIstioCA(t *testing.T) {
	t.Parallel()
	peers.Program(t, "istio-ca") // before an API server is started
	c := peers.NewCluster(t)
	prepare := func(t *testing.T, namespace string) {
		c.Account(t, namespace, "istiod")
		grant(t, c, namespace, "istiod", "ClusterRole", istiodRules)
		c.Account(t, namespace, "ca")
		grant(t, c, namespace, "ca", "Role", documented(t, "pki/ca/kubesecret"))
	}
	c.Account(t, "prod", "web")
	c.Pod(t, "prod", "web", "web-1", "node-a")
	good := c.Token(t, "prod", "web", "web-1", "istio-ca")

	prepare(t, "istio-system")
	s := startIstioCA(t, c, "istio-system")

	t.Run("issue", func(t *testing.T) {
		t.Parallel()
		chain := must.Get(checked(t, s.client(t, good, nil), webID))(t)
		require.Equal(t, webID.String(), chain[0].URIs[0].String())
	})
	t.Run("roots from the answer", func(t *testing.T) {
		t.Parallel()
		transport := must.Get(x509Client(s.roots, nil))(t)
		a := s.client(t, good, func(o *istioca.Options) { o.RootsFile, o.HTTPClient = "", transport })
		set := must.Get(a.FetchBundles(t.Context()))(t)
		b := must.Get(set.Bundle(domain))(t)
		want := must.Get(spiffe.ParseBundlePEM(domain, secretOf(t, c, "istio-system")["ca-cert.pem"]))(t)
		require.True(t, b.Equal(want))
		must.Get(checked(t, a, webID))(t)
	})
	t.Run("renew", func(t *testing.T) {
		t.Parallel()
		m, err := secretcache.New(secretcache.Config{ID: webID, CA: s.client(t, good, nil), Lifetime: 4 * time.Second})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { _ = m.Run(ctx) })
		defer func() { cancel(); running.Wait() }()
		seen := map[string]bool{}
		require.Eventually(t, func() bool {
			svid, err := m.SVID()
			if err == nil {
				require.True(t, time.Now().Before(svid.NotAfter()))
				seen[svid.Leaf().SerialNumber.String()] = true
			}
			return len(seen) >= 4
		}, passing, often)
	})
	t.Run("renew with a certificate in place of a token", func(t *testing.T) {
		t.Parallel()
		key := must.Get(pki.NewKey("ecdsa-p256"))(t)
		csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(webID)}}))(t)
		chain := must.Get(s.client(t, good, nil).Sign(t.Context(), csr, time.Hour))(t)
		own := &tls.Certificate{PrivateKey: key}
		for _, c := range chain {
			own.Certificate = append(own.Certificate, c.Raw)
		}
		transport := must.Get(x509Client(s.roots, own))(t)
		_, err := checked(t, s.client(t, "", func(o *istioca.Options) { o.Token, o.HTTPClient = nil, transport }), webID)
		require.NoError(t, err)
	})
	for name, token := range map[string]string{
		"no token":       "",
		"garbage":        "garbage",
		"signature":      good[:len(good)-8] + "AAAAAAAA",
		"audience":       c.Token(t, "prod", "web", "web-1", "other"),
		"audience unset": c.Token(t, "prod", "web", "web-1", peers.Issuer),
	} {
		t.Run("refused "+name, func(t *testing.T) {
			t.Parallel()
			_, err := checked(t, s.client(t, token, nil), webID)
			require.ErrorIs(t, err, caclient.ErrUnauthenticated)
			if token != "" {
				require.NotContains(t, err.Error(), token)
			}
		})
	}
	t.Run("refused names", func(t *testing.T) {
		t.Parallel()
		_, err := checked(t, s.client(t, good, nil), spiffe.MustParseID("spiffe://example.org/ns/prod/sa/db"))
		require.ErrorIs(t, err, caclient.ErrBadAnswer, "Istio's CA signs what the token proves, and that is not what was asked for")
	})
	t.Run("refused server", func(t *testing.T) {
		t.Parallel()
		other := filepath.Join(t.TempDir(), "roots")
		var pem []byte
		for root := range newBundle(t).X509Authorities() {
			pem = append(pem, pki.MarshalCertificatesPEM(root)...)
		}
		require.NoError(t, os.WriteFile(other, pem, 0o600))
		_, err := checked(t, s.client(t, good, func(o *istioca.Options) { o.RootsFile = other }), webID)
		require.Error(t, err)
		require.NotContains(t, err.Error(), good)
	})

	open := func(t *testing.T, namespace string) *ca.Authority {
		cfg := quick()
		cfg.Create = namespace != "adopted"
		a := must.Get(ca.Open(t.Context(), cfg, secretStore(t, c, namespace, c.ClientOf(t, namespace, "ca"))))(t)
		return a
	}
	t.Run("our CA adopts Istio's, and gives it back", func(t *testing.T) {
		t.Parallel()
		prepare(t, "adopted")
		first := startIstioCA(t, c, "adopted")
		before := must.Get(checked(t, first.client(t, good, nil), webID))(t)
		first.Stop()
		istios := must.Get(spiffe.ParseBundlePEM(domain, secretOf(t, c, "adopted")["ca-cert.pem"]))(t)

		a := open(t, "adopted") // without Create
		stop := run(t, a)
		require.Len(t, a.Status().Roots, 1)
		verifies(t, a.Bundle(), before)
		ours := must.Get(a.Sign(t.Context(), ca.Request{CSR: csrFor(t, webID), ID: webID}))(t)
		verifies(t, istios, ours)

		root := must.Get(a.Rotate(t.Context()))(t)
		require.Eventually(t, func() bool {
			chain, err := a.Sign(t.Context(), ca.Request{CSR: csrFor(t, webID), ID: webID})
			return err == nil && chain[0].CheckSignatureFrom(root.Certificate) == nil
		}, passing, often)
		require.Eventually(t, func() bool {
			return assert.ObjectsAreEqual(serials(secretOf(t, c, "adopted")["ca-cert.pem"]), []string{root.ID})
		}, passing, often, "the Secret has the root that signs where Istio looks for it")
		stop()

		second := startIstioCA(t, c, "adopted")
		after := must.Get(checked(t, second.client(t, good, nil), webID))(t)
		require.NoError(t, after[0].CheckSignatureFrom(root.Certificate), "Istio's CA signs with our root")
		verifies(t, a.Bundle(), after)
		verifies(t, a.Bundle(), before)
	})
	t.Run("Istio's CA adopts ours", func(t *testing.T) {
		t.Parallel()
		prepare(t, "ours")
		a := open(t, "ours")
		s := startIstioCA(t, c, "ours")
		chain := must.Get(checked(t, s.client(t, good, nil), webID))(t)
		verifies(t, a.Bundle(), chain)
		require.True(t, open(t, "ours").Bundle().Equal(a.Bundle()), "it has left the record alone")
	})
}

// verifies checks a chain as a peer does.
func verifies(t *testing.T, b *spiffe.Bundle, chain []*x509.Certificate) {
	t.Helper()
	v := must.Get(spiffe.NewVerifier(b, spiffe.AllowIDs(webID), nil))(t)
	must.Get(v.VerifyChain(chain, spiffe.AnyRole))(t)
}

// x509Client returns a client that trusts the roots in a file, and presents a certificate unless that is nil.
func x509Client(roots string, own *tls.Certificate) (*http.Client, error) {
	pem, err := os.ReadFile(roots)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool}
	if own != nil {
		cfg.Certificates = []tls.Certificate{*own}
	}
	return &http.Client{Transport: &http.Transport{TLSClientConfig: cfg, ForceAttemptHTTP2: true}}, nil
}

const (
	requests   = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
	signerName = "example.com/mesh"
	failing    = "failing.example.org" // a DNS name that the signer does not certify

	// signerRules are those that the documentation of Kubernetes gives a signer.
	signerRules = `rules:
- {apiGroups: [certificates.k8s.io], resources: [certificatesigningrequests], verbs: [get, list, watch]}
- {apiGroups: [certificates.k8s.io], resources: [certificatesigningrequests/status], verbs: [update]}
- {apiGroups: [certificates.k8s.io], resources: [signers], resourceNames: [example.com/mesh], verbs: [sign]}
`
)

var webID = spiffe.MustParseID("spiffe://example.org/ns/prod/sa/web")

func csrFor(t testing.TB, id spiffe.ID, more ...pki.SAN) *pki.CSR {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	return must.Get(pki.NewCSR(key, pki.CSROptions{SANs: append([]pki.SAN{pki.IDSAN(id)}, more...)}))(t)
}

// signer is a controller in the cluster that signs the approved requests for signerName, with an authority of ours.
type signer struct {
	authority *ca.Authority
	cluster   *peers.Cluster
	client    *http.Client
}

// startSigner runs a signer until the test ends.
func startSigner(t *testing.T, c *peers.Cluster) *signer {
	t.Helper()
	c.Account(t, "signer", "signer")
	grant(t, c, "signer", "signer", "ClusterRole", signerRules)
	authority := must.Get(ca.New(ca.Config{TrustDomain: domain}))(t)
	s := &signer{authority: authority, cluster: c, client: c.ClientOf(t, "signer", "signer")}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		for ctx.Err() == nil {
			s.signAll(ctx)
			select {
			case <-ctx.Done():
			case <-time.After(often):
			}
		}
	})
	t.Cleanup(func() { cancel(); running.Wait() })
	return s
}

// signAll signs what there is to sign. What fails is tried again the next time.
func (s *signer) signAll(ctx context.Context) {
	var list struct{ Items []map[string]json.RawMessage }
	if s.call(ctx, "GET", requests, nil, &list) != nil {
		return
	}
	for _, o := range list.Items {
		var meta struct{ Name string }
		var spec struct {
			Request           []byte
			SignerName        string
			ExpirationSeconds int
		}
		var status struct {
			Certificate []byte           `json:"certificate,omitempty"`
			Conditions  []map[string]any `json:"conditions,omitempty"`
		}
		err := errors.Join(json.Unmarshal(o["metadata"], &meta), json.Unmarshal(o["spec"], &spec), json.Unmarshal(o["status"], &status))
		has := func(kind string) bool {
			return slices.ContainsFunc(status.Conditions, func(c map[string]any) bool { return c["type"] == kind })
		}
		if err != nil || spec.SignerName != signerName || !has("Approved") || has("Failed") || len(status.Certificate) > 0 {
			continue
		}
		if status.Certificate, err = s.sign(ctx, spec.Request, time.Duration(spec.ExpirationSeconds)*time.Second); err != nil {
			status.Conditions = append(status.Conditions, map[string]any{
				"type": "Failed", "status": "True", "reason": "Refused", "message": err.Error(),
			})
		}
		if o["status"], err = json.Marshal(status); err == nil {
			o["apiVersion"], o["kind"] = []byte(`"certificates.k8s.io/v1"`), []byte(`"CertificateSigningRequest"`)
			_ = s.call(ctx, "PUT", requests+"/"+meta.Name+"/status", o, nil)
		}
	}
}

func (s *signer) sign(ctx context.Context, pem []byte, ttl time.Duration) ([]byte, error) {
	csr, err := pki.ParseCSRPEM(pem)
	if err != nil {
		return nil, err
	}
	id, err := csr.ID()
	if err != nil {
		return nil, err
	}
	r := ca.Request{CSR: csr, ID: id, TTL: ttl}
	for _, san := range csr.SANs() {
		if san.Type == pki.DNS {
			r.DNSNames = append(r.DNSNames, san.Value)
		}
	}
	if slices.Contains(r.DNSNames, failing) {
		return nil, errors.New("that name is not for sale")
	}
	chain, err := s.authority.Sign(ctx, r)
	return pki.MarshalCertificatesPEM(chain...), err
}

func (s *signer) call(ctx context.Context, method, path string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	r, err := http.NewRequestWithContext(ctx, method, s.cluster.URL+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	response, err := s.client.Do(r)
	if err != nil {
		return err
	}
	defer response.Body.Close() // all of it is read
	answer, err := io.ReadAll(response.Body)
	switch {
	case err != nil:
		return err
	case response.StatusCode/100 != 2:
		return errors.New(response.Status)
	case out == nil:
		return nil
	}
	return json.Unmarshal(answer, out)
}

// registration returns a registration authority over the signer.
func (s *signer) registration(t *testing.T, client *http.Client, edit func(*ra.Config)) *ra.RA {
	t.Helper()
	cfg := ra.Config{TrustDomain: domain, Signer: signerName, Roots: s.authority.Bundle(), APIServer: s.cluster.URL, HTTPClient: client}
	if edit != nil {
		edit(&cfg)
	}
	return must.Get(ra.New(cfg))(t)
}

// pending returns how many requests of an account there are.
func (s *signer) pending(t testing.TB, namespace, account string) (n int) {
	var list struct {
		Items []struct{ Spec struct{ Username string } }
	}
	s.cluster.Do(t, "GET", requests, nil, &list)
	for _, o := range list.Items {
		if o.Spec.Username == "system:serviceaccount:"+namespace+":"+account {
			n++
		}
	}
	return n
}

// meddler edits each request before it is approved, so that the first approval conflicts.
type meddler struct {
	t       *testing.T
	cluster *peers.Cluster
	next    http.RoundTripper

	mu   sync.Mutex
	done map[string]bool
}

func (m *meddler) RoundTrip(r *http.Request) (*http.Response, error) {
	if path, ok := strings.CutSuffix(r.URL.Path, "/approval"); ok {
		m.mu.Lock()
		first := !m.done[path]
		m.done[path] = true
		m.mu.Unlock()
		if first {
			m.cluster.Do(m.t, "PATCH", path, map[string]any{"metadata": map[string]any{"labels": map[string]any{"edited": "yes"}}}, nil)
		}
	}
	return m.next.RoundTrip(r)
}

// testRegistrationAuthority has certificates signed through the API of the cluster.
func testRegistrationAuthority(t *testing.T, c *cluster) {
	const namespace = "registration"
	c.Account(t, namespace, "server")
	grant(t, c.Cluster, namespace, "server", "ClusterRole", documented(t, "pki/ra"))
	client := c.ClientOf(t, namespace, "server")
	s := c.signer

	t.Run("eight at once", func(t *testing.T) {
		a := s.registration(t, client, nil)
		var signing sync.WaitGroup
		for range 8 {
			signing.Go(func() {
				csr := csrFor(t, webID, pki.DNSSAN("web.example.org"))
				chain, err := a.Sign(t.Context(), ca.Request{CSR: csr, ID: webID, DNSNames: []string{"web.example.org"}, TTL: time.Hour})
				if !assert.NoError(t, err) {
					return
				}
				assert.True(t, pki.PublicKeysEqual(csr.PublicKey(), chain[0].PublicKey))
				assert.Equal(t, webID.String(), chain[0].URIs[0].String())
				assert.Equal(t, []string{"web.example.org"}, chain[0].DNSNames)
				assert.WithinDuration(t, time.Now().Add(time.Hour), chain[0].NotAfter, time.Minute)
			})
		}
		signing.Wait()
		assert.NoError(t, a.Health().Store)
	})
	t.Run("while another client edits the request", func(t *testing.T) {
		edited := *client
		edited.Transport = &meddler{t: t, cluster: c.Cluster, next: client.Transport, done: map[string]bool{}}
		must.Get(s.registration(t, &edited, nil).Sign(t.Context(), ca.Request{CSR: csrFor(t, webID), ID: webID}))(t)
	})
	t.Run("learned roots", func(t *testing.T) {
		a := s.registration(t, client, func(c *ra.Config) { c.Roots, c.LearnRoots = nil, true })
		_, err := a.Sign(t.Context(), ca.Request{CSR: csrFor(t, webID), ID: webID})
		require.Error(t, err, "the signer sends no root")
		assert.ErrorIs(t, err, ca.ErrGeneration)
	})
	for _, bad := range []struct {
		name    string
		edit    func(*ra.Config)
		request ca.Request
		is      error
		text    string
	}{
		{"refused by the signer", nil,
			ca.Request{CSR: csrFor(t, webID, pki.DNSSAN(failing)), DNSNames: []string{failing}}, ca.ErrGeneration, "not for sale"},
		{"too short for Kubernetes", nil, ca.Request{TTL: 9 * time.Minute}, ca.ErrTTL, ""},
		{"a signer that may not be approved", func(c *ra.Config) { c.Signer = "example.com/other" }, ca.Request{}, ca.ErrGeneration, "approve signers named example.com/other"},
		{"other roots", func(c *ra.Config) { c.Roots = newBundle(t) }, ca.Request{}, ca.ErrGeneration, ""},
	} {
		t.Run(bad.name, func(t *testing.T) {
			r := bad.request
			r.CSR, r.ID = cmp.Or(r.CSR, csrFor(t, webID)), webID
			_, err := s.registration(t, client, bad.edit).Sign(t.Context(), r)
			assert.ErrorIs(t, err, bad.is)
			assert.ErrorContains(t, err, bad.text)
		})
	}
	t.Run("no signer", func(t *testing.T) {
		c.Account(t, namespace, "other")
		grant(t, c.Cluster, namespace, "other", "ClusterRole", strings.ReplaceAll(documented(t, "pki/ra"), signerName, "example.com/none"))
		a := s.registration(t, c.ClientOf(t, namespace, "other"), func(c *ra.Config) { c.Signer = "example.com/none" })
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		_, err := a.Sign(ctx, ca.Request{CSR: csrFor(t, webID), ID: webID})
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Zero(t, s.pending(t, namespace, "other"))
	})
	assert.Zero(t, s.pending(t, namespace, "server"), "nothing is left behind")
}

// bundleOf returns a bundle of roots.
func bundleOf(t testing.TB, roots ...*x509.Certificate) *spiffe.Bundle {
	t.Helper()
	return must.Get(spiffe.NewBundle(domain, spiffe.BundleContents{X509Authorities: roots}))(t)
}

func bundleCerts(b *spiffe.Bundle) []*x509.Certificate { return slices.Collect(b.X509Authorities()) }

func newBundle(t testing.TB) *spiffe.Bundle {
	t.Helper()
	return must.Get(ca.New(ca.Config{TrustDomain: domain}))(t).Bundle()
}
