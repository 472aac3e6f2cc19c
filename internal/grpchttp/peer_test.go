package grpchttp_test

import (
	"context"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/test/must"
)

// The context of a method says which peer is calling, for limits by peer.
func TestPeer(t *testing.T) {
	t.Parallel()
	h := handler(map[string]grpchttp.Method{
		"/who": grpchttp.Unary(func(ctx context.Context, _ []byte) ([]byte, error) { return []byte(peerkey.FromContext(ctx)), nil }),
	})
	srv := httptest.NewUnstartedServer(h)
	srv.EnableHTTP2 = true
	srv.StartTLS()
	defer srv.Close()
	answer := must.Get(grpchttp.NewClient(srv.Client(), srv.URL, limit).Unary(t.Context(), "/who", nil, nil))(t)
	assert.Equal(t, "127.0.0.1", string(answer))
}
