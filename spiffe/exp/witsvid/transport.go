package witsvid

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/svidkit/svidkit/internal/tokens/token"
)

// NewTransport returns a transport that presents the WIT-SVID of p: each request gets the token and a new proof
// for it, for the URI of the request without query and fragment. The base sends the requests; nil means a new
// [http.Transport] that trusts the roots of the host and uses no proxy, and none from the environment. For servers
// with SPIFFE IDs see package spiffetls. The result is safe for concurrent use, and [http.Client.CloseIdleConnections]
// reaches the base.
//
// Tokens and proofs travel over TLS only: a request by http is refused before anything is sent. If a redirect leads
// to another host, the request there is sent without a token, and so is every request that follows, because the
// first host must not choose which other hosts see a token.
func NewTransport(p *Prover, base http.RoundTripper) (http.RoundTripper, error) {
	if err := p.check(); err != nil {
		return nil, fmt.Errorf("witsvid: new transport: %w", err)
	}
	if base == nil {
		base = token.BaseTransport("")
	}
	return &transport{*p, base}, nil
}

type transport struct {
	prover Prover
	base   http.RoundTripper
}

// RoundTrip implements [http.RoundTripper].
func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL == nil {
		token.CloseBody(r)
		return nil, errors.New("witsvid: transport: the request has no URL")
	}
	if token.Strayed(r) {
		return t.base.RoundTrip(r)
	}
	c, err := t.prove(r)
	if err != nil {
		token.CloseBody(r)
		return nil, fmt.Errorf("witsvid: transport: %w", err)
	}
	resp, err := t.base.RoundTrip(c)
	if err != nil {
		return nil, err
	}
	resp.Request = r // without the proof
	return resp, nil
}

// prove returns a copy of the request with token and proof.
func (t *transport) prove(r *http.Request) (*http.Request, error) {
	switch {
	case r.URL.Scheme != "https":
		return nil, fmt.Errorf("refusing to send a WIT-SVID by %q, where others can read it; use https",
			token.Clip(r.URL.Scheme, token.MaxQuoted))
	case token.HasField(r.Header, headerToken) || token.HasField(r.Header, headerProof):
		return nil, errors.New("the request has a token or a proof already")
	}
	if e := misplaced(r.Header); e != nil {
		return nil, e.Err
	}
	call, e := fields(r.Header)
	if e != nil {
		return nil, e.Err
	}
	var err error
	if call.Target, err = targetURI(r); err != nil {
		return nil, err
	}
	text, proof, err := t.prover.prove(call)
	if err != nil {
		return nil, err
	}
	c := token.CloneRequest(r)
	c.Header.Set(headerToken, text)
	c.Header.Set(headerProof, proof)
	return c, nil
}

// CloseIdleConnections closes the idle connections of the base transport, if it can;
// [http.Client.CloseIdleConnections] calls it.
func (t *transport) CloseIdleConnections() {
	(&http.Client{Transport: t.base}).CloseIdleConnections()
}
