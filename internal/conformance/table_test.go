package conformance

import (
	"embed"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

//go:embed *.tsv
var data embed.FS

// document is one of the documents whose rows the table has, in the order of the table.
type document struct{ prefixes, title string }

var documents = []document{
	{"ID", "SPIFFE ID"},
	{"SVID", "SVIDs in general"},
	{"X5", "X.509-SVID"},
	{"JWT", "JWT-SVID"},
	{"BND MAP", "Trust domain and bundle"},
	{"FED", "Federation"},
	{"WEP", "Workload Endpoint"},
	{"WAPI", "Workload API"},
	{"WIT WPT HSIG", "WIT-SVID and proof of possession (Incubating, opt-in)"},
	{"BRK", "Broker API and Endpoint (Incubating)"},
	{"STAB", "Maturity of the documents"},
	{"AMB", "Readings, where the standards leave room"},
	{"GO", "Facts about Go that rules stumble over"},
	{"DIV", "Living with other implementations"},
}

// row is one rule.
type row struct {
	id, level, requirement string
}

// demanded reports whether the table is incomplete without a test or a reason for the row.
func (r row) demanded() bool { return !strings.HasPrefix(r.level, "fact") }

func (d document) has(id string) bool {
	prefix, _, _ := strings.Cut(id, "-")
	return slices.Contains(strings.Fields(d.prefixes), prefix)
}

// series is a line of vectors.tsv.
type series struct {
	ids  []string
	what string
}

// tie says that tests of a package, as "spiffe.TestIDVectors", prove rows.
type tie struct {
	rows  []string
	tests []string
	where string // for messages
}

// table is everything that CONFORMANCE.md shows.
type table struct {
	rows    []row
	vectors []series
	ties    []tie
	reasons map[string]string
}

// readTable returns what the data files say, without the ties that come from calls.
func readTable(file func(name string) (string, error)) (*table, error) {
	t := &table{reasons: map[string]string{}}
	for _, f := range []struct {
		name    string
		columns int
		line    func([]string) error
	}{
		{"rows.tsv", 3, func(c []string) error {
			if !slices.ContainsFunc(documents, func(d document) bool { return d.has(c[0]) }) {
				return fmt.Errorf("%q belongs to no document", c[0])
			}
			t.rows = append(t.rows, row{c[0], c[1], c[2]})
			return nil
		}},
		{"vectors.tsv", 2, func(c []string) error {
			ids, err := expand(c[0])
			t.vectors = append(t.vectors, series{ids, c[1]})
			return err
		}},
		{"tests.tsv", 3, func(c []string) error {
			ids, err := expand(c[0])
			var tests []string
			for name := range strings.FieldsSeq(c[2]) {
				tests = append(tests, c[1]+"."+name)
			}
			t.ties = append(t.ties, tie{ids, tests, "tests.tsv"})
			return err
		}},
		{"reasons.tsv", 2, func(c []string) error {
			ids, err := expand(c[0])
			for _, id := range ids {
				if t.reasons[id] != "" {
					return fmt.Errorf("%s has two reasons", id)
				}
				t.reasons[id] = c[1]
			}
			return err
		}},
	} {
		text, err := file(f.name)
		if err != nil {
			return nil, err
		}
		n := 0
		for line := range strings.Lines(text) {
			n++
			columns := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
			if len(columns) != f.columns || slices.Contains(columns, "") {
				return nil, fmt.Errorf("%s:%d: want %d columns, all filled", f.name, n, f.columns)
			}
			if err := f.line(columns); err != nil {
				return nil, fmt.Errorf("%s:%d: %w", f.name, n, err)
			}
		}
	}
	seen := map[string]bool{}
	for _, id := range t.ids() {
		if seen[id] {
			return nil, fmt.Errorf("%s is there twice", id)
		}
		seen[id] = true
	}
	return t, nil
}

func embedded(name string) (string, error) {
	b, err := data.ReadFile(name)
	return string(b), err
}

// ids returns the ids of all rules and vectors.
func (t *table) ids() []string {
	var ids []string
	for _, r := range t.rows {
		ids = append(ids, r.id)
	}
	for _, s := range t.vectors {
		ids = append(ids, s.ids...)
	}
	return ids
}

var idPattern = regexp.MustCompile(`^([A-Z0-9]+-)([0-9]+)([a-z]?)$`)

// expand returns the ids of a list such as "XV-01..XV-66 XV-19b".
func expand(list string) ([]string, error) {
	var ids []string
	for part := range strings.FieldsSeq(list) {
		first, last, isRange := strings.Cut(part, "..")
		a := idPattern.FindStringSubmatch(first)
		if a == nil {
			return nil, fmt.Errorf("%q is not an id", first)
		}
		if !isRange {
			ids = append(ids, part)
			continue
		}
		b := idPattern.FindStringSubmatch(last)
		if b == nil || a[1] != b[1] || a[3] != "" || b[3] != "" {
			return nil, fmt.Errorf("%q is not a range", part)
		}
		from, err := strconv.Atoi(a[2])
		if err != nil {
			return nil, err
		}
		to, err := strconv.Atoi(b[2])
		if err != nil {
			return nil, err
		}
		if from >= to {
			return nil, fmt.Errorf("%q is not a range", part)
		}
		for n := from; n <= to; n++ {
			ids = append(ids, fmt.Sprintf("%s%0*d", a[1], len(a[2]), n))
		}
	}
	return ids, nil
}

// tests returns the tests of each id, sorted.
func (t *table) tests() map[string][]string {
	all := map[string][]string{}
	for _, tie := range t.ties {
		for _, id := range tie.rows {
			all[id] = append(all[id], tie.tests...)
		}
	}
	for id, tests := range all {
		slices.Sort(tests)
		all[id] = slices.Compact(tests)
	}
	return all
}

// problems returns everything that is wrong with the table, given the functions that exist.
func (t *table) problems(functions map[string]bool) []string {
	var bad []string
	known := map[string]bool{}
	for _, id := range t.ids() {
		known[id] = true
	}
	for _, tie := range t.ties {
		for _, id := range tie.rows {
			if !known[id] {
				bad = append(bad, fmt.Sprintf("%s: %s is not a row", tie.where, id))
			}
		}
		for _, test := range tie.tests {
			if !functions[test] {
				bad = append(bad, fmt.Sprintf("%s: there is no %s", tie.where, test))
			}
		}
	}
	tests := t.tests()
	for _, id := range slices.Sorted(maps.Keys(t.reasons)) {
		if !known[id] {
			bad = append(bad, fmt.Sprintf("reasons.tsv: %s is not a row", id))
		}
		if len(tests[id]) > 0 {
			bad = append(bad, fmt.Sprintf("reasons.tsv: %s has tests (%s): drop the reason", id, strings.Join(tests[id], " ")))
		}
	}
	for _, r := range t.rows {
		if r.demanded() && len(tests[r.id]) == 0 && t.reasons[r.id] == "" {
			bad = append(bad, fmt.Sprintf("%s (%s: %s): neither a test nor a reason", r.id, r.level, r.requirement))
		}
	}
	for _, s := range t.vectors {
		var none []string
		for _, id := range s.ids {
			if len(tests[id]) == 0 && t.reasons[id] == "" {
				none = append(none, id)
			}
		}
		if none != nil {
			bad = append(bad, fmt.Sprintf("%s (%s): no test", ranges(none, s.ids), s.what))
		}
	}
	return bad
}
