package sds_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/sds"
)

// TestWriteMetrics: streams, names, responses, a rejection, a refusal and a look-up that fails.
func TestWriteMetrics(t *testing.T) {
	t.Parallel()
	_, src, web := withPair(t, "default")
	src.fail("down", errors.New("CA down"))
	h := handler(t, src, &sds.Options{MaxPeerStreams: 2})
	read := func() map[string]float64 {
		return must.Get(metricstest.Of(h.Report().Metrics))(t).Samples
	}
	for name, v := range read() {
		assert.Zero(t, v, name)
	}
	socket, _ := serve(t, h)
	c := dial(t, socket)
	one, two := openSotW(t, c), openSotW(t, c)
	one.ask("default", "missing")
	r := one.recv()
	want(t, r, web)
	one.nack(r, "KEY_VALUES_MISMATCH", "default", "missing")
	two.ask("default", "down")
	want(t, two.recv(), web)
	require.Eventually(t, func() bool {
		s := read()
		return s[`svidkit_sds_failed_lookups_total`] > 0 && s[`svidkit_sds_nacks_total`] == 1
	}, patient, time.Millisecond)
	code, _ := openSotW(t, c).status()
	assert.Equal(t, codeResourceExhausted, code)
	s := read()
	assert.Equal(t, 2., s[`svidkit_sds_streams`])
	assert.Equal(t, 1., s[`svidkit_sds_names{state="served"}`])
	assert.Equal(t, 2., s[`svidkit_sds_names{state="missing"}`])
	assert.Equal(t, 2., s[`svidkit_sds_responses_total`])
	assert.Equal(t, 1., s[`svidkit_sds_refused_requests_total{reason="limit"}`])
}
