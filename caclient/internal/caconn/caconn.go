// Package caconn is the shared part of the clients of remote CAs: the connection of a [caclient.Endpoint], tokens,
// the roots of the trust domain, and the kinds of failures.
package caconn

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/jsonapi"
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/retry"
	"github.com/svidkit/svidkit/internal/tlsalert"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Limits.
const (
	MaxResponse = 2 << 20 // bytes of an answer
	MaxRoots    = 256

	maxToken = 64 << 10
	maxFile  = 1 << 20
)

// Config is the part that differs between the clients.
type Config struct {
	Name     string // of the client's package, for errors and logs
	Endpoint caclient.Endpoint

	// TLS returns a new configuration for each connection, for an Endpoint without an HTTPClient. NextProtos is set
	// later. Nil means the client of [caclient.NewHTTPClient], with the RootsFile.
	TLS func(ctx context.Context) (*tls.Config, error)

	// PriorKnowledge is for gRPC: connections, with and without TLS, begin with HTTP/2, without ALPN. Each call makes
	// one.
	PriorKnowledge bool

	// Roots asks the CA for its present roots, at least one, if the Endpoint has no other source. Nil means that the
	// CA has no method for that: then Learn requests a certificate only to learn the roots. Learn may be nil if the
	// client requires another source.
	Roots func(ctx context.Context) ([]*x509.Certificate, error)
	Learn func(ctx context.Context) error

	// Keys says that the client keeps keys and has no roots: the Endpoint needs no TrustDomain.
	Keys bool
}

// Conn is the connection to one CA. It is safe for concurrent use.
type Conn struct {
	Name     string            // of the client's package
	Endpoint caclient.Endpoint // with a Logger
	URL      string            // scheme and host
	HTTP     *http.Client

	cfg   Config
	roots roots
	stale atomic.Bool // the next call must make a new connection

	tokenless *ratelog.Log // of calls that should have had a token
}

// New checks the Endpoint. It does not connect and reads no file. The error names the wrong option, but not the
// package.
func New(cfg Config) (*Conn, error) {
	e := &cfg.Endpoint
	u, err := url.Parse(e.URL)
	switch {
	case err != nil:
		return nil, errors.New("URL is not a URL") // the cause repeats it, and it may have a password
	case u.Scheme == "http" && !e.AllowPlaintext:
		return nil, errors.New("URL is without TLS; set AllowPlaintext if tokens may be read on the way")
	case u.Scheme != "https" && u.Scheme != "http" || u.Host == "":
		return nil, errors.New("URL has to be https://host:port")
	case u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "":
		return nil, errors.New("URL has more than a scheme, a host and a port")
	case e.TrustDomain.IsZero() && !cfg.Keys:
		return nil, fmt.Errorf("TrustDomain: %w", spiffe.ErrZero)
	case e.Roots != nil && e.RootsFile != "":
		return nil, errors.New("both Roots and RootsFile are set")
	case e.Token != nil && e.TokenFile != "":
		return nil, errors.New("both Token and TokenFile are set")
	}
	e.Logger = ratelog.Patient(e.Logger)
	hc, err := httpClient(e, cfg, u.Scheme)
	if err != nil {
		return nil, err
	}
	c := &Conn{Name: cfg.Name, Endpoint: *e, URL: u.Scheme + "://" + u.Host, HTTP: hc, cfg: cfg}
	c.tokenless = ratelog.New(e.Logger, 0)
	c.roots.td = e.TrustDomain
	return c, nil
}

func httpClient(e *caclient.Endpoint, cfg Config, scheme string) (*http.Client, error) {
	c := new(http.Client)
	switch {
	case e.HTTPClient != nil:
		*c = *e.HTTPClient
	case cfg.TLS != nil || scheme == "http":
		t := tlsalert.NewTransport(cfg.TLS, cfg.PriorKnowledge, nil)
		t.DisableKeepAlives = cfg.PriorKnowledge
		c.Transport = t
	default:
		var err error
		o := caclient.TLSOptions{RootsFile: e.RootsFile, MinVersion: tls.VersionTLS12, Logger: e.Logger}
		if c, err = caclient.NewHTTPClient(o); err != nil {
			return nil, err
		}
	}
	c.Jar = nil
	c.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return c, nil
}

