// Package conformance ties tests to the rows of the standards that they prove. spiffe/CONFORMANCE.md
// is made from these ties and from nothing else, by
//
//	go test ./internal/conformance -update
//
// and the tests of this package fail when that file is stale, when a row that demands anything has
// neither a test nor a reason for having none, and when a tie names a row or a test that does not
// exist.
//
// # Rows
//
// rows.tsv has one line for each rule: id, level, requirement. vectors.tsv has one for each series of
// test vectors: ids, what they are. Lists of ids are separated by spaces and may hold ranges, such as
// "XV-01..XV-19 XV-19b". The levels are explained in CONFORMANCE.md.
//
// # Ties
//
// There are two kinds of tie between a row and a test. They are read from the source, with go/parser:
// nothing is run.
//
//   - A call of [Covers] in a test, benchmark, fuzz target or example, anywhere in its body: the rows
//     named by string literals are proven by that function. If an argument is anything else, such as
//     a field of a table, then every string literal of the function that is the id of a row counts.
//     A call in any other function is a mistake.
//   - A line of tests.tsv: rows, package folder, names of tests. It is the form for vectors, whose ids
//     are in files of testdata: the test that runs the files asserts that every id is there.
//
// Rows that no test of ours can prove, such as those for operators, are in reasons.tsv: rows, reason.
// A row with a reason has no tests.
package conformance

import "testing"

// Covers says that the test proves these rows: rules such as "X5-36", or vectors such as "XV-04". See
// the package comment for what is read from the call.
func Covers(t testing.TB, rows ...string) {
	t.Helper()
	if len(rows) == 0 {
		t.Fatal("conformance: no rows")
	}
}
