package token

import (
	"encoding/json"

	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
)

// Claims are the claims of an SVID. Only their form and "sub" are checked; the packages check the rest.
type Claims struct {
	jws.Claims
	ID spiffe.ID // "sub"
}

// ReadClaims reads the payload of an SVID.
func (k *Kind) ReadClaims(payload []byte) (Claims, *Error) {
	c, err := jws.ParseClaims(payload, nil)
	if err != nil {
		return Claims{}, k.MalformedPayload(err)
	}
	if !c.HasSubject {
		return Claims{}, k.Refuse("subject", k.Subject, `"sub" is missing or not a string`)
	}
	id, err := spiffe.ParseID(c.Subject)
	if err != nil {
		return Claims{}, &Error{Kind: k, Reason: "subject", Rule: k.Subject, Err: err}
	}
	return Claims{c, id}, nil
}

// ReadObject calls member for each member of a payload. Members that it leaves unread are skipped.
func (k *Kind) ReadObject(payload []byte, member func(name string, r *strictjson.Reader)) *Error {
	if err := strictjson.ReadObject(payload, member); err != nil {
		return k.MalformedPayload(err)
	}
	return nil
}

// MalformedPayload returns the refusal for an error of a payload's reader.
func (k *Kind) MalformedPayload(err error) *Error {
	return k.Refuse(Malformed, k.Form, "the payload is not a strict JSON object: %w", err)
}

// DecodeClaim decodes the claim of a payload, which was already parsed strictly, with exactly this name (RFC 7519
// section 10.1.1) into the value that into points to. It reports whether there is such a claim.
func DecodeClaim(payload []byte, name string, into any) (bool, error) {
	var value []byte
	err := strictjson.ReadObject(payload, func(member string, r *strictjson.Reader) {
		if member == name {
			value = r.Skip()
		}
	})
	if err != nil || value == nil {
		return false, err
	}
	return true, json.Unmarshal(value, into)
}
