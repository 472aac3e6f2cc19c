package authn_test

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
)

// TestByPath: each path has its method. What no pattern is for, or what others read in another way, is refused.
func TestByPath(t *testing.T) {
	t.Parallel()
	named := func(name string) authn.Authenticator { return answering(&authn.Caller{Name: name, Method: "m"}, nil) }
	a, err := authn.ByPath(map[string]authn.Authenticator{"/admin/": named("admin"), "/public/": named("anyone"), "POST /public/": named("writer")})
	require.NoError(t, err)
	for _, c := range []struct{ method, target, want string }{
		{"GET", "/admin/x", "admin"},
		{"GET", "/public/x", "anyone"},
		{"POST", "/public/x", "writer"},
		{"GET", "/", ""},
		{"GET", "/public/../admin/x", ""},
		{"GET", "/public/%2e%2e/admin/x", ""},
		{"GET", "/public%2fx", ""},
		{"GET", "//public/x", ""},
	} {
		caller, err := a.Authenticate(httptest.NewRequest(c.method, c.target, nil))
		if c.want == "" {
			require.ErrorIs(t, err, authn.ErrRefused, c.target)
			assert.ErrorContains(t, err, "no method is for the path")
			assert.False(t, authn.Unavailable(err))
			continue
		}
		require.NoError(t, err, c.target)
		assert.Equal(t, c.want, caller.Name, c.target)
	}
	w := httptest.NewRecorder()
	authn.Require(a, http.NotFoundHandler(), nil).ServeHTTP(w, httptest.NewRequest("GET", "/other", nil))
	assert.Equal(t, http.StatusUnauthorized, w.Code)

	for want, methods := range map[string]map[string]authn.Authenticator{
		"there is no path":               nil,
		`"/": the Authenticator is nil`:  {"/": nil},
		"http.ServeMux does not take it": {"admin": named("admin")},
		`"/a//b": its path is not clean`: {"/a//b": named("admin")},
		`"GET /{a}/b": http.ServeMux does not take it: pattern "GET /{a}/b" conflicts with pattern "GET /a/{b}":`: {"GET /{a}/b": named("a"), "GET /a/{b}": named("b")},
	} {
		_, err := authn.ByPath(methods)
		assert.ErrorContains(t, err, "authn: by path: ")
		assert.ErrorContains(t, err, want)
	}
}
