package istioca_test

import (
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/istioca"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/spiffe"
)

const (
	webID  = "spiffe://example.org/ns/prod/sa/web"
	nodeID = "spiffe://example.org/ns/kube-system/sa/ztunnel"
)

// tokens is an authenticator that knows tokens and what each proves; one that proves an error is refused
// with it.
type tokens map[string]any

func (k tokens) Authenticate(r *http.Request) (*authn.Caller, error) {
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok {
		return nil, fmt.Errorf("tokens: %w", authn.ErrNoCredential)
	}
	switch v := k[token].(type) {
	case *authn.Caller:
		return v, nil
	case error:
		return nil, v
	case func(*http.Request) (*authn.Caller, error):
		return v(r)
	}
	return nil, fmt.Errorf("tokens: %w", authn.ErrRefused)
}

func caller(id string) *authn.Caller {
	return &authn.Caller{ID: spiffe.MustParseID(id), Method: "test-token"}
}

var callers = tokens{"web": caller(webID), "node": caller(nodeID)}

// signer is a Signer that tests fill, and that remembers what it was asked for.
type signer struct {
	sign   func(context.Context, ca.Request) ([]*x509.Certificate, error)
	bundle func() *spiffe.Bundle

	mu   sync.Mutex
	last ca.Request
}

func (s *signer) Sign(ctx context.Context, r ca.Request) ([]*x509.Certificate, error) {
	s.mu.Lock()
	s.last = r
	s.mu.Unlock()
	return s.sign(ctx, r)
}

func (s *signer) CallerBundle() *spiffe.Bundle { return s.Bundle() }

func (s *signer) Proven(*x509.Certificate) time.Time { return time.Time{} }

func (s *signer) Bundle() *spiffe.Bundle { return s.bundle() }

func (s *signer) asked() ca.Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

