package sds

import "github.com/svidkit/svidkit/internal/metrics"

// counts are the counters of a Handler.
type counts struct {
	metrics.Set
	responses *metrics.Counter
	refused   map[string]*metrics.Counter // by reason
}

// init registers the metrics of h.
func (c *counts) init(h *Handler) {
	c.Gauges("svidkit_sds_streams", "The number of open streams of both kinds, and of fetches under way.",
		func(add metrics.Add) { add(float64(h.open.Held())) })
	c.Gauges("svidkit_sds_names",
		"The number of names that clients ask for and may have, by whether there is something to serve.",
		func(add metrics.Add) {
			count := map[bool]float64{}
			for _, version := range h.table.versions() {
				count[version != ""]++
			}
			add(count[true], "state", "served")
			add(count[false], "state", "missing")
		})
	c.responses = c.Counter("svidkit_sds_responses_total", "The number of responses that were sent on streams.")
	c.Totals("svidkit_sds_nacks_total", "The number of responses that clients have rejected.",
		func(add metrics.Add) { add(float64(h.nacks.Load())) })
	c.refused = c.Counters("svidkit_sds_refused_requests_total",
		"The number of requests that were refused: over a limit, or malformed or without the header.",
		"reason", "limit", "request")
	c.Totals("svidkit_sds_failed_lookups_total",
		"The number of look-ups in the source that have failed, and are repeated.",
		func(add metrics.Add) { add(float64(h.table.failed.Load())) })
}
