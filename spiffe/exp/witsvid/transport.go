package witsvid

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/svidkit/svidkit/internal/tokens/token"
)

// TransportOptions are the choices of a [Transport] that have a default.
type TransportOptions struct {
	// Base sends the requests. Nil means a new [http.Transport] that trusts the roots of the host and uses
	// no proxy, and none from the environment. For servers with SPIFFE IDs see spiffetls.Transport.
	Base http.RoundTripper

	// SignMessages says to prove by HTTP message signatures, which cover the body too, and not by Workload
	// Proof Tokens.
	SignMessages bool

	// Responses, if it is not nil, says to demand signed responses, of servers that it accepts. It needs
	// SignMessages. [FromResponse] then gives the proof of the server.
	Responses *Validator

	// Audience gives the value that a proof is for, if that is not the URI of the request without query and
	// fragment: what the server is known by behind a proxy that rewrites requests, say. Nil or an empty
	// result means that URI.
	Audience func(*http.Request) string

	// Tokens are the names of further header fields that carry tokens, saying on whose behalf a request is
	// made, which proofs cover where they are present. Authorization and Txn-Token are covered anyway.
	Tokens []string

	// MaxBody is the largest body in bytes of a request, and of a response, that SignMessages and Responses
	// keep in memory to make a digest of. 0 means 1 MiB; a larger body is an error.
	MaxBody int64
}

// Transport is an [http.RoundTripper] that presents a WIT-SVID: each request gets a token and a new proof
// for it. [NewTransport] makes one. It is safe for concurrent use.
//
// Tokens and proofs travel over TLS only: a request by http is refused before anything is sent (WIT-44).
// If a redirect leads to another host, the request there is sent without a token, and so is everything
// that follows, because the first host must not choose which other hosts see a token; with Responses, which
// that host could not sign for, it is refused.
type Transport struct {
	prover *Prover
	opts   TransportOptions // with the defaults
}

// NewTransport returns a Transport that proves with p. The options may be nil.
func NewTransport(p *Prover, opts *TransportOptions) (*Transport, error) {
	o := *cmp.Or(opts, &TransportOptions{})
	var err error
	o.Tokens, err = tokenFields(o.Tokens)
	switch {
	case p == nil || p.source == nil:
		err = errors.New("the Prover was not made by NewProver")
	case o.Responses != nil && o.Responses.check == nil:
		err = errNotMade
	case o.Responses != nil && !o.SignMessages:
		err = errors.New("a signed response needs a signed request; set SignMessages too")
	case o.MaxBody < 0:
		err = fmt.Errorf("MaxBody is %d, which is less than 0", o.MaxBody)
	}
	if err != nil {
		return nil, fmt.Errorf("witsvid: new transport: %w", err)
	}
	o.MaxBody = cmp.Or(o.MaxBody, defaultMaxBody)
	if o.Base == nil {
		o.Base = token.BaseTransport("")
	}
	return &Transport{p, o}, nil
}

// RoundTrip implements [http.RoundTripper].
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL == nil {
		token.CloseBody(r)
		return nil, errors.New("witsvid: transport: the request has no URL")
	}
	if token.Strayed(r) && t.opts.Responses == nil {
		return t.opts.Base.RoundTrip(r)
	}
	c, m, nonce, err := t.prove(r)
	if err != nil {
		token.CloseBody(r)
		return nil, fmt.Errorf("witsvid: transport: %w", err)
	}
	resp, err := t.opts.Base.RoundTrip(c)
	if err != nil {
		return nil, err
	}
	resp.Request = r // without the proof
	if t.opts.Responses == nil {
		return resp, nil
	}
	proof, e := t.verify(resp, m, nonce)
	if e != nil {
		_ = resp.Body.Close()
		return nil, fmt.Errorf("the server answered %d: %w", resp.StatusCode, e)
	}
	resp.Request = r.WithContext(context.WithValue(r.Context(), responseKey{}, &provenResponse{resp, proof}))
	return resp, nil
}

// prove returns a copy of the request with token and proof; if it is signed, also what was signed and the
// nonce.
func (t *Transport) prove(r *http.Request) (*http.Request, *message, string, error) {
	refused := ""
	switch {
	case r.URL.Scheme != "https":
		refused = fmt.Sprintf("refusing to send a WIT-SVID by %q, where others can read it; use https", token.Clip(r.URL.Scheme, token.MaxQuoted))
	case token.Strayed(r):
		refused = fmt.Sprintf("a redirect led to %q, of which no signed response was asked", token.Clip(r.URL.Host, token.MaxQuoted))
	}
	if token.HasField(r.Header, headerToken) || token.HasField(r.Header, headerProof) {
		refused = "the request has a token or a proof already"
	}
	if refused != "" {
		return nil, nil, "", errors.New(refused)
	}
	if e := misplaced(r.Header); e != nil {
		return nil, nil, "", e.Err
	}
	aud, err := targetURI(r)
	if err != nil {
		return nil, nil, "", err
	}
	if t.opts.Audience != nil {
		aud = cmp.Or(t.opts.Audience(r), aud)
	}
	c := token.CloneRequest(r)
	if t.opts.SignMessages {
		if err := t.digestBody(c); err != nil {
			return nil, nil, "", err
		}
	}
	s, now, err := t.prover.current() // after the body, which may have taken long
	if err != nil {
		return nil, nil, "", err
	}
	c.Header.Set(headerToken, s.Token())
	if t.opts.SignMessages {
		m, nonce, err := t.signRequest(c, s, now, aud)
		return c, m, nonce, err
	}
	call, e := fields(r.Header, t.opts.Tokens)
	if e != nil {
		return nil, nil, "", e.Err
	}
	call.Target = aud
	proof, err := t.prover.prove(s, now, call)
	if err != nil {
		return nil, nil, "", err
	}
	c.Header.Set(headerProof, proof)
	return c, nil, "", nil
}

