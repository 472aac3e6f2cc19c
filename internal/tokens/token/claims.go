package token

import (
	"time"

	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
)

// Date is a NumericDate.
type Date struct {
	At              time.Time // the zero time if it is missing or not a number
	Present, Number bool
}

// ReadDate reads a date.
func ReadDate(r *strictjson.Reader) Date {
	d := Date{Present: true}
	var text []byte
	if text, d.Number = r.Number(); d.Number {
		d.At = jws.NumericDate(string(text))
	}
	return d
}

// Claims are the claims of an SVID. Only their form and "sub" are checked; the packages check the rest.
type Claims struct {
	ID                 spiffe.ID
	Audience           []string // "aud", a string or an array
	HasAudience        bool
	AudienceOK         bool // "aud" is a string or an array of strings
	Expires, NotBefore Date
	Bound              bool             // "cnf" is present
	Confirmation       jws.Confirmation // shares memory with the payload
}

// ReadClaims reads the payload of an SVID.
func (k *Kind) ReadClaims(payload []byte) (Claims, *Error) {
	var c Claims
	var sub []byte
	subOK := false
	e := k.ReadObject(payload, func(name string, r *strictjson.Reader) {
		switch name {
		case "sub":
			sub, subOK = r.Text()
		case "aud":
			c.readAudience(r)
		case "exp":
			c.Expires = ReadDate(r)
		case "nbf":
			c.NotBefore = ReadDate(r)
		case "cnf":
			c.Bound = true
			c.Confirmation.Read(r)
		}
	})
	if e == nil && !subOK {
		e = k.Refuse("subject", k.Subject, `"sub" is missing or not a string`)
	}
	if e != nil {
		return Claims{}, e
	}
	var err error
	if c.ID, err = spiffe.ParseID(string(sub)); err != nil {
		return Claims{}, &Error{Kind: k, Reason: "subject", Rule: k.Subject, Err: err}
	}
	return c, nil
}

// ReadObject calls member for each member of a payload. Members that it leaves unread are skipped.
func (k *Kind) ReadObject(payload []byte, member func(name string, r *strictjson.Reader)) *Error {
	r := strictjson.NewReader(payload)
	object := r.Kind() == strictjson.Object
	if !object {
		r.Skip()
	}
	for name := range r.Members() {
		member(string(name), r)
	}
	switch err := r.End(); {
	case err != nil:
		return k.Refuse(Malformed, k.Form, "the payload is not strict JSON: %w", err)
	case !object:
		return k.Refuse(Malformed, k.Form, "the payload is not a JSON object")
	}
	return nil
}

func (c *Claims) readAudience(r *strictjson.Reader) {
	c.HasAudience = true
	switch r.Kind() {
	case strictjson.String:
		var one []byte
		one, c.AudienceOK = r.Text()
		c.Audience = []string{string(one)}
	case strictjson.Array:
		c.AudienceOK = true
		for range r.Elements() {
			one, ok := r.Text()
			c.AudienceOK = c.AudienceOK && ok
			c.Audience = append(c.Audience, string(one))
		}
	}
}
