package caprogram

import (
	"bufio"
	"bytes"
	"encoding/pem"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/scripttest"
	"github.com/svidkit/svidkit/internal/test/watchtest"
	"github.com/svidkit/svidkit/pki/ca"
)

// asProgram makes this test binary be the program, so that it can be started from a shell.
const asProgram = "SVIDKIT_EXAMPLE_CA"

// alone is the program examples/ca.
var alone = Program{Name: "ca"}

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		Main(alone)
		return
	}
	rounds.Parallel(8)
	m.Run()
}

// program returns the program as a process.
func command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), must.Get(os.Executable())(t), args...)
	cmd.Env = []string{asProgram + "=1", "GOCOVERDIR=" + t.TempDir()} // a program with coverage warns without it
	return cmd
}

// From a shell: the exit code says how it went, what was asked for comes to standard output, and
// everything else to standard error.
func TestShell(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	dir := t.TempDir()
	zeros := strings.Repeat("0", 64)
	half := filepath.Join(dir, "half")
	require.NoError(t, os.Mkdir(half, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(half, "ca-cert.pem"), nil, 0o600))
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	csrPEM := func(der []byte) string {
		return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
	}
	changed := `{"time":"2026-01-02T03:04:05Z","serial":"1","prev":"` + zeros + `"}` + "\n" + `{"time":"2026-01-02T03:04:06Z","serial":"2","prev":"` + zeros + `"}` + "\n"
	for _, tc := range []struct {
		in   string
		args []string
		code int
		out  string // begins so
		err  string // contains that
	}{
		{newCSR(t), arguments(dir, "-once", "-", "-id", "spiffe://cluster.local/web"), 0, "-----BEGIN CERTIFICATE-----", ""},
		{"", arguments(dir, "-status"), 0, "CA of cluster.local", ""},
		{"", arguments(dir, "-verify-audit", filepath.Join(dir, "audit.jsonl")), 0, "3 records, from 20", ""},
		{"{\n", arguments(dir, "-verify-audit", "-"), 1, "auditlog: line 1: not an audit record: it is unfinished", "ca: -verify-audit: there is no record"},
		{"", arguments(dir, "-verify-audit", filepath.Join(dir, "none.jsonl")), 1, "", "ca: -verify-audit: open "},
		{changed, arguments(dir, "-verify-audit", "-"), 1, "auditlog: line 2: the line before", "ca: -verify-audit: lines were changed or taken out (places: 1)"},
		{"", arguments(dir, "-once", "none.pem", "-id", "spiffe://cluster.local/web"), 1, "", "ca: -once: open none.pem"},
		{"", []string{"-status", "-rotate"}, 2, "", "ca: -status and -rotate: only one command at a time"},
		{"", []string{"-install", "tls"}, 2, "", "is none of kubernetes.io/tls"},
		{"", []string{"-version"}, 0, "ca ", ""},
		{"", []string{"-version", "-ttl=none"}, 0, "ca ", ""},
		{"", []string{"-help"}, 0, "Usage: ca [flags]", ""},
		{"", []string{"-h"}, 0, "Usage: ca [flags]", ""},
		{"", []string{"-nonsense"}, 2, "", "ca: there is no flag -nonsense; -help lists the flags"},
		{"", []string{"-max-ttl", "90d"}, 2, "", `ca: invalid value "90d" for flag -max-ttl: it is not a number with a unit, such as 90m or 24h, which is a day; -help lists the flags`},
		{"", []string{"-issuer-ttl", "1y"}, 2, "", `ca: invalid value "1y" for flag -issuer-ttl: it is not a number with a unit, such as 90m or 24h, which is a day; -help lists the flags`},
		{"", []string{"-istio-addr", "localhost"}, 2, "", "ca: -istio-addr: it is not HOST:PORT, such as localhost:15012 or :15012; -help lists the flags"},
		{"", arguments(filepath.Join(dir, "none"), "-create=false"), 1, "", "ca: there is no CA in " + filepath.Join(dir, "none", "ca") + "; if there was one, name its directory in -state-dir, mount its volume or restore it"},
		{"", arguments(filepath.Join(dir, "none"), "-status"), 1, "", "ca: there is no CA in "},
		{"", arguments(dir, "-taint", "5"), 1, "", `ca: taint a key of cluster.local: no such key: "5"; -status lists the serial numbers and key IDs`},
		{"", arguments(dir, "-revoke", "5"), 1, "", `no such key: "5"; -status lists`},
		{"", arguments(dir, "-caller-rate", "abc"), 2, "", `ca: invalid value "abc" for flag -caller-rate: it is not a number, such as 10 or 0.5; -help lists the flags`},
		{"", arguments(dir, "-istio-addr", "0.0.0.0:0"), 2, "", "ca: -istio-addr: not on loopback"},
		{"", arguments(dir, "-root-ca-dir", half, "-replace-own-ca", "-status"), 1, "", "ca: -root-ca-dir: in " + half + ": load the CA of cluster.local: pki: key-cert bundle: the directory has some files of a CA"},
		{"", arguments(dir, "-root-ca-dir", half, "-status"), 1, "", "set -replace-own-ca"},
		{"", arguments(dir, "-root-ca-dir", "", "-kubernetes", "-status"), 1, "", "-kubernetes-api names one"},
		{csrPEM([]byte{0x30, 0x30, 0x30, 0x30}), arguments(dir, "-once", "-", "-id", "spiffe://cluster.local/web"), 1, "", "ca: -once: pki: invalid certificate signing request: "},
		{"", arguments(dir, "-linkerd-addr", l.Addr().String()), 1, "", "ca: Linkerd's API: listen tcp " + l.Addr().String() + ": bind: address already in use; -linkerd-addr names another address, or none"},
	} {
		var out, errOut bytes.Buffer
		cmd := command(t, tc.args...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(tc.in), &out, &errOut
		_ = cmd.Run()
		assert.Equal(t, tc.code, cmd.ProcessState.ExitCode(), "%v: %s", tc.args, errOut.String())
		assert.True(t, strings.HasPrefix(out.String(), tc.out), "%v: %s", tc.args, out.String())
		assert.Equal(t, tc.out == "", out.Len() == 0)
		assert.Contains(t, errOut.String(), tc.err)
		assert.Equal(t, tc.err == "", errOut.Len() == 0, errOut.String())
		if tc.code != 0 {
			assert.Equal(t, 1, strings.Count(errOut.String(), "\n"), errOut.String())
			assert.NotContains(t, errOut.String(), "ca: ca:")
			assert.NotContains(t, errOut.String(), "asn1")
		}
	}
	cmd := command(t)
	cmd.Env = append(cmd.Env, "TRUST_DOMAIN=Example.org")
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), `TRUST_DOMAIN="Example.org"`)
	require.Equal(t, 2, cmd.ProcessState.ExitCode())
	cmd = command(t, "-version")
	cmd.Env = append(cmd.Env, "TRUST_DOMAIN=Example.org")
	out = must.Get(cmd.Output())(t)
	require.Regexp(t, `^ca .*, go1\.\d+`, string(out))
}

