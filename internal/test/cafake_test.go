package test_test

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// What the Fake refuses that a client of ours would not ask for.
func TestCafakeGoogleCAS(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	g := cafake.NewGoogleCAS(t, ca, "/web")
	e := g.Endpoint()
	token := must.Get(e.Token(t.Context()))(t)
	type doc = map[string]any
	const (
		create = "/v1/" + cafake.GoogleCASPool + "/certificates"
		one    = "?requestId=00000000-0000-4000-8000-00000000000"
	)
	good := doc{"pemCsr": csrFor(t, pki.SAN{Type: pki.URI, Value: "spiffe://example.org/web"}), "lifetime": "3600s"}
	for _, c := range []struct {
		name, method, path string
		token              string
		body               any
		code               int
		says               string
	}{
		{"good", "POST", create + one + "1&certificateId=a", token, good, 200, `"pemCertificateChain"`},
		{"again", "POST", create + one + "1&certificateId=a", token, good, 200, `"pemCertificateChain"`},
		{"the same ID for another request", "POST", create + one + "1&certificateId=b", token, good, 400, "request ID was used"},
		{"the same name", "POST", create + one + "2&certificateId=a", token, good, 409, "ALREADY_EXISTS"},
		{"without a request ID", "POST", create + "?certificateId=c", token, good, 200, `"pemCertificate"`},
		{"no name", "POST", create + one + "3", token, good, 400, "Certificate ID"},
		{"bad name", "POST", create + one + "3&certificateId=a.b", token, good, 400, "Certificate ID"},
		{"bad request ID", "POST", create + "?requestId=1&certificateId=d", token, good, 400, "Invalid request ID"},
		{"no lifetime", "POST", create + one + "4&certificateId=d", token, doc{"pemCsr": good["pemCsr"]}, 400, "Lifetime is required"},
		{"no CSR", "POST", create + one + "4&certificateId=d", token, doc{"lifetime": "3600s"}, 400, "Malformed CSR"},
		{"no JSON object", "POST", create + one + "5&certificateId=d", token, "x", 400, "Invalid JSON"},
		{"no token", "POST", create + one + "6&certificateId=d", "", good, 401, "UNAUTHENTICATED"},
		{"bad token", "POST", create + one + "6&certificateId=d", "x", good, 401, "UNAUTHENTICATED"},
		{"get", "GET", create, token, nil, 404, "NOT_FOUND"},
		{"other method", "POST", "/v1/" + cafake.GoogleCASPool + ":x", token, nil, 404, "NOT_FOUND"},
		{"other pool", "POST", "/v1/projects/p/locations/l/caPools/x/certificates", token, good, 404, "NOT_FOUND"},
	} {
		code, answer := post(t, e, c.method, c.path, map[string]string{"Authorization": "Bearer " + c.token}, c.body)
		assert.Equal(t, c.code, code, c.name)
		assert.Contains(t, answer, c.says, c.name)
	}
	assert.Equal(t, 2, ca.Signed(), "a repetition is not a second certificate")

	g.Change(func(r *cafake.GoogleCASRules) { r.Quota, r.RetryDelay = 1, 90*time.Second })
	for i, want := range []string{`"pemCertificate"`, `"retryDelay":"90s"`} {
		_, answer := post(t, e, "POST", create+"?certificateId=q"+string(rune('a'+i)), map[string]string{"Authorization": "Bearer " + token}, good)
		assert.Contains(t, answer, want)
	}
}

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
	return string(must.Get(pki.NewCSR(must.Get(pki.NewKey("ecdsa-p256"))(t), pki.CSROptions{SANs: names}))(t).PEM())
}

// What the Fake refuses that a client of ours would not ask for.
func TestCafakeVault(t *testing.T) {
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
