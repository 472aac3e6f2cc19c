package witsvid

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"

	"github.com/svidkit/svidkit/internal/tokens/token"
)

// TransportOptions are the choices of [NewTransport] that have a default.
type TransportOptions struct {
	// Base sends the requests. Nil means a new [http.Transport] that trusts the roots of the host and uses
	// no proxy, and none from the environment. For servers with SPIFFE IDs see package spiffetls.
	Base http.RoundTripper

	// Audience returns the value that a proof is for, if it differs from the URI of the request without query and
	// fragment, for example the server's name behind a proxy that rewrites requests. Nil or an empty result means
	// that URI.
	Audience func(*http.Request) string

	// Tokens are the names of further header fields with tokens, which say on whose behalf a request is made. Proofs
	// cover them where they are present. Authorization and Txn-Token are always covered.
	Tokens []string
}

// NewTransport returns a transport that presents the WIT-SVID of p: each request gets the token and a new proof
// for it. It is safe for concurrent use, and [http.Client.CloseIdleConnections] reaches the base transport. The
// options may be nil.
//
// Tokens and proofs travel over TLS only: a request by http is refused before anything is sent. If a redirect leads
// to another host, the request there is sent without a token, and so is every request that follows, because the
// first host must not choose which other hosts see a token.
func NewTransport(p *Prover, opts *TransportOptions) (http.RoundTripper, error) {
	o := *cmp.Or(opts, &TransportOptions{})
	err := p.check()
	if err == nil {
		o.Tokens, err = tokenFields(o.Tokens)
	}
	if err != nil {
		return nil, fmt.Errorf("witsvid: new transport: %w", err)
	}
	if o.Base == nil {
		o.Base = token.BaseTransport("")
	}
	return &transport{*p, o}, nil
}

type transport struct {
	prover Prover
	opts   TransportOptions // with the defaults
}

// RoundTrip implements [http.RoundTripper].
func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL == nil {
		token.CloseBody(r)
		return nil, errors.New("witsvid: transport: the request has no URL")
	}
	if token.Strayed(r) {
		return t.opts.Base.RoundTrip(r)
	}
	c, err := t.prove(r)
	if err != nil {
		token.CloseBody(r)
		return nil, fmt.Errorf("witsvid: transport: %w", err)
	}
	resp, err := t.opts.Base.RoundTrip(c)
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
	aud, err := targetURI(r)
	if err != nil {
		return nil, err
	}
	call, e := fields(r.Header, t.opts.Tokens)
	if e != nil {
		return nil, e.Err
	}
	if call.Target = aud; t.opts.Audience != nil {
		call.Target = cmp.Or(t.opts.Audience(r), aud)
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
	(&http.Client{Transport: t.opts.Base}).CloseIdleConnections()
}
