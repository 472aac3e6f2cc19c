package ra_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	k8s "github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ra"
	"github.com/svidkit/svidkit/spiffe"
)

const (
	csrs       = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
	signerName = "example.com/mesh"
)

var (
	td = spiffe.MustParseTrustDomain("example.org")
	// of roots in examples, which have no test to ask for the time
	notBefore, notAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)

	webID = spiffe.MustParseID("spiffe://example.org/ns/prod/sa/web")
)

// authority is a CA certificate with its key, made with crypto/x509 alone.
type authority struct {
	cert   *x509.Certificate
	key    crypto.Signer
	parent *authority // nil for a root
}

func newAuthority(t testing.TB, name string, parent *authority) *authority {
	t.Helper()
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	a := &authority{key: key, parent: parent}
	a.cert = a.certify(t, key.Public(), &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(10, 0, 0),
	}, parent)
	return a
}

func (a *authority) certify(t testing.TB, pub crypto.PublicKey, tmpl *x509.Certificate, by *authority) *x509.Certificate {
	t.Helper()
	if tmpl.SerialNumber == nil {
		n := must.Get(rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 64)))(t)
		tmpl.SerialNumber = n.Add(n, big.NewInt(1))
	}
	issuer, key := tmpl, a.key
	if by != nil {
		issuer, key = by.cert, by.key
	}
	der := must.Get(x509.CreateCertificate(rand.Reader, tmpl, issuer, pub, key))(t)
	return must.Get(x509.ParseCertificate(der))(t)
}

// leaf signs what a request asks for, all of it, as a signer without any policy would.
func (a *authority) leaf(t testing.TB, csr *x509.CertificateRequest, life time.Duration, edit ...func(*x509.Certificate)) *x509.Certificate {
	t.Helper()
	tmpl := &x509.Certificate{
		Subject: csr.Subject, URIs: csr.URIs, DNSNames: csr.DNSNames, IPAddresses: csr.IPAddresses, EmailAddresses: csr.EmailAddresses,
		NotBefore: time.Now().Add(-5 * time.Minute), NotAfter: time.Now().Add(life), BasicConstraintsValid: true,
		KeyUsage:        x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment,
		ExtKeyUsage:     []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		ExtraExtensions: csr.Extensions,
	}
	if len(edit) > 0 { // else the extension of the request stays in the way
		tmpl.ExtraExtensions = nil
	}
	for _, e := range edit {
		e(tmpl)
	}
	pub := csr.PublicKey
	if tmpl.PublicKey != nil {
		pub = tmpl.PublicKey
	}
	return a.certify(t, pub, tmpl, a)
}

func encode(certs ...*x509.Certificate) []byte { return pki.MarshalCertificatesPEM(certs...) }

// object is a CertificateSigningRequest as the signers of these tests see it.
type object struct {
	APIVersion string         `json:"apiVersion"`
	Kind       string         `json:"kind"`
	Metadata   map[string]any `json:"metadata"`
	Spec       struct {
		Request           []byte   `json:"request"`
		SignerName        string   `json:"signerName"`
		ExpirationSeconds *int64   `json:"expirationSeconds,omitempty"`
		Usages            []string `json:"usages"`
		Username          string   `json:"username,omitempty"`
		Groups            []string `json:"groups,omitempty"`
	} `json:"spec"`
	Status struct {
		Conditions  []map[string]any `json:"conditions,omitempty"`
		Certificate []byte           `json:"certificate,omitempty"`
	} `json:"status"`
}

func (o *object) has(condition string) bool {
	for _, c := range o.Status.Conditions {
		if c["type"] == condition {
			return true
		}
	}
	return false
}

func (o *object) csr(t testing.TB) *x509.CertificateRequest {
	block, rest := pem.Decode(o.Spec.Request)
	if assert.NotNil(t, block) && assert.Empty(t, rest) {
		csr, err := x509.ParseCertificateRequest(block.Bytes)
		assert.NoError(t, err)
		return csr
	}
	return nil
}

func (o *object) life() time.Duration {
	if s := o.Spec.ExpirationSeconds; s != nil {
		return time.Duration(*s) * time.Second
	}
	return time.Hour
}

// cluster is an API server with a signer.
type cluster struct {
	*kubetest.Server
	t testing.TB

	mu   sync.Mutex
	seen []*object // requests when they were approved
}

