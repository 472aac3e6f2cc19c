package cafake

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Call is a request as a service sees it.
type Call struct {
	*http.Request
	Body map[string]any // its JSON, if it is an object
	Raw  string
}

// Script is an [http.RoundTripper] that answers in the place of a network, so that it works in a bubble.
type Script struct {
	Answer func(Call) (int, any) // a text, or what is encoded as JSON

	mu    sync.Mutex
	calls []Call
}

// RoundTrip implements [http.RoundTripper].
func (s *Script) RoundTrip(r *http.Request) (*http.Response, error) {
	c := Call{Request: r}
	if r.Body != nil {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			return nil, err
		}
		c.Raw = string(b)
		_ = json.Unmarshal(b, &c.Body)
	}
	s.mu.Lock()
	s.calls = append(s.calls, c)
	s.mu.Unlock()
	code, answer := s.Answer(c)
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	text, err := Text(answer)
	if err != nil {
		return nil, err
	}
	body := io.NopCloser(strings.NewReader(text))
	return &http.Response{StatusCode: code, Header: http.Header{}, Body: body, Request: r}, nil
}

// Calls returns what was asked.
func (s *Script) Calls() []Call {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls
}

// Paths returns the methods and URIs of what was asked.
func (s *Script) Paths() (out []string) {
	for _, c := range s.Calls() {
		out = append(out, c.Method+" "+c.URL.RequestURI())
	}
	return out
}

// Endpoint returns the endpoint of a client that asks s, with a token.
func (s *Script) Endpoint(url string, td spiffe.TrustDomain, token string) caclient.Endpoint {
	return caclient.Endpoint{URL: url, TrustDomain: td, HTTPClient: &http.Client{Transport: s}, Token: Give(token)}
}

// Give returns a source of one token.
func Give(token string) func(context.Context) (string, error) {
	return func(context.Context) (string, error) { return token, nil }
}

// Text returns a text as it is, and all else as JSON.
func Text(v any) (string, error) {
	if text, ok := v.(string); ok {
		return text, nil
	}
	b, err := json.Marshal(v)
	return string(b), err
}

// NewCSR returns a request with a new key.
func NewCSR(t testing.TB, o pki.CSROptions) *pki.CSR {
	t.Helper()
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		t.Fatal(err)
	}
	csr, err := pki.NewCSR(key, o)
	if err != nil {
		t.Fatal(err)
	}
	return csr
}
