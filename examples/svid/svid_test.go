package main

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/scripttest"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/witsvid"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

var update = flag.Bool("update", false, "write the golden files and README.md again, and mint what is missing in testdata")

// asProgram makes this test binary be the program.
const asProgram = "SVIDKIT_EXAMPLE_SVID"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	rounds.Parallel(8)
	fuzzing := slices.ContainsFunc(os.Args, func(arg string) bool { return strings.HasPrefix(arg, "-test.fuzz") })
	if !fuzzing { // which starts no program, and whose workers are killed
		if err := copyProgram(); err != nil {
			panic(err)
		}
	}
	code := m.Run()
	if *update { // now that all golden files are written
		if readme, err := readmeOf("README.md"); err != nil || os.WriteFile("README.md", readme, 0o644) != nil {
			code = 1
		}
	}
	if !fuzzing {
		_ = os.RemoveAll(filepath.Dir(programPath))
	}
	os.Exit(code)
}

// buffer is a bytes.Buffer for several goroutines.
type buffer = logtest.Buffer

// outcome is what a command line has led to.
type outcome struct {
	code        int
	out, errOut string
}

func (o outcome) all() string { return o.out + o.errOut }

// env is an environment.
type env map[string]string

func (e env) get(name string) string { return e[name] }

// svid runs a command line without an environment.
func svid(t testing.TB, args ...string) outcome {
	t.Helper()
	return svidWith(t.Context(), nil, "", args...)
}

func svidWith(ctx context.Context, e env, in string, args ...string) outcome {
	var out, errOut buffer
	a := &app{in: strings.NewReader(in), out: &out, errOut: &errOut, getenv: e.get, retry: 20 * time.Millisecond}
	code := a.run(ctx, args)
	return outcome{code, out.String(), errOut.String()}
}

// materials are the files in testdata, which are minted in a bubble, where it is the year 2000, and never change.
func materials(t *testing.T) map[string][]byte {
	t.Helper()
	files := make(map[string][]byte)
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		web := ca.Intermediate().SVID("/ns/prod/sa/web")
		files["web.pem"] = pki.MarshalCertificatesPEM(web.Chain()...)
		files["web.der"] = append(bytes.Clone(web.Chain()[0].Raw), web.Chain()[1].Raw...)
		for name, fault := range map[string]string{"expired.pem": "Expired", "two-uris.pem": "TwoURIs"} {
			chain, _ := ca.Broken(fault)
			files[name] = pki.MarshalCertificatesPEM(chain...)
		}
		stranger := spiffetest.NewCA(t, "example.org")
		files["stranger.pem"] = pki.MarshalCertificatesPEM(stranger.SVID("/ns/prod/sa/web").Chain()...)

		jwtKey := must.Get(pki.NewKey("ecdsa-p256"))(t)
		jwt := must.Get(jwtsvid.NewIssuer(ca.TrustDomain(), "jwt-1", jwtKey, nil))(t)
		token, err := jwt.Issue(jwtsvid.Request{ID: web.ID(), Audience: []string{"db"}, Lifetime: time.Hour, Claims: map[string]any{"tenant": "blue"}})
		require.NoError(t, err)
		files["token.jwt"] = []byte(token + "\n")
		wit := must.Get(witsvid.NewIssuer(ca.TrustDomain(), "wit-1", jwtKey, nil))(t)
		witToken, _ := must.Get2(wit.IssueWITSVID(t.Context(), web.ID(), ""))(t)
		files["token.wit"] = []byte(witToken)

		write := func(name string, root *spiffetest.CA, edit func(*spiffe.BundleContents)) *spiffe.Bundle {
			c := root.Bundle().Contents()
			edit(&c)
			b := must.Get(spiffe.NewBundle(root.TrustDomain(), c))(t)
			files[name] = must.Get(b.Marshal())(t)
			return b
		}
		keys := func(c *spiffe.BundleContents) {
			c.JWTAuthorities = map[string]crypto.PublicKey{"jwt-1": jwtKey.Public()}
			c.WITAuthorities = map[string]crypto.PublicKey{"wit-1": jwtKey.Public()}
			c.RefreshHint = 5 * time.Minute
		}
		old := write("bundle.json", ca, keys)
		files["roots.pem"] = old.MarshalPEM()
		partner := spiffetest.NewCA(t, "partner.test")
		set := must.Get(spiffe.NewBundleSet(ca.Bundle(), partner.Bundle()))(t)
		files["map.json"] = must.Get(set.Marshal())(t)
		ca.Rotate()
		write("rotated.json", ca, keys)
	})
	return files
}

