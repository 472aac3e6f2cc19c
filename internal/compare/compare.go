// Package compare holds svidkit against go-spiffe, the other Go implementation of the standards that
// this library implements. There is no code to import here, only tests:
//
//   - The test vectors of this repository are given to both. Where the outcomes differ, the difference
//     is in a table with the rule that decides it, and one that is not in the table fails the test.
//   - Each speaks to the other: the Workload API over Unix sockets, mutual TLS, JWT-SVIDs and bundle
//     documents, in both directions.
//   - The programs below programs do the same with each, as their users write them. They are run, also with those of
//     the other library, and their lengths are held.
//   - Both are measured, in alternation, beside the work that no library can avoid. BENCHMARKS.md has the
//     figures and the command.
//
// It is a module of its own, so that nothing of what it needs reaches the main module: "./..." at the
// root does not come here.
package compare
