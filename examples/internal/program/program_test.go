package program_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/internal/settings"
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
				_, err := io.WriteString(w, "  SOME_VARIABLE\n        "+strings.Repeat("is a text ", 20)+"\n")
				return err
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
