package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/scripttest"
)

// The operator's day: each script in testdata/script is commands, what they print and how they end; and each slip, and
// what the program says helps.
func TestScripts(t *testing.T) {
	t.Parallel()
	scripttest.Run(t, "testdata/script", "ca", "svid", "agent")
}

// Each section of ROTATE.md is run as a script, after the commands of the section Look, with times of seconds in the place of hours.
func TestRotatePage(t *testing.T) {
	t.Parallel()
	page := must.Get(os.ReadFile("../ROTATE.md"))(t)
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
