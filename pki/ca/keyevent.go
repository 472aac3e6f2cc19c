package ca

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// KeyEvent is the record of one change of the keys of a CA, or of what they are trusted for. It holds no secret. A
// [KeyAuditor] may keep it: it is not changed later. Its JSON form is a line of package auditlog without the last
// member.
type KeyEvent struct {
	Time time.Time `json:"time"`

	// Event is what has happened: at a start "created", "loaded", or "adopted" for a CA that another program made;
	// "prepared" for a successor that is distributed, "postponed" if that takes longer, "activated", "retired", "renewed"
	// for a new certificate of the same key, "tainted", "revoked"; "replaced" for an active root that another program
	// replaced, or new files of a plugged-in CA, "trusted" for a root from elsewhere; and "recovered" for a
	// record, or the pointer of a store, that was written again.
	Event string `json:"event"`

	Key         string    `json:"key,omitempty"`         // "root" or "jwt"; empty if it is about all of them
	Serial      string    `json:"serial,omitempty"`      // of a root, in hexadecimal; the ID of a JWT key
	NotAfter    time.Time `json:"not_after,omitzero"`    // of a root
	Fingerprint string    `json:"fingerprint,omitempty"` // SHA-256 of a root's certificate (DER), in hexadecimal

	// Successor is the serial number or ID of the key that takes over.
	Successor string `json:"successor,omitempty"`

	Detail string `json:"detail,omitempty"` // for operators, such as why, and where the CA is

	Actor
}

// Actor is the process that has caused a [KeyEvent].
type Actor struct {
	UID     string `json:"uid,omitempty"`     // of the user; empty on Windows
	Host    string `json:"host,omitempty"`    // the name of the machine or pod
	Command string `json:"command,omitempty"` // the command line, without secrets; see CurrentActor
}

// KeyAuditor is an [Auditor] that also makes records of what becomes of the keys.
type KeyAuditor interface {
	Auditor

	// RecordKeyEvent returns nil when e is durable. It should return when ctx is done. An error prevents nothing, as what
	// e tells of has been done, and an emergency must not wait for a disk: the log has all of e, [Authority.Health] the
	// error, and e is recorded again when that may work.
	RecordKeyEvent(ctx context.Context, e *KeyEvent) error
}

// maxCommand is the length in bytes at which Actor.Command is cut.
const maxCommand = 1024

// CurrentActor describes this process. Its command line is the name of the program and its arguments, of which the value
// of each flag that has "key", "secret", "token", "pass" or "credential" in its name is replaced by "…", as is what comes before the "@"
// of a URL. It is cut after 1024 bytes.
func CurrentActor() Actor {
	a := Actor{Command: command(os.Args)}
	if uid := os.Getuid(); uid >= 0 { // there are none on Windows
		a.UID = strconv.Itoa(uid)
	}
	a.Host, _ = os.Hostname() // without a name it is left out
	return a
}

// secretFlag returns the name of a flag, with its hyphens, if that says that its value is a secret.
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

// hideUsers replaces what comes before the "@" of URLs.
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
		if end := strings.IndexFunc(rest, func(c rune) bool { return c == '/' || c == '@' || unicode.IsSpace(c) }); end >= 0 && rest[end] == '@' {
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
