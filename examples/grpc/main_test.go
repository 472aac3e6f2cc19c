package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestShow(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	require.NoError(t, show(t.Context(), &out))
	assert.Equal(t, `server: /grpc.health.v1.Health/Check by spiffe://example.org/web
web: Check: SERVING
web: List: PermissionDenied
other: Check: Unavailable
operator: only spiffe://example.org/ops from now on
governor: the connection of web has ended
web: Check: Unavailable
server: /grpc.health.v1.Health/Check by spiffe://example.org/ops
ops: Check: SERVING
server: /grpc.health.v1.Health/Check by spiffe://example.org/ops
ops: Check: NOT_SERVING
server: ended
`, out.String())
}
