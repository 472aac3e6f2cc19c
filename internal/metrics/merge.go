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
	m := merger{families: map[string]*merged{}}
	for _, p := range parts {
		var b bytes.Buffer
		if err := p.Write(&b); err != nil {
			return fmt.Errorf("metrics of %q: %w", p.Name, err)
		}
		with := ""
		if p.Name != "" {
			with = label + `="` + escapeValue.Replace(p.Name) + `"`
		}
		m.add(b.String(), with)
	}
	_, err := io.WriteString(w, m.text())
	return err
}

// merger holds the metrics of all parts by name.
type merger struct {
	order    []string
	families map[string]*merged
}

// merged is one metric, with the samples of all parts.
type merged struct {
	headers map[string]string // by kind
	samples []string
}

// add adds the metrics of one part, each sample with one more label.
func (m *merger) add(text, with string) {
	current := ""
	for line := range strings.SplitSeq(text, "\n") {
		kind, name := split(line)
		if kind == "" {
			continue // an empty line or a comment
		}
		if kind != sampleLine || !belongs(name, current) {
			current = name
		}
		f := m.families[current]
		if f == nil {
			f = &merged{headers: map[string]string{}}
			m.families[current] = f
			m.order = append(m.order, current)
		}
		if kind == sampleLine {
			f.samples = append(f.samples, labelled(line, name, with))
		} else if f.headers[kind] == "" {
			f.headers[kind] = line
		}
	}
}

func (m *merger) text() string {
	var lines []string
	for _, name := range m.order {
		f := m.families[name]
		if len(f.samples) == 0 {
			continue
		}
		for _, kind := range []string{helpLine, typeLine} {
			if f.headers[kind] != "" {
				lines = append(lines, f.headers[kind])
			}
		}
		lines = append(lines, f.samples...)
	}
	if len(lines) == 0 {
		return ""
	}
	return strings.Join(lines, "\n") + "\n"
}

const (
	helpLine   = "# HELP "
	typeLine   = "# TYPE "
	sampleLine = "sample"
)

// split returns the kind of a line, and the name in it; "" means that the line is left out.
func split(line string) (kind, name string) {
	for _, kind := range []string{helpLine, typeLine} {
		if rest, ok := strings.CutPrefix(line, kind); ok {
			name, _, _ = strings.Cut(rest, " ")
			return kind, name
		}
	}
	if line == "" || line[0] == '#' {
		return "", ""
	}
	return sampleLine, line[:len(line)-len(strings.TrimLeft(line, nameBytes))]
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
