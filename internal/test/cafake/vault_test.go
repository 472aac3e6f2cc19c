package cafake_test

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// post sends a request and returns the status and the answer.
func post(t *testing.T, e caclient.Endpoint, method, path string, header map[string]string, body any) (int, string) {
	t.Helper()
	b := must.Get(json.Marshal(body))(t)
	r := must.Get(http.NewRequestWithContext(t.Context(), method, e.URL+path, strings.NewReader(string(b))))(t)
	for k, v := range header {
		r.Header.Set(k, v)
	}
	resp := must.Get(e.HTTPClient.Do(r))(t)
	defer resp.Body.Close()
	return resp.StatusCode, string(must.Get(io.ReadAll(resp.Body))(t))
}

func csrFor(t *testing.T, names ...pki.SAN) string {
	t.Helper()
	return string(must.Get(pki.NewCSR(must.Get(pki.NewKey(pki.ECDSAP256))(t), pki.CSROptions{SANs: names}))(t).PEM())
}

// What the Fake refuses that a client of ours would not ask for.
func TestVaultRules(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	v := cafake.NewVault(t, ca, "/web")
	e := v.Endpoint()
	token := must.Get(e.Token(t.Context()))(t)
	web, admin := pki.SAN{Type: pki.URI, Value: "spiffe://example.org/web"}, pki.SAN{Type: pki.URI, Value: "spiffe://example.org/admin"}
	type doc = map[string]any
	for name, c := range map[string]struct {
		method, path string
		token        string
		body         any
		code         int
		says         string
	}{
		"good":               {"POST", "/v1/pki/sign/workload", token, doc{"csr": csrFor(t, web)}, 200, `"issuing_ca"`},
		"put":                {"PUT", "/v1/pki/sign/workload", token, doc{"csr": csrFor(t, web)}, 200, `"certificate"`},
		"verbatim":           {"POST", "/v1/pki/sign-verbatim/workload", token, doc{"csr": csrFor(t, admin)}, 403, "permission denied"},
		"verbatim, no role":  {"POST", "/v1/pki/sign-verbatim", token, doc{"csr": csrFor(t, admin)}, 403, "permission denied"},
		"other name":         {"POST", "/v1/pki/sign/workload", token, doc{"csr": csrFor(t, admin)}, 400, "not valid for this role"},
		"other name beside":  {"POST", "/v1/pki/sign/workload", token, doc{"csr": csrFor(t, web, admin)}, 400, "not valid for this role"},
		"DNS name":           {"POST", "/v1/pki/sign/workload", token, doc{"csr": csrFor(t, web, pki.DNSSAN("a.test"))}, 400, "a.test not allowed"},
		"common name":        {"POST", "/v1/pki/sign/workload", token, doc{"csr": csrFor(t, web), "common_name": "a.test"}, 400, "common name a.test"},
		"no token":           {"POST", "/v1/pki/sign/workload", "", doc{"csr": csrFor(t, web)}, 403, "permission denied"},
		"bad token":          {"POST", "/v1/pki/sign/workload", "hvs.x", doc{"csr": csrFor(t, web)}, 403, "permission denied"},
		"no CSR":             {"POST", "/v1/pki/sign/workload", token, doc{}, 400, "could not be parsed"},
		"bad time":           {"POST", "/v1/pki/sign/workload", token, doc{"csr": csrFor(t, web), "ttl": "soon"}, 400, "ttl"},
		"bad format":         {"POST", "/v1/pki/sign/workload", token, doc{"csr": csrFor(t, web), "format": "der"}, 400, "der"},
		"no JSON object":     {"POST", "/v1/pki/sign/workload", token, "x", 400, "JSON"},
		"get":                {"GET", "/v1/pki/sign/workload", token, nil, 405, "unsupported"},
		"other version":      {"POST", "/v2/pki/sign/workload", token, nil, 404, "no handler"},
		"other engine":       {"POST", "/v1/kv/x", token, nil, 404, "no handler"},
		"unknown issuer":     {"GET", "/v1/pki/issuer/x/json", "", nil, 500, "unable to find"},
		"list":               {"LIST", "/v1/pki/issuers", "", nil, 200, `"keys":["`},
		"login without role": {"POST", "/v1/auth/kubernetes/login", "", doc{"jwt": "x"}, 400, "invalid role name"},
		"login without JWT":  {"POST", "/v1/auth/kubernetes/login", "", doc{"role": "workload"}, 400, "missing jwt"},
		"login of another":   {"POST", "/v1/auth/kubernetes/login", "", doc{"role": "workload", "jwt": "x"}, 403, "permission denied"},
		"login without cert": {"POST", "/v1/auth/cert/login", "", doc{}, 400, "client certificate must be supplied"},
		"bad login":          {"POST", "/v1/auth/cert/login", "", "x", 400, "JSON"},
		"bad JWT login":      {"POST", "/v1/auth/kubernetes/login", "", "x", 400, "JSON"},
	} {
		code, answer := post(t, e, c.method, c.path, map[string]string{"X-Vault-Token": c.token}, c.body)
		assert.Equal(t, c.code, code, name)
		assert.Contains(t, answer, c.says, name)
	}
	v.Change(func(r *cafake.VaultRules) { r.Sealed = true })
	code, answer := post(t, e, "LIST", "/v1/pki/issuers", nil, nil)
	assert.Equal(t, 503, code)
	assert.Contains(t, answer, "Vault is sealed")
	assert.NotContains(t, v.String(), token)
}

