package compare

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/linkerd/linkerd2-proxy-api/go/identity"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
	security "istio.io/api/security/v1alpha1"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/test/must"
	wireistio "github.com/svidkit/svidkit/internal/test/wire/istioca"
	wirelinkerd "github.com/svidkit/svidkit/internal/test/wire/linkerd"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe"
)

// fickle is an authority that fails when a test says so.
type fickle struct {
	*ca.Authority
	err atomic.Pointer[ca.SignError]
}

func (f *fickle) Sign(ctx context.Context, r ca.Request) ([]*x509.Certificate, error) {
	if err := f.err.Load(); err != nil {
		return nil, err
	}
	return f.Authority.Sign(ctx, r)
}

func newFickle(t testing.TB) *fickle {
	t.Helper()
	a := must.Get(ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("cluster.local")}))(t)
	return &fickle{Authority: a}
}

func (f *fickle) roots() *x509.CertPool {
	pool := x509.NewCertPool()
	for c := range f.Bundle().X509Authorities() {
		pool.AddCert(c)
	}
	return pool
}

// caTLS makes configurations for a CA on 127.0.0.1 and for those who trust it.
func caTLS(t testing.TB) (server, client *tls.Config) {
	t.Helper()
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der := must.Get(x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key))(t)
	cert := must.Get(x509.ParseCertificate(der))(t)
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}},
		&tls.Config{MinVersion: tls.VersionTLS13, RootCAs: roots, ServerName: "127.0.0.1"}
}

// dial makes a client of grpc-go.
func dial(t testing.TB, addr string, creds credentials.TransportCredentials) *grpc.ClientConn {
	t.Helper()
	c := must.Get(grpc.NewClient(addr, grpc.WithTransportCredentials(creds)))(t)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

func requestFor(t testing.TB, names ...string) (der []byte, key *ecdsa.PrivateKey) {
	t.Helper()
	key = must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	tmpl := &x509.CertificateRequest{DNSNames: names}
	if len(names) > 0 {
		tmpl.Subject = pkix.Name{CommonName: names[0]}
	}
	der = must.Get(x509.CreateCertificateRequest(rand.Reader, tmpl, key))(t)
	return der, key
}

// retryDelay returns what a status says of when to come back, or 0.
func retryDelay(err error) time.Duration {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.RetryInfo); ok {
			return info.GetRetryDelay().AsDuration()
		}
	}
	return 0
}

// signFailures are the errors of an authority, and the codes that clients of the two services see.
var signFailures = []struct {
	kind           error
	istio, linkerd codes.Code
}{
	{ca.ErrLimit, codes.ResourceExhausted, codes.ResourceExhausted},
	{spiffe.ErrNotReady, codes.Unavailable, codes.Unavailable},
	{ca.ErrAudit, codes.Unavailable, codes.Unavailable},
	{ca.ErrGeneration, codes.Internal, codes.Internal},
	{ca.ErrTTL, codes.InvalidArgument, codes.Internal},
	{ca.ErrCSR, codes.InvalidArgument, codes.FailedPrecondition},
	{ca.ErrIdentity, codes.PermissionDenied, codes.Internal},
}

