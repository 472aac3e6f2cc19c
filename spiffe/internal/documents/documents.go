// Package documents serves a document that changes, such as a trust bundle, over HTTP.
package documents

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
)

// Bundle returns a function that gives the current bundle of td, or nil, and how long caches may keep it.
func Bundle(source spiffe.BundleSource, td spiffe.TrustDomain) (func() (*spiffe.Bundle, time.Duration), error) {
	switch {
	case source == nil:
		return nil, errors.New("no bundle source")
	case td.IsZero():
		return nil, fmt.Errorf("trust domain: %w", spiffe.ErrZero)
	}
	return func() (*spiffe.Bundle, time.Duration) {
		b, err := source.Bundle(td)
		if err != nil || b == nil || b.TrustDomain() != td {
			return nil, 0
		}
		hint, ok := b.RefreshHint()
		if !ok {
			hint = renew.UsualPoll
		}
		return b, hint
	}, nil
}

// Document is a document that a handler serves. It must be comparable. Two that are not == may have the same bytes.
type Document interface{ Marshal() ([]byte, error) }

// Handler returns a handler that serves the current document, with an entity tag, and lets caches keep it for
// maxAge. Without a document, or if it cannot be encoded, the status is 503.
func Handler(current func() (d Document, maxAge time.Duration)) http.Handler {
	return &handler{current: current}
}

type handler struct {
	current func() (Document, time.Duration)
	page    atomic.Pointer[page] // the latest
}

// page is an encoded Document.
type page struct {
	of        Document
	body      []byte
	tag, life string // for Etag and Cache-Control
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	header := w.Header()
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		header.Set("Allow", "GET, HEAD")
		http.Error(w, "only GET and HEAD are answered here", http.StatusMethodNotAllowed)
		return
	}
	p := h.newest()
	if p == nil {
		header.Set("Cache-Control", "no-store")
		http.Error(w, "there is no bundle to serve, or no key in it", http.StatusServiceUnavailable)
		return
	}
	header.Set("Etag", p.tag)
	header.Set("Cache-Control", p.life)
	header.Set("Content-Type", "application/json")
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(p.body))
}

// newest returns the page of the current document, or nil.
func (h *handler) newest() *page {
	d, maxAge := h.current()
	if d == nil {
		return nil
	}
	if p := h.page.Load(); p != nil && p.of == d {
		return p
	}
	body, err := d.Marshal()
	if err != nil {
		return nil
	}
	sum := sha256.Sum256(body)
	p := &page{
		of: d, body: body, tag: `"` + base64.RawURLEncoding.EncodeToString(sum[:18]) + `"`,
		life: fmt.Sprintf("max-age=%d", maxAge/time.Second),
	}
	h.page.Store(p)
	return p
}
