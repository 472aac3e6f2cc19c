package internal_test

import (
	"bufio"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/guard"
)

func TestGuardPath(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		line, pattern string // of the request, and of the ServeMux that chose the guard
		clear         bool
	}{
		{"GET /", "", true},
		{"GET /a", "", true},
		{"GET /a/", "/a/", true},
		{"GET /a/b?q=/../", "/a/", true},
		{"GET /.../a..b/.c", "/", true},
		{"GET /%61dmin/x%20y", "/", true},
		{"GET /%252e%252e/x", "/", true},
		{"GET http://web.test", "", true},
		{"GET http://web.test/a/", "", true},
		{"OPTIONS *", "", true},
		{"CONNECT db.test:443", "", true},
		{"GET /orders/a%2fb", "", true},
		{"GET /orders/a%2Fb", "GET /orders/{id}", true},
		{"GET /orders/a%2Fb", "/orders/", false},
		{"GET /orders/a%2fb", "/{all...}", false},
		{"GET //", "", false},
		{"GET //a", "", false},
		{"GET /a//", "", false},
		{"GET /a//b", "", false},
		{"GET /./a", "", false},
		{"GET /a/.", "", false},
		{"GET /a/./", "", false},
		{"GET /a/..", "", false},
		{"GET /a/../b", "", false},
		{"GET /a/%2e%2E/b", "", false},
		{"GET /a/..%2fb", "GET /{x}/{y}", false},
		{"GET http://web.test//a", "", false},
		{"OPTIONS /../*", "", false},
		{"CONNECT /", "", false},
		{"CONNECT /a", "", false},
		{"CONNECT http://web.test/a", "", false},
	} {
		r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(c.line + " HTTP/1.1\r\nHost: web.test\r\n\r\n")))
		require.NoError(t, err, c.line)
		r.Pattern = c.pattern
		if err = guard.Path(r); c.clear {
			assert.NoError(t, err, c.line)
		} else {
			assert.ErrorIs(t, err, guard.ErrPath, c.line)
		}
	}

	// What is left when http.StripPrefix has taken "/files/", or "/files".
	for p, clear := range map[string]bool{"": true, "a": true, "a/": true, "/a": true, "../a": false, "/../a": false, "a//b": false, "/": true, "//": false} {
		r, err := http.NewRequest("GET", "/", nil)
		require.NoError(t, err)
		r.URL.Path = p
		assert.Equal(t, clear, guard.Path(r) == nil, "%q", p)
	}
}