// Text returns the text that a client prints instead of its tokens and keys.
func (c *Conn) Text() redact.Text { return redact.New(c.Name + ".CA(" + c.URL + ")") }

// Token returns the token to send, or the reason why an expected token is missing. A token is valid in a header. The
// error is a [*caclient.Error] of op, or says that ctx is done.
func (c *Conn) Token(ctx context.Context, op string) (token string, missing, err error) {
	switch {
	case c.Endpoint.Token != nil:
		token, err = c.Endpoint.Token(ctx)
		if errors.Is(err, fs.ErrNotExist) {
			token, missing, err = "", err, nil
		}
		if err != nil {
			if ctx.Err() != nil {
				return "", nil, fmt.Errorf("%s: %s: %w", c.Name, op, context.Cause(ctx))
			}
			if _, ok := errors.AsType[*caclient.Error](err); ok {
				return "", nil, err
			}
			e := c.Error(op, caclient.ErrUnavailable, fmt.Errorf("get a token: %w", err))
			after, advice := retry.After(err)
			if e.RetryAfter = after; advice == retry.Never { // a token endpoint knows no such client, for example
				e.Kind = caclient.ErrUnauthenticated
			}
			return "", nil, e
		}
	case c.Endpoint.TokenFile != "":
		token, missing = readToken(c.Endpoint.TokenFile)
	}
	if missing != nil {
		c.tokenless.Warn(c.Name+": no token to send", "the file cannot be used", slog.Any("err", missing))
	}
	if len(token) > maxToken || !IsText(token) || strings.Contains(token, " ") {
		return "", nil, c.Error(op, caclient.ErrInvalid,
			errors.New("the token is too long, or has characters that no token has"))
	}
	return token, missing, nil
}

// ProofToken is [Conn.Token] for a call that needs a token because the CA has refused the caller's certificate;
// refused is nil if there was no certificate. Without a token the error is refused, or says what is missing.
func (c *Conn) ProofToken(ctx context.Context, refused error, none string) (string, error) {
	token, missing, err := c.Token(ctx, "sign")
	switch {
	case err != nil:
		return "", err
	case token != "":
		return token, nil
	case refused != nil:
		return "", refused
	}
	return "", c.Error("sign", caclient.ErrUnauthenticated, errors.Join(errors.New(none), missing))
}

// OneCall returns a client that makes a connection for each call, with the current client certificate. A nil config
// trusts the host's roots.
func OneCall(config func(context.Context) (*tls.Config, error),
	certificate func(*tls.CertificateRequestInfo) (*tls.Certificate, error),
) *http.Client {
	t := tlsalert.NewTransport(config, false, nil)
	t.DisableKeepAlives = true
	t.Protocols.SetHTTP2(false)
	t.TLSClientConfig.GetClientCertificate = certificate
	return &http.Client{Transport: t}
}

// IsText reports whether s can be the value of a header.
func IsText(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' })
}

func readToken(name string) (string, error) {
	b, err := files.Read(name, maxToken+1024)
	if err != nil {
		return "", err
	}
	token := strings.TrimSpace(string(b))
	if token == "" {
		return "", fmt.Errorf("%s is empty", name)
	}
	return token, nil
}

// Error returns err with the operation, a kind, which may be nil, and the package name.
func (c *Conn) Error(op string, kind, err error) *caclient.Error {
	return &caclient.Error{Op: op, Kind: kind, Err: fmt.Errorf("%s: %w", c.Name, err)}
}

// CheckRequest refuses a request that no CA can sign. The result is a [*caclient.Error], or nil.
func (c *Conn) CheckRequest(csr *pki.CSR, lifetime time.Duration) error {
	switch {
	case csr == nil:
		return c.Error("sign", caclient.ErrInvalid, errors.New("there is no signing request; pki.NewCSR makes one"))
	case lifetime < 0:
		return c.Error("sign", caclient.ErrInvalid, fmt.Errorf("the lifetime is negative (%v)", lifetime))
	}
	return nil
}

// Reconnect makes the next call after [Conn.Begin] use a new connection, with the client certificate and roots of
// that moment.
func (c *Conn) Reconnect() { c.stale.Store(true) }

