package main

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/testkey"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// secrets are inputs with something in them that must not be shown: the longest pieces that are allowed are below 16
// characters.
func secrets(t *testing.T) map[string]struct{ input, secret []byte } {
	t.Helper()
	ca := spiffetest.NewCA(t, "example.org")
	svid := ca.SVID("/web")
	certs, key := must.Get2(svid.MarshalPEM())(t)
	block, _ := pem.Decode(key)
	inBase64 := base64.StdEncoding.EncodeToString(block.Bytes)
	pkcs1 := x509.MarshalPKCS1PrivateKey(testkey.RSA())
	encoded := func(label string, der []byte) []byte {
		return pem.EncodeToMemory(&pem.Block{Type: label, Bytes: der})
	}
	jwk := func(key crypto.PrivateKey, use string) []byte {
		return must.Get(json.Marshal(jose.JSONWebKey{Key: key, KeyID: "a", Use: use}))(t)
	}
	private := jwk(svid.Signer(), "jwt-svid")
	var d struct{ D string }
	require.NoError(t, json.Unmarshal(private, &d))
	token := string(bytes.TrimSpace(readTestdata(t, "token.jwt")))
	head, signature := token[:strings.LastIndex(token, ".")+1], token[strings.LastIndex(token, ".")+1:]
	claim := base64.RawURLEncoding.EncodeToString([]byte(`{"sub":"spiffe://example.org/web","aud":"db","exp":4102444800,"cnf":{"jwk":` + string(private) + `}}`))
	header, _, _ := strings.Cut(head, ".")
	return map[string]struct{ input, secret []byte }{
		"chain and key":         {append(certs, key...), block.Bytes},
		"key and chain":         {append(bytes.Clone(key), certs...), block.Bytes},
		"key alone":             {key, block.Bytes},
		"key with windows ends": {bytes.ReplaceAll(key, []byte("\n"), []byte("\r\n")), block.Bytes},
		"PKCS#1":                {encoded("RSA PRIVATE KEY", pkcs1), pkcs1},
		"encrypted":             {encoded("ENCRYPTED PRIVATE KEY", pkcs1), pkcs1},
		"as a certificate":      {encoded("CERTIFICATE", block.Bytes), block.Bytes},
		"as a label":            {[]byte("-----BEGIN " + inBase64 + "-----\n-----END " + inBase64 + "-----\n"), block.Bytes},
		"damaged":               {key[:len(key)-20], block.Bytes},
		"without a frame":       {[]byte(base64.StdEncoding.EncodeToString(block.Bytes)), block.Bytes},
		"DER":                   {block.Bytes, block.Bytes},
		"PKCS#1 DER":            {pkcs1, pkcs1},
		"DER, cut":              {pkcs1[:600], pkcs1},
		"private JWK":           {private, []byte(d.D)},
		"JWK in a bundle":       {[]byte(`{"keys":[` + string(private) + `]}`), []byte(d.D)},
		"JWK in a map":          {[]byte(`{"trust_domains":{"example.org":{"keys":[` + string(private) + `]}}}`), []byte(d.D)},
		"JWK, damaged":          {[]byte(`{"keys":[` + string(private)), []byte(d.D)},
		"token":                 {[]byte(token), []byte(signature)},
		"token, bad signature":  {[]byte(head + signature[:len(signature)-4] + "AAAA"), []byte(signature[:len(signature)-4])},
		"token, four parts":     {[]byte(token + "." + signature), []byte(signature)},
		"token with a prefix":   {[]byte("Bearer " + token), []byte(signature)},
		"key in a claim":        {[]byte(header + "." + claim + "." + signature), []byte(d.D)},
		"token as JSON":         {[]byte(`{"token":"` + token + `"}`), []byte(signature)},
	}
}

func readTestdata(t testing.TB, name string) []byte {
	t.Helper()
	return must.Get(os.ReadFile(filepath.Join("testdata", name)))(t)
}

