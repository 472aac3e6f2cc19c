package internal_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/internal/settings"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
)

var errBroken = errors.New("broken")

// A part that fails ends the others, and its error is that of all. One that ends well ends nothing, and what comes of the end of the
// context is no failure.
func TestGroup(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := program.NewGroup(t.Context())
		g.Go("", func(context.Context) error { return nil })
		g.Go("listener", func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		})
		synctest.Wait()
		require.NoError(t, g.Context().Err())
		g.Go("store", func(context.Context) error { return errBroken })
		err := g.Wait()
		require.ErrorIs(t, err, errBroken)
		require.EqualError(t, err, "store: broken")
		g.Go("late", func(context.Context) error { return io.EOF })
		require.ErrorIs(t, g.Stop(), errBroken, "the first is told")

		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Minute, cancel)
		require.NoError(t, program.Together(ctx, func(ctx context.Context) error {
			<-ctx.Done()
			return errBroken
		}))
		g = program.NewGroup(t.Context())
		g.Go("", func(ctx context.Context) error { return nil })
		require.NoError(t, g.Stop())
		require.Error(t, g.Context().Err())
	})
}

// What is wrong with flags is a usage error; -h and -version write what is asked for and nothing else.
func TestParse(t *testing.T) {
	t.Parallel()
	parse := func(args ...string) (string, error) {
		flags := flag.NewFlagSet("some", flag.ContinueOnError)
		new(program.Service).Register(flags)
		flags.Int("number", 0, "of it")
		flags.Func("own", "one", func(string) error { return errors.New("parse error") })
		flags.Bool("x", false, "is a letter")
		flags.String("long-name", "a", "of something that takes "+strings.Repeat("many words and ", 20))
		var out bytes.Buffer
		err := program.Parse(flags, args, &out, program.Help{
			Args: "WORD", Doc: "It does something.", Groups: []program.FlagGroup{{Title: "Names", Flags: "long-name for gone"}},
			More: func(w io.Writer) error {
				return must.Err(io.WriteString(w, "  SOME_VARIABLE\n        "+strings.Repeat("is a text ", 20)+"\n"))
			},
		})
		return out.String(), err
	}
	for _, c := range []struct{ want, args string }{
		{"there is no flag -unknown; -h lists the flags", "-unknown"},
		{"there is no flag -name; -h lists the flags", "--name=a"},
		{"there is no flag -numbers; -h lists the flags", "-numbers 1"},
		{"there is no flag -1; -h lists the flags", "-1"},
		{`"surplus" is not understood: there are no words here, and flags begin with a hyphen; -h lists them`, "surplus"},
		{`invalid value "1d" for flag -for: it is not a number with a unit, such as 90m or 24h, which is a day; -h lists the flags`, "-for 1d"},
		{`invalid boolean value "si" for -version: it is neither true nor false; -h lists the flags`, "-version=si"},
		{`invalid value "1e2" for flag -number: it is not a whole number, such as 10; -h lists the flags`, "-number 1e2"},
		{`invalid value "x" for flag -own: parse error; -h lists the flags`, "-own x"},
		{"flag needs an argument: -for; -h lists the flags", "-version -for"},
	} {
		out, err := parse(strings.Fields(c.args)...)
		require.ErrorAs(t, err, new(program.UsageError), c.args)
		require.EqualError(t, err, c.want)
		assert.Empty(t, out, c.args)
	}
	out, err := parse("-number", "7", "-h")
	require.ErrorIs(t, err, flag.ErrHelp)
	programtest.Help(t, out, "")
	assert.Equal(t, `Usage: some [flags] WORD

It does something.

Names:

  -for time
      end after this time, such as 1m (default: when a signal comes, and a demo
      after some minutes)
  -long-name string
      of something that takes many words and many words and many words and many
`, out[:strings.Index(out, "      words")])
	assert.Contains(t, out, `
Flags:

  -number int
      of it
  -own value
      one
  -x  is a letter

The program itself:

  -log-format text
      text or json (default "text")
  -version
      print the version, and end

Environment variables:

  SOME_VARIABLE
        is a text is a text is a text is a text is a text is a text is a text is
        a text is a text is a text is a text is a text is a text is a text is a
`)
	out, err = parse("-version")
	require.ErrorIs(t, err, flag.ErrHelp)
	assert.Regexp(t, `^some \S.*, go\S+\n$`, out)
	must.Get(parse("-for", "1m", "-log-format", "json"))(t)
}

