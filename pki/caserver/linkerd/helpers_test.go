package linkerd_test

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/linkerd"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe"
)

const (
	web      = "web.emojivoto.serviceaccount.identity.linkerd.cluster.local"
	webToken = "the-token-of-web"
)

var mesh = linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"}

// signer is a Signer that signs whatever is asked for, with crypto/x509 alone, and that tests change.
type signer struct {
	anchors []*x509.Certificate
	chain   []*x509.Certificate // what signs, and what stands between it and an anchor
	inChain int                 // how many of chain are sent
	key     *ecdsa.PrivateKey
	edit    func(*x509.Certificate)
	swap    func([]*x509.Certificate) []*x509.Certificate // changes an answer
	err     error

	once   sync.Once
	bundle *spiffe.Bundle

	mu    sync.Mutex
	asked []ca.Request
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	return must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
}

// authority makes the certificate of a CA; a nil parent means itself.
func authority(t testing.TB, name string, key, parentKey *ecdsa.PrivateKey, parent *x509.Certificate, edit func(*x509.Certificate)) *x509.Certificate {
	t.Helper()
	tmpl := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(100 * 24 * time.Hour),
		BasicConstraintsValid: true, IsCA: true, KeyUsage: x509.KeyUsageCertSign,
	}
	if edit != nil {
		edit(tmpl)
	}
	if parent == nil {
		parent, parentKey = tmpl, key
	}
	return create(t, tmpl, parent, &key.PublicKey, parentKey)
}

func serial() *big.Int {
	n, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		panic(err)
	}
	return n.Add(n, big.NewInt(1))
}

func create(t testing.TB, tmpl, parent *x509.Certificate, pub crypto.PublicKey, key crypto.Signer) *x509.Certificate {
	t.Helper()
	der := must.Get(x509.CreateCertificate(rand.Reader, tmpl, parent, pub, key))(t)
	return must.Get(x509.ParseCertificate(der))(t)
}

// newSigner has one root, which signs.
func newSigner(t testing.TB) *signer {
	t.Helper()
	key := newKey(t)
	root := authority(t, "identity.linkerd.cluster.local", key, nil, nil, nil)
	return &signer{anchors: []*x509.Certificate{root}, chain: []*x509.Certificate{root}, key: key}
}

func (s *signer) CallerBundle() *spiffe.Bundle { return s.Bundle() }

func (s *signer) Proven(*x509.Certificate) time.Time { return time.Time{} }

func (s *signer) Bundle() *spiffe.Bundle {
	s.once.Do(func() {
		if s.anchors == nil {
			return
		}
		b, err := spiffe.NewBundle(spiffe.MustParseTrustDomain("cluster.local"), spiffe.BundleContents{X509Authorities: s.anchors})
		if err != nil {
			panic(err)
		}
		s.bundle = b
	})
	return s.bundle
}

func (s *signer) Sign(ctx context.Context, r ca.Request) ([]*x509.Certificate, error) {
	s.mu.Lock()
	s.asked = append(s.asked, r)
	s.mu.Unlock()
	if s.err != nil {
		return nil, s.err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	now := time.Now()
	end := now.Add(r.TTL)
	if end.After(s.chain[0].NotAfter) {
		end = s.chain[0].NotAfter
	}
	tmpl := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: r.CommonName}, DNSNames: r.DNSNames,
		NotBefore: now.Add(-r.Backdate), NotAfter: end,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if s.edit != nil {
		s.edit(tmpl)
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, s.chain[0], r.CSR.PublicKey(), s.key)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	out := append([]*x509.Certificate{leaf}, s.chain[:s.inChain]...)
	if s.swap != nil {
		out = s.swap(out)
	}
	return out, nil
}

func (s *signer) requests() []ca.Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]ca.Request(nil), s.asked...)
}

// tokens is what the API server of these tests knows.
var tokens = map[string]any{
	webToken:       spiffe.Pod{Namespace: "emojivoto", ServiceAccount: "web"},
	"voting":       spiffe.Pod{Namespace: "emojivoto", ServiceAccount: "voting"},
	"dotted":       spiffe.Pod{Namespace: "emojivoto", ServiceAccount: "web.v1"},
	"upper":        spiffe.Pod{Namespace: "emojivoto", ServiceAccount: "Web"},
	"empty":        spiffe.Pod{},
	"garbage":      fmt.Errorf("tokens: it is no JWT: %w", kube.ErrInvalidToken),
	"unknown":      fmt.Errorf("tokens: not known: %w", kube.ErrNotAuthenticated),
	"unreviewable": fmt.Errorf("tokens: the API server is away"),
	"nothing":      nil,
}

