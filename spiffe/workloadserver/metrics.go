package workloadserver

import (
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/spiffe/report"
)

// counts holds the metrics of a Handler.
type counts struct {
	metrics.Set
	responses       *metrics.Counter
	refused, failed map[string]*metrics.Counter
}

// init registers the metrics of h.
func (c *counts) init(h *Handler) {
	c.Gauges("svidkit_workloadserver_streams", "The number of open streams and of calls that are being answered.",
		func(add metrics.Add) { add(float64(h.shares.Held())) })
	c.responses = c.Counter("svidkit_workloadserver_responses_total",
		"The number of responses that were sent on streams.")
	c.refused = c.Counters("svidkit_workloadserver_refused_requests_total",
		"The number of requests that were refused, by the reason.", "reason",
		"no_header", "another_machine", "bad_request", "no_identity", "audience", "too_many_streams",
		"too_many_streams_of_peer", "broker")
	c.failed = c.Counters("svidkit_workloadserver_failed_requests_total",
		"The number of requests that failed without a fault of the caller, by what failed.", "component",
		"provider", "identities", "issuer", "validator", "response")
}

// Report implements [report.Reporter] with the number of open streams and these metrics:
//
//	svidkit_workloadserver_streams                  open streams, and calls being answered
//	svidkit_workloadserver_responses_total          responses on streams
//	svidkit_workloadserver_refused_requests_total   by reason: no_header, another_machine, bad_request, no_identity,
//	                                                audience, too_many_streams, too_many_streams_of_peer, broker
//	svidkit_workloadserver_failed_requests_total    by component: provider, identities, issuer, validator, response
//
// No label contains data from a caller.
func (h *Handler) Report() report.Report {
	return report.Report{Servers: []report.Server{{Protocol: "Workload API", Streams: h.shares.Held()}},
		Metrics: h.counts.Write}
}