// The flags of a service are refused by their names, and -for ends its context without a deadline.
func TestBegin(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]program.Service{"-log-format": {LogFormat: "xml"}, "-for": {LogFormat: "text", For: -1}} {
		_, _, _, err := s.Begin(t.Context(), io.Discard, slog.LevelInfo)
		require.ErrorAs(t, err, new(program.UsageError))
		require.ErrorContains(t, err, name)
	}
	var said bytes.Buffer
	for given, want := range map[time.Duration]time.Duration{0: time.Minute, time.Hour: time.Hour} {
		s := program.Service{For: given}
		s.Demo(&said, time.Minute)
		assert.Equal(t, want, s.For, "a demo ends by itself")
		assert.Contains(t, said.String(), "ends: in "+want.String())
	}
	synctest.Test(t, func(t *testing.T) {
		var text bytes.Buffer
		s := program.Service{LogFormat: "json", For: time.Minute}
		ctx, log, end, err := s.Begin(t.Context(), &text, slog.LevelWarn)
		require.NoError(t, err)
		defer end()
		log.Info("quiet")
		log.Warn("loud", "wait", 90*time.Second)
		assert.Contains(t, text.String(), `"msg":"loud","wait":"1m30s"`)
		assert.NotContains(t, text.String(), "quiet")
		_, has := ctx.Deadline()
		assert.False(t, has)
		time.Sleep(time.Minute - time.Nanosecond)
		synctest.Wait()
		require.NoError(t, ctx.Err())
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		require.ErrorIs(t, ctx.Err(), context.Canceled)
	})
}

// Every variable that is wrong is told with what to set, one that is empty is not set, and foreign ones are none of ours.
func TestRead(t *testing.T) {
	t.Parallel()
	d := program.Daemon{Name: "some", Variables: []settings.Variable{
		program.Var("SOME_ADDR", "127.0.0.1:0", "address", "this program", program.IsAddr),
		program.Var("SOME_DIR", "/run", "folder", "this program", program.IsAbsolute),
	}}
	s := must.Get(d.Read([]string{"SOME_ADDR=", "OTHER=x", "SOME_DIR=/var=1"}))(t)
	assert.Equal(t, "127.0.0.1:0", s.Text("SOME_ADDR"))
	assert.Equal(t, "/var=1", s.Text("SOME_DIR"))
	require.NoError(t, s.Need("SOME_DIR"))
	_, err := d.Read([]string{"SOME_ADDR=80", "SOME_DIR=var"})
	for _, want := range []string{`SOME_ADDR="80"`, "HOST:PORT", `SOME_DIR="var"`, "begins with a slash"} {
		require.ErrorContains(t, err, want)
	}
	s = must.Get(program.Daemon{Variables: []settings.Variable{program.Var("SOME_DIR", "", "", "", nil)}}.Read(nil))(t)
	require.ErrorContains(t, s.Need("SOME_DIR"), "SOME_DIR")
}

// What a variable may be is decided as an operator expects it.
func TestChecks(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		check     func(string) error
		good, bad []string
	}{
		"IsAddr":          {program.IsAddr, []string{"127.0.0.1:80", ":0", "[::1]:443", "off"}, []string{"", "80", "host:http", "host:65536", "Off"}},
		"IsDNSName":       {program.IsDNSName, []string{"svc.cluster.local", "a"}, []string{"", "A.b", "a..b", "-a", "a-", "a_b"}},
		"IsObject":        {program.IsObject, []string{"athenz/used-documents", "a/b.c"}, []string{"", "a", "/b", "a/", "a/b/c"}},
		"AreNamespaces":   {program.AreNamespaces, []string{"a", "a, b"}, []string{"", "a,", "A"}},
		"AreCommonNames":  {program.AreCommonNames, []string{"k8s.admin.k8s-node", "a, b"}, []string{"", "a,", "A", "a b", "a:b"}},
		"IsHTTPS":         {program.IsHTTPS, []string{"https://zts.test:4443", "https://zts.test/"}, []string{"", "http://zts.test", "https://zts.test/v1", "https://u@zts.test", "https://zts.test?x"}},
		"IsAPI":           {program.IsAPI, []string{"https://kube.test", "http://127.0.0.1:1", "http://[::1]:1"}, []string{"", "http://kube.test", "ftp://127.0.0.1", "http://10.0.0.1"}},
		"OneOf info, off": {program.OneOf("info", "off"), []string{"info", "off"}, []string{"", "INFO"}},
	} {
		for _, s := range c.good {
			require.NoError(t, c.check(s), "%s %q", name, s)
		}
		for _, s := range c.bad {
			require.Error(t, c.check(s), "%s %q", name, s)
		}
	}
}