// Begin comes before a call. Only here are connections closed, because a connection is not idle yet when a call has
// just failed on it. Running calls go on.
func (c *Conn) Begin() {
	if c.stale.Swap(false) {
		c.HTTP.CloseIdleConnections()
	}
}

// Refused reports whether err says that the CA refuses the client certificate of a call, so that a token may work.
func Refused(err error) bool {
	alert, ok := errors.AsType[*net.OpError](err)
	if ok && alert.Op == "remote error" { // of TLS: the CA knows no root of the certificate
		return true
	}
	return errors.Is(err, caclient.ErrUnauthenticated) || errors.Is(err, caclient.ErrDenied) ||
		errors.Is(err, caclient.ErrInvalid)
}

// ExplainMissing adds to err, if it says that the CA could not authenticate the caller, the reason why there was no
// token to send; missing is nil if there was one.
func ExplainMissing(err, missing error) {
	e, ok := errors.AsType[*caclient.Error](err)
	if ok && missing != nil && e.Kind == caclient.ErrUnauthenticated { // the kind itself
		e.Err = fmt.Errorf("%w (there was no token to send: %w)", e.Err, missing)
	}
}

// Present returns the certificate from get, with its Leaf, if it is valid now. It returns nil otherwise, and for a
// nil get.
func Present(get func() *tls.Certificate) *tls.Certificate {
	if get == nil {
		return nil
	}
	cert := get()
	if cert == nil || len(cert.Certificate) == 0 {
		return nil
	}
	if cert.Leaf == nil {
		leaf, err := x509.ParseCertificate(cert.Certificate[0])
		if err != nil {
			return nil
		}
		whole := *cert
		whole.Leaf = leaf
		cert = &whole
	}
	if now := time.Now(); now.Before(cert.Leaf.NotBefore) || !now.Before(cert.Leaf.NotAfter) {
		return nil
	}
	return cert
}

// Untrusted reports whether the CA's own certificate did not verify: our roots may be out of date, and must be read
// again.
func Untrusted(err error) bool {
	_, ok := errors.AsType[*tls.CertificateVerificationError](err)
	return ok
}

// Chain parses certificates in PEM, in any number of texts, as the chain that answers csr: the leaf, which has the key
// of csr, then each certificate above, without roots and duplicates. An error describes the fault in the answer.
func Chain(csr *pki.CSR, texts ...string) ([]*x509.Certificate, error) {
	all, err := pki.ParseCertificatesPEM([]byte(strings.Join(texts, "\n")))
	if err != nil {
		return nil, fmt.Errorf("chain: %w", err)
	}
	return Tidy(csr, all)
}

// Chain is the function Chain for the answer to "sign". The error is a [*caclient.Error].
func (c *Conn) Chain(csr *pki.CSR, texts ...string) (chain []*x509.Certificate, err error) {
	if texts[0] == "" {
		err = errors.New("the answer has no certificate")
	} else {
		chain, err = Chain(csr, texts...)
	}
	if err != nil {
		return nil, c.Error("sign", caclient.ErrBadAnswer, err)
	}
	return chain, nil
}

// Tidy is [Chain] for parsed certificates.
func Tidy(csr *pki.CSR, all []*x509.Certificate) ([]*x509.Certificate, error) {
	if err := certchain.CheckSize(all); err != nil {
		return nil, fmt.Errorf("the answer: %w", err)
	}
	if !pki.PublicKeysEqual(all[0].PublicKey, csr.PublicKey()) {
		return nil, errors.New("the leaf's public key is not that of the request")
	}
	return certchain.Tidy(all, csr.PublicKey()), nil
}

// Request is a call of a CA that speaks JSON.
type Request struct {
	Op     string // "sign" or "fetch bundles"
	Method string
	Path   string // with a leading slash, and a query if there is one
	Header http.Header
	Body   any // for encoding/json; nil for none

	// Secrets must not appear in an error, such as the token.
	Secrets []string

	// Message extracts the text from the body of a refusal; nil means that it is ignored.
	Message func(body []byte) string
}

// Message is the Message of a [Request] to a server whose refusals are objects with the member "message".
func Message(body []byte) string {
	var m struct {
		Message string `json:"message"`
	}
	_ = json.Unmarshal(body, &m)
	return m.Message
}

