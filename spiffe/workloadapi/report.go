package workloadapi

import (
	"slices"

	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/sourcereport"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Report implements [report.Reporter]: it shows the identity, the trust bundles, and the streams as upstreams, and no
// secrets. An outage of the server does not make the source unready: its identity stays valid until it expires. The
// metrics are:
//
//	svidkit_workloadapi_ready                            1 if the source has what [Source.Ready] waits for, else 0
//	svidkit_workloadapi_identity_end_timestamp_seconds   by identity, the SPIFFE ID: when its certificate ends
//	svidkit_workloadapi_stream_open                      by stream: 1 if it is open and has sent a response, else 0
//	svidkit_workloadapi_updates_total                    by stream: good responses
//	svidkit_workloadapi_failures_total                   by stream: streams that failed, and responses discarded
//	svidkit_workloadapi_update_timestamp_seconds         by stream: when the last good response came
//	svidkit_workloadapi_skipped                          by stream: parts of that response that were skipped
//
// The streams are x509 and, with JWTBundles, jwt.
func (s *Source) Report() report.Report {
	var identity spiffe.SVIDSource
	if !s.cfg.BundlesOnly {
		identity = s
	}
	r := sourcereport.Of(identity, s, s.client.server)
	s.mu.Lock()
	ready, svid, x509, jwt := s.cur.Load().ready, s.cur.Load().svid(), s.x509, s.jwt
	jwt.skipped = slices.Concat(jwt.skipped, s.unmerged)
	s.mu.Unlock()
	if s.cfg.BundlesOnly && !ready {
		r.NotReady = s.notReady()
	}
	streams := []stream{{"x509", "X.509", &x509}}
	if s.cfg.JWTBundles {
		streams = append(streams, stream{"jwt", "JWT bundles", &jwt})
	}
	for _, t := range streams {
		r.Upstreams = append(r.Upstreams, report.Upstream{Name: s.client.server + " (" + t.name + ")",
			LastSuccess: t.success, NextAttempt: t.next, Failures: t.failures, Err: t.err})
		r.Problems = append(r.Problems, t.skipped...)
	}
	r.Metrics = metricsOf(ready, svid, streams).Write
	return r
}

// stream is the state of a stream with its names in metrics and reports.
type stream struct {
	label, name string
	*track
}

// metricsOf returns the metrics of a source. svid may be nil.
func metricsOf(ready bool, svid *spiffe.SVID, streams []stream) *metrics.Set {
	set := new(metrics.Set)
	set.Value("svidkit_workloadapi_ready", "Whether the source has what it is configured for: 1 or 0.",
		metrics.Bool(ready))
	set.Gauges("svidkit_workloadapi_identity_end_timestamp_seconds",
		"When the certificate of the identity ends, in seconds since 1970.", func(add metrics.Add) {
			if svid != nil {
				add(metrics.Seconds(svid.NotAfter()), "identity", svid.ID().String())
			}
		})
	each := func(value func(stream) float64) func(metrics.Add) {
		return func(add metrics.Add) {
			for _, t := range streams {
				add(value(t), "stream", t.label)
			}
		}
	}
	set.Gauges("svidkit_workloadapi_stream_open", "Whether the stream is open and has brought something: 1 or 0.",
		each(func(t stream) float64 { return metrics.Bool(t.open) }))
	set.Totals("svidkit_workloadapi_updates_total", "The number of good responses.",
		each(func(t stream) float64 { return float64(t.updates) }))
	set.Totals("svidkit_workloadapi_failures_total",
		"The number of streams that have failed, and of responses that were discarded.",
		each(func(t stream) float64 { return float64(t.failed) }))
	set.Gauges("svidkit_workloadapi_update_timestamp_seconds",
		"When the last good response came, in seconds since 1970.", func(add metrics.Add) {
			for _, t := range streams {
				if !t.success.IsZero() {
					add(metrics.Seconds(t.success), "stream", t.label)
				}
			}
		})
	set.Gauges("svidkit_workloadapi_skipped",
		"The number of parts of the last good response that were not taken over.",
		each(func(t stream) float64 { return float64(len(t.skipped)) }))
	return set
}
