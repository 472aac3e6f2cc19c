// Package must has results of calls that a test needs in order to go on.
package must

import "fmt"

// Get returns v, with which a test goes on. If err is not nil, it ends the test with a panic that has the line of the call.
func Get[T any](v T, err error) T {
	if err != nil {
		panic(fmt.Sprintf("must.Get: %v", err))
	}
	return v
}

// Err returns err: that of a call whose value is not what the test is about.
func Err[T any](_ T, err error) error { return err }
