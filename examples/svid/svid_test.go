package main

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
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

		jwtKey := must.Get(pki.NewKey(pki.ECDSAP256))(t)
		jwt := must.Get(jwtsvid.NewIssuer(ca.TrustDomain(), "jwt-1", jwtKey, nil))(t)
		token, err := jwt.Issue(jwtsvid.Request{ID: web.ID(), Audience: []string{"db"}, Lifetime: time.Hour, Claims: map[string]any{"tenant": "blue"}})
		require.NoError(t, err)
		files["token.jwt"] = []byte(token + "\n")
		wit := must.Get(witsvid.NewIssuer(ca.TrustDomain(), jwtKey, nil))(t)
		witToken, _ := must.Get2(wit.IssueWITSVID(t.Context(), web.ID(), ""))(t)
		files["token.wit"] = []byte(witToken)

		write := func(name string, root *spiffetest.CA, edit func(*spiffe.BundleContents)) *spiffe.Bundle {
			c := root.Bundle().Contents()
			edit(&c)
			b := must.Get(spiffe.NewBundle(root.TrustDomain(), c))(t)
			files[name] = must.Get(b.Marshal())(t)
			return b
		}
		witID, witKey := wit.Authority()
		keys := func(c *spiffe.BundleContents) {
			c.JWTAuthorities = map[string]crypto.PublicKey{"jwt-1": jwtKey.Public()}
			c.WITAuthorities = map[string]crypto.PublicKey{witID: witKey}
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

// settled replaces what is different each time: times, fingerprints, names of temporary folders and ports.
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
	want := must.Get(readmeOf("README.md"))(t)
	assert.Equal(t, string(want), string(readme), "write it again with -update")
	for _, c := range commands {
		assert.Contains(t, string(readme), "\n$ svid "+c.words, "each command is shown")
	}
}

var programPath string

// copyProgram copies the program to a folder where every user may run it. It does so before there are tests: a process that
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