// shows reports whether text has a piece of 16 characters of the secret, in a usual encoding.
func shows(text string, secret []byte) bool {
	text += strings.NewReplacer("\r", "", "\n", "", " ", "").Replace(text)
	const piece = 16
	for _, form := range []string{
		string(secret), base64.StdEncoding.EncodeToString(secret), base64.RawURLEncoding.EncodeToString(secret), hexText(secret), strings.ToUpper(hexText(secret)),
	} {
		from, to := 0, len(form)
		if len(secret) > 100 { // the beginning of a key in DER is that of its kind, and its end may be the public key
			from, to = len(form)/5, len(form)/2
		}
		for i := from; i+piece <= to; i++ {
			if strings.Contains(text, form[i:i+piece]) {
				return true
			}
		}
	}
	return false
}

func hexText(b []byte) string {
	const digits = "0123456789abcdef"
	var s strings.Builder
	for _, c := range b {
		s.WriteByte(digits[c>>4])
		s.WriteByte(digits[c&15])
	}
	return s.String()
}

// Nothing that holds a secret shows it, in whatever command and form, on standard output or error.
func TestNoSecrets(t *testing.T) {
	t.Parallel()
	itself := []byte("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP")
	require.True(t, shows("a key: "+base64.StdEncoding.EncodeToString(itself), itself), "the test itself")
	for name, c := range secrets(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if name != "key in a claim" { // where it is encoded twice
				require.True(t, shows(string(c.input), c.secret), "the secret is in the input")
			}
			file := filepath.Join(t.TempDir(), "input")
			require.NoError(t, os.WriteFile(file, c.input, 0o600))
			for _, args := range [][]string{
				{"inspect"}, {"inspect", "-json"}, {"inspect", "-trust-domain", "example.org", "-bundle", file},
				{"verify", "-bundle", file, "-allow", "*"}, {"verify", "-bundle", "testdata/bundle.json", "-allow", "*"},
				{"bundle", "convert", "-trust-domain", "example.org"}, {"bundle", "convert", "-to", "pem"},
				{"bundle", "convert", "-to", "map", "-trust-domain", "example.org"}, {"bundle", "diff", "-trust-domain", "example.org", file},
				{"inspect", "-cert", file, "-key", file, "127.0.0.1:1"},
			} {
				if args[len(args)-1] == "127.0.0.1:1" {
					got := svid(t, args...)
					assert.False(t, shows(got.all(), c.secret), "%v: %s", args, got.all())
					continue
				}
				got := svid(t, append(args, file)...)
				assert.False(t, shows(got.all(), c.secret), "%v: %s", args, got.all())
				got = svidWith(t.Context(), nil, string(c.input), append(args, "-")...)
				assert.False(t, shows(got.all(), c.secret), "%v: %s", args, got.all())
			}
		})
	}
}

// What a certificate says of itself does not move the cursor of a terminal or fill the screen.
func TestTerminal(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	chain, _ := ca.Certificate("/web", func(c *x509.Certificate) {
		c.Subject = pkix.Name{CommonName: "\x1b[2J\x1b]0;owned\a\u009b31m\u202eevil\r\n\tok", Organization: []string{strings.Repeat("long ", 5000)}}
		for i := range 500 {
			c.DNSNames = append(c.DNSNames, fmt.Sprintf("host-%d.test", i))
		}
	})
	var out buffer
	a := &app{in: bytes.NewReader(pki.MarshalCertificatesPEM(chain...)), out: &out, errOut: io.Discard, getenv: env{}.get}
	a.run(t.Context(), []string{"inspect", "-"})
	for _, c := range []string{"\x1b", "\a", "\r", "\t", "\u009b", "\u202e"} {
		assert.NotContains(t, out.String(), c)
	}
	assert.Contains(t, out.String(), "evil")
	assert.Contains(t, out.String(), "481 more")
	assert.Less(t, len(out.String()), 8<<10)
	for line := range strings.Lines(out.String()) {
		assert.NotEqual(t, "ok", strings.TrimSpace(line), "no line of its own")
	}
}

// Colours are for terminals, and for operators that want them.
func TestColor(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		terminal bool
		env      env
		args     []string
		colored  bool
	}{
		{true, nil, nil, true},
		{false, nil, nil, false},
		{true, env{"NO_COLOR": "1"}, nil, false},
		{true, nil, []string{"-no-color"}, false},
		{true, nil, []string{"-json"}, false},
	} {
		var out buffer
		a := &app{in: strings.NewReader(""), out: &out, errOut: io.Discard, getenv: c.env.get, terminal: c.terminal}
		a.run(t.Context(), append(append([]string{"inspect"}, c.args...), "testdata/web.pem"))
		assert.Equal(t, c.colored, strings.Contains(out.String(), "\x1b["), "%+v", c)
	}
}

