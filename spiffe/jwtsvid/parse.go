package jwtsvid

import (
	"errors"
	"time"

	"github.com/svidkit/svidkit/internal/jws"
	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/spiffe"
)

// MaxSize is the longest token in bytes that this package reads or issues. Most HTTP servers take no
// more in a header field.
const MaxSize = jws.MaxSize

// Unverified is what a token says about itself. Nobody has looked at its signature, and anybody can
// write one: it tells a client what it holds, and it must never decide whether somebody may come in.
// For that see [Validator]. It does not hold the token.
type Unverified struct {
	ID       spiffe.ID // "sub"
	Audience []string  // "aud", at least one
	Expires  time.Time // "exp"
	KeyID    string    // "kid" in the header; empty if there is none
}

// ParseUnverified reads a token without verifying it: neither its signature, nor its audience, nor
// its time is looked at. The form of the header and of the claims "sub", "aud" and "exp" is checked
// as a [Validator] does. The error is an [*Error].
func ParseUnverified(token string) (*Unverified, error) {
	p, e := parse(token)
	if e == nil {
		e = p.audienceFault()
	}
	if e == nil {
		e = p.expiryFault()
	}
	if e != nil {
		if p != nil {
			e.ID = p.id
		}
		return nil, e
	}
	return &Unverified{ID: p.id, Audience: p.aud, Expires: p.exp.at, KeyID: p.kid}, nil
}

// parsed is a token whose form is right. What the claims "aud", "exp" and "nbf" are worth is judged
// after the signature.
type parsed struct {
	header
	claims
	input, sig []byte
}

// parse takes the first three steps, which need nothing but the token: the parts, the header, the
// payload.
func parse(token string) (*parsed, *Error) {
	t, err := jws.Parse(token)
	if err != nil {
		return nil, malformed(token, err)
	}
	p := &parsed{input: t.Input, sig: t.Signature}
	if e := p.readHeader(t.Header); e != nil {
		return nil, e
	}
	if e := p.readClaims(t.Payload); e != nil {
		return nil, e
	}
	return p, nil
}

func malformed(token string, err error) *Error {
	e := refuse(ReasonMalformed, "JWT-26", "%w", err)
	if f, ok := errors.AsType[*jws.Error](err); ok {
		switch f.Code {
		case jws.Shape:
			e.Rule = "JWT-1"
			if dots(token) == 4 { // the shape of an encrypted token
				e.Rule = "JWT-2"
			}
		case jws.Size:
			e.Rule = ""
		}
	}
	return e
}

func dots(s string) (n int) {
	for i := range len(s) {
		if s[i] == '.' {
			n++
		}
	}
	return n
}

// header is what the header of a token says.
type header struct {
	alg    jws.Algorithm
	kid    string
	hasKID bool
}

// readHeader applies the rules for the header. The algorithm is judged before all else that it says
// (JWT-4).
func (h *header) readHeader(data []byte) *Error {
	var alg, typ []byte
	var extra string
	hasTyp, kidOK, other := false, true, false
	r := strictjson.NewReader(data)
	object := r.Kind() == strictjson.Object
	if !object {
		r.Skip()
	}
	for name := range r.Members() {
		switch string(name) {
		case "alg":
			alg, _ = r.Text()
		case "kid":
			var kid []byte
			kid, kidOK = r.Text()
			h.kid, h.hasKID = string(kid), true
		case "typ":
			typ, _ = r.Text()
			hasTyp = true
		default:
			if !other {
				extra, other = string(name), true
			}
		}
	}
	switch err := r.End(); {
	case err != nil:
		return refuse(ReasonMalformed, "JWT-26", "the header is not strict JSON: %w", err)
	case !object:
		return refuse(ReasonMalformed, "JWT-26", "the header is not a JSON object")
	}
	var ok bool
	if h.alg, ok = jws.ParseAlgorithm(string(alg)); !ok {
		return refuse(ReasonAlgorithm, "JWT-4", `"alg" is missing or not one of the nine that begin with RS, ES or PS`)
	}
	switch {
	case other:
		return refuse(ReasonHeader, "JWT-6", "%q does not belong in a header", clip(extra, maxQuoted))
	case !kidOK:
		return refuse(ReasonHeader, "JWT-7", `"kid" is not a string`)
	case hasTyp && string(typ) != "JWT" && string(typ) != "JOSE":
		return refuse(ReasonHeader, "JWT-10", `"typ" is there and neither "JWT" nor "JOSE"`)
	}
	return nil
}

// claims is what the payload of a token says.
type claims struct {
	id       spiffe.ID
	aud      []string
	audOK    bool // "aud" is there, and a string or an array of strings
	exp, nbf date
}

// date is a NumericDate.
type date struct {
	at      time.Time
	present bool
	number  bool
}

// readClaims reads the payload. Of what it says, only the form and "sub" are judged here.
func (c *claims) readClaims(data []byte) *Error {
	var sub []byte
	subOK := false
	r := strictjson.NewReader(data)
	object := r.Kind() == strictjson.Object
	if !object {
		r.Skip()
	}
	for name := range r.Members() {
		switch string(name) {
		case "sub":
			sub, subOK = r.Text()
		case "aud":
			c.readAudience(r)
		case "exp":
			c.exp = readDate(r)
		case "nbf":
			c.nbf = readDate(r)
		}
	}
	switch err := r.End(); {
	case err != nil:
		return refuse(ReasonMalformed, "JWT-26", "the payload is not strict JSON: %w", err)
	case !object:
		return refuse(ReasonMalformed, "JWT-26", "the payload is not a JSON object")
	case !subOK:
		return refuse(ReasonSubject, "JWT-11", `"sub" is missing or not a string`)
	}
	var err error
	if c.id, err = spiffe.ParseID(string(sub)); err != nil {
		return &Error{Reason: ReasonSubject, Rule: "JWT-11", Err: err}
	}
	return nil
}

func (c *claims) readAudience(r *strictjson.Reader) {
	switch r.Kind() {
	case strictjson.String:
		var one []byte
		one, c.audOK = r.Text()
		c.aud = []string{string(one)}
	case strictjson.Array:
		c.audOK = true
		for range r.Elements() {
			one, ok := r.Text()
			c.audOK = c.audOK && ok
			c.aud = append(c.aud, string(one))
		}
	}
}

// audienceFault applies what can be said about "aud" without knowing who we are.
func (c *claims) audienceFault() *Error {
	switch {
	case c.aud == nil && !c.audOK:
		return refuse(ReasonAudience, "JWT-12", `"aud" is missing, or neither a string nor an array of strings`)
	case !c.audOK:
		return refuse(ReasonAudience, "JWT-14", `"aud" has a value that is not a string`)
	case len(c.aud) == 0:
		return refuse(ReasonAudience, "JWT-12", `"aud" has no value`)
	}
	return nil
}

func (c *claims) expiryFault() *Error {
	switch {
	case !c.exp.present:
		return refuse(ReasonExpired, "JWT-18", `"exp" is missing`)
	case !c.exp.number:
		return refuse(ReasonExpired, "JWT-18", `"exp" is not a number`)
	}
	return nil
}

func readDate(r *strictjson.Reader) date {
	d := date{present: true}
	var text []byte
	if text, d.number = r.Number(); d.number {
		d.at = jws.NumericDate(string(text))
	}
	return d
}
