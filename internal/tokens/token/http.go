package token

import (
	"context"
	"net"
	"net/http"
	"strings"
	"time"
)

// BaseTransport returns a transport that trusts the host's roots and uses no proxy. If socket is not empty, it
// connects to that Unix socket, whatever the host in a URL.
func BaseTransport(socket string) *http.Transport {
	dialer := &net.Dialer{Timeout: 30 * time.Second}
	dial := dialer.DialContext
	if socket != "" {
		dial = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, "unix", socket)
		}
	}
	return &http.Transport{
		DialContext:           dial,
		ForceAttemptHTTP2:     true,
		TLSHandshakeTimeout:   10 * time.Second,
		MaxIdleConns:          100,
		IdleConnTimeout:       90 * time.Second,
		ExpectContinueTimeout: time.Second,
	}
}

// CloneRequest returns a copy of r whose header can be changed.
func CloneRequest(r *http.Request) *http.Request {
	c := r.Clone(r.Context())
	if c.Header == nil {
		c.Header = make(http.Header)
	}
	return c
}

// HasField reports whether a header has a field, in any spelling of its map key.
func HasField(h http.Header, field string) bool {
	for name := range h {
		if strings.EqualFold(name, field) {
			return true
		}
	}
	return false
}

// CloseBody closes the body of a request, as a RoundTripper must.
func CloseBody(r *http.Request) {
	if r.Body != nil {
		_ = r.Body.Close()
	}
}

// Strayed reports whether r follows redirects that led to another host or away from TLS. The first host must not
// choose which other hosts see a token. A response without its request counts as a response from another host.
func Strayed(r *http.Request) bool {
	at := r.URL
	for r.Response != nil {
		if r = r.Response.Request; r == nil || r.URL == nil {
			return true
		}
		if !strings.EqualFold(r.URL.Host, at.Host) || r.URL.Scheme != at.Scheme {
			return true
		}
	}
	return false
}
