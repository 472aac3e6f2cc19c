package federation

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/url"

	"github.com/svidkit/svidkit/internal/jsonapi"
	"github.com/svidkit/svidkit/internal/mldsa"
	"github.com/svidkit/svidkit/internal/tlsalert"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// Limits on an endpoint, besides the limits on a bundle document.
const (
	maxRedirects = 5
	maxHeader    = 64 << 10 // bytes of the header of an answer
	maxETag      = 256      // bytes of an entity tag that is kept
)

// Fetch fetches the bundle of a relationship once, without regard to earlier ones. Of the Config, which may be nil,
// only Timeout, DialContext and Logger count.
//
// The error names the trust domain, the URL and the cause. It wraps a [*spiffe.VerifyError], a
// [*tls.CertificateVerificationError] or the error of a [spiffe.BundleSource] if the endpoint did not authenticate
// by its profile; [context.DeadlineExceeded] if the fetch took longer than the Timeout; [spiffe.ErrTooLarge], or a
// [*spiffe.ParseError], for an answer that is not a bundle document; the cause of the caller's context; or an error
// of the network.
//
// A bundle without authorities is a result like any other: nothing of the trust domain is trusted any more.
// Fetch does not compare sequence numbers; a [Manager] does.
func Fetch(ctx context.Context, r Relationship, cfg *Config) (*spiffe.Bundle, error) {
	o := *cmp.Or(cfg, new(Config))
	o.withDefaults()
	e, err := r.check()
	if err == nil {
		err = e.anchorsIn(nil)
	}
	if err != nil {
		return nil, fmt.Errorf("federation: fetch: %w", err)
	}
	a, failed := e.fetch(ctx, &o, tag{})
	if failed != nil {
		e.log(ctx, &o, a, failed, nil, outcomeFailed)
		return nil, failed
	}
	e.log(ctx, &o, a, nil, a.bundle, outcome{name: "fetched"})
	return a.bundle, nil
}

// endpoint is a server of one bundle. It never changes once it is in use.
type endpoint struct {
	td    spiffe.TrustDomain
	url   *url.URL
	where string // url as errors and logs show it
	plan

	source spiffe.BundleSource // verifies an https_spiffe endpoint
	parse  func(td spiffe.TrustDomain, doc []byte) (*spiffe.Bundle, error)
}

// borrows reports whether the bundle of another relationship of the same Manager verifies the endpoint.
func (e *endpoint) borrows() bool {
	return !e.id.IsZero() && e.bundles == nil
}

// anchorsIn returns an error if e needs the bundle of another relationship and all lacks it.
func (e *endpoint) anchorsIn(all map[spiffe.TrustDomain]*relation) error {
	if !e.borrows() || all[e.id.TrustDomain()] != nil {
		return nil
	}
	return relationshipError(e.td, fmt.Sprintf("the endpoint is in %q: set SPIFFE.Bundles, "+
		"or have the Manager federate with that trust domain first", e.id.TrustDomain()))
}

// answer is the result of a fetch. After a failure it has the fields that are known.
type answer struct {
	bundle  *spiffe.Bundle // nil if it is not modified
	etag    tag            // of bundle
	url     string         // of the last request
	peer    string         // the last server that was authenticated, or ""
	unasked bool           // there were no authorities to verify the endpoint with, so that nothing was sent
}

// tag is an entity tag and the URL that it came from: at another URL the same tag says nothing. The zero tag means
// none.
type tag struct{ value, url string }

// fetch fetches the bundle once. With an etag the answer may be that the bundle is not modified. Each request has a
// connection of its own, and the first goes to the configured URL: removed authorities count at once, and redirects
// are not remembered (SPIFFE Federation section 5.2).
func (e *endpoint) fetch(ctx context.Context, o *Config, etag tag) (a answer, failed *fetchError) {
	ctx, cancel := context.WithTimeoutCause(ctx, o.Timeout,
		fmt.Errorf("not done within %v: %w", o.Timeout, context.DeadlineExceeded))
	defer cancel()
	a.url = e.where
	err := e.anchored()
	if a.unasked = err != nil; a.unasked {
		err = fmt.Errorf("%w: %w", errNotAuthenticated, err)
	} else {
		err = e.follow(ctx, o, etag, &a)
	}
	if err != nil {
		failed = &fetchError{TrustDomain: e.td, URL: a.url, Err: classify(ctx, err)}
	}
	return a, failed
}

