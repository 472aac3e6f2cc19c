package grpchttp_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/grpchttp"
)

func TestIncoming(t *testing.T) {
	t.Parallel()
	from := func(address string) *http.Request {
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.RemoteAddr = address
		return r
	}
	in := grpchttp.NewIncoming("test", 100, 60)
	a, b := from("192.0.2.1:1"), from("192.0.2.1:2")
	require.NoError(t, in.Take(a, 60))
	for _, c := range []struct {
		r    *http.Request
		n    int
		text string
	}{
		{a, 1, "test: this peer sends too many requests at the same time; try again later"},
		{b, 41, "test: too many requests are being received; try again later"},
	} {
		e, ok := errors.AsType[*grpchttp.Error](in.Take(c.r, c.n))
		require.True(t, ok)
		assert.Equal(t, grpchttp.ResourceExhausted, e.Code)
		assert.Equal(t, c.text, e.Message)
		assert.Positive(t, e.RetryAfter)
	}
	require.NoError(t, in.Take(b, 40))
	assert.Equal(t, 100, in.Held())
	in.Give(a, 60)
	in.Give(b, 40)
	assert.Zero(t, in.Held())
}
