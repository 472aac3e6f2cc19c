package workloadapi

import (
	"io"

	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/sourcereport"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Report implements [report.Reporter] with the identity, the trust bundles, and the streams as upstreams. The metrics are:
//
//	svidkit_workloadapi_ready                            1 if the source has what [Source.Ready] waits for, else 0
//	svidkit_workloadapi_identity_end_timestamp_seconds   by identity, the SPIFFE ID: when its certificate ends
//	svidkit_workloadapi_stream_open                      by stream: 1 if it is open and has brought something, else 0
//	svidkit_workloadapi_updates_total                    by stream: good responses
//	svidkit_workloadapi_failures_total                   by stream: streams that failed, and responses discarded
//	svidkit_workloadapi_update_timestamp_seconds         by stream: when the last good response came
//	svidkit_workloadapi_skipped                          by stream: parts of it that were not taken over
//
// The streams are x509 and, with JWTBundles, jwt.
func (s *Source) Report() report.Report {
	st := s.Status()
	var identity spiffe.SVIDSource
	if !s.cfg.BundlesOnly {
		identity = s
	}
	r := sourcereport.Of(identity, s, st.Server)
	if s.cfg.BundlesOnly && !st.Ready {
		r.NotReady = s.notReady()
	}
	add := func(stream string, st StreamStatus) {
		r.Upstreams = append(r.Upstreams, report.Upstream{
			Name: s.client.server + " (" + stream + ")", LastSuccess: st.LastUpdate, NextAttempt: st.NextAttempt, Failures: st.Failures, Err: st.Err,
		})
		r.Problems = append(r.Problems, st.Skipped...)
	}
	add("X.509", st.X509)
	if st.JWT.Updates > 0 || st.JWT.Err != nil { // else it is not asked for
		add("JWT bundles", st.JWT)
	}
	r.Metrics = func(w io.Writer) error { return s.metrics(st).Write(w) }
	return r
}

func (s *Source) metrics(st Status) *metrics.Set {
	s.mu.Lock()
	x509, jwt := s.x509.failed, s.jwt.failed
	s.mu.Unlock()

	set := new(metrics.Set)
	set.Gauges("svidkit_workloadapi_ready", "Whether the source has what it is configured for: 1 or 0.", func(add metrics.Add) { add(metrics.Bool(st.Ready)) })
	set.Gauges("svidkit_workloadapi_identity_end_timestamp_seconds", "When the certificate of the identity ends, in seconds since 1970.", func(add metrics.Add) {
		if !st.ID.IsZero() {
			add(metrics.Seconds(st.NotAfter), "identity", st.ID.String())
		}
	})
	each := func(to func(name, help string, read func(metrics.Add)), name, help string, value func(s StreamStatus, failed uint64) (float64, bool)) {
		to(name, help, func(add metrics.Add) {
			if v, ok := value(st.X509, x509); ok {
				add(v, "stream", "x509")
			}
			if v, ok := value(st.JWT, jwt); ok && s.cfg.JWTBundles {
				add(v, "stream", "jwt")
			}
		})
	}
	each(set.Gauges, "svidkit_workloadapi_stream_open", "Whether the stream is open and has brought something: 1 or 0.", func(s StreamStatus, _ uint64) (float64, bool) {
		return metrics.Bool(s.Open), true
	})
	each(set.Totals, "svidkit_workloadapi_updates_total", "The number of good responses.", func(s StreamStatus, _ uint64) (float64, bool) {
		return float64(s.Updates), true
	})
	const failures = "The number of streams that have failed, and of responses that were discarded."
	each(set.Totals, "svidkit_workloadapi_failures_total", failures, func(_ StreamStatus, failed uint64) (float64, bool) {
		return float64(failed), true
	})
	each(set.Gauges, "svidkit_workloadapi_update_timestamp_seconds", "When the last good response came, in seconds since 1970.", func(s StreamStatus, _ uint64) (float64, bool) {
		return metrics.Seconds(s.LastUpdate), !s.LastUpdate.IsZero()
	})
	each(set.Gauges, "svidkit_workloadapi_skipped", "The number of parts of the last good response that were not taken over.", func(s StreamStatus, _ uint64) (float64, bool) {
		return float64(len(s.Skipped)), true
	})
	return set
}
