package program

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
)

// Manifest holds a program's Kubernetes objects, for -install.
//
// Text is YAML in which ${NAME} stands for a value. A comment line, "#   NAME=DEFAULT description", declares each;
// the default "?" means that there is none.
type Manifest struct {
	Text   string
	scheme string
	values map[string]string
}

// RegisterWith adds -with to a program that already has -install.
func (m *Manifest) RegisterWith(flags *flag.FlagSet) {
	flags.Func("with", "`NAME=VALUE` in what -install kubernetes prints, which says at its beginning what there "+
		"is; may be repeated", func(text string) error {
		name, value, ok := strings.Cut(text, "=")
		if !ok || !plain.MatchString(value) {
			return errors.New("want NAME=VALUE, and a value of letters, digits and any of . _ : / @ , -")
		}
		if m.values == nil {
			m.values = map[string]string{}
		}
		m.values[name] = value
		return nil
	})
}

// Given reports whether -with was given.
func (m *Manifest) Given() bool { return m.values != nil }

// Register adds -install and -with to a program's flags. [ParseFlags] prints the objects.
func (m *Manifest) Register(flags *flag.FlagSet) {
	m.RegisterWith(flags)
	flags.Var(m, "install", "print the objects that a cluster needs, as YAML, and end; `scheme`: kubernetes")
}

// String implements [flag.Value].
func (m *Manifest) String() string { return m.scheme }

// Set implements [flag.Value].
func (m *Manifest) Set(scheme string) error {
	if scheme != "kubernetes" {
		return errors.New("set it to kubernetes")
	}
	m.scheme = scheme
	return nil
}

var (
	declared = regexp.MustCompile(`(?m)^#   ([a-z-]+)=(\S*)`)
	plain    = regexp.MustCompile(`^[A-Za-z0-9._:/@,-]*$`) // needs no quotes in YAML
)

// Print writes the objects, with the values of -with.
func (m *Manifest) Print(out io.Writer) error {
	all := map[string]string{}
	text := declared.ReplaceAllStringFunc(m.Text, func(line string) string {
		name, value, _ := strings.Cut(strings.TrimLeft(line, "# "), "=")
		if given, ok := m.values[name]; ok {
			value = given
		}
		all[name] = value
		return "#   " + name + "=" + value
	})
	for _, name := range slices.Sorted(maps.Keys(m.values)) {
		if _, ok := all[name]; !ok {
			return Misused("-with: there is no %.100q here, but %s", name, strings.Join(slices.Sorted(maps.Keys(all)),
				", "))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if all[name] == "?" {
			return Misused("-install: add -with %s=VALUE; without it, nothing can be printed", name)
		}
	}
	_, err := fmt.Fprint(out, os.Expand(text, func(name string) string { return all[name] }))
	return err
}
