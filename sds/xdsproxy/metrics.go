package xdsproxy

import "github.com/svidkit/svidkit/internal/metrics"

// proxyMetrics are the metrics of [Handler.Report].
type proxyMetrics struct {
	metrics.Set
	requests, responses, dropped, failures *metrics.Counter
	upstreamEnds, envoyEnds                map[string]*metrics.Counter // by kind
}

// How a stream may end: as expected, or not.
const (
	cancelled = "cancelled"
	failed    = "error"
)

func (m *proxyMetrics) init(h *Handler) {
	m.requests = m.Counter("istio_agent_xds_proxy_requests", "The number of requests received from Envoys by ADS.")
	m.responses = m.Counter("istio_agent_xds_proxy_responses",
		"The number of responses received from the control plane.")
	m.dropped = m.Counter("istio_agent_xds_proxy_dropped_responses",
		"The number of responses of the control plane that had secrets, and were dropped.")
	m.failures = m.Counter("istio_agent_istiod_connection_failures",
		"The number of streams that the control plane did not answer.")
	m.upstreamEnds = m.Counters("istio_agent_istiod_connection_terminations",
		"The number of streams that the control plane has ended.", "type", cancelled, failed)
	m.envoyEnds = m.Counters("istio_agent_envoy_connection_terminations",
		"The number of streams that Envoys have ended, or that were refused.", "type", cancelled, failed)
	m.Gauge("istio_agent_xds_proxy_streams", "The number of open ADS streams.",
		func() (float64, bool) { return float64(h.open.Held()), true })
}
