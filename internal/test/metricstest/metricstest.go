// Package metricstest is a strict reader of the text format of Prometheus (version 0.0.4), for tests.
package metricstest

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"
)

// Text is the content of a text.
type Text struct {
	Types map[string]string // by the name of the metric: counter or gauge
	// by name and labels, sorted: name{a="x",b="y"}, with the values as they were before escaping
	Samples map[string]float64
}

// Of reads the text that write writes, such as the Metrics of a report. Findings of Lint are an error.
func Of(write func(io.Writer) error) (*Text, error) {
	var b strings.Builder
	if err := write(&b); err != nil {
		return nil, err
	}
	t, err := Parse(b.String())
	if err != nil {
		return nil, err
	}
	if faults := t.Lint(); len(faults) > 0 {
		return nil, fmt.Errorf("names: %q", faults)
	}
	return t, nil
}

// Page reads the text of a whole page, which has svidkit_build_info once. Findings of promtool are an error, where it
// is installed, but not those about names that Istio and Linkerd give.
func Page(text string) (*Text, error) {
	t, err := Parse(text)
	if err != nil {
		return nil, err
	}
	if found := promtool(text); len(found) > 0 {
		return nil, fmt.Errorf("promtool check metrics: %q", found)
	}
	var infos []string
	for key, value := range t.Samples {
		if strings.HasPrefix(key, "svidkit_build_info{") && value == 1 {
			infos = append(infos, key)
		}
	}
	if len(infos) != 1 || !buildInfo.MatchString(infos[0]) {
		return nil, fmt.Errorf("svidkit_build_info is %q", infos)
	}
	return t, nil
}

// Require requires that a text is a whole page, as Page has it.
func Require(t testing.TB, text string) {
	t.Helper()
	if _, err := Page(strings.TrimSpace(text) + "\n"); err != nil {
		t.Fatal(err)
	}
}

// promtool returns what "promtool check metrics" finds.
func promtool(text string) (found []string) {
	path, err := exec.LookPath("promtool")
	if err != nil {
		return nil // internal/checks/prometheus says so
	}
	cmd := exec.Command(path, "check", "metrics")
	cmd.Stdin = strings.NewReader(text)
	out, err := cmd.CombinedOutput()
	for line := range strings.Lines(string(out)) {
		if !foreign.MatchString(line) {
			found = append(found, strings.TrimSpace(line))
		}
	}
	if err != nil && len(out) == 0 {
		found = append(found, err.Error())
	}
	return found
}

// foreign begins what promtool says of names that are Istio's and Linkerd's: dashboards of others have them.
var foreign = regexp.MustCompile(`^(citadel_server|istio_agent)_`)

var buildInfo = regexp.MustCompile(`^svidkit_build_info\{goversion="go1\.[^"]+",revision="[^"]*",version="[^"]+"\}$`)

var (
	metricName = regexp.MustCompile(`^[a-zA-Z_:][a-zA-Z0-9_:]*$`)
	labelName  = regexp.MustCompile(`^[a-zA-Z_][a-zA-Z0-9_]*$`)
)

