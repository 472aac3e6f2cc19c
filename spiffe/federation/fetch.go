package federation

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/jsonapi"
	"github.com/svidkit/svidkit/internal/tlsalert"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// Limits on what an endpoint can cause, beside those of a bundle document.
const (
	maxRedirects = 5
	maxHeader    = 64 << 10 // bytes of the header of an answer
	maxETag      = 256      // bytes of an entity tag that is kept
)

// Fetch fetches the bundle of a relationship once, without regard to earlier ones. The options may be nil.
//
// The error names the trust domain, the URL and the cause. It wraps a [*spiffe.VerifyError], a
// [*tls.CertificateVerificationError] or the error of a [spiffe.BundleSource] if the endpoint did not authenticate as its
// profile asks; [context.DeadlineExceeded] if the fetch was not done in time or the endpoint was silent for too long;
// [spiffe.ErrTooLarge], or a [*spiffe.ParseError], for an answer that is no bundle document; the cause of the caller's
// context; or an error of the network.
//
// A bundle without authorities is a result like any other: nothing of the trust domain is trusted any more
// (BND-10). Fetch does not compare sequence numbers; a [Manager] does.
func Fetch(ctx context.Context, r Relationship, opts *Options) (*spiffe.Bundle, error) {
	o, err := opts.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("federation: fetch: %w", err)
	}
	e, err := r.check()
	if err == nil {
		err = e.anchorsIn(nil)
	}
	if err != nil {
		return nil, fmt.Errorf("federation: fetch: %w", err)
	}
	a, failed := e.fetch(ctx, o, tag{})
	if failed != nil {
		e.log(ctx, o, a, failed, nil, outcomeFailed)
		return nil, failed
	}
	e.log(ctx, o, a, nil, a.bundle, "fetched")
	return a.bundle, nil
}

// endpoint is where a bundle comes from. It never changes once it is in use.
type endpoint struct {
	td    spiffe.TrustDomain
	url   *url.URL
	where string // url as errors and logs show it
	plan

	source spiffe.BundleSource // what an https_spiffe endpoint is verified by
	parse  func(td spiffe.TrustDomain, doc []byte) (*spiffe.Bundle, error)
}

// borrows reports whether the endpoint is verified by another relationship of the same Manager.
func (e *endpoint) borrows() bool {
	return !e.id.IsZero() && e.initial == nil && e.bundles == nil
}

// anchorsIn checks that the anchors of an endpoint come from somewhere.
func (e *endpoint) anchorsIn(all map[spiffe.TrustDomain]*relation) error {
	if !e.borrows() || all[e.id.TrustDomain()] != nil {
		return nil
	}
	return relationshipError(e.td, fmt.Sprintf("the endpoint is in %q: set SPIFFE.Bundles, or have the Manager federate with that trust domain first", e.id.TrustDomain())) // (FED-63)
}

// answer is the result of a fetch. After a failure it has what is known.
type answer struct {
	bundle   *spiffe.Bundle // nil if it is not modified
	etag     tag            // of bundle
	url      string         // of the last request
	peer     string         // the one that was authenticated last, or ""
	unasked  bool           // there were no anchors, so that nothing was sent
	received int            // the last HTTP status
}

// tag is an entity tag, and where it came from: at another URL the same tag says nothing. The zero tag
// is none.
type tag struct{ value, url string }

// fetch asks the endpoint once. With an etag the answer may be that it is not modified. Each fetch
// has a connection of its own, and starts at the configured URL: authorities that were removed count
// at once, and redirects are not remembered (FED-42, FED-67).
func (e *endpoint) fetch(parent context.Context, o *Options, etag tag) (a answer, failed *fetchError) {
	ctx, cancel := context.WithTimeout(parent, o.Timeout)
	d := &dialling{e: e, o: o, parent: parent, ctx: ctx}
	a.url = e.where
	err := e.anchored()
	if a.unasked = err != nil; a.unasked {
		err = fmt.Errorf("%w: %w", errNotAuthenticated, err)
	} else {
		err = d.follow(etag, &a)
	}
	if err != nil {
		failed = &fetchError{TrustDomain: e.td, URL: a.url, Status: a.received, Err: err}
	}
	cancel()
	a.peer = d.end()
	return a, failed
}