// golden are the command lines whose output is in testdata/golden, and in README.md. They run in a bubble, where it is
// the year 2000.
var golden = []struct {
	name string
	code int
	args []string
}{
	{"inspect-chain", 0, []string{"inspect", "web.pem"}},
	{"inspect-der", 0, []string{"inspect", "-bundle", "bundle.json", "web.der"}},
	{"inspect-json", 0, []string{"inspect", "-json", "-bundle", "bundle.json", "web.pem"}},
	{"inspect-expired", 1, []string{"inspect", "expired.pem"}},
	{"inspect-bundle", 0, []string{"inspect", "bundle.json"}},
	{"inspect-map", 0, []string{"inspect", "map.json"}},
	{"inspect-roots", 0, []string{"inspect", "roots.pem"}},
	{"inspect-jwt", 0, []string{"inspect", "token.jwt"}},
	{"inspect-wit", 0, []string{"inspect", "-bundle", "bundle.json", "token.wit"}},
	{"verify", 0, []string{"verify", "-bundle", "bundle.json", "-allow", "spiffe://example.org/ns/prod/*", "web.pem"}},
	{"verify-role", 0, []string{"verify", "-bundle", "map.json", "-allow", "*", "-role", "both", "web.pem"}},
	{"verify-policy", 1, []string{"verify", "-bundle", "bundle.json", "-allow", "spiffe://example.org/ns/dev/*", "web.pem"}},
	{"verify-stranger", 1, []string{"verify", "-bundle", "bundle.json", "-allow", "*", "stranger.pem"}},
	{"verify-expired", 1, []string{"verify", "-bundle", "bundle.json", "-allow", "*", "expired.pem"}},
	{"verify-two-uris", 1, []string{"verify", "-bundle", "bundle.json", "-allow", "*", "two-uris.pem"}},
	{"verify-no-bundle", 1, []string{"verify", "-bundle", "partner.test=roots.pem", "-allow", "*", "web.pem"}},
	{"verify-jwt", 0, []string{"verify", "-bundle", "bundle.json", "-allow", "spiffe://example.org/*", "-audience", "db", "token.jwt"}},
	{"verify-jwt-audience", 1, []string{"verify", "-bundle", "bundle.json", "-allow", "*", "-audience", "web", "token.jwt"}},
	{"verify-jwt-key", 1, []string{"verify", "-bundle", "roots.pem", "-allow", "*", "-audience", "db", "token.jwt"}},
	{"verify-wit", 0, []string{"verify", "-bundle", "bundle.json", "-allow", "*", "token.wit"}},
	{"convert-map", 0, []string{"bundle", "convert", "-to", "map", "roots.pem"}},
	{"convert-pem", 0, []string{"bundle", "convert", "-to", "pem", "bundle.json"}},
	{"diff", 1, []string{"bundle", "diff", "bundle.json", "rotated.json"}},
	{"diff-same", 0, []string{"bundle", "diff", "roots.pem", "roots.pem"}},
	{"diff-map", 1, []string{"bundle", "diff", "map.json", "roots.pem"}},
}

func TestGolden(t *testing.T) { // not parallel: it works in testdata
	t.Chdir("testdata")
	if *update {
		for name, data := range materials(t) {
			if _, err := os.Stat(name); err != nil {
				require.NoError(t, os.WriteFile(name, data, 0o644))
			}
		}
	}
	for _, c := range golden {
		t.Run(c.name, func(t *testing.T) {
			var got outcome
			synctest.Test(t, func(t *testing.T) {
				time.Sleep(time.Minute)
				got = svid(t, c.args...)
			})
			assert.Equal(t, c.code, got.code, got.errOut)
			compareGolden(t, "golden", c.name, c.args, got)
		})
	}
}