// Input that is none is refused soon, whatever its size.
func TestGarbage(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, c := range map[string]struct {
		input string
		want  string
	}{
		"empty":           {"", "it is empty"},
		"blank":           {" \n\t", "it is empty"},
		"text":            {"hello", "neither"},
		"zeros":           {strings.Repeat("\x00", 1<<20), "neither"},
		"too large":       {strings.Repeat("x", maxInput+1), "more than 16 MiB"},
		"large PEM":       {strings.Repeat("-----BEGIN CERTIFICATE-----\n", 50_000), "the limit is"},
		"damaged PEM":     {"-----BEGIN CERTIFICATE-----\nAAAA\n", "damaged"},
		"many blocks":     {strings.Repeat("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", 2000), "the limit is 1000"},
		"DER":             {"\x30\x84\xff\xff\xff\xff", "no certificate that can be read"},
		"large DER":       {"0" + strings.Repeat("\x00", 2<<20), "the limit is"},
		"JSON":            {`{"a":1}`, "has neither"},
		"no JSON":         {`{"keys":`, "not a JSON object"},
		"keys":            {`{"keys":1}`, "invalid bundle"},
		"map":             {`{"trust_domains":[]}`, "invalid bundle map"},
		"deep JSON":       {`{"keys":` + strings.Repeat("[", 1<<20), "not a JSON object"},
		"dots":            {strings.Repeat(".", 1<<20), "neither"},
		"certificate CSR": {"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n", "CERTIFICATE REQUEST"},
	} {
		file := filepath.Join(dir, strings.ReplaceAll(name, " ", "-"))
		require.NoError(t, os.WriteFile(file, []byte(c.input), 0o600))
		begin := time.Now()
		got := svid(t, "inspect", file)
		assert.Contains(t, got.all(), c.want, name)
		assert.Less(t, time.Since(begin), 5*time.Second, name)
		assert.Less(t, len(got.all()), 4<<10, name)
		if name != "certificate CSR" {
			assert.Equal(t, 3, got.code, name)
		}
	}
	got := svid(t, "inspect", dir)
	assert.Equal(t, 3, got.code)
	assert.Contains(t, got.errOut, "directory")
	got = svid(t, "inspect", "-json", filepath.Join(dir, "text"))
	assert.True(t, json.Valid([]byte(got.out)), "an error is JSON, too")

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	in, out := io.Pipe() // in which nothing is typed
	defer out.Close()
	var errOut buffer
	a := &app{in: in, out: io.Discard, errOut: &errOut, getenv: env{}.get}
	assert.Equal(t, 3, a.run(ctx, []string{"inspect", "-"}))
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args string
		want string
	}{
		{"", "Usage:"},
		{"bogus", `there is no command "bogus"; there are those below`},
		{"bundle", "Usage:"},
		{"bundle merge a b", `there is no command "bundle merge"; there are those below`},
		{"inspect", "0 arguments"},
		{"inspect a b", "2 arguments"},
		{"inspect testdata/web.pem -json", "flags come first"},
		{"inspect -bogus a", "there is no flag"},
		{"inspect -role peer testdata/web.pem", "not server, client, both or any"},
		{"inspect -allow spiffe://Example.org/* testdata/web.pem", "-allow: "},
		{"inspect -cert testdata/web.pem testdata/web.pem", "belong together"},
		{"inspect -trust-domain / testdata/web.pem", "trust-domain"},
		{"inspect -socket unix://x testdata/web.pem", "write unix:///x"},
		{"inspect -socket unix:///x -bundle testdata/bundle.json testdata/web.pem", "give one"},
		{"inspect -socket unix:///x -cert a -key b testdata/web.pem", "give one"},
		{"verify testdata/web.pem", "needs a -bundle"},
		{"verify -bundle testdata/bundle.json testdata/web.pem", "needs a policy"},
		{"verify -bundle testdata/bundle.json -bundle testdata/roots.pem -allow * testdata/web.pem", "two bundles"},
		{"fetch", "no -dir"},
		{"fetch -dir d", "no -socket"},
		{"fetch -dir d -socket /run/a.sock", "write unix:///run/a.sock"},
		{"fetch -dir d -socket unix:///s -mode 0644", "-mode"},
		{"fetch -dir d -socket unix:///s -mode 0200", "-mode"},
		{"fetch -dir d -socket unix:///s -mode rw", "-mode"},
		{"fetch -dir d -socket unix:///s -jwt db", "AUDIENCE=NAME"},
		{"fetch -dir d -socket unix:///s -jwt db=../x", "not the name of a file"},
		{"fetch -dir d -socket unix:///s -jwt db=..data", "not the name of a file"},
		{"fetch -dir d -socket unix:///s -jwt db=svid.pem", "two files"},
		{"fetch -dir d -socket unix:///s -cert-name bundle-x.pem", "federated"},
		{"fetch -dir d -socket unix:///s -key-name /etc/shadow", "not the name of a file"},
		{"watch -dir d -socket unix:///s -exec-timeout 0s", "not more than 0"},
		{"watch -dir d -socket unix:///s x", "1 arguments"},
		{"bundle convert -to xml testdata/bundle.json", "not spiffe, map or pem"},
		{"bundle convert -to pem testdata/map.json", "pick one"},
		{"bundle diff testdata/map.json", "1 arguments"},
		{"doctor -timeout 0s", "not more than 0"},
		{"doctor now", "1 arguments"},
	} {
		got := svid(t, strings.Fields(c.args)...)
		assert.Equal(t, 2, got.code, "%s: %s", c.args, got.all())
		assert.Contains(t, got.errOut, c.want, c.args)
		assert.Empty(t, got.out, c.args)
	}
	require.Error(t, must.Err(os.Stat("d")), "nothing is made before the command line is understood")
	for _, c := range commands {
		got := svid(t, append(strings.Fields(c.words), "-h")...)
		assert.Equal(t, 0, got.code)
		assert.Contains(t, got.out, "Usage: svid "+c.words)
		assert.Contains(t, got.out, "-json")
		assert.Empty(t, got.errOut)
	}
	assert.Equal(t, 0, svid(t, "-h").code)
	got := svid(t, "-version")
	assert.Equal(t, 0, got.code)
	assert.Regexp(t, `^svid .*, go1\.\d+`, got.out)
}