// follow sends the requests, one after the other while it is redirected, and fills in a.
func (d *dialling) follow(etag tag, a *answer) error {
	transport := &http.Transport{
		DialTLSContext: func(_ context.Context, network, addr string) (net.Conn, error) {
			return d.dial(network, addr)
		},
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			return nil, errors.New("not https")
		},
		DisableKeepAlives:      true,
		MaxResponseHeaderBytes: maxHeader,
	}
	for u, hops := d.e.url, 0; ; hops++ {
		a.url, a.received = display(u), 0
		request := (&http.Request{Method: http.MethodGet, URL: u, Header: http.Header{
			"Accept": {"application/json"}, "Accept-Encoding": jsonapi.Plain, "User-Agent": {"svidkit"},
		}}).WithContext(d.ctx)
		conditional := etag.value != "" && etag.url == u.String()
		if conditional {
			request.Header.Set("If-None-Match", etag.value)
		}
		response, err := transport.RoundTrip(request)
		if err != nil {
			return d.classify(err)
		}
		defer response.Body.Close() // at most maxRedirects+1
		a.received = response.StatusCode
		switch response.StatusCode {
		case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
			if u, err = d.o.next(response, hops); err != nil {
				return err
			}
			continue
		case http.StatusOK:
			doc, err := jsonapi.Read(response, jws.MaxSetSize)
			if err != nil {
				return d.classify(err)
			}
			if a.bundle, err = d.e.parse(d.e.td, doc); err != nil {
				return err
			}
			if value := usableETag(response.Header.Get("Etag")); value != "" {
				a.etag = tag{value, u.String()}
			}
			return nil
		case http.StatusNotModified:
			if conditional {
				return nil
			}
		}
		return fmt.Errorf("HTTP status %d, not 200", response.StatusCode) // (FED-45)
	}
}

// next returns the URL that a response redirects to, after so many redirects.
func (o *Options) next(response *http.Response, hops int) (*url.URL, error) {
	next, err := response.Location()
	switch {
	case o.NoRedirects:
		return nil, fmt.Errorf("%w: status %d, and redirects are switched off", errRedirect, response.StatusCode)
	case hops == maxRedirects:
		return nil, fmt.Errorf("%w: more than %d", errRedirect, maxRedirects)
	case err != nil || len(next.String()) > maxURL:
		return nil, fmt.Errorf("%w: status %d without a usable Location", errRedirect, response.StatusCode)
	}
	if reason := unfitURL(next); reason != "" { // (FED-40)
		return nil, fmt.Errorf("%w: the URL %s %s", errRedirect, display(next), reason)
	}
	return next, nil
}

// anchored reports why the endpoint could not be verified whatever it presents.
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

// dialling makes the connections of one fetch, one after the other. net/http dials on a goroutine of its
// own and does not wait for a dial that it has given up; the lock makes the end of the fetch wait.
type dialling struct {
	e           *endpoint
	o           *Options
	parent, ctx context.Context // of the caller, and of the fetch

	mu   sync.Mutex // held during a dial
	over bool
	peer string // that was authenticated last, or ""
}

// end waits for a dial that is under way, refuses further ones, and returns the peer. The context of the
// dials has ended.
func (d *dialling) end() (peer string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.over = true
	return d.peer
}

// dial makes a connection to an endpoint and authenticates it. The context is that of the fetch, because
// the one of net/http outlives it.
func (d *dialling) dial(network, addr string) (net.Conn, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.over {
		return nil, net.ErrClosed
	}
	d.peer = ""
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	config, err := d.e.clientConfig(host)
	if err != nil {
		return nil, err
	}
	raw, err := d.o.DialContext(d.ctx, network, addr)
	if err != nil {
		return nil, err
	}
	conn, err := tlsalert.Client(d.ctx, &watched{Conn: raw, patience: d.o.IdleTimeout}, config, 0)
	if err != nil {
		return nil, err
	}
	d.peer = host
	if !d.e.id.IsZero() {
		d.peer = d.e.id.String()
	}
	return conn, nil
}

// clientConfig is for one connection to host.
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

// watched is a connection with a deadline for each read and write. The context of the fetch bounds the
// whole.
type watched struct {
	net.Conn
	patience time.Duration
}

