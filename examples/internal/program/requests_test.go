package program_test

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/examples/internal/program"
)

// TestLocal asks over loopback, by names that lead nowhere else and by others.
func TestLocal(t *testing.T) {
	t.Parallel()
	h := program.Local(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	for host, want := range map[string]int{
		"localhost": 200, "LOCALHOST:15020": 200, "127.0.0.1:15020": 200, "[::1]:15020": 200, "[::1]": 200, "10.0.0.1": 200,
		"rebound.example": 421, "rebound.example:15020": 421, "localhost.evil.test": 421, "": 421, "[rebound.example]": 421,
	} {
		for at, refused := range map[string]bool{"127.0.0.1": true, "10.1.2.3": false} {
			r := httptest.NewRequest(http.MethodGet, "/metrics", nil)
			r.Host = host
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r.WithContext(context.WithValue(t.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.ParseIP(at)})))
			code := 200
			if refused {
				code = want
			}
			assert.Equal(t, code, w.Code, "%q at %s", host, at)
		}
	}
}
