package peers_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ra"
	"github.com/svidkit/svidkit/spiffe"
)

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
	key := must.Get(pki.NewKey(pki.ECDSAP256))(t)
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
		a := s.registration(t, c.ClientOf(t, namespace, "other"), func(c *ra.Config) { c.Signer, c.Timeout = "example.com/none", 2*time.Second })
		_, err := a.Sign(t.Context(), ca.Request{CSR: csrFor(t, webID), ID: webID})
		assert.ErrorIs(t, err, spiffe.ErrNotReady)
		assert.ErrorContains(t, err, "does the signer")
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
	a := must.Get(ca.New(ca.Config{TrustDomain: domain}))(t)
	return a.Bundle()
}
