// Package documents serves a document that changes, such as a trust bundle, over HTTP.
package documents

import (
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
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

// page is an encoded Document. The slices go into the headers of many answers and never change.
type page struct {
	of           Document
	body         []byte
	tag          string
	etag         []string
	cacheControl []string
	length       []string
}

var contentType = []string{"application/json"}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		http.Error(w, "only GET and HEAD are answered here", http.StatusMethodNotAllowed)
		return
	}
	p := h.newest()
	if p == nil {
		w.Header().Set("Cache-Control", "no-store")
		http.Error(w, "there is no bundle to serve, or no key in it", http.StatusServiceUnavailable)
		return
	}
	header := w.Header()
	header["Etag"], header["Cache-Control"] = p.etag, p.cacheControl
	for _, tags := range r.Header["If-None-Match"] {
		if matches(tags, p.tag) {
			w.WriteHeader(http.StatusNotModified)
			return
		}
	}
	header["Content-Type"], header["Content-Length"] = contentType, p.length
	w.WriteHeader(http.StatusOK)
	if r.Method == http.MethodGet {
		_, _ = w.Write(p.body) // the client may have gone
	}
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
	tag := `"` + base64.RawURLEncoding.EncodeToString(sum[:18]) + `"`
	p := &page{
		of: d, body: body, tag: tag, etag: []string{tag}, length: []string{strconv.Itoa(len(body))},
		cacheControl: []string{"max-age=" + strconv.FormatInt(int64(maxAge/time.Second), 10)},
	}
	h.page.Store(p)
	return p
}

// matches reports whether tags, a value of If-None-Match, contains tag.
func matches(tags, tag string) bool {
	for one := range strings.SplitSeq(tags, ",") {
		one = strings.TrimSpace(one)
		if one == "*" || strings.TrimPrefix(one, "W/") == tag {
			return true
		}
	}
	return false
}
