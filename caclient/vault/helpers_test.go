package vault_test

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
	"github.com/svidkit/svidkit/caclient/vault"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

const secret = "eyJhbGciOi.token.c2VjcmV0" // what must not be seen

var (
	domain = spiffe.MustParseTrustDomain("example.org")
	webID  = spiffe.MustParseID("spiffe://example.org/web")
)

func give(token string) func(context.Context) (string, error) {
	return func(context.Context) (string, error) { return token, nil }
}

func newCSR(t testing.TB, o pki.CSROptions) *pki.CSR {
	t.Helper()
	key := must.Get(pki.NewKey(pki.ECDSAP256))(t)
	return must.Get(pki.NewCSR(key, o))(t)
}

func webCSR(t testing.TB) *pki.CSR {
	t.Helper()
	return newCSR(t, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(webID)}})
}

func newCA(t testing.TB, o vault.Options) *vault.CA {
	t.Helper()
	return must.Get(vault.New(o))(t)
}

// call is a request as Vault sees it.
type call struct {
	*http.Request
	body map[string]any
	raw  string
}

// script is an http.RoundTripper that answers in the place of a network, so that it works in a bubble.
type script struct {
	mu     sync.Mutex
	calls  []call
	answer func(call) (int, any) // a text, or what is encoded as JSON
}

func (s *script) RoundTrip(r *http.Request) (*http.Response, error) {
	c := call{Request: r}
	if r.Body != nil {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			return nil, err
		}
		c.raw = string(b)
		_ = json.Unmarshal(b, &c.body)
	}
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

// paths returns what was called.
func (s *script) paths() (out []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.calls {
		out = append(out, c.Method+" "+c.URL.RequestURI())
	}
	return out
}

func (s *script) logins() (n int) {
	for _, p := range s.paths() {
		if strings.HasSuffix(p, "/login") {
			n++
		}
	}
	return n
}

func (s *script) endpoint() caclient.Endpoint {
	return caclient.Endpoint{URL: "https://vault.test", TrustDomain: domain, HTTPClient: &http.Client{Transport: s}, Token: give(secret)}
}

// doc is a JSON object.
type doc = map[string]any

func vaultErrors(texts ...string) doc { return doc{"errors": texts} }

func loginAnswer(token string, lease any) doc {
	return doc{"auth": doc{"client_token": token, "lease_duration": lease, "renewable": true}}
}

// signed returns the answer of sign/ROLE for the CSR in a call.
func signed(ca *spiffetest.CA, c call) (int, any) {
	csr, err := pki.ParseCSRPEM([]byte(c.body["csr"].(string)))
	if err != nil {
		return 400, vaultErrors(err.Error())
	}
	chain, err := ca.Sign(context.Background(), csr, 0)
	if err != nil {
		return 400, vaultErrors(err.Error())
	}
	return 200, doc{"data": doc{"certificate": string(pki.MarshalCertificatesPEM(chain[0])), "issuing_ca": string(pki.MarshalCertificatesPEM(ca.Root()))}}
}

// logs collects what is logged.
type logs struct{ logtest.Buffer }

func (l *logs) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}
