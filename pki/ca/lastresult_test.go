package ca_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/pki/internal/lastresult"
)

type says struct{ err error }

func (s says) Err() error { return s.err }

func TestLastResult(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var r lastresult.Result
		full := errors.New("full")
		assert.NoError(t, r.Err())
		r.Note(nil)
		assert.NoError(t, r.Err())
		r.Note(full)
		assert.Equal(t, full, r.Err())
		time.Sleep(lastresult.Memory - 1)
		assert.Equal(t, full, r.Ask(nil))
		assert.NoError(t, r.Ask(says{}), "it says itself")
		time.Sleep(time.Nanosecond)
		assert.NoError(t, r.Err(), "so that it is tried again")
		assert.Equal(t, full, r.Ask(says{full}))
		r.Note(full)
		assert.Equal(t, full, r.Err())
		r.Note(nil)
		assert.NoError(t, r.Err())
	})
}
