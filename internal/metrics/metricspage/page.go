// Package metricspage serves metrics over HTTP, which package metrics does not link.
package metricspage

import (
	"bytes"
	"io"
	"net/http"

	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/metrics"
)

// Page is a page of metrics. The zero Page is ready.
type Page struct{ page limit.Page }

// Serve answers with the metrics of the process and what write writes. The error is that of write, and then nothing
// is answered.
func (p *Page) Serve(w http.ResponseWriter, write func(io.Writer) error) error {
	text, done, err := p.page.Get(func(b *bytes.Buffer) error {
		_ = metrics.WriteProcess(b)
		return write(b)
	})
	defer done()
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	_, _ = w.Write(text) // an error means that the client is gone
	return nil
}
