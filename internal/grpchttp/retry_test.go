package grpchttp_test

import (
	"context"
	"encoding/base64"
	"math"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/must"
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
				details := must.Get(base64.RawStdEncoding.DecodeString(h.Get("Grpc-Status-Details-Bin")))(t)
				assert.Equal(t, wantDetails(t, text, want), details)
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

// details is an encoded google.rpc.Status with the message and the details given.
func details(t testing.TB, message string, all ...*anypb.Any) []byte {
	b := []byte{0x08, byte(grpchttp.Unavailable)}
	if message != "" {
		b = protowire.AppendString(protowire.AppendTag(b, 2, protowire.BytesType), message)
	}
	for _, a := range all {
		v := must.Get(proto.Marshal(a))(t)
		b = protowire.AppendBytes(protowire.AppendTag(b, 3, protowire.BytesType), v)
	}
	return b
}

// wantDetails is what a server sends that has this message and wants its client back after this time.
func wantDetails(t testing.TB, message string, after time.Duration) []byte {
	return details(t, strings.ToValidUTF8(message, "\uFFFD"), retryInfo(t, durationpb.New(after)))
}

const retryInfoType = "type.googleapis.com/google.rpc.RetryInfo"

func retryInfo(t testing.TB, d *durationpb.Duration) *anypb.Any {
	v := must.Get(proto.Marshal(d))(t)
	return &anypb.Any{TypeUrl: retryInfoType, Value: protowire.AppendBytes([]byte{0x0a}, v)}
}

// What servers say of when to come back is read in both forms, and what is malformed or out of bounds says
// nothing.
func TestReadRetryAfter(t *testing.T) {
	t.Parallel()
	other := &anypb.Any{TypeUrl: "type.googleapis.com/google.rpc.DebugInfo", Value: []byte{0xff}}
	second := retryInfo(t, durationpb.New(time.Second))
	raw := func(value string) []byte {
		return details(t, "", &anypb.Any{TypeUrl: retryInfoType, Value: []byte(value)})
	}
	var send map[string]string
	c := dial(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/grpc")
		w.Header().Set("Grpc-Status", "14")
		for name, value := range send {
			w.Header().Set(name, value)
		}
	}))
	for name, test := range map[string]struct {
		details  []byte
		pushback string
		want     time.Duration
	}{
		"neither":                 {nil, "", 0},
		"pushback":                {nil, "1500", 1500 * time.Millisecond},
		"details":                 {details(t, "", second), "", time.Second},
		"details of an hour":      {details(t, "", retryInfo(t, durationpb.New(time.Hour))), "", time.Hour},
		"details first":           {details(t, "", second), "1500", time.Second},
		"after another":           {details(t, "", other, second), "", time.Second},
		"of two the first":        {details(t, "", second, retryInfo(t, durationpb.New(time.Hour))), "", time.Second},
		"none among them":         {details(t, "", other), "1500", 1500 * time.Millisecond},
		"another of that form":    {details(t, "", &anypb.Any{TypeUrl: other.TypeUrl, Value: second.Value}), "", 0},
		"do not come back":        {nil, "-1", 0},
		"not a number":            {nil, "soon", 0},
		"a long time":             {nil, "2147483647", math.MaxInt32 * time.Millisecond},
		"too long":                {nil, "2147483648", 0},
		"much too long":           {nil, "9999999999999", 0},
		"malformed":               {[]byte{0xff}, "", 0},
		"malformed, and pushback": {[]byte{0xff}, "1500", 1500 * time.Millisecond},
		"RetryInfo is malformed":  {raw("\xff"), "", 0},
		"so, and pushback":        {raw("\xff"), "250", 250 * time.Millisecond},
		"RetryInfo is empty":      {raw(""), "", 0},
		"its Duration malformed":  {raw("\x0a\x01\xff"), "", 0},
		"its Duration is cut":     {raw("\x0a\x01\x08"), "", 0},
		"negative":                {details(t, "", retryInfo(t, durationpb.New(-time.Hour))), "", 0},
		"nanoseconds overflow":    {details(t, "", retryInfo(t, &durationpb.Duration{Nanos: 1e9})), "", 0},
		"seconds overflow":        {details(t, "", retryInfo(t, &durationpb.Duration{Seconds: 1 << 40})), "7", 7 * time.Millisecond},
		"the most seconds":        {raw("\x0a\x0a\x08\xff\xff\xff\xff\xff\xff\xff\xff\x7f"), "", 0},
	} {
		for _, encoding := range []*base64.Encoding{base64.RawStdEncoding, base64.StdEncoding} {
			send = map[string]string{"Grpc-Status-Details-Bin": encoding.EncodeToString(test.details), "Grpc-Retry-Pushback-Ms": test.pushback}
			_, err := c.Unary(t.Context(), "/S/M", nil, nil)
			assert.Equal(t, &grpchttp.Error{Code: grpchttp.Unavailable, Remote: true, RetryAfter: test.want}, err, name)
		}
	}
	send = map[string]string{"Grpc-Status-Details-Bin": "%%%", "Grpc-Retry-Pushback-Ms": "1500"}
	_, err := c.Unary(t.Context(), "/S/M", nil, nil)
	assert.Equal(t, 1500*time.Millisecond, asError(t, err).RetryAfter, "details that are not base64")
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
