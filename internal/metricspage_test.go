package internal_test

import (
	"io"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/metrics/metricspage"
	"github.com/svidkit/svidkit/internal/test/must"
)

func TestMetricsPageServe(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	require.NoError(t, new(metricspage.Page).Serve(w, func(w io.Writer) error {
		return must.Err(io.WriteString(w, "more 1\n"))
	}))
	assert.Regexp(t, "(?s)svidkit_build_info.*more 1\n$", w.Body.String())
	w = httptest.NewRecorder()
	assert.ErrorIs(t, new(metricspage.Page).Serve(w, func(io.Writer) error { return io.ErrShortWrite }), io.ErrShortWrite)
	assert.Empty(t, w.Body.String())
}