// SIGTERM ends the server in order: its exit code is 0.
func TestSignal(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" || signal.Ignored(syscall.SIGTERM) {
		t.Skip("there are no such signals")
	}
	dir := t.TempDir()
	cmd := command(t, arguments(dir)...)
	var log bytes.Buffer
	cmd.Stderr = &log
	out := must.Get(cmd.StdoutPipe())(t)
	require.NoError(t, cmd.Start())
	var text strings.Builder
	for lines := bufio.NewScanner(out); lines.Scan(); {
		text.WriteString(lines.Text() + "\n")
		if strings.Contains(lines.Text(), "/ready") {
			require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		}
	}
	require.NoError(t, cmd.Wait(), log.String())
	require.Contains(t, text.String(), "DEVELOPMENT ONLY")
	require.FileExists(t, filepath.Join(dir, "root-cert.pem"))
	require.Contains(t, log.String(), `level=INFO msg="CA created"`)
	require.Contains(t, log.String(), `level=INFO msg="caserver: the server ends" reason="terminated signal received"`)
	require.NotContains(t, log.String(), "level=ERROR")
	require.NotContains(t, log.String(), "PRIVATE KEY")
}

// Flags of the commands that are wrong, or do not go together.
func TestBadFlags(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ args, want string }{
		{"-once csr.pem", "-id"},
		{"-jwt audience", "-id"},
		{"-jwt audience -id web", "-id"},
		{"-ttl 1h", "-ttl"}, // which is not the lifetime of a server
		{"-jwt audience -id spiffe://a/b -ttl -1h", "-ttl"},
		{"-id spiffe://a/b", "-id"},
		{"-status -rotate", "at a time"},
		{"-demo -taint 5", "at a time"},
		{"-demo -trust-domain my_domain -linkerd-addr=", "-linkerd-addr"},
		{"-state-dir= -status", "-state-dir"},
		{"-state-dir= -jwt audience -id spiffe://cluster.local/x", "-state-dir"},
		{"-istio-addr :15012", "-istio-addr"},
	} {
		require.ErrorContains(t, must.Err(shell(t, "", strings.Fields(tc.args)...)), tc.want, tc.args)
	}
	var out strings.Builder
	require.ErrorIs(t, alone.run(t.Context(), []string{"-help"}, env{}.get, nil, &out, nil), flag.ErrHelp)
	programtest.Help(t, out.String(), "")
	assert.NotContains(t, out.String(), "\nFlags:\n", "each is in a group")
	for _, flag := range []string{"-once", "-rotate", "-kubernetes", "-root-ca-dir"} {
		assert.Contains(t, out.String(), "  "+flag)
	}
}

