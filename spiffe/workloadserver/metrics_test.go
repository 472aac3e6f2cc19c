package workloadserver_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// TestWriteMetrics: streams, responses, and requests that are refused or fail.
func TestWriteMetrics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		src := home.Source("/web")
		var fault error
		h, err := workloadserver.NewHandler(src, &workloadserver.Options{MaxPeerStreams: 1, Identities: func(context.Context) ([]workloadserver.Identity, error) {
			return []workloadserver.Identity{{Provider: src}}, fault
		}})
		require.NoError(t, err)
		read := func() map[string]float64 {
			synctest.Wait()
			return must.Get(metricstest.Of(h.Report().Metrics))(t).Samples
		}
		s := read()
		for _, reason := range []string{"no_header", "another_machine", "bad_request", "no_identity", "too_many_streams", "too_many_streams_of_peer", "audience"} {
			require.Contains(t, s, `svidkit_workloadserver_refused_requests_total{reason="`+reason+`"}`)
		}
		require.Zero(t, s[`svidkit_workloadserver_streams`])

		client := inMemory(t, h)
		fetch := func() (*workloadapi.Update, error) {
			for u, err := range client.WatchX509SVIDs(t.Context()) {
				return u, err
			}
			return nil, nil
		}
		ctx, cancel := context.WithCancel(t.Context())
		received := make(chan struct{})
		go func() {
			defer close(received)
			for range client.WatchX509SVIDs(ctx) {
			}
		}()
		s = read()
		assert.Equal(t, 1., s[`svidkit_workloadserver_streams`])
		assert.Equal(t, 1., s[`svidkit_workloadserver_responses_total`])
		src.Renew()
		assert.Equal(t, 2., read()[`svidkit_workloadserver_responses_total`])
		require.Error(t, must.Err(fetch()))
		assert.Equal(t, 1., read()[`svidkit_workloadserver_refused_requests_total{reason="too_many_streams_of_peer"}`])
		cancel()
		<-received
		assert.Zero(t, read()[`svidkit_workloadserver_streams`])

		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, service+"FetchX509SVID", http.NoBody)
		r.ProtoMajor, r.ProtoMinor = 2, 0
		r.Header.Set("Content-Type", "application/grpc")
		h.ServeHTTP(httptest.NewRecorder(), r)
		r = r.Clone(t.Context())
		r.Header.Set("workload.spiffe.io", "true")
		r.RemoteAddr = "192.0.2.1:1"
		h.ServeHTTP(httptest.NewRecorder(), r)
		fault = workloadserver.ErrDenied
		require.Error(t, must.Err(fetch()))
		fault = errors.New("no registry")
		require.Error(t, must.Err(fetch()))
		s = read()
		for _, reason := range []string{"no_header", "another_machine", "no_identity", "too_many_streams_of_peer"} {
			assert.Equal(t, 1., s[`svidkit_workloadserver_refused_requests_total{reason="`+reason+`"}`], reason)
		}
		assert.Zero(t, s[`svidkit_workloadserver_refused_requests_total{reason="other"}`])
		assert.Positive(t, s[`svidkit_workloadserver_failed_requests_total{component="identities"}`])
		assert.Zero(t, s[`svidkit_workloadserver_failed_requests_total{component="other"}`])
	})
}
