package test_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/must"
)

// check requires that want is msg on the wire. The bytes are written by hand: a tag is the published field number times
// eight, plus 2 for what has a length and 0 for a number.
func check(t *testing.T, name string, msg proto.Message, want string) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		got := must.Get(proto.MarshalOptions{Deterministic: true}.Marshal(msg))(t)
		assert.Equal(t, want, string(got))
		back := msg.ProtoReflect().New().Interface()
		require.NoError(t, proto.Unmarshal([]byte(want), back))
		assert.True(t, proto.Equal(msg, back))
	})
}