// TestLocal asks over loopback, by names that lead nowhere else and by others.
func TestLocal(t *testing.T) {
	t.Parallel()
	h := program.Local(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	for host, want := range map[string]int{
		"localhost": 200, "LOCALHOST:15020": 200, "127.0.0.1:15020": 200, "[::1]:15020": 200, "[::1]": 200, "10.0.0.1": 200,
		"rebound.example": 421, "rebound.example:15020": 421, "localhost.evil.test": 421, "": 421, "[rebound.example]": 421,
	} {
		for at, refused := range map[string]bool{"127.0.0.1": true, "10.1.2.3": false} {
			r := httptest.NewRequest(http.MethodGet, "/metrics", nil)
			r.Host = host
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r.WithContext(context.WithValue(t.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.ParseIP(at)})))
			code := 200
			if refused {
				code = want
			}
			assert.Equal(t, code, w.Code, "%q at %s", host, at)
		}
	}
}

const manifest = `# What it is.
#
#   image=registry.example.org/web:1 the image
#   name=? of it
#   more= nothing
kind: Deployment
metadata: {name: ${name}}
image: ${image}
args: [$(POD_NAME), "${more}"]
`

func TestManifest(t *testing.T) {
	t.Parallel()
	printed := func(args ...string) (string, error) {
		flags := flag.NewFlagSet("web", flag.ContinueOnError)
		(&program.Manifest{Text: manifest}).Register(flags)
		var out bytes.Buffer
		err := program.ParseFlags(flags, args, &out, program.Help{})
		return out.String(), err
	}
	out, err := printed("-install", "kubernetes", "-with", "name=web", "-with", "image=other/web@sha256:0a")
	require.ErrorIs(t, err, flag.ErrHelp, "the program ends")
	assert.Equal(t, `# What it is.
#
#   image=other/web@sha256:0a the image
#   name=web of it
#   more= nothing
kind: Deployment
metadata: {name: web}
image: other/web@sha256:0a
args: [$(POD_NAME), ""]
`, out)
	out = must.Get(printed())(t, "the program runs")
	assert.Empty(t, out)

	for _, c := range []struct {
		want string
		args []string
	}{
		{"-with name=VALUE", []string{"-install", "kubernetes"}},
		{`there is no "imgae" here, but image, more, name`, []string{"-install", "kubernetes", "-with", "imgae=x", "-with", "name=x"}},
		{"set it to kubernetes", []string{"-install", "docker"}},
		{"it is for -install kubernetes", []string{"-with", "name=x"}},
		{"want NAME=VALUE", []string{"-install", "kubernetes", "-with", "name"}},
		{"a value of letters", []string{"-install", "kubernetes", "-with", "name=x}\nkind: Secret"}},
		{"a value of letters", []string{"-install", "kubernetes", "-with", "name=x, y: z"}},
	} {
		out, err := printed(c.args...)
		require.ErrorAs(t, err, new(program.UsageError), c.args)
		require.ErrorContains(t, err, c.want)
		assert.Empty(t, out)
	}
}

// The pods of our own are told nothing of the Services of their namespace; those that a manifest adds a container to stay as they are.
func TestServiceLinks(t *testing.T) {
	t.Parallel()
	names := append(must.Get(filepath.Glob("../*/*.yaml"))(t), must.Get(filepath.Glob("../*/*/*.yaml"))(t)...)
	own, added := 0, 0
	for _, name := range names {
		text := must.Get(os.ReadFile(name))(t)
		for object := range strings.SplitSeq(string(text), "\n---\n") {
			switch {
			case !regexp.MustCompile(`(?m)^kind: (Deployment|DaemonSet|StatefulSet)$`).MatchString(object):
			case strings.Contains(object, "\n  selector: "):
				own++
				assert.Contains(t, object, "\n      enableServiceLinks: false\n", name)
			default:
				added++
				assert.NotContains(t, object, "enableServiceLinks: false", name)
				assert.Contains(t, object, "(enableServiceLinks) stays as it is", name)
			}
		}
	}
	assert.Equal(t, 6, own)
	assert.Equal(t, 4, added)
}

