package tokensource

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/retry"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
)

const maxAnswer = 64 << 10 // bytes, also of headers and of files

// StatusError is a refusal by a metadata server or a token endpoint.
type StatusError struct {
	StatusCode int // of HTTP
	// "error" of RFC 6749 section 5.2, such as "invalid_grant"; may be empty
	Code    string
	Message string // for people: one line of at most about 500 bytes, without parts of tokens; may be empty

	// RetryAfter is how long the server asked its clients to wait, at most an hour; 0 means that it did not ask.
	RetryAfter time.Duration
}

func (e *StatusError) Error() string {
	status := fmt.Sprintf("the server answered %d %s", e.StatusCode, http.StatusText(e.StatusCode))
	parts := []string{strings.TrimSpace(status), e.Code, e.Message}
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), ": ")
}

var _ retry.Error = (*StatusError)(nil)

// Retryable reports whether asking again may help: for the status 429, and from 500 except 501, 505 and 511. It also
// returns how long the server asked its clients to wait.
func (e *StatusError) Retryable() (after time.Duration, ok bool) {
	switch c := e.StatusCode; {
	case c == http.StatusTooManyRequests,
		c >= 500 && c != http.StatusNotImplemented && c != http.StatusHTTPVersionNotSupported &&
			c != http.StatusNetworkAuthenticationRequired:
		return e.RetryAfter, true
	}
	return 0, false
}

// networkError is the error of a request without an answer. It quotes no secret.
func networkError(ctx context.Context, err error, secrets []string) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if e, ok := errors.AsType[*url.Error](err); ok {
		err = e.Err // the URL may have a query
	}
	return bearer.RedactError(err, secrets...) // net/http quotes answers that are not HTTP
}

// newClient returns a copy of c that follows no redirects. If c has no Transport, the copy has one with this proxy, or
// without any.
func newClient(c *http.Client, proxy func(*http.Request) (*url.URL, error)) *http.Client {
	out := *cmp.Or(c, new(http.Client))
	out.Jar = nil
	out.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	if out.Transport == nil {
		out.Transport = &http.Transport{
			Proxy: proxy, MaxResponseHeaderBytes: maxAnswer,
			DisableKeepAlives: true, // a connection would wait for an hour
		}
	}
	return &out
}

// checkURL reads a URL, which may have the scheme http if its host is an address for which plain reports true, or
// localhost.
func checkURL(raw string, plain func(netip.Addr) bool) (*url.URL, error) {
	u, err := url.Parse(raw)
	switch {
	case err != nil:
		return nil, errors.New("URL is not a URL") // the cause repeats it, and it may have a password
	case u.User != nil || u.Fragment != "":
		return nil, errors.New("URL has a user, a password or a fragment")
	case u.Opaque != "" || u.Hostname() == "" || u.Scheme != "https" && u.Scheme != "http":
		return nil, errors.New("URL has to be https://host or http://address")
	case u.Scheme == "http" && u.Hostname() != "localhost":
		if a, err := netip.ParseAddr(u.Hostname()); err != nil || !plain(a.Unmap()) {
			return nil, fmt.Errorf("tokens from http://%s could be read on the way: use https, or an address of "+
				"this machine", u.Host)
		}
	}
	return u, nil
}

// request is a request, with the secrets that must stay out of errors.
type request struct {
	method, url string
	header      http.Header
	body        []byte
	secrets     []string
}

// send returns the body of an answer with status 200, and its header.
func (r *request) send(ctx context.Context, c *http.Client) ([]byte, http.Header, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, requestTimeout,
		fmt.Errorf("no answer in %v: %w", requestTimeout, context.DeadlineExceeded))
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, r.method, r.url, bytes.NewReader(r.body))
	if err != nil {
		return nil, nil, errors.New("the request cannot be made")
	}
	maps.Copy(req.Header, r.header)
	req.Header.Set("User-Agent", "svidkit")
	resp, err := c.Do(req)
	if err != nil {
		return nil, nil, networkError(ctx, err, r.secrets)
	}
	defer resp.Body.Close() // the answer is read or given up
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return nil, nil, networkError(ctx, err, r.secrets)
	case len(data) > maxAnswer:
		return nil, nil, fmt.Errorf("the answer is larger than %d KiB", maxAnswer>>10)
	case resp.StatusCode != http.StatusOK:
		e := refusal(resp.StatusCode, data, r.secrets)
		e.RetryAfter = kube.RetryAfter(resp.Header)
		return nil, nil, e
	}
	return data, resp.Header, nil
}

// refusal reads the body of an unsuccessful answer (RFC 6749 section 5.2).
func refusal(status int, data []byte, secrets []string) *StatusError {
	e := &StatusError{StatusCode: status}
	if status/100 == 3 {
		e.Message = "redirects are not followed; give the URL of the server itself"
		return e
	}
	var flat struct {
		Error       string `json:"error"`
		Description string `json:"error_description"`
	}
	if json.Unmarshal(data, &flat) == nil {
		e.Code, e.Message = flat.Error, flat.Description
	}
	e.Code = kube.OneLine(bearer.Redact(e.Code, secrets...), 64)
	e.Message = strings.TrimSpace(bearer.Redact(e.Message, secrets...))
	return e
}
