package googlecas_test

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/googlecas"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

const (
	secret = "ya29.token.c2VjcmV0" // what must not be seen
	pool   = cafake.GoogleCASPool
)

var (
	domain = spiffe.MustParseTrustDomain("example.org")
	webID  = spiffe.MustParseID("spiffe://example.org/web")
)

func give(token string) func(context.Context) (string, error) {
	return func(context.Context) (string, error) { return token, nil }
}

func newCSR(t testing.TB, id spiffe.ID) *pki.CSR {
	t.Helper()
	key := must.Get(pki.NewKey(pki.ECDSAP256))(t)
	return must.Get(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(id)}}))(t)
}

func newCA(t testing.TB, o googlecas.Options) *googlecas.CA {
	t.Helper()
	if o.Pool == "" {
		o.Pool = pool
	}
	return must.Get(googlecas.New(o))(t)
}

// call is a request as the service sees it.
type call struct {
	*http.Request
	body map[string]any
}

// script is an http.RoundTripper that answers in the place of a network, so that it works in a bubble.
type script struct {
	mu     sync.Mutex
	calls  []call
	answer func(call) (int, any) // a text, or what is encoded as JSON
}

func (s *script) RoundTrip(r *http.Request) (*http.Response, error) {
	c := call{Request: r}
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	_ = json.Unmarshal(b, &c.body)
	s.mu.Lock()
	s.calls = append(s.calls, c)
	s.mu.Unlock()
	code, answer := s.answer(c)
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	text, ok := answer.(string)
	if !ok {
		b, err := json.Marshal(answer)
		if err != nil {
			return nil, err
		}
		text = string(b)
	}
	return &http.Response{StatusCode: code, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(text)), Request: r}, nil
}

func (s *script) endpoint() caclient.Endpoint {
	return caclient.Endpoint{TrustDomain: domain, HTTPClient: &http.Client{Transport: s}, Token: give(secret)}
}

// doc is a JSON object.
type doc = map[string]any

func refusal(code int, status, message string, details ...any) doc {
	return doc{"error": doc{"code": code, "status": status, "message": message, "details": details}}
}

// signed returns the answer for the CSR in a call.
func signed(ca *spiffetest.CA, c call) (int, any) {
	csr, err := pki.ParseCSRPEM([]byte(c.body["pemCsr"].(string)))
	if err != nil {
		return 400, refusal(400, "INVALID_ARGUMENT", err.Error())
	}
	chain, err := ca.Sign(context.Background(), csr, 0)
	if err != nil {
		return 400, refusal(400, "INVALID_ARGUMENT", err.Error())
	}
	return 200, doc{"pemCertificate": pem(chain[0]), "pemCertificateChain": []string{pem(ca.Root())}}
}

// caCerts returns the answer of fetchCaCerts with the roots of ca.
func caCerts(ca *spiffetest.CA) doc {
	chains := []doc{}
	for root := range ca.Bundle().X509Authorities() {
		chains = append(chains, doc{"certificates": []string{pem(root)}})
	}
	return doc{"caCerts": chains}
}

// logs collects what is logged.
type logs struct{ logtest.Buffer }

func (l *logs) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}
