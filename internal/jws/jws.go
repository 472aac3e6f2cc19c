// Package jws signs and reads what the tokens of SPIFFE are made of: JSON Web Signatures in compact
// form (RFC 7515), with the nine algorithms that the standards allow (RFC 7518), and public keys as
// JSON Web Keys (RFC 7517). It knows no claims and no rules of its own: packages jwtsvid and witsvid
// say what a header and a payload must hold.
//
// It is strict where readers differ: three parts, each in base64url without padding, line breaks or
// stray bits at the end; a header that is one JSON object without duplicate members; ECDSA signatures
// of fixed width. There is no call that takes the algorithm or the key from a token on the token's
// own word: the caller chooses both and hands them to [Algorithm.Verify].
package jws

import (
	"bytes"
	"crypto"
	"encoding/base64"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/svidkit/svidkit/internal/strictjson"
)

// MaxSize is the longest token in bytes that [Parse] reads. HTTP servers take little more in a header
// field.
const MaxSize = 16 << 10

// Code is the kind of an [Error].
type Code int

const (
	Size      Code = iota + 1 // over MaxSize
	Shape                     // not three parts
	Encoding                  // a part is not strict base64url
	Malformed                 // the header is not JSON, or a member of it has the wrong type
	Forbidden                 // "alg" is missing or none of the nine
	Key                       // the key cannot be used with the algorithm
	Signature                 // the signature is not the key's
)

// Error says why a token is refused. It never carries the token.
type Error struct {
	Code   Code
	Reason string
}

func (e *Error) Error() string { return e.Reason }

// Token is a signature in compact form, taken apart. Nothing of it is verified.
type Token struct {
	Header, Payload, Signature []byte // decoded
	Input                      []byte // what is signed: the first two parts as they were sent
}

// Parse takes a token apart and decodes its parts. The result shares no memory with token. The error
// is an [*Error].
func Parse(token string) (*Token, error) {
	if len(token) > MaxSize {
		return nil, &Error{Size, fmt.Sprintf("longer than %d bytes", MaxSize)}
	}
	data := []byte(token)
	if n := bytes.Count(data, []byte{'.'}); n != 2 {
		return nil, &Error{Shape, fmt.Sprintf("%d parts, not three", n+1)}
	}
	dot, end := bytes.IndexByte(data, '.'), bytes.LastIndexByte(data, '.')
	t := &Token{Input: data[:end:end]}
	decoded := make([]byte, len(data)) // room for the three
	for _, part := range []struct {
		name string
		text []byte
		to   *[]byte
	}{
		{"header", data[:dot], &t.Header},
		{"payload", data[dot+1 : end], &t.Payload},
		{"signature", data[end+1:], &t.Signature},
	} {
		n := base64.RawURLEncoding.DecodedLen(len(part.text))
		*part.to = decoded[:n:n]
		decoded = decoded[n:]
		if !decodeURL(*part.to, part.text) {
			return nil, &Error{Encoding, "the " + part.name + " is not base64url in its only form, without padding and line breaks"}
		}
	}
	return t, nil
}

// Compact signs a header and a payload, which are JSON, and returns the token.
func Compact(header, payload []byte, a Algorithm, key crypto.Signer) (string, error) {
	enc := base64.RawURLEncoding
	token := make([]byte, 0, enc.EncodedLen(len(header))+enc.EncodedLen(len(payload))+2+enc.EncodedLen(a.signatureSize(key)))
	token = append(enc.AppendEncode(token, header), '.')
	token = enc.AppendEncode(token, payload)
	sig, err := a.Sign(key, token)
	if err != nil {
		return "", err
	}
	return string(enc.AppendEncode(append(token, '.'), sig)), nil
}

// Header is what a header says, of which nothing is to be trusted.
type Header struct {
	Algorithm         Algorithm
	KeyID, Type       string // "kid" and "typ"
	HasKeyID, HasType bool
	Extra             []string // the names of all other members, in order
}

// ParseHeader reads a header. A "kid" or "typ" that is not a string is an error, and so is an "alg"
// that is not one of the nine. The error is an [*Error].
func ParseHeader(data []byte) (Header, error) {
	var h Header
	var alg []byte
	fault := ""
	r := strictjson.NewReader(data)
	object := r.Kind() == strictjson.Object
	if !object {
		r.Skip()
	}
	for name := range r.Members() {
		ok := true
		var text []byte
		switch string(name) {
		case "alg":
			alg, ok = r.Text()
		case "kid":
			text, ok = r.Text()
			h.KeyID, h.HasKeyID = string(text), true
		case "typ":
			text, ok = r.Text()
			h.Type, h.HasType = string(text), true
		default:
			h.Extra = append(h.Extra, string(name))
		}
		if !ok && fault == "" {
			fault = fmt.Sprintf("the header member %q is not a string", name)
		}
	}
	switch err := r.End(); {
	case err != nil:
		return Header{}, &Error{Malformed, "the header is not strict JSON: " + err.Error()}
	case !object:
		return Header{}, &Error{Malformed, "the header is not a JSON object"}
	}
	var ok bool
	if h.Algorithm, ok = ParseAlgorithm(string(alg)); !ok {
		return Header{}, &Error{Forbidden, `the header's "alg" is missing or none of ES, RS and PS with 256, 384 and 512`}
	}
	if fault != "" {
		return Header{}, &Error{Malformed, fault}
	}
	return h, nil
}

// AppendHeader appends a header with exactly the members "alg", "kid", if it is not empty, and "typ".
func AppendHeader(b []byte, a Algorithm, keyID, typ string) []byte {
	b = append(b, `{"alg":"`...)
	b = append(b, a.String()...)
	b = append(b, '"')
	if keyID != "" {
		b = strictjson.AppendText(append(b, `,"kid":`...), keyID)
	}
	b = strictjson.AppendText(append(b, `,"typ":`...), typ)
	return append(b, '}')
}

// NumericDate returns the time that a JSON number means: seconds since 1970, possibly with a fraction
// (RFC 7519 section 2). Integers are exact. What lies outside the years 1 to 9999 is moved to their
// ends, beyond which package time has no honest arithmetic.
func NumericDate(number string) time.Time {
	const first, last = -62135596800, 253402300799
	if n, err := strconv.ParseInt(number, 10, 64); err == nil {
		return time.Unix(min(max(n, first), last), 0)
	}
	f, _ := strconv.ParseFloat(number, 64) // infinite if it is out of range
	sec, frac := math.Modf(min(max(f, first), last))
	return time.Unix(int64(sec), int64(frac*1e9))
}
