// Package metricspage serves metrics over HTTP. It is separate so that package metrics does not link net/http.
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

// Serve answers with the metrics of the process, followed by the output of write. If write fails, Serve returns its
// error and answers nothing.
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
	_, _ = w.Write(text) // an error means that the client has gone
	return nil
}
