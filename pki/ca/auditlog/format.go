package auditlog

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"net"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// What comes between a record and the hash of the line before it, and after that.
const (
	prevMember = `,"prev":"`
	lineEnd    = `"}`
)

// appendBody appends the line of i up to prevMember.
func appendBody(b []byte, i *ca.Issuance) ([]byte, error) {
	b = append(b, `{"time":`...)
	b, err := appendTime(b, i.Time)
	if err != nil {
		return nil, err
	}
	b = appendText(b, "kind", i.Kind)
	b = appendText(b, "serial", i.Serial)
	if !i.ID.IsZero() {
		b = appendText(b, "id", i.ID.String())
	}
	b = appendList(b, "dns_names", i.DNSNames)
	if len(i.IPs) > 0 {
		ips := make([]string, len(i.IPs))
		for n, ip := range i.IPs {
			if ip.To16() == nil {
				return nil, errors.New("an IP address has neither 4 nor 16 bytes")
			}
			ips[n] = ip.String()
		}
		b = appendList(b, "ips", ips)
	}
	b = appendList(b, "audience", i.Audience)
	for _, t := range []struct {
		name string
		time time.Time
	}{{"not_before", i.NotBefore}, {"not_after", i.NotAfter}} {
		if t.time.IsZero() {
			continue
		}
		if b, err = appendTime(appendName(b, t.name), t.time); err != nil {
			return nil, err
		}
	}
	b = appendText(b, "issuer", i.Issuer)
	b = appendText(b, "fingerprint", i.Fingerprint)
	b = appendText(b, "public_key", i.PublicKey)
	b = appendText(b, "caller", i.Caller)
	return appendText(b, "method", i.Method), nil
}

func appendName(b []byte, name string) []byte {
	b = append(b, ',', '"')
	b = append(b, name...)
	return append(b, '"', ':')
}

func appendText(b []byte, name, text string) []byte {
	if text == "" {
		return b
	}
	return appendValue(appendName(b, name), text)
}

func appendValue(b []byte, text string) []byte {
	return strictjson.AppendText(b, strings.ToValidUTF8(text, "\uFFFD"))
}

func appendList(b []byte, name string, list []string) []byte {
	if len(list) == 0 {
		return b
	}
	b = append(appendName(b, name), '[')
	for n, text := range list {
		if n > 0 {
			b = append(b, ',')
		}
		b = appendValue(b, text)
	}
	return append(b, ']')
}

func appendTime(b []byte, t time.Time) ([]byte, error) {
	t = t.UTC()
	if y := t.Year(); y < 0 || y > 9999 {
		return nil, errors.New("a time has a year that RFC 3339 cannot write")
	}
	return append(t.AppendFormat(append(b, '"'), time.RFC3339Nano), '"'), nil
}

// parse reads a line. prev is what it says of the line before. Only what appendBody would write is
// a record: one value has one form.
func parse(line []byte) (i ca.Issuance, prev []byte, err error) {
	r := strictjson.NewReader(line)
	for member := range r.Members() {
		switch string(member) {
		case "time":
			i.Time = readTime(r)
		case "kind":
			i.Kind = readText(r)
		case "serial":
			i.Serial = readText(r)
		case "id":
			i.ID, _ = spiffe.ParseID(readText(r))
		case "dns_names":
			i.DNSNames = readList(r)
		case "ips":
			for _, text := range readList(r) {
				i.IPs = append(i.IPs, net.ParseIP(text))
			}
		case "audience":
			i.Audience = readList(r)
		case "not_before":
			i.NotBefore = readTime(r)
		case "not_after":
			i.NotAfter = readTime(r)
		case "issuer":
			i.Issuer = readText(r)
		case "fingerprint":
			i.Fingerprint = readText(r)
		case "public_key":
			i.PublicKey = readText(r)
		case "caller":
			i.Caller = readText(r)
		case "method":
			i.Method = readText(r)
		case "prev":
			prev, _ = r.Text()
		}
	}
	if err := r.End(); err != nil {
		return ca.Issuance{}, nil, err
	}
	again, err := appendBody(make([]byte, 0, len(line)), &i)
	again = append(again, prevMember...)
	again = append(again, prev...)
	again = append(again, lineEnd...)
	if err != nil || !isHash(prev) || !bytes.Equal(again, line) {
		return ca.Issuance{}, nil, errors.New("its members are not those of a record, or not written as this package writes them")
	}
	return i, prev, nil
}

func isHash(text []byte) bool {
	for _, c := range text {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return len(text) == 2*sha256.Size
}

// What the next functions cannot read becomes a zero value, which is then not what stands there.

func readText(r *strictjson.Reader) string {
	text, _ := r.Text()
	return string(text)
}

func readList(r *strictjson.Reader) (list []string) {
	for range r.Elements() {
		list = append(list, readText(r))
	}
	return list
}

func readTime(r *strictjson.Reader) time.Time {
	t, _ := time.Parse(time.RFC3339Nano, readText(r))
	return t
}