func (w *watched) Read(p []byte) (int, error) {
	if err := w.SetReadDeadline(time.Now().Add(w.patience)); err != nil {
		return 0, err
	}
	return w.Conn.Read(p)
}

func (w *watched) Write(p []byte) (int, error) {
	if err := w.SetWriteDeadline(time.Now().Add(w.patience)); err != nil {
		return 0, err
	}
	return w.Conn.Write(p)
}

// usableETag returns an entity tag that can be sent back, or "".
func usableETag(tag string) string {
	opaque := tag
	if len(tag) > 2 && tag[:2] == "W/" {
		opaque = tag[2:]
	}
	if len(tag) > maxETag || len(opaque) < 2 || opaque[0] != '"' || opaque[len(opaque)-1] != '"' {
		return ""
	}
	for _, c := range []byte(opaque[1 : len(opaque)-1]) {
		if c <= ' ' || c == '"' || c == 0x7f {
			return ""
		}
	}
	return tag
}

// classify returns a network error with its cause, as [Fetch] lists them.
func (d *dialling) classify(err error) error {
	_, untrusted := errors.AsType[*tls.CertificateVerificationError](err)
	_, unverified := errors.AsType[*spiffe.VerifyError](err)
	switch {
	case errors.Is(err, spiffe.ErrTooLarge):
		return err
	case errors.Is(d.parent.Err(), context.DeadlineExceeded):
		return fmt.Errorf("not done in the caller's time: %w: %w", context.DeadlineExceeded, context.Cause(d.parent))
	case d.parent.Err() != nil:
		return context.Cause(d.parent)
	case d.ctx.Err() != nil:
		return fmt.Errorf("not done within %v: %w", d.o.Timeout, context.DeadlineExceeded)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("silent for %v: %w", d.o.IdleTimeout, context.DeadlineExceeded)
	case untrusted || unverified:
		return fmt.Errorf("%w: %w", errNotAuthenticated, err)
	}
	return err
}

// log reports a fetch. The bundle is the one that is in force now, and may be nil.
func (e *endpoint) log(ctx context.Context, o *Options, a answer, failed *fetchError, b *spiffe.Bundle, outcome string, more ...slog.Attr) {
	level, msg := slog.LevelInfo, "federation: bundle fetched"
	attrs := []slog.Attr{slog.String("trust_domain", e.td.String()), slog.String("url", e.where)}
	if a.url != e.where {
		attrs = append(attrs, slog.String("redirected_to", a.url))
	}
	attrs = append(attrs, slog.String("peer", cmp.Or(a.peer, "none")), slog.String("outcome", outcome))
	if b != nil {
		attrs = append(attrs, describe(b)...)
	}
	switch {
	case failed != nil:
		level, msg = slog.LevelWarn, "federation: bundle not fetched"
		if outcome == outcomeHeld || outcome == outcomeRefused {
			msg = "federation: bundle refused for its sequence number"
		}
		attrs = append(attrs, slog.Any("err", failed))
	case b != nil && a.bundle != nil && !hasAuthority(b):
		level, msg = slog.LevelWarn, "federation: bundle has no X.509 authority: every X.509-SVID of the trust domain is revoked"
	case outcome == outcomePrevailed:
		level, msg = slog.LevelWarn, "federation: bundle with an implausible sequence number accepted, as the endpoint insists"
	case outcome == outcomeClash:
		level, msg = slog.LevelWarn, "federation: the publisher changed the bundle and kept its sequence number"
	}
	if a.bundle != nil {
		if skipped := a.bundle.Skipped(); len(skipped) > 0 {
			attrs = append(attrs, slog.Int("skipped", len(skipped)), slog.Any("first_skipped", skipped[0]))
		}
	}
	o.Logger.LogAttrs(ctx, level, msg, append(attrs, more...)...)
}

func describe(b *spiffe.Bundle) []slog.Attr {
	n := 0
	for range b.X509Authorities() {
		n++
	}
	for range b.JWTAuthorities() {
		n++
	}
	attrs := []slog.Attr{slog.Int("authorities", n)}
	if seq, ok := b.Sequence(); ok {
		attrs = append(attrs, slog.Uint64("sequence", seq))
	}
	return attrs
}
