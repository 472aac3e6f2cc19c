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
	assert.Equal(t, `server: a call from spiffe://example.org/web
web: SERVING
server: a call from spiffe://example.org/web
web: SERVING
other: refused
operator: only spiffe://example.org/ops from now on
governor: connections ended: 1
web: refused
`, out.String())
}
