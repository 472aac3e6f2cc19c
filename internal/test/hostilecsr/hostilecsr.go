// Package hostilecsr has certificate signing requests that a careful server refuses, or signs without
// the part that is wrong. They are vectors for the tests of every package that reads requests.
//
// Each request is good except for one thing, which its name describes. The good request has a P-256
// key, is signed with it, has no common name, and asks for one alternative name, the DNS name [Name].
//
// The vectors are in testdata/cases.tsv.gz, one on each line:
//
//	NAME	may|refuse	der|pem	REQUEST	KEY
//
// "may" sets [Case.Signable], REQUEST is the request in DER or PEM, KEY the public key in PKIX form or
// empty; both are in base64. A new vector is a new line:
//
//	(zcat cases.tsv.gz; cat new.tsv) | gzip -9n > cases.new && mv cases.new cases.tsv.gz
package hostilecsr

import (
	"bytes"
	"compress/gzip"
	"crypto"
	"crypto/x509"
	_ "embed"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/svidkit/svidkit/internal/test/rounds"
)

// Name is the DNS name that every request asks for, unless its name says otherwise.
const Name = "web.emojivoto.serviceaccount.identity.linkerd.cluster.local"

// Case is one request.
type Case struct {
	Name string // unique: a group, a slash, and what is wrong

	// DER is the request; nil if what is wrong is in the PEM.
	DER []byte

	// PEM is the request in PEM; never nil.
	PEM []byte

	// Signable says that the form is DER, the key strong and the signature good. A certificate authority
	// may then certify Key for names that it knows from elsewhere, without anything else that the request
	// asks for, or may refuse. It must refuse what is not signable.
	Signable bool

	// Key is the only key that a certificate may be for; nil if the request is not signable.
	Key crypto.PublicKey
}

//go:embed testdata/cases.tsv.gz
var file []byte

// Cases returns all cases in the order of the file. The slice is the caller's; what it refers to is
// shared and must not be changed.
func Cases(t testing.TB) []Case {
	t.Helper()
	cases, err := load()
	if err != nil {
		t.Fatalf("hostilecsr: testdata/cases.tsv.gz: %v", err)
	}
	return slices.Clone(cases)
}

// Some returns each fourth of the cases by default, and all with SVIDKIT_ROUNDS=4. Package pki, which reads them, has all.
func Some(t testing.TB) []Case {
	t.Helper()
	i, step := -1, max(1, 4/rounds.Of(1))
	return slices.DeleteFunc(Cases(t), func(Case) bool { i++; return i%step != 0 })
}

var load = sync.OnceValues(func() ([]Case, error) {
	z, err := gzip.NewReader(bytes.NewReader(file))
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(z)
	if err != nil {
		return nil, err
	}
	var cases []Case
	for line := range strings.Lines(string(text)) {
		c, err := parse(strings.Split(strings.TrimSuffix(line, "\n"), "\t"))
		if err != nil {
			return nil, fmt.Errorf("case %d: %w", len(cases)+1, err)
		}
		cases = append(cases, c)
	}
	return cases, nil
})

func parse(f []string) (Case, error) {
	if len(f) != 5 || f[1] != "may" && f[1] != "refuse" || f[2] != "der" && f[2] != "pem" {
		return Case{}, fmt.Errorf("not a case: %.100q", f)
	}
	c := Case{Name: f[0], Signable: f[1] == "may"}
	request, err := base64.StdEncoding.DecodeString(f[3])
	if err != nil {
		return c, err
	}
	if f[2] == "pem" {
		c.PEM = request
	} else {
		c.DER, c.PEM = request, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: request})
	}
	if c.Signable {
		der, err := base64.StdEncoding.DecodeString(f[4])
		if err != nil {
			return c, err
		}
		if c.Key, err = x509.ParsePKIXPublicKey(der); err != nil {
			return c, err
		}
	}
	return c, nil
}
