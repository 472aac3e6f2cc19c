package jwt_test

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/jwt"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// again are authenticators and requests with a token that comes again. The token of a pod has about a kilobyte.
func again(t testing.TB) map[string]struct {
	a authn.Authenticator
	r *http.Request
} {
	t.Helper()
	issuer, bundle := mint(t)
	v := must.Get(jwtsvid.NewValidator(bundle, []string{"ca"}, nil))(t)
	svids := must.Get(jwt.SVID(v, spiffe.AllowMembersOf(td)))(t)
	pod := sign("rsa", map[string]any{"kubernetes.io": map[string]any{
		"namespace": "prod", "node": map[string]any{"name": "node-1", "uid": "3b9a2f6e-5d0c-4d2e-9f4b-0c6f0a2d7f11"},
		"pod":            map[string]any{"name": "web-6c5d8c7b9-abcde", "uid": "6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c22"},
		"serviceaccount": map[string]any{"name": "web", "uid": "0d7c1b2a-8e4f-4b6d-9a3c-5e8f7d6c4b33"},
	}, "jti": "9d1c2b3a-7e6f-4a5b-8c9d-0e1f2a3b4c5d"})
	return map[string]struct {
		a authn.Authenticator
		r *http.Request
	}{
		"jwt":      {newAuthenticator(t, newIssuer("rsa")), request(t, pod)},
		"jwt-svid": {svids, request(t, svidOf(t, issuer, webID, "ca"))},
	}
}

func TestAllocations(t *testing.T) {
	if rounds.Race {
		t.Skip("the race detector allocates")
	}
	for name, c := range again(t) {
		authenticate := func() {
			if _, err := c.a.Authenticate(c.r); err != nil {
				t.Fatal(err)
			}
		}
		authenticate()
		require.Zero(t, testing.AllocsPerRun(100, authenticate), name)
	}
}
