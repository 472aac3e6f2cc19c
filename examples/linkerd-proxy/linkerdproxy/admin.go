package linkerdproxy

import (
	"errors"
	"io"
	"net/http"

	"github.com/svidkit/svidkit/internal/loopback"
	"github.com/svidkit/svidkit/internal/metrics/metricspage"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Handler returns the handler for the admin port of a proxy:
//
//	GET /ready     200 "ready", or 503 "not ready" while there is no certificate that has not expired
//	GET /live      200 "live", or 503 "expired" once the certificate has expired
//	GET /metrics   those of the Identity and of more, such as those of the proxy, in the text format of Prometheus
//
// A request for the metrics over loopback whose Host is another name gets 421, as a page in a browser on this machine
// may have caused it. A proxy that waits for its first certificate is live. The answers have no secrets; the
// kubelet's probes come without TLS.
func (id *Identity) Handler(more ...report.Reporter) http.Handler {
	mux := http.NewServeMux()
	answer := func(path, good, bad string, failed func(error) bool) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
			if _, err := id.Credential(); failed(err) {
				http.Error(w, bad, http.StatusServiceUnavailable)
				return
			}
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			_, _ = io.WriteString(w, good+"\n")
		})
	}
	answer("/ready", "ready", "not ready", func(err error) bool { return err != nil })
	answer("/live", "live", "expired", func(err error) bool { return errors.Is(err, ErrExpired) })
	var page metricspage.Page
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		if loopback.Reached(r) && !loopback.Host(r.Host) {
			http.Error(w, "this server is localhost; it has no other name", http.StatusMisdirectedRequest)
			return
		}
		err := page.Serve(w, func(w io.Writer) error {
			err := id.metrics.Write(w)
			for _, m := range more {
				if write := m.Report().Metrics; write != nil {
					err = errors.Join(err, write(w))
				}
			}
			return err
		})
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})
	return mux
}
