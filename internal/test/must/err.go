package must

import (
	"errors"
	"strings"
	"testing"
)

// Err returns the error of a call that has one other result.
func Err[T any](_ T, err error) error { return err }

// Fail ends the test unless err is what each of wants says: an error that it wraps, or a text that is in its own.
func Fail(t testing.TB, err error, wants ...any) {
	t.Helper()
	if err == nil {
		t.Fatal("there is no error")
	}
	for _, want := range wants {
		target, ok := want.(error)
		if ok && !errors.Is(err, target) || !ok && !strings.Contains(err.Error(), want.(string)) {
			t.Fatalf("the error is not %q: %q", want, err)
		}
	}
}
