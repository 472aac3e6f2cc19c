package peers_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
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
		key := must.Get(pki.NewKey(pki.ECDSAP256))(t)
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
