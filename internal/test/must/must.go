// Package must is for calls that have to succeed: must.Get(os.ReadFile(name))(t) is the file, or the test ends.
package must

import "fmt"

// T is what a test, and what waits for one, has.
type T interface {
	Errorf(format string, args ...any)
	FailNow()
}

// Get returns the value of a call that may fail to a test, which ends if the call has failed. A message, as of testify,
// goes with the error.
func Get[V any](v V, err error) func(t T, message ...any) V {
	return func(t T, message ...any) V {
		if err != nil {
			if h, ok := t.(interface{ Helper() }); ok {
				h.Helper()
			}
			fail(t, err, message)
		}
		return v
	}
}

// Get2 is [Get] for calls with two values.
func Get2[V, W any](v V, w W, err error) func(t T, message ...any) (V, W) {
	return func(t T, message ...any) (V, W) {
		if err != nil {
			if h, ok := t.(interface{ Helper() }); ok {
				h.Helper()
			}
			fail(t, err, message)
		}
		return v, w
	}
}

func fail(t T, err error, message []any) {
	if h, ok := t.(interface{ Helper() }); ok {
		h.Helper()
	}
	text := ""
	if len(message) > 0 {
		text = ": " + fmt.Sprint(message...)
		if format, ok := message[0].(string); ok {
			text = ": " + fmt.Sprintf(format, message[1:]...)
		}
	}
	t.Errorf("%v%s", err, text)
	t.FailNow()
}

// Err returns the error of a call with a value, for what a test requires of it.
func Err[V any](_ V, err error) error { return err }

// Err2 is [Err] for calls with two values.
func Err2[V, W any](_ V, _ W, err error) error { return err }
