package carpc_test

import (
	"errors"
	"math"
	"strconv"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/svidkit/svidkit/internal/carpc"
)

// A time to come back is never too early, and never one that a client takes for "do not come back".
func TestAddRetryInfo(t *testing.T) {
	t.Parallel()
	for after, want := range map[time.Duration]time.Duration{
		1:                          time.Millisecond,
		time.Millisecond:           2 * time.Millisecond,
		1500 * time.Millisecond:    1501 * time.Millisecond,
		time.Hour:                  time.Hour + time.Millisecond,
		24 * time.Hour:             24 * time.Hour,
		math.MaxInt64:              24 * time.Hour,
		math.MaxInt64 - 1000000:    24 * time.Hour,
		100 * 365 * 24 * time.Hour: 24 * time.Hour,
	} {
		e := connect.NewError(connect.CodeUnavailable, errors.New("x"))
		carpc.AddRetryInfo(e, after)
		assert.Equal(t, strconv.FormatInt(want.Milliseconds(), 10), e.Meta().Get("Grpc-Retry-Pushback-Ms"), after)
		require.Len(t, e.Details(), 1)
		assert.Equal(t, "google.rpc.RetryInfo", e.Details()[0].Type())
		b := e.Details()[0].Bytes()
		require.Equal(t, []byte{0x0a, byte(len(b) - 2)}, b[:2])
		var d durationpb.Duration
		require.NoError(t, proto.Unmarshal(b[2:], &d))
		require.NoError(t, d.CheckValid())
		assert.Equal(t, want, d.AsDuration(), after)
	}
	for _, after := range []time.Duration{0, -1, math.MinInt64} {
		e := connect.NewError(connect.CodeUnavailable, errors.New("x"))
		carpc.AddRetryInfo(e, after)
		assert.Empty(t, e.Meta())
		assert.Empty(t, e.Details())
	}
}