// A command needs nothing that only a server needs: neither -kubernetes in a pod nor names for Linkerd.
func TestCommandsAreNotServers(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	in := env{"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
	err := alone.run(t.Context(), arguments(dir, "-trust-domain", "my_domain", "-istio-addr", ":15012", "-status"), in.get, nil, io.Discard, io.Discard)
	require.ErrorIs(t, err, ca.ErrNoRecord, "there is none, which it found by looking")
}

// TestDashboard: each metric, label and value in it is one that a CA writes.
func TestDashboard(t *testing.T) {
	t.Parallel()
	watchtest.Dashboard(t, "../dashboard.json", watchtest.Labels(watchtest.WrittenByCA(t)))
}

// The operator's day: each script in testdata/script is commands, what they print and how they end; and each slip, and
// what the program says helps.
func TestScripts(t *testing.T) {
	t.Parallel()
	scripttest.Run(t, "testdata/script", "ca", "svid", "agent")
}

// Each section of ROTATE.md is run as a script, after the commands of the section Look, with times of seconds in the place of hours.
func TestRotatePage(t *testing.T) {
	t.Parallel()
	page := must.Get(os.ReadFile("../../ROTATE.md"))(t)
	dir := t.TempDir()
	const begin = "flags ca -propagation 2s -default-ttl 4s -max-ttl 6s -backdate 1s -refresh-hint 1s -linkerd-addr=\n" +
		"serve ca\nca -once csr.pem -id spiffe://cluster.local/web -ttl 6s\ncp stdout leaf.pem\n"
	look, commands := "", 0
	for _, section := range strings.Split(string(page), "\n## ")[1:] {
		name, text, _ := strings.Cut(section, "\n")
		script, n := pageScript(text, name != "Look")
		commands += n
		if name == "Look" {
			look = script
			continue
		}
		text = begin + look + script + "-- csr.pem --\n" + newCSR(t)
		require.NoError(t, os.WriteFile(filepath.Join(dir, strings.ToLower(name)+".txtar"), []byte(text), 0o600))
	}
	require.Greater(t, commands, 20)
	scripttest.Run(t, dir, "ca", "svid")
}

var (
	pageWord = regexp.MustCompile(`\b(DIR|SERIAL|NEW|NEXT|KEY|TIME)\b|…`)
	repeated = regexp.MustCompile(`^(ca -status|svid verify )`) // until time has done its part
)

// pageScript returns the code of a page as a script: a line is a command, and those below it, which are further to the right, are
// in what it prints, one after the other. looked is for a section whose reader knows SERIAL and KEY. It returns how many commands there are.
func pageScript(text string, looked bool) (script string, commands int) {
	known := map[string]bool{"DIR": true, "SERIAL": looked, "KEY": looked}
	var command string
	var printed []string
	flush := func() {
		defer func() { command, printed = "", nil }()
		var pattern strings.Builder
		var found []string
		for i, line := range printed {
			if i > 0 {
				pattern.WriteString(`\n`)
			}
			at := 0
			for _, m := range pageWord.FindAllStringIndex(line, -1) {
				pattern.WriteString(quoted(line[at:m[0]]))
				switch word := line[m[0]:m[1]]; {
				case word == "…":
					pattern.WriteString(".*")
				case word == "TIME":
					pattern.WriteString("20[0-9T:-]+Z")
				case slices.Contains(found, word): // set after the command
					pattern.WriteString("[0-9a-f]+")
				case known[word]:
					pattern.WriteString("'$" + word + "'")
				default:
					pattern.WriteString("(?P<" + word + ">[0-9a-f]+)")
					found = append(found, word)
				}
				at = m[1]
			}
			pattern.WriteString(quoted(line[at:]))
		}
		want := "'" + pattern.String() + "'"
		line := pageWord.ReplaceAllString(command, "$$$1")
		switch {
		case command == "":
			return
		case command == "^C":
			line = "quit server"
		case command == "ca":
			line = "serve ca"
		case len(printed) > 0 && strings.HasPrefix(printed[0], "ca: "):
			line = "exits 1 " + line + "\nstderr " + want
		case repeated.MatchString(command) && len(printed) > 0:
			line = "until " + want + " " + line
		case len(printed) > 0:
			line += "\nstdout " + want
		case !strings.HasPrefix(command, "ca ") && !strings.HasPrefix(command, "svid "):
			line = "exec " + line
		}
		script += line + "\n"
		for _, name := range found {
			known[name] = true
			script += fmt.Sprintf("set %s %s\n", name, want)
		}
		commands++
	}
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if out, ok := strings.CutPrefix(line, "      "); ok {
			printed = append(printed, strings.TrimSpace(out))
			continue
		}
		flush()
		command, _ = strings.CutPrefix(line, "    ")
		if command == line {
			command = ""
		}
	}
	flush()
	return script, commands
}

// quoted is text as a part of a pattern in single quotes.
func quoted(text string) string { return strings.ReplaceAll(regexp.QuoteMeta(text), "'", "''") }
