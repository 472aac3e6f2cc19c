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

// Entry is a line of an audit log: one of the two is set.
type Entry struct {
	Issuance *ca.Issuance // of a certificate or token
	KeyEvent *ca.KeyEvent // of a change of the keys, or of the log itself
}

// The lines; see the package comment.
type (
	issuanceLine struct {
		*ca.Issuance
		Prev string `json:"prev"`
	}
	keyEventLine struct {
		*ca.KeyEvent
		Prev string `json:"prev"`
	}
)

// The end of each line: what comes before and after the hash of the line before it.
const (
	prevMember = `,"prev":"`
	lineEnd    = `"}`
	endLen     = len(prevMember) + 2*sha256.Size + len(lineEnd)
)

type digest = [sha256.Size]byte

var noDigest = strings.Repeat("0", 2*sha256.Size)

// encode returns the line of e without its newline, after a line of zeros: see link.
func encode(e Entry) ([]byte, error) {
	if e.KeyEvent != nil {
		c := *e.KeyEvent
		c.Time, c.NotAfter = c.Time.UTC(), c.NotAfter.UTC()
		valid(&c.Event, &c.Key, &c.Serial, &c.Fingerprint, &c.Successor, &c.Detail, &c.UID, &c.Host, &c.Command)
		return marshal(keyEventLine{&c, noDigest})
	}
	c := *e.Issuance
	c.Time, c.NotBefore, c.NotAfter = c.Time.UTC(), c.NotBefore.UTC(), c.NotAfter.UTC()
	c.DNSNames, c.Audience = slices.Clone(c.DNSNames), slices.Clone(c.Audience)
	valid(&c.Kind, &c.Serial, &c.Issuer, &c.Fingerprint, &c.PublicKey, &c.Caller, &c.Method,
		&c.Cluster, &c.Namespace, &c.ServiceAccount, &c.Pod.Name, &c.UID, &c.Node)
	for _, list := range [][]string{c.DNSNames, c.Audience} {
		for n := range list {
			valid(&list[n])
		}
	}
	for _, ip := range c.IPs {
		if ip.To16() == nil {
			return nil, errors.New("an IP address has neither 4 nor 16 bytes")
		}
	}
	return marshal(issuanceLine{&c, noDigest})
}

// valid replaces what is not UTF-8.
func valid(texts ...*string) {
	for _, s := range texts {
		*s = strings.ToValidUTF8(*s, "\uFFFD")
	}
}

func marshal(line any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(line); err != nil {
		return nil, err
	}
	text := bytes.TrimSuffix(b.Bytes(), []byte{'\n'})
	if len(text) > maxLine {
		return nil, fmt.Errorf("it would be a line of more than %d bytes", maxLine)
	}
	return text, nil
}

// link makes line, which encode returned, follow one with the hash prev, and returns its own hash.
func link(line []byte, prev digest) digest {
	hex.Encode(line[len(line)-len(lineEnd)-2*sha256.Size:], prev[:])
	return sha256.Sum256(line)
}

// parse reads a line. prev is what it says of the line before. Only what encode would write is a record:
// one value has one form.
func parse(line []byte) (e Entry, prev digest, err error) {
	var said string
	if isEvent(line) {
		e.KeyEvent = new(ca.KeyEvent)
		r := keyEventLine{KeyEvent: e.KeyEvent}
		err, said = json.Unmarshal(line, &r), r.Prev
	} else {
		e.Issuance = new(ca.Issuance)
		r := issuanceLine{Issuance: e.Issuance}
		err, said = json.Unmarshal(line, &r), r.Prev
	}
	if err != nil {
		return Entry{}, prev, err
	}
	again, err := encode(e)
	if n, _ := hex.Decode(prev[:], []byte(said[:min(len(said), 2*sha256.Size)])); err == nil && n == sha256.Size {
		link(again, prev)
	}
	if err != nil || !bytes.Equal(again, line) {
		return Entry{}, prev, errors.New("its members are not those of a record, or not written as this package writes them")
	}
	return e, prev, nil
}

// isEvent reports whether the second member of a line is that of a key event: the first is a time, without a comma.
func isEvent(line []byte) bool {
	_, rest, _ := bytes.Cut(line, []byte{','})
	return bytes.HasPrefix(rest, []byte(`"event":`))
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
