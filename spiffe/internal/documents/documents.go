// Package documents serves what is made of a trust bundle, which changes, over HTTP.
package documents

import (
	"bytes"
	"cmp"
	"crypto"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/mldsa"
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
		hint, _ := b.RefreshHint()
		return b, cmp.Or(hint, renew.UsualPoll)
	}, nil
}

// Classical returns b without its keys of ML-DSA, for consumers that cannot read them, but b itself if it has no other
// X.509 authority: without any, the bundle would say that everything is revoked.
func Classical(b *spiffe.Bundle) *spiffe.Bundle {
	c := b.Contents()
	c.X509Authorities = slices.DeleteFunc(c.X509Authorities, func(c *x509.Certificate) bool {
		alg, _ := mldsa.InCertificate(c)
		return alg != ""
	})
	maps.DeleteFunc(c.JWTAuthorities, func(_ string, key crypto.PublicKey) bool { return mldsa.Name(key) != "" })
	classical, err := spiffe.NewBundle(b.TrustDomain(), c)
	if err != nil || len(c.X509Authorities) == 0 {
		return b
	}
	return classical
}

// Handler returns a handler that serves what marshal makes of the current bundle, with an entity tag, and lets caches
// keep it for maxAge. Without a bundle, or if it cannot be encoded, the status is 503.
func Handler(
	current func() (b *spiffe.Bundle, maxAge time.Duration), marshal func(*spiffe.Bundle) ([]byte, error),
) http.Handler {
	return &handler{current: current, marshal: marshal}
}

type handler struct {
	current func() (*spiffe.Bundle, time.Duration)
	marshal func(*spiffe.Bundle) ([]byte, error)
	page    atomic.Pointer[page] // the latest
}

// page is what marshal made of a bundle.
type page struct {
	of        *spiffe.Bundle
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

// newest returns the page of the current bundle, or nil.
func (h *handler) newest() *page {
	b, maxAge := h.current()
	if b == nil {
		return nil
	}
	if p := h.page.Load(); p != nil && p.of == b {
		return p
	}
	body, err := h.marshal(b)
	if err != nil {
		return nil
	}
	sum := sha256.Sum256(body)
	p := &page{
		of: b, body: body, tag: `"` + base64.RawURLEncoding.EncodeToString(sum[:18]) + `"`,
		life: fmt.Sprintf("max-age=%d", maxAge/time.Second),
	}
	h.page.Store(p)
	return p
}
