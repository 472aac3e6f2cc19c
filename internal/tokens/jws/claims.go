package jws

import (
	"time"

	"github.com/svidkit/svidkit/internal/strictjson"
)

// Claims are some claims of a token, unverified. A claim that is missing or has another form is zero.
type Claims struct {
	Expires  time.Time // "exp"
	Audience []string  // "aud"
	Issuer   string    // "iss"
	Subject  string    // "sub"
	Bound    bool      // there is a "cnf"
}

// ReadClaims reads a token that is a JWT in its strict form, and reports false for any other text.
func ReadClaims(token string) (Claims, bool) {
	t, err := Parse(token)
	if err != nil {
		return Claims{}, false
	}
	var c Claims
	r := strictjson.NewReader(t.Payload)
	if r.Kind() != strictjson.Object {
		return Claims{}, false
	}
	for name := range r.Members() {
		switch string(name) {
		case "exp":
			if n, ok := r.Number(); ok {
				c.Expires = NumericDate(string(n))
			}
		case "aud":
			c.Audience = readAudience(r)
		case "iss":
			text, _ := r.Text()
			c.Issuer = string(text)
		case "sub":
			text, _ := r.Text()
			c.Subject = string(text)
		case "cnf":
			c.Bound = true
		}
	}
	if r.End() != nil {
		return Claims{}, false
	}
	return c, true
}

// readAudience reads a text or an array of texts.
func readAudience(r *strictjson.Reader) []string {
	switch r.Kind() {
	case strictjson.String:
		text, _ := r.Text()
		return []string{string(text)}
	case strictjson.Array:
		var all []string
		good := true
		for range r.Elements() {
			text, ok := r.Text()
			good = good && ok
			all = append(all, string(text))
		}
		if good {
			return all
		}
	}
	return nil
}
