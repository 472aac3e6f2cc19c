package caconfig

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unicode"

	"github.com/svidkit/svidkit/pki/ca"
)

// maxCommand is the length in bytes at which the command line is cut.
const maxCommand = 1024

// currentActor describes this process. Its command line is the name of the program and its arguments, cut after 1024
// bytes. Two kinds of secrets become "…": the value of each flag with "key", "secret", "token", "pass" or
// "credential" in its name, and the user information before the "@" of a URL.
func currentActor() ca.Actor {
	a := ca.Actor{Command: command(os.Args)}
	if uid := os.Getuid(); uid >= 0 { // Windows has none
		a.UID = strconv.Itoa(uid)
	}
	a.Host, _ = os.Hostname() // empty without a name
	return a
}

// secretFlag returns the name of a flag with its hyphens, if the name suggests that its value is secret.
func secretFlag(arg string) string {
	name, _, _ := strings.Cut(arg, "=")
	if lower := strings.ToLower(name); strings.HasPrefix(name, "-") {
		for _, word := range []string{"key", "secret", "token", "pass", "credential"} {
			if strings.Contains(lower, word) {
				return name
			}
		}
	}
	return ""
}

// hideUsers replaces the user information before the "@" of URLs.
func hideUsers(text string) string {
	const scheme = "://"
	var out strings.Builder
	for {
		before, rest, found := strings.Cut(text, scheme)
		out.WriteString(before)
		if !found {
			return out.String()
		}
		out.WriteString(scheme)
		text = rest
		if end := strings.IndexFunc(rest, func(c rune) bool {
			return c == '/' || c == '@' ||
				unicode.IsSpace(c)
		}); end >= 0 && rest[end] == '@' {
			out.WriteString("…")
			text = rest[end:]
		}
	}
}

func command(args []string) string {
	if len(args) == 0 {
		return ""
	}
	out := []string{filepath.Base(args[0])}
	hide := false // the value of the flag before
	for _, arg := range args[1:] {
		name := secretFlag(arg)
		switch {
		case name != "" && len(name) < len(arg):
			arg, hide = name+"=…", false
		case name != "":
			hide = true
		case hide && !strings.HasPrefix(arg, "-"):
			arg, hide = "…", false
		default:
			arg, hide = hideUsers(arg), false
		}
		out = append(out, arg)
	}
	text := strings.ToValidUTF8(strings.Join(out, " "), "\uFFFD")
	if len(text) > maxCommand {
		text = strings.ToValidUTF8(text[:maxCommand], "") + "…"
	}
	return text
}