// follow sends the requests, one after the other while it is redirected, and fills in a.
func (e *endpoint) follow(ctx context.Context, o *Config, etag tag, a *answer) error {
	for u, hops := e.url, 0; ; hops++ {
		a.url, a.peer = display(u), ""
		next, err := e.ask(ctx, o, u, etag, a, hops)
		if err != nil || next == nil {
			return err
		}
		u = next
	}
}

// ask sends one request, and returns the URL of a redirect, or nil for an answer.
func (e *endpoint) ask(
	ctx context.Context, o *Config, u *url.URL, etag tag, a *answer, hops int,
) (next *url.URL, err error) {
	conn, err := e.dial(ctx, o, u)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.NetConn().Close() })()
	a.peer = u.Hostname()
	if !e.id.IsZero() {
		a.peer = e.id.String()
	}
	request := &http.Request{Method: http.MethodGet, URL: u, Close: true, Header: http.Header{
		"Accept": {"application/json"}, "Accept-Encoding": jsonapi.Plain, "User-Agent": {"svidkit"},
		mldsa.Header: {"true"},
	}}
	conditional := etag.value != "" && etag.url == u.String()
	if conditional {
		request.Header.Set("If-None-Match", etag.value)
	}
	response, err := send(conn, request)
	if err != nil {
		return nil, err
	}
	if response.StatusCode == http.StatusNotModified && conditional {
		return nil, nil
	}
	return e.read(response, a, hops)
}

// read reads a response into a, or returns the URL to which it redirects.
func (e *endpoint) read(response *http.Response, a *answer, hops int) (next *url.URL, err error) {
	switch response.StatusCode {
	case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther,
		http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		return nextURL(response, hops)
	case http.StatusOK:
		doc, err := jsonapi.Read(response, jws.MaxSetSize)
		if err != nil {
			return nil, err
		}
		if value := response.Header.Get("Etag"); len(value) <= maxETag {
			a.etag = tag{value, response.Request.URL.String()}
		}
		a.bundle, err = e.parse(e.td, doc)
		return nil, err
	}
	return nil, fmt.Errorf("HTTP status %d, not 200", response.StatusCode)
}

// send sends a request and returns the response, whose body is read from the connection.
func send(conn net.Conn, request *http.Request) (*http.Response, error) {
	if err := request.Write(conn); err != nil {
		return nil, err
	}
	limited := &io.LimitedReader{R: conn, N: maxHeader}
	in := bufio.NewReader(limited)
	for {
		response, err := http.ReadResponse(in, request)
		switch {
		case err != nil && limited.N == 0:
			return nil, fmt.Errorf("the header of the answer has over %d bytes: %w", maxHeader, spiffe.ErrTooLarge)
		case err != nil:
			return nil, err
		case response.StatusCode >= 200:
			limited.N = math.MaxInt64
			return response, nil
		}
	}
}

// nextURL returns the URL that a response redirects to. hops is the number of redirects so far.
func nextURL(response *http.Response, hops int) (*url.URL, error) {
	next, err := response.Location()
	switch {
	case hops == maxRedirects:
		return nil, fmt.Errorf("%w: more than %d", errRedirect, maxRedirects)
	case err != nil || len(next.String()) > maxURL:
		return nil, fmt.Errorf("%w: status %d without a usable Location", errRedirect, response.StatusCode)
	}
	if reason := unfitURL(next); reason != "" {
		return nil, fmt.Errorf("%w: the URL %s %s", errRedirect, display(next), reason)
	}
	return next, nil
}

// anchored returns an error if no certificate could verify the endpoint.
func (e *endpoint) anchored() error {
	if e.id.IsZero() {
		return nil
	}
	b, err := e.source.Bundle(e.id.TrustDomain())
	switch {
	case err != nil:
		return err
	case b == nil:
		return spiffe.ErrUnknownTrustDomain
	case !hasAuthority(b):
		return fmt.Errorf("trust domain %q: %w", e.id.TrustDomain(), spiffe.ErrNoAuthority)
	}
	return nil
}

// dial makes a connection to the endpoint and authenticates it.
func (e *endpoint) dial(ctx context.Context, o *Config, u *url.URL) (*tls.Conn, error) {
	config, err := e.clientConfig(u.Hostname())
	if err != nil {
		return nil, err
	}
	raw, err := o.DialContext(ctx, "tcp", net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), "443")))
	if err != nil {
		return nil, err
	}
	return tlsalert.Client(ctx, raw, config, 0)
}