func authority(t testing.TB) *ca.Authority {
	t.Helper()
	return must.Get(ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org")}))(t)
}

// wrap is a signer around an authority.
func wrap(a *ca.Authority) *signer { return &signer{sign: a.Sign, bundle: a.Bundle} }

// server is a Server that is served.
type server struct {
	*istioca.Server
	url    string
	client *http.Client // trusts it, and has no certificate
	tls    *tls.Config  // of the client
	logs   *programtest.Log
	net    *memconn.Listener // with plaintext
}

func newServer(t testing.TB, o istioca.Options) *istioca.Server {
	t.Helper()
	return must.Get(istioca.New(o))(t)
}

// serve serves o over TLS on a socket or, if it allows plaintext, on a network in memory, also for a bubble.
func serve(t testing.TB, o istioca.Options) *server {
	t.Helper()
	s := &server{logs: new(programtest.Log)}
	if o.Logger == nil {
		o.Logger = caservertest.Logger(s.logs)
	}
	if o.Authenticator == nil {
		o.Authenticator = callers
	}
	if o.Signer == nil {
		o.Signer = authority(t)
	}
	s.Server = newServer(t, o)
	if o.AllowPlaintext {
		s.net = memconn.Listen()
		caservertest.ServeOn(t, s.net, caserver.ServeOptions{Handler: s.Server, Plaintext: true})
		s.url, s.client = "http://ca.test", caservertest.HTTP2Client(t, nil)
		s.client.Transport.(*http.Transport).DialContext = s.net.DialContext
		return s
	}
	s.url, s.tls = caservertest.Listen(t, s.Server)
	s.client = caservertest.HTTP2Client(t, s.tls)
	return s
}

func raw(certs []*x509.Certificate) [][]byte {
	var out [][]byte
	for _, c := range certs {
		out = append(out, c.Raw)
	}
	return out
}

// call calls the method with generated messages.
func call(ctx context.Context, c *http.Client, url, token string, m *wire.IstioCertificateRequest) (*wire.IstioCertificateResponse, error) {
	header := http.Header{}
	if token != "" {
		header.Set("Authorization", "Bearer "+token)
	}
	return callWith(ctx, c, url, header, m)
}

func callWith(ctx context.Context, c *http.Client, url string, header http.Header, m *wire.IstioCertificateRequest) (*wire.IstioCertificateResponse, error) {
	request, err := proto.Marshal(m)
	if err != nil {
		return nil, err
	}
	answer, err := grpchttp.NewClient(c, url, 1<<20).Unary(ctx, istioca.CreateCertificate, header, request)
	if err != nil {
		return nil, err
	}
	resp := new(wire.IstioCertificateResponse)
	return resp, proto.Unmarshal(answer, resp)
}

func (s *server) call(t testing.TB, token string, m *wire.IstioCertificateRequest) (*wire.IstioCertificateResponse, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	return call(ctx, s.client, s.url, token, m)
}

// issue is call for what must succeed, and returns the certificates of each text.
func (s *server) issue(t testing.TB, token string, m *wire.IstioCertificateRequest) [][]*x509.Certificate {
	t.Helper()
	return parse(t, must.Get(s.call(t, token, m))(t).GetCertChain())
}

func parse(t testing.TB, texts []string) [][]*x509.Certificate {
	t.Helper()
	var out [][]*x509.Certificate
	for _, text := range texts {
		certs := must.Get(pki.ParseCertificatesPEM([]byte(text)))(t)
		require.Equal(t, text, string(pki.MarshalCertificatesPEM(certs...)), "exactly one newline after each block, and nothing else")
		out = append(out, certs)
	}
	return out
}

// refused requires an error with a code and a text from the server, and returns it.
func refused(t testing.TB, err error, code grpchttp.Code, text string) *grpchttp.Error {
	t.Helper()
	require.Error(t, err)
	e := must.As[*grpchttp.Error](err)(t)
	require.Equal(t, code, e.Code, "%v", err)
	require.Equal(t, text, e.Message)
	require.True(t, e.Remote, "%v", err)
	return e
}

var testKey = sync.OnceValue(func() crypto.Signer {
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	return key
})

func newCSR(t testing.TB, o pki.CSROptions) string { return csrFor(t, testKey(), o) }

func csrFor(t testing.TB, key crypto.Signer, o pki.CSROptions) string {
	t.Helper()
	return string(must.Get(pki.NewCSR(key, o))(t).PEM())
}

func requestFor(t testing.TB, key crypto.Signer) *wire.IstioCertificateRequest {
	t.Helper()
	return &wire.IstioCertificateRequest{Csr: csrFor(t, key, pki.CSROptions{})}
}

func goodRequest(t testing.TB) *wire.IstioCertificateRequest {
	t.Helper()
	return &wire.IstioCertificateRequest{Csr: newCSR(t, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseID(webID))}})}
}

func (s *server) metric(t testing.TB, name string) string {
	t.Helper()
	var b strings.Builder
	require.NoError(t, s.Report().Metrics(&b))
	for line := range strings.SplitSeq(b.String(), "\n") {
		if v, ok := strings.CutPrefix(line, "citadel_server_"+name+" "); ok {
			return v
		}
	}
	return ""
}

// post sends a body as it is, by net/http alone, and returns status, trailers (or the headers of an
// answer without a body) and body.
func post(ctx context.Context, t testing.TB, c *http.Client, url, token string, body io.Reader, edit func(*http.Request)) (*http.Response, []byte) {
	t.Helper()
	req := must.Get(http.NewRequestWithContext(ctx, http.MethodPost, url+istioca.CreateCertificate, body))(t)
	req.Header.Set("Content-Type", "application/grpc")
	req.Header.Set("Te", "trailers")
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	if edit != nil {
		edit(req)
	}
	resp := must.Get(c.Do(req))(t)
	defer resp.Body.Close()
	b := must.Get(io.ReadAll(resp.Body))(t)
	if resp.Trailer.Get("Grpc-Status") == "" {
		resp.Trailer = resp.Header
	}
	return resp, b
}

func TestMain(m *testing.M) {
	rounds.Parallel(8)
	m.Run()
}
