// Package must takes the two results of a call apart, for tests in which one of them is not in question.
package must

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Get returns the value of a call that must not fail: must.Get(os.Open(name))(t).
func Get[T any](value T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		require.NoError(t, err)
		return value
	}
}

// Err returns the error of a call whose value does not matter: require.Error(t, must.Err(os.Open(name))).
func Err[T any](_ T, err error) error { return err }