// digestBody replaces the body of c by one that was read, and sets its digest.
func (t *Transport) digestBody(c *http.Request) error {
	if len(c.Trailer) > 0 {
		return errors.New("the request has trailers, which a signature does not cover")
	}
	if c.Body == nil || c.Body == http.NoBody {
		return nil
	}
	body, err := readBodyWithin(c.Context(), c.Body, t.opts.MaxBody)
	if err != nil {
		return err
	}
	token.CloseBody(c)
	c.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
	c.Body, _ = c.GetBody()
	c.ContentLength, c.TransferEncoding = int64(len(body)), nil
	if len(body) == 0 {
		c.Body, c.GetBody = http.NoBody, nil
	} else {
		c.Header.Set("Content-Digest", contentDigest(body))
	}
	return nil
}

// readBodyWithin is readBody until ctx is done. A Read that hangs then is left behind, as net/http leaves
// it; the caller closes the body, which ends most.
func readBodyWithin(ctx context.Context, body io.Reader, limit int64) ([]byte, error) {
	type result struct {
		data []byte
		err  error
	}
	done := make(chan result, 1)
	go func() {
		data, err := readBody(body, -1, limit)
		done <- result{data, err}
	}()
	select {
	case r := <-done:
		return r.data, r.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// signRequest signs c, whose body has its digest.
func (t *Transport) signRequest(c *http.Request, s *SVID, now time.Time, aud string) (*message, string, error) {
	call := Call{Target: aud}
	if err := call.check(); err != nil {
		return nil, "", err
	}
	if !printable(aud) {
		return nil, "", errors.New("the audience is not printable ASCII")
	}
	extra := []param{{"wimse-aud", textItem(aud)}}
	if t.opts.Responses != nil {
		extra = append(extra, param{"wimse-sign-response", yes})
		if c.Header.Get("Accept-Encoding") == "" { // or net/http asks for gzip and hides what was signed
			c.Header.Set("Accept-Encoding", "identity")
		}
	}
	m := &message{method: cmp.Or(c.Method, http.MethodGet), target: c.URL.RequestURI(), header: c.Header}
	nonce, err := t.prover.sign(s, now, m, t.opts.Tokens, extra...)
	return m, nonce, err
}

// verify verifies a signed response (HSIG-10), and puts its body back.
func (t *Transport) verify(resp *http.Response, request *message, nonce string) (*Proof, *token.Error) {
	v := t.opts.Responses
	text, e := single(resp.Header, responses, headerToken, "HSIG-10")
	if e != nil {
		return nil, e
	}
	holder, now, e := v.verifyToken(text)
	if e != nil {
		return nil, e
	}
	m := &message{status: resp.StatusCode, header: resp.Header, request: request}
	s, e := v.verifyMessage(holder, m, now)
	if e == nil && s.answersTo != nonce {
		e = signatures.Refuse("binding", "HSIG-10", "the response answers another request")
	}
	if e == nil {
		var body io.ReadCloser
		if body, e = m.checkBody(responses, resp.Body, -1, t.opts.MaxBody); e == nil {
			_ = resp.Body.Close()
			resp.Body = body
		}
	}
	return v.admit(holder, text, now, e, s.evidence(responses))
}

// responseKey is the key of a *provenResponse in the context of the request in a response.
type responseKey struct{}

// provenResponse names the response, as contexts are handed on to other requests.
type provenResponse struct {
	response *http.Response
	proof    *Proof
}

// FromResponse returns the proof of the server that signed a response, if a [Transport] demanded that. For
// every other response it reports false.
func FromResponse(resp *http.Response) (*Proof, bool) {
	if resp == nil || resp.Request == nil {
		return nil, false
	}
	p, ok := resp.Request.Context().Value(responseKey{}).(*provenResponse)
	if !ok || p.response != resp {
		return nil, false
	}
	return p.proof, true
}

// CloseIdleConnections closes the idle connections of the base transport, if it can;
// [http.Client.CloseIdleConnections] calls it.
func (t *Transport) CloseIdleConnections() {
	(&http.Client{Transport: t.opts.Base}).CloseIdleConnections()
}
