package cafake_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// What the Fake refuses that a client of ours would not ask for.
func TestGoogleCASRules(t *testing.T) {
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
