// Package jws parses JSON Web Signatures in compact form (RFC 7515) and JSON Web Keys (RFC 7517) strictly, with only
// the standard library. It does not verify or sign: package internal/tokens/token does.
//
// It is strict where readers differ: a token has three parts, each in base64url without padding, line breaks or stray
// bits at the end; a header is one JSON object without duplicate members.
package jws

import (
	"fmt"
	"strings"

	"github.com/svidkit/svidkit/internal/strictjson"
)

// MaxSize is the longest token in bytes that [Parse] reads. HTTP servers accept little more in a header field.
const MaxSize = 16 << 10

// Code is the kind of an [Error].
type Code int

const (
	Size      Code = iota + 1 // over MaxSize
	Shape                     // not three parts
	Encoding                  // a part is not strict base64url
	Malformed                 // the header is not one strict JSON object
	Forbidden                 // "alg" is missing or none of the algorithms
)

// Error is the reason for refusing a token. It never contains the token.
type Error struct {
	Code   Code
	Reason string
}

func (e *Error) Error() string { return e.Reason }

// Token holds the decoded parts of a token, and the bytes that its signature covers. It is unverified.
type Token struct {
	Header, Payload, Signature []byte
	Signed                     []byte // the first two parts as they were sent, with the dot between them
}

// Parse splits a token and decodes its parts. The result shares no memory with token. The error is an
// [*Error].
func Parse(token string) (*Token, error) {
	if len(token) > MaxSize {
		return nil, &Error{Size, fmt.Sprintf("longer than %d bytes", MaxSize)}
	}
	if n := strings.Count(token, "."); n != 2 {
		return nil, &Error{Shape, fmt.Sprintf("%d parts, not three", n+1)}
	}
	t := &Token{Signed: []byte(token[:strings.LastIndexByte(token, '.')])}
	parts := []*[]byte{&t.Header, &t.Payload, &t.Signature}
	for i, text := range strings.Split(token, ".") {
		var err error
		if *parts[i], err = strictURL.DecodeString(text); err != nil || strings.ContainsAny(text, "\r\n") {
			return nil, &Error{Encoding, "the " + []string{"header", "payload", "signature"}[i] +
				" is not canonical base64url: no padding, no line breaks, no stray bits"}
		}
	}
	return t, nil
}

// Header has the members of the header of a token, unverified.
type Header struct {
	Algorithm         Algorithm
	KeyID, Type       string // "kid" and "typ"
	HasKeyID, HasType bool
	NotText           string   // "kid" or "typ", if present and not a string
	Extra             []string // the names of all other members, in order
	Issuer            string   // "iss", which is in Extra; empty if it is not a string
}

// ParseHeader reads a header. The error is an [*Error].
func ParseHeader(data []byte) (Header, error) {
	var h Header
	var alg []byte
	err := strictjson.ReadObject(data, func(name string, r *strictjson.Reader) {
		var text []byte
		ok := true
		switch name {
		case "alg":
			alg, _ = r.Text()
		case "kid":
			text, ok = r.Text()
			h.KeyID, h.HasKeyID = string(text), true
		case "typ":
			text, ok = r.Text()
			h.Type, h.HasType = string(text), true
		case "iss":
			text, _ = r.Text()
			h.Issuer = string(text)
			h.Extra = append(h.Extra, name)
		default:
			h.Extra = append(h.Extra, name)
		}
		if !ok && h.NotText != "kid" {
			h.NotText = name
		}
	})
	if err != nil {
		return Header{}, &Error{Malformed, "the header is not a strict JSON object: " + err.Error()}
	}
	var ok bool
	if h.Algorithm, ok = ParseAlgorithm(string(alg)); !ok {
		const reason = `the header's "alg" is missing or none of ES, RS and PS with 256, 384 and 512`
		return Header{}, &Error{Forbidden, reason}
	}
	return h, nil
}
