package caclient_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/caclient"
)

func TestKinds(t *testing.T) {
	t.Parallel()
	kinds := []error{caclient.ErrUnavailable, caclient.ErrInvalid, caclient.ErrUnauthenticated, caclient.ErrDenied, caclient.ErrBadAnswer, nil}
	for i, text := range []string{"unavailable: ", "invalid request: ", "not authenticated: ", "denied: ", "bad answer: ", ""} {
		cause := errors.New("cause")
		e := &caclient.Error{Op: "sign", Kind: kinds[i], RetryAfter: 3 * time.Second, Err: cause}
		assert.Equal(t, "caclient: sign: "+text+"cause", e.Error())
		assert.ErrorIs(t, e, cause)
		for _, other := range kinds[:5] {
			assert.Equal(t, other == kinds[i], errors.Is(e, other))
		}
		after, ok := e.Retryable()
		assert.Equal(t, i == 0, ok)
		if ok {
			assert.Equal(t, 3*time.Second, after)
		} else {
			assert.Zero(t, after)
		}
		e.MayPass = true
		after, ok = e.Retryable()
		assert.True(t, ok, "it says so itself")
		assert.Equal(t, 3*time.Second, after)
	}
}