var ansi = regexp.MustCompile("\x1b\\[[0-9]*m")

// Bundles come back as they were from each form that holds all of them.
func TestConvert(t *testing.T) {
	t.Parallel()
	pemForm := svid(t, "bundle", "convert", "-to", "pem", "testdata/bundle.json")
	assert.Equal(t, string(readTestdata(t, "roots.pem")), pemForm.out)
	assert.Contains(t, pemForm.errOut, "left out: 2 keys for tokens")
	doc := svid(t, "bundle", "convert", "testdata/bundle.json")
	assert.JSONEq(t, string(readTestdata(t, "bundle.json")), doc.out)
	assert.Empty(t, doc.errOut)
	again := svidWith(t.Context(), nil, doc.out, "bundle", "diff", "-", "testdata/bundle.json")
	assert.Equal(t, 0, again.code, again.out)
	one := svid(t, "bundle", "convert", "-trust-domain", "partner.test", "-to", "pem", "testdata/map.json")
	assert.Equal(t, 0, one.code)
	assert.Equal(t, 1, strings.Count(one.out, "BEGIN"))
	got := svidWith(t.Context(), nil, `{"keys":[]}`, "bundle", "convert", "-trust-domain", "example.org", "-to", "pem", "-")
	assert.Equal(t, 3, got.code)
	assert.Contains(t, got.errOut, "no X.509 authority")
	got = svidWith(t.Context(), nil, `{"keys":[]}`, "bundle", "convert", "-")
	assert.Equal(t, 2, got.code)
	assert.Contains(t, got.errOut, "NAME=FILE")
	got = svidWith(t.Context(), nil, `{"keys":[]}`, "inspect", "-")
	assert.Equal(t, 1, got.code, "a bundle without authorities")
}

