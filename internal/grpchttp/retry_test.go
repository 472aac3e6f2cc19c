package grpchttp_test

import (
	"context"
	"encoding/base64"
	"math"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/svidkit/svidkit/internal/grpchttp"
)

// A time to come back is never too early, and never one that a client takes for "do not come back".
func TestRetryAfter(t *testing.T) {
	t.Parallel()
	var status *grpchttp.Error
	before := 0
	c := dial(t, handler(map[string]grpchttp.Method{"/S/M": func(_ context.Context, c *grpchttp.Call) error {
		for range before {
			if err := c.Send(nil); err != nil {
				return err
			}
		}
		return status
	}}))
	call := func() (*grpchttp.Error, http.Header) {
		s, err := c.Stream(t.Context(), "/S/M", nil, nil)
		for err == nil {
			_, err = s.Receive()
		}
		if before == 0 {
			return asError(t, err), s.Header()
		}
		return asError(t, err), s.Trailer()
	}
	for before = range 2 {
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
			for _, text := range []string{"later", "", "größer\xff"} {
				status = &grpchttp.Error{Code: grpchttp.Unavailable, Message: text, RetryAfter: after}
				e, h := call()
				assert.Equal(t, &grpchttp.Error{Code: grpchttp.Unavailable, Message: text, Remote: true, RetryAfter: want}, e)
				assert.Equal(t, strconv.FormatInt(want.Milliseconds(), 10), h.Get("Grpc-Retry-Pushback-Ms"))
				details, err := base64.RawStdEncoding.DecodeString(h.Get("Grpc-Status-Details-Bin"))
				require.NoError(t, err)
				require.True(t, len(details) > 2 && details[0] == 0x08 && details[1] == byte(grpchttp.Unavailable), "%x", details)
			}
		}
		for _, after := range []time.Duration{0, -1, math.MinInt64} {
			status = &grpchttp.Error{Code: grpchttp.Unavailable, Message: "x", RetryAfter: after}
			e, h := call()
			assert.Zero(t, e.RetryAfter)
			assert.Empty(t, h.Get("Grpc-Retry-Pushback-Ms"))
			assert.Empty(t, h.Get("Grpc-Status-Details-Bin"))
		}
	}
}

// details is an encoded google.rpc.Status with the details given.
func details(t testing.TB, all ...*anypb.Any) string {
	b := []byte{0x08, 14}
	for _, a := range all {
		v, err := proto.Marshal(a)
		require.NoError(t, err)
		b = protowire.AppendBytes(protowire.AppendTag(b, 3, protowire.BytesType), v)
	}
	return base64.StdEncoding.EncodeToString(b)
}

func retryInfo(t testing.TB, d *durationpb.Duration) *anypb.Any {
	v, err := proto.Marshal(d)
	require.NoError(t, err)
	return &anypb.Any{TypeUrl: "type.googleapis.com/google.rpc.RetryInfo", Value: protowire.AppendBytes([]byte{0x0a}, v)}
}

// What servers say of when to come back is read in both forms, and nonsense says nothing.
func TestReadRetryAfter(t *testing.T) {
	t.Parallel()
	other := &anypb.Any{TypeUrl: "type.googleapis.com/google.rpc.DebugInfo", Value: []byte{0xff}}
	second := retryInfo(t, durationpb.New(time.Second))
	for name, test := range map[string]struct {
		details, pushback string
		want              time.Duration
	}{
		"neither":              {"", "", 0},
		"pushback":             {"", "1500", 1500 * time.Millisecond},
		"details":              {details(t, second), "", time.Second},
		"details first":        {details(t, second), "1500", time.Second},
		"after another":        {details(t, other, second), "", time.Second},
		"of two the first":     {details(t, second, retryInfo(t, durationpb.New(time.Hour))), "", time.Second},
		"none among them":      {details(t, other), "1500", 1500 * time.Millisecond},
		"do not come back":     {"", "-1", 0},
		"not a number":         {"", "soon", 0},
		"a long time":          {"", "2147483647", math.MaxInt32 * time.Millisecond},
		"too long":             {"", "2147483648", 0},
		"not base64":           {"%%%", "1500", 1500 * time.Millisecond},
		"malformed":            {"/w==", "1500", 1500 * time.Millisecond},
		"negative":             {details(t, retryInfo(t, durationpb.New(-time.Second))), "", 0},
		"nanoseconds overflow": {details(t, retryInfo(t, &durationpb.Duration{Nanos: 1e9})), "", 0},
		"seconds overflow":     {details(t, retryInfo(t, &durationpb.Duration{Seconds: 1 << 40})), "7", 7 * time.Millisecond},
	} {
		h := http.Header{}
		h.Set("Grpc-Status-Details-Bin", test.details)
		h.Set("Grpc-Retry-Pushback-Ms", test.pushback)
		assert.Equal(t, test.want, grpchttp.RetryAfter(h), name)
	}
}

// FuzzRetryInfo compares with the generated reader of a Duration.
func FuzzRetryInfo(f *testing.F) {
	for _, d := range []time.Duration{0, 1, time.Second, -time.Second, time.Hour + 1, math.MaxInt64} {
		f.Add([]byte(retryInfo(f, durationpb.New(d)).Value))
	}
	f.Add([]byte("\x0a\x02\x08\x01\x12\x00"))
	f.Add([]byte("\x0a\x02\x08\x01\x0a\x02\x10\x01"))
	f.Add([]byte("\x0a\x0b\x10\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01")) // more nanoseconds than fit into their type
	f.Add([]byte("\x0b\x0c"))
	f.Add([]byte("\x0a\x05\x0d\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		got := grpchttp.ReadRetryInfo(b)
		require.GreaterOrEqual(t, got, time.Duration(0))
		require.LessOrEqual(t, got, (math.MaxInt32+1)*time.Second)
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 || num != 1 || typ != protowire.BytesType {
			return
		}
		v, m := protowire.ConsumeBytes(b[n:])
		if m != len(b)-n { // only a field 1, and whole
			return
		}
		var d durationpb.Duration
		if proto.Unmarshal(v, &d) == nil && d.IsValid() && d.GetSeconds() >= 0 && d.GetSeconds() <= math.MaxInt32 && d.GetNanos() >= 0 {
			require.Equal(t, d.AsDuration(), got)
		}
	})
}
