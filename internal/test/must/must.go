// Package must takes the two results of a call apart, for tests in which one of them is not in question.
package must

import "testing"

// Get returns the value of a call that must not fail: must.Get(os.Open(name))(t).
func Get[T any](value T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatalf("an error that must not be: %+v", err)
		}
		return value
	}
}

// Err returns the error of a call whose value does not matter: require.Error(t, must.Err(os.Open(name))).
func Err[T any](_ T, err error) error { return err }
