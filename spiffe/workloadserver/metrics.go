package workloadserver

import (
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/spiffe/report"
)

// counts holds the metrics of a Handler.
type counts struct {
	metrics.Set
	responses       *metrics.Counter
	refused, failed map[string]*metrics.Counter
}

// refusals maps the reasons of refused requests to their labels.
var refusals = map[string]string{
	"no header": "no_header", "another machine": "another_machine", "bad request": "bad_request",
	"no identity for the caller": "no_identity",
	"audience not permitted":     "audience",
	"too many streams":           "too_many_streams", limit.CallerShare: "too_many_streams_of_peer",
	limit.TotalShare: "too_many_streams",
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
		"too_many_streams_of_peer", otherLabel)
	c.failed = c.Counters("svidkit_workloadserver_failed_requests_total",
		"The number of requests that failed without a fault of the caller, by what failed.", "component",
		"provider", "identities", "issuer", "validator", otherLabel)
}

const otherLabel = "other"

// inc adds one to the counter with the label, or to the counter for all other labels.
func inc(counters map[string]*metrics.Counter, label string) {
	c := counters[label]
	if c == nil {
		c = counters[otherLabel]
	}
	c.Inc()
}

// Report implements [report.Reporter] with the number of open streams and these metrics:
//
//	svidkit_workloadserver_streams                  open streams, and calls being answered
//	svidkit_workloadserver_responses_total          responses on streams
//	svidkit_workloadserver_refused_requests_total   by reason: no_header, another_machine, bad_request, no_identity,
//	                                                too_many_streams, too_many_streams_of_peer, other
//	svidkit_workloadserver_failed_requests_total    by component: provider, identities, issuer, validator, other
//
// No label contains data from a caller.
func (h *Handler) Report() report.Report {
	return report.Report{Servers: []report.Server{{Protocol: "Workload API", Streams: h.shares.Held()}},
		Metrics: h.counts.Write}
}
