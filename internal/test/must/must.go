// Package must ends a test at the first error of what only prepares it:
//
//	svid := must.Get(spiffe.ParseSVID(chain, key))(t)
package must

import (
	"errors"

	"github.com/stretchr/testify/require"
)

// Get returns v, unless there was an error, at which the test ends.
func Get[V any](v V, err error) func(require.TestingT) V {
	return func(t require.TestingT) V {
		help(t)()
		require.NoError(t, err)
		return v
	}
}

// Two is Get for a call that returns two values beside its error.
func Two[V, W any](v V, w W, err error) func(require.TestingT) (V, W) {
	return func(t require.TestingT) (V, W) {
		help(t)()
		require.NoError(t, err)
		return v, w
	}
}

// As returns the error of type E in err, or ends the test, which says what it was about.
func As[E error](t require.TestingT, err error, about ...any) E {
	help(t)()
	e, ok := errors.AsType[E](err)
	require.True(t, ok, "%v: %T: %v", about, err, err)
	return e
}

// Do is Get for where no test is at hand: it panics.
func Do[V any](v V, err error) V {
	if err != nil {
		panic(err)
	}
	return v
}

// help returns the Helper of t, if it has one.
func help(t require.TestingT) func() {
	if t, ok := t.(interface{ Helper() }); ok {
		return t.Helper
	}
	return func() {}
}
