// Package settings reads the configuration of a program from environment variables that are listed in one table, which
// is also its documentation.
//
//	var table = settings.Table{
//		Prefixes:  []string{"SECRET_"},
//		Variables: []settings.Variable{{Name: "SECRET_TTL", Form: settings.Duration, Default: "24h", Doc: "lifetime of certificates"}},
//	}
//	values, err := table.Read(os.Environ()) // err has a line for each bad value
//	ttl := values.Duration("SECRET_TTL")
//
// A variable that is set to the empty text is like one that is not set, and so is a [ServiceLink].
package settings

import (
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Form is how the value of a variable is written.
type Form int

// The forms of values.
const (
	Text     Form = iota
	Path          // of a file or folder
	Duration      // as time.ParseDuration has it, not negative
	Integer       // decimal, not negative
	Ratio         // a decimal number from 0 to 1
	Bool          // as strconv.ParseBool has it
	List          // texts with commas between, without the spaces around them
)

var forms = [...]struct{ name, remedy string }{
	Text:     {"text", "set it to another text"},
	Path:     {"path", "set it to the path of a file or folder"},
	Duration: {"duration", "set it to a duration that is not negative, such as 24h, 90m or 100ms"},
	Integer:  {"integer", "set it to a whole number that is not negative, such as 2048"},
	Ratio:    {"ratio", "set it to a number from 0 to 1, such as 0.5"},
	Bool:     {"bool", "set it to true or false"},
	List:     {"list", "set it to texts with commas between"},
}

// String returns the name of the form, as it is in the documentation.
func (f Form) String() string { return forms[f].name }

// Variable is one row of a [Table].
type Variable struct {
	// Name is that of the variable. One that ends with "*" stands for all names with that prefix and something after it.
	Name string

	Form Form

	// Default is the value of a variable that is not set, in the same form. Empty means that there is none, which reads
	// as the zero value.
	Default string

	// Choices are the only values that a Text may have, if there are any.
	Choices []string

	// Check refuses values of the right form, and says why, and what to set instead. It is not called for the default. Nil
	// means that all are good. Its error must not have the value of a Secret.
	Check func(value string) error

	// Secret keeps the value out of errors.
	Secret bool

	// Unused says that the program takes the variable and does nothing with it; Doc says why. Its value is not looked at.
	Unused bool

	// Doc says in one line what the variable is for. Origin says where it comes from.
	Doc, Origin string
}

// Table has the variables of a program. Each name is there once.
type Table struct {
	Variables []Variable

	// Prefixes are those of names that only this program has: names with one of them that are not in the table are
	// reported by [Values.Unknown], as they are probably misspelled. So are names that are [Near] one in the table.
	Prefixes []string
}

// Error says what is wrong with the value of one variable.
type Error struct {
	Name string // of the variable
	Got  string // the value, at most 80 bytes of it; empty for a secret
	Err  error  // what is wrong, or what to set instead
}

// Error names the variable, what it has, and the remedy.
func (e *Error) Error() string {
	if e.Got == "" {
		return fmt.Sprintf("environment variable %s: %v", e.Name, e.Err)
	}
	return fmt.Sprintf("environment variable %s=%q: %v", e.Name, e.Got, e.Err)
}

// Unwrap returns Err.
func (e *Error) Unwrap() error { return e.Err }

// Values are the values of the variables of a [Table]. Its methods panic for a name that is not in the table, and for one
// of another form. It may have secrets, and does not print them.
type Values struct {
	table   Table
	set     map[string]string // the variables of the table, and those of its prefixes
	unknown []string
}

// Read reads the variables of the table from the environment, in the form of os.Environ. The error has an [*Error] for
// each bad value, joined, in the order of the table; with an error there are no values.
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
		switch right, slip := Near(name, known); {
		case slip:
			v.unknown = append(v.unknown, name+" (perhaps "+right+")")
		case row == nil && slices.ContainsFunc(t.Prefixes, func(p string) bool { return strings.HasPrefix(name, p) }):
			v.unknown = append(v.unknown, name)
		}
	}
	slices.Sort(v.unknown)
	v.unknown = slices.Compact(v.unknown)
	var bad []error
	for i := range t.Variables {
		row := &t.Variables[i]
		for _, name := range v.names(row.Name) {
			if value := v.set[name]; !row.Unused {
				if err := row.check(value); err != nil {
					bad = append(bad, v.Reject(name, err))
				}
			}
		}
	}
	if bad != nil {
		return nil, errors.Join(bad...)
	}
	return v, nil
}

// links are the lines of service links. Those of the API server's own Service are there with enableServiceLinks: false, too.
var links = regexp.MustCompile(`^\w+(_SERVICE_HOST|_SERVICE_PORT(_\w+)?|_PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=|^\w+_PORT=(tcp|udp|sctp)://`)

// ServiceLink reports whether a line of an environment is what Kubernetes tells a pod about a Service of its namespace, but for
// the Service kubernetes: the Service envoy-status makes ENVOY_STATUS_PORT=tcp://10.0.0.1:80. It is no configuration.
func ServiceLink(line string) bool {
	return links.MatchString(line) && !strings.HasPrefix(line, "KUBERNETES_")
}

