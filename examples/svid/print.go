package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"time"
	"unicode"

	"github.com/svidkit/svidkit/examples/internal/program"
)

// record is a command's findings in order: lines for people, and an object in JSON. Fields without a value are left
// out.
type record []field

type field struct {
	name  string // in JSON; for people, spaces replace underscores
	value any    // string, []string, bool, result, time.Time, record, []record or []check
}

// check is one step of a judgement.
type check struct {
	Name        string `json:"check"`
	Result      result `json:"result"`
	Detail      string `json:"detail,omitempty"`
	Certificate int    `json:"certificate,omitempty"` // the one to blame: 1 is the leaf
	Rule        string `json:"rule,omitempty"`        // an id of spiffe/CONFORMANCE.md
	Remedy      string `json:"remedy,omitempty"`
}

type result string

const (
	ok      result = "ok"
	failed  result = "failed"
	skipped result = "skipped"

	accepted result = "accepted" // of all checks
	refused  result = "refused"
)

// verdict returns errNo if a check failed.
func verdict(checks []check) error {
	for _, c := range checks {
		if c.Result == failed {
			return errNo
		}
	}
	return nil
}

// Colours that every terminal has.
const (
	bold   = "1"
	red    = "31"
	green  = "32"
	yellow = "33"
	faint  = "2"
)

var colors = map[result]string{ok: green, failed: red, skipped: yellow, accepted: green, refused: red}

// print writes r to the output.
func (a *app) print(r record) error {
	var b bytes.Buffer
	if a.json {
		e := json.NewEncoder(&b)
		e.SetEscapeHTML(false)
		if !a.stream {
			e.SetIndent("", "  ")
		}
		if err := e.Encode(r); err != nil {
			return err
		}
	} else {
		a.lines(&b, "", r)
	}
	_, err := a.out.Write(b.Bytes())
	return err
}

// MarshalJSON writes an object with its members in the order of r.
func (r record) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	for i, f := range r.filled() {
		b.WriteByte("{,"[min(i, 1)])
		name, err := json.Marshal(f.name)
		if err != nil {
			return nil, err
		}
		value := f.value
		if t, isTime := value.(time.Time); isTime {
			value = stamp(t)
		}
		var text bytes.Buffer
		e := json.NewEncoder(&text)
		e.SetEscapeHTML(false)
		if err := e.Encode(value); err != nil {
			return nil, err
		}
		b.Write(append(append(name, ':'), bytes.TrimSpace(text.Bytes())...))
	}
	if b.Len() == 0 {
		b.WriteByte('{')
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// filled returns the fields with a value.
func (r record) filled() (all record) {
	for _, f := range r {
		switch v := f.value.(type) {
		case string:
			if v == "" {
				continue
			}
		case time.Time:
			if v.IsZero() {
				continue
			}
		case []string:
			if len(v) == 0 {
				continue
			}
		case []record:
			if len(v) == 0 {
				continue
			}
		case []check:
			if len(v) == 0 {
				continue
			}
		case nil:
			continue
		}
		all = append(all, f)
	}
	return all
}

// lines writes r for people.
func (a *app) lines(b *bytes.Buffer, indent string, r record) {
	r = r.filled()
	width := 0
	for _, f := range r {
		switch f.value.(type) {
		case record, []record, []check:
		default:
			width = max(width, len(f.name))
		}
	}
	for _, f := range r {
		name := strings.ReplaceAll(f.name, "_", " ")
		switch v := f.value.(type) {
		case record:
			fmt.Fprintf(b, "%s%s\n", indent, a.paint(bold, name))
			a.lines(b, indent+"  ", v)
		case []record:
			for i, one := range v {
				title := singular(name)
				if len(v) > 1 {
					title = fmt.Sprintf("%s %d of %d", title, i+1, len(v))
				}
				fmt.Fprintf(b, "%s%s\n", indent, a.paint(bold, title))
				a.lines(b, indent+"  ", one)
			}
		case []check:
			longest := 0
			for _, c := range v {
				longest = max(longest, len(c.Name))
			}
			for _, c := range v {
				head := fmt.Sprintf("  %-*s  ", longest, c.Name)
				fmt.Fprintf(b, "%s%s%s%s\n", indent, a.paint(colors[c.Result], fmt.Sprintf("%-7s", c.Result)), head,
					a.flow(indent, 7+len(head), c.text()))
			}
		default:
			fmt.Fprintf(b, "%s%s  %s\n", indent, a.paint(faint, fmt.Sprintf("%-*s", width, name)),
				a.flow(indent, width+2, a.text(v)))
		}
	}
}

const columns = program.Columns

// say writes a line to standard error.
func (a *app) say(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if a.errTerminal {
		text = program.Fold(text, columns, columns)
	}
	fmt.Fprintln(a.errOut, text)
}

// flow breaks text between words if it goes to a terminal. The text begins at column at, after indent.
func (a *app) flow(indent string, at int, text string) string {
	if !a.terminal {
		return text
	}
	const hanging = "    "
	room := columns - len(indent)
	return strings.ReplaceAll(program.Fold(text, room-at, room-len(hanging)), "\n", "\n"+indent+hanging)
}

func singular(name string) string {
	if stem, ok := strings.CutSuffix(name, "ies"); ok {
		return stem + "y"
	}
	return strings.TrimSuffix(name, "s")
}

// documents maps the prefixes of rule ids to the standards.
var documents = map[string]string{"ID": "SPIFFE-ID", "X5": "X509-SVID", "JWT": "JWT-SVID", "WIT": "WIT-SVID",
	"BND": "Trust Domain and Bundle"}

// text returns a check in one line, without its name and result.
func (c check) text() string {
	text := c.Detail
	if c.Certificate > 0 {
		text = fmt.Sprintf("certificate %d: %s", c.Certificate, text)
	}
	if c.Rule != "" {
		prefix, _, _ := strings.Cut(c.Rule, "-")
		text += " [" + strings.TrimSpace(documents[prefix]+" "+c.Rule) + "]"
	}
	if c.Remedy != "" {
		text += "; " + c.Remedy
	}
	return clean(text)
}

// text returns a value in one line.
func (a *app) text(v any) string {
	switch v := v.(type) {
	case []string:
		return clean(strings.Join(v, ", "))
	case result:
		return a.paint(colors[v], string(v))
	case bool:
		if v {
			return "yes"
		}
		return "no"
	case time.Time:
		if left := time.Until(v); left >= 0 {
			return fmt.Sprintf("%s (in %s)", stamp(v), span(left))
		}
		return fmt.Sprintf("%s (%s ago)", stamp(v), span(time.Since(v)))
	}
	return clean(fmt.Sprint(v))
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// span formats a duration for people: in seconds below two days, and in days above.
func span(d time.Duration) string {
	if days := d / (24 * time.Hour); days >= 2 {
		return fmt.Sprintf("%d days", days)
	}
	return d.Round(time.Second).String()
}

// paint colours text.
func (a *app) paint(color, text string) string {
	if !a.terminal || a.plain || a.json {
		return text
	}
	return "\x1b[" + color + "m" + text + "\x1b[0m"
}

// clean makes text safe for a terminal: a peer chooses its certificate's texts, which must not move the cursor.
func clean(text string) string {
	return strings.Map(func(r rune) rune {
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			return '\uFFFD'
		}
		return r
	}, text)
}
