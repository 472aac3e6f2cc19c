package compare

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/linkerd/linkerd2-proxy-api/go/identity"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	security "istio.io/api/security/v1alpha1"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/caclient"
	client "github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe"
)

const istioWeb = "spiffe://cluster.local/ns/prod/sa/web"

// answer is what a fake istiod does with a request.
type answer func(ctx context.Context, r *security.IstioCertificateRequest) (*security.IstioCertificateResponse, error)

// istiod is a server of the published definitions, by grpc-go.
type istiod struct {
	security.UnimplementedIstioCertificateServiceServer
	answer answer
}

func (s istiod) CreateCertificate(ctx context.Context, r *security.IstioCertificateRequest) (*security.IstioCertificateResponse, error) {
	return s.answer(ctx, r)
}

// grpcIstiod serves by grpc-go.
func grpcIstiod(t testing.TB, f answer) (url string, client *tls.Config) {
	t.Helper()
	serverTLS, clientTLS := caTLS(t)
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	s := grpc.NewServer(grpc.Creds(credentials.NewTLS(serverTLS)))
	security.RegisterIstioCertificateServiceServer(s, istiod{answer: f})
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	return "https://" + l.Addr().String(), clientTLS
}

// connectIstiod serves by connect.
func connectIstiod(t testing.TB, f answer) (url string, client *tls.Config) {
	t.Helper()
	h := connect.NewUnaryHandler(istioca.CreateCertificate, func(ctx context.Context, r *connect.Request[security.IstioCertificateRequest]) (*connect.Response[security.IstioCertificateResponse], error) {
		ctx = metadata.NewIncomingContext(ctx, metadata.Pairs("authorization", r.Header().Get("Authorization"), "clusterid", r.Header().Get("ClusterID")))
		resp, err := f(ctx, r.Msg)
		if s, ok := status.FromError(err); ok && err != nil {
			e := connect.NewError(connect.Code(s.Code()), errors.New(s.Message()))
			for _, d := range s.Proto().GetDetails() {
				detail := must.Get(connect.NewErrorDetail(d))(t)
				e.AddDetail(detail)
			}
			return nil, e
		}
		return connect.NewResponse(resp), err
	})
	serverTLS, clientTLS := caTLS(t)
	return "https://" + serveCA(t, caserver.ServeOptions{Handler: h, TLS: serverTLS}), clientTLS
}

// serveCA serves until the test is over and returns the address.
func serveCA(t testing.TB, o caserver.ServeOptions) string {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- caserver.Serve(ctx, l, o) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	return l.Addr().String()
}

func h2Client(t testing.TB, cfg *tls.Config) *http.Client {
	t.Helper()
	tr := &http.Transport{Protocols: new(http.Protocols), TLSClientConfig: cfg.Clone()}
	tr.Protocols.SetHTTP2(true)
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// judges are servers of Istio's API that are not ours.
var judges = map[string]func(testing.TB, answer) (string, *tls.Config){"grpc-go": grpcIstiod, "connect": connectIstiod}

func istioClient(t testing.TB, url string, cfg *tls.Config) *client.CA {
	t.Helper()
	c := must.Get(client.New(client.Options{CertSigner: "special", ClusterID: "Kubernetes", Endpoint: caclient.Endpoint{
		URL: url, HTTPClient: h2Client(t, cfg), TrustDomain: spiffe.MustParseTrustDomain("cluster.local"),
		Token: func(context.Context) (string, error) { return "web", nil },
	}}))(t)
	return c
}

func istioCSR(t testing.TB) *pki.CSR {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	return must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseID(istioWeb))}}))(t)
}

