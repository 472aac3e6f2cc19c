package must

import "github.com/stretchr/testify/require"

// Err returns the error of a call that has one other result.
func Err[T any](_ T, err error) error { return err }

// Fail ends the test unless err is what each of wants says: an error that it wraps, or a text that is in its own.
func Fail(t require.TestingT, err error, wants ...any) {
	if h, ok := t.(helper); ok {
		h.Helper()
	}
	require.Error(t, err)
	for _, want := range wants {
		if target, ok := want.(error); ok {
			require.ErrorIs(t, err, target)
		} else {
			require.ErrorContains(t, err, want.(string))
		}
	}
}