// TestIstioCA has a client built from Istio's published definitions against the service.
func TestIstioCA(t *testing.T) {
	t.Parallel()
	const web = "spiffe://cluster.local/ns/prod/sa/web"
	authority := newFickle(t)
	srv, err := istioca.New(istioca.Options{Signer: authority, Authenticator: authn.Func(func(r *http.Request) (*authn.Caller, error) {
		switch r.Header.Get("Authorization") {
		case "":
			return nil, authn.ErrNoCredential
		case "Bearer web":
			return &authn.Caller{ID: spiffe.MustParseID(web), Method: "test"}, nil
		}
		return nil, authn.ErrRefused
	})})
	require.NoError(t, err)
	serverTLS, clientTLS := caTLS(t)
	conn := dial(t, serveCA(t, caserver.ServeOptions{Handler: srv, TLS: serverTLS}), credentials.NewTLS(clientTLS))
	client := security.NewIstioCertificateServiceClient(conn)
	der, key := requestFor(t, "ignored.example")
	csr := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
	as := func(token string) context.Context {
		return metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer "+token, "ClusterID", "Kubernetes")
	}
	good := &security.IstioCertificateRequest{Csr: csr, ValidityDuration: 3600}

	resp := must.Get(client.CreateCertificate(as("web"), good))(t)
	chain := resp.GetCertChain()
	require.Len(t, chain, 2, "leaf, roots")
	b, rest := pem.Decode([]byte(chain[0]))
	require.NotNil(t, b)
	require.Empty(t, rest)
	leaf := must.Get(x509.ParseCertificate(b.Bytes))(t)
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM([]byte(chain[1])))
	must.Get(leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}))(t)
	require.Len(t, leaf.URIs, 1)
	assert.Equal(t, web, leaf.URIs[0].String())
	assert.Empty(t, leaf.DNSNames)
	assert.True(t, key.PublicKey.Equal(leaf.PublicKey))
	assert.WithinDuration(t, time.Now().Add(time.Hour), leaf.NotAfter, time.Minute)

	for name, test := range map[string]struct {
		ctx  context.Context
		r    *security.IstioCertificateRequest
		code codes.Code
	}{
		"no token":               {t.Context(), good, codes.Unauthenticated},
		"bad token":              {as("x"), good, codes.Unauthenticated},
		"bad token and bad CSR":  {as("x"), &security.IstioCertificateRequest{Csr: "x"}, codes.Unauthenticated},
		"no CSR":                 {as("web"), &security.IstioCertificateRequest{}, codes.InvalidArgument},
		"CSR in DER as text":     {as("web"), &security.IstioCertificateRequest{Csr: "MIIB"}, codes.InvalidArgument},
		"longer than granted":    {as("web"), &security.IstioCertificateRequest{Csr: csr, ValidityDuration: 1 << 40}, codes.InvalidArgument},
		"lifetime that overflow": {as("web"), &security.IstioCertificateRequest{Csr: csr, ValidityDuration: 1<<63 - 1}, codes.InvalidArgument},
		"impersonation": {as("web"), &security.IstioCertificateRequest{Csr: csr, Metadata: &structpb.Struct{Fields: map[string]*structpb.Value{
			"ImpersonatedIdentity": structpb.NewStringValue("spiffe://cluster.local/ns/prod/sa/admin"),
		}}}, codes.Unauthenticated},
		"too large": {as("web"), &security.IstioCertificateRequest{Csr: strings.Repeat("x", 1<<20)}, codes.ResourceExhausted},
	} {
		_, err := client.CreateCertificate(test.ctx, test.r)
		assert.Equal(t, test.code, status.Code(err), "%s: %v", name, err)
	}
	for _, f := range signFailures {
		authority.err.Store(&ca.SignError{Kind: f.kind, Err: errors.New("x"), RetryAfter: 2 * time.Second})
		_, err := client.CreateCertificate(as("web"), good)
		assert.Equal(t, f.istio, status.Code(err), "%v: %v", f.kind, err)
		assert.InDelta(t, 2*time.Second, retryDelay(err), float64(2*time.Millisecond), "%v", f.kind)
	}
	authority.err.Store(nil)
	err = conn.Invoke(as("web"), "/istio.v1.auth.IstioCertificateService/Other", good, resp)
	assert.Equal(t, codes.Unimplemented, status.Code(err))
	ctx, cancel := context.WithTimeout(as("web"), time.Nanosecond)
	defer cancel()
	_, err = client.CreateCertificate(ctx, good)
	assert.Equal(t, codes.DeadlineExceeded, status.Code(err))
}

