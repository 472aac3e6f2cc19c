// Package settings reads the configuration of a program from environment variables that are listed in one table. The
// table is also their documentation.
//
//	var table = settings.Table{
//		Prefixes: []string{"SECRET_"},
//		Variables: []settings.Variable{
//			{Name: "SECRET_TTL", Form: settings.Duration, Default: "24h", Doc: "lifetime of certificates"},
//		},
//	}
//	values, err := table.Read(os.Environ()) // err has a line for each bad value
//	ttl := values.Duration("SECRET_TTL")
//
// A variable set to the empty text counts as not set, and so does a [ServiceLink].
package settings

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Form is the syntax of a value.
type Form int

// The forms of values.
const (
	Text     Form = iota
	Path          // of a file or directory
	Duration      // for time.ParseDuration, not negative
	Integer       // decimal, not negative
	Ratio         // a decimal number from 0 to 1
	Bool          // for strconv.ParseBool
	List          // texts separated by commas, without surrounding spaces
)

var forms = [...]struct{ name, remedy string }{
	Text:     {name: "text"},
	Path:     {"path", "set it to the path of a file or directory"},
	Duration: {"duration", "set it to a duration that is not negative, such as 24h, 90m or 100ms"},
	Integer:  {"integer", "set it to a whole number that is not negative, such as 2048"},
	Ratio:    {"ratio", "set it to a number from 0 to 1, such as 0.5"},
	Bool:     {"bool", "set it to true or false"},
	List:     {name: "list"},
}

// String returns the name of the form in the documentation.
func (f Form) String() string { return forms[f].name }

// parse returns the value of a text in this form. An empty text has the zero value.
func (f Form) parse(text string) (any, error) {
	switch f {
	case Path:
		if strings.ContainsRune(text, 0) {
			return nil, strconv.ErrSyntax
		}
		return text, nil
	case Duration:
		d, err := time.ParseDuration(cmp.Or(text, "0"))
		if d < 0 {
			err = strconv.ErrRange
		}
		return d, err
	case Integer:
		n, err := strconv.ParseUint(cmp.Or(text, "0"), 10, 31)
		return int(n), err
	case Ratio:
		r, err := strconv.ParseFloat(cmp.Or(text, "0"), 64)
		if !(r >= 0 && r <= 1) {
			err = strconv.ErrRange
		}
		return r, err
	case Bool:
		return strconv.ParseBool(cmp.Or(text, "false"))
	case List:
		var list []string
		for item := range strings.SplitSeq(text, ",") {
			if item = strings.TrimSpace(item); item != "" {
				list = append(list, item)
			}
		}
		return list, nil
	default:
		return text, nil
	}
}

// Variable is one row of a [Table].
type Variable struct {
	// Name is the variable's name. A name that ends with "*" stands for all longer names with that prefix.
	Name string

	Form Form

	// Default is the value if the variable is not set, in the same form. Empty means the zero value.
	Default string

	// Choices, if any, are the only values that a Text may have.
	Choices []string

	// Check refuses a value of the right form: its error says why, and what to set instead, without a Secret's value.
	// It is not called for the default. Nil accepts all values.
	Check func(value string) error

	// Secret keeps the value out of errors.
	Secret bool

	// Unused says that the program accepts the variable and ignores it; Doc says why.
	Unused bool

	// Doc is one line that says what the variable is for. Origin is where its name comes from.
	Doc, Origin string
}

// Table lists the variables of a program. Each name occurs once.
type Table struct {
	Variables []Variable

	// Prefixes are the prefixes of names that only this program uses. [Values.Unknown] reports names that begin with
	// a prefix and are not in the table, and names that are [Near] a name in the table.
	Prefixes []string
}

// Values are the values of the variables of a [Table]. Its methods panic for a name that is not in the table, or that
// has another form. Values may hold secrets; it never prints them.
type Values struct {
	table   Table
	set     map[string]string
	unknown []string
}