// clientConfig returns the configuration for one connection to host.
func (e *endpoint) clientConfig(host string) (*tls.Config, error) {
	c := baseConfig()
	c.ServerName = host
	c.NextProtos = []string{"http/1.1"}
	if e.id.IsZero() {
		c.RootCAs = e.roots
		return c, nil
	}
	endpoint, err := spiffetls.New(spiffetls.Config{
		Peers: e.source, Allow: spiffe.AllowIDs(e.id), OptionalIdentity: true,
		MinVersion: c.MinVersion, NextProtos: c.NextProtos, Now: c.Time,
	})
	if err != nil {
		return nil, err
	}
	own, err := endpoint.ClientConfig()
	if err != nil {
		return nil, err
	}
	own.ServerName, own.CurvePreferences = host, c.CurvePreferences
	return own, nil
}

// classify returns an error of a fetch with its cause, as [Fetch] lists them.
func classify(ctx context.Context, err error) error {
	_, untrusted := errors.AsType[*tls.CertificateVerificationError](err)
	_, unverified := errors.AsType[*spiffe.VerifyError](err)
	_, unread := errors.AsType[*spiffe.ParseError](err)
	switch {
	case untrusted || unverified:
		return fmt.Errorf("%w: %w", errNotAuthenticated, err)
	case errors.Is(err, spiffe.ErrTooLarge), errors.Is(err, errRedirect), errors.Is(err, errNotAuthenticated), unread,
		ctx.Err() == nil:
		return err
	}
	return context.Cause(ctx)
}

// outcome is the outcome of an attempt, for logs and metrics.
type outcome struct{ name, warning string }

var (
	outcomeNew   = outcome{name: "new"}
	outcomeClash = outcome{"new with the old sequence number",
		"the publisher changed the bundle and kept its sequence number"}
	outcomeUnchanged   = outcome{name: "unchanged"}
	outcomeNotModified = outcome{name: "not modified"}
	outcomeOvertaken   = outcome{name: "overtaken by an operator"}
	outcomeRefused     = outcome{"refused", "bundle refused for its sequence number"}
	outcomeHeld        = outcome{"held", "bundle refused for its sequence number"}
	outcomePrevailed   = outcome{"new after it was held",
		"bundle with an implausible sequence number accepted, as the endpoint insists"}
	outcomeFailed = outcome{"failed", "bundle not fetched"}
)

// outcomes are those of a Manager.
var outcomes = []outcome{
	outcomeNew, outcomeClash, outcomeUnchanged, outcomeNotModified, outcomeOvertaken, outcomeRefused, outcomeHeld,
	outcomePrevailed, outcomeFailed,
}

// log logs a fetch. b is the bundle in force now, and may be nil.
func (e *endpoint) log(
	ctx context.Context, o *Config, a answer, failed *fetchError, b *spiffe.Bundle, end outcome, more ...slog.Attr,
) {
	attrs := []slog.Attr{slog.String("trust_domain", e.td.String()), slog.String("url", e.where)}
	if a.url != e.where {
		attrs = append(attrs, slog.String("redirected_to", a.url))
	}
	attrs = append(attrs, slog.String("peer", cmp.Or(a.peer, "none")), slog.String("outcome", end.name))
	if b != nil {
		attrs = append(attrs, describe(b)...)
	}
	if failed != nil {
		attrs = append(attrs, slog.Any("err", failed))
	}
	if a.bundle != nil {
		if skipped := a.bundle.Skipped(); len(skipped) > 0 {
			attrs = append(attrs, slog.Int("skipped", len(skipped)), slog.Any("first_skipped", skipped[0]))
		}
	}
	level, message := slog.LevelWarn, end.warning
	if failed == nil && b != nil && a.bundle != nil && !hasAuthority(b) {
		message = "bundle has no X.509 authority: every X.509-SVID of the trust domain is revoked"
	}
	if message == "" {
		level, message = slog.LevelInfo, "bundle fetched"
	}
	o.Logger.LogAttrs(ctx, level, "federation: "+message, append(attrs, more...)...)
}

func describe(b *spiffe.Bundle) []slog.Attr {
	c := b.Contents()
	attrs := []slog.Attr{slog.Int("authorities", len(c.X509Authorities)+len(c.JWTAuthorities))}
	if c.Sequence != nil {
		attrs = append(attrs, slog.Uint64("sequence", *c.Sequence))
	}
	return attrs
}