// compareGolden compares a transcript with the file of the name in dir.
func compareGolden(t *testing.T, dir, name string, args []string, got outcome) {
	t.Helper()
	quoted := make([]string, len(args))
	for i, arg := range args {
		if quoted[i] = arg; strings.ContainsAny(arg, "* ") {
			quoted[i] = "'" + arg + "'"
		}
	}
	text := "$ svid " + strings.Join(quoted, " ") + "\n" + got.out
	if got.errOut != "" {
		text += "standard error: " + got.errOut
	}
	if got.code != 0 {
		text += "exit code " + string(rune('0'+got.code)) + "\n"
	}
	file := filepath.Join(dir, name+".txt")
	if *update {
		require.NoError(t, os.MkdirAll(dir, 0o755))
		require.NoError(t, os.WriteFile(file, []byte(text), 0o644))
	}
	assert.Equal(t, string(must.Get(os.ReadFile(file))(t)), text)
}

// settled replaces what is different each time: times, fingerprints, names of temporary directories and ports.
func settled(text string, names ...string) string {
	for i := 0; i+1 < len(names); i += 2 {
		text = strings.ReplaceAll(text, names[i], names[i+1])
	}
	for _, r := range []struct{ pattern, with string }{
		{`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \(in [^)]*\)`, "2000-01-01T01:00:00Z (in 58m12s)"},
		{`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \([^)]* ago\)`, "2000-01-01T00:00:00Z (1m48s ago)"},
		{`until \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ`, "until 2000-01-01T01:00:00Z"},
		{`\b(\d+h)?(\d+m)?\d+s of`, "58m12s of"},
		{`user \d+`, "user 1000"},
		{`process \d+`, "process 4711"},
		{`127\.0\.0\.1:\d+`, "127.0.0.1:8443"},
	} {
		text = regexp.MustCompile(r.pattern).ReplaceAllString(text, r.with)
	}
	seen := map[string]string{} // different ones stay different
	text = regexp.MustCompile(`\b[0-9a-f]{18,64}\b`).ReplaceAllStringFunc(text, func(hex string) string {
		if seen[hex] == "" {
			length := len(hex)
			if length < 64 {
				length = 20
			}
			seen[hex] = strings.Repeat(fmt.Sprintf("%02x", 0x5f+13*len(seen)), length/2)
		}
		return seen[hex]
	})
	return text
}

var shown = regexp.MustCompile("(?s)<!-- golden: ([a-z-]+) -->\n```[a-z]*\n.*?```\n")

// readmeOf returns the file with the output of the golden files.
func readmeOf(name string) ([]byte, error) {
	readme, err := os.ReadFile(name)
	return shown.ReplaceAllFunc(readme, func(b []byte) []byte {
		name := string(shown.FindSubmatch(b)[1])
		var text []byte
		if err == nil {
			text, err = os.ReadFile(filepath.Join("testdata", "golden", name+".txt"))
		}
		return []byte("<!-- golden: " + name + " -->\n```console\n" + string(text) + "```\n")
	}), err
}

// README.md has the output of the commands as it is in the golden files.
func TestReadme(t *testing.T) {
	t.Parallel()
	if *update {
		t.Skip("it is written at the end")
	}
	readme := must.Get(os.ReadFile("README.md"))(t)
	assert.Equal(t, string(must.Get(readmeOf("README.md"))(t)), string(readme), "write it again with -update")
	for _, c := range commands {
		assert.Contains(t, string(readme), "\n$ svid "+c.words, "each command is shown")
	}
}

var programPath string

// copyProgram copies the program to a directory where every user may run it. It does so before there are tests: a process that
// another test starts while the file is written has it open for a moment, and then it cannot be run ("text file busy").
func copyProgram() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	binary, err := os.ReadFile(self)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "svid")
	if err != nil {
		return err
	}
	programPath = filepath.Join(dir, "svid"+filepath.Ext(self))
	return errors.Join(os.Chmod(dir, 0o755), os.WriteFile(programPath, binary, 0o755))
}

// program returns the program as a process that any user may be.
func started(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), programPath, args...)
	cmd.Env = []string{asProgram + "=1"}
	cmd.Dir = filepath.Dir(programPath)
	return cmd
}

// later makes a certificate valid in ten minutes only.
func later(c *x509.Certificate) { c.NotBefore = time.Now().Add(10 * time.Minute) }

