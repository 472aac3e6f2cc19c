package tokens_test

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/tokens/bearer"
)

func TestBearerConfidential(t *testing.T) {
	t.Parallel()
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.RemoteAddr = "@"
	r.Header.Set("X-Forwarded-Proto", "https")
	assert.False(t, bearer.Confidential(r))
	at := func(a net.Addr) *http.Request {
		return r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, a))
	}
	assert.False(t, bearer.Confidential(at(&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})))
	assert.True(t, bearer.Confidential(at(&net.UnixAddr{Name: "/s", Net: "unix"})))
	r.TLS = &tls.ConnectionState{}
	assert.True(t, bearer.Confidential(r))
}
