package metrics

import (
	"bytes"
	"fmt"
	"io"
	"strings"
)

// Part is a writer of metrics whose text is merged with others.
type Part struct {
	Name  string // the value of the label that distinguishes its samples; empty for no label
	Write func(w io.Writer) error
}

// Merge writes the metrics of all parts as one text. A metric that several parts have comes once, with the HELP and
// TYPE of the first part. Each sample gets a label with the name of its part. If a part's Write fails, Merge returns
// its error and writes nothing.
//
// The parts must write the text format, as this package and client libraries do, without a label of that name.
func Merge(w io.Writer, label string, parts ...Part) error {
	var order []string
	families := map[string]*merged{}
	for i, p := range parts {
		var b bytes.Buffer
		if err := p.Write(&b); err != nil {
			return fmt.Errorf("metrics of %q: %w", p.Name, err)
		}
		with, current := "", ""
		if p.Name != "" {
			with = label + `="` + escapeValue.Replace(p.Name) + `"`
		}
		for line := range strings.SplitSeq(b.String(), "\n") {
			name, sample := nameIn(line)
			if name == "" {
				continue // an empty line or a comment
			}
			if !sample || !belongs(name, current) {
				current = name
			}
			f := families[current]
			if f == nil {
				f = &merged{part: i}
				families[current] = f
				order = append(order, current)
			}
			switch {
			case sample:
				f.samples = append(f.samples, labelled(line, name, with))
			case f.part == i:
				f.headers = append(f.headers, line)
			}
		}
	}
	var lines []string
	for _, name := range order {
		if f := families[name]; len(f.samples) > 0 {
			lines = append(append(lines, f.headers...), f.samples...)
		}
	}
	_, err := io.WriteString(w, strings.Join(append(lines, ""), "\n"))
	return err
}

// merged is one metric, with the samples of all parts.
type merged struct {
	part             int // the first one that has it
	headers, samples []string
}

// nameIn returns the name in a line, and whether the line is a sample.
func nameIn(line string) (name string, sample bool) {
	if !strings.HasPrefix(line, "#") {
		return line[:len(line)-len(strings.TrimLeft(line, nameBytes))], true
	}
	if words := strings.SplitN(line, " ", 4); len(words) > 2 && (words[1] == "HELP" || words[1] == "TYPE") {
		name = words[2]
	}
	return name, false
}

const nameBytes = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_:"

// belongs reports whether a sample is of a family: samples of histograms and summaries have longer names.
func belongs(sample, family string) bool {
	rest, ok := strings.CutPrefix(sample, family)
	switch rest {
	case "", "_bucket", "_sum", "_count":
		return ok && family != ""
	}
	return false
}

// labelled returns a sample with one more label.
func labelled(line, name, with string) string {
	rest := line[len(name):]
	switch {
	case with == "":
		return line
	case !strings.HasPrefix(rest, "{"):
		return name + "{" + with + "}" + rest
	case strings.HasPrefix(rest, "{}"):
		return name + "{" + with + rest[1:]
	}
	return name + "{" + with + "," + rest[1:]
}
