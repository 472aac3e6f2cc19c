package cafake

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// The rules for one-time tokens, one broken at a time.
func TestStepTokens(t *testing.T) {
	t.Parallel()
	f := New(t, spiffetest.NewCA(t, "example.org"), "/web")
	f.url = "https://ca.test"
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	s := &stepCA{f: f, key: jose.JSONWebKey{Key: key, Algorithm: string(jose.ES256)}, used: map[string]bool{}}
	now := time.Now()
	good := func() stepClaims {
		return stepClaims{Issuer: provisioner, Audience: f.url + "/1.0/sign", Subject: "web", SANs: []string{"a", "b"}, ID: rand.Text(),
			NotBefore: now.Unix(), Expiry: now.Add(time.Minute).Unix()}
	}
	for says, edit := range map[string]func(*stepClaims){
		"another provisioner": func(c *stepClaims) { c.Issuer = "x" },
		"another audience":    func(c *stepClaims) { c.Audience = f.url + "/1.0/revoke" },
		"not valid now":       func(c *stepClaims) { c.Expiry = now.Add(-2 * time.Minute).Unix() },
		"valid now":           func(c *stepClaims) { c.NotBefore = now.Add(2 * time.Minute).Unix() },
		"no subject":          func(c *stepClaims) { c.Subject = "" },
	} {
		c := good()
		edit(&c)
		assert.ErrorContains(t, must.Err(s.authorize(s.signed(c))), says)
	}
	token := s.signed(good())
	assert.Equal(t, []string{"a", "b"}, must.Get(s.authorize(token))(t))
	assert.ErrorContains(t, must.Err(s.authorize(token)), "used before")
	c := good()
	c.SANs, c.Audience = nil, f.url+"/sign"
	assert.Equal(t, []string{"web"}, must.Get(s.authorize(s.signed(c)))(t))
	assert.Error(t, must.Err(s.authorize(strings.TrimSuffix(s.signed(good()), "A")+"AA")))
}

// Requests that a client of ours does not make.
func TestStepRequests(t *testing.T) {
	t.Parallel()
	f := NewStepCA(t, spiffetest.NewCA(t, "example.org"), "/web")
	client := f.Endpoint().HTTPClient
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{SANs: f.want.Names()}))(t)
	for _, tt := range []struct {
		path string
		body map[string]string
		code int
	}{
		{"/sign", map[string]string{"csr": string(csr.PEM()), "ott": f.newToken(), "notAfter": time.Now().Add(time.Hour).Format(time.RFC3339)}, http.StatusCreated},
		{"/1.0/sign", map[string]string{"csr": string(csr.PEM()), "ott": f.newToken(), "notAfter": "tomorrow"}, http.StatusBadRequest},
		{"/1.0/sign", map[string]string{"csr": string(csr.PEM())}, http.StatusBadRequest},
		{"/1.0/sign", map[string]string{"ott": f.newToken()}, http.StatusBadRequest},
		{"/1.0/rekey", map[string]string{"csr": string(csr.PEM())}, http.StatusBadRequest},
		{"/1.0/nothing", nil, http.StatusNotFound},
	} {
		body := must.Get(json.Marshal(tt.body))(t)
		resp := must.Get(client.Post(f.url+tt.path, "application/json", strings.NewReader(string(body))))(t)
		resp.Body.Close()
		assert.Equal(t, tt.code, resp.StatusCode, "%s %v", tt.path, len(tt.body))
	}
}
