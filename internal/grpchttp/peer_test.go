package grpchttp_test

import (
	"context"
	"net"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/peer"
)

// The context of a method says which peer is calling, for limits by peer.
func TestPeer(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	serveOn(t, l, handler(map[string]grpchttp.Method{
		"/who": grpchttp.Unary(func(ctx context.Context, _ []byte) ([]byte, error) { return []byte(peer.FromContext(ctx)), nil }),
	}))
	client := grpchttp.NewClient(&http.Client{Transport: transport(t, nil)}, "http://"+l.Addr().String(), limit)
	answer, err := client.Unary(t.Context(), "/who", nil, nil)
	require.NoError(t, err)
	assert.Equal(t, "127.0.0.1", string(answer))
}
