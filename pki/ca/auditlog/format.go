package auditlog

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/svidkit/svidkit/pki/ca"
)

// Entry is a line of an audit log: one of the two is set.
type Entry struct {
	Issuance *ca.Issuance // of a certificate or token
	KeyEvent *ca.KeyEvent // of a change of the keys
}

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
	var value any
	if e.KeyEvent != nil {
		c := *e.KeyEvent
		c.Time, c.NotAfter = c.Time.UTC(), c.NotAfter.UTC()
		value = c
	} else {
		c := *e.Issuance
		c.Time, c.NotBefore, c.NotAfter = c.Time.UTC(), c.NotBefore.UTC(), c.NotAfter.UTC()
		value = c
	}
	var b bytes.Buffer
	j := json.NewEncoder(&b)
	j.SetEscapeHTML(false)
	if err := j.Encode(value); err != nil {
		return nil, err
	}
	line := append(bytes.TrimSuffix(b.Bytes(), []byte("}\n")), prevMember+noDigest+lineEnd...)
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

// finished reports whether line has the end that each record has and no part of one: inside of a
// string its quotes would have backslashes.
func finished(line []byte) bool {
	end := line[max(0, len(line)-endLen):]
	return len(end) == endLen && bytes.HasPrefix(end, []byte(prevMember)) && bytes.HasSuffix(end, []byte(lineEnd))
}

// parse reads a finished line. prev is what it says of the line before.
func parse(line []byte) (e Entry, prev digest, err error) {
	body, end := line[:len(line)-endLen], line[len(line)-endLen:]
	hash := end[len(prevMember) : endLen-len(lineEnd)]
	if _, err := hex.Decode(prev[:], hash); err != nil || hex.EncodeToString(prev[:]) != string(hash) {
		return e, prev, errors.New("its last member is no hash")
	}
	j := json.NewDecoder(bytes.NewReader(append(bytes.Clone(body), '}')))
	j.DisallowUnknownFields()
	first, rest, _ := bytes.Cut(body, []byte{','})
	if bytes.HasPrefix(rest, []byte(`"event":`)) {
		e.KeyEvent = new(ca.KeyEvent)
		err = j.Decode(e.KeyEvent)
	} else {
		e.Issuance = new(ca.Issuance)
		err = j.Decode(e.Issuance)
	}
	if err == nil && (!bytes.HasPrefix(first, []byte(`{"time":`)) || j.InputOffset() <= int64(len(body))) {
		err = errors.New("it is not one object that begins with a time")
	}
	if err != nil {
		return Entry{}, prev, err
	}
	return e, prev, nil
}