// TestIstioClient has our client against servers of others: a certificate, every status code with the time
// to come back, deadlines and answers that are too large.
func TestIstioClient(t *testing.T) {
	t.Parallel()
	authority := newFickle(t)
	csr := istioCSR(t)
	for name, serve := range judges {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url, cfg := serve(t, func(ctx context.Context, r *security.IstioCertificateRequest) (*security.IstioCertificateResponse, error) {
				md, _ := metadata.FromIncomingContext(ctx)
				assert.Equal(t, []string{"Bearer web"}, md.Get("authorization"))
				assert.Equal(t, []string{"Kubernetes"}, md.Get("clusterid"))
				assert.Equal(t, int64(3600), r.GetValidityDuration())
				assert.Equal(t, "special", r.GetMetadata().GetFields()["CertSigner"].GetStringValue())
				request, err := pki.ParseCSRPEM([]byte(r.GetCsr()))
				if err != nil {
					return nil, err
				}
				chain, err := authority.Authority.Sign(ctx, ca.Request{CSR: request, ID: spiffe.MustParseID(istioWeb)})
				if err != nil {
					return nil, err
				}
				texts := []string{string(pki.MarshalCertificatesPEM(chain[0])), string(authority.Bundle().MarshalPEM())}
				return &security.IstioCertificateResponse{CertChain: texts}, nil
			})
			c := istioClient(t, url, cfg)
			chain := must.Get(c.Sign(t.Context(), csr, time.Hour))(t)
			require.Len(t, chain, 1)
			usages := []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
			_, err := chain[0].Verify(x509.VerifyOptions{Roots: authority.roots(), KeyUsages: usages})
			require.NoError(t, err)
			assert.Equal(t, istioWeb, chain[0].URIs[0].String())
		})
		t.Run(name+", codes", func(t *testing.T) {
			t.Parallel()
			kinds := map[codes.Code]error{
				codes.Canceled: caclient.ErrUnavailable, codes.Unknown: nil, codes.InvalidArgument: caclient.ErrInvalid,
				codes.DeadlineExceeded: caclient.ErrUnavailable, codes.NotFound: caclient.ErrInvalid, codes.AlreadyExists: caclient.ErrInvalid,
				codes.PermissionDenied: caclient.ErrDenied, codes.ResourceExhausted: caclient.ErrUnavailable, codes.FailedPrecondition: caclient.ErrInvalid,
				codes.Aborted: caclient.ErrUnavailable, codes.OutOfRange: caclient.ErrInvalid, codes.Unimplemented: caclient.ErrInvalid,
				codes.Internal: caclient.ErrUnavailable, codes.Unavailable: caclient.ErrUnavailable, codes.DataLoss: caclient.ErrUnavailable,
				codes.Unauthenticated: caclient.ErrUnauthenticated,
			}
			require.Len(t, kinds, 16)
			for code, kind := range kinds {
				url, cfg := serve(t, func(context.Context, *security.IstioCertificateRequest) (*security.IstioCertificateResponse, error) {
					s, err := status.New(code, "because é").WithDetails(&errdetails.ErrorInfo{Reason: "x"}, &errdetails.RetryInfo{RetryDelay: durationpb.New(1500 * time.Millisecond)})
					require.NoError(t, err)
					return nil, s.Err()
				})
				_, err := istioClient(t, url, cfg).Sign(t.Context(), csr, 0)
				e := must.As[*caclient.Error](err)(t, code)
				assert.Equal(t, kind, e.Kind, "%v: %v", code, err)
				assert.Equal(t, 1500*time.Millisecond, e.RetryAfter, code)
				assert.ErrorContains(t, err, "because é", code)
			}
		})
		t.Run(name+", limits", func(t *testing.T) {
			t.Parallel()
			ended := make(chan bool, 1)
			url, cfg := serve(t, func(ctx context.Context, r *security.IstioCertificateRequest) (*security.IstioCertificateResponse, error) {
				if r.GetValidityDuration() == 1 {
					_, bounded := ctx.Deadline()
					<-ctx.Done()
					ended <- bounded
					return nil, ctx.Err()
				}
				return &security.IstioCertificateResponse{CertChain: []string{strings.Repeat("x", 3<<20)}}, nil
			})
			c := istioClient(t, url, cfg)
			_, err := c.Sign(t.Context(), csr, 0)
			e := must.As[*caclient.Error](err)(t)
			assert.Equal(t, caclient.ErrBadAnswer, e.Kind)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err = c.Sign(ctx, csr, time.Second)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			assert.True(t, <-ended, "the server knows the deadline, and its call ends")
		})
	}
}