// What a pattern of the role allows.
func TestVaultPatterns(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	v := cafake.NewVault(t, ca, "/web")
	e := v.Endpoint()
	token := must.Get(e.Token(t.Context()))(t)
	for pattern, want := range map[string]int{
		"spiffe://example.org/ns/a/sa/web": 200, "spiffe://example.org/*": 200, "*": 200, "spiffe://*/ns/*/sa/web": 200, "*web": 200,
		"spiffe://example.org/ns/a/sa/we": 400, "spiffe://example.org/ns/a/sa/web/": 400, "spiffe://example.org/ns/b/*": 400, "*/db": 400,
		"spiffe://*/ns/b/*/web": 400, "": 400,
	} {
		v.Change(func(r *cafake.VaultRules) { r.AllowedURISANs = []string{pattern} })
		csr := csrFor(t, pki.SAN{Type: pki.URI, Value: "spiffe://example.org/ns/a/sa/web"})
		code, _ := post(t, e, "POST", "/v1/pki/sign/workload", map[string]string{"X-Vault-Token": token}, map[string]string{"csr": csr})
		assert.Equal(t, want, code, pattern)
	}
}

// The token of a login ends with its lease.
func TestVaultLease(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	v := cafake.NewVault(t, spiffetest.NewCA(t, "example.org"), "/web")
	v.Change(func(r *cafake.VaultRules) { r.Kubernetes, r.Lease = true, time.Second })
	e := v.Endpoint()
	jwt := must.Get(e.Token(t.Context()))(t)
	code, answer := post(t, e, "POST", "/v1/auth/kubernetes/login", nil, map[string]string{"role": "workload", "jwt": jwt})
	require.Equal(t, 200, code)
	var login struct {
		Auth struct {
			Token string `json:"client_token"`
			Lease int    `json:"lease_duration"`
		} `json:"auth"`
	}
	require.NoError(t, json.Unmarshal([]byte(answer), &login))
	assert.Equal(t, 1, login.Auth.Lease)
	assert.Equal(t, 1, v.Logins())
	sign := func() int {
		csr := csrFor(t, pki.SAN{Type: pki.URI, Value: "spiffe://example.org/web"})
		code, _ := post(t, e, "POST", "/v1/pki/sign/workload", map[string]string{"X-Vault-Token": login.Auth.Token}, map[string]string{"csr": csr})
		return code
	}
	assert.Equal(t, 200, sign())
	assert.Eventually(t, func() bool { return sign() == 403 }, time.Minute, 100*time.Millisecond)
}