// Of the directories above the socket doctor names the one that this user may not pass: a remedy for another one changes nothing.
func TestDoctorNamesTheClosedFolder(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("there are no modes")
	}
	base := must.Get(os.MkdirTemp("", "doc"))(t)
	folders := []string{base, filepath.Join(base, "run"), filepath.Join(base, "run", "spire"), filepath.Join(base, "run", "spire", "agent")}
	require.NoError(t, os.MkdirAll(folders[3], 0o755))
	open := func() {
		for _, f := range folders {
			require.NoError(t, os.Chmod(f, 0o755))
		}
	}
	t.Cleanup(func() { open(); _ = os.RemoveAll(base) })
	for _, closed := range folders {
		open()
		cmd := started(t, "doctor", "-json", "-socket", "unix://"+filepath.Join(folders[3], "api.sock"))
		mode := os.FileMode(0o700)
		if !unprivileged(cmd) {
			mode = 0o600 // closed for its owner as well
		}
		require.NoError(t, os.Chmod(closed, mode))
		out, err := cmd.Output()
		require.Error(t, err)
		step := steps(t, outcome{out: string(out)})["socket"]
		assert.Equal(t, "let this user pass the directory: chmod o+x "+closed, step.Remedy, "%s", out)
		assert.Contains(t, step.Detail, closed+" has mode 0")
	}
}

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

func TestBundleOIDC(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "www")
	args := []string{"bundle", "oidc", "-issuer", "https://oidc.example.org", "-bundle", "testdata/bundle.json", dir}
	got := svid(t, args...)
	require.Equal(t, 0, got.code, got.errOut)
	settledGolden(t, "oidc", got, append([]string{}, args...), dir, "/srv/oidc", "testdata/", "")
	assert.JSONEq(t, `{"issuer":"https://oidc.example.org","jwks_uri":"https://oidc.example.org/keys","response_types_supported":["id_token"],
		"subject_types_supported":["public"],"id_token_signing_alg_values_supported":["ES256"]}`, read(t, dir, ".well-known", "openid-configuration"))
	assert.Contains(t, read(t, dir, "keys"), `{"use":"sig","alg":"ES256","kid":"jwt-1","kty":"EC"`)
	if runtime.GOOS != "windows" {
		assert.Equal(t, fs.FileMode(0o644), must.Get(os.Stat(filepath.Join(dir, "keys")))(t).Mode(), "public")
	}
	before := must.Get(os.Stat(filepath.Join(dir, "keys")))(t)
	got = svid(t, args...)
	require.Equal(t, 0, got.code, got.errOut)
	assert.True(t, os.SameFile(before, must.Get(os.Stat(filepath.Join(dir, "keys")))(t)), "unchanged")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "keys"), []byte("{"), 0o644))
	got = svid(t, args...)
	require.Equal(t, 0, got.code, got.errOut)
	assert.Contains(t, read(t, dir, "keys"), "jwt-1")
	assert.Len(t, must.Get(os.ReadDir(dir))(t), 2, "nothing else is left")

	for says, c := range map[string]struct {
		code int
		args []string
	}{
		"there is no -issuer":         {2, []string{"-bundle", "testdata/bundle.json", dir}},
		"no URL of an issuer":         {3, []string{"-issuer", "https://oidc.example.org/", "-bundle", "testdata/bundle.json", dir}},
		"the scheme":                  {3, []string{"-issuer", "http://oidc.example.org", "-bundle", "testdata/bundle.json", dir}},
		"has no JWT key":              {3, []string{"-issuer", "https://oidc.example.org", "-bundle", "testdata/roots.pem", dir}},
		"pick one with -trust-domain": {2, []string{"-issuer", "https://oidc.example.org", "-bundle", "testdata/map.json", dir}},
		"arguments":                   {2, []string{"-issuer", "https://oidc.example.org", "-bundle", "testdata/bundle.json"}},
		"not a directory":             {3, []string{"-issuer", "https://oidc.example.org", "-bundle", "testdata/bundle.json", "testdata/bundle.json"}},
	} {
		got := svid(t, append([]string{"bundle", "oidc"}, c.args...)...)
		assert.Equal(t, c.code, got.code, says)
		assert.Contains(t, got.errOut, says)
	}
	assert.Contains(t, read(t, dir, "keys"), "jwt-1", "a failure changes no file")
}

// What an operator asks, slips included: each script in testdata/script is commands, what they print and how they end.
func TestScripts(t *testing.T) {
	t.Parallel()
	scripttest.Run(t, "testdata/script", "svid", "ca")
}
