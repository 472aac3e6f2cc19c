package conformance

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

//go:embed */*.tsv
var data embed.FS

// book is a table of rows, and the page that is made of it. Its data are in the directory of its name.
type book struct {
	name      string
	page      string
	intro     string // of the page; it ends with how to read the table
	documents []document
	columns   [2]string               // titles: what a row has for a level, and the rows of the summary without a test
	levels    string                  // a pattern
	demanded  func(level string) bool // whether a row needs a test or a reason
}

// document is a part of a book, in the order of the page. Its prefixes are what stands before the number of a row;
// "IST-7" is the prefix of IST-7.2-1 too.
type document struct{ prefixes, title string }

var books = []*book{
	{
		name: "spiffe", page: "spiffe/CONFORMANCE.md", intro: spiffeIntro, documents: spiffeDocuments,
		columns: [2]string{"level", "facts without"}, levels: `MUST|SHOULD|MAY|ADVICE|REC|fact`, demanded: func(level string) bool { return !strings.HasPrefix(level, "fact") },
	},
	{
		name: "istio", page: "sds/CONFORMANCE.md", intro: istioIntro, documents: istioSections,
		columns: marked, levels: marks, demanded: stated,
	},
	{
		name: "linkerd", page: "caclient/linkerd/CONFORMANCE.md", intro: linkerdIntro, documents: linkerdSections,
		columns: marked, levels: marks, demanded: stated,
	},
	{
		name: "athenz", page: "authn/athenz/CONFORMANCE.md", intro: athenzIntro, documents: athenzSections,
		columns: marked, levels: marks, demanded: stated,
	},
}

var marked = [2]string{"mark", "others without"}

const marks = `^(S|S≠|S≠I|S=I|S/I|S/H|S-era|I|H|N)$`

// stated reports whether the row is in the design that the system was described with, and so binds.
func stated(mark string) bool { return strings.HasPrefix(mark, "S") && mark != "S-era" }

// has reports whether rows of the id belong to the book.
func (b *book) has(id string) bool {
	return slices.ContainsFunc(b.documents, func(d document) bool { return d.has(id) })
}

var istioSections = []document{
	{"IST-1", "SPIFFE IDs and bundles"},
	{"IST-2", "Keys and certificates"},
	{"IST-3", "The CA, its Secret and its roots"},
	{"IST-4", "CA server"},
	{"IST-5", "Authenticators of the CA server"},
	{"IST-6", "CA client"},
	{"IST-7", "Secret cache"},
	{"IST-8", "SDS server"},
	{"IST-9", "Agent"},
}

var linkerdSections = []document{
	{"LNK-1", "Components and trust"},
	{"LNK-2", "Names"},
	{"LNK-3", "gRPC API"},
	{"LNK-4", "CSR"},
	{"LNK-5", "Token validation"},
	{"LNK-6", "Configuration of the certifier"},
	{"LNK-7", "Issued certificate"},
	{"LNK-8", "What a client does with the response"},
	{"LNK-9", "Bootstrap of a workload"},
	{"LNK-10", "Life of a proxy"},
	{"LNK-11", "TLS between workloads"},
	{"LNK-12", "Environment"},
	{"LNK-13", "Kubernetes"},
	{"LNK-14", "SPIRE mode"},
	{"LNK-15", "Consumers of identities"},
	{"LNK-16", "Hazards, and the safe choice"},
	{"LNK-17", "Vectors"},
}

var athenzSections = []document{
	{"ATH-1", "Components and trust"},
	{"ATH-2", "Names"},
	{"ATH-3", "Identity document"},
	{"ATH-4", "Pod subject URI"},
	{"ATH-5", "Keys and issuer URI"},
	{"ATH-6", "Signing service"},
	{"ATH-7", "Node agent"},
	{"ATH-8", "Outputs of the pod's client"},
	{"ATH-9", "CSR"},
	{"ATH-10", "ZTS API"},
	{"ATH-11", "Provider callback"},
	{"ATH-12", "Verification in the callback"},
	{"ATH-13", "URIs"},
	{"ATH-14", "Service token"},
	{"ATH-15", "Bootstrap of the control plane"},
	{"ATH-16", "Issued certificate"},
	{"ATH-17", "SDS of the later agent"},
	{"ATH-18", "Hazards, and the safe choice"},
}

var spiffeDocuments = []document{
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

func (d document) has(id string) bool {
	prefix := id[:max(0, strings.LastIndexByte(id, '-'))]
	for p := range strings.FieldsSeq(d.prefixes) {
		if rest, ok := strings.CutPrefix(prefix, p); ok && (rest == "" || rest[0] == '.') {
			return true
		}
	}
	return false
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

// table is everything that a page shows.
type table struct {
	*book
	rows    []row
	vectors []series
	ties    []tie
	reasons map[string]string
}

// readTable returns what the data files say, without the ties that come from calls. A file that is not there has no
// lines.
func (b *book) readTable(file func(name string) (string, error)) (*table, error) {
	t := &table{book: b, reasons: map[string]string{}}
	for _, f := range []struct {
		name    string
		columns int
		line    func([]string) error
	}{
		{"rows.tsv", 3, func(c []string) error {
			if !b.has(c[0]) {
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
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
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

func (b *book) embedded(name string) (string, error) {
	text, err := data.ReadFile(b.name + "/" + name)
	return string(text), err
}

// add takes the rows of the table from ties: what is in it, or would be if it existed.
func (t *table) add(ties []tie) {
	ids := t.ids()
	for _, tie := range ties {
		tie.rows = slices.DeleteFunc(slices.Clone(tie.rows), func(id string) bool { return !t.has(id) && !slices.Contains(ids, id) })
		if len(tie.rows) > 0 {
			t.ties = append(t.ties, tie)
		}
	}
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

var idPattern = regexp.MustCompile(`^([A-Z0-9]+-(?:[0-9.]+-)?)([0-9]+)([a-z]?)$`)

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
		if t.demanded(r.level) && len(tests[r.id]) == 0 && t.reasons[r.id] == "" {
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
