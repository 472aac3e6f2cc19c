package auditlog

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// record is a line; see the package comment.
type record struct {
	Time        time.Time `json:"time"`
	Kind        string    `json:"kind,omitempty"`
	Serial      string    `json:"serial,omitempty"`
	ID          string    `json:"id,omitempty"`
	DNSNames    []string  `json:"dns_names,omitempty"`
	IPs         []string  `json:"ips,omitempty"`
	Audience    []string  `json:"audience,omitempty"`
	NotBefore   time.Time `json:"not_before,omitzero"`
	NotAfter    time.Time `json:"not_after,omitzero"`
	Issuer      string    `json:"issuer,omitempty"`
	Fingerprint string    `json:"fingerprint,omitempty"`
	PublicKey   string    `json:"public_key,omitempty"`
	Caller      string    `json:"caller,omitempty"`
	Method      string    `json:"method,omitempty"`
	Prev        string    `json:"prev"`
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
	text := func(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
	list := func(all []string) (out []string) {
		for _, s := range all {
			out = append(out, text(s))
		}
		return out
	}
	r := record{
		Time: i.Time.UTC(), Kind: text(i.Kind), Serial: text(i.Serial), DNSNames: list(i.DNSNames), Audience: list(i.Audience),
		NotBefore: i.NotBefore.UTC(), NotAfter: i.NotAfter.UTC(), Issuer: text(i.Issuer), Fingerprint: text(i.Fingerprint),
		PublicKey: text(i.PublicKey), Caller: text(i.Caller), Method: text(i.Method), Prev: strings.Repeat("0", 2*sha256.Size),
	}
	if !i.ID.IsZero() {
		r.ID = i.ID.String()
	}
	for _, ip := range i.IPs {
		if ip.To16() == nil {
			return nil, errors.New("an IP address has neither 4 nor 16 bytes")
		}
		r.IPs = append(r.IPs, ip.String())
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(r); err != nil {
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
	var r record
	if err := json.Unmarshal(line, &r); err != nil {
		return i, prev, err
	}
	i = ca.Issuance{
		Time: r.Time, Kind: r.Kind, Serial: r.Serial, DNSNames: r.DNSNames, Audience: r.Audience, NotBefore: r.NotBefore, NotAfter: r.NotAfter,
		Issuer: r.Issuer, Fingerprint: r.Fingerprint, PublicKey: r.PublicKey, Caller: r.Caller, Method: r.Method,
	}
	i.ID, _ = spiffe.ParseID(r.ID) // what cannot be read is then not what stands there
	for _, text := range r.IPs {
		i.IPs = append(i.IPs, net.ParseIP(text))
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