// TestLinkerdIdentity has a client built from Linkerd's published definitions against the service, with
// ALPN, without it, and without TLS.
func TestLinkerdIdentity(t *testing.T) {
	t.Parallel()
	const web = "web.emojivoto.serviceaccount.identity.linkerd.cluster.local"
	authority := newFickle(t)
	mesh := linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"}
	opts := linkerd.Options{Mesh: mesh, Signer: authority, Review: func(_ context.Context, token string, _ []string) (*spiffe.Pod, error) {
		switch token {
		case "web":
			return &spiffe.Pod{Namespace: "emojivoto", ServiceAccount: "web"}, nil
		case "voting":
			return &spiffe.Pod{Namespace: "emojivoto", ServiceAccount: "voting"}, nil
		case "invalid":
			return nil, kube.ErrInvalidToken
		case "away":
			return nil, errors.New("the API server is away")
		}
		return nil, kube.ErrNotAuthenticated
	}}
	srv := must.Get(linkerd.New(opts))(t)
	opts.AllowPlaintext = true
	open := must.Get(linkerd.New(opts))(t)
	serverTLS, clientTLS := caTLS(t)
	encrypted := serveCA(t, caserver.ServeOptions{Handler: srv, TLS: serverTLS})
	plain := serveCA(t, caserver.ServeOptions{Handler: open, Plaintext: true})

	der, key := requestFor(t, web)
	good := &identity.CertifyRequest{Identity: web, Token: []byte("web"), CertificateSigningRequest: der}
	clients := map[string]identity.IdentityClient{
		"ALPN":    identity.NewIdentityClient(dial(t, encrypted, credentials.NewTLS(clientTLS))),
		"no ALPN": identity.NewIdentityClient(dial(t, encrypted, meshTLS{clientTLS})),
		"no TLS":  identity.NewIdentityClient(dial(t, plain, insecure.NewCredentials())),
	}
	for name, client := range clients {
		resp, err := client.Certify(t.Context(), good)
		require.NoError(t, err, name)
		leaf, err := x509.ParseCertificate(resp.GetLeafCertificate())
		require.NoError(t, err, name)
		require.Len(t, resp.GetIntermediateCertificates(), 1)
		issuer, err := x509.ParseCertificate(resp.GetIntermediateCertificates()[0])
		require.NoError(t, err, name)
		require.NoError(t, leaf.CheckSignatureFrom(issuer))
		_, err = leaf.Verify(x509.VerifyOptions{Roots: authority.roots(), DNSName: web})
		require.NoError(t, err, name)
		assert.Equal(t, leaf.NotAfter.UTC(), resp.GetValidUntil().AsTime(), name)
		assert.True(t, key.PublicKey.Equal(leaf.PublicKey), name)
	}

	client := clients["no ALPN"]
	noName, _ := requestFor(t)
	twoNames, _ := requestFor(t, web, "b")
	for name, test := range map[string]struct {
		edit func(*identity.CertifyRequest)
		code codes.Code
	}{
		"no identity":       {func(r *identity.CertifyRequest) { r.Identity = "" }, codes.InvalidArgument},
		"no token":          {func(r *identity.CertifyRequest) { r.Token = nil }, codes.InvalidArgument},
		"no CSR":            {func(r *identity.CertifyRequest) { r.CertificateSigningRequest = nil }, codes.InvalidArgument},
		"CSR in PEM":        {func(r *identity.CertifyRequest) { r.CertificateSigningRequest = []byte("-----BEGIN") }, codes.InvalidArgument},
		"CSR without name":  {func(r *identity.CertifyRequest) { r.CertificateSigningRequest = noName }, codes.FailedPrecondition},
		"CSR for two names": {func(r *identity.CertifyRequest) { r.CertificateSigningRequest = twoNames }, codes.FailedPrecondition},
		"token refused":     {func(r *identity.CertifyRequest) { r.Token = []byte("x") }, codes.FailedPrecondition},
		"token invalid":     {func(r *identity.CertifyRequest) { r.Token = []byte("invalid") }, codes.InvalidArgument},
		"review fails":      {func(r *identity.CertifyRequest) { r.Token = []byte("away") }, codes.Internal},
		"token of another":  {func(r *identity.CertifyRequest) { r.Token = []byte("voting") }, codes.FailedPrecondition},
		"too large":         {func(r *identity.CertifyRequest) { r.Token = make([]byte, 1<<20) }, codes.ResourceExhausted},
	} {
		r := proto.CloneOf(good)
		test.edit(r)
		_, err := client.Certify(t.Context(), r)
		assert.Equal(t, test.code, status.Code(err), "%s: %v", name, err)
	}
	for _, f := range signFailures {
		authority.err.Store(&ca.SignError{Kind: f.kind, Err: errors.New("x"), RetryAfter: 2 * time.Second})
		_, err := client.Certify(t.Context(), good)
		assert.Equal(t, f.linkerd, status.Code(err), "%v: %v", f.kind, err)
		assert.InDelta(t, 2*time.Second, retryDelay(err), float64(2*time.Millisecond), "%v", f.kind)
	}
	authority.err.Store(nil)
	must.Get(client.Certify(t.Context(), good))(t)
}

// TestCAMessages compares the bytes of the published messages with those of ours, both ways.
func TestCAMessages(t *testing.T) {
	t.Parallel()
	meta := must.Get(structpb.NewStruct(map[string]any{"CertSigner": "x", "n": 1.5, "l": []any{true, nil}}))(t)
	for _, test := range []struct{ theirs, ours proto.Message }{
		{&security.IstioCertificateRequest{Csr: "c", ValidityDuration: -1, Metadata: meta}, new(wireistio.IstioCertificateRequest)},
		{&security.IstioCertificateResponse{CertChain: []string{"a", "", "b"}}, new(wireistio.IstioCertificateResponse)},
		{&identity.CertifyRequest{Identity: "a", Token: []byte("t"), CertificateSigningRequest: []byte{0x30}}, new(wirelinkerd.CertifyRequest)},
		{&identity.CertifyResponse{LeafCertificate: []byte("l"), IntermediateCertificates: [][]byte{{1}, {2}}}, new(wirelinkerd.CertifyResponse)},
	} {
		want := must.Get(proto.MarshalOptions{Deterministic: true}.Marshal(test.theirs))(t)
		require.NoError(t, proto.Unmarshal(want, test.ours))
		assert.Empty(t, test.ours.ProtoReflect().GetUnknown())
		got := must.Get(proto.MarshalOptions{Deterministic: true}.Marshal(test.ours))(t)
		assert.Equal(t, want, got)
		back := test.theirs.ProtoReflect().New().Interface()
		require.NoError(t, proto.Unmarshal(got, back))
		assert.True(t, proto.Equal(test.theirs, back))
		a, b := test.theirs.ProtoReflect().Descriptor(), test.ours.ProtoReflect().Descriptor()
		require.Equal(t, a.Fields().Len(), b.Fields().Len())
		for i := range a.Fields().Len() {
			x, y := a.Fields().Get(i), b.Fields().Get(i)
			assert.Equal(t, fmt.Sprint(x.Number(), x.Name(), x.Kind(), x.Cardinality()), fmt.Sprint(y.Number(), y.Name(), y.Kind(), y.Cardinality()))
		}
	}
}
