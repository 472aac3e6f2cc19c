package jwtsvid

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/internal/tokens/token"
)

// TransportOptions are the choices of [NewTransport] that have a default.
type TransportOptions struct {
	// Base sends the requests. Nil means a new [http.Transport] that trusts the roots of the host and uses
	// no proxy, and none from the environment. For mutual TLS with SPIFFE IDs see package spiffetls.
	Base http.RoundTripper

	// AllowLoopback permits http, without TLS, to loopback addresses and to "localhost". It is for tests
	// and sidecars: any process that listens there gets the token.
	AllowLoopback bool

	// UnixSocket is the path of a Unix socket that all requests go to, whatever host is in their URL. They may then
	// use http, as nothing leaves the machine (JWT-SVID section 7.3). It excludes Base.
	UnixSocket string
}

// transport implements the result of [NewTransport].
type transport struct {
	cache     *Cache
	audiences map[string]string // by host and port
	opts      TransportOptions  // with the defaults
}

// NewTransport returns an [http.RoundTripper] that presents tokens from cache: each request to a listed host gets a
// header "Authorization: Bearer TOKEN" (RFC 6750 section 2.1). The map audiences has, for each host as written in
// URLs, the audience that the service there expects: "db.example.org" is that host at the default port of the URL's
// scheme, "db.example.org:8443" is that host and port. The map is copied. The options may be nil. The result is safe
// for concurrent use, and [http.Client.CloseIdleConnections] closes its connections.
//
// A token goes nowhere else. A request to another host is refused before anything is sent. If a redirect led there,
// it is sent without a token instead, and so is every request that follows: the first host must not choose which
// other hosts see a token. A request over http is refused unless the options allow it. A request that already has an
// Authorization header is passed on unchanged.
//
// If a server answers 401, the token may have been revoked. The transport then fetches a new token, at most every
// ten seconds, and repeats the request once, if its body can be sent again ([http.Request.GetBody]). Otherwise the
// new token is for the requests that follow.
func NewTransport(cache *Cache, audiences map[string]string, opts *TransportOptions) (http.RoundTripper, error) {
	o := *cmp.Or(opts, &TransportOptions{})
	switch {
	case cache == nil:
		return nil, errors.New("jwtsvid: new transport: no cache")
	case len(audiences) == 0:
		return nil, errors.New("jwtsvid: new transport: no audiences; say which audience each host has")
	case o.UnixSocket != "" && o.Base != nil:
		return nil, errors.New("jwtsvid: new transport: UnixSocket and Base are both set; " +
			"Base decides itself where it connects to")
	}
	if o.Base == nil {
		o.Base = token.BaseTransport(o.UnixSocket)
	}
	t := &transport{cache, make(map[string]string, len(audiences)), o}
	for _, name := range slices.Sorted(maps.Keys(audiences)) {
		u, err := url.Parse("https://" + name)
		if err != nil || u.Host != name || u.Hostname() == "" || strings.HasSuffix(name, ":") {
			return nil, fmt.Errorf("jwtsvid: new transport: %q is not a host, or a host and a port, as in a URL",
				token.Clip(name, token.MaxQuoted))
		}
		if err := checkAudience([]string{audiences[name]}); err != nil {
			return nil, fmt.Errorf("jwtsvid: new transport: host %q: %w", token.Clip(name, token.MaxQuoted), err)
		}
		host := strings.ToLower(name)
		if _, ok := t.audiences[host]; ok {
			return nil, fmt.Errorf("jwtsvid: new transport: the host %q is there twice",
				token.Clip(host, token.MaxQuoted))
		}
		t.audiences[host] = audiences[name]
	}
	return t, nil
}

// RoundTrip implements [http.RoundTripper].
func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	audience, err := t.audienceFor(r)
	if err != nil {
		token.CloseBody(r)
		return nil, fmt.Errorf("jwtsvid: transport: %w", err)
	}
	if audience == "" {
		return t.opts.Base.RoundTrip(r)
	}
	bearer, err := t.cache.Fetch(r.Context(), audience)
	if err != nil {
		token.CloseBody(r)
		return nil, err
	}
	resp, err := t.send(r, r.Body, bearer)
	if err != nil || resp.StatusCode != http.StatusUnauthorized {
		return resp, err
	}
	body, ok := bodyAgain(r)
	if !ok {
		_, _ = t.cache.replace(r.Context(), bearer, audience, false)
		return resp, nil
	}
	if bearer, err = t.cache.replace(r.Context(), bearer, audience, true); err != nil {
		if body != nil {
			_ = body.Close()
		}
		return resp, nil // the server's answer says more than our error
	}
	_, _ = io.CopyN(io.Discard, resp.Body, 64<<10) // so that the connection can be used again
	_ = resp.Body.Close()
	return t.send(r, body, bearer)
}

// audienceFor returns the audience of the token for r, or "" if r goes out without a token.
func (t *transport) audienceFor(r *http.Request) (string, error) {
	if r.URL == nil {
		return "", errors.New("the request has no URL")
	}
	if token.HasField(r.Header, "Authorization") || token.Strayed(r) {
		return "", nil
	}
	host := strings.ToLower(r.URL.Host)
	audience, ok := t.audiences[host]
	if !ok {
		port := map[string]string{"https": ":443", "http": ":80"}[r.URL.Scheme]
		bare, isDefault := strings.CutSuffix(host, port)
		if !isDefault {
			bare += port
		}
		audience, ok = t.audiences[bare]
	}
	switch {
	case !ok:
		return "", fmt.Errorf("no audience is known for the host %q; add it, or use another client for it",
			token.Clip(host, token.MaxQuoted))
	case r.URL.Scheme == "https" || r.URL.Scheme == "http" &&
		(t.opts.UnixSocket != "" || t.opts.AllowLoopback && jws.Loopback(r.URL.Hostname())):
		return audience, nil
	}
	return "", fmt.Errorf("refusing to send a token to %q by %q, where others can read it; use https",
		token.Clip(host, token.MaxQuoted), token.Clip(r.URL.Scheme, token.MaxQuoted))
}

// send sends a copy of r with this body and token. The response refers to r itself, without the token.
func (t *transport) send(r *http.Request, body io.ReadCloser, bearer string) (*http.Response, error) {
	c := token.CloneRequest(r)
	c.Header.Set("Authorization", "Bearer "+bearer)
	c.Body = body
	resp, err := t.opts.Base.RoundTrip(c)
	if resp != nil {
		resp.Request = r
	}
	return resp, err
}

// bodyAgain returns the body of r for a second attempt, and whether there can be one.
func bodyAgain(r *http.Request) (io.ReadCloser, bool) {
	if r.Body == nil || r.Body == http.NoBody {
		return r.Body, true
	}
	if r.GetBody == nil {
		return nil, false
	}
	body, err := r.GetBody()
	return body, err == nil
}

// CloseIdleConnections closes the idle connections of the base transport; [http.Client] calls it.
func (t *transport) CloseIdleConnections() {
	(&http.Client{Transport: t.opts.Base}).CloseIdleConnections()
}
