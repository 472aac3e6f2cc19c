package jws

import (
	"math"
	"strconv"
	"time"

	"github.com/svidkit/svidkit/internal/strictjson"
)

// Claims are the claims of a token that this library reads, unverified.
type Claims struct {
	Subject, Issuer    string   // "sub" and "iss"; empty if they are not strings
	HasSubject         bool     // "sub" is a string
	Audience           []string // "aud", a string or an array
	HasAudience        bool
	AudienceOK         bool // "aud" is a string or an array of strings
	AudienceList       bool // "aud" is an array
	Expires, NotBefore Date
	IssuedAt           Date
	Bound              bool         // "cnf" is present
	Confirmation       Confirmation // shares memory with the payload
	Mistyped           string       // one of the claims above, except "cnf", whose type is not that of RFC 7519
}

// ReadClaims reads a token that is a JWT in its strict form, and reports false for any other text. An "aud" of another
// form counts as absent.
func ReadClaims(token string) (Claims, bool) {
	t, err := Parse(token)
	if err != nil {
		return Claims{}, false
	}
	c, err := ParseClaims(t.Payload, nil)
	if !c.AudienceOK {
		c.Audience = nil
	}
	return c, err == nil
}

// ParseClaims reads the payload of a token. It calls other, unless that is nil, for all other claims. The error is a
// [*strictjson.Error].
func ParseClaims(payload []byte, other func(name string, r *strictjson.Reader)) (Claims, error) {
	var c Claims
	err := strictjson.ReadObject(payload, func(name string, r *strictjson.Reader) {
		var text []byte
		ok := true
		switch name {
		case "sub":
			text, ok = r.Text()
			c.Subject, c.HasSubject = string(text), ok
		case "iss":
			text, ok = r.Text()
			c.Issuer = string(text)
		case "aud":
			c.readAudience(r)
			ok = c.AudienceOK
		case "exp":
			c.Expires = ReadDate(r)
			ok = c.Expires.Number
		case "nbf":
			c.NotBefore = ReadDate(r)
			ok = c.NotBefore.Number
		case "iat":
			c.IssuedAt = ReadDate(r)
			ok = c.IssuedAt.Number
		case "cnf":
			c.Bound = true
			c.Confirmation.Read(r)
		default:
			if other != nil {
				other(name, r)
			}
		}
		if !ok {
			c.Mistyped = name
		}
	})
	if err != nil {
		return Claims{}, err
	}
	return c, nil
}

func (c *Claims) readAudience(r *strictjson.Reader) {
	c.AudienceList = r.Kind() == strictjson.Array
	c.HasAudience, c.AudienceOK = true, c.AudienceList
	if text, ok := r.Text(); ok {
		c.Audience, c.AudienceOK = []string{string(text)}, true
		return // no list may follow
	}
	for range r.Elements() {
		text, ok := r.Text()
		c.AudienceOK = c.AudienceOK && ok
		c.Audience = append(c.Audience, string(text))
	}
}

// Date is a NumericDate (RFC 7519 section 2).
type Date struct {
	At              time.Time // the zero time if it is missing or not a number
	Present, Number bool
}

// ReadDate reads a date.
func ReadDate(r *strictjson.Reader) Date {
	text, ok := r.Number()
	if !ok {
		return Date{Present: true}
	}
	return Date{NumericDate(string(text)), true, true}
}

// NumericDate returns the time for a JSON number: seconds since 1970, possibly with a fraction (RFC 7519 section 2).
// Integers are exact. A time before the year 1 or after the year 9999 becomes the first or last second of that range,
// because package time cannot compute beyond it. The time is in UTC.
func NumericDate(number string) time.Time {
	const first, last = -62135596800, 253402300799
	if n, err := strconv.ParseInt(number, 10, 64); err == nil {
		return time.Unix(min(max(n, first), last), 0).UTC()
	}
	f, _ := strconv.ParseFloat(number, 64) // infinite if it is out of range
	sec, frac := math.Modf(min(max(f, first), last))
	return time.Unix(int64(sec), int64(frac*1e9)).UTC()
}
