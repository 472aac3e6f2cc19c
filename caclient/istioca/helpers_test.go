package istioca_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/istioca"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	server "github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/spiffe"
)

var (
	_ caclient.CA = (*istioca.CA)(nil)
)

const token = "eyJhbGciOi.token.c2VjcmV0" // what must not be seen

var (
	domain = spiffe.MustParseTrustDomain("example.org")
	webID  = spiffe.MustParseID("spiffe://example.org/ns/prod/sa/web")
)

// tokens authenticates the token, and "/name" as the ID of that path.
var tokens = authn.Func(func(r *http.Request) (*authn.Caller, error) {
	switch t, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer "); {
	case t == token:
		return &authn.Caller{ID: webID, Method: "test-token"}, nil
	case strings.HasPrefix(t, "/"):
		return &authn.Caller{ID: spiffe.MustParseID(domain.ID().String() + t), Method: "test-token"}, nil
	}
	return nil, fmt.Errorf("tokens: %w", authn.ErrNoCredential)
})

// listen serves a handler over TLS on a socket. The client has the roots of its server.
func listen(t testing.TB, h http.Handler) (url string, client *http.Client) {
	t.Helper()
	url, cfg := caservertest.Listen(t, h)
	return url, caservertest.HTTP2Client(t, cfg)
}

// serve serves a handler on l until the test ends.
func serve(t testing.TB, h http.Handler, l net.Listener) {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	s := &http.Server{Handler: h, Protocols: &protocols, ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.Serve(l) })
	t.Cleanup(func() { _ = s.Close(); wg.Wait() })
}

func newAuthority(t testing.TB, cfg ca.Config) *ca.Authority {
	t.Helper()
	cfg.TrustDomain = domain
	return must.Get(ca.New(cfg))(t)
}

func newServer(t testing.TB, o server.Options) *server.Server {
	t.Helper()
	o.Authenticator = tokens
	return must.Get(server.New(o))(t)
}

func newCA(t testing.TB, o istioca.Options) *istioca.CA {
	t.Helper()
	if o.TrustDomain.IsZero() {
		o.TrustDomain = domain
	}
	return must.Get(istioca.New(o))(t)
}

// call is what a fake CA is asked.
type call struct {
	header http.Header
	msg    *wire.IstioCertificateRequest
}

// fake is a handler that answers with f, with generated messages.
func fake(f func(call) (*wire.IstioCertificateResponse, error)) http.Handler {
	return &grpchttp.Handler{MaxMessage: 1 << 20, Methods: map[string]grpchttp.Method{server.CreateCertificate: func(_ context.Context, c *grpchttp.Call) error {
		request, err := c.ReceiveOnly()
		if err != nil {
			return err
		}
		m := new(wire.IstioCertificateRequest)
		if err := proto.Unmarshal(request, m); err != nil {
			return err
		}
		resp, err := f(call{c.Header(), m})
		if err != nil {
			return err
		}
		response, err := proto.Marshal(resp)
		if err != nil {
			return err
		}
		return c.Send(response)
	}}}
}

// texts returns a handler that answers with the same texts each time.
func texts(chain ...string) http.Handler {
	return fake(func(call) (*wire.IstioCertificateResponse, error) {
		return &wire.IstioCertificateResponse{CertChain: chain}, nil
	})
}

func pem(certs ...*x509.Certificate) string { return string(pki.MarshalCertificatesPEM(certs...)) }

func newCSR(t testing.TB, key crypto.Signer) *pki.CSR {
	t.Helper()
	return must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(webID)}}))(t)
}

func freshCSR(t testing.TB) *pki.CSR {
	return cafake.NewCSR(t, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(webID)}})
}

func raw(certs []*x509.Certificate) [][]byte {
	var out [][]byte
	for _, c := range certs {
		out = append(out, c.Raw)
	}
	return out
}

func rootsOf(t testing.TB, set *spiffe.BundleSet) []*x509.Certificate {
	t.Helper()
	require.NotNil(t, set)
	b := must.Get(set.Bundle(domain))(t)
	var out []*x509.Certificate
	for c := range b.X509Authorities() {
		out = append(out, c)
	}
	return out
}

// metricsBuffer reads the text format of Prometheus.
type metricsBuffer struct{ bytes.Buffer }

func (b *metricsBuffer) value(name string) string {
	for line := range strings.SplitSeq(b.String(), "\n") {
		if v, ok := strings.CutPrefix(line, name+" "); ok {
			return v
		}
	}
	return ""
}

func TestMain(m *testing.M) {
	rounds.Parallel(8)
	m.Run()
}
