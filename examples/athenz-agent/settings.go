package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
)

// variable is an environment variable of the program. One that is set to the empty text is like one that is not set.
type variable struct {
	name, def, doc string
	from           string                   // where the name comes from
	check          func(value string) error // of one that is set; nil means any text
}

// settings are the values of the variables, with their defaults.
type settings map[string]string

// read returns the settings. The error has a line for each bad value, with what to set instead.
func read(environ []string) (settings, error) {
	s := settings{}
	for _, v := range variables {
		s[v.name] = v.def
	}
	set := map[string]bool{}
	for _, line := range environ {
		name, value, _ := strings.Cut(line, "=")
		if _, ours := s[name]; ours && value != "" {
			s[name], set[name] = value, true
		}
	}
	var bad []error
	for _, v := range variables {
		if set[v.name] && v.check != nil {
			if err := v.check(s[v.name]); err != nil {
				bad = append(bad, s.reject(v.name, err))
			}
		}
	}
	return s, errors.Join(bad...)
}

// reject returns the error of a variable that the program cannot use.
func (s settings) reject(name string, why error) error {
	if s[name] == "" {
		return fmt.Errorf("environment variable %s: %w", name, why)
	}
	return fmt.Errorf("environment variable %s=%.80q: %w", name, s[name], why)
}

// need returns an error for each of the variables that is not set.
func (s settings) need(names ...string) error {
	var missing []error
	for _, name := range names {
		if s[name] == "" {
			missing = append(missing, s.reject(name, errors.New("it is not set, and the program needs it")))
		}
	}
	return errors.Join(missing...)
}

// list returns the texts of a variable with commas between.
func (s settings) list(name string) (all []string) {
	for text := range strings.SplitSeq(s[name], ",") {
		if text = strings.TrimSpace(text); text != "" {
			all = append(all, text)
		}
	}
	return all
}

// writeHelp writes the variables for -help.
func writeHelp(w io.Writer) {
	for _, v := range variables {
		def := ""
		if v.def != "" {
			def = " (default " + v.def + ")"
		}
		fmt.Fprintf(w, "  %s%s\n        %s\n", v.name, def, v.doc)
	}
}
