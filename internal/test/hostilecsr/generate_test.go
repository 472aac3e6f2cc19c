package hostilecsr_test

import (
	"bytes"
	"compress/gzip"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/hostilecsr"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

var update = flag.Bool("update", false, "write testdata/cases.tsv.gz again, with new keys")

// TestGenerated holds the file to the generator: the same names, in the same order, with the same
// verdicts and the same sizes as far as signatures allow. The bytes differ, as each run of the generator
// makes new keys.
func TestGenerated(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	want := generate()
	if *update {
		require.NoError(t, os.WriteFile("testdata/cases.tsv.gz", encode(t, want), 0o644))
		t.Log("written; run the tests again without -update")
		return
	}
	got := hostilecsr.Cases(t)
	require.Len(t, got, len(want))
	for i, w := range want {
		g := got[i]
		require.Equal(t, w.Name, g.Name)
		require.Equal(t, w.Signable, g.Signable, w.Name)
		require.Equal(t, w.DER == nil, g.DER == nil, w.Name)
		require.IsType(t, w.Key, g.Key, w.Name)
		require.InDelta(t, len(w.PEM), len(g.PEM), 64, w.Name)
	}
}

func encode(t *testing.T, cases []hostilecsr.Case) []byte {
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	require.NoError(t, err)
	for _, c := range cases {
		verdict, form, request, key := "refuse", "der", c.DER, []byte(nil)
		if c.Signable {
			verdict = "may"
			key, err = x509.MarshalPKIXPublicKey(c.Key)
			require.NoError(t, err, c.Name)
		}
		if c.DER == nil {
			form, request = "pem", c.PEM
		}
		_, err := fmt.Fprintf(z, "%s\t%s\t%s\t%s\t%s\n", c.Name, verdict, form,
			base64.StdEncoding.EncodeToString(request), base64.StdEncoding.EncodeToString(key))
		require.NoError(t, err)
	}
	require.NoError(t, z.Close())
	return b.Bytes()
}

func generate() []hostilecsr.Case {
	var l list
	l.sans()
	l.extensions()
	l.attributes()
	l.subjects()
	l.keys()
	l.signatures()
	l.forms()
	l.encodings()
	l.pems()
	return l.cases
}

type list struct{ cases []hostilecsr.Case }

// may adds a request that a certificate authority may sign.
func (l *list) may(name string, edit func(r *request)) { l.request(name, true, edit) }

// not adds a request that it must not sign.
func (l *list) not(name string, edit func(r *request)) { l.request(name, false, edit) }

func (l *list) request(name string, signable bool, edit func(r *request)) {
	r := base()
	edit(&r)
	c := hostilecsr.Case{Name: name, DER: r.der(), Signable: signable}
	if signable {
		c.Key = r.key
	}
	c.PEM = block("CERTIFICATE REQUEST", c.DER)
	l.cases = append(l.cases, c)
}

// raw adds bytes that are no request in DER.
func (l *list) raw(name string, der []byte) {
	l.cases = append(l.cases, hostilecsr.Case{Name: name, DER: bytes.Clone(append([]byte{}, der...)), PEM: block("CERTIFICATE REQUEST", der)})
}

// pem adds a text around a good request.
func (l *list) pem(name string, signable bool, text []byte) {
	c := hostilecsr.Case{Name: "pem/" + name, PEM: append([]byte{}, text...), Signable: signable}
	if signable {
		c.Key = p256().Public()
	}
	l.cases = append(l.cases, c)
}

func block(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}