// Status is an HTTP answer outside 200 to 299. The error of [Conn.Do] wraps it.
type Status struct {
	Code    int
	Message string // from Request.Message, cut and without the secrets
}

func (s *Status) Error() string {
	if s.Message == "" {
		return fmt.Sprintf("the server answers %d (%s)", s.Code, http.StatusText(s.Code))
	}
	return fmt.Sprintf("the server answers %d (%s): %q", s.Code, http.StatusText(s.Code), s.Message)
}

// Do sends a request and reads the answer, at most 2 MiB of JSON, into answer, which may be nil to ignore it. The
// error is a [*caclient.Error] with a kind from the status, or says that ctx is done.
func (c *Conn) Do(ctx context.Context, r Request, answer any) error {
	body, err := c.do(ctx, r)
	if err != nil || answer == nil {
		return err
	}
	if err := json.Unmarshal(body, answer); err != nil { // whose errors may quote the answer, but no text of it
		return c.Error(r.Op, caclient.ErrBadAnswer,
			fmt.Errorf("the answer is not the JSON of this API: %s", bearer.Redact(err.Error(), r.Secrets...)))
	}
	return nil
}

func (c *Conn) do(ctx context.Context, r Request) ([]byte, error) {
	req, err := c.request(ctx, r)
	if err != nil {
		return nil, c.Error(r.Op, caclient.ErrInvalid, err)
	}
	c.Begin()
	resp, err := c.HTTP.Do(req)
	if err == nil {
		defer resp.Body.Close()
		var body []byte
		if body, err = jsonapi.Read(resp, MaxResponse); err == nil {
			return c.judge(r, resp, body)
		}
		if errors.Is(err, spiffe.ErrTooLarge) {
			return nil, c.Error(r.Op, caclient.ErrBadAnswer, fmt.Errorf("the answer has %w", err))
		}
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("%s: %s: %w", c.Name, r.Op, context.Cause(ctx))
	}
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err // without the URL, whose query may contain a secret
	}
	c.Reconnect()
	if e, ok := errors.AsType[*caclient.Error](err); ok { // of Config.TLS
		return nil, e
	}
	return nil, c.Error(r.Op, caclient.ErrUnavailable, bearer.RedactError(err, r.Secrets...))
}

func (c *Conn) request(ctx context.Context, r Request) (*http.Request, error) {
	var body io.Reader
	if r.Body != nil {
		b, err := json.Marshal(r.Body)
		if err != nil {
			return nil, err
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, r.Method, c.URL+r.Path, body)
	if err != nil {
		return nil, errors.New("the path of the request cannot be part of a URL")
	}
	if r.Header != nil {
		req.Header = r.Header.Clone()
	}
	req.Header.Set("Accept", "application/json")
	req.Header["Accept-Encoding"] = jsonapi.Plain
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	return req, nil
}

func (c *Conn) judge(r Request, resp *http.Response, body []byte) ([]byte, error) {
	if resp.StatusCode >= 200 && resp.StatusCode <= 299 {
		return body, nil
	}
	s := &Status{Code: resp.StatusCode}
	if r.Message != nil {
		s.Message = bearer.Redact(r.Message(body), r.Secrets...)
	}
	e := c.Error(r.Op, kindOf(s.Code), s)
	if e.Kind == caclient.ErrUnavailable { // the kind itself
		e.RetryAfter = kube.RetryAfter(resp.Header)
	}
	if e.Kind != caclient.ErrInvalid {
		c.Reconnect()
	}
	return nil, e
}

// kindOf translates the status of an answer. A redirect is not followed, because it would send the token elsewhere.
func kindOf(code int) error {
	switch code {
	case http.StatusUnauthorized:
		return caclient.ErrUnauthenticated
	case http.StatusForbidden:
		return caclient.ErrDenied
	case http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests:
		return caclient.ErrUnavailable
	case http.StatusNotImplemented, http.StatusHTTPVersionNotSupported, http.StatusNetworkAuthenticationRequired:
		return caclient.ErrInvalid
	}
	if code >= 500 {
		return caclient.ErrUnavailable
	}
	return caclient.ErrInvalid
}