// Read reads the variables of the table from an environment, in the form of os.Environ. The error joins an error for
// each bad value, in the order of the table; then Read returns no values.
func (t Table) Read(environ []string) (*Values, error) {
	v := &Values{table: t, set: make(map[string]string)}
	var known []string
	for _, row := range t.Variables {
		known = append(known, row.Name)
	}
	for _, line := range environ {
		name, value, _ := strings.Cut(line, "=")
		if value == "" || ServiceLink(line) {
			continue
		}
		row := t.find(name)
		if row != nil {
			v.set[name] = value
		}
		if right, near := Near(name, known); near {
			v.unknown = append(v.unknown, name+" (perhaps "+right+")")
		} else if row == nil && slices.ContainsFunc(t.Prefixes, func(p string) bool {
			return strings.HasPrefix(name,
				p)
		}) {
			v.unknown = append(v.unknown, name)
		}
	}
	slices.Sort(v.unknown)
	v.unknown = slices.Compact(v.unknown)
	var bad []error
	for _, row := range t.Variables {
		for _, name := range v.names(row.Name) {
			if err := row.check(v.set[name]); err != nil {
				bad = append(bad, v.Reject(name, err))
			}
		}
	}
	if bad != nil {
		return nil, errors.Join(bad...)
	}
	return v, nil
}

// links matches lines of service links. Kubernetes sets the lines of the API server's Service even without them.
var links = regexp.MustCompile(`^\w+(_SERVICE_HOST|_SERVICE_PORT(_\w+)?)=` +
	`|^\w+_PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?=` + `|^\w+_PORT=(tcp|udp|sctp)://`)

// ServiceLink reports whether Kubernetes set a line of the environment for a Service in the pod's namespace, other
// than the Service kubernetes. Such a line configures nothing: for the Service envoy-status it is
// ENVOY_STATUS_PORT=tcp://10.0.0.1:80.
func ServiceLink(line string) bool {
	return links.MatchString(line) && !strings.HasPrefix(line, "KUBERNETES_")
}

// Near returns the known name that name probably misspells: the letters and digits of both are equal, except for one
// missing or extra character, or two swapped neighbours. Case, underscores and hyphens do not count. Known names of
// fewer than six letters, or with "*" at the end, are never returned.
func Near(name string, known []string) (right string, ok bool) {
	i := slices.IndexFunc(known, func(k string) bool {
		got, want := letters(name), letters(k)
		if len(want) < 6 || strings.HasSuffix(k, "*") {
			return false
		}
		for got != "" && want != "" && got[0] == want[0] {
			got, want = got[1:], want[1:]
		}
		for got != "" && want != "" && got[len(got)-1] == want[len(want)-1] {
			got, want = got[:len(got)-1], want[:len(want)-1]
		}
		return len(got)+len(want) < 2 || len(got) == 2 && len(want) == 2 && got[0] == want[1] && got[1] == want[0]
	})
	if i < 0 || slices.Contains(known, name) {
		return "", false
	}
	return known[i], true
}

// letters returns the letters and digits of a name, in upper case.
func letters(name string) string {
	return strings.ToUpper(strings.NewReplacer("_", "", "-", "").Replace(name))
}

// find returns the row of a name, or nil. An exact row precedes a row with a prefix.
func (t Table) find(name string) (found *Variable) {
	for i := range t.Variables {
		row := &t.Variables[i]
		if prefix, ok := strings.CutSuffix(row.Name, "*"); row.Name == name {
			return row
		} else if ok && len(name) > len(prefix) && strings.HasPrefix(name, prefix) {
			found = row
		}
	}
	return found
}

