// Package conformance ties tests to the rules that they prove: those of the SPIFFE standards, and those of the
// systems that parts of the library take the place of, which are Istio's agent, Linkerd's identity and Athenz on
// Kubernetes. For each of them there is a page, such as spiffe/CONFORMANCE.md, which is made from these ties and from
// nothing else, by
//
//	go -C internal/checks test ./conformance -update
//
// and the tests there fail when a page is stale, when a row that demands anything has neither a test nor a reason for
// having none, and when a tie names a row or a test that does not exist.
//
// # Rows
//
// In internal/checks/conformance there is a directory for each page. Its rows.tsv has one line for each rule: id,
// level or mark, requirement. vectors.tsv has one for each series of test vectors: ids, what they are. Lists of ids are
// separated by spaces and may hold ranges, such as "XV-01..XV-19 XV-19b". The levels and marks are explained on the
// pages. An id such as IST-9.4-5 is that of row 5 of section 9.4.
//
// # Ties
//
// There are two kinds of tie between a row and a test. They are read from the source, with go/parser: nothing is run.
//
//   - A call of [Covers] in a test, benchmark, fuzz target or example, anywhere in its body: the rows
//     named by string literals are proven by that function. If an argument is anything else, such as
//     a field of a table, then every string literal of the function that is the id of a row counts.
//     A call in any other function is a mistake.
//   - A line of tests.tsv: rows, package directory, names of tests. It is the form for vectors, whose ids
//     are in files of testdata: the test that runs the files asserts that every id is there.
//
// Rows that no test of ours can prove, such as those for operators, are in reasons.tsv: rows, reason. A row with a
// reason has no tests.
package conformance

import "testing"

// Covers says that the test proves these rows: rules such as "X5-36" and "IST-9.4-5", or vectors such as
// "XV-04". The package comment says what is read from the call.
func Covers(t testing.TB, rows ...string) {
	t.Helper()
	if len(rows) == 0 {
		t.Fatal("conformance: no rows")
	}
}
