// Package must takes what a test asks for out of what a call returns.
package must

import (
	"errors"
	"fmt"
)

// T is what a test function is given; assert.CollectT is one, too.
type T interface {
	Errorf(format string, args ...any)
	FailNow()
}

// Get returns a function that returns v, or ends the test that it is given if err is not nil:
//
//	key := must.Get(pki.NewKey(pki.ECDSAP256))(t)
func Get[V any](v V, err error) func(T) V {
	return func(t T) V {
		if err != nil {
			if h, ok := t.(helper); ok {
				h.Helper()
			}
			t.Errorf("unexpected error: %+v", err)
			t.FailNow()
		}
		return v
	}
}

// ErrorOf returns the error of a call whose value nobody asks for.
func ErrorOf[V any](_ V, err error) error { return err }

// As returns a function that returns the error of type E in the tree of err, or ends the test that it is given, with a message.
func As[E error](err error) func(t T, message ...any) E {
	return func(t T, message ...any) E {
		e, ok := errors.AsType[E](err)
		if !ok {
			if h, ok := t.(helper); ok {
				h.Helper()
			}
			t.Errorf("no %T in %v %s", e, err, fmt.Sprint(message...))
			t.FailNow()
		}
		return e
	}
}

type helper interface{ Helper() }