// connectDelay returns what an error of connect says of when to come back, or 0.
func connectDelay(t testing.TB, err error) time.Duration {
	t.Helper()
	e := must.As[*connect.Error](err)(t)
	for _, d := range e.Details() {
		v := must.Get(d.Value())(t)
		if info, ok := v.(*errdetails.RetryInfo); ok {
			return info.GetRetryDelay().AsDuration()
		}
	}
	return 0
}

// TestServicesWithConnect has clients of connect against both services: a certificate, the codes of a
// signer's failures with the time to come back, deadlines and requests that are too large.
func TestServicesWithConnect(t *testing.T) {
	t.Parallel()
	const web = "web.emojivoto.serviceaccount.identity.linkerd.cluster.local"
	authority := newFickle(t)
	istio, err := istioca.New(istioca.Options{Signer: authority, Authenticator: authn.Func(func(*http.Request) (*authn.Caller, error) {
		return &authn.Caller{ID: spiffe.MustParseID(istioWeb), Method: "test"}, nil
	})})
	require.NoError(t, err)
	certify := must.Get(linkerd.New(linkerd.Options{
		Mesh:   linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"},
		Signer: authority,
		Review: func(ctx context.Context, token string, _ []string) (*spiffe.Pod, error) {
			if token == "slow" {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return &spiffe.Pod{Namespace: "emojivoto", ServiceAccount: "web"}, nil
		},
	}))(t)
	mux := http.NewServeMux()
	mux.Handle(istioca.CreateCertificate, istio)
	mux.Handle(linkerd.Certify, certify)
	serverTLS, clientTLS := caTLS(t)
	url := "https://" + serveCA(t, caserver.ServeOptions{Handler: mux, TLS: serverTLS})
	hc := h2Client(t, clientTLS)
	gzipClient := connect.NewClient[security.IstioCertificateRequest, security.IstioCertificateResponse](hc, url+istioca.CreateCertificate, connect.WithGRPC(), connect.WithSendGzip())
	plainClient := connect.NewClient[security.IstioCertificateRequest, security.IstioCertificateResponse](hc, url+istioca.CreateCertificate, connect.WithGRPC())
	linkerdClient := connect.NewClient[identity.CertifyRequest, identity.CertifyResponse](hc, url+linkerd.Certify, connect.WithGRPC())
	der, _ := requestFor(t, web)
	csr := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
	callIstio := func(ctx context.Context, csr string) error {
		_, err := plainClient.CallUnary(ctx, connect.NewRequest(&security.IstioCertificateRequest{Csr: csr}))
		return err
	}
	callLinkerd := func(ctx context.Context, token string) error {
		_, err := linkerdClient.CallUnary(ctx, connect.NewRequest(&identity.CertifyRequest{Identity: web, Token: []byte(token), CertificateSigningRequest: der}))
		return err
	}
	require.NoError(t, callIstio(t.Context(), csr))
	require.NoError(t, callLinkerd(t.Context(), "web"))
	_, err = gzipClient.CallUnary(t.Context(), connect.NewRequest(&security.IstioCertificateRequest{Csr: csr}))
	assert.Equal(t, connect.CodeUnimplemented, connect.CodeOf(err), "compressed: %v", err)
	assert.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(callIstio(t.Context(), strings.Repeat("x", 1<<20))))
	assert.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(callLinkerd(t.Context(), strings.Repeat("x", 1<<20))))
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	assert.Equal(t, connect.CodeDeadlineExceeded, connect.CodeOf(callLinkerd(ctx, "slow")))

	for _, f := range signFailures {
		authority.err.Store(&ca.SignError{Kind: f.kind, Err: errors.New("x"), RetryAfter: 2 * time.Second})
		for err, want := range map[error]codes.Code{callIstio(t.Context(), csr): f.istio, callLinkerd(t.Context(), "web"): f.linkerd} {
			assert.Equal(t, connect.Code(want), connect.CodeOf(err), "%v: %v", f.kind, err)
			assert.Equal(t, 2*time.Second+time.Millisecond, connectDelay(t, err), f.kind)
			e, _ := errors.AsType[*connect.Error](err)
			assert.Equal(t, "2001", e.Meta().Get("Grpc-Retry-Pushback-Ms"), f.kind)
		}
	}
}
