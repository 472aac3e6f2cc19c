// Package must takes the value of a call that has to succeed.
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
