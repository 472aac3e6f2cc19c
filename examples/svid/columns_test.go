package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// On a terminal no line of any command is wider than that, except one with a word that fits nowhere, and the words are those of
// the output that goes elsewhere.
func TestColumns(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name string, data []byte) string {
		file := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(file, data, 0o600))
		return file
	}
	ca := spiffetest.NewCA(t, "a-trust-domain-with-a-long-name.of-a-department.example.org")
	path := "/ns/a-namespace-with-a-long-name/sa/a-service-account-with-a-long-name"
	web := write("web.pem", pki.MarshalCertificatesPEM(ca.SVID(path).Chain()...))
	longest := write("longest.pem", pki.MarshalCertificatesPEM(ca.SVID("/"+strings.Repeat("x", 1900)).Chain()...))
	roots := write("roots.pem", ca.Bundle().MarshalPEM())
	bundle := write("bundle.json", must.Get(ca.Bundle().Marshal())(t))
	chain, _ := ca.Broken("MissingIntermediate")
	missing := write("missing.pem", pki.MarshalCertificatesPEM(chain...))
	chain, _ = ca.Broken("Expired")
	expired := write("expired.pem", pki.MarshalCertificatesPEM(chain...))
	ca.Rotate()
	other := write("other.pem", ca.Bundle().MarshalPEM())
	empty := write("empty.pem", nil)

	lines := [][]string{
		{}, {"-h"},
		{"inspect", web}, {"inspect", longest}, {"inspect", roots}, {"inspect", bundle}, {"inspect", "-bundle", bundle, web}, {"inspect", expired},
		{"inspect", "testdata/token.jwt"}, {"inspect", "-bundle", "testdata/bundle.json", "testdata/token.wit"}, {"inspect", empty},
		{"verify", "-bundle", bundle, "-allow", "spiffe://a-trust-domain-with-a-long-name.of-a-department.example.org/ns/another-namespace/*", web},
		{"verify", "-bundle", bundle, "-allow", "*", missing}, {"verify", "-bundle", web, "-allow", "*", web}, {"verify", web},
		{"verify", "-bundle", "partner.test=" + roots, "-allow", "*", web}, {"verify", "-bundle", roots, "-allow", "spiffe://Example.org", web},
		{"bundle", "diff", roots, other}, {"bundle", "convert", web}, {"bundle", "convert", "-to", "pem", "testdata/bundle.json"},
		{"bundle", "convert", "-to", "a-form", roots}, {"bundle", "convert", "testdata/map.json"},
		{"doctor", "-socket", "unix://" + filepath.Join(dir, "a-folder-of-an-agent", "api.sock")}, {"doctor"}, {"doctor", "-socket", "unix://" + roots},
		{"doctor", "-socket", "/relative"}, {"doctor", "-timeout", "5"}, {"fetch"}, {"fetch", "-dir", dir, "-mode", "0777"},
		{"fetch", "-dir", dir, "-socket", "unix://" + filepath.Join(dir, "none"), "-timeout", "20ms"}, {"watch", "-dir", dir},
	}
	for _, c := range commands {
		lines = append(lines, append(strings.Fields(c.words), "-h"))
	}
	for _, args := range lines {
		show := func(terminal bool) (string, string) {
			var out, errOut buffer
			a := &app{in: strings.NewReader(""), out: &out, errOut: &errOut, getenv: env{}.get, retry: 20 * time.Millisecond, terminal: terminal, errTerminal: terminal}
			a.run(t.Context(), args)
			return ansi.ReplaceAllString(out.String(), ""), ansi.ReplaceAllString(errOut.String(), "")
		}
		out, errOut := show(true)
		plain, plainErr := show(false)
		if len(args) == 0 || args[0] != "fetch" { // whose wait may end before or after the first answer
			assert.Equal(t, settled(strings.Join(strings.Fields(plain+plainErr), " ")), settled(strings.Join(strings.Fields(out+errOut), " ")), "%v: a word is broken", args)
		}
		for line := range strings.SplitSeq(out+errOut, "\n") {
			if utf8.RuneCountInString(line) > columns {
				widest := 0
				for word := range strings.FieldsSeq(line) {
					widest = max(widest, utf8.RuneCountInString(word))
				}
				indent := len(line) - len(strings.TrimLeft(line, " "))
				assert.Greater(t, widest, columns-4-indent, "%v: %s", args, line)
			}
		}
	}
	assert.Equal(t, "one two\nthree\nextraordinary\nfour", program.Fold("one two three extraordinary four", 7, 6))
	assert.Equal(t, "\nlonger", program.Fold("longer", 3, 6))
	assert.Equal(t, "longest", program.Fold("longest", 3, 6))
}
