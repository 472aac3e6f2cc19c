// Package must is for calls that a test needs to succeed: must.Get(os.ReadFile(name))(t) is the file, or the test ends.
package must

import "github.com/stretchr/testify/require"

// Get returns the value of a call that may fail to the test t, which ends if the call failed. The message is that of
// [require.NoError].
func Get[T any](v T, err error) func(t require.TestingT, message ...any) T {
	return func(t require.TestingT, message ...any) T {
		if h, ok := t.(helper); ok {
			h.Helper()
		}
		require.NoError(t, err, message...)
		return v
	}
}

// Get2 is [Get] for calls with two values.
func Get2[T, U any](v T, u U, err error) func(t require.TestingT, message ...any) (T, U) {
	return func(t require.TestingT, message ...any) (T, U) {
		if h, ok := t.(helper); ok {
			h.Helper()
		}
		require.NoError(t, err, message...)
		return v, u
	}
}

type helper interface{ Helper() }

// Err returns the error of a call with a value, for what a test requires of it.
func Err[T any](_ T, err error) error { return err }

// Err2 is [Err] for calls with two values.
func Err2[T, U any](_ T, _ U, err error) error { return err }
