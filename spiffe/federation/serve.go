package federation

import (
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
)

// NewHandler returns a handler that serves the bundle of td: a bundle endpoint. Every answer has the
// bundle that the source gives at that moment (FED-34); it is encoded when it has changed, and equal
// bundles have equal bytes. The handler does not look at the path of the request.
//
// It answers GET and HEAD, does not authenticate clients (FED-33), supports conditional requests by a
// strong entity tag, and lets caches keep an answer for the refresh hint, or five minutes without one.
// While the source has no bundle, or one that cannot be encoded, the status is 503.
func NewHandler(source spiffe.BundleSource, td spiffe.TrustDomain) (http.Handler, error) {
	current, err := currentBundle(source, td)
	if err != nil {
		return nil, fmt.Errorf("federation: handler: %w", err)
	}
	return &handler{current: func() (document, time.Duration) {
		b, hint := current()
		if b == nil {
			return nil, 0
		}
		return b, hint
	}}, nil
}

// currentBundle returns what gives the bundle of td at a moment, or nil, and how long caches may keep it.
func currentBundle(source spiffe.BundleSource, td spiffe.TrustDomain) (func() (*spiffe.Bundle, time.Duration), error) {
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

// NewMapHandler returns a handler that serves the bundles of many trust domains as a bundle map. The
// function returns the current set, nil for none, and must not block, such as [Manager.Bundles] or one
// that selects what the consumer may have. Members have no refresh hint of their own
// (MAP-5): refresh is how long caches may keep the map, in whole seconds; 0 means five minutes.
// Everything else is as for [NewHandler].
func NewMapHandler(bundles func() *spiffe.BundleSet, refresh time.Duration) (http.Handler, error) {
	switch {
	case bundles == nil:
		return nil, errors.New("federation: map handler: no bundles")
	case refresh < 0:
		return nil, fmt.Errorf("federation: map handler: refresh is %v, and must not be negative", refresh)
	case refresh == 0:
		refresh = renew.UsualPoll
	}
	return &handler{current: func() (document, time.Duration) {
		if set := bundles(); set != nil {
			return set, refresh
		}
		return nil, 0
	}}, nil
}

// document is what a handler serves, a pointer. Two that are not == may still have the same bytes.
type document interface{ Marshal() ([]byte, error) }

type handler struct {
	current func() (d document, maxAge time.Duration) // nil for none
	page    atomic.Pointer[page]                      // the last that was made
}

// page is an encoded document. The slices go into the headers of many answers and never change.
type page struct {
	of           document
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

// newest returns the page of the present document, or nil.
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

// matches reports whether tags, a value of If-None-Match, has tag.
func matches(tags, tag string) bool {
	for one := range strings.SplitSeq(tags, ",") {
		one = strings.TrimSpace(one)
		if one == "*" || strings.TrimPrefix(one, "W/") == tag {
			return true
		}
	}
	return false
}

// ServerConfig returns a new TLS configuration for a bundle endpoint with the profile https_spiffe:
// it presents the identity of self, which is asked at every handshake and must not block, and asks
// clients for nothing (FED-33, FED-64). Consumers configure the ID of self. An SVID that has expired is
// not presented: the handshake fails.
//
// TLS 1.2 and 1.3, with forward-secret AEAD cipher suites and curves, is what the standard asks for
// (FED-25).
func ServerConfig(self spiffe.SVIDSource) (*tls.Config, error) {
	if self == nil {
		return nil, errors.New("federation: server: no source of the identity to present")
	}
	return WebServerConfig(func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		svid, err := self.SVID()
		switch {
		case err != nil:
			return nil, fmt.Errorf("federation: no identity to present: %w", err)
		case svid == nil:
			return nil, errors.New("federation: no identity to present: the source gave none")
		case time.Now().After(svid.NotAfter()):
			return nil, fmt.Errorf("federation: no identity to present: the SVID of %q expired at %s; see why it was not renewed",
				svid.ID(), svid.NotAfter().UTC().Format(time.RFC3339))
		}
		return svid.TLSCertificate(), nil
	})
}

// WebServerConfig returns a new TLS configuration for a bundle endpoint with the profile https_web,
// as [ServerConfig] does but for the certificate: the function returns it at every handshake, and it must
// have the host of the endpoint's URL as a DNS name or IP address and be issued by an
// authority that consumers trust for websites (FED-51).
func WebServerConfig(certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)) (*tls.Config, error) {
	if certificate == nil {
		return nil, errors.New("federation: server: no certificate to present")
	}
	c := baseConfig()
	c.GetCertificate = certificate
	c.SessionTicketsDisabled = true // consumers come once per interval, and are to see the newest certificate
	return c, nil
}

// baseConfig has what FED-25 asks for: six cipher suites of TLS 1.2 and three curves, after a post-quantum
// hybrid. The suites of TLS 1.3 are all good.
func baseConfig() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		Time:       certchain.Now,
		CipherSuites: []uint16{
			tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
			tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
			tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
			tls.TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
			tls.TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
			tls.TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
		},
		CurvePreferences: []tls.CurveID{tls.X25519MLKEM768, tls.X25519, tls.CurveP256, tls.CurveP384},
	}
}
