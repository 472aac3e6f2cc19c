package xdsproxy

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"runtime/debug"
	"strings"
	"sync"

	"github.com/svidkit/svidkit/internal/ratelog"
)

var errPanic = errors.New("the handler of secrets has panicked")

// inProcess is an [http.RoundTripper] whose requests are served by a handler in this process. The handler sees the
// client that sent outer.
type inProcess struct {
	handler http.Handler
	outer   *http.Request
	wg      *sync.WaitGroup // of the goroutines of handlers
	log     *ratelog.Log
}

// RoundTrip implements [http.RoundTripper]. It returns when the handler begins to answer.
func (t *inProcess) RoundTrip(req *http.Request) (*http.Response, error) {
	r := t.outer.WithContext(req.Context())
	r.Header = t.outer.Header.Clone()
	r.URL = &url.URL{Path: req.URL.Path}
	r.RequestURI = req.URL.Path
	r.Body = req.Body
	body, in := io.Pipe()
	w := &responseWriter{
		header: make(http.Header), body: in, begun: make(chan struct{}),
		resp: &http.Response{Proto: "HTTP/2.0", ProtoMajor: 2, ContentLength: -1, Body: body, Request: req},
	}
	t.wg.Go(func() {
		defer req.Body.Close()
		defer func() {
			if v := recover(); v != nil { // as in a server, a panic ends one stream
				t.log.Warn("xdsproxy: the handler of secrets has panicked", "panic", slog.Any("value", v),
					slog.String("stack", string(debug.Stack())))
				w.WriteHeader(http.StatusInternalServerError)
				_ = in.CloseWithError(errPanic)
			}
		}()
		t.handler.ServeHTTP(w, r)
		w.finish()
	})
	select {
	case <-w.begun:
		return w.resp, nil
	case <-req.Context().Done():
		_ = body.CloseWithError(context.Cause(req.Context()))
		return nil, context.Cause(req.Context())
	}
}

// responseWriter is an [http.ResponseWriter] that writes into a pipe: a write returns when it has been read.
type responseWriter struct {
	header http.Header
	body   *io.PipeWriter
	begun  chan struct{} // closed when resp is set
	once   sync.Once
	resp   *http.Response
}

// Header implements [http.ResponseWriter].
func (w *responseWriter) Header() http.Header { return w.header }

// WriteHeader implements [http.ResponseWriter].
func (w *responseWriter) WriteHeader(code int) {
	w.once.Do(func() {
		w.resp.StatusCode = code
		w.resp.Header = w.header.Clone()
		close(w.begun)
	})
}

// Write implements [http.ResponseWriter].
func (w *responseWriter) Write(p []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	if len(p) == 0 { // a pipe would wait for an empty write, too
		return 0, nil
	}
	return w.body.Write(p)
}

// Flush implements [http.Flusher].
func (w *responseWriter) Flush() { w.WriteHeader(http.StatusOK) }

// finish ends the response.
func (w *responseWriter) finish() {
	w.WriteHeader(http.StatusOK)
	trailer := make(http.Header)
	for name, values := range w.header {
		if name, ok := strings.CutPrefix(name, http.TrailerPrefix); ok {
			trailer[name] = values
		}
	}
	w.resp.Trailer = trailer // before the reader sees the end
	_ = w.body.Close()
}