// names returns the names that are set and belong to a row, sorted.
func (v *Values) names(row string) (names []string) {
	for name := range v.set {
		if v.table.find(name).Name == row {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// check returns an error for a bad value.
func (row *Variable) check(value string) error {
	if row.Unused {
		return nil
	}
	if _, err := row.Form.parse(value); err != nil {
		return errors.New(forms[row.Form].remedy)
	}
	if row.Choices != nil && !slices.Contains(row.Choices, value) {
		return fmt.Errorf("set it to one of %s", strings.Join(row.Choices, ", "))
	}
	if row.Check != nil {
		return row.Check(value)
	}
	return nil
}

// Reject returns the error for a variable whose value the program cannot use for a reason that Check cannot see.
func (v *Values) Reject(name string, why error) error {
	if got := v.set[name]; got != "" && !v.table.find(name).Secret {
		return fmt.Errorf("environment variable %s=%.80q: %w", name, got, why)
	}
	return fmt.Errorf("environment variable %s: %w", name, why)
}

// Set reports whether the variable is set.
func (v *Values) Set(name string) bool {
	_, ok := v.set[name]
	return ok
}

// value returns the value of a variable, or its default.
func value[T any](v *Values, name string) T {
	row := v.table.find(name)
	parsed, _ := row.Form.parse(cmp.Or(v.set[name], row.Default)) // Read has checked the text
	return parsed.(T)
}

// Text returns the value of a variable of the form Text or Path.
func (v *Values) Text(name string) string { return value[string](v, name) }

// Duration returns the value of a variable of the form Duration.
func (v *Values) Duration(name string) time.Duration { return value[time.Duration](v, name) }

// Int returns the value of a variable of the form Integer.
func (v *Values) Int(name string) int { return value[int](v, name) }

// Ratio returns the value of a variable of the form Ratio.
func (v *Values) Ratio(name string) float64 { return value[float64](v, name) }

// Bool returns the value of a variable of the form Bool.
func (v *Values) Bool(name string) bool { return value[bool](v, name) }

// List returns the value of a variable of the form List, without empty texts.
func (v *Values) List(name string) []string { return value[[]string](v, name) }

// Prefixed returns the values of the variables of a row that ends with "*", keyed by the rest of the name.
func (v *Values) Prefixed(row string) map[string]string {
	values := make(map[string]string)
	for _, name := range v.names(row) {
		values[strings.TrimPrefix(name, strings.TrimSuffix(row, "*"))] = v.set[name]
	}
	return values
}

// Unknown returns the names that are probably misspelled, sorted, with the right name in parentheses if it is known.
func (v *Values) Unknown() []string { return slices.Clone(v.unknown) }

// Unused returns a row for each variable that is set but unused, in the order of the table.
func (v *Values) Unused() (rows []Variable) {
	for _, row := range v.table.Variables {
		for _, name := range v.names(row.Name) {
			if row.Name = name; row.Unused {
				rows = append(rows, row)
			}
		}
	}
	return rows
}

// String returns how many variables are set.
func (v *Values) String() string { return fmt.Sprintf("%d variables", len(v.set)) }

// GoString returns the same as String.
func (v *Values) GoString() string { return v.String() }

// Write writes the table as text for a program's -h, or as Markdown for a page.
func (t Table) Write(w io.Writer, markdown bool) error {
	var b strings.Builder
	if markdown {
		b.WriteString("| Variable | Form | Default | What it is for | From |\n|---|---|---|---|---|\n")
	}
	for _, row := range t.Variables {
		form, def, doc := row.Form, row.Default, row.Doc
		if row.Choices != nil {
			doc += ": " + strings.Join(row.Choices, ", ")
		}
		if row.Unused {
			doc = "not used: " + doc
		}
		switch {
		case markdown:
			if def != "" {
				def = "`" + def + "`"
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s |\n", row.Name, form, def, strings.ReplaceAll(doc, "|", `\|`),
				row.Origin)
		case def != "":
			fmt.Fprintf(&b, "  %s  (%s, default %s)\n        %s\n", row.Name, form, def, doc)
		default:
			fmt.Fprintf(&b, "  %s  (%s)\n        %s\n", row.Name, form, doc)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
