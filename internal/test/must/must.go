// Package must is for calls that a test needs to succeed: must.Get(os.ReadFile(name))(t) is the file, or the test
// ends.
package must

import (
	"errors"
	"fmt"
	"strings"
)

// T is a test, or an assert.CollectT.
type T interface {
	Errorf(format string, args ...any)
	FailNow()
}

// Get returns the value of a call to a test, which ends if the call failed. The message is a text, or a format and its
// arguments.
func Get[V any](v V, err error) func(t T, message ...any) V {
	return func(t T, message ...any) V {
		helper(t)()
		check(t, err, message)
		return v
	}
}

// Get2 is [Get] for calls with two values.
func Get2[V, W any](v V, w W, err error) func(t T, message ...any) (V, W) {
	return func(t T, message ...any) (V, W) {
		helper(t)()
		check(t, err, message)
		return v, w
	}
}

// Do is [Get] where there is no test: it panics.
func Do[V any](v V, err error) V {
	if err != nil {
		panic(err)
	}
	return v
}

// Err returns the error of a call with a value that does not matter.
func Err[V any](_ V, err error) error { return err }

// Err2 is [Err] for calls with two values.
func Err2[V, W any](_ V, _ W, err error) error { return err }

// As returns the error of type E in err to a test, which ends if there is none.
func As[E error](err error) func(t T, message ...any) E {
	return func(t T, message ...any) E {
		helper(t)()
		e, ok := errors.AsType[E](err)
		if !ok {
			check(t, fmt.Errorf("no %T in: %w", e, err), message)
		}
		return e
	}
}

// Fail ends the test unless err is what each of wants says: an error that it wraps, or a text that is in its own.
func Fail(t T, err error, wants ...any) {
	helper(t)()
	if err == nil {
		t.Errorf("there is no error")
		t.FailNow()
	}
	for _, want := range wants {
		target, ok := want.(error)
		if ok && !errors.Is(err, target) || !ok && !strings.Contains(err.Error(), want.(string)) {
			t.Errorf("the error is not %q: %q", want, err)
			t.FailNow()
		}
	}
}

// check ends the test if there is an error.
func check(t T, err error, message []any) {
	if err == nil {
		return
	}
	helper(t)()
	text := ""
	if len(message) > 0 {
		text = ": " + fmt.Sprintf(fmt.Sprint(message[0]), message[1:]...)
	}
	t.Errorf("unexpected error%s: %+v", text, err)
	t.FailNow()
}

func helper(t T) func() {
	if h, ok := t.(interface{ Helper() }); ok {
		return h.Helper
	}
	return func() {}
}