// Each fault is found by the check and the rule that it breaks, and blamed on the right certificate.
func TestFaults(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	dir := t.TempDir()
	file := func(name string, chain []*x509.Certificate) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, pki.MarshalCertificatesPEM(chain...), 0o644))
		return path
	}
	bundle := file("roots.pem", ca.Bundle().Contents().X509Authorities)
	judge := func(name string, chain []*x509.Certificate, args ...string) check {
		args = append([]string{"verify", "-json", "-bundle", bundle, "-allow", "*"}, append(args, file(name, chain))...)
		got := svid(t, args...)
		require.Equal(t, 1, got.code, "%s: %s", name, got.all())
		var shown struct {
			Verdict result
			Checks  []check
		}
		require.NoError(t, json.Unmarshal([]byte(got.out), &shown))
		assert.Equal(t, refused, shown.Verdict)
		for _, c := range shown.Checks {
			if c.Result == failed {
				return c
			}
		}
		t.Fatalf("%s: no check has failed", name)
		return check{}
	}
	for _, f := range spiffetest.Faults() {
		chain, _ := ca.Broken(f.Name)
		role := "client"
		if f.Name == "ClientOnly" {
			role = "server"
		}
		c := judge(f.Name, chain, "-role", role)
		assert.Equal(t, f.Stage, c.Name, f.Name)
		assert.Equal(t, f.Rule, c.Rule, f.Name)
		if c.Name != "bundle" {
			assert.NotZero(t, c.Certificate, f.Name)
		}
	}
	past := func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = c.NotBefore.Add(-48*time.Hour), time.Now().Add(-time.Hour)
	}
	c := judge("intermediate", ca.Intermediate(past).SVID("/web").Chain())
	assert.Equal(t, 2, c.Certificate)
	assert.Contains(t, c.Detail, "expired")

	stranger := spiffetest.NewCA(t, "example.org")
	c = judge("stranger", stranger.Intermediate().SVID("/web").Chain())
	assert.Equal(t, 2, c.Certificate)
	assert.Contains(t, c.Remedy, short(stranger.Root().SubjectKeyId))
	assert.Contains(t, c.Remedy, short(ca.Root().SubjectKeyId))
	c = judge("long", slices.Repeat(ca.SVID("/web").Chain(), 20))
	assert.Contains(t, c.Detail, "the limit is 16")
}

// A workload's certificate is no trust bundle, and the error says what is.
func TestLeafAsBundle(t *testing.T) {
	t.Parallel()
	got := svid(t, "verify", "-bundle", "testdata/web.pem", "-allow", "*", "testdata/web.pem")
	assert.Equal(t, 3, got.code)
	assert.Contains(t, got.errOut, "testdata/web.pem: certificate 1, of spiffe://example.org/ns/prod/sa/web, is a leaf and not one of a CA: a trust bundle has the CA certificates")
}

func TestDeadPipe(t *testing.T) {
	t.Parallel()
	a := &app{in: strings.NewReader(""), out: deadPipe{}, errOut: io.Discard, getenv: env{}.get}
	assert.Equal(t, 3, a.run(t.Context(), []string{"inspect", "testdata/web.pem"}))
}

type deadPipe struct{}

func (deadPipe) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

// Whatever a file has, it is judged without a panic, in a bounded output.
func FuzzInspect(f *testing.F) {
	for _, name := range []string{"web.pem", "web.der", "bundle.json", "map.json", "token.jwt", "token.wit", "two-uris.pem"} {
		f.Add(readTestdata(f, name))
	}
	f.Add([]byte("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"))
	f.Add([]byte(`{"keys":[{"kty":"EC","use":"jwt-svid"}]}`))
	bundle := readTestdata(f, "bundle.json")
	f.Fuzz(func(t *testing.T, data []byte) {
		in, err := recognise(data)
		if err != nil {
			return
		}
		b := must.Get(recognise(bundle))(t)
		set := must.Get(b.bundles(unnamed))(t)
		for _, j := range []*judgement{{}, {bundles: set, audience: "db"}} {
			shown, checks, err := in.show(j, unnamed)
			if err != nil {
				continue
			}
			for _, asJSON := range []bool{false, true} {
				var out bytes.Buffer
				a := &app{out: &out, json: asJSON}
				require.NoError(t, a.print(append(shown, field{"checks", checks})))
				if asJSON {
					require.True(t, json.Valid(out.Bytes()), "%s", out.Bytes())
				}
			}
		}
	})
}
