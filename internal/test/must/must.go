// Package must is for calls that a test needs to succeed: must.Get(os.ReadFile(name))(t) is the file, or the test ends.
package must

import (
	"fmt"
	"testing"
)

// Get returns the value of a call that may fail to the test t, which ends if the call failed.
func Get[T any](v T, err error) func(t testing.TB, message ...any) T {
	return func(t testing.TB, message ...any) T {
		t.Helper()
		check(t, err, message)
		return v
	}
}

// Get2 is [Get] for calls with two values.
func Get2[T, U any](v T, u U, err error) func(t testing.TB, message ...any) (T, U) {
	return func(t testing.TB, message ...any) (T, U) {
		t.Helper()
		check(t, err, message)
		return v, u
	}
}

// check ends the test if there is an error. The message is a text, or a format and what is in it.
func check(t testing.TB, err error, message []any) {
	if err == nil {
		return
	}
	t.Helper()
	text := ""
	if len(message) > 0 {
		text = ": " + fmt.Sprintf(fmt.Sprint(message[0]), message[1:]...)
	}
	t.Fatalf("unexpected error%s: %+v", text, err)
}