// find returns the row of a name, or nil: that with the name itself before one of a prefix.
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

// check returns what is wrong with a value.
func (row *Variable) check(value string) error {
	if !row.Form.holds(value) {
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

// holds reports whether a value has the form.
func (f Form) holds(value string) (ok bool) {
	switch f {
	case Path:
		return !strings.ContainsRune(value, 0)
	case Duration:
		d, err := time.ParseDuration(value)
		return err == nil && d >= 0
	case Integer:
		_, err := strconv.ParseUint(value, 10, 31)
		return err == nil
	case Ratio:
		r, err := strconv.ParseFloat(value, 64)
		return err == nil && r >= 0 && r <= 1
	case Bool:
		_, err := strconv.ParseBool(value)
		return err == nil
	case Text, List:
	}
	return true
}

// Reject returns the [*Error] of a variable whose value the program cannot use, for a reason that has to do with more
// than this value.
func (v *Values) Reject(name string, why error) error {
	row := v.table.find(name)
	if row == nil {
		panic("settings: " + name + " is not in the table")
	}
	got := v.set[name]
	if len(got) > 80 {
		got = got[:80]
	}
	if row.Secret {
		got = ""
	}
	return &Error{Name: name, Got: got, Err: why}
}

// value returns the value of a variable, or its default.
func (v *Values) value(name string, forms ...Form) string {
	row := v.table.find(name)
	if row == nil || !slices.Contains(forms, row.Form) || row.Unused {
		panic("settings: " + name + " is not a variable of the table in use with that form")
	}
	if value, ok := v.set[name]; ok {
		return value
	}
	return row.Default
}

// Set reports whether the variable is set.
func (v *Values) Set(name string) bool {
	_, ok := v.set[name]
	return ok
}

// Text returns the value of a variable of the form Text or Path.
func (v *Values) Text(name string) string { return v.value(name, Text, Path) }

// Duration returns the value of a variable of that form.
func (v *Values) Duration(name string) time.Duration {
	d, _ := time.ParseDuration(v.value(name, Duration)) // checked by Read
	return d
}

// Int returns the value of a variable of the form Integer.
func (v *Values) Int(name string) int {
	n, _ := strconv.Atoi(v.value(name, Integer))
	return n
}

// Ratio returns the value of a variable of that form.
func (v *Values) Ratio(name string) float64 {
	r, _ := strconv.ParseFloat(v.value(name, Ratio), 64)
	return r
}

// Bool returns the value of a variable of that form.
func (v *Values) Bool(name string) bool {
	b, _ := strconv.ParseBool(v.value(name, Bool))
	return b
}

// List returns the value of a variable of that form, without texts that are empty.
func (v *Values) List(name string) (list []string) {
	for text := range strings.SplitSeq(v.value(name, List), ",") {
		if text = strings.TrimSpace(text); text != "" {
			list = append(list, text)
		}
	}
	return list
}

// Prefixed returns the values of the variables of a row that ends with "*", by what comes after the prefix.
func (v *Values) Prefixed(row string) map[string]string {
	values := make(map[string]string)
	for _, name := range v.names(row) {
		values[strings.TrimPrefix(name, strings.TrimSuffix(row, "*"))] = v.set[name]
	}
	return values
}

// Unknown returns the names that are probably misspelled, sorted, with the right one in parentheses if it is known.
func (v *Values) Unknown() []string { return slices.Clone(v.unknown) }

// Unused returns the rows of variables that are set and not used, in the order of the table. For a row that stands for several
// names there is one for each.
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

// String says how many variables are set.
func (v *Values) String() string { return fmt.Sprintf("%d variables", len(v.set)) }

// GoString returns the same as String.
func (v *Values) GoString() string { return v.String() }

// Write writes the table: for the -h of a program those that it uses and then the others, or for its documentation in Markdown.
func (t Table) Write(w io.Writer, markdown bool) error {
	var used, unused strings.Builder
	for _, row := range t.Variables {
		b, value, format := &used, row.Default, "  %s  (%s%s)\n        %s\n"
		if row.Unused && !markdown {
			b = &unused
		}
		switch {
		case markdown && value != "":
			value = "`" + value + "`"
		case value != "":
			value = ", default " + value
		}
		if markdown {
			format = "| `%s` | %s | %s | %s | " + row.Origin + " |\n"
			row.Doc = strings.ReplaceAll(row.Doc, "|", `\|`)
		}
		fmt.Fprintf(b, format, row.Name, row.Form, value, row.text())
	}
	head, rest := "", "\nThose that it takes, and does not use:\n\n"
	if markdown {
		head = "| Variable | Form | Default | What it is for | From |\n|---|---|---|---|---|\n"
	}
	if unused.Len() == 0 {
		rest = ""
	}
	_, err := io.WriteString(w, head+used.String()+rest+unused.String())
	return err
}

// text is the documentation of a row, with what its other fields say.
func (row *Variable) text() string {
	text := row.Doc
	if row.Choices != nil {
		text += ": " + strings.Join(row.Choices, ", ")
	}
	if row.Unused {
		text = "not used: " + text
	}
	return text
}
