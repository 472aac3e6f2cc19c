package internal_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/retry"
	"github.com/svidkit/svidkit/spiffe"
)

// says is an error with an advice of its own, and a cause.
type says struct {
	after time.Duration
	ok    bool
	cause error
}

func (says) Error() string                               { return "says" }
func (s says) Unwrap() error                             { return s.cause }
func (s says) Retryable() (after time.Duration, ok bool) { return s.after, s.ok }

func TestRetryAfter(t *testing.T) {
	t.Parallel()
	plain, soon, later, never := errors.New("plain"), says{after: 1, ok: true}, says{after: 2, ok: true}, says{}
	for _, c := range []struct {
		name   string
		err    error
		wait   time.Duration
		advice retry.Advice
	}{
		{"nil", nil, 0, retry.Unknown},
		{"says nothing", plain, 0, retry.Unknown},
		{"wraps nil", says{ok: true}, 0, retry.Again},
		{"not ready", spiffe.ErrNotReady, 0, retry.Again},
		{"deep", fmt.Errorf("a: %w", fmt.Errorf("b: %w", later)), 2, retry.Again},
		{"a refusal that is deep", fmt.Errorf("a: %w", fmt.Errorf("b: %w", never)), 0, retry.Never},
		{"less than no time", says{after: -1, ok: true}, 0, retry.Again},
		{"a wait before a refusal", fmt.Errorf("%w, %w", later, never), 2, retry.Never},
		{"a wait after a refusal", fmt.Errorf("%w, %w", never, later), 2, retry.Never},
		{"a refusal beside not ready", fmt.Errorf("%w: %w", spiffe.ErrNotReady, never), 0, retry.Never},
		{"a wait beside not ready", fmt.Errorf("%w: %w", spiffe.ErrNotReady, later), 2, retry.Again},
		{"the longest of two waits", errors.Join(soon, later), 2, retry.Again},
		{"in any order", errors.Join(later, soon), 2, retry.Again},
		{"nothing beside a wait", errors.Join(plain, later), 2, retry.Again},
		{"nothing beside a refusal", errors.Join(never, plain), 0, retry.Never},
		{"branches of branches", errors.Join(fmt.Errorf("%w: %w", plain, soon), fmt.Errorf("x: %w", errors.Join(plain, later))), 2, retry.Again},
		{"a judged refusal", says{after: 1, ok: true, cause: never}, 1, retry.Again},
		{"a judged wait", says{cause: later}, 0, retry.Never},
	} {
		wait, advice := retry.After(c.err)
		assert.Equal(t, c.wait, wait, c.name)
		assert.Equal(t, c.advice, advice, c.name)
	}
}