func review(_ context.Context, token string, audiences []string) (*spiffe.Pod, error) {
	if len(audiences) != 1 || audiences[0] != "identity.l5d.io" {
		return nil, fmt.Errorf("tokens: audiences %q: %w", audiences, kube.ErrNotAuthenticated)
	}
	v, ok := tokens[token]
	switch v := v.(type) {
	case spiffe.Pod:
		return &v, nil
	case error:
		return nil, v
	}
	if ok {
		return nil, nil
	}
	return nil, fmt.Errorf("tokens: not known: %w", kube.ErrNotAuthenticated)
}

// rpcClient calls the method with generated messages.
type rpcClient struct{ c *grpchttp.Client }

func newClient(c *http.Client, url string) *rpcClient {
	return &rpcClient{grpchttp.NewClient(c, url, 1<<20)}
}

func (c *rpcClient) call(ctx context.Context, r *wire.CertifyRequest) (*wire.CertifyResponse, error) {
	request, err := proto.Marshal(r)
	if err != nil {
		return nil, err
	}
	answer, err := c.c.Unary(ctx, linkerd.Certify, nil, request)
	if err != nil {
		return nil, err
	}
	resp := new(wire.CertifyResponse)
	return resp, proto.Unmarshal(answer, resp)
}

// codeOf returns the code that a call has failed with, or OK.
func codeOf(err error) grpchttp.Code {
	if e, ok := errors.AsType[*grpchttp.Error](err); ok {
		return e.Code
	}
	return grpchttp.OK
}

// service is a Server that listens.
type service struct {
	*linkerd.Server
	*rpcClient
	signer *signer
	logs   *programtest.Log
	addr   string
	http   *http.Client
}

// serve serves over TLS, with a client without ALPN.
func serve(t testing.TB, o linkerd.Options) *service {
	t.Helper()
	s := &service{logs: new(programtest.Log)}
	if o.Signer == nil {
		o.Signer = newSigner(t)
	}
	s.signer, _ = o.Signer.(*signer)
	if o.Mesh == (linkerdname.Mesh{}) {
		o.Mesh = mesh
	}
	if o.Review == nil {
		o.Review = review
	}
	o.Logger = caservertest.Logger(s.logs)
	s.Server = must.Get(linkerd.New(o))(t)
	s.addr = caservertest.Serve(t, caserver.ServeOptions{Handler: s.Server, Logger: o.Logger})
	s.http = caservertest.ProxyClient(t)
	s.rpcClient = newClient(s.http, "http://"+s.addr)
	return s
}

func (s *service) certify(t testing.TB, r *wire.CertifyRequest) (*wire.CertifyResponse, error) {
	t.Helper()
	return s.call(t.Context(), r)
}

// csr makes a request in DER with crypto/x509.
func csr(t testing.TB, key crypto.Signer, edit func(*x509.CertificateRequest)) []byte {
	t.Helper()
	tmpl := &x509.CertificateRequest{Subject: pkix.Name{CommonName: web}, DNSNames: []string{web}}
	if edit != nil {
		edit(tmpl)
	}
	return must.Get(x509.CreateCertificateRequest(rand.Reader, tmpl, key))(t)
}

func goodRequest(t testing.TB) *wire.CertifyRequest {
	t.Helper()
	return &wire.CertifyRequest{Identity: web, Token: []byte(webToken), CertificateSigningRequest: csr(t, newKey(t), nil)}
}

// accept does what a proxy does with an answer, and returns the leaf.
func accept(t testing.TB, resp *wire.CertifyResponse, anchors []*x509.Certificate, name string, now time.Time) *x509.Certificate {
	t.Helper()
	leaf := must.Get(x509.ParseCertificate(resp.GetLeafCertificate()))(t)
	between, roots := x509.NewCertPool(), x509.NewCertPool()
	require.NotEmpty(t, resp.GetIntermediateCertificates())
	issuer := must.Get(x509.ParseCertificate(resp.GetIntermediateCertificates()[0]))(t)
	require.NoError(t, leaf.CheckSignatureFrom(issuer), "the first is the direct issuer")
	for _, der := range resp.GetIntermediateCertificates() {
		c := must.Get(x509.ParseCertificate(der))(t)
		between.AddCert(c)
	}
	for _, c := range anchors {
		roots.AddCert(c)
	}
	must.Get(leaf.Verify(x509.VerifyOptions{Roots: roots, Intermediates: between, CurrentTime: now}))(t)
	require.Equal(t, []string{name}, leaf.DNSNames)
	require.Empty(t, leaf.URIs)
	require.Empty(t, leaf.IPAddresses)
	require.Empty(t, leaf.EmailAddresses)
	require.Equal(t, leaf.NotAfter.Unix(), resp.GetValidUntil().GetSeconds())
	require.Zero(t, resp.GetValidUntil().GetNanos())
	sans := must.Get(pki.ParseSANs(leaf.Extensions))(t)
	require.Equal(t, []pki.SAN{pki.DNSSAN(name)}, sans, "of no other kind either")
	return leaf
}

func TestMain(m *testing.M) {
	rounds.Parallel(8)
	m.Run()
}
