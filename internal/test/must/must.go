// Package must has results of calls that a test needs in order to go on.
package must

import "fmt"

// Get returns v, or ends the test with a panic, which has the line of the call, if err is not nil. It is for set-ups: what a
// test is about is asserted.
func Get[T any](v T, err error) T {
	if err != nil {
		panic(fmt.Sprintf("must.Get: %v", err))
	}
	return v
}

// Err returns err: that of a call whose value is not what the test is about.
func Err[T any](_ T, err error) error { return err }
