package workloadapi_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// TestWriteMetrics follows a source from before its start over a renewal, an outage and a withdrawal.
func TestWriteMetrics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		api := workloadapitest.NewInMemory(t, spiffetest.NewCA(t, "example.org"), "/web")
		cfg := api.Config()
		cfg.JWTBundles = true
		src := must.Get(workloadapi.New(cfg))(t)
		read := func() map[string]float64 {
			return must.Get(metricstest.Of(src.Report().Metrics))(t).Samples
		}
		const end = `svidkit_workloadapi_identity_end_timestamp_seconds{identity="spiffe://example.org/web"}`
		s := read()
		assert.Zero(t, s[`svidkit_workloadapi_ready`])
		assert.NotContains(t, s, end)
		assert.NotContains(t, s, `svidkit_workloadapi_update_timestamp_seconds{stream="x509"}`)

		workloadtest.Run(t, src)
		synctest.Wait()
		began := time.Now()
		s = read()
		svid := must.Get(src.SVID())(t)
		assert.Equal(t, 1., s[`svidkit_workloadapi_ready`])
		assert.EqualValues(t, svid.NotAfter().Unix(), s[end])
		for _, stream := range []string{"x509", "jwt"} {
			assert.Equal(t, 1., s[`svidkit_workloadapi_stream_open{stream="`+stream+`"}`])
			assert.Equal(t, 1., s[`svidkit_workloadapi_updates_total{stream="`+stream+`"}`])
			assert.EqualValues(t, began.Unix(), s[`svidkit_workloadapi_update_timestamp_seconds{stream="`+stream+`"}`])
			assert.Zero(t, s[`svidkit_workloadapi_failures_total{stream="`+stream+`"}`])
		}
		api.Rotate()
		synctest.Wait()
		assert.Equal(t, 2., read()[`svidkit_workloadapi_updates_total{stream="x509"}`])

		api.Drop()
		time.Sleep(10 * time.Minute)
		s = read()
		failed := s[`svidkit_workloadapi_failures_total{stream="x509"}`]
		assert.Greater(t, failed, 2.)
		assert.Zero(t, s[`svidkit_workloadapi_stream_open{stream="x509"}`])
		assert.Equal(t, 1., s[`svidkit_workloadapi_ready`], "an outage withdraws nothing")
		api.Mend()
		time.Sleep(5 * time.Minute)
		api.Deny()
		synctest.Wait()
		s = read()
		assert.Greater(t, s[`svidkit_workloadapi_failures_total{stream="x509"}`], failed, "a counter does not go back")
		assert.Zero(t, s[`svidkit_workloadapi_ready`])
		assert.NotContains(t, s, end)
	})
}
