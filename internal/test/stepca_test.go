package test_test

import (
	"encoding/base64"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// The rules for one-time tokens, one broken at a time.
func TestCafakeStepTokens(t *testing.T) {
	t.Parallel()
	f, sign := cafake.NewStepProvisioner(t, spiffetest.NewCA(t, "example.org"), "/web")
	e := f.Endpoint()
	now := time.Now()
	token := func(edit func(object)) string {
		payload := strings.Split(must.Get(e.Token(t.Context()))(t), ".")[1]
		var claims object
		require.NoError(t, json.Unmarshal(must.Get(base64.RawURLEncoding.DecodeString(payload))(t), &claims))
		claims["sans"] = []string{"a", "b"}
		edit(claims)
		return sign(claims)
	}
	ask := func(token string, names ...string) (int, string) {
		var sans []pki.SAN
		for _, name := range names {
			sans = append(sans, pki.DNSSAN(name))
		}
		return post(t, e, "POST", "/1.0/sign", nil, object{"csr": csrFor(t, sans...), "ott": token})
	}
	good := func(object) {}
	for says, edit := range map[string]func(object){
		"another provisioner": func(c object) { c["iss"] = "x" },
		"another audience":    func(c object) { c["aud"] = e.URL + "/1.0/revoke" },
		"not valid now":       func(c object) { c["exp"] = now.Add(-2 * time.Minute).Unix() },
		"valid now":           func(c object) { c["nbf"] = now.Add(2 * time.Minute).Unix() },
		"no subject":          func(c object) { c["sub"] = "" },
	} {
		code, answer := ask(token(edit), "a", "b")
		assert.Equal(t, http.StatusUnauthorized, code, says)
		assert.Contains(t, answer, says)
	}
	once := token(good)
	code, answer := ask(once, "a", "b")
	assert.Equal(t, http.StatusCreated, code, answer)
	_, answer = ask(once, "a", "b")
	assert.Contains(t, answer, "used before")
	code, _ = ask(token(good), "a")
	assert.Equal(t, http.StatusForbidden, code, "the names are those of the token")
	code, answer = ask(token(func(c object) { c["sub"], c["sans"], c["aud"] = "web", nil, e.URL+"/sign" }), "web")
	assert.Equal(t, http.StatusCreated, code, answer)
	code, _ = ask(strings.TrimSuffix(token(good), "A")+"AA", "a", "b")
	assert.Equal(t, http.StatusUnauthorized, code)
}

// Requests that a client of ours does not make.
func TestCafakeStepRequests(t *testing.T) {
	t.Parallel()
	f := cafake.NewStepCA(t, spiffetest.NewCA(t, "example.org"), "/web")
	e := f.Endpoint()
	csr, token := csrFor(t, f.Expectation().Names()...), func() string { return must.Get(e.Token(t.Context()))(t) }
	for _, tt := range []struct {
		path string
		body object
		code int
	}{
		{"/sign", object{"csr": csr, "ott": token(), "notAfter": time.Now().Add(time.Hour).Format(time.RFC3339)}, http.StatusCreated},
		{"/1.0/sign", object{"csr": csr, "ott": token(), "notAfter": "tomorrow"}, http.StatusBadRequest},
		{"/1.0/sign", object{"csr": csr}, http.StatusBadRequest},
		{"/1.0/sign", object{"ott": token()}, http.StatusBadRequest},
		{"/1.0/rekey", object{"csr": csr}, http.StatusBadRequest},
		{"/1.0/nothing", nil, http.StatusNotFound},
	} {
		code, _ := post(t, e, "POST", tt.path, nil, tt.body)
		assert.Equal(t, tt.code, code, "%s %v", tt.path, len(tt.body))
	}
}
