package auditlog

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/pki/ca"
)

// record is a line; see the package comment.
type record struct {
	*ca.Issuance
	Prev string `json:"prev"`
}

// The end of each line: what comes before and after the hash of the line before it.
const (
	prevMember = `,"prev":"`
	lineEnd    = `"}`
	endLen     = len(prevMember) + 2*sha256.Size + len(lineEnd)
)

type digest = [sha256.Size]byte

// encode returns the line of i without its newline, after a line of zeros: see link.
func encode(i *ca.Issuance) ([]byte, error) {
	c := *i
	c.Time, c.NotBefore, c.NotAfter = i.Time.UTC(), i.NotBefore.UTC(), i.NotAfter.UTC()
	c.DNSNames, c.Audience = slices.Clone(i.DNSNames), slices.Clone(i.Audience)
	texts := []*string{&c.Kind, &c.Serial, &c.Issuer, &c.Fingerprint, &c.PublicKey, &c.Caller, &c.Method}
	for _, list := range [][]string{c.DNSNames, c.Audience} {
		for n := range list {
			texts = append(texts, &list[n])
		}
	}
	for _, s := range texts {
		*s = strings.ToValidUTF8(*s, "\uFFFD")
	}
	for _, ip := range c.IPs {
		if ip.To16() == nil {
			return nil, errors.New("an IP address has neither 4 nor 16 bytes")
		}
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(record{&c, strings.Repeat("0", 2*sha256.Size)}); err != nil {
		return nil, err
	}
	line := bytes.TrimSuffix(b.Bytes(), []byte{'\n'})
	if len(line) > maxLine {
		return nil, fmt.Errorf("it would be a line of more than %d bytes", maxLine)
	}
	return line, nil
}

// link makes line, which encode returned, follow one with the hash prev, and returns its own hash.
func link(line []byte, prev digest) digest {
	hex.Encode(line[len(line)-len(lineEnd)-2*sha256.Size:], prev[:])
	return sha256.Sum256(line)
}

// parse reads a line. prev is what it says of the line before. Only what encode would write is a record:
// one value has one form.
func parse(line []byte) (i ca.Issuance, prev digest, err error) {
	r := record{Issuance: &i}
	if err := json.Unmarshal(line, &r); err != nil {
		return ca.Issuance{}, prev, err
	}
	again, err := encode(&i)
	if n, _ := hex.Decode(prev[:], []byte(r.Prev[:min(len(r.Prev), 2*sha256.Size)])); err == nil && n == sha256.Size {
		link(again, prev)
	}
	if err != nil || !bytes.Equal(again, line) {
		return ca.Issuance{}, prev, errors.New("its members are not those of a record, or not written as this package writes them")
	}
	return i, prev, nil
}

// finished reports whether line has the end that each record has and no part of one: inside of a
// string its quotes would have backslashes.
func finished(line []byte) bool {
	if len(line) < endLen {
		return false
	}
	end := line[len(line)-endLen:]
	return bytes.HasPrefix(end, []byte(prevMember)) && bytes.HasSuffix(end, []byte(lineEnd))
}