// start runs a signer that answers each approved request of any name with what answer makes of it: the
// object is stored as answer leaves it. A nil answer never answers.
func start(t testing.TB, s *kubetest.Server, answer func(o *object)) *cluster {
	t.Helper()
	c := &cluster{Server: s, t: t}
	if answer == nil {
		return c
	}
	api := must.Get(k8s.New(k8s.Options{URL: s.URL(), Client: s.Client()}))(t)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		done := map[any]bool{}
		for ctx.Err() == nil {
			for event, err := range api.Watch(ctx, csrs, nil) {
				if err != nil {
					break
				}
				o := &object{}
				if json.Unmarshal(event.Object, o) != nil || event.Type == k8s.Deleted || !o.has("Approved") || done[o.Metadata["uid"]] {
					continue
				}
				done[o.Metadata["uid"]] = true
				c.mu.Lock()
				c.seen = append(c.seen, new(*o))
				c.mu.Unlock()
				answer(o)
				if s.Get(path(o), &object{}) {
					s.Put(path(o), o)
				}
			}
			select {
			case <-ctx.Done():
			case <-time.After(10 * time.Millisecond):
			}
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	return c
}

// instant is an API server whose signer answers each request while it is created.
type instant func(o *object) (certificate []byte)

func (f instant) RoundTrip(r *http.Request) (*http.Response, error) {
	o := new(object)
	if r.Method == http.MethodPost {
		if err := json.NewDecoder(r.Body).Decode(o); err != nil {
			return nil, err
		}
		o.Metadata["uid"], o.Metadata["resourceVersion"] = "1", "1"
		o.Status.Certificate = f(o)
	}
	body, err := json.Marshal(o)
	header := http.Header{"Content-Type": {"application/json"}}
	return &http.Response{StatusCode: http.StatusOK, Header: header, Body: io.NopCloser(bytes.NewReader(body))}, err
}

// ra returns an RA that asks the signer, with edit of its configuration.
func (f instant) ra(t testing.TB, edit func(*ra.Config)) *ra.RA {
	t.Helper()
	cfg := ra.Config{TrustDomain: td, Signer: signerName, APIServer: "https://127.0.0.1"}
	cfg.HTTPClient = &http.Client{Transport: f}
	edit(&cfg)
	return must.Get(ra.New(cfg))(t)
}

func path(o *object) string { return csrs + "/" + o.Metadata["name"].(string) }

// approved returns the requests that came to the signer.
func (c *cluster) approved() []*object {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.seen
}

// left returns how many requests are in the cluster.
func (c *cluster) left() int {
	r, err := http.NewRequestWithContext(context.Background(), http.MethodGet, c.URL()+csrs, nil)
	require.NoError(c.t, err)
	resp, err := c.Client().Do(r)
	require.NoError(c.t, err)
	defer func() { _ = resp.Body.Close() }()
	var list struct{ Items []json.RawMessage }
	require.NoError(c.t, json.NewDecoder(resp.Body).Decode(&list))
	return len(list.Items)
}

func (c *cluster) ra(edit ...func(*ra.Config)) *ra.RA {
	c.t.Helper()
	cfg := ra.Config{TrustDomain: td, Signer: signerName, APIServer: c.URL(), HTTPClient: c.Client()}
	for _, e := range edit {
		e(&cfg)
	}
	return must.Get(ra.New(cfg))(c.t)
}

// trust configures the roots.
func trust(t testing.TB, roots ...*authority) func(*ra.Config) {
	t.Helper()
	return func(c *ra.Config) { c.Roots = bundle(t, roots...) }
}

func bundle(t testing.TB, roots ...*authority) *spiffe.Bundle {
	t.Helper()
	var certs []*x509.Certificate
	for _, r := range roots {
		certs = append(certs, r.cert)
	}
	return must.Get(spiffe.NewBundle(td, spiffe.BundleContents{X509Authorities: certs}))(t)
}

// certifying is an answer with certificates.
func certifying(t testing.TB, root *authority, edit ...func(*x509.Certificate)) func(*object) {
	return func(o *object) { o.Status.Certificate = encode(root.leaf(t, o.csr(t), o.life(), edit...)) }
}

func newKey(t testing.TB) crypto.Signer {
	t.Helper()
	return must.Get(pki.NewKey("ecdsa-p256"))(t)
}

// newCSR asks for names, also in forms that pki.NewCSR does not write.
func newCSR(t testing.TB, sans ...pki.SAN) *pki.CSR {
	t.Helper()
	tmpl := &x509.CertificateRequest{}
	if len(sans) > 0 {
		names := make([]asn1.RawValue, len(sans))
		for i, s := range sans {
			names[i] = asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: int(s.Type), Bytes: []byte(s.Value)}
		}
		value := must.Get(asn1.Marshal(names))(t)
		tmpl.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: value}}
	}
	der := must.Get(x509.CreateCertificateRequest(rand.Reader, tmpl, newKey(t)))(t)
	return must.Get(pki.ParseCSR(der))(t)
}

// web is the usual request.
func web(t testing.TB) ca.Request {
	t.Helper()
	return ca.Request{CSR: newCSR(t, pki.IDSAN(webID)), ID: webID}
}

// bubble is an API server without a socket, also for a synctest bubble.
func bubble(t *testing.T) *kubetest.Server {
	s := kubetest.StartOn(t, 1, memconn.Listen())
	t.Cleanup(s.Client().CloseIdleConnections)
	return s
}

// signError tests that err is of a kind, and returns it.
func signError(t testing.TB, err, kind error, texts ...string) *ca.SignError {
	t.Helper()
	e, ok := errors.AsType[*ca.SignError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, kind, e.Kind, "%v", err)
	require.ErrorIs(t, err, kind)
	for _, text := range texts {
		require.ErrorContains(t, err, text)
	}
	assert.Less(t, len(err.Error()), 1500)
	assert.False(t, strings.ContainsAny(err.Error(), "\n\r\x00"), "%q", err)
	return e
}

func mustURL(t testing.TB, s string) *url.URL {
	t.Helper()
	return must.Get(url.Parse(s))(t)
}

func ip(s string) net.IP { return net.ParseIP(s) }