// Parse reads a text. It accepts only what the strictest reader would: each metric has one HELP, one TYPE and then
// its samples, at least one, without another metric in between; a sample has a finite value, no time, and distinct,
// correctly escaped labels that no other sample has.
func Parse(text string) (*Text, error) {
	t := &Text{Types: map[string]string{}, Samples: map[string]float64{}}
	if text == "" {
		return t, nil
	}
	if !utf8.ValidString(text) || !strings.HasSuffix(text, "\n") {
		return nil, errors.New("not UTF-8, or without an end of the last line")
	}
	helped := map[string]bool{}
	help, family, samples := "", "", 1
	for i, line := range strings.Split(strings.TrimSuffix(text, "\n"), "\n") {
		bad := func(format string, args ...any) error {
			return fmt.Errorf("line %d, %q: %w", i+1, line, fmt.Errorf(format, args...))
		}
		if rest, ok := strings.CutPrefix(line, "# HELP "); ok {
			name, words, _ := strings.Cut(rest, " ")
			switch {
			case !metricName.MatchString(name):
				return nil, bad("not a name of a metric")
			case helped[name] || t.Types[name] != "":
				return nil, bad("a second HELP, or one after TYPE")
			case samples == 0:
				return nil, bad("%s has no sample", family)
			case strings.Contains(strings.NewReplacer(`\\`, "", `\n`, "").Replace(words), `\`):
				return nil, bad("an escape that there is not")
			}
			helped[name], help, family, samples = true, name, "", 0
			continue
		}
		if rest, ok := strings.CutPrefix(line, "# TYPE "); ok {
			name, kind, _ := strings.Cut(rest, " ")
			switch {
			case name != help || family != "":
				return nil, bad("not after its HELP")
			case kind != "counter" && kind != "gauge":
				return nil, bad("a type that these tests do not know")
			}
			t.Types[name], family = kind, name
			continue
		}
		key, v, err := sample(line)
		switch name, _, _ := strings.Cut(key, "{"); {
		case err != nil:
			return nil, bad("%w", err)
		case name != family:
			return nil, bad("not below its own TYPE")
		case math.IsNaN(v) || math.IsInf(v, 0):
			return nil, bad("not finite")
		case t.Types[family] == "counter" && v < 0:
			return nil, bad("a counter below 0")
		}
		if _, twice := t.Samples[key]; twice {
			return nil, bad("the labels of another sample")
		}
		t.Samples[key] = v
		samples++
	}
	if samples == 0 {
		return nil, fmt.Errorf("%s has no sample", help)
	}
	return t, nil
}

// sample reads a line.
func sample(line string) (key string, v float64, err error) {
	end := strings.IndexAny(line, "{ ")
	if end < 0 || !metricName.MatchString(line[:end]) {
		return "", 0, errors.New("not a sample")
	}
	name, rest := line[:end], line[end:]
	labels := map[string]string{}
	if strings.HasPrefix(rest, "{") {
		if rest, err = readLabels(rest[1:], labels); err != nil {
			return "", 0, err
		}
	}
	rest, ok := strings.CutPrefix(rest, " ")
	if !ok || strings.ContainsAny(rest, " \t\r") {
		return "", 0, errors.New("one space and one value follow the labels")
	}
	if v, err = strconv.ParseFloat(rest, 64); err != nil {
		return "", 0, err
	}
	return Key(name, labels), v, nil
}

// readLabels reads labels up to the closing brace, and returns what follows.
func readLabels(s string, into map[string]string) (rest string, err error) {
	for {
		name, value, ok := strings.Cut(s, `="`)
		_, twice := into[name]
		if !ok || !labelName.MatchString(name) || strings.HasPrefix(name, "__") || twice {
			return "", fmt.Errorf("no label, or one that is there twice, at %q", s)
		}
		var b strings.Builder
		i := 0
		for ; i < len(value) && value[i] != '"'; i++ {
			if value[i] != '\\' {
				b.WriteByte(value[i])
				continue
			}
			i++
			switch {
			case i < len(value) && value[i] == 'n':
				b.WriteByte('\n')
			case i < len(value) && (value[i] == '\\' || value[i] == '"'):
				b.WriteByte(value[i])
			default:
				return "", errors.New("an escape that there is not")
			}
		}
		if i == len(value) {
			return "", errors.New("the value of a label does not end")
		}
		value = value[i+1:]
		into[name] = b.String()
		if rest, ok := strings.CutPrefix(value, "}"); ok {
			return rest, nil
		}
		if s, ok = strings.CutPrefix(value, ","); !ok {
			return "", fmt.Errorf("neither a comma nor a brace at %q", value)
		}
	}
}

// Key returns the key of a sample in a Text.
func Key(name string, labels map[string]string) string {
	if len(labels) == 0 {
		return name
	}
	var all []string
	for _, l := range slices.Sorted(maps.Keys(labels)) {
		all = append(all, l+"="+strconv.Quote(labels[l]))
	}
	return name + "{" + strings.Join(all, ",") + "}"
}

// Lint returns the names in t that break the conventions of Prometheus, and ours: a prefix, base units, and _total at
// the end of counters and of nothing else.
func (t *Text) Lint() (faults []string) {
	for _, name := range slices.Sorted(maps.Keys(t.Types)) {
		fault := func(s string) { faults = append(faults, name+": "+s) }
		if !strings.HasPrefix(name, "svidkit_") {
			fault("no prefix svidkit_")
		}
		if (t.Types[name] == "counter") != strings.HasSuffix(name, "_total") {
			fault("_total is for counters")
		}
		if strings.ToLower(name) != name || strings.Contains(name, ":") {
			fault("not snake_case")
		}
		for word := range strings.SplitSeq(name, "_") {
			switch word {
			case "counter", "gauge", "bucket", "count", "sum", "milliseconds", "ms", "minutes", "hours", "days", "kilobytes", "percent":
				fault("the word " + word)
			}
		}
		if strings.Contains(name, "timestamp") && !strings.HasSuffix(name, "_timestamp_seconds") {
			fault("a time is in _timestamp_seconds")
		}
	}
	return faults
}
