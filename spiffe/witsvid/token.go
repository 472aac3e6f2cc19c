package witsvid

import (
	"crypto"
	"errors"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/jws"
	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/spiffe"
)

// MaxSize is the longest token or proof in bytes that this package reads or issues. Most HTTP servers
// take no more in a header field.
const MaxSize = jws.MaxSize

// The media types of RFC 7515's "typ".
const (
	tokenType = "wit+jwt"
	proofType = "wpt+jwt"
)

// Unverified is what a token says about itself. Nobody has looked at its signature or asked its bearer
// for a proof, and anybody can write one: it tells a client what it holds, and it must never decide
// whether somebody may come in. For that see [Validator]. It does not hold the token.
type Unverified struct {
	ID      spiffe.ID // "sub"
	Expires time.Time // "exp"
	KeyID   string    // "kid" in the header
}

// ParseUnverified reads a token without verifying it: neither its signature, nor its time, nor any
// proof is looked at. The form of the header and of the claims is checked as a [Validator] does. The
// error is an [*Error].
func ParseUnverified(token string) (*Unverified, error) {
	p, e := parseToken(token)
	if e != nil {
		return nil, e
	}
	return &Unverified{ID: p.id, Expires: p.exp, KeyID: p.kid}, nil
}

// parsed is a token whose form is right.
type parsed struct {
	alg        jws.Algorithm
	kid        string
	input, sig []byte

	id       spiffe.ID
	exp, nbf time.Time
	hasNBF   bool
	proofAlg jws.Algorithm // "alg" in the "jwk" in "cnf"
	proofKey crypto.PublicKey
}

// parseToken takes the steps that need nothing but the token: the parts, the header, the payload.
func parseToken(token string) (*parsed, *Error) {
	t, h, e := parseJWS(whatToken, token, "WIT-1", "WIT-6")
	if e != nil {
		return nil, e
	}
	switch {
	case h.Type != tokenType:
		return nil, refuse(whatToken, ReasonHeader, "WIT-5", `"typ" is not %q`, tokenType)
	case h.KeyID == "":
		return nil, refuse(whatToken, ReasonHeader, "WIT-2", `"kid" is missing or empty`)
	case critical(h):
		return nil, refuse(whatToken, ReasonHeader, "WIT-9", `"crit" is there, and nothing that it could name is understood`)
	}
	p := &parsed{alg: h.Algorithm, kid: h.KeyID, input: t.Input, sig: t.Signature}
	if e := p.readClaims(t.Payload); e != nil {
		e.ID = p.id
		return nil, e
	}
	return p, nil
}

// parseJWS takes a token or a proof apart and reads its header. The rules are those about the form and
// about the algorithm.
func parseJWS(what, text, formRule, algRule string) (*jws.Token, jws.Header, *Error) {
	t, err := jws.Parse(text)
	var h jws.Header
	if err == nil {
		h, err = jws.ParseHeader(t.Header)
	}
	if err == nil {
		return t, h, nil
	}
	e := refuse(what, ReasonMalformed, formRule, "%w", err)
	if f, ok := errors.AsType[*jws.Error](err); ok && f.Code == jws.Forbidden {
		e.Reason, e.Rule = ReasonAlgorithm, algRule
	}
	return nil, h, e
}

// critical reports whether there is a "crit". We understand no extension that it could name.
func critical(h jws.Header) bool {
	return slices.Contains(h.Extra, "crit")
}

// readClaims reads the payload. "iat", "jti", "iss" and what else there may be mean nothing here
// (WIT-20, WIT-22, WIT-53).
func (p *parsed) readClaims(data []byte) *Error {
	var sub []byte
	var exp, nbf date
	var cnf jws.Confirmation
	subOK, hasAud := false, false
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
			hasAud = true
		case "exp":
			exp = readDate(r)
		case "nbf":
			nbf = readDate(r)
		case "cnf":
			cnf.Read(r)
		}
	}
	switch err := r.End(); {
	case err != nil:
		return refuse(whatToken, ReasonMalformed, "WIT-1", "the payload is not strict JSON: %w", err)
	case !object:
		return refuse(whatToken, ReasonMalformed, "WIT-1", "the payload is not a JSON object")
	case !subOK:
		return refuse(whatToken, ReasonSubject, "WIT-10", `"sub" is missing or not a string`)
	}
	var err error
	if p.id, err = spiffe.ParseID(string(sub)); err != nil {
		return &Error{What: whatToken, Reason: ReasonSubject, Rule: "WIT-10", Err: err}
	}
	switch {
	case hasAud:
		return refuse(whatToken, ReasonClaim, "WIT-25", `there is an "aud", so it is no WIT-SVID`)
	case !exp.number:
		return refuse(whatToken, ReasonClaim, "WIT-16", `"exp" is missing or not a number`)
	case nbf.present && !nbf.number:
		return refuse(whatToken, ReasonClaim, "WIT-18", `"nbf" is not a number`)
	}
	p.exp, p.nbf, p.hasNBF = exp.at, nbf.at, nbf.present
	return p.confirm(&cnf)
}

// confirm takes the workload's key from "cnf".
func (p *parsed) confirm(c *jws.Confirmation) *Error {
	if !c.There {
		return refuse(whatToken, ReasonConfirmation, "WIT-11", `"cnf" is missing or has no "jwk"`)
	}
	var ok bool
	if p.proofAlg, ok = jws.ParseAlgorithm(string(c.Alg)); !ok {
		return refuse(whatToken, ReasonConfirmation, "WIT-12", `the "alg" in "cnf" is missing or none of ES, RS and PS with 256, 384 and 512`)
	}
	if c.Secret {
		return refuse(whatToken, ReasonConfirmation, "WIT-13", `the key in "cnf" is not public: whoever has seen the token has the key`)
	}
	key, reason := c.JWK.PublicKey()
	switch {
	case reason != "":
		return refuse(whatToken, ReasonConfirmation, "WIT-11", `the key in "cnf": %s`, reason)
	case !p.proofAlg.Fits(key):
		return refuse(whatToken, ReasonConfirmation, "WIT-14", `the key in "cnf" is not one for %v`, p.proofAlg)
	}
	p.proofKey = key
	return nil
}

// date is a NumericDate.
type date struct {
	at              time.Time
	present, number bool
}

func readDate(r *strictjson.Reader) date {
	d := date{present: true}
	var text []byte
	if text, d.number = r.Number(); d.number {
		d.at = jws.NumericDate(string(text))
	}
	return d
}
