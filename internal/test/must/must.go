// Package must takes what a test asks for out of what a call returns.
package must

import (
	"github.com/stretchr/testify/require"
)

// Get returns a function that returns v, or ends the test that it is given if err is not nil:
//
//	key := must.Get(pki.NewKey(pki.ECDSAP256))(t)
func Get[T any](v T, err error) func(require.TestingT) T {
	return func(t require.TestingT) T {
		if h, ok := t.(interface{ Helper() }); ok {
			h.Helper()
		}
		require.NoError(t, err)
		return v
	}
}

// ErrorOf returns the error of a call whose value nobody asks for.
func ErrorOf[T any](_ T, err error) error { return err }

// As returns a function that returns the error of type E in the tree of err, or ends the test that it is given.
func As[E error](err error) func(t require.TestingT, message ...any) E {
	return func(t require.TestingT, message ...any) E {
		if h, ok := t.(interface{ Helper() }); ok {
			h.Helper()
		}
		var e E
		require.ErrorAs(t, err, &e, message...)
		return e
	}
}