// rightsOf returns what testdata/rights.txt says: the rights of which the texts of the tree speak, by the file, and the code that uses each. What
// -install prints has an account for each; what is written to an operator has none. That programs use these and need no others is shown where they
// run: by a guard of package kubetest, and by a real API server in internal/peers.
func rightsOf(t *testing.T) map[string]map[string]string {
	t.Helper()
	rights, name := map[string]map[string]string{}, ""
	for line := range strings.Lines(string(must.Get(os.ReadFile("testdata/rights.txt"))(t))) {
		if right, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "\t"); ok {
			right, why, _ := strings.Cut(right, "\t")
			rights[name][right] = why
		} else if !strings.HasPrefix(line, "#") {
			name = strings.TrimSpace(line)
			rights[name] = map[string]string{}
		}
	}
	return rights
}

// blocks are the parts of a file that may be objects of Kubernetes.
var blocks = map[string]*regexp.Regexp{
	".yaml": regexp.MustCompile(`(?s).+`),
	".md":   regexp.MustCompile("(?s)(?:```yaml\n.*?\n```|(?:^|\n)(?:    .*?(?:\n|$))+)"),
	".go":   regexp.MustCompile("(?:(?m:^//\t.*\n)+|(?s)`[^`]*`)"),
}

// yamlOf returns the objects and rules in a file.
func yamlOf(t *testing.T, name string, data []byte) string {
	t.Helper()
	ext := filepath.Ext(name)
	if ext == ".yaml" && bytes.Contains(data, []byte("${")) {
		m := program.Manifest{Text: regexp.MustCompile(`(?m)^(#   [a-z-]+=)\?`).ReplaceAllString(string(data), "${1}value")}
		var out bytes.Buffer
		require.NoError(t, m.Print(&out), name)
		return out.String()
	}
	var found []string
	for _, block := range blocks[ext].FindAllString(string(data), -1) {
		for text := range strings.SplitSeq(block, "\n---\n") {
			if !strings.Contains(text, "rules:") && !strings.Contains(text, "roleRef:") {
				continue
			}
			text = strings.Trim(strings.TrimPrefix(text, "```yaml"), "`\n")
			text = regexp.MustCompile(`(?m)^(?://\t|    )`).ReplaceAllString(text, "")
			found = append(found, regexp.MustCompile(`%(?:\[\d+\])?s`).ReplaceAllString(text, "VALUE"))
		}
	}
	return strings.Join(found, "\n---\n")
}

// TestRights: each right that a text of the tree gives, or asks an operator for, is in the table with the code that uses it. One that is missing,
// and one that is wider, by a name, a namespace, a verb or an account, is a failure.
func TestRights(t *testing.T) {
	t.Parallel()
	rights, got := rightsOf(t), map[string]map[string]bool{}
	tree := os.DirFS("../..")
	require.NoError(t, fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if base := d.Name(); d.IsDir() && name != "." && (base == "testdata" || base[0] == '.' || base[0] == '_') {
			return fs.SkipDir
		}
		if d.IsDir() || blocks[filepath.Ext(name)] == nil || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		data, err := fs.ReadFile(tree, name)
		if err != nil || !bytes.Contains(data, []byte("apiGroups:")) && !bytes.Contains(data, []byte("roleRef:")) || strings.HasPrefix(name, "internal/") {
			return err
		}
		all := must.Get(kubetest.Rights(yamlOf(t, name, data)))(t, name)
		if len(all) == 0 {
			return nil // a webhook has apiGroups, too
		}
		got[name] = map[string]bool{}
		for who, list := range all {
			for _, r := range list {
				got[name][who+": "+r.String()] = true
			}
		}
		return nil
	}))
	for _, name := range slices.Sorted(maps.Keys(rights)) {
		assert.ElementsMatch(t, slices.Collect(maps.Keys(rights[name])), slices.Collect(maps.Keys(got[name])), name)
		for right, why := range rights[name] {
			assert.NotEmpty(t, why, "%s: %s", name, right)
		}
		delete(got, name)
	}
	assert.Empty(t, got, "files with rights that are not in the table")
}
